"""What happened to a cluster, as it is written to the journal. State changes through these and nothing else."""

from typing import Any, Literal

from notebook_cluster.protocol.kept import TakenState
from notebook_cluster.protocol.node import NodeHello
from notebook_cluster.protocol.wire import Message

CellStatus = Literal["queued", "running", "ok", "error", "interrupted"]
NodeCellStatus = Literal["queued", "replaying", "running", "ok", "error", "interrupted", "lost", "cancelled"]


class ClusterStarted(Message, frozen=True):
    """A coordinator began (again): ``epoch`` is one more than that of the one before."""

    cluster: str
    cluster_id: str
    epoch: int
    directory: str
    time: float


class PeerAdded(Message, frozen=True):
    """The cluster uses this peer from now on."""

    name: str
    key: str
    address: str
    """``tcp://HOST:PORT`` of the link."""
    found_by: Literal["mdns", "typed", "local", "remembered", "dialled"]
    pid: int | None = None
    """The process of a private agent that this cluster started."""
    pinned: bool = False
    """It is used because it was paired: when its key leaves the trust store, it is used no more."""


class PeerDropped(Message, frozen=True):
    """The cluster does not use this peer any more: trust in it was removed."""

    name: str
    reason: str


class DoorOpened(Message, frozen=True):
    """Peers may dial this cluster: the TCP ports of its reception and of its pairing socket, for this whole run."""

    reception: int
    pairing: int


class LaunchOrdered(Message, frozen=True):
    """An engine is asked for hosts; ``key`` is the launch's public one, and ``on`` as in StartLaunch."""

    launch: str
    on: str
    hosts: int
    key: str
    folder: str
    """Where the launch's key and logs are."""
    nodes_per_host: int = 0
    """0: as many as a host has accelerators."""


class LaunchAccepted(Message, frozen=True):
    """``handle``: what the engine calls it."""

    launch: str
    handle: str


class HostEnlisted(Message, frozen=True):
    """An agent with ``key`` takes this place of the launch, in the stead of one that had it."""

    launch: str
    place: int
    start: int
    key: str
    name: str


class HostLeft(Message, frozen=True):
    """Nobody has this place any more; ``given_up``: nor will anybody."""

    launch: str
    place: int
    given_up: bool = False


class LaunchEnded(Message, frozen=True):
    launch: str
    reason: str


class PeerDescribed(Message, frozen=True):
    name: str
    machine: str
    hosts: list[str]
    devices: list[tuple[str, str, int, bool]]
    """(id, name, memory bytes, unified)."""
    portable: bool = False
    """It has a battery."""


class NodeAdded(Message, frozen=True):
    node: str
    peer: str
    device: str
    directory: str = ""


class NodeStarting(Message, frozen=True):
    """A kernel was ordered: a new incarnation."""

    node: str
    incarnation: int
    all_cells: bool = False
    """It runs the earlier cells that its predecessors did without."""


class NodeUp(Message, frozen=True):
    """The kernel's runtime answered: the node joins the roster."""

    node: str
    incarnation: int
    device: str
    hello: NodeHello


class NodeSettled(Message, frozen=True):
    """The node has replayed the cells that it missed."""

    node: str
    incarnation: int


class NodeDown(Message, frozen=True):
    """The node left the roster. ``dead``: its process is gone; else only its peer's link is."""

    node: str
    incarnation: int
    dead: bool
    reason: str
    log_tail: list[str] = []


class NodeReturned(Message, frozen=True):
    """Its peer came back, and so did the node, with everything it held."""

    node: str
    incarnation: int


LeftOutWhy = Literal["died", "skipped", "stopped", ""]
"""Its replay ended the kernel, or a person skipped or stopped it; empty: it was run after all."""


class ReplayLeftOut(Message, frozen=True):
    """The node does without an earlier cell: what that leaves behind is not there. So do its next kernels, unless it
    was Stop that ended the replay."""

    node: str
    incarnation: int
    cell: int
    why: LeftOutWhy


class NodeRemoved(Message, frozen=True):
    node: str
    reason: str


class StatesTaken(Message, frozen=True):
    """Jobs go on from what a cluster before this one has left."""

    states: list[TakenState]


class CellSubmitted(Message, frozen=True):
    cell: int
    source: str
    targets: list[str]
    """Empty: every node, also one that joins while it runs."""
    replay: bool
    user_expressions: dict[str, str] = {}
    notebook_names: list[str] = []
    canary: str = ""
    """The node that runs it first and alone; empty: all at once."""


class CellStarted(Message, frozen=True):
    cell: int
    nodes: list[str]
    generation: int
    time: float


class CellWidened(Message, frozen=True):
    """The canary of the running cell has ended; these nodes run it now (none when it failed)."""

    cell: int
    nodes: list[str]
    generation: int


class CellJoined(Message, frozen=True):
    """A node that came later runs the running cell too."""

    cell: int
    node: str


class CellNodeEnded(Message, frozen=True):
    cell: int
    node: str
    status: NodeCellStatus
    error_name: str = ""
    error_value: str = ""
    reason: str = ""
    log_tail: list[str] = []
    user_expressions: dict[str, Any] = {}


class CellNodeReplied(Message, frozen=True):
    """The kernel of a node has sent its execute_reply; the last that it says of the cell may still come, and then
    CellNodeEnded follows."""

    cell: int
    node: str
    incarnation: int
    reply: dict[str, Any]
    """Of its content: status, ename, evalue, and the user expressions but for the value that goes to views."""


class CellNodeReturned(Message, frozen=True):
    """A node that was lost while it ran the cell is back and still runs it."""

    cell: int
    node: str


class CellFinished(Message, frozen=True):
    cell: int
    status: CellStatus
    time: float


class Stopped(Message, frozen=True):
    reason: str
    time: float


class HandedOver(Message, frozen=True):
    """The cluster goes on from elsewhere: ``to`` for people, ``token`` of the hand over."""

    to: str
    token: str
    time: float


Event = (
    ClusterStarted
    | PeerAdded
    | PeerDropped
    | PeerDescribed
    | DoorOpened
    | LaunchOrdered
    | LaunchAccepted
    | HostEnlisted
    | HostLeft
    | LaunchEnded
    | NodeAdded
    | NodeStarting
    | NodeUp
    | NodeSettled
    | NodeDown
    | NodeReturned
    | ReplayLeftOut
    | NodeRemoved
    | StatesTaken
    | CellSubmitted
    | CellStarted
    | CellWidened
    | CellJoined
    | CellNodeReplied
    | CellNodeEnded
    | CellNodeReturned
    | CellFinished
    | Stopped
    | HandedOver
)

DURABLE = (
    ClusterStarted, PeerAdded, PeerDropped, DoorOpened, LaunchOrdered, LaunchAccepted, HostEnlisted, HostLeft,
    LaunchEnded, NodeAdded, NodeStarting, NodeUp, NodeDown, NodeReturned, NodeRemoved, StatesTaken, Stopped, HandedOver,
)  # fmt: skip
"""Events about membership: fsynced before anybody is told."""
