"""View <-> coordinator. A view sends Request envelopes and receives Reply envelopes and Events.

Frames view -> coordinator: ``[encoded Request]``. Frames coordinator -> view: ``[encoded Reply]`` or ``[encoded Event,
*buffers]``. The socket is a ROUTER on loopback with CURVE; its address and both key pairs are in the connection file.
"""

from typing import Any, Literal

from notebook_cluster.protocol.hand_over import AnyHandingOver, ViewKind
from notebook_cluster.protocol.interaction import AnyInteraction, InputRequested, InputWithdrawn, NodeComm, NodeValue
from notebook_cluster.protocol.kept import AnyTakingOver
from notebook_cluster.protocol.launches import AnyLaunching
from notebook_cluster.protocol.measuring import MeasureWay
from notebook_cluster.protocol.state import ClusterView, GetHistory, Series
from notebook_cluster.protocol.transfers import AnyTransfer
from notebook_cluster.protocol.wire import Message


class RequestError(Exception):
    """A request that cannot be done; the text is one line for people, and the ``error`` of its :class:`Reply`."""


class ConnectionFile(Message, frozen=True):
    """``<jupyter runtime>/notebook_cluster/<cluster>/connection.json``, mode 0600."""

    cluster: str
    address: str
    server_key: str
    view_public_key: str
    view_secret_key: str
    pid: int
    epoch: int
    protocol: int
    version: str
    run_log: str
    key: str = ""
    """Public key with which the coordinator meets agents."""
    reception: int = 0
    """Port where agents dial in; of a head."""
    head: str = ""
    """The peer where the coordinator runs, when this process is only the window to it."""
    ran: bool = False
    """The head ran before this window."""


# ---- requests ------------------------------------------------------------------------------------------------


class Attach(Message, frozen=True):
    """First request of a view. Reply value: ClusterView. ``live`` views get state, output and series events."""

    kind: ViewKind
    live: bool = True
    kernel: str = ""
    """Id of the Jupyter kernel that the view lives in, empty where it is none: which notebook this is."""


class Execute(Message, frozen=True):
    """Run a cell. Reply at once, value: cell id (int). ``targets`` are node names; empty: all nodes.

    ``replay``: the cell goes into the cluster's cell log, so nodes that (re)start or join run it too.
    """

    source: str
    targets: list[str] = []
    replay: bool = True
    timeout: float | None = None
    user_expressions: dict[str, str] = {}
    watch: bool = False
    """The reply is followed by the cell's events, as after Watch, without a second request."""
    notebook_names: list[str] = []
    """Names in the notebook's namespace: a NameError on a node for one of them says ``%push``."""
    canary: str = ""
    """This node runs it first and alone; the others only when it went well there."""
    background: bool = False
    """No cell of a notebook waits for it (``--async``): said to who queues behind it."""
    stdin: bool = False
    """This view answers InputRequested; without it ``input()`` raises on a node."""
    widgets: bool = False
    """This view shows widgets of nodes: progress bars may be some."""


class Watch(Message, frozen=True):
    """A cell from its beginning, then live: CellOutput events and at last CellEnded. Reply value: CellView."""

    cell: int
    background: bool = False
    """As in Execute."""
    stdin: bool = False
    """This view answers InputRequested too, when who submitted the cell is gone."""


class Unwatch(Message, frozen=True):
    """No more CellOutput of ``cell``."""

    cell: int


class OutputTaken(Message, frozen=True):
    """The view has read the output of ``cell`` up to this ``CellOutput.position``. What a view is far behind with is
    shortened for it."""

    cell: int
    position: int


class Interrupt(Message, frozen=True):
    """SIGINT to all targets of the running cell; ``force`` kills and respawns the still busy ones.
    Reply value: list of the names of nodes that are still busy."""

    force: bool = False
    cell: int = 0
    """Only this cell, which may still be in the queue; 0: the running one and all in the queue."""


class Detach(Message, frozen=True):
    """Free every view that waits for a cell; the cell goes on."""


class AddNodes(Message, frozen=True):
    """Add nodes. ``peer``: name, ``HOST:PORT``, ``local`` or ``all``. Reply value: list of node names once they
    answer (after cells are replayed), or an error that says why not. ``follow`` (with all): also peers found later;
    ``expect`` (with all): listen some seconds longer while fewer peers than that are found."""

    peer: str
    count: int = 0
    """0: one per accelerator."""
    code: str = ""
    """Pairs with peers that are not trusted yet and have this code open."""
    follow: bool = False
    expect: int = 0


class Invite(Message, frozen=True):
    """Let peers join that cannot be dialled: listen, advertise the cluster, open a code. Reply value: Invitation."""

    code: str = ""
    """Empty: one is made."""
    minutes: float = 120.0
    close: bool = False
    """End the invitation instead; peers that came keep their links."""


class Invitation(Message, frozen=True):
    """Typed at the peer: ``notebook-cluster share --dial ADDRESS --code CODE``."""

    addresses: list[str]
    code: str
    minutes: float


class Examine(Message, frozen=True):
    """The doctor. Reply value: list of Finding."""

    packages: list[str] = []
    """Also compare these distributions; those that the cluster's cells import are compared anyway."""


class Finding(Message, frozen=True):
    """One line of the doctor's report."""

    subject: str
    """``multicast``, ``port``, ``clock``, ``versions``, ``names``, ``bandwidth``, ``interfaces`` ..."""
    level: Literal["ok", "info", "warning", "error"]
    text: str
    """What is so, naming peer and value."""
    fix: str = ""
    """A line to copy (a command or a cell), or what to do."""
    table: list[list[str]] = []
    """Rows, the header first, where a table says it better."""


class RemoveNode(Message, frozen=True):
    """End this node's kernel and take it out of the cluster."""

    node: str


class RestartNode(Message, frozen=True):
    """New kernel, same name, next incarnation; cells are replayed, then it joins the running cell."""

    node: str
    replay: bool = True
    all_cells: bool = False
    """Also those that its kernels did without since their replay ended one, or was skipped."""


class SkipReplay(Message, frozen=True):
    """Interrupt the earlier cell that this node replays; it goes on with the next one. Reply value: the cell's number,
    or an error that says why not."""

    node: str


class ReadNodeLog(Message, frozen=True):
    """Reply value: list of lines."""

    node: str
    lines: int = 100


class GetState(Message, frozen=True):
    """Reply value: ClusterView."""


class GetSeries(Message, frozen=True):
    """Reply value: list of Series."""


class SaveCheckpoint(Message, frozen=True):
    """Checkpoint of ``job`` at its last committed round. Reply value: path of its folder."""

    name: str
    job: str = ""


class Ping(Message, frozen=True):
    """A view says every few seconds that it is there; a view not heard for 15 s has left."""


class LeaveCluster(Message, frozen=True):
    """The view goes. ``clean``: its kernel was shut down; if it was the last one and nothing runs, the cluster ends."""

    clean: bool = False


class Stop(Message, frozen=True):
    """End the cluster and every kernel of it. Reply (before the coordinator ends) value: None."""


AnyRequest = (
    Attach
    | Execute
    | Watch
    | Unwatch
    | OutputTaken
    | Interrupt
    | Detach
    | AddNodes
    | Invite
    | Examine
    | MeasureWay
    | RemoveNode
    | RestartNode
    | SkipReplay
    | ReadNodeLog
    | GetState
    | GetSeries
    | GetHistory
    | SaveCheckpoint
    | Ping
    | LeaveCluster
    | Stop
    | AnyInteraction
    | AnyHandingOver
    | AnyLaunching
    | AnyTakingOver
    | AnyTransfer
)


class Request(Message, frozen=True):
    """What a view asks; the Reply has the same ``id``."""

    id: int
    body: AnyRequest


class Reply(Message, frozen=True):
    """``error`` is one line for people; empty means it worked and ``value`` is what the request documents."""

    id: int
    value: Any = None
    error: str = ""


# ---- events --------------------------------------------------------------------------------------------------


LINES_LEFT_OUT = "lines_left_out"
"""In the content of a stream that stands for text which is missing: how many line ends that had (int)."""


class Output(Message, frozen=True):
    """One Jupyter output message of a node, already filtered by the MIME allow-list. Consecutive stream text of
    one node and stream is merged. ``kind`` is the Jupyter message type; ``content`` its content (JSON values)."""

    node: str
    rank: int | None
    kind: Literal["stream", "display_data", "update_display_data", "execute_result", "error", "clear_output"]
    content: dict[str, Any]
    place: int | None = None
    """As in NodeView."""


class CellOutput(Message, frozen=True):
    """What nodes put out, in order."""

    cell: int
    outputs: list[Output]
    position: int = 0
    """Bytes of the cell's output up to here, for OutputTaken; 0 in what was kept from before the view watched."""


class CellChanged(Message, frozen=True):
    """Per-node status of a running cell changed; see CellView.nodes."""

    cell: int
    nodes: dict[str, str]
    note: str = ""
    """For people: ``waiting for desk: lost (Wi-Fi?)``."""


class NodeResult(Message, frozen=True):
    """How a cell ended on one node."""

    status: Literal["ok", "error", "interrupted", "lost", "cancelled"]
    error_name: str = ""
    error_value: str = ""
    reason: str = ""
    """Why it was lost, or what may be the cause of its error, with the way out."""
    log_tail: list[str] = []
    user_expressions: dict[str, Any] = {}


class CellEnded(Message, frozen=True):
    """Last event of a cell. ``status`` error: any node ended so; ``detached``: the cell goes on without this view.
    ``trained`` False: no sync object of it has registered, so no state shows a job of it."""

    cell: int
    status: Literal["ok", "error", "interrupted", "detached"]
    results: dict[str, NodeResult] = {}
    reason: str = ""
    """Why it was interrupted, when nobody pressed Stop: ``ran longer than --timeout 5 s; still busy: desk``."""
    trained: bool = True


class StateChanged(Message, frozen=True):
    """The newest state, whole."""

    state: ClusterView


class SeriesAdded(Message, frozen=True):
    """New points only."""

    series: list[Series]


class Closing(Message, frozen=True):
    """The coordinator ends. ``away``: it does not, but cannot be reached from here; ``reason`` is the whole line."""

    reason: str
    away: bool = False


OfCell = CellOutput | CellChanged | CellEnded | NodeValue | InputRequested | InputWithdrawn
"""Go to the views that watch the cell which they name."""
AnyEvent = OfCell | NodeComm | StateChanged | SeriesAdded | Closing
Incoming = Reply | AnyEvent
