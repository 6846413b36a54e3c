"""Run a cell on nodes, or watch one that runs: show what comes, act on Stop, end as the nodes ended."""

import ast
import functools
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.display.output import CellDisplay
from notebook_cluster.magics.display.publishing import ShellPublisher, can_ask, is_headless
from notebook_cluster.magics.display.training_strip import TrainingStrip
from notebook_cluster.magics.errors import (
    CellInterrupted,
    CellSyntaxError,
    interrupted_text,
    remote_error,
    stopped_error,
)
from notebook_cluster.magics.execution.waiting import (
    LOOK_SECONDS,
    SAME_PRESS_SECONDS,
    Asking,
    Press,
    StopCounter,
)
from notebook_cluster.protocol.interaction import InputRequested, NodeValue
from notebook_cluster.protocol.views import CellChanged, CellEnded, CellOutput

if TYPE_CHECKING:
    from notebook_cluster.client import CellStream, Cluster
    from notebook_cluster.magics.execution.node_values import NodeValues

WAIT_SLICE = 0.2
STOP_GRACE = 3.0
"""Seconds after Stop until the nodes that are still busy are named."""
FORCE_GRACE = 5.0
"""Seconds after the second Stop until the cell ends in any case."""
MOST_NAMES = 2000


def run_cell(
    cluster: "Cluster",
    shell: Any,
    source: str,
    targets: Sequence[str] = (),
    *,
    timeout: float | None = None,
    replay: bool = True,
    canary: str = "",
    values: "NodeValues | None" = None,
) -> None:
    """Run ``source`` on ``targets`` (node names; empty: all) and show their output until all have finished.

    ``canary``: this node runs it first, the others only when it ended well there. ``values`` gets the last values.

    Raises:
        CellSyntaxError: not Python; nothing was sent.
        RemoteError: it failed on at least one node.
        CellInterrupted: Stop was pressed here, or the cell was interrupted from another view.
        CellTimeout: it ran longer than ``timeout`` seconds, and was interrupted.
        ClusterError: the cluster refused it, or ended.
    """
    if not source.strip():
        return
    check_syntax(shell, source)
    names = visible_names(shell)
    display = CellDisplay(ShellPublisher(shell, cluster), cluster.name)
    with StopCounter() as stops:
        stream = cluster.execute(
            source, targets, replay=replay, timeout=timeout, notebook_names=names, canary=canary,
            collect=values is not None, stdin=can_ask(shell), widgets=not is_headless(shell),
        )  # fmt: skip
        wait = _Wait(cluster, stream, display, stops, shell, values=values)
        ended = wait.until_end()
    if wait.left_to_itself:
        raise CellInterrupted(f"this kernel ends, cell {stream.cell} goes on: %cluster attach shows it again")
    if ended is None:
        raise CellInterrupted(interrupted_text(None, {}))
    if stops.count or ended.status == "interrupted":
        raise stopped_error(ended)
    _conclude(ended, display, frozenset(names))


def watch_cell(cluster: "Cluster", shell: Any, cell: int) -> None:
    """Show the output of ``cell`` from its beginning until it ends. Stop ends the watching, not the cell.

    Raises:
        RemoteError, CellInterrupted, ClusterError: as :func:`run_cell`.
    """
    display = CellDisplay(ShellPublisher(shell, cluster), cluster.name)
    with StopCounter() as stops:
        stream = cluster.watch(cell, stdin=can_ask(shell))
        ended = _Wait(cluster, stream, display, stops, shell, watching=True).until_end()
    if ended is None:
        print(f"no longer watching cell {cell}, which goes on: %cluster attach shows it again")
    elif ended.status == "interrupted":
        raise stopped_error(ended)
    else:
        _conclude(ended, display, frozenset(visible_names(shell)))


def check_syntax(shell: Any, source: str) -> None:
    """Refuse what is not Python (with IPython's magics and top-level await) before it is sent anywhere.

    Raises:
        CellSyntaxError: with the line and the place, as IPython would show it.
    """
    try:
        code = shell.transform_cell(source)
        compile(code, "the cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError) as error:
        shown = "".join(traceback.format_exception_only(error))
        raise CellSyntaxError(f"{error} (nothing was sent to the nodes)", shown) from None


def visible_names(shell: Any) -> list[str]:
    """Names that the notebook's user made, at most 2,000."""
    hidden = shell.user_ns_hidden
    names = [name for name in list(shell.user_ns) if not name.startswith("_") and name not in hidden]
    return names[:MOST_NAMES]


def _conclude(ended: CellEnded, display: CellDisplay, names: frozenset[str]) -> None:
    if ended.status == "detached":
        print(f"detached: cell {ended.cell} goes on, %cluster attach shows it again")
    elif ended.status == "error":
        raise remote_error(ended, display.label, names)


class _Wait:
    """The notebook's main thread while a cell runs."""

    def __init__(
        self,
        cluster: "Cluster",
        stream: "CellStream",
        display: CellDisplay,
        stops: StopCounter,
        shell: Any,
        *,
        watching: bool = False,
        values: "NodeValues | None" = None,
    ) -> None:
        self._cluster = cluster
        self._stream = stream
        self._display = display
        self._stops = stops
        self._shell = shell
        self._watching = watching
        self.left_to_itself = False
        """The waiting ended because this kernel ends; the cell goes on."""
        self._press: Press | None = None
        """The first one, while it is not known whether it was Stop or the end of this kernel."""
        self._nodes: dict[str, str] = {}
        self._busy: list[str] = []
        self._stopped_at: float | None = None
        self._told = False
        self._forced_at: float | None = None
        self._ignored = 0
        display.text_file = functools.partial(cluster.text_file, stream.cell)
        self._strip = TrainingStrip(cluster, stream.cell, shell, attached=watching)
        self._status, self._trained = "detached", True
        stops.on_press = stream.wake
        if stops.count:
            stream.wake()  # pressed while the cell was being sent
        self._handlers: dict[type, Callable[[Any], None]] = {
            CellOutput: self._on_output,
            CellChanged: self._on_changed,
            InputRequested: Asking(cluster, stream, stops, self._show).ask,
        }
        if values is not None:
            self._handlers[NodeValue] = values.add

    def until_end(self) -> CellEnded | None:
        """Show output until the cell ends; None when the waiting ended first."""
        try:
            while True:
                event = self._next()
                if isinstance(event, CellEnded):
                    self._tell({name: result.status for name, result in event.results.items()})
                    self._status, self._trained = event.status, event.trained
                    return event
                self._show(event)
                if self._stops.count and self._on_stop(time.monotonic()):
                    return None
        finally:
            self._stream.close()
            self._display.finish()
            self._strip.end(self._status, self._trained)

    def _show(self, event: Any) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)
        due = self._display.due()
        if due is not None and due <= 0:
            self._display.flush()

    def _on_output(self, event: CellOutput) -> None:
        self._display.add(event.outputs)

    def _on_changed(self, event: CellChanged) -> None:
        self._nodes.update(event.nodes)
        self._display.expect(len(self._nodes))
        self._tell(event.nodes)
        self._display.note(event.note)

    def _tell(self, nodes: dict[str, str]) -> None:
        """What nodes do, or how they ended."""
        self._display.states(nodes)
        self._strip.states(nodes)

    def _next(self) -> Any:
        due = self._display.due()
        longest = WAIT_SLICE if self._press is None else LOOK_SECONDS
        try:
            return self._stream.get(longest if due is None else min(due, longest))
        except KeyboardInterrupt:
            self._stops.count += 1  # where no handler could be installed
            return None

    def _on_stop(self, now: float) -> bool:
        """Do what the presses of Stop so far ask for; True when the cell is to end now."""
        if self._watching:
            return True
        if self._stopped_at is None:
            return self._on_first_stop()
        if self._forced_at is None:
            waited = now - self._stopped_at
            if waited < SAME_PRESS_SECONDS:
                self._ignored = self._stops.count - 1  # a double click is one Stop: killing a kernel loses its state
            elif self._stops.count - self._ignored > 1:
                self._interrupt(force=True)
                self._forced_at = time.monotonic()
            elif waited > STOP_GRACE and not self._told:
                self._told = True
                self._display.note(f"still busy: {', '.join(self._still_busy())}. Stop again kills and restarts them")
        return self._forced_at is not None and time.monotonic() - self._forced_at > FORCE_GRACE

    def _on_first_stop(self) -> bool:
        """Interrupt the nodes, unless it was the kernel's restart or shutdown, which stops nothing."""
        if self._press is None:
            self._press = Press(self._shell)
        meaning = self._press.meaning()
        if meaning == "restart" or (meaning == "shutdown" and not is_headless(self._shell)):
            self.left_to_itself = True
            return True
        if meaning:
            self._press = None
            self._interrupt(force=False)
            self._stopped_at = time.monotonic()
            self._ignored = self._stops.count - 1
        return False

    def _interrupt(self, force: bool) -> None:
        from notebook_cluster.client import ClusterError

        try:
            self._busy = self._cluster.interrupt(force=force, cell=self._stream.cell)
        except ClusterError as error:
            self._display.note(str(error))

    def _still_busy(self) -> list[str]:
        running = [name for name, status in self._nodes.items() if status in ("queued", "replaying", "running")]
        return running or self._busy or ["a node"]
