"""From kernels' output messages to what views show: filtered, kept, sent in small batches."""

import asyncio
import shutil
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_cluster.coordinator.cells.flow import Flow
from notebook_cluster.coordinator.cells.outputs import CellOutputs, batches, hint_missing_name, pieces_of, size_of
from notebook_cluster.coordinator.view_server import View
from notebook_cluster.protocol.views import CellOutput, Output
from notebook_cluster.security import safe_output

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

FLUSH_AFTER = 0.015
"""Seconds that output waits for more output before views get it."""
CELLS_IN_MEMORY = 20


class OutputStreaming:
    """The outputs of all cells of a cluster."""

    def __init__(self, hub: "Coordinator", directory: Path) -> None:
        self._hub = hub
        self._directory = directory
        self._cells: dict[int, CellOutputs] = {}
        self._unsent: dict[int, list[Output]] = {}
        self._in_memory: deque[int] = deque()
        self._positions: dict[int, int] = {}
        """Bytes of a cell's output that views were offered."""
        self._scheduled = False

    def open(self, cell: int) -> CellOutputs:
        """Keep the output of ``cell`` from now on; of cells long before it only the files."""
        self._in_memory.append(cell)
        if len(self._in_memory) > CELLS_IN_MEMORY:
            self._cells[self._in_memory.popleft()].unload()
        outputs = self._cells[cell] = CellOutputs(self._directory / f"{cell:06d}.jsonl")
        return outputs

    def discard_old(self) -> None:
        """Delete what an earlier cluster of this name has left."""
        for index in self._directory.glob("*.jsonl"):
            index.unlink()
            shutil.rmtree(index.with_suffix(""), ignore_errors=True)

    def add(self, peer: str, sequence: int, node: str, cell: int | None, kind: Any, content: dict[str, Any]) -> None:
        """One output message of ``node``; without ``cell`` (a thread of an earlier cell prints on) for the newest."""
        number = cell if cell is not None else max(self._cells, default=0)
        safe = safe_output(kind, content, self._hub.comms.view_of(node))
        if number not in self._cells or safe is None:
            return
        if kind == "error":
            missing = hint_missing_name(content, self._hub.state.cells[number].notebook_names)
            if missing is not None:
                hint = f"'{missing}' is in the notebook but not on the node: %push {missing} sends it"
                safe["traceback"] = [*safe.get("traceback", ()), hint]
        output = Output(node=node, rank=self._hub.state.rank(node), kind=kind, content=safe)
        self._write(self._cells[number], output, peer, sequence)
        self._unsent.setdefault(number, []).extend(pieces_of(output))
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(FLUSH_AFTER, self.flush)

    def _write(self, outputs: CellOutputs, output: Output, peer: str, sequence: int) -> None:
        before = outputs.files.trouble
        outputs.add(output, peer, sequence)
        if outputs.files.trouble and not before:
            reason = f"{outputs.files.trouble} (free some space; %cluster stop deletes nothing of it)"
            self._hub.tell("warning", f"output is not kept in {outputs.files.folder} any more: {reason}")

    def flush(self) -> None:
        """Send what waits to the views that watch, to each as much as it takes in."""
        self._scheduled = False
        unsent, self._unsent = self._unsent, {}
        for number, outputs in unsent.items():
            for batch in batches(outputs):
                self._offer(number, batch)

    def _offer(self, cell: int, batch: list[Output]) -> None:
        before = self._positions.get(cell, 0)
        position = self._positions[cell] = before + sum(map(size_of, batch))
        ready = []
        for view in self._hub.views.watching(cell):
            flow = view.flows.get(cell)
            if flow is None:
                flow = view.flows[cell] = Flow(self._cells[cell].files.text_path, before)
            if flow.offer(batch, position):
                ready.append(view)
        self._hub.views.send_to(ready, CellOutput(cell=cell, outputs=batch, position=position))

    def taken(self, view: View, cell: int, position: int) -> None:
        """``view`` has read the output of ``cell`` up to ``position``."""
        flow = view.flows.get(cell)
        if flow is not None:
            flow.taken(position)
            if flow.ready:
                self._release(view, cell, flow)

    def finish(self, cell: int) -> None:
        """The cell ends: send every view the rest."""
        self.flush()
        for view in self._hub.views.watching(cell):
            flow = view.flows.pop(cell, None)
            if flow is not None and flow.backlog:
                self._release(view, cell, flow)
        self._positions.pop(cell, None)
        if cell in self._cells:
            self._cells[cell].close()

    def _release(self, view: View, cell: int, flow: Flow) -> None:
        outputs, position = flow.release()
        for batch in batches(outputs):
            self._hub.views.send(view, CellOutput(cell=cell, outputs=batch, position=position))

    def catch_up(self, view: View, cell: int) -> None:
        """Everything that is kept of ``cell`` to one view."""
        outputs = self._cells.get(cell)
        for batch in batches(outputs.all()) if outputs is not None else ():
            self._hub.views.send(view, CellOutput(cell=cell, outputs=batch))
        if outputs is not None and cell not in self._in_memory:
            outputs.unload()

    def recover(self) -> dict[str, int]:
        """Outputs from their files; returns the last link message per peer key that brought one."""
        received: dict[str, int] = {}
        for number in self._hub.state.cells:
            outputs = self.open(number)
            outputs.load()
            for key, sequence in outputs.last_sequence.items():
                received[key] = max(received.get(key, 0), sequence)
        return received

    def close(self) -> None:
        for outputs in self._cells.values():
            outputs.close()
