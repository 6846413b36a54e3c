"""What happens to the training jobs, and what the coordinator is asked to do: events and effects of :mod:`.machine`."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from notebook_cluster.journal.records import Record
from notebook_cluster.protocol.wire import Message


class FromMember(msgspec.Struct, frozen=True):
    node: str
    incarnation: int
    message: Message


class CellBegan(msgspec.Struct, frozen=True):
    """The cell runs on ``nodes``; feed it before what they say in it."""

    cell: int
    nodes: tuple[str, ...]


class NodeJoinedCell(msgspec.Struct, frozen=True):
    cell: int
    node: str


class CellStopping(msgspec.Struct, frozen=True):
    """A Stop came for the cell: each node leaves it at the end of its step, and no further round begins in it."""

    cell: int


class CellLeft(msgspec.Struct, frozen=True):
    """The cell ended on ``node``: ``ok``, ``error``, ``interrupted`` ..."""

    cell: int
    node: str
    status: str


class MemberLost(msgspec.Struct, frozen=True):
    """A node's process ended (``gone``), or its peer's link is lost and it may come back with what it holds."""

    node: str
    incarnation: int
    reason: str
    gone: bool = False


class MemberUp(msgspec.Struct, frozen=True):
    """A node is in: new, restarted (higher incarnation), or back (same incarnation)."""

    node: str
    incarnation: int
    rank: int


class RanksChanged(msgspec.Struct, frozen=True):
    ranks: dict[str, int]


class HomeNodes(msgspec.Struct, frozen=True):
    """Nodes on the notebook's own machine: preferred writers of checkpoints."""

    nodes: tuple[str, ...]


class SaveRequested(msgspec.Struct, frozen=True):
    """A view wants a checkpoint of ``job`` (empty: the only one). Answered by SaveAnswer with the same ``token``."""

    name: str
    job: str
    token: int


class Tick(msgspec.Struct, frozen=True):
    now: float
    """Monotonic seconds in which this process ran; a few times a second."""
    silent: dict[str, tuple[float, str]] = {}
    """Node -> (seconds without a sign of progress, why); the others were heard a moment ago."""


class LeaderRestarted(msgspec.Struct, frozen=True):
    """First event after a restart: the records of Log effects, oldest first, which are looked at once, and the nodes
    (name, incarnation) of the roster in rank order, which count as up until MemberLost. ``tickets`` is above every
    ticket that was ever given: else parts of a checkpoint ordered before the restart would get into one of now.
    ``cell`` runs on ``running`` (0: unknown or none). ``attempts`` is at least as high as every attempt that was ever
    used, also by a SEAL that is in no record any more."""

    records: Iterable[Record]
    nodes: tuple[tuple[str, int], ...]
    now: float
    tickets: int
    cell: int = 0
    running: tuple[str, ...] = ()
    attempts: int = 0


Event = (
    FromMember
    | CellBegan
    | NodeJoinedCell
    | CellLeft
    | MemberLost
    | MemberUp
    | RanksChanged
    | HomeNodes
    | SaveRequested
    | Tick
    | LeaderRestarted
)


# ---- effects -------------------------------------------------------------------------------------------------


class Log(msgspec.Struct, frozen=True):
    """Write ``record`` down before doing any later effect. ``durable``: it survives also a machine that loses power,
    else the death of this process."""

    record: Record
    durable: bool = True


class Send(msgspec.Struct, frozen=True):
    node: str
    message: Message


class Tell(msgspec.Struct, frozen=True):
    """One line for people. ``in_cell``: also below the cell that trains."""

    level: Literal["info", "warning", "error"]
    text: str
    in_cell: bool = False


class SaveAnswer(msgspec.Struct, frozen=True):
    """To SaveRequested: the checkpoint's path, or a one-line error."""

    token: int
    path: str = ""
    error: str = ""


class Relay(msgspec.Struct, frozen=True):
    """``waiting`` gets nothing from ``waited_for``: their frames may go over the links."""

    waiting: str
    waited_for: str


Effect = Log | Send | Tell | SaveAnswer | Relay
