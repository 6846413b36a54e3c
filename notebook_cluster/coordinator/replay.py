"""A node that (re)starts or joins later: the cluster's earlier cells, silently, then the running one."""

import asyncio
import logging
from typing import TYPE_CHECKING

from notebook_cluster.coordinator import events as e
from notebook_cluster.coordinator.state import Cell

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

log = logging.getLogger(__name__)


class Replay:
    """Brings new incarnations up to where the others are."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._replayed: dict[str, int] = {}
        """The cell that each node replays now."""
        self._deadly: set[tuple[str, int]] = set()
        """Cells whose replay ended a node's process: its next kernel does without them."""

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
        """The node's process ended; the cell that it replayed then, which its next kernel is spared."""
        cell = self._replayed.get(name)
        if cell is not None:
            self._deadly.add((name, cell))
        return cell

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
            if (name, cell.id) not in self._deadly
        ]

    async def _bring_up(self, name: str, replay: bool) -> None:
        incarnation = self._hub.state.nodes[name].incarnation
        for cell in self._missed(name) if replay else ():
            metadata = {"cell": cell.id, "generation": self._hub.state.generation, "replay": True, "nodes": [name]}
            run = self._hub.cells.runs.start(cell, name, metadata, replay=True)
            self._replayed[name] = cell.id
            status = await run.done
            if status == "lost":
                return
            if status != "ok" and run.reply is not None and self._hub.state.cells[cell.id].status == "ok":
                text = f"{run.reply.get('ename', '')}: {run.reply.get('evalue', '')}"
                if run.reply.get("ename") == "StdinNotImplementedError":
                    text = f"an error: it calls input(), which is not asked again; %push sends {name} what it needs"
                self._hub.tell("warning", f"replaying cell {cell.id} on {name} ended with {text}")
        self._replayed.pop(name, None)
        self._join_running(name, incarnation)

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
