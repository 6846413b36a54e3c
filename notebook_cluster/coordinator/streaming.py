"""From kernels' output messages to what views show: filtered, kept, sent in small batches."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_cluster.coordinator.outputs import CellOutputs, batches, hint_missing_name
from notebook_cluster.coordinator.viewserver import View
from notebook_cluster.protocol.views import CellOutput, Output
from notebook_cluster.security import safe_output

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

FLUSH_AFTER = 0.015
"""Seconds that output waits for more output before views get it."""


class Streaming:
    """The outputs of all cells of a cluster."""

    def __init__(self, hub: "Coordinator", directory: Path) -> None:
        self._hub = hub
        self._directory = directory
        self._cells: dict[int, CellOutputs] = {}
        self._unsent: dict[int, list[Output]] = {}
        self._scheduled = False

    def open(self, cell: int) -> CellOutputs:
        outputs = self._cells[cell] = CellOutputs(self._directory / f"{cell:06d}.jsonl")
        return outputs

    def add(self, peer: str, sequence: int, node: str, cell: int | None, kind: Any, content: dict[str, Any]) -> None:
        """One output message of ``node``; without ``cell`` (a thread of an earlier cell prints on) for the newest."""
        number = cell if cell is not None else max(self._cells, default=0)
        safe = safe_output(kind, content)
        if number not in self._cells or safe is None:
            return
        if kind == "error":
            missing = hint_missing_name(content, self._hub.state.cells[number].notebook_names)
            if missing is not None:
                hint = f"'{missing}' is in the notebook but not on {node}: %push {missing} sends it"
                safe["traceback"] = [*safe.get("traceback", ()), hint]
        output = Output(node=node, rank=self._hub.state.rank(node), kind=kind, content=safe)
        self._cells[number].add(output, peer, sequence)
        self._unsent.setdefault(number, []).append(output)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(FLUSH_AFTER, self.flush)

    def flush(self) -> None:
        """Send what waits to the views that watch."""
        self._scheduled = False
        unsent, self._unsent = self._unsent, {}
        for number, outputs in unsent.items():
            for batch in batches(outputs):
                self._hub.views.send_watching(number, CellOutput(cell=number, outputs=batch))

    def catch_up(self, view: View, cell: int) -> None:
        """Everything that is kept of ``cell`` to one view."""
        for batch in batches(self._cells[cell].all()) if cell in self._cells else ():
            self._hub.views.send(view, CellOutput(cell=cell, outputs=batch))

    def recover(self) -> dict[str, int]:
        """Outputs from their files; returns the last link message per peer key that brought one."""
        received: dict[str, int] = {}
        for number in self._hub.state.cells:
            outputs = self.open(number)
            outputs.restore()
            for key, sequence in outputs.last_sequence.items():
                received[key] = max(received.get(key, 0), sequence)
        return received

    def close(self) -> None:
        for outputs in self._cells.values():
            outputs.close()
