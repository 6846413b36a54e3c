"""What views show: plain data, complete in itself. The coordinator sends it whole, at most 4 times a second."""

from collections.abc import Iterable, Mapping
from typing import Literal

from notebook_cluster.protocol.launches import LaunchView
from notebook_cluster.protocol.wire import Message

NodeCondition = Literal[
    "starting", "ok", "suspect", "lost", "asleep", "dead", "replaying", "rejoining", "refused", "stopping"
]
"""``rejoining``: what ``replaying`` was called in what older runs left."""
MemoryKind = Literal["VRAM", "RAM", "unified"]
GONE: tuple[NodeCondition, ...] = ("lost", "dead", "asleep")
"""Conditions of nodes whose last numbers are those of a moment that is over."""
PeerCondition = Literal["found", "connecting", "connected", "suspect", "lost", "asleep", "untrusted", "refused"]


class NodeView(Message, frozen=True):
    """One node. ``rank`` is None while it is not in the roster."""

    name: str
    rank: int | None
    peer: str
    device: str
    device_name: str
    incarnation: int
    condition: NodeCondition
    reason: str = ""
    log_tail: list[str] = []
    busy: bool = False
    memory_kind: MemoryKind = "RAM"
    memory_used: int = 0
    """Bytes this node uses (VRAM where the device is an accelerator, else resident memory)."""
    memory_peak: int = 0
    memory_total: int = 0
    cpu: float = 0.0
    """Processors that its process keeps busy."""
    load: float | None = None
    """Of its device, 0 to 1, by whoever uses it."""
    temperature: float | None = None
    """Of its device, degrees Celsius."""
    step: int | None = None
    loss: float | None = None
    scalars: dict[str, float] = {}
    samples_per_s: float | None = None
    last_round: int | None = None
    round_wait: float | None = None
    """Seconds this node waited in its last round."""
    checkpoint: str = ""
    """``digits at round 12, step 1,200`` (of this node), or empty."""
    checkpoint_time: float | None = None
    waiting: str = ""
    threads: int = 0
    """That libraries take on its processor; 0: not known yet."""
    threads_chosen: bool = False
    """By the user; otherwise they are its share of the machine's cores."""
    replaying: str = ""
    """``replaying cell 2 of 3, 40 s``: it runs earlier cells before it joins the running one; or empty."""
    left_out: str = ""
    """``without cell 2, which was skipped: ...``, with the way out: earlier cells that it did not run; or empty."""
    epoch: int = 0
    """Of the ``nc.shard`` loop in which it trains, from 1; 0: none is known."""
    epoch_share: float | None = None
    """How much of its part of that epoch it has had, 0 to 1."""
    of_steps: int | None = None
    """How many steps its loop is going to take; None: it does not say."""
    step_cell: int = 0
    """The cell in which it was at ``step``; 0: not known."""
    place: int | None = None
    """In the order of joining, from 0; it stays the same when others go or come back. None: not known (kept before)."""
    failed: str = ""
    """What its kernel has failed of in the newest cell: ``cell 7: ValueError: no data``; or empty."""


def at_work(nodes: Iterable[NodeView], statuses: Mapping[str, str]) -> list[NodeView]:
    """``nodes`` but those that are gone, or have failed or were lost in a cell with these ``statuses`` (as
    :attr:`CellView.nodes`): their last numbers are no news. All where none is left."""
    every = list(nodes)
    over = ("error", "lost")
    return [node for node in every if statuses.get(node.name) not in over and node.condition not in GONE] or every


def by_rank(nodes: Iterable[NodeView]) -> list[NodeView]:
    """In the order in which people see them: by rank, behind them those without one, by name."""
    return sorted(nodes, key=lambda node: (node.rank is None, node.rank or 0, node.name))


class PeerView(Message, frozen=True):
    """One machine that this cluster uses, or could."""

    name: str
    key: str
    address: str
    condition: PeerCondition
    found_by: Literal["mdns", "typed", "local", "remembered", "dialled"]
    """How its address is known. ``dialled``: it connected to this cluster (``share --dial``, or chose it)."""
    trusted: bool
    device: str = ""
    """Short text: ``NVIDIA RTX 4070``, ``Apple M2``, ``cpu``."""
    reason: str = ""
    """Why it cannot be added, or why it was lost."""
    round_trip_ms: float | None = None
    """Smoothed mean."""
    jitter_ms: float | None = None
    """Smoothed mean deviation of the round trip (RFC 6298, RTTVAR)."""
    pairing: bool = False
    """A code is open there: it can be added with ``--code``."""
    slept: float | None = None
    """Seconds of its last sleep."""
    battery: float | None = None
    """Charge in percent; None: it has no battery, or does not say."""
    plugged: bool = True
    """On mains."""
    kept: list[str] = []
    """What it keeps of trainings that ended without being asked to, a line each, the newest first."""


class RoundWait(Message, frozen=True):
    """For whom a round was waited."""

    round: int
    node: str
    """The last one to arrive."""
    seconds: float
    """How long the first one waited for it."""
    time: float = 0.0
    """When the round was committed, seconds since the epoch."""


class JobView(Message, frozen=True):
    """One model that is trained."""

    name: str
    strategy: str
    round: int
    attempt: int
    phase: str
    members: list[str]
    waiting_for: list[str] = []
    parameters: int = 0
    bytes_sent: int = 0
    """By all nodes, in rounds so far."""
    bytes_data_parallel: int = 0
    """What an all-reduce of float32 gradients at each step would have sent for the same steps."""
    hash_mismatches: int = 0
    state_hash: str = ""
    waits: list[RoundWait] = []
    """Of the last rounds, oldest first."""
    loss: float | None = None
    """Of the global model, as it was measured last; None: nobody has measured it."""
    loss_round: int | None = None
    """The round after which it was measured."""
    cell: int = 0
    """In which it is trained, or was trained last; 0: in none."""
    settings: dict[str, str] = {}
    """With what it is trained, as people read it: ``codec``, ``every``, ``outer_lr`` ... Empty: kept before."""


class CellView(Message, frozen=True):
    """One cell."""

    id: int
    source: str
    """First 200 characters; in a RunHistory the whole of the newest ones, as far as there is room."""
    status: Literal["queued", "running", "ok", "error", "interrupted"]
    nodes: dict[str, str]
    """Node -> ``queued|replaying|running|ok|error|interrupted|lost``."""
    started: float = 0.0
    ended: float | None = None
    more: int = 0
    """Characters of the source beyond those."""
    errors: dict[str, str] = {}
    """Node -> ``NameError: name 'x' is not defined``, or why it was lost; at most 160 characters."""


class EventView(Message, frozen=True):
    """One line of what happened; ``time`` is Unix time."""

    time: float
    level: Literal["info", "warning", "error"]
    text: str


class ClusterView(Message, frozen=True):
    """Everything a panel needs except the series."""

    name: str
    epoch: int
    generation: int
    started: float
    now: float
    nodes: list[NodeView]
    peers: list[PeerView]
    jobs: list[JobView]
    """First what is trained now, or was trained last."""
    cell: CellView | None
    queued: int
    events: list[EventView]
    """The last 100, oldest first."""
    directory: str
    run_log: str
    invitation: str = ""
    """``HOST:PORT CODE`` while peers may join this cluster with a code, else empty."""
    kernels: dict[str, float] = {}
    """Id of a Jupyter kernel whose notebook has attached to this cluster -> when it did last (Unix time). The newest
    cluster of a kernel is the one that its notebook uses."""
    launches: list[LaunchView] = []
    """Oldest first; of those that ended the last ones."""
    head: str = ""
    """The peer from where it is led; empty: from the owner's machine."""


class Series(Message, frozen=True):
    """One curve. ``name``: ``loss``, ``memory`` (bytes) or a reported scalar. At most 2,000 points, thinned.

    A curve is that of a node, or that of the global model of a training job; then ``node`` is empty. The loss that
    ``sync.step`` is told has a job as well, and a run of it.
    """

    node: str
    name: str
    step: list[int]
    time: list[float]
    value: list[float]
    seen: int = 0
    """How many measured points these stand for; 0: each for itself."""
    job: str = ""
    run: int = 0
    """Of the job: a larger number was begun later (:mod:`.runs`); 0: not of a run, or of a cluster of before."""


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
