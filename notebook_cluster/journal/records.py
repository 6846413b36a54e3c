"""What the training rounds write down, one struct for each kind of decision.

The leader of the rounds makes a record with every decision that a restarted coordinator has to know; from the records
of a job, oldest first, it gets the job back.
"""

import msgspec

from notebook_cluster.protocol.rounds import Commit, Member, OuterSettings, Seal, Slice
from notebook_cluster.protocol.runs import Register


class RegisterRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="register"):
    """A node has registered for the job."""

    job: str
    node: str
    incarnation: int
    register: Register


class LaterRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="later"):
    """A node has registered for a later run of the job, and waits for it."""

    job: str
    node: str
    incarnation: int
    register: Register


class BaseRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="base"):
    """The job goes on from this state, whatever was committed before."""

    job: str
    cell: int
    round: int
    state_hash: str
    attempt_floor: int
    settings: Register


class CellRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="cell"):
    """The job goes on in a new cell from the state that it has."""

    job: str
    settings: Register


class SealRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="seal"):
    """An attempt of a round was sealed."""

    job: str
    seal: Seal


class CommitRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="commit", omit_defaults=True):
    """A round was committed: with ``members`` (whether their work counts or not) and ``slices`` of its seal."""

    job: str
    commit: Commit
    members: list[Member]
    slices: list[Slice]
    slice_hashes: list[str]
    base_hash: str
    outer: OuterSettings
    bytes_sent: int
    bytes_data_parallel: int
    hash_mismatches: int
    time: float = 0.0
    """Unix time; 0: it was not noted."""
    waits: dict[str, float] = {}
    """Member -> seconds from its arrival to that of the last one."""


class VoidRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="void"):
    """The job is back at the state before ``round``."""

    job: str
    round: int
    state_hash: str
    attempt_floor: int


class StopRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="stop"):
    """The job goes on no more in this cell."""

    job: str
    cell: int
    reason: str


class EndedRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="ended"):
    """Those who took part in the run have finished it."""

    job: str


Record = (
    RegisterRecord
    | LaterRecord
    | BaseRecord
    | CellRecord
    | SealRecord
    | CommitRecord
    | VoidRecord
    | StopRecord
    | EndedRecord
)
