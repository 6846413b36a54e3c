"""From kernels' output messages to what views show: filtered, kept, sent in small batches; and last values of cells."""

import asyncio
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from notebook_cluster.coordinator.cells.cell_files import Origin
from notebook_cluster.coordinator.cells.outputs import (
    CellOutputs,
    Flow,
    batches,
    hint_missing_name,
    hint_other_nodes,
    pieces_of,
    size_of,
)
from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.view_server import View, ViewServer
from notebook_cluster.protocol.interaction import MOST_PACKED_BYTES, VALUE_KEY, VALUE_MIME, NodeValue
from notebook_cluster.protocol.views import CellOutput, Output
from notebook_cluster.security import WidgetView, safe_output

FLUSH_AFTER = 0.015
"""Seconds that output waits for more output before views get it."""
CELLS_IN_MEMORY = 20
MOST_KEPT_BYTES = 64 * 1024 * 1024
"""Of last values, over all cells; the oldest values go first."""


class OutputStreaming:
    """The outputs of all cells of a cluster."""

    def __init__(
        self, core: Core, views: ViewServer, directory: Path, *, widget_view: Callable[[str], WidgetView]
    ) -> None:
        """``directory`` has the files; ``widget_view(node)`` says how displays of that node name a widget."""
        self._core = core
        self._views = views
        self._directory = directory
        self._widget_view = widget_view
        self._flows: WeakKeyDictionary[View, dict[int, Flow]] = WeakKeyDictionary()
        """How far each view is with the output of the cells that it watches."""
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

    def add(self, origin: Origin, node: str, cell: int | None, kind: Any, content: dict[str, Any]) -> None:
        """One output message of ``node``; without ``cell`` (a thread of an earlier cell prints on) for the newest."""
        number = cell if cell is not None else max(self._cells, default=0)
        safe = safe_output(kind, content, self._widget_view(node))
        if number not in self._cells or safe is None:
            return
        state = self._core.state
        if kind == "error":
            missing = hint_missing_name(content, state.cells[number].notebook_names)
            if missing is not None:
                hint = f"'{missing}' is in the notebook but not on the node: %push {missing} sends it"
            else:
                before = [cell for cell in reversed(state.cells.values()) if cell.id < number]
                ran = ((cell.id, cell.source, [] if not cell.targets else list(cell.nodes)) for cell in before)
                hint = hint_other_nodes(content, node, ran) or ""
            if hint:
                safe["traceback"] = [*safe.get("traceback", ()), hint]
        output = Output(node=node, rank=state.rank(node), kind=kind, content=safe, place=state.place(node))
        if not self._write(self._cells[number], output, origin):
            return
        self._unsent.setdefault(number, []).extend(pieces_of(output))
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(FLUSH_AFTER, self.flush)

    def _write(self, outputs: CellOutputs, output: Output, origin: Origin) -> bool:
        before = outputs.files.trouble
        is_new = outputs.add(output, origin)
        now, folder = outputs.files.trouble, outputs.files.folder
        if now and not before:
            reason = f"{now} (free some space; %cluster stop deletes nothing of it)"
            self._core.tell("warning", f"output is not kept in {folder}: {reason}")
        elif before and not now:
            self._core.tell("info", f"output is kept in {folder} again, with what came meanwhile")
        return is_new

    def unkept(self) -> str:
        """Which output is in memory alone, and why, or empty; what waits for room on the disk is tried again."""
        for number in self._in_memory:
            files = self._cells[number].files
            files.write()
            if files.trouble:
                return f"output of cell {number} is not on disk ({files.trouble})"
        return ""

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
        for view in self._views.watching(cell):
            flows = self._flows.setdefault(view, {})
            flow = flows.get(cell)
            if flow is None:
                flow = flows[cell] = Flow(self._cells[cell].files.text_path, before)
            if flow.offer(batch, position):
                ready.append(view)
        self._views.send_to(ready, CellOutput(cell=cell, outputs=batch, position=position))

    def taken(self, view: View, cell: int, position: int) -> None:
        """``view`` has read the output of ``cell`` up to ``position``."""
        flow = self._flows.get(view, {}).get(cell)
        if flow is not None:
            flow.taken(position)
            if flow.ready:
                self._release(view, cell, flow)

    def begin_anew(self, view: View, cell: int) -> None:
        """``view`` watches ``cell`` from now on, or no more: what waits for it is not sent."""
        self._flows.get(view, {}).pop(cell, None)

    def finish(self, cell: int) -> None:
        """The cell ends: send every view the rest."""
        self.flush()
        for view in self._views.watching(cell):
            flow = self._flows.get(view, {}).pop(cell, None)
            if flow is not None and flow.backlog:
                self._release(view, cell, flow)
        self._positions.pop(cell, None)
        if cell in self._cells:
            self._cells[cell].close()

    def hand_out(self) -> None:
        """All that waits goes to its views now, however far behind they are."""
        self.flush()
        for view, flows in list(self._flows.items()):
            for cell, flow in flows.items():
                if flow.backlog:
                    self._release(view, cell, flow)

    def _release(self, view: View, cell: int, flow: Flow) -> None:
        outputs, position = flow.release()
        for batch in batches(outputs):
            self._views.send(view, CellOutput(cell=cell, outputs=batch, position=position))

    def catch_up(self, view: View, cell: int) -> None:
        """Everything that is kept of ``cell`` to one view."""
        outputs = self._cells.get(cell)
        for batch in batches(outputs.all()) if outputs is not None else ():
            self._views.send(view, CellOutput(cell=cell, outputs=batch))
        if outputs is not None and cell not in self._in_memory:
            outputs.unload()

    def recover(self) -> dict[str, int]:
        """Outputs from their files; returns the last link message per peer key that brought one."""
        received: dict[str, int] = {}
        for number in self._core.state.cells:
            outputs = self.open(number)
            outputs.recover()
            for key, sequence in outputs.last_sequence.items():
                received[key] = max(received.get(key, 0), sequence)
        return received

    def close(self) -> None:
        for outputs in self._cells.values():
            outputs.close()


class Collected:
    """Last values of cells: handed from nodes to views that watch, and kept for later views, within limits."""

    def __init__(self, core: Core, views: ViewServer) -> None:
        self._core = core
        self._views = views
        self._kept: dict[tuple[int, str], NodeValue] = {}
        self._bytes = 0

    def take(self, cell: int, node: str, answers: object) -> dict[str, Any]:
        """The value among a node's answers to a cell's user expressions goes to the views; the others are returned."""
        if not isinstance(answers, dict):
            return {}
        rest = {str(key): answer for key, answer in answers.items() if key != VALUE_KEY}
        if VALUE_KEY in answers:
            packed = _packed(answers[VALUE_KEY])
            value = NodeValue(cell=cell, node=node, rank=self._core.state.rank(node), packed=packed)
            self._keep(value)
            self._views.send_watching(cell, value)
        return rest

    def catch_up(self, view: View, cell: int) -> None:
        """The values of ``cell`` so far to one view."""
        for (number, _), value in self._kept.items():
            if number == cell:
                self._views.send(view, value)

    def _keep(self, value: NodeValue) -> None:
        key = (value.cell, value.node)
        before = self._kept.pop(key, None)
        self._kept[key] = value
        self._bytes += len(value.packed) - (len(before.packed) if before is not None else 0)
        while self._bytes > MOST_KEPT_BYTES:
            oldest = next(iter(self._kept))
            self._bytes -= len(self._kept.pop(oldest).packed)


def _packed(answer: object) -> bytes:
    """The JSON of a value; empty when the answer is not one or too large."""
    data = answer.get("data") if isinstance(answer, dict) else None
    value = data.get(VALUE_MIME) if isinstance(data, dict) else None
    if not isinstance(value, dict):
        return b""
    packed = msgspec.json.encode(value)
    return packed if len(packed) <= MOST_PACKED_BYTES else b""
