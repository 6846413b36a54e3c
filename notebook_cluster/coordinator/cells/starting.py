"""A cell for nodes that are named, while one of them starts or starts again: it waits for that node, not for ever."""

import asyncio
import time
from typing import TYPE_CHECKING

from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import Cell

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

PATIENCE_S = 30.0
"""A kernel starts in 1 to 20 s. What it replays then may take longer, and is waited for."""
LOOK_S = 0.5


class Starting:
    """Which cells wait for nodes that start, and since when."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self._since: dict[int, float] = {}
        self._told: dict[int, str] = {}
        self._timer: asyncio.TimerHandle | None = None

    def waits(self, cell: Cell) -> bool:
        """True while ``cell``, the next one, is not to start yet; it is looked at again soon."""
        nodes = self._hub.state.nodes
        named = [name for name in cell.targets if name in nodes and cell.may_run(name)]
        starting = [name for name in named if nodes[name].condition == "starting"]
        if starting and time.monotonic() - self._since.setdefault(cell.id, time.monotonic()) > PATIENCE_S:
            starting = []
        replaying = self._hub.replay.names() if cell.id in self._since else []
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
            self._hub.cells.changed(cell.id, note)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        return True

    def leave_out(self, cell: Cell) -> None:
        """Note of each named node that cannot run ``cell`` why it does not."""
        replaying = self._hub.replay.names()
        for name in cell.targets:
            node = self._hub.state.nodes.get(name)
            if not cell.may_run(name) or name in replaying or (node is not None and node.is_in):
                continue
            if node is None:
                why = "it was removed from the cluster"
            elif node.condition == "starting":
                why = f"it has not started within {PATIENCE_S:g} s: %cluster logs {name} may say why"
            else:
                why = f"it is {node.condition} ({node.reason}): %cluster restart {name}"
            self._hub.record(e.CellNodeEnded(cell=cell.id, node=name, status="cancelled", reason=why))

    def _look(self) -> None:
        self._timer = None
        self._hub.cells.look()

    def _forget(self, cell: int) -> None:
        self._since.pop(cell, None)
        self._told.pop(cell, None)
