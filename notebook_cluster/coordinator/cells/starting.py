"""On which nodes a cell starts: it waits for named ones that start again, not for ever, and a canary runs it first."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from notebook_cluster.coordinator.cells.executions import Executions
from notebook_cluster.coordinator.cells.notices import Notices
from notebook_cluster.coordinator.cells.replay import Replay
from notebook_cluster.coordinator.core import CellWatcher, Core
from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import Cell
from notebook_cluster.protocol.views import Execute, RequestError

PATIENCE_S = 30.0
"""A kernel starts in 1 to 20 s. What it replays then may take longer, and is waited for."""
LOOK_S = 0.5


class Starting:
    """Which cells wait for nodes that start, and since when."""

    def __init__(self, core: Core, notices: Notices, replay: Replay, look_at_cells: Callable[[], None]) -> None:
        """``look_at_cells`` starts the next cell if it can start now."""
        self._core = core
        self._notices = notices
        self._replay = replay
        self._look_at_cells = look_at_cells
        self._since: dict[int, float] = {}
        self._told: dict[int, str] = {}
        self._timer: asyncio.TimerHandle | None = None

    def waits(self, cell: Cell) -> bool:
        """True while ``cell``, the next one, is not to start yet; it is looked at again soon."""
        nodes = self._core.state.nodes
        named = [name for name in cell.targets if name in nodes and cell.may_run(name)]
        starting = [name for name in named if nodes[name].condition == "starting"]
        if starting and time.monotonic() - self._since.setdefault(cell.id, time.monotonic()) > PATIENCE_S:
            starting = []
        replaying = self._replay.names() if cell.id in self._since else []
        behind = [name for name in named if name in replaying]
        if not starting and not behind:
            self._forget(cell.id)
            return False
        whom = ", ".join(starting or behind)
        note = f"waiting for {whom}, which {'start' if starting else 'replay earlier cells'}"
        if len(starting or behind) == 1:
            note = f"waiting for {whom}, which {'starts' if starting else 'replays earlier cells'}"
        if self._told.get(cell.id) != note:
            self._told[cell.id] = note
            self._notices.changed(cell.id, note)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        return True

    def leave_out(self, cell: Cell) -> None:
        """Note of each named node that cannot run ``cell`` why it does not."""
        replaying = self._replay.names()
        for name in cell.targets:
            node = self._core.state.nodes.get(name)
            if not cell.may_run(name) or name in replaying or (node is not None and node.is_in):
                continue
            if node is None:
                why = "it was removed from the cluster"
            elif node.condition == "starting":
                why = f"it has not started within {PATIENCE_S:g} s: %cluster logs {name} may say why"
            else:
                why = f"it is {node.condition} ({node.reason}): %cluster restart {name}"
            self._core.record(e.CellNodeEnded(cell=cell.id, node=name, status="cancelled", reason=why))

    def _look(self) -> None:
        self._timer = None
        self._look_at_cells()

    def _forget(self, cell: int) -> None:
        self._since.pop(cell, None)
        self._told.pop(cell, None)


class Canaries:
    """A cell with a canary: one node runs it first, in a world of its own; the others run it when that went well."""

    def __init__(
        self,
        core: Core,
        *,
        executions: Executions,
        notices: Notices,
        replay: Replay,
        watcher: CellWatcher,
    ) -> None:
        self._core = core
        self._executions = executions
        self._notices = notices
        self._replay = replay
        self._watcher = watcher

    def check(self, request: Execute) -> None:
        """Refuse a canary that cannot be the first.

        Raises:
            RequestError: no node of the cluster, not up, or not among the targets.
        """
        name = request.canary
        if not name:
            return
        node = self._core.known_node(name)
        if not node.is_in:
            raise RequestError(f"the canary {name!r} is {node.condition}: name another one with --canary NODE")
        if request.targets and name not in request.targets:
            among = ", ".join(request.targets)
            raise RequestError(f"the canary {name!r} is not among the nodes that run the cell: {among}")

    def widen(self, cell: Cell) -> bool:
        """The canary has ended: start the others when it went well, else note that they do not run it.

        Returns:
            True when the cell goes on.
        """
        if not cell.canary or cell.widened:
            return False
        # Nodes that replay earlier cells join this one when they have caught up.
        replaying = self._replay.names()
        others = [
            node.name
            for node in self._core.state.roster_nodes()
            if cell.wants(node.name) and node.name != cell.canary and node.name not in replaying
        ]
        status = cell.nodes.get(cell.canary)
        if status == "interrupted" or self._executions.was_interrupted(cell.id):
            return False
        generation = self._core.state.generation
        self._core.record(e.CellWidened(cell=cell.id, nodes=others if status == "ok" else [], generation=generation))
        if status != "ok":
            reason = f"only {cell.canary}, the canary, ran it"
            for name in others:
                self._core.record(e.CellNodeEnded(cell=cell.id, node=name, status="cancelled", reason=reason))
            return False
        if not others:
            return False
        self._watcher.cell_started(cell.id, others)
        widened = self._core.state.cells[cell.id]
        metadata: dict[str, Any] = {"cell": cell.id, "generation": self._core.state.generation, "nodes": others}
        for name in others:
            self._executions.start(widened, name, metadata)
        count = "the other node" if len(others) == 1 else f"the other {len(others)} nodes"
        self._notices.changed(cell.id, f"{cell.canary} ran it without an error: now {count}")
        return True
