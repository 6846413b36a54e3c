"""The strip of :mod:`notebook_cluster.widgets.strip` under a cell that trains, once a second.

It appears when the first sync object of the cell has registered, so a cell that trains nothing costs one look at each
state that comes anyway. A thread of its own publishes, in a copy of the cell's context: the main thread waits for
output, and the last numbers of nodes come a moment after the cell has ended.
"""

import contextlib
import contextvars
import threading
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.display.publishing import ShellPublisher, is_headless
from notebook_cluster.protocol.runs import IN_A_CELL
from notebook_cluster.protocol.state import ClusterView, Series
from notebook_cluster.protocol.views import SeriesAdded, StateChanged

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster

_SECONDS = 1.0
_MANY_NODES = 12
"""So many are drawn once a second; more of them less often."""
_LAST_SECONDS = 0.7
"""After the cell's end, for what nodes say last."""


class TrainingStrip:
    """Of one cell, in one place of the notebook. ``attached``: the cell began before somebody looked."""

    def __init__(self, cluster: "Cluster", cell: int, shell: Any, *, attached: bool = False) -> None:
        self._cluster = cluster
        self._cell = cell
        self._publisher = ShellPublisher(shell)
        self._live = self._publisher.live and not is_headless(shell) and not _is_captured(shell)
        self._attached = attached
        self._display_id = f"nbc-strip-{uuid.uuid4().hex[:12]}"
        self._displayed = False
        self._latest = cluster.latest
        jobs = [] if attached or self._latest is None else self._latest.jobs
        self._before = {job.name: (job.bytes_sent, job.bytes_data_parallel) for job in jobs}
        self._began, self._took = time.time(), 0.0
        self._status = "running"
        self._nodes: dict[str, str] = {}
        self._came: list[Series] = []
        self._lock = threading.Lock()
        """Over ``_came`` and ``_thread``."""
        self._news, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._context = contextvars.copy_context()
        self._unsubscribe = cluster.subscribe(self._on_event)
        if attached and self._latest is not None:
            self._on_event(StateChanged(state=self._latest))

    def states(self, nodes: Mapping[str, str]) -> None:
        """What nodes do in this cell, or how they ended."""
        self._nodes |= nodes
        self._news.set()

    def end(self, status: str, trained: bool) -> None:
        """The cell has ended, or is followed no longer. Returns at once where displays can be changed later, or where
        it is known that nothing ``trained`` in it; else when the strip is shown, which takes about a second."""
        self._status, self._took = status, time.time() - self._began
        self._over.set()
        self._news.set()
        if not trained:
            self._unsubscribe()
        elif not self._live:
            self._show_once()

    def _show_once(self) -> None:
        """At the end of a cell, and wait for it."""
        from notebook_cluster.client import ClusterError

        with contextlib.suppress(ClusterError):
            self._on_event(StateChanged(state=self._cluster.state()))
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    # ---- the client's I/O thread

    def _on_event(self, event: Any) -> None:
        match event:
            case StateChanged():
                self._latest = event.state
                if not self._begin(event.state) and self._has_ended(event.state):
                    self._unsubscribe()
                self._news.set()
            case SeriesAdded():
                mine = self._of_cell(event.series)
                with self._lock:
                    self._came += mine

    def _begin(self, state: ClusterView) -> bool:
        """True when the strip is there. A short cell may be over before the first state that knows its job."""
        with self._lock:
            if self._thread is None and any(job.cell == self._cell for job in state.jobs):
                self._thread = threading.Thread(
                    target=self._context.run, args=(self._follow,), name=f"strip-{self._cell}", daemon=True
                )
                self._thread.start()
            return self._thread is not None

    def _has_ended(self, state: ClusterView) -> bool:
        """``state`` is of after the cell, so that no job of it can come."""
        cell = state.cell
        gone = cell is None or cell.id != self._cell or cell.status not in ("queued", "running")
        return self._over.is_set() and gone

    def _of_cell(self, series: list[Series]) -> list[Series]:
        return [one for one in series if one.job and one.run // IN_A_CELL == self._cell]

    # ---- the strip's thread

    def _follow(self) -> None:
        from notebook_cluster.client import ClusterError
        from notebook_cluster.widgets.curves import Curves

        try:
            curves = Curves()
            if self._attached:
                with contextlib.suppress(ClusterError):
                    curves = Curves(self._of_cell(self._cluster.series()))
            due = time.monotonic()
            while not self._over.is_set():
                self._news.wait()
                self._over.wait(max(0.0, due - time.monotonic()))
                self._news.clear()
                if self._live and not self._over.is_set():
                    self._show(curves, "running", None)
                crowd = max(1.0, len(self._latest.nodes) / _MANY_NODES) if self._latest is not None else 1.0
                due = time.monotonic() + _SECONDS * crowd
            time.sleep(_LAST_SECONDS)
            with contextlib.suppress(ClusterError):  # it has ended: what came last is what there is
                self._latest = self._cluster.state()
            self._show(curves, self._status, self._took)
        finally:
            self._unsubscribe()

    def _show(self, curves: Any, status: str, took: float | None) -> None:
        """``took``: seconds, where the cell has ended and what is known of it is all there is."""
        from notebook_cluster.widgets.strip import Training, strip_html, strip_text

        with self._lock:
            came, self._came = self._came, []
        curves.add_new(came)
        state = self._latest
        if state is None:
            return
        nodes = dict(self._nodes)
        if state.cell is not None and state.cell.id == self._cell:
            self._began = state.cell.started or self._began
            nodes = state.cell.nodes | nodes
        training = Training(self._cell, status, nodes, None if self._attached else self._before, took)
        bundle = {"text/html": strip_html(training, state, curves), "text/plain": strip_text(training, state, curves)}
        self._publisher.begin()
        self._publisher.publish(bundle, {}, self._display_id, self._displayed)
        self._displayed = True


def _is_captured(shell: Any) -> bool:
    """``%%capture`` keeps what is published, each change as an output of its own."""
    from IPython.core.displaypub import CapturingDisplayPublisher

    return isinstance(shell.display_pub, CapturingDisplayPublisher)
