"""One execute_request on one node: sending it, what its kernel says, interrupting it."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from notebook_cluster.coordinator import jupyter
from notebook_cluster.coordinator.kernels.comms import COMM_KINDS
from notebook_cluster.coordinator.kernels.inspection import REPLIES
from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import Cell
from notebook_cluster.link import Drops
from notebook_cluster.protocol.peer import FromKernel, InterruptNode, ToKernel

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

IDLE_GRACE = 5.0
"""Seconds without a word of the run after which its idle status, which follows all its output, is not waited for any
more: the reply has come, and a kernel's PUB socket may drop what its agent reads too late."""
SEEN_GRACE = 1.0
"""Seconds that a node's runtime has to say that it saw a Stop; then its agent sends the signal."""
OUTPUT_KINDS = frozenset(("stream", "display_data", "update_display_data", "execute_result", "error", "clear_output"))


class Execution:
    """A cell on a node, or the replay of an earlier one."""

    def __init__(self, cell: int, node: str, incarnation: int, replay: bool) -> None:
        self.cell = cell
        self.node = node
        self.incarnation = incarnation
        self.replay = replay
        # Always the same for the same run, so a restarted coordinator knows the answers to its predecessor.
        self.message_id = f"{cell}-{node}-{incarnation}{'-replay' if replay else ''}"
        self.reply: dict[str, Any] | None = None
        self.idle = False
        self.interrupt_seen = False
        loop = asyncio.get_running_loop()
        self.heard = loop.time()
        """When its kernel last said something of it."""
        self.done: asyncio.Future[str] = loop.create_future()


class Executions:
    """Every open run. ``on_ended(event)`` is called when a run that is no replay has ended."""

    def __init__(self, hub: "Coordinator", on_ended: Callable[[e.CellNodeEnded], None]) -> None:
        self._hub = hub
        self._on_ended = on_ended
        self._runs: dict[str, Execution] = {}
        self._dropped = Drops()

    def of_cell(self, cell: int) -> list[Execution]:
        return [run for run in self._runs.values() if run.cell == cell]

    def is_busy(self, node: str) -> bool:
        """The node runs a cell, or replays an earlier one."""
        return any(run.node == node for run in self._runs.values())

    def start(self, cell: Cell, name: str, metadata: dict[str, Any], *, replay: bool = False) -> Execution:
        """Send the execute_request; ``metadata`` is what the node's runtime finds in it."""
        node = self._hub.state.nodes[name]
        run = self._open(Execution(cell.id, name, node.incarnation, replay))
        if not replay and self._hub.cells.shows_widgets(cell.id):
            metadata = {**metadata, "widgets": True}
        # Nobody is asked the same again when a cell is replayed.
        asks = not replay and self._hub.inputs.allows(cell.id)
        parts = jupyter.execute_request(run.message_id, self._hub.state.cluster_id, cell, metadata, allow_stdin=asks)
        message = ToKernel(node=name, incarnation=node.incarnation, channel="shell")
        self._hub.peers.send(node.peer, message, parts)
        return run

    def resume(self, cell: int, name: str) -> None:
        """Wait again for a run that was started before (the peer or this coordinator was away)."""
        self._open(Execution(cell, name, self._hub.state.nodes[name].incarnation, False))

    def _open(self, run: Execution) -> Execution:
        self._runs[run.message_id] = run
        return run

    def on_kernel(self, peer_key: str, sequence: int, message: FromKernel, parts: list[bytes]) -> None:
        """A Jupyter message of a node; anything unreadable is dropped and said."""
        node = self._hub.state.nodes.get(message.node)
        if node is None or node.incarnation != message.incarnation:
            return
        try:
            header, parent = jupyter.headers(parts)
            run = self._runs.get(parent)
            if run is not None:
                run.heard = asyncio.get_running_loop().time()
            if message.channel == "iopub":
                if header.msg_type == "status":
                    state = jupyter.content(parts).get("execution_state")
                    if run is not None:
                        self._on_status(run, state)
                    elif state == "idle":
                        self._hub.comms.on_idle(message.node, parent)
                elif header.msg_type in COMM_KINDS:
                    self._hub.comms.on_message(node, header.msg_type, parts)
                elif header.msg_type in OUTPUT_KINDS:
                    content = jupyter.content(parts)
                    if self._hub.comms.catches(node, parent, header.msg_type, content):
                        return
                    if run is not None and run.replay:
                        return
                    cell = None if run is None else run.cell
                    self._hub.streaming.add(peer_key, sequence, message.node, cell, header.msg_type, content)
            elif message.channel == "stdin":
                if header.msg_type == "input_request" and run is not None and not run.replay:
                    self._hub.inputs.on_request(run, jupyter.content(parts))
            elif header.msg_type in REPLIES:
                self._hub.introspection.on_reply(message.node, parent, jupyter.content(parts))
            elif header.msg_type == "execute_reply" and run is not None:
                run.reply = jupyter.content(parts)
                self._maybe_done(run)
        except (msgspec.DecodeError, IndexError, UnicodeDecodeError) as error:
            self._dropped.note("kernel", "a message of %s is not readable: %s", message.node, error)

    def _on_status(self, run: Execution, status: object) -> None:
        if status == "idle":
            run.idle = True
            self._maybe_done(run)

    def interrupt(self, run: Execution) -> None:
        """A Stop for one node; its agent, or else its runtime, knows whether the cell has begun."""
        run.interrupt_seen = False
        node = self._hub.state.nodes.get(run.node)
        if node is None:
            return
        self._hub.peers.send(
            node.peer, InterruptNode(node=run.node, incarnation=run.incarnation, cell=run.cell), decided=False
        )
        asyncio.get_running_loop().call_later(SEEN_GRACE, self._insist, run)

    def interrupt_seen(self, node: str, cell: int) -> None:
        for run in self.of_cell(cell):
            if run.node == node:
                run.interrupt_seen = True

    def _insist(self, run: Execution) -> None:
        node = self._hub.state.nodes.get(run.node)
        if node is None or run.interrupt_seen or run.done.done():
            return
        self._hub.peers.send(node.peer, InterruptNode(node=run.node, incarnation=run.incarnation), decided=False)

    def interrupt_all(self) -> None:
        for run in list(self._runs.values()):
            self.interrupt(run)

    def _maybe_done(self, run: Execution) -> None:
        if run.reply is None or run.done.done():
            return
        loop = asyncio.get_running_loop()
        if run.idle or loop.time() >= run.heard + IDLE_GRACE:
            self._done(run, run.reply)
        else:
            loop.call_at(run.heard + IDLE_GRACE, self._maybe_done, run)

    def _done(self, run: Execution, reply: dict[str, Any]) -> None:
        answers = reply.get("user_expressions")
        status: e.NodeCellStatus = "ok"
        if reply.get("status") == "error":
            status = "interrupted" if _was_interrupted(reply) else "error"
        elif reply.get("status") != "ok":
            status = "cancelled"
        event = e.CellNodeEnded(
            cell=run.cell,
            node=run.node,
            status=status,
            error_name=str(reply.get("ename", "")),
            error_value=str(reply.get("evalue", ""))[:2000],
            user_expressions={} if run.replay else self._hub.cells.collected.take(run.cell, run.node, answers),
        )
        self._close(run, event)

    def node_lost(self, name: str, incarnation: int, reason: str, log_tail: list[str]) -> None:
        """Whatever the node ran has ended there."""
        for run in [run for run in self._runs.values() if run.node == name and run.incarnation == incarnation]:
            lost = e.CellNodeEnded(cell=run.cell, node=name, status="lost", reason=reason, log_tail=log_tail)
            self._close(run, lost)

    def _close(self, run: Execution, event: e.CellNodeEnded) -> None:
        self._runs.pop(run.message_id, None)
        if not run.done.done():
            run.done.set_result(event.status)
        if not run.replay:
            self._on_ended(event)


def _was_interrupted(reply: dict[str, Any]) -> bool:
    """A Stop ended the cell, or kept it from beginning while its node waited for the roster."""
    name, value = reply.get("ename"), str(reply.get("evalue", ""))
    return name == "KeyboardInterrupt" or (name == "InputRejected" and "interrupted before the cell began" in value)
