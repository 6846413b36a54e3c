"""Coordinator <-> node runtime (the background thread inside a kernel), except training: see :mod:`.rounds`.

On the hop between kernel and agent (ipc, DEALER -> ROUTER) a message is one frame: the encoded struct.
"""

from typing import Literal

from notebook_cluster.protocol import decisions, interaction, measuring, rounds, runs, transfers
from notebook_cluster.protocol.kept import TakenState
from notebook_cluster.protocol.wire import Message


class NodeHello(Message, frozen=True):
    """Node, once its runtime is up: how other nodes reach its mesh socket."""

    node: str
    incarnation: int
    pid: int
    mesh_key: str
    """CURVE public key, Z85 text of 40 characters, made anew by each kernel."""
    mesh_port: int
    mesh_ipc: str
    """ipc:// endpoint in a 0700 folder for nodes of the same peer; empty where the OS has no ipc."""
    master_port: int
    """A TCP port that was free on this machine: MASTER_PORT for torch when this node has rank 0."""


class NodeAddress(Message, frozen=True):
    """One row of the roster."""

    name: str
    incarnation: int
    rank: int
    local_rank: int
    peer: str
    machine: str
    device: str
    hosts: list[str]
    mesh_key: str
    mesh_port: int
    mesh_ipc: str
    master_port: int


class Roster(Message, frozen=True):
    """Coordinator: who is in, after each change of membership. Ranks are compact, ordered by join."""

    cluster: str
    generation: int
    nodes: list[NodeAddress]
    cluster_id: str = ""
    """With ``epoch``, that of the coordinator, written beside what is kept: whose training it is."""
    epoch: int = 0
    taken: list[TakenState] = []
    """What the cluster has taken over from one before it."""


class NodeLost(Message, frozen=True):
    """Coordinator, in the generation in which ``node`` left: raises PeerLost in collectives that wait for it."""

    node: str
    incarnation: int
    reason: str


class CellDone(Message, frozen=True):
    """Coordinator, to nodes still running cell ``cell``: ``node`` finished it, so it will answer no collective."""

    cell: int
    node: str
    status: Literal["ok", "error", "interrupted", "lost"]
    reason: str = ""
    """``raised ValueError: ...`` for an error: the cause that PeerLost names."""


class InterruptCell(Message, frozen=True):
    """Coordinator: a Stop. The runtime interrupts the main thread when it is inside ``cell``, and keeps the cell from
    beginning when it is not there yet: a SIGINT from outside is lost in between. Answered by InterruptSeen."""

    cell: int
    sent: bool = False
    """By the agent, which has sent the SIGINT itself: only know of it; there is no answer."""


class InterruptSeen(Message, frozen=True):
    """Node: InterruptCell has come."""

    cell: int


class Unreachable(Message, frozen=True):
    """Node: no connection to the mesh socket of ``node`` comes about. The coordinator orders a relay."""

    node: str
    incarnation: int
    endpoint: str


class UseRelay(Message, frozen=True):
    """Coordinator: mesh frames to ``node`` go over the links from now on, as RelayFrame."""

    node: str
    incarnation: int


class RelayFrame(Message, frozen=True):
    """One mesh frame over the links. From the sender ``node`` is the receiver; the coordinator puts the sender there,
    as it knows it from the link, before it passes the frame on."""

    node: str
    incarnation: int
    """Of ``node``."""
    header: bytes
    payload: bytes
    position: int = 0
    """Bytes, headers included, that the sender has given to the relay for this receiver, this frame with them."""


class RelayTaken(Message, frozen=True):
    """Receiver, then the coordinator to the sender (``node`` as in RelayFrame): everything up to the frame with the
    position ``total`` was taken; the sender keeps only a few MiB more than that on the way."""

    node: str
    incarnation: int
    total: int


class KeepCheckpoint(Message, frozen=True):
    """Agent, before it ends the kernel: save the last committed state of the training jobs here. Answered by Kept."""

    reason: str
    jobs: list[str] = []
    """Only of these; empty: of all."""


class Kept(Message, frozen=True):
    """Node: the folders written (none when there is no training), and what could not be."""

    folders: list[str]
    error: str = ""


class HoldOutput(Message, frozen=True):
    """Agent: the link is behind, so ``print()`` waits, at most 10 s from the last such message; with ``hold`` False it
    goes on."""

    hold: bool


class RunLosses(Message, frozen=True):
    """What ``sync.step`` was told of one run of a job (:mod:`.runs`): (step, time, loss), thinned to at most 50
    points."""

    job: str
    run: int
    points: list[tuple[int, float, float]]


class Telemetry(Message, frozen=True):
    """Node, at most 4 a second: the newest values of nc.report() and of the training loop."""

    step: int | None = None
    loss: float | None = None
    scalars: dict[str, float] = {}
    samples_per_s: float | None = None
    memory_used: int | None = None
    """Bytes that torch or mlx hold on the accelerator; None on cpu."""
    memory_peak: int | None = None
    history: dict[str, list[tuple[int, float, float]]] = {}
    """(step, time, value) that nc.report() was told since the last Telemetry, by name, the loss too; thinned to at most
    50 points of a name."""
    losses: list[RunLosses] = []
    """The same of the losses of sync.step()."""
    sent: float = 0.0
    """By the node's clock, as the times of all points are."""
    epoch: int = 0
    """Of the ``nc.shard`` loop that trains, from 1; 0: there is none."""
    epoch_share: float | None = None
    """How much of this node's part of it was given out, 0 to 1; None: a stream has no length."""
    of_steps: int | None = None
    """How many steps the loop is going to take, where it says so."""
    step_cell: int = 0
    """The cell that ``step`` is of; 0: none."""
    waiting: str = ""
    """``all_reduce #3 for desk``, ``round 12``: what the node's main thread waits for."""
    threads: int = 0
    """That torch, OpenMP and BLAS libraries take on its processor; 0: not known."""
    threads_chosen: bool = False
    """The user has set them; otherwise they are the node's share of the machine's cores."""


class Heartbeat(Message, frozen=True):
    """Node, each second: its runtime's thread runs."""

    heard: list[str] = []
    """Nodes of which numbers have come over the mesh since the last one: a sign that they live, too."""


class NodeSilent(Message, frozen=True):
    """Coordinator, to the other nodes: ``node`` makes no progress and is waited for no longer, so collectives that miss
    something of it raise PeerLost. ``reason`` empty: it does again."""

    node: str
    incarnation: int
    reason: str = ""


class GlobalMeasured(Message, frozen=True):
    """Node: what nc.report() was told inside ``with sync.global_model():``, once a block."""

    job: str
    round: int
    """After which the model was measured; 0: before the first one."""
    step: int
    """Steps of this node when it took over that round."""
    time: float
    values: dict[str, float]
    """``loss`` and scalars."""
    run: int = 0
    """Of the job."""


class Blocked(Message, frozen=True):
    """Node: its main thread has been in one wait for a second; said again each second, and with ``serial`` 0 when it
    goes on."""

    cell: int
    serial: int
    """Counts the waits that were told; another one when somebody else is missing."""
    operations: int = 0
    """Collectives of the cell that the node has begun."""
    operation: int = 0
    """The collective that it waits in; 0: it waits for a round, or in a decision."""
    decision: int = 0
    """The number of the ``should_stop`` or ``mean_metrics`` that it waits in."""
    name: str = ""
    """``all_reduce``, ``should_stop``"""
    missing: list[str] = []
    """Nodes of which nothing has come that the collective needs next."""
    job: str = ""
    round: int = 0
    place: str = ""
    """``cell 7, line 12: nc.all_reduce(metric)``"""
    at_end: bool = False
    """The cell's code is over: it waits in the finish of a sync object."""


class EndWait(Message, frozen=True):
    """Coordinator: the wait ``serial`` of cell ``cell`` cannot end: raise ``reason`` in it."""

    cell: int
    serial: int
    reason: str


class NodeLog(Message, frozen=True):
    """Node: one line for the event list (``level`` info, warning or error)."""

    level: Literal["info", "warning", "error"]
    text: str
    cell: bool = False
    """Of all nodes of the running cell: it is shown in the cell too, once where several say the same."""


ToNodeBody = (
    Roster
    | NodeLost
    | NodeSilent
    | CellDone
    | EndWait
    | InterruptCell
    | UseRelay
    | RelayFrame
    | RelayTaken
    | measuring.MeasurePair
    | KeepCheckpoint
    | HoldOutput
    | transfers.ReadPart
    | transfers.WritePart
    | transfers.ForgetTicket
    | interaction.FetchVariables
    | decisions.Decided
    | decisions.AnswersMissing
    | decisions.DecisionQuery
    | runs.Registered
    | runs.RegisterRefused
    | runs.RunOver
    | rounds.Seal
    | rounds.Close
    | rounds.CompleteAttempt
    | rounds.Commit
    | rounds.Void
    | rounds.Behind
    | rounds.Refused
    | rounds.Hold
    | rounds.Finished
    | rounds.RoundQuery
    | rounds.CommitQuery
    | rounds.Save
    | rounds.PartMissing
    | rounds.Saved
)
FromNodeBody = (
    NodeHello
    | Telemetry
    | Heartbeat
    | GlobalMeasured
    | Blocked
    | NodeLog
    | InterruptSeen
    | Unreachable
    | RelayFrame
    | RelayTaken
    | measuring.PairMeasured
    | Kept
    | transfers.ValuePart
    | transfers.PartWritten
    | interaction.Variables
    | decisions.Ask
    | decisions.Withdrawn
    | decisions.PlaceReached
    | decisions.DecisionState
    | runs.Register
    | runs.Joined
    | rounds.Arrived
    | rounds.Prepared
    | rounds.Applied
    | rounds.Stalled
    | rounds.LeftRounds
    | rounds.RoundStatus
    | rounds.CommitReport
    | rounds.CheckpointRequest
    | rounds.Saved
)
