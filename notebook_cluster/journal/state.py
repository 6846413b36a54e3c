"""The cluster as one value, changed by ``apply(state, event)`` alone: pure, so that a restarted coordinator gets it
back by applying its log again."""

from collections.abc import Iterator

import msgspec

from notebook_cluster.journal import events as e
from notebook_cluster.journal.launched import LaunchRecord, apply_to_launches
from notebook_cluster.protocol.kept import TakenState
from notebook_cluster.protocol.node import NodeAddress, NodeHello, Roster
from notebook_cluster.protocol.state import CellView, MemoryKind


class Peer(msgspec.Struct, frozen=True):
    name: str
    key: str
    address: str
    found_by: str
    pid: int | None = None
    machine: str = ""
    hosts: tuple[str, ...] = ()
    devices: tuple[tuple[str, str, int, bool], ...] = ()
    portable: bool = False
    pinned: bool = False
    dropped: str = ""
    """Why it is not used any more, or empty. Its nodes keep their rows until they are removed."""

    @property
    def device_names(self) -> str:
        """For people."""
        return ", ".join(sorted({name for _, name, _, _ in self.devices}))


class Node(msgspec.Struct, frozen=True):
    name: str
    peer: str
    device: str
    order: int
    """Ranks follow this: it is kept over restarts, so a node that comes back has its rank again."""
    directory: str = ""
    incarnation: int = 0
    condition: str = "starting"
    """``starting``, ``ok``, ``lost`` (its peer's link) or ``dead`` (its process)."""
    reason: str = ""
    log_tail: tuple[str, ...] = ()
    hello: NodeHello | None = None
    settled: bool = False
    """It holds what the cells before left behind: its replay is over."""
    left_out: dict[int, e.LeftOutWhy] = {}
    """Earlier cells that its kernel does without."""

    @property
    def is_in(self) -> bool:
        """True while the node is in the roster."""
        return self.condition == "ok" and self.hello is not None


class Cell(msgspec.Struct, frozen=True):
    id: int
    source: str
    targets: tuple[str, ...]
    replay: bool
    user_expressions: dict[str, str]
    notebook_names: tuple[str, ...]
    status: e.CellStatus = "queued"
    generation: int = 0
    started: float = 0.0
    ended: float | None = None
    nodes: dict[str, e.NodeCellStatus] = {}
    results: dict[str, e.CellNodeEnded] = {}
    replies: dict[str, e.CellNodeReplied] = {}
    """Of nodes that have replied and not ended yet."""
    ended_on: dict[str, int] = {}
    """Node -> the incarnation on which it has ended."""
    canary: str = ""
    widened: bool = False
    """The canary has ended, and the others run it or never will."""

    def wants(self, node: str) -> bool:
        """True when ``node`` is among the targets."""
        return not self.targets or node in self.targets

    def may_run(self, node: str) -> bool:
        """True when ``node`` is to run it now: before its canary has ended nobody else does."""
        return self.wants(node) and (not self.canary or self.widened or node == self.canary)

    def partners(self, node: str) -> list[str]:
        """The nodes between which the collectives of ``node`` in this cell are: a canary is alone."""
        if not self.canary:
            return list(self.nodes)
        return [self.canary] if node == self.canary else [name for name in self.nodes if name != self.canary]


class State(msgspec.Struct, frozen=True):
    cluster: str = ""
    cluster_id: str = ""
    epoch: int = 0
    starts: int = 0
    """How often a coordinator began; of a run that an earlier version has begun, since this version goes on with it."""
    generation: int = 0
    directory: str = ""
    started: float = 0.0
    peers: dict[str, Peer] = {}
    nodes: dict[str, Node] = {}
    cells: dict[int, Cell] = {}
    unfinished: tuple[int, ...] = ()
    """Cells that run or wait to run, oldest first."""
    removed: dict[str, int] = {}
    """Name of a node that was removed -> its last incarnation: one that is added under it later goes on from there, so
    that nothing said about the first is taken as said about the second."""
    next_order: int = 0
    reception: int = 0
    """TCP port where peers dial in, 0 before the first invitation; ``pairing`` likewise."""
    pairing: int = 0
    launches: dict[str, LaunchRecord] = {}
    taken: tuple[TakenState, ...] = ()
    """From which states jobs go on that a cluster before this one has trained."""
    stopped: str | None = None
    left: str = ""
    """The token of the hand over after which this journal is not that of the cluster any more."""

    def running(self) -> Cell | None:
        """The cell that runs now."""
        return next((cell for cell in self._unfinished_cells() if cell.status == "running"), None)

    def shown_cell(self) -> Cell | None:
        """The cell that runs now, or the last one."""
        return self.running() or next(reversed(self.cells.values()), None)

    def device(self, node: Node) -> tuple[str, MemoryKind, int]:
        """Of a node's device: its name, the kind of memory it has, and how many bytes (0: not known)."""
        wanted = node.device or "cpu"
        known = (device for device in self.peers[node.peer].devices if device[0] == wanted)
        _, name, total, unified = next(known, ("cpu", "cpu", 0, False))
        return name, "unified" if unified else "RAM" if wanted == "cpu" else "VRAM", total

    def queue(self) -> list[Cell]:
        return [cell for cell in self._unfinished_cells() if cell.status == "queued"]

    def _unfinished_cells(self) -> Iterator[Cell]:
        return (self.cells[number] for number in self.unfinished)

    def last_incarnation(self, name: str) -> int:
        """Of the nodes that had this name so far; 0: none was started."""
        node = self.nodes.get(name)
        return max(node.incarnation if node is not None else 0, self.removed.get(name, 0))

    def roster_nodes(self) -> list[Node]:
        """Nodes in the roster in rank order."""
        return sorted((node for node in self.nodes.values() if node.is_in), key=lambda node: node.order)

    def rank(self, name: str) -> int | None:
        names = [node.name for node in self.roster_nodes()]
        return names.index(name) if name in names else None

    def place(self, name: str) -> int | None:
        """In the order of joining; it stays the same when others go. None: it was removed."""
        node = self.nodes.get(name)
        return node.order if node is not None else None


def roster(state: State) -> Roster:
    """What every node is told after a change of membership: ranks compact, in order of joining."""
    rows: list[NodeAddress] = []
    local: dict[str, int] = {}
    for rank, node in enumerate(state.roster_nodes()):
        assert node.hello is not None
        peer = state.peers[node.peer]
        local_rank = local.get(node.peer, 0)
        local[node.peer] = local_rank + 1
        rows.append(
            NodeAddress(
                name=node.name, incarnation=node.incarnation, rank=rank, local_rank=local_rank, peer=node.peer,
                machine=peer.machine, device=node.device, hosts=list(peer.hosts), mesh_key=node.hello.mesh_key,
                mesh_port=node.hello.mesh_port, mesh_ipc=node.hello.mesh_ipc, master_port=node.hello.master_port,
            )
        )  # fmt: skip
    return Roster(
        cluster=state.cluster, generation=state.generation, nodes=rows, cluster_id=state.cluster_id, epoch=state.epoch,
        taken=list(state.taken),
    )  # fmt: skip


_BEGINNING = 200
_MOST_SAID = 160


def cell_view(cell: Cell, most: int = _BEGINNING) -> CellView:
    """The cell as views see it, with ``most`` characters of its source."""
    return CellView(
        id=cell.id,
        source=cell.source[:most],
        more=max(len(cell.source) - most, 0),
        status=cell.status,
        nodes=dict(cell.nodes),
        started=cell.started,
        ended=cell.ended,
        errors={name: said for name, result in cell.results.items() if (said := _said_of(result))},
    )


def failure_of(state: State, node: Node) -> str:
    """What the kernel that ``node`` has now has failed of in the newest cell: ``cell 7: ValueError: ...``, or empty."""
    cell = state.shown_cell()
    if cell is None or cell.nodes.get(node.name) != "error" or cell.ended_on.get(node.name) != node.incarnation:
        return ""
    return f"cell {cell.id}: {_said_of(cell.results[node.name]) or 'an error'}"


def _said_of(result: e.CellNodeEnded) -> str:
    """What a cell failed of on one node; empty where it did not."""
    if not result.error_name:
        return result.reason[:_MOST_SAID]
    return f"{result.error_name}: {result.error_value}".removesuffix(": ")[:_MOST_SAID]


_MOST_CELLS, _MOST_OF_A_CELL, _MOST_SOURCE = 500, 50_000, 1_000_000


def cells_of_report(state: State) -> list[CellView]:
    """The newest cells, oldest first, whole where they are not huge; of those before a megabyte of source, and of
    what is huge, the beginning."""
    found, room = [], _MOST_SOURCE
    for cell in reversed(list(state.cells.values())[-_MOST_CELLS:]):
        view = cell_view(cell, min(_MOST_OF_A_CELL, max(room, _BEGINNING)))
        room -= len(view.source)
        found.append(view)
    return found[::-1]


def _change(state: State, **changes: object) -> State:
    return msgspec.structs.replace(state, **changes)


def _node(state: State, name: str, *, moved: bool = False, **changes: object) -> State:
    """``state`` with a changed node; ``moved`` when this changes the roster."""
    nodes = {**state.nodes, name: msgspec.structs.replace(state.nodes[name], **changes)}
    return _change(state, nodes=nodes, generation=state.generation + (1 if moved else 0))


def _cell(state: State, number: int, **changes: object) -> State:
    cells = {**state.cells, number: msgspec.structs.replace(state.cells[number], **changes)}
    return _change(state, cells=cells)


def _cell_node(state: State, number: int, name: str, status: e.NodeCellStatus) -> State:
    return _cell(state, number, nodes={**state.cells[number].nodes, name: status})


def _current(state: State, name: str, incarnation: int) -> bool:
    node = state.nodes.get(name)
    return node is not None and node.incarnation == incarnation


def apply(state: State, event: e.Event) -> State:
    """The state after ``event``. Events about a node's older incarnation change nothing."""
    match event:
        case e.ClusterStarted():
            return _change(
                state, cluster=event.cluster, cluster_id=event.cluster_id, epoch=event.epoch,
                directory=event.directory, started=state.started or event.time, stopped=None, left="",
                starts=state.starts + 1,
            )  # fmt: skip
        case e.PeerAdded():
            known = state.peers.get(event.name)
            peer = Peer(event.name, event.key, event.address, event.found_by, event.pid, pinned=event.pinned)
            if known is not None and known.key == event.key:
                peer = msgspec.structs.replace(
                    known, address=event.address, found_by=event.found_by, pid=event.pid, pinned=event.pinned,
                    dropped="",
                )  # fmt: skip
            return _change(state, peers={**state.peers, event.name: peer})
        case e.PeerDropped():
            dropped = msgspec.structs.replace(state.peers[event.name], dropped=event.reason)
            return _change(state, peers={**state.peers, event.name: dropped})
        case e.DoorOpened():
            return _change(state, reception=event.reception, pairing=event.pairing)
        case e.LaunchOrdered() | e.LaunchAccepted() | e.HostEnlisted() | e.HostLeft() | e.LaunchEnded():
            return _change(state, launches=apply_to_launches(state.launches, event))
        case e.PeerDescribed():
            described = msgspec.structs.replace(
                state.peers[event.name], machine=event.machine, hosts=tuple(event.hosts), devices=tuple(event.devices),
                portable=event.portable,
            )  # fmt: skip
            return _change(state, peers={**state.peers, event.name: described})
        case e.NodeAdded():
            added = Node(event.node, event.peer, event.device, state.next_order, event.directory)
            return _change(state, nodes={**state.nodes, event.node: added}, next_order=state.next_order + 1)
        case e.NodeStarting():
            before = state.nodes[event.node]
            kept = {} if event.all_cells else {cell: why for cell, why in before.left_out.items() if why != "stopped"}
            return _node(
                state, event.node, moved=before.is_in, incarnation=event.incarnation, condition="starting", reason="",
                log_tail=(), hello=None, settled=False, left_out=kept,
            )  # fmt: skip
        case e.NodeUp() if _current(state, event.node, event.incarnation):
            return _node(
                state, event.node, moved=True, condition="ok", reason="", device=event.device, hello=event.hello
            )
        case e.NodeSettled() if _current(state, event.node, event.incarnation):
            return _node(state, event.node, settled=True)
        case e.NodeDown() if _current(state, event.node, event.incarnation):
            condition = "dead" if event.dead else "lost"
            return _node(
                state, event.node, moved=state.nodes[event.node].is_in, condition=condition, reason=event.reason,
                log_tail=tuple(event.log_tail),
            )  # fmt: skip
        case e.NodeReturned() if _current(state, event.node, event.incarnation):
            back = state.nodes[event.node].hello is not None
            return _node(state, event.node, moved=back, condition="ok" if back else "starting", reason="")
        case e.ReplayLeftOut() if _current(state, event.node, event.incarnation):
            others = {cell: why for cell, why in state.nodes[event.node].left_out.items() if cell != event.cell}
            return _node(state, event.node, left_out=others | ({event.cell: event.why} if event.why else {}))
        case e.NodeRemoved():
            moved = state.nodes[event.node].is_in
            nodes = {name: node for name, node in state.nodes.items() if name != event.node}
            removed = {**state.removed, event.node: state.last_incarnation(event.node)}
            return _change(state, nodes=nodes, removed=removed, generation=state.generation + (1 if moved else 0))
        case e.StatesTaken():
            return _change(state, taken=tuple(event.states), generation=state.generation + 1)
        case e.CellSubmitted():
            cell = Cell(
                event.cell, event.source, tuple(event.targets), event.replay,
                event.user_expressions, tuple(event.notebook_names), canary=event.canary,
            )  # fmt: skip
            unfinished = (*state.unfinished, event.cell)
            return _change(state, cells={**state.cells, event.cell: cell}, unfinished=unfinished)
        case e.CellStarted():
            return _cell(
                state, event.cell, status="running", generation=event.generation, started=event.time,
                nodes=dict.fromkeys(event.nodes, "running"),
            )  # fmt: skip
        case e.CellWidened():
            running: dict[str, e.NodeCellStatus] = dict.fromkeys(event.nodes, "running")
            return _cell(
                state, event.cell, nodes=state.cells[event.cell].nodes | running, generation=event.generation,
                widened=True,
            )  # fmt: skip
        case e.CellJoined() | e.CellNodeReturned():
            return _cell_node(state, event.cell, event.node, "running")
        case e.CellNodeReplied():
            replies = {**state.cells[event.cell].replies, event.node: event}
            return _cell(state, event.cell, replies=replies)
        case e.CellNodeEnded():
            cell = state.cells[event.cell]
            statuses = {**cell.nodes, event.node: event.status}
            replies = {node: reply for node, reply in cell.replies.items() if node != event.node}
            results = {**cell.results, event.node: event}
            ended_on = {**cell.ended_on, event.node: state.last_incarnation(event.node)}
            return _cell(state, event.cell, nodes=statuses, results=results, replies=replies, ended_on=ended_on)
        case e.CellFinished():
            unended = tuple(number for number in state.unfinished if number != event.cell)
            return _cell(_change(state, unfinished=unended), event.cell, status=event.status, ended=event.time)
        case e.Stopped():
            return _change(state, stopped=event.reason)
        case e.HandedOver():
            return _change(state, left=event.token)
    return state
