"""View -> coordinator: what has happened in a cluster since it was started, for a report."""

from notebook_cluster.protocol.state import CellView
from notebook_cluster.protocol.wire import Message


class GetHistory(Message, frozen=True):
    """Reply value: RunHistory."""


class RoundView(Message, frozen=True):
    """One committed round of a job."""

    job: str
    round: int
    time: float
    """Seconds since the epoch."""
    members: list[str]
    """Whose contributions are in it."""
    waits: dict[str, float] = {}
    """Node -> seconds from its arrival to that of the last node; the last one has 0.0. Empty: it is not known."""
    bytes_sent: int = 0
    """By all nodes, in all rounds of the job so far."""
    hash_mismatches: int = 0
    """In all rounds so far."""
    state_hash: str = ""


class CheckpointView(Message, frozen=True):
    name: str
    job: str
    round: int
    path: str
    time: float


class PeerVersions(Message, frozen=True):
    """What a connected peer said about itself."""

    peer: str
    python: str
    platform: str
    packages: dict[str, str]


class RunHistory(Message, frozen=True):
    """Lists are in order of time."""

    rounds: list[RoundView]
    """At most 2,000; of two neighbours that are long past the one with the longer wait stays."""
    rounds_seen: int
    checkpoints: list[CheckpointView]
    cells: list[CellView]
    """The last 500."""
    cells_seen: int
    peers: list[PeerVersions]
