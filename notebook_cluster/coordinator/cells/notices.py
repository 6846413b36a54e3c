"""Lines about cells for who watches them: how its nodes are, what happened to one, and who keeps the others waiting."""

import asyncio
from collections.abc import Callable, Sequence

from notebook_cluster.coordinator.core import Core, Level
from notebook_cluster.coordinator.view_server import ViewServer
from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import Cell
from notebook_cluster.protocol.views import CellChanged, CellEnded, NodeResult

GATHER_SECONDS = 0.4
"""Nodes that fail or wait together are one line, and a cell that ends right away needs none."""
MOST_TOLD = 400
"""Characters of a line of a node."""
MOST_NOTICES = 20
"""Of one cell; the curves and the panel show the rest."""
_MOST_NAMES = 6
_MOST_CHARACTERS = 200


class Notices:
    """What is told of cells, and the notices of the one that runs."""

    def __init__(
        self,
        core: Core,
        views: ViewServer,
        *,
        replaying: Callable[[], list[str]],
        was_interrupted: Callable[[int], bool],
    ) -> None:
        """``replaying()``: the nodes that replay earlier cells now; ``was_interrupted(cell)``: somebody stopped it."""
        self._core = core
        self._views = views
        self._replaying = replaying
        self._was_interrupted = was_interrupted
        self._cell = 0
        self._said: set[str] = set()
        self._failed: dict[str, str] = {}
        """What happened to nodes of which nothing was said yet."""
        self._waiting: dict[str, tuple[str, tuple[str, ...]]] = {}
        """Node -> the operation in which it waits, and for whom."""
        self._scheduled = False

    def changed(self, number: int, note: str = "") -> None:
        """Tell who watches cell ``number`` how each node is doing, and ``note``."""
        nodes = {**self._core.state.cells[number].nodes, **dict.fromkeys(self._replaying(), "replaying")}
        self._views.send_watching(number, CellChanged(cell=number, nodes=nodes, note=note))

    def tell_running(self, note: str) -> None:
        """``note`` to who watches the cell that runs."""
        running = self._core.state.running()
        if running is not None:
            self.changed(running.id, note)

    def node_ended(self, event: e.CellNodeEnded) -> None:
        """A node has left the cell; the others may go on for hours."""
        self._begin(event.cell)
        self._waiting.pop(event.node, None)
        if event.status in ("error", "lost") and event.error_name != "PeerLost":
            self._failed[event.node] = what_happened(event)
        self._look_soon()

    def on_waiting(self, node: str, text: str) -> None:
        """A node says that it waits: ``all_reduce #3 for desk``; empty when it goes on."""
        running = self._core.state.running()
        if running is None or running.nodes.get(node) != "running":
            return
        self._begin(running.id)
        operation, separator, names = text.rpartition(" for ")
        missing = tuple(name for name in names.split(", ") if name in running.nodes and name != node)
        if separator and missing:
            self._waiting[node] = (operation.partition(" #")[0][:40], missing)
            self._look_soon()
        else:
            self._waiting.pop(node, None)

    def told(self, node: str, level: Level, text: str) -> None:
        """A line of a node about what all do: shown once. Another line about the same thing (up to the colon) is that
        of the node alone."""
        running = self._core.state.running()
        if running is None or running.nodes.get(node) != "running":
            return
        self._begin(running.id)
        text = text.partition("\n")[0][:MOST_TOLD]
        if text in self._said or len(self._said) >= MOST_NOTICES:
            return
        about = text.partition(":")[0]
        shown = f"{node}: {text}" if any(said.partition(":")[0] == about for said in self._said) else text
        self._said.add(text)
        self._core.tell(level, shown)
        self.changed(running.id, shown)

    def _begin(self, cell: int) -> None:
        if cell != self._cell:
            self._cell = cell
            self._said.clear()
            self._failed.clear()
            self._waiting.clear()

    def _look_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self._look)

    def _look(self) -> None:
        self._scheduled = False
        cell = self._core.state.cells.get(self._cell)
        if cell is None or cell.status != "running" or self._was_interrupted(cell.id):
            return
        for text in [*self._about_failed(cell), *self._about_waiting(cell)]:
            if text not in self._said and len(self._said) < MOST_NOTICES:
                self._said.add(text)
                self.changed(cell.id, text)

    def _about_failed(self, cell: Cell) -> list[str]:
        """``desk raised ValueError: no data; still running: local, mini``."""
        failed, self._failed = self._failed, {}
        running = [name for name, status in cell.nodes.items() if status == "running"]
        if not running:
            return []
        nodes: dict[str, list[str]] = {}
        for name in [name for name in cell.nodes if name in failed]:
            nodes.setdefault(failed[name], []).append(name)
        return [f"{_named(names)} {text}; still running: {_named(running)}" for text, names in nodes.items()]

    def _about_waiting(self, cell: Cell) -> list[str]:
        """``local, mini wait in all_reduce for desk, which has finished the cell``."""
        groups: dict[tuple[str, str], list[str]] = {}
        for name in [name for name in cell.nodes if name in self._waiting]:
            operation, missing = self._waiting[name]
            # Who waits as well is not the cause, and who computes is not while another will never come.
            gone = [other for other in missing if cell.nodes[other] != "running"]
            late = [other for other in missing if other not in self._waiting]
            for other in (gone or late)[:_MOST_NAMES]:
                groups.setdefault((operation, other), []).append(name)
        lines = []
        for (operation, other), names in groups.items():
            verb = "waits" if len(names) == 1 else "wait"
            lines.append(f"{_named(names)} {verb} in {operation} for {other}, {_how_it_is(cell, other)}")
        return lines


def what_happened(event: e.CellNodeEnded) -> str:
    """``raised ValueError: no data``, ``was lost: killed by SIGKILL`` or ``stopped, because desk was lost: ...``."""
    if event.status == "lost":
        text = f"was lost: {event.reason or 'no reason known'}"
    elif event.error_name == "PeerLost":
        text = f"stopped, because {event.error_value}"
    else:
        first = event.error_value.splitlines()[0] if event.error_value else ""
        text = f"raised {event.error_name}: {first}" if first else f"raised {event.error_name}"
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " ..."


def _how_it_is(cell: Cell, node: str) -> str:
    result = cell.results.get(node)
    if cell.nodes.get(node) == "running" or result is None:
        return "which still computes"
    if result.status == "ok":
        return "which has finished the cell"
    return f"which {what_happened(result)}" if result.status in ("error", "lost") else "which was interrupted"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def ended_event(cell: Cell, reason: str, trained: bool) -> CellEnded:
    """The last event of a cell for the views that watch it."""
    known = ("ok", "error", "interrupted", "lost")
    results = {
        name: NodeResult(
            status=result.status if result.status in known else "cancelled",  # type: ignore[arg-type]
            error_name=result.error_name,
            error_value=result.error_value,
            reason=result.reason,
            log_tail=result.log_tail,
            user_expressions=result.user_expressions,
        )
        for name, result in cell.results.items()
    }
    status = cell.status
    return CellEnded(cell=cell.id, status=status, results=results, reason=reason, trained=trained)  # type: ignore[arg-type]
