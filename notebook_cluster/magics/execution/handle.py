"""``--async``: a cell that runs while the notebook goes on, and the handle to it.

One thread per handle takes the cell's events. It runs in a copy of the context of the notebook's cell, so what it
publishes stands below that cell, whatever runs meanwhile. Where nobody looks (nbclient, papermill, a terminal) a
display below a finished cell would be lost: the output is then shown by the cell that calls :meth:`CellHandle.wait`.
"""

import contextlib
import contextvars
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.display.output import CellDisplay
from notebook_cluster.magics.display.publishing import ShellPublisher, is_headless
from notebook_cluster.magics.display.training_strip import TrainingStrip
from notebook_cluster.magics.errors import (
    CellInterrupted,
    CellTimeout,
    ClusterProblem,
    UsageError,
    reason_of,
    remote_error,
    shortened,
    stopped_error,
)
from notebook_cluster.magics.execution.cells import WAIT_SLICE, check_syntax, visible_names
from notebook_cluster.magics.execution.handle_view import HandleView
from notebook_cluster.magics.execution.node_values import Failed, NodeValues
from notebook_cluster.protocol.interaction import NodeValue
from notebook_cluster.protocol.views import CellChanged, CellEnded, CellOutput

if TYPE_CHECKING:
    from notebook_cluster.client import CellStream, Cluster

_PLACED_SECONDS = 1.0
"""At most so long it takes to hear whether the cell runs or waits in the queue."""


def start_cell(
    cluster: "Cluster",
    shell: Any,
    source: str,
    targets: Sequence[str] = (),
    *,
    timeout: float | None = None,
    replay: bool = True,
    canary: str = "",
) -> "CellHandle":
    """Start ``source`` on ``targets`` as :func:`.cells.run_cell` does, and return at once.

    Raises:
        CellSyntaxError: not Python; nothing was sent.
        ClusterError: the cluster refused it.
    """
    check_syntax(shell, source)
    names = visible_names(shell)
    stream = cluster.execute(
        source, targets, replay=replay, timeout=timeout, notebook_names=names, canary=canary, collect=True,
        background=True, widgets=not is_headless(shell),
    )  # fmt: skip
    return CellHandle(cluster, shell, stream, frozenset(names))


def follow_cell(cluster: "Cluster", shell: Any, cell: int) -> "CellHandle":
    """A handle to a cell that runs already; its output so far is shown too."""
    stream = cluster.watch(cell, background=True)
    return CellHandle(cluster, shell, stream, frozenset(visible_names(shell)), attached=True)


class CellHandle:
    """A cell that runs on nodes while the notebook goes on. Made by ``%%on_all --async``.

    Attributes:
        cell: its number in the cluster.
    """

    def __init__(
        self,
        cluster: "Cluster",
        shell: Any,
        stream: "CellStream",
        names: frozenset[str],
        *,
        attached: bool = False,
    ) -> None:
        self.cell = stream.cell
        self._cluster = cluster
        self._shell = shell
        self._stream = stream
        self._names = names
        # The publisher of this moment: a later cell's %%capture is not for this output.
        kernel = getattr(shell, "kernel", None)
        self._publisher = ShellPublisher(SimpleNamespace(display_pub=shell.display_pub, kernel=kernel), cluster)
        self._live = self._publisher.live = self._publisher.live and not is_headless(shell)
        self._display = CellDisplay(self._publisher, cluster.name)
        self._display.text_file = functools.partial(cluster.text_file, stream.cell)
        self._strip = TrainingStrip(cluster, stream.cell, shell, attached=attached) if self._live else None
        self._shown = self._live
        self._values = NodeValues()
        self._nodes: dict[str, str] = {}
        self._note = ""
        self._ended: CellEnded | None = None
        self._problem = ""
        self._lock = threading.RLock()
        """Over what the thread changes and people ask for: outputs and values."""
        self._over = threading.Event()
        self._clicks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._view = HandleView(self._publisher, lambda: (self.status, self.summary), self.cancel)
        self._placed, self._displayed = threading.Event(), threading.Event()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._follow,), name=f"cell-{self.cell}", daemon=True).start()
        self._made_in = shell.execution_count
        self._placed.wait(_PLACED_SECONDS)
        self._view.display(shell, self._clicked if self._live else None)
        self._displayed.set()

    def __repr__(self) -> str:
        return f"<{self.summary}>"

    def _ipython_display_(self) -> None:
        # The cell that made it shows it already, above the output of the nodes.
        if self._shell.execution_count != self._made_in:
            self._view.display(self._shell, self._clicked if self._live else None)

    # ---- what people ask

    @property
    def done(self) -> bool:
        """True when the cell has ended, or can be followed no longer."""
        return self._over.is_set()

    @property
    def status(self) -> str:
        """``queued``, ``running``, ``ok``, ``error``, ``interrupted``; ``detached`` or ``lost`` when it can be
        followed no longer."""
        if self._ended is not None:
            return self._ended.status
        if self._problem:
            return "lost"
        return "running" if self._nodes else "queued"

    @property
    def nodes(self) -> dict[str, str]:
        """Node -> ``running``, ``ok``, ``error``, ``interrupted``, ``lost``, ``cancelled`` or ``replaying`` (it catches
        up first); empty while the cell waits in the queue."""
        started, ended = dict(self._nodes), self._ended
        return started if ended is None else started | {name: one.status for name, one in ended.results.items()}

    @property
    def summary(self) -> str:
        """One line: what runs where, or how it ended."""
        nodes, status = self.nodes, self.status
        where = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
        if status == "queued":
            return f"cell {self.cell} waits in the queue" + (f": {self._note}" if self._note else "")
        if status == "running":
            busy = [name for name, one in nodes.items() if one in ("running", "replaying")]
            of = f"{len(busy)} of {where}" if len(busy) < len(nodes) else where
            return f"cell {self.cell} runs on {of}: {shortened(busy)}"
        if status == "error":
            failed = [name for name, one in nodes.items() if one not in ("ok", "cancelled")]
            return f"cell {self.cell} failed on {len(failed)} of {where}: {shortened(failed)}"
        ends = {"ok": f"ended on {where}", "interrupted": "was stopped", "detached": "goes on: %cluster attach --async"}
        return f"cell {self.cell} {ends[status]}" if status in ends else f"cell {self.cell}: {self._problem}"

    @property
    def results(self) -> dict[str, Any]:
        """Node -> value of the cell's last expression, in rank order, for the nodes that have ended so far. A value
        that does not travel is a ``Remote`` that says why; a node where the cell failed has a ``Failed``."""
        with self._lock:
            found, ended = self._values.in_rank_order(), self._ended
        failed = {} if ended is None else {name: one for name, one in ended.results.items() if one.status != "ok"}
        every = found | {name: Failed(name, one.status, reason_of(one)) for name, one in failed.items()}
        order = list(self.nodes)
        return dict(sorted(every.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))

    def output(self, node: str | int) -> str:
        """The text that ``node`` (its name or rank) has put out so far, as the notebook shows it.

        Raises:
            UsageError: no node of this cell; names those that are.
        """
        with self._lock:
            shown = self._display.nodes()
            for name, rank in shown.items():
                if str(node) in (name, str(rank)):
                    return self._display.text_of(name)
        if str(node) in self.nodes:
            return ""
        known = ", ".join(self.nodes or shown) or "no nodes yet"
        raise UsageError(f"cell {self.cell} has no output of {str(node)!r}: there are {known}")

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait until the cell has ended on every node; returns :attr:`results`. Stop ends the waiting, not the cell.

        Raises:
            RemoteError: it failed on at least one node, as in a cell without ``--async``.
            KeyboardInterrupt: it was interrupted, or Stop was pressed while waiting.
            TimeoutError: it still runs after ``timeout`` seconds.
            ClusterError: the cluster ended first.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while not self._over.wait(max(0.0, min(WAIT_SLICE, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    raise CellTimeout(f"not ended after {timeout:g} s: {self.summary}")
        except KeyboardInterrupt:
            text = f"no longer waiting for cell {self.cell}, which goes on: .cancel() ends it"
            raise CellInterrupted(text) from None
        with self._lock:
            shown, self._shown = self._shown, True
        if not shown:
            self._display.finish()
        self._raise()
        return self.results

    def cancel(self, force: bool = False) -> None:
        """Interrupt the cell on every node, as Stop does, or take it out of the queue. Returns at once: :meth:`wait`
        waits for the end.

        Args:
            force: kill and restart the kernels that still run it.

        Raises:
            ClusterError: the cluster cannot be reached.
        """
        from notebook_cluster.client import ClusterError

        try:
            if not self.done:
                self._cluster.interrupt(force=force, cell=self.cell)
        except ClusterError as error:
            raise ClusterProblem(str(error)) from None

    def _raise(self) -> None:
        """End as the cell ended."""
        if self._ended is None:
            raise ClusterProblem(self._problem)
        if self._ended.status == "interrupted":
            raise stopped_error(self._ended)
        if self._ended.status == "error":
            raise remote_error(self._ended, self._display.label, self._names)

    def _clicked(self, call: Callable[[], None]) -> None:
        """On a kernel thread: ``call`` does what a button asks for."""
        self._clicks.put(call)
        self._stream.wake()

    # ---- from here on: the handle's thread

    def _follow(self) -> None:
        from notebook_cluster.client import ClusterError

        try:
            while self._ended is None:
                waits = [wait for wait in (self._display.due(), self._view.due()) if wait is not None]
                self._take(self._stream.get(min(waits, default=None)))
                while not self._clicks.empty():
                    self._clicks.get()()
                if self._display.due() == 0.0:
                    with self._lock:
                        self._display.flush()
                self._view.refresh()
        except ClusterError as error:
            self._problem = str(error)
        except Exception as error:  # whoever waits must hear of it
            self._problem = f"its output cannot be followed any more ({type(error).__name__}: {error})"
        finally:
            self._stream.close()
            self._finish()

    def _finish(self) -> None:
        """Everything in its final form. What cannot be published any more (the kernel ends) is nobody's to see."""
        try:
            if self._live:
                self._display.finish()
        except Exception as error:
            self._problem = self._problem or f"its output could not be shown ({type(error).__name__}: {error})"
        finally:
            self._over.set()
        with contextlib.suppress(Exception):
            self._view.finish()
        if self._strip is not None:
            self._strip.end(self.status, self._ended is None or self._ended.trained)

    def _take(self, event: Any) -> None:
        with self._lock:
            match event:
                case CellOutput():
                    self._display.add(event.outputs)
                case CellChanged():
                    self._nodes.update(event.nodes)
                    self._note = event.note
                    self._display.expect(len(self._nodes))
                    self._tell(event.nodes)
                    self._display.note(event.note)
                case NodeValue():
                    self._values.add(event)
                case CellEnded():
                    self._tell({name: result.status for name, result in event.results.items()})
                    self._ended = event
        if isinstance(event, CellChanged):
            self._view.changed()
            self._placed.set()
            self._displayed.wait(_PLACED_SECONDS)  # the handle stands above the output

    def _tell(self, nodes: dict[str, str]) -> None:
        """What nodes do, or how they ended."""
        self._display.states(nodes)
        if self._strip is not None:
            self._strip.states(nodes)
