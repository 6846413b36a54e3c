"""What the panel's buttons do, and what the panel says about it.

Each action runs on a thread of its own, because adding a node takes as long as its kernel needs to start; the panel's
thread hears about the end through ``post``.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from notebook_cluster.protocol.names import as_name
from notebook_cluster.protocol.state import CellView
from notebook_cluster.widgets.formatting import plain

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster

ANSWER_SECONDS = {"done": 8.0, "failed": 60.0}
"""How long an answer stays after the action ended."""
STOP_SECONDS = 3.0
"""How long a cell may take to end after a Stop until its nodes are called busy."""
_AT_ONCE = 8
_MAX_CODE = 64
_STARTING = {
    "interrupt": "Interrupting the running cell…",
    "checkpoint": "Saving checkpoint {target}…",
    "stop": "Stopping the cluster…",
    "add": "Adding {target}…",
    "remove": "Removing {target}…",
    "restart": "Restarting {target}…",
    "skip": "Skipping the cell that {target} replays…",
    "hand_over": "Handing the cluster over to {target}…",
}
_STILL_BUSY = "Still busy: "
_NEEDS_TARGET = frozenset({"checkpoint", "add", "remove", "restart", "skip", "hand_over"})


@dataclass
class ActionAnswer:
    """One line of feedback. ``id`` is the browser's, so that it can replace its own line by this one."""

    id: str
    key: tuple[str, str]
    text: str
    status: Literal["running", "done", "failed"] = "running"
    ended: float = field(default=0.0)


class Actions:
    """Runs the actions of one panel. Used by the panel's thread only."""

    def __init__(self, cluster: "Cluster", post: Callable[[Callable[[], None]], None]) -> None:
        self._cluster = cluster
        self._post = post
        self._answers: list[ActionAnswer] = []
        self._stubborn: tuple[str, ...] = ()
        self._stopped: int | None = None
        """The cell that was stopped last."""

    def ask(self, message: object) -> None:
        """Start what a message ``{action, target, id, code}`` of the browser asks for; else answer a refusal. ``code``
        pairs with a peer that is not trusted yet; it appears in no answer."""
        content: dict[str, Any] = message if isinstance(message, dict) else {}
        action, target = str(content.get("action", "")), str(content.get("target", ""))
        code = plain(content.get("code", ""), _MAX_CODE)
        answer = ActionAnswer(id=plain(content.get("id", ""), 40), key=(action, target), text="")
        running = [other for other in self._answers if other.status == "running"]
        if action not in _STARTING or (action in _NEEDS_TARGET and not target):
            self._end(answer, "failed", f"the panel knows no action {plain(action, 40)!r}: reload the page")
        elif any(other.key == answer.key for other in running):
            self._end(answer, "failed", "this is being done already")
        elif len(running) >= _AT_ONCE:
            self._end(answer, "failed", f"{_AT_ONCE} actions run already: wait until one has ended")
        else:
            answer.text = _STARTING[action].format(target=plain(target, 64))
            threading.Thread(target=self._perform, args=(answer, code), name=f"panel-{action}", daemon=True).start()
        self._answers.append(answer)

    def answers(self) -> list[dict[str, str]]:
        """The answers to show now, oldest first; outdated ones are forgotten."""
        now = time.monotonic()
        self._answers = [
            answer
            for answer in self._answers
            if answer.status == "running" or now - answer.ended < ANSWER_SECONDS[answer.status]
        ][-4 - _AT_ONCE :]
        return [{"id": answer.id, "text": answer.text, "status": answer.status} for answer in self._answers]

    def next_expiry(self) -> float | None:
        """Seconds until the next answer is outdated, or None."""
        ends = [answer.ended + ANSWER_SECONDS[answer.status] for answer in self._answers if answer.status != "running"]
        return max(min(ends) - time.monotonic(), 0.0) if ends else None

    def see(self, cell: CellView | None) -> None:
        """How the newest cell is doing now. When none of the nodes that a Stop has left busy still is, the next Stop is
        a first one again, and nothing is said of them any more."""
        running = cell.nodes if cell is not None and cell.status == "running" and cell.id == self._stopped else {}
        if self._stubborn and not any(running.get(name) == "running" for name in self._stubborn):
            self._stubborn = ()
        if not self._stubborn:
            self._answers = [answer for answer in self._answers if not answer.text.startswith(_STILL_BUSY)]

    def _perform(self, answer: ActionAnswer, code: str) -> None:
        try:
            end = partial(self._end, answer, "done", self._call(*answer.key, code))
        except Exception as error:  # Whatever went wrong, the person who clicked is told.
            end = partial(self._end, answer, "failed", plain(error, 300) or type(error).__name__)
        self._post(end)

    def _call(self, action: str, target: str, code: str) -> str:
        match action:
            case "interrupt":
                return self._interrupt()
            case "checkpoint":
                name = as_name(target, "checkpoint")
                job, _, _ = target.rpartition("-round-")  # as the panel names it, else it is for the only job
                self._cluster.checkpoint(name, job)
                return f"Checkpoint {name} saved"
            case "add":
                added = self._cluster.add(target, code=code)
                return plain(f"{', '.join(added)} added") if added else plain(f"{target}: no node was added")
            case "remove":
                self._cluster.remove(target)
                return plain(f"{target} removed")
            case "restart":
                self._cluster.restart(target)
                return plain(f"{target} restarted")
            case "skip":
                return plain(f"Cell {self._cluster.skip(target)} skipped on {target}")
            case "hand_over":
                return plain(f"The cluster is led from {self._cluster.hand_over(target) or 'this machine'} now")
        self._cluster.stop()
        return "The cluster was stopped"

    def _interrupt(self) -> str:
        force, self._stubborn = bool(self._stubborn), ()
        running = self._cluster.interrupt(force=force)
        if force:
            return plain(f"Killed and started again: {', '.join(running)}") if running else "Interrupted"
        self._stubborn = self._still_busy(running)
        names = ", ".join(self._stubborn)
        return plain(f"{_STILL_BUSY}{names}. Stop cell again kills and restarts it") if names else "Interrupted"

    def _still_busy(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of ``names`` that still run the cell when a Stop had STOP_SECONDS to reach them."""
        until = time.monotonic() + STOP_SECONDS
        while True:
            cell = self._cluster.state().cell
            self._stopped = cell.id if cell is not None else None
            running = cell.nodes if cell is not None and cell.status == "running" else {}
            busy = tuple(name for name in names if running.get(name) == "running")
            if not busy or time.monotonic() >= until:
                return busy
            time.sleep(0.1)

    def _end(self, answer: ActionAnswer, status: Literal["done", "failed"], text: str) -> None:
        answer.status, answer.text, answer.ended = status, text, time.monotonic()
