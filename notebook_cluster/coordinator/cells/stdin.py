"""``input()`` on nodes: a view that watches the cell and can answer is asked; without one the node gets end of file.

A node never waits for a view that is gone: twice a second it is looked whether those that were asked are still there.
"""

import asyncio
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_cluster.coordinator import jupyter
from notebook_cluster.coordinator.view_server import View
from notebook_cluster.protocol.asking import AnswerInput, InputRequested, InputWithdrawn
from notebook_cluster.protocol.peer import ToKernel
from notebook_cluster.security.sanitise import safe_text

if TYPE_CHECKING:
    from notebook_cluster.coordinator.cells.executions import Execution
    from notebook_cluster.coordinator.service import Coordinator

LOOK_S = 0.5
MOST_PROMPT = 1000
"""Characters."""
MOST_ANSWER = 1_000_000
END_OF_FILE = "\x04"
"""What makes a kernel raise EOFError (Jupyter messaging, stdin channel)."""


@dataclass
class _Question:
    event: InputRequested
    run: "Execution"
    view: View
    """Who was asked."""


class StdinQuestions:
    """Questions of nodes, and who may answer for which cell."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self._numbers = itertools.count(1)
        self._answering: dict[int, list[View]] = {}
        self._open: dict[int, _Question] = {}
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

    def on_request(self, run: "Execution", content: dict[str, Any]) -> None:
        """The node of ``run`` waits for a line."""
        for question in [question for question in self._open.values() if question.run is run]:
            self._withdraw(question)  # a kernel asks one thing at a time
        prompt = content.get("prompt")
        event = InputRequested(
            cell=run.cell,
            id=next(self._numbers),
            node=run.node,
            rank=self._hub.state.rank(run.node),
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

    def _ask(self, event: InputRequested, run: "Execution") -> None:
        view = self._somebody(event.cell)
        if view is None:
            self._nobody(event, run)
            return
        question = self._open[event.id] = _Question(event, run, view)
        run.done.add_done_callback(lambda done: self._withdraw(question))
        self._hub.views.send(view, event)
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
        return self._hub.state.cells[cell].status in ("queued", "running")

    def _somebody(self, cell: int) -> View | None:
        """Who submitted the cell, if that view is there, else the one that came first."""
        return next((view for view in self._answering.get(cell, []) if self._is_there(view, cell)), None)

    def _is_there(self, view: View, cell: int) -> bool:
        return self._hub.views.views.get(view.identity) is view and cell in view.watching

    def _nobody(self, event: InputRequested, run: "Execution") -> None:
        asked = f"asked {event.prompt.strip()!r}" if event.prompt.strip() else "asked for input"
        text = f"{event.node} {asked} and no notebook is there to answer: EOFError"
        self._hub.tell("warning", text)
        self._hub.cells.changed(event.cell, text)
        self._reply(run, END_OF_FILE)

    def _withdraw(self, question: _Question) -> None:
        if self._open.pop(question.event.id, None) is not None:
            self._hub.views.send(question.view, InputWithdrawn(cell=question.event.cell, id=question.event.id))

    def _reply(self, run: "Execution", value: str) -> None:
        node = self._hub.state.nodes.get(run.node)
        if node is None or node.incarnation != run.incarnation:
            return
        parts = jupyter.message("input_reply", f"answer-{run.message_id}", self._hub.state.cluster_id, {"value": value})
        message = ToKernel(node=run.node, incarnation=run.incarnation, channel="stdin")
        self._hub.peers.send(node.peer, message, parts)
