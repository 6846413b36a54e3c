"""One execute_request on one node: sending it, what its kernel answers and asks, interrupting it."""

import asyncio
from collections.abc import Callable
from typing import Any

from notebook_cluster.coordinator.cells.questions import Execution, StdinQuestions
from notebook_cluster.coordinator.cells.streaming import Collected
from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.delivery import Delivery, execute_request
from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import Cell
from notebook_cluster.protocol.peer import InterruptNode

IDLE_GRACE = 5.0
"""Seconds without a word of the run after which its idle status, which follows all its output, is not waited for any
more: the reply has come, and a kernel's PUB socket may drop what its agent reads too late."""
SEEN_GRACE = 1.0
"""Seconds that a node's runtime has to say that it saw a Stop; then its agent sends the signal."""

_REPLY = ("status", "ename", "evalue")
"""What is looked at of an execute_reply's content, beside the user expressions."""


class Executions:
    """Every open run, and which cells somebody stopped. ``on_ended(event)`` is called when a run that is no replay has
    ended."""

    def __init__(
        self,
        core: Core,
        delivery: Delivery,
        *,
        stdin: StdinQuestions,
        collected: Collected,
        on_ended: Callable[[e.CellNodeEnded], None],
    ) -> None:
        self._core = core
        self._delivery = delivery
        self._stdin = stdin
        self._collected = collected
        self._on_ended = on_ended
        self._runs: dict[str, Execution] = {}
        self.with_widgets: set[int] = set()
        """Cells that were submitted by a view which shows widgets of nodes: progress bars may be widgets there."""
        self.interrupted: set[int] = set()
        """Cells that go on although somebody stopped them."""

    def was_interrupted(self, cell: int) -> bool:
        """Somebody stopped ``cell``, which has not ended yet."""
        return cell in self.interrupted

    def forget(self, cell: int) -> None:
        """``cell`` has ended."""
        self.with_widgets.discard(cell)
        self.interrupted.discard(cell)

    def of_cell(self, cell: int) -> list[Execution]:
        return [run for run in self._runs.values() if run.cell == cell]

    def is_busy(self, node: str) -> bool:
        """The node runs a cell, or replays an earlier one."""
        return any(run.node == node for run in self._runs.values())

    def start(self, cell: Cell, name: str, metadata: dict[str, Any], *, replay: bool = False) -> Execution:
        """Send the execute_request; ``metadata`` is what the node's runtime finds in it."""
        node = self._core.state.nodes[name]
        run = self._open(Execution(cell.id, name, node.incarnation, replay))
        if run.reply is not None:
            return run
        if not replay and cell.id in self.with_widgets:
            metadata = {**metadata, "widgets": True}
        # Nobody is asked the same again when a cell is replayed.
        asks = not replay and self._stdin.allows(cell.id)
        parts = execute_request(run.message_id, self._core.state.cluster_id, cell, metadata, allow_stdin=asks)
        self._delivery.to_kernel(name, "shell", parts)
        return run

    def resume(self, cell: int, name: str) -> None:
        """Wait again for a run that was started before (the peer or this coordinator was away)."""
        self._open(Execution(cell, name, self._core.state.nodes[name].incarnation, False))

    def _open(self, run: Execution) -> Execution:
        """Its reply may be in the journal already: the kernel does not say it again."""
        self._runs[run.message_id] = run
        replied = None if run.replay else self._core.state.cells[run.cell].replies.get(run.node)
        if replied is not None and replied.incarnation == run.incarnation:
            run.reply = replied.reply
            self._maybe_done(run)
        return run

    # ---- what kernels say

    def run_of(self, message_id: str) -> Execution | None:
        """The open run that a message of a kernel belongs to."""
        return self._runs.get(message_id)

    def heard(self, message_id: str) -> None:
        """A kernel has said something that belongs to that message."""
        run = self._runs.get(message_id)
        if run is not None:
            run.heard = asyncio.get_running_loop().time()

    def on_idle(self, run: Execution) -> None:
        """The kernel of ``run`` has said all of it."""
        run.idle = True
        self._maybe_done(run)

    def on_reply(self, run: Execution, content: dict[str, Any]) -> None:
        """The execute_reply of ``run``. Its agent does not send it again: it is in the journal before anything else of
        the cell is waited for, without the value that views get, which may be large."""
        known = run.reply is not None  # from the journal: a coordinator before this one had no time to acknowledge it
        run.reply = {name: content[name] for name in _REPLY if name in content}
        if not run.replay:
            answers = content.get("user_expressions")
            run.reply["user_expressions"] = self._collected.take(run.cell, run.node, answers)
            if not (known or run.idle or run.done.done()):
                self._core.record(e.CellNodeReplied(run.cell, run.node, run.incarnation, run.reply))
        self._maybe_done(run)

    def interrupt(self, run: Execution) -> None:
        """A Stop for one node; its agent, or else its runtime, knows whether the cell has begun."""
        run.interrupt_seen = False
        node = self._core.state.nodes.get(run.node)
        if node is None:
            return
        self._delivery.to_agent(
            node.peer, InterruptNode(node=run.node, incarnation=run.incarnation, cell=run.cell), decided=False
        )
        asyncio.get_running_loop().call_later(SEEN_GRACE, self._insist, run)

    def interrupt_seen(self, node: str, cell: int) -> None:
        for run in self.of_cell(cell):
            if run.node == node:
                run.interrupt_seen = True

    def _insist(self, run: Execution) -> None:
        node = self._core.state.nodes.get(run.node)
        if node is None or run.interrupt_seen or run.done.done():
            return
        self._delivery.to_agent(node.peer, InterruptNode(node=run.node, incarnation=run.incarnation), decided=False)

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
            error_value=_both_ends(str(reply.get("evalue", ""))),
            user_expressions=reply.get("user_expressions", {}),
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


def _both_ends(text: str) -> str:
    """At most 2,000 characters: an error with another one's traceback in it says at its end what that one was."""
    return text if len(text) <= 2000 else f"{text[:997]} ... {text[-998:]}"


def _was_interrupted(reply: dict[str, Any]) -> bool:
    """A Stop ended the cell, or kept it from beginning while its node waited for the roster."""
    name, value = reply.get("ename"), str(reply.get("evalue", ""))
    return name == "KeyboardInterrupt" or (name == "InputRejected" and "interrupted before the cell began" in value)
