"""One execute_request on one node: sending it, what its kernel answers and asks, interrupting it."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from notebook_cluster.coordinator.cells.streaming import Collected
from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.delivery import Delivery, execute_request, kernel_message
from notebook_cluster.coordinator.view_server import View, ViewServer
from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import Cell
from notebook_cluster.protocol.interaction import AnswerInput, InputRequested, InputWithdrawn
from notebook_cluster.protocol.peer import InterruptNode
from notebook_cluster.security.sanitise import safe_text

IDLE_GRACE = 5.0
"""Seconds without a word of the run after which its idle status, which follows all its output, is not waited for any
more: the reply has come, and a kernel's PUB socket may drop what its agent reads too late."""
SEEN_GRACE = 1.0
"""Seconds that a node's runtime has to say that it saw a Stop; then its agent sends the signal."""
LOOK_S = 0.5
"""Seconds between two looks whether the views that were asked for a line are still there."""
MOST_PROMPT = 1000
"""Characters."""
MOST_ANSWER = 1_000_000
END_OF_FILE = "\x04"
"""What makes a kernel raise EOFError (Jupyter messaging, stdin channel)."""


_REPLY = ("status", "ename", "evalue")
"""What is looked at of an execute_reply's content, beside the user expressions."""


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


@dataclass
class _StdinQuestion:
    event: InputRequested
    run: Execution
    view: View
    """Who was asked."""


class StdinQuestions:
    """``input()`` on nodes: a view that watches the cell and can answer is asked; without one it gets end of file.

    A node never waits for a view that is gone: twice a second it is looked whether those that were asked are still
    there.
    """

    def __init__(self, core: Core, delivery: Delivery, views: ViewServer, tell: Callable[[int, str], None]) -> None:
        """``tell(cell, text)``: a line for who watches the cell."""
        self._core = core
        self._delivery = delivery
        self._views = views
        self._tell = tell
        self._numbers = itertools.count(1)
        self._answering: dict[int, list[View]] = {}
        self._open: dict[int, _StdinQuestion] = {}
        self._allowed: set[int] = set()
        self._looking = False

    def offer(self, view: View, cell: int, *, submits: bool = False) -> None:
        """``view`` watches ``cell`` and can answer its questions. Only a cell that was submitted so may ask."""
        for over in [number for number in self._answering if not self._goes_on(number)]:
            del self._answering[over]
        self._answering.setdefault(cell, []).append(view)
        if submits:
            self._allowed = {number for number in self._allowed if self._goes_on(number)} | {cell}

    def allows(self, cell: int) -> bool:
        """Whether ``input()`` works in ``cell``."""
        return cell in self._allowed

    def on_request(self, run: Execution, content: dict[str, Any]) -> None:
        """The node of ``run`` waits for a line."""
        for question in [question for question in self._open.values() if question.run is run]:
            self._withdraw(question)  # a kernel asks one thing at a time
        prompt = content.get("prompt")
        event = InputRequested(
            cell=run.cell,
            id=next(self._numbers),
            node=run.node,
            rank=self._core.state.rank(run.node),
            prompt=safe_text(prompt[:MOST_PROMPT]) if isinstance(prompt, str) else "",
            password=content.get("password") is True,
        )
        self._ask(event, run)

    def answer(self, view: View, answer: AnswerInput) -> None:
        """Pass an answer on to the node, if its question is still open and was put to ``view``."""
        question = self._open.get(answer.id)
        if question is None or question.view is not view:
            return
        del self._open[answer.id]
        self._reply(question.run, END_OF_FILE if answer.end else answer.value[:MOST_ANSWER])

    def _ask(self, event: InputRequested, run: Execution) -> None:
        view = self._somebody(event.cell)
        if view is None:
            self._nobody(event, run)
            return
        question = self._open[event.id] = _StdinQuestion(event, run, view)
        run.done.add_done_callback(lambda done: self._withdraw(question))
        self._views.send(view, event)
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Questions whose view has left, or watches no more, are put to another one."""
        self._looking = False
        for question in list(self._open.values()):
            if not self._is_there(question.view, question.event.cell):
                self._withdraw(question)
                self._ask(question.event, question.run)
        if self._open and not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _goes_on(self, cell: int) -> bool:
        return self._core.state.cells[cell].status in ("queued", "running")

    def _somebody(self, cell: int) -> View | None:
        """Who submitted the cell, if that view is there, else the one that came first."""
        return next((view for view in self._answering.get(cell, []) if self._is_there(view, cell)), None)

    def _is_there(self, view: View, cell: int) -> bool:
        return self._views.views.get(view.identity) is view and cell in view.watching

    def _nobody(self, event: InputRequested, run: Execution) -> None:
        asked = f"asked {event.prompt.strip()!r}" if event.prompt.strip() else "asked for input"
        text = f"{event.node} {asked} and no notebook is there to answer: EOFError"
        self._core.tell("warning", text)
        self._tell(event.cell, text)
        self._reply(run, END_OF_FILE)

    def _withdraw(self, question: _StdinQuestion) -> None:
        if self._open.pop(question.event.id, None) is not None:
            self._views.send(question.view, InputWithdrawn(cell=question.event.cell, id=question.event.id))

    def _reply(self, run: Execution, value: str) -> None:
        node = self._core.state.nodes.get(run.node)
        if node is None or node.incarnation != run.incarnation:
            return
        parts = kernel_message("input_reply", f"answer-{run.message_id}", self._core.state.cluster_id, {"value": value})
        self._delivery.to_kernel(run.node, "stdin", parts)


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
            error_value=str(reply.get("evalue", ""))[:2000],
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


def _was_interrupted(reply: dict[str, Any]) -> bool:
    """A Stop ended the cell, or kept it from beginning while its node waited for the roster."""
    name, value = reply.get("ename"), str(reply.get("evalue", ""))
    return name == "KeyboardInterrupt" or (name == "InputRejected" and "interrupted before the cell began" in value)
