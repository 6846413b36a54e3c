"""A node that (re)starts or joins later: the cluster's earlier cells, silently, then the running one."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from notebook_cluster.coordinator.cells.executions import Executions
from notebook_cluster.coordinator.cells.notices import Notices
from notebook_cluster.coordinator.cells.questions import Execution
from notebook_cluster.coordinator.core import CellWatcher, Core, Departure, MembershipWatcher
from notebook_cluster.coordinator.nodes.membership import Membership
from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import Cell
from notebook_cluster.protocol.views import RequestError

log = logging.getLogger(__name__)

SAME_CLICK_SECONDS = 1.0
"""The second click of a double one skips no further cell."""
STUBBORN_SECONDS = 3.0
"""How long a skipped cell may take to end until it is said that it does not."""
_LEFT_OUT_WHY = {
    "died": ("whose replay ended its kernel", "whose replays ended its kernel"),
    "skipped": ("which was skipped", "which were skipped"),
    "stopped": ("which Stop interrupted", "which Stop interrupted"),
}
_MOST_LEFT_OUT = 6


@dataclass(frozen=True)
class Replayed:
    """The earlier cell that a node runs now."""

    run: Execution
    place: int
    """From 1 among those that the node was to run."""
    count: int
    began: float
    """On the loop's clock."""


class Replay(MembershipWatcher):
    """Brings new incarnations up to where the others are."""

    def __init__(
        self,
        core: Core,
        *,
        membership: Membership,
        executions: Executions,
        notices: Notices,
        watcher: CellWatcher,
        on_ended: Callable[[], None],
    ) -> None:
        """``on_ended`` is called whenever a node has caught up, or never will."""
        self._core = core
        self._membership = membership
        self._executions = executions
        self._notices = notices
        self._watcher = watcher
        self._on_ended = on_ended
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._replayed: dict[str, Replayed] = {}
        self._skipped: dict[str, tuple[float, int]] = {}
        """When a cell was skipped last on a node, and which."""
        self._said: set[tuple[str, int]] = set()
        """Node and incarnation of which a cell was told what it does without."""

    def node_up(self, name: str, *, replay: bool) -> None:
        """``name`` is in the roster: replay what it missed, if ``replay``, then let it join the running cell."""
        if not self._core.state.cells:
            return
        self._cancel(name)
        task = self._tasks[name] = asyncio.ensure_future(self._bring_up(name, replay))
        task.add_done_callback(lambda done: self._ended(name, done))

    def node_down(self, departure: Departure) -> None:
        self._cancel(departure.node)

    def _cancel(self, name: str) -> None:
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
        if cell not in self._core.state.nodes[name].left_out:
            self._leave_out(name, cell, "died")
        return cell

    async def skip(self, name: str) -> int:
        """End the replay of one cell on ``name``, which goes on with the next one; returns its number.

        RequestError: there is none, or it does not end.
        """
        self._core.known_node(name)
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
        self._core.tell("info", f"cell {run.cell} is skipped on {name}")
        self._executions.interrupt(run)
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
        node = self._core.state.nodes.get(name)
        text = describe_left_out(name, node.left_out) if node is not None else ""
        return f"{name} runs {text}" if text else ""

    def say_left_out(self, cell: int, names: list[str]) -> None:
        """Tell who watches ``cell``, which begins on these nodes, what they do without: once for each kernel."""
        for name in names:
            kernel = name, self._core.state.nodes[name].incarnation
            if kernel not in self._said and (text := self.lacks(name)):
                self._said.add(kernel)
                self._notices.changed(cell, text)

    def _leave_out(self, name: str, cell: int, why: e.LeftOutWhy) -> None:
        incarnation = self._core.state.nodes[name].incarnation
        self._core.record(e.ReplayLeftOut(node=name, incarnation=incarnation, cell=cell, why=why))
        self._core.dirty()

    def names(self) -> list[str]:
        """Nodes that replay now."""
        return list(self._tasks)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
            self._replayed.pop(name, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("replay on %s failed", name, exc_info=task.exception())
        self._membership.settled(name)
        self._on_ended()

    def _missed(self, name: str) -> list[Cell]:
        """Cells whose effects the node lacks. One that was interrupted may never end: left out."""
        state = self._core.state
        running = state.running()
        last = running.id if running is not None else max(state.cells, default=0) + 1
        return [
            cell
            for cell in state.cells.values()
            if cell.replay and cell.id < last and cell.wants(name) and cell.status in ("ok", "error")
            if cell.id not in state.nodes[name].left_out
        ]

    async def _bring_up(self, name: str, replay: bool) -> None:
        incarnation = self._core.state.nodes[name].incarnation
        missed = self._missed(name) if replay else []
        for place, cell in enumerate(missed, 1):
            metadata = {"cell": cell.id, "generation": self._core.state.generation, "replay": True, "nodes": [name]}
            run = self._executions.start(cell, name, metadata, replay=True)
            self._replayed[name] = Replayed(run, place, len(missed), asyncio.get_running_loop().time())
            self._core.dirty()
            status = await run.done
            if status == "lost":
                return
            self._replay_ended(name, run, status)
        self._replayed.pop(name, None)
        self._tasks.pop(name, None)  # it is over, for all who ask, before they are told that the node joins
        self._join_running(name, incarnation)

    def _replay_ended(self, name: str, run: Execution, status: str) -> None:
        is_left_out = run.cell in self._core.state.nodes[name].left_out
        if status == "ok" and is_left_out:
            self._leave_out(name, run.cell, "")  # it was faster than Skip, or does not care
        elif status == "interrupted" and not is_left_out:
            self._leave_out(name, run.cell, "stopped")
        elif status != "ok" and not is_left_out and run.reply is not None:
            if self._core.state.cells[run.cell].status != "ok":
                return  # as it was then
            text = f"{run.reply.get('ename', '')}: {run.reply.get('evalue', '')}"
            if run.reply.get("ename") == "StdinNotImplementedError":
                text = f"an error: it calls input(), which is not asked again; %push sends {name} what it needs"
            self._core.tell("warning", f"replaying cell {run.cell} on {name} ended with {text}")

    def _join_running(self, name: str, incarnation: int) -> None:
        running = self._core.state.running()
        node = self._core.state.nodes.get(name)
        if running is None or node is None or node.incarnation != incarnation or not running.may_run(name):
            return
        if self._executions.was_interrupted(running.id):
            return
        again = " again" if name in running.nodes else ""
        self._core.record(e.CellJoined(cell=running.id, node=name))
        self._watcher.node_joined(running.id, name)
        metadata = {"cell": running.id, "generation": self._core.state.generation, "joined": True, "nodes": [name]}
        self._executions.start(running, name, metadata)
        self._core.tell("info", f"{name} runs cell {running.id}{again}")
        self._notices.changed(running.id)
        self.say_left_out(running.id, [name])


def describe_left_out(node: str, left_out: Mapping[int, e.LeftOutWhy]) -> str:
    """What a node's kernel does without, as one line; empty without any: ``without cell 2, which was skipped: %cluster
    restart mini --all-cells runs it again``."""
    parts = []
    for why, (one, several) in _LEFT_OUT_WHY.items():
        cells = sorted(cell for cell, reason in left_out.items() if reason == why)
        if len(cells) == 1:
            parts.append(f"cell {cells[0]}, {one}")
        elif cells:
            more = f" and {len(cells) - _MOST_LEFT_OUT} more" if len(cells) > _MOST_LEFT_OUT else ""
            parts.append(f"cells {', '.join(map(str, cells[:_MOST_LEFT_OUT]))}{more}, {several}")
    if not parts:
        return ""
    # Another kernel is given what Stop interrupted.
    option = " --all-cells" if set(left_out.values()) - {"stopped"} else ""
    them = "it" if len(left_out) == 1 else "them"
    return f"without {', and '.join(parts)}: %cluster restart {node}{option} runs {them} again"
