"""``input()`` on nodes: who is asked, and the answers; and the runs of cells on nodes that ask."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.delivery import Delivery, kernel_message
from notebook_cluster.coordinator.view_server import View, ViewServer
from notebook_cluster.protocol.hand_over import Moved, OpenQuestion
from notebook_cluster.protocol.interaction import AnswerInput, InputRequested, InputWithdrawn
from notebook_cluster.security.sanitise import safe_text

LOOK_S = 0.5
"""Seconds between two looks whether the views that were asked for a line are still there."""
MOST_PROMPT = 1000
"""Characters."""
MOST_ANSWER = 1_000_000
END_OF_FILE = "\x04"
"""What makes a kernel raise EOFError (Jupyter messaging, stdin channel)."""


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
        view.answers.add(cell)
        if submits:
            self._allowed = {number for number in self._allowed if self._goes_on(number)} | {cell}

    def moved(self) -> tuple[list[int], list[OpenQuestion], int]:
        """For the next coordinator: the cells that may ask, what is asked now, and the number after the last one."""
        questions = [OpenQuestion(question.event, question.run.incarnation) for question in self._open.values()]
        return sorted(self._allowed), questions, next(self._numbers)

    def asked(self, view: View) -> list[int]:
        """The questions that are put to ``view`` now."""
        return [number for number, question in self._open.items() if question.view is view]

    def restore(self, moved: Moved, runs: Callable[[int], list[Execution]]) -> None:
        """Wait for the answers to what the coordinator before this one has asked; ``runs(cell)``: those that go on."""
        self._allowed, self._numbers = set(moved.may_ask), itertools.count(moved.next_question)
        for view in self._views.views.values():
            for cell in view.answers:
                self._answering.setdefault(cell, []).append(view)
        for question in moved.questions:
            event = question.event
            here = [
                run for run in runs(event.cell) if (run.node, run.incarnation) == (event.node, question.incarnation)
            ]
            for run in here:
                knows = [view for view in self._views.views.values() if event.id in view.asked]
                if knows:
                    self._put_to(knows[0], event, run)
                else:
                    self._ask(event, run)

    def close(self) -> None:
        """Another coordinator waits for the answers."""
        self._open.clear()

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
        self._put_to(view, event, run)
        self._views.send(view, event)

    def _put_to(self, view: View, event: InputRequested, run: Execution) -> None:
        """``view`` knows of the question, or hears of it now."""
        question = self._open[event.id] = _StdinQuestion(event, run, view)
        run.done.add_done_callback(lambda done: self._withdraw(question))
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
        there = self._views.views.get(view.identity) is view and not view.stands_still
        return there and cell in view.watching

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
