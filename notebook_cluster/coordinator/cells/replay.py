"""A node that (re)starts or joins later: the cluster's earlier cells, silently, then the running one."""

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_cluster.coordinator.cells import left_out
from notebook_cluster.coordinator.cells.executions import Execution
from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import Cell
from notebook_cluster.protocol.views import RequestError

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

log = logging.getLogger(__name__)

SAME_CLICK_SECONDS = 1.0
"""The second click of a double one skips no further cell."""
STUBBORN_SECONDS = 3.0
"""How long a skipped cell may take to end until it is said that it does not."""


@dataclass(frozen=True)
class Replayed:
    """The earlier cell that a node runs now."""

    run: Execution
    place: int
    """From 1 among those that the node was to run."""
    count: int
    began: float
    """On the loop's clock."""


class Replay:
    """Brings new incarnations up to where the others are."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._replayed: dict[str, Replayed] = {}
        self._skipped: dict[str, tuple[float, int]] = {}
        """When a cell was skipped last on a node, and which."""
        self._said: set[tuple[str, int]] = set()
        """Node and incarnation of which a cell was told what it does without."""

    def start(self, name: str, *, replay: bool) -> None:
        """``name`` is in the roster: replay what it missed, if ``replay``, then let it join the running cell."""
        self.cancel(name)
        task = self._tasks[name] = asyncio.ensure_future(self._bring_up(name, replay))
        task.add_done_callback(lambda done: self._ended(name, done))

    def cancel(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        self._replayed.pop(name, None)
        if task is not None:
            task.cancel()

    def died(self, name: str) -> int | None:
        """The node's process ended by itself; the cell that it replayed then, which its next kernel is spared."""
        replayed = self._replayed.get(name)
        if replayed is None:
            return None
        cell = replayed.run.cell
        if cell not in self._hub.state.nodes[name].left_out:
            self._leave_out(name, cell, "died")
        return cell

    async def skip(self, name: str) -> int:
        """End the replay of one cell on ``name``, which goes on with the next one; returns its number.

        RequestError: there is none, or it does not end.
        """
        self._hub.members.known(name)
        now = asyncio.get_running_loop().time()
        when, cell = self._skipped.get(name, (-SAME_CLICK_SECONDS, 0))
        if now - when < SAME_CLICK_SECONDS:
            return cell
        replayed = self._replayed.get(name)
        if replayed is None:
            raise RequestError(f"node {name!r} replays no cell now: nothing to skip")
        run = replayed.run
        self._skipped[name] = now, run.cell
        self._leave_out(name, run.cell, "skipped")
        self._hub.tell("info", f"cell {run.cell} is skipped on {name}")
        self._hub.cells.runs.interrupt(run)
        done, _ = await asyncio.wait([run.done], timeout=STUBBORN_SECONDS)
        if not done:
            raise RequestError(
                f"cell {run.cell} does not stop on {name!r}: %cluster restart {name} starts it anew without that cell"
            )
        return run.cell

    def progress(self, name: str) -> str:
        """``replaying cell 2 of 3, 40 s``, or empty."""
        replayed = self._replayed.get(name)
        if replayed is None:
            return ""
        seconds = int(asyncio.get_running_loop().time() - replayed.began)
        time = f"{seconds} s" if seconds < 120 else f"{seconds // 60} min {seconds % 60} s"
        return f"replaying cell {replayed.place} of {replayed.count}, {time}"

    def lacks(self, name: str) -> str:
        """``mini runs without cell 2, which was skipped: ...``, or empty."""
        node = self._hub.state.nodes.get(name)
        text = left_out.describe(name, node.left_out) if node is not None else ""
        return f"{name} runs {text}" if text else ""

    def say_left_out(self, cell: int, names: list[str]) -> None:
        """Tell who watches ``cell``, which begins on these nodes, what they do without: once for each kernel."""
        for name in names:
            kernel = name, self._hub.state.nodes[name].incarnation
            if kernel not in self._said and (text := self.lacks(name)):
                self._said.add(kernel)
                self._hub.cells.changed(cell, text)

    def _leave_out(self, name: str, cell: int, why: e.LeftOutWhy) -> None:
        incarnation = self._hub.state.nodes[name].incarnation
        self._hub.record(e.ReplayLeftOut(node=name, incarnation=incarnation, cell=cell, why=why))
        self._hub.dirty()

    def names(self) -> list[str]:
        """Nodes that replay now."""
        return list(self._tasks)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
            self._replayed.pop(name, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("replay on %s failed", name, exc_info=task.exception())
        self._hub.members.settled(name)
        self._hub.cells.look()

    def _missed(self, name: str) -> list[Cell]:
        """Cells whose effects the node lacks. One that was interrupted may never end: left out."""
        state = self._hub.state
        running = state.running()
        last = running.id if running is not None else max(state.cells, default=0) + 1
        return [
            cell
            for cell in state.cells.values()
            if cell.replay and cell.id < last and cell.wants(name) and cell.status in ("ok", "error")
            if cell.id not in state.nodes[name].left_out
        ]

    async def _bring_up(self, name: str, replay: bool) -> None:
        incarnation = self._hub.state.nodes[name].incarnation
        missed = self._missed(name) if replay else []
        for place, cell in enumerate(missed, 1):
            metadata = {"cell": cell.id, "generation": self._hub.state.generation, "replay": True, "nodes": [name]}
            run = self._hub.cells.runs.start(cell, name, metadata, replay=True)
            self._replayed[name] = Replayed(run, place, len(missed), asyncio.get_running_loop().time())
            self._hub.dirty()
            status = await run.done
            if status == "lost":
                return
            self._replay_ended(name, run, status)
        self._replayed.pop(name, None)
        self._join_running(name, incarnation)

    def _replay_ended(self, name: str, run: Execution, status: str) -> None:
        is_left_out = run.cell in self._hub.state.nodes[name].left_out
        if status == "ok" and is_left_out:
            self._leave_out(name, run.cell, "")  # it was faster than Skip, or does not care
        elif status == "interrupted" and not is_left_out:
            self._leave_out(name, run.cell, "stopped")
        elif status != "ok" and not is_left_out and run.reply is not None:
            if self._hub.state.cells[run.cell].status != "ok":
                return  # as it was then
            text = f"{run.reply.get('ename', '')}: {run.reply.get('evalue', '')}"
            if run.reply.get("ename") == "StdinNotImplementedError":
                text = f"an error: it calls input(), which is not asked again; %push sends {name} what it needs"
            self._hub.tell("warning", f"replaying cell {run.cell} on {name} ended with {text}")

    def _join_running(self, name: str, incarnation: int) -> None:
        running = self._hub.state.running()
        node = self._hub.state.nodes.get(name)
        if running is None or node is None or node.incarnation != incarnation or not running.may_run(name):
            return
        if self._hub.cells.was_interrupted(running.id):
            return
        again = " again" if name in running.nodes else ""
        self._hub.record(e.CellJoined(cell=running.id, node=name))
        self._hub.rounds.node_joined_cell(running.id, name)
        metadata = {"cell": running.id, "generation": self._hub.state.generation, "joined": True, "nodes": [name]}
        self._hub.cells.runs.start(running, name, metadata)
        self._hub.tell("info", f"{name} runs cell {running.id}{again}")
        self._hub.cells.changed(running.id)
        self.say_left_out(running.id, [name])
