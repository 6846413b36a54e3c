"""The live panel: one thread that takes the cluster's events and the browser's clicks in turn and changes the widgets.

The main thread may be busy for hours with a cell. So nothing here waits for it: events arrive on the client's I/O
thread, clicks on a subshell, results on action threads; all of them only post a call, and the panel's thread makes it.
That thread runs in a copy of the cell's context, because ipykernel finds the cell that an output belongs to there.
"""

import atexit
import contextvars
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import msgspec
import traitlets

from notebook_cluster.client.curve_rows import outside_name
from notebook_cluster.protocol.clock import dated
from notebook_cluster.protocol.interaction import WIDGET_MIME, view_of_widget
from notebook_cluster.protocol.state import ClusterView, Series
from notebook_cluster.protocol.views import Closing, SeriesAdded, StateChanged
from notebook_cluster.widgets.actions import Actions
from notebook_cluster.widgets.class_board import class_board
from notebook_cluster.widgets.curves import CurveChoice, Curves
from notebook_cluster.widgets.drawn_curves import new_figure
from notebook_cluster.widgets.formatting import node_colours, plain
from notebook_cluster.widgets.model import panel_model
from notebook_cluster.widgets.saving import series_csv, thinned
from notebook_cluster.widgets.static_html import render_html
from notebook_cluster.widgets.subshell import Pace, SlowViews, reroute
from notebook_cluster.widgets.text import render_text

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster

_HERE = Path(__file__).parent
STATE_SECONDS = 0.5
CURVE_SECONDS = 1.0
PICTURE_SECONDS = 10.0
"""Between two pictures of a panel that lives, which the browser writes into the notebook."""
PLACE_MIME = "application/vnd.notebook-cluster.panel+json"
"""What JupyterLab's part draws: the widget where it lives, else the HTML (``labextension/src/panelPlace.ts``)."""
MANY_NODES = 12
"""So many are sent at these intervals; more of them less often, so that traffic and work do not grow with them."""
MOST_METRICS = 40
"""That the panel offers to show."""
MOST_SAVED = 20_000
"""Points in a file that the panel saves: jupyter_server drops messages of more than 3 MB. `%cluster export` has all."""
_NO_SUBSHELL = (
    "While a cell runs these buttons wait for its end: use the sidebar, or 'notebook-cluster' in a terminal. "
    "This kernel has ipykernel {version}; with 7 and later they act at once."
)
_panels: list["Panel"] = []


class PanelWidget(anywidget.AnyWidget):  # type: ignore[misc]
    """Shows ``state`` (:func:`.model.panel_model`, ``answers``, ``notice``) and sends ``{action, target, id}``.
    Where ``state`` has a number as ``tell``, each view says when it has drawn that (:class:`.subshell.SlowViews`)."""

    _esm = _HERE / "panel.js"
    _css = _HERE / "panel.css"
    state = traitlets.Dict().tag(sync=True)


def show(cluster: "Cluster", *, headless: bool = False, as_class: bool = False) -> None:
    """See :func:`notebook_cluster.widgets.show_panel`."""
    kernel = _widget_kernel()
    if headless or kernel is None:
        _display_static(cluster, as_class)
        return
    panel = next((panel for panel in _panels if panel.shows(cluster) and panel.as_class == as_class), None)
    if panel is None:
        panel = Panel(cluster, kernel, as_class)
        _panels.append(panel)
    panel.display()


def close(cluster: "Cluster") -> None:
    """See :func:`notebook_cluster.widgets.close_panel`. Returns when the panel's thread has ended (at most 15 s)."""
    for panel in [panel for panel in _panels if panel.shows(cluster)]:
        panel.close()


class Panel:
    """One panel of one cluster: its widgets and its thread."""

    def __init__(self, cluster: "Cluster", kernel: Any, as_class: bool = False) -> None:
        from ipywidgets import VBox

        from notebook_cluster.widgets.panel import PanelWidget

        self._cluster = cluster
        self._kernel = kernel
        self.as_class = as_class
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._over = False
        self._ended = ""
        self._leaves_picture = True
        self._display_id = uuid.uuid4().hex
        self._latest: ClusterView = cluster.latest or cluster.state()
        self._curves = Curves()
        self._figure: Any = None
        self._choice = CurveChoice()
        self._notice = ""
        self._actions = Actions(cluster, self._posted)
        self._state_pace, self._curve_pace = Pace(STATE_SECONDS), Pace(CURVE_SECONDS)
        self._picture_pace = Pace(PICTURE_SECONDS)
        self._picture_pace.take_from(time.monotonic())
        self._slow_views, self._has_answer = SlowViews(), False
        self._widget = PanelWidget(state=self._shown())
        self._box = VBox([self._widget])
        self._widget.on_msg(lambda widget, content, buffers: self._clicked(content))
        self._hears_views = reroute(kernel, [self._widget], self._inbox.put)
        if not self._hears_views:
            self._notice = _NO_SUBSHELL.format(version=_ipykernel_version())
        self._widget.comm.on_close(lambda message: self._inbox.put(self._leave))
        # Subscribed first, so that no point is lost between the history and the first event.
        self._unsubscribe = cluster.subscribe(lambda event: self._inbox.put(partial(self._event, event)))
        self._inbox.put(self._load_history)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="cluster-panel", daemon=True)
        self._thread.start()
        atexit.register(self._abandon)

    def shows(self, cluster: "Cluster") -> bool:
        """True when this panel is alive and shows ``cluster``."""
        return self._cluster is cluster and self._thread.is_alive() and not self._over

    def display(self) -> None:
        """Show the panel in the cell that runs now."""
        from IPython.display import display

        bundle = {
            WIDGET_MIME: view_of_widget(self._box.model_id),
            PLACE_MIME: {"version": 1},
            **_static_bundle(self._latest, self._cluster.series(), as_class=self.as_class),
        }
        display(bundle, raw=True, display_id=self._display_id)

    def close(self) -> None:
        """End the thread; what was shown last stays as a static picture."""
        self._inbox.put(self._leave)
        if threading.current_thread() is not self._thread:
            self._thread.join(15)

    def _abandon(self) -> None:
        """The kernel ends: only the thread has to, for nothing that is published now is sure to arrive."""
        self._unsubscribe()
        self._leaves_picture = False
        self._inbox.put(self._leave)

    # ---- from here on: the panel's thread ----

    def _run(self) -> None:
        while not self._over:
            self._take()
            now = time.monotonic()
            # The state comes last, or who has drawn it has not drawn the curves yet; but before them where it answers.
            may_send = not self._over and not self._has_answer and not self._slow_views.wait(now)
            if may_send and self._curve_pace.take(now):
                self._guarded(self._draw)
            if may_send and self._picture_pace.take(now):
                self._guarded(self._send_picture)
            if not self._over and (may_send or self._has_answer) and self._state_pace.take(now):
                self._guarded(self._push_state)
        if self._leaves_picture:
            self._guarded(self._leave_picture)

    def _take(self) -> None:
        """Make every call that was posted; wait for one no longer than until something is due."""
        try:
            call = self._inbox.get(timeout=self._until_due(time.monotonic()))
            while True:
                self._guarded(call)
                call = self._inbox.get_nowait()
        except queue.Empty:
            if self._actions.next_expiry() == 0.0:
                self._state_pace.ask()

    def _until_due(self, now: float) -> float | None:
        asked = self._state_pace.wait(now)
        state = asked if asked is not None else self._actions.next_expiry()
        if self._has_answer:
            return state
        dues, held = (state, self._curve_pace.wait(now), self._picture_pace.wait(now)), self._slow_views.wait(now)
        return min((max(due, held) for due in dues if due is not None), default=None)

    def _guarded(self, call: Callable[[], None]) -> None:
        """``call()``; what goes wrong is shown in the panel, because prints of this thread go nowhere."""
        try:
            call()
        except Exception as error:
            self._notice = plain(f"The panel could not show everything ({type(error).__name__}: {error})", 300)
            self._state_pace.ask()

    def _event(self, event: Any) -> None:
        match event:
            case StateChanged():
                if _has_news(self._latest, event.state):
                    self._picture_pace.ask()
                self._latest = event.state
                self._state_pace.ask()
            case SeriesAdded():
                self._curves.add_new(event.series)
                self._curve_pace.ask()
            case Closing():
                self._ended = f"ended at {dated(time.time())}: {event.reason.rpartition('has ended: ')[2]}"
                self._leave()

    def _load_history(self) -> None:
        self._curves = Curves(self._cluster.series())
        self._curve_pace.ask()

    def _clicked(self, content: object) -> None:
        if self._slow_views.hear(content, time.monotonic()):
            return
        if isinstance(content, dict) and content.get("action") == "curves":
            self._choose(content)
        elif isinstance(content, dict) and content.get("action") == "points":
            self._send_points()
        else:
            self._actions.ask(content)
        self._ask_for_answer()

    def _choose(self, content: dict[str, Any]) -> None:
        """``{metric, smooth, log}``; a metric that nobody reported leaves the one that is shown."""
        metric = content.get("metric")
        known = metric if metric in self._curves.metrics() else self._choice.metric
        self._choice = CurveChoice(known, content.get("smooth") is True, content.get("log") is True)
        self._curve_pace.ask()

    def _send_points(self) -> None:
        """The points of the curves that are shown, as they came, for a file. The browser saves it."""
        shown = [one for one in self._curves.series() if one.name in (self._choice.metric, "memory")]
        points = max(sum(len(one.step) for one in shown), 1)
        name = f"{outside_name(f'{self._latest.name}-{self._choice.metric}')}.csv"
        self._widget.send({"points": {"name": name, "text": series_csv(thinned(shown, MOST_SAVED / points))}})

    def _posted(self, call: Callable[[], None]) -> None:
        """Called on action threads: ``call`` changes an answer, so the state must be sent after it."""
        self._inbox.put(call)
        self._inbox.put(self._ask_for_answer)

    def _ask_for_answer(self) -> None:
        self._has_answer = True
        self._state_pace.ask()

    def _shown(self) -> dict[str, Any]:
        crowd = max(len(self._latest.nodes) / MANY_NODES, 1.0)
        self._state_pace.interval, self._curve_pace.interval = STATE_SECONDS * crowd, CURVE_SECONDS * crowd
        self._picture_pace.interval = PICTURE_SECONDS * crowd
        self._actions.see(self._latest.cell)
        metrics = [[name, plain(name, 40)] for name in self._curves.metrics()[:MOST_METRICS]]
        return {
            **panel_model(self._latest),
            "board": class_board(self._latest) if self.as_class else None,
            "answers": self._actions.answers(),
            "notice": self._notice,
            "curves": {"metrics": metrics, **self._choice._asdict()} if self._figure and metrics else None,
        }

    def _push_state(self) -> None:
        state = self._shown()
        if self._hears_views:
            state["tell"] = self._slow_views.number(time.monotonic())
        self._widget.state, self._has_answer = state, False

    def _send_picture(self, bundle: dict[str, str] | None = None) -> None:
        """How the panel looks, for the file. The browser writes it: what a kernel sends to an output does not arrive
        any more after the page was loaded again. With ``bundle`` the panel ends as that picture."""
        picture = bundle or _static_bundle(self._latest, self._curves, as_class=self.as_class)
        self._widget.send(
            {"picture": {"html": picture["text/html"], "text": picture["text/plain"], "last": bundle is not None}}
        )

    def _draw(self) -> None:
        if self._figure is None:
            if not self._curves.nodes():
                return
            self._figure = new_figure()
            reroute(self._kernel, [self._figure.widget], self._inbox.put)
        self._state_pace.ask()  # with the list of metrics, and who draws it has drawn these curves
        if self._figure.draw(self._curves, node_colours(self._latest.nodes), self._latest.started, self._choice):
            self._box.children = (self._widget, self._figure.widget)

    def _leave(self) -> None:
        self._over = True

    def _leave_picture(self) -> None:
        """Put the last state in place of the widgets: what is saved with the notebook then needs no kernel."""
        from IPython.display import update_display

        atexit.unregister(self._abandon)
        self._unsubscribe()
        if self in _panels:
            _panels.remove(self)
        bundle = _static_bundle(self._latest, self._curves, self._ended, self.as_class)
        self._send_picture(bundle)
        update_display(bundle, raw=True, display_id=self._display_id)
        for widget in (self._box, self._widget, self._figure and self._figure.widget):
            if widget is not None:
                widget.close()


def _widget_kernel() -> Any:
    """The ipykernel kernel that this code runs in, or None: a terminal, a script, or no comm to a browser."""
    from IPython import get_ipython

    shell = get_ipython()
    return getattr(shell, "kernel", None)


def _ipykernel_version() -> str:
    import ipykernel

    return plain(getattr(ipykernel, "__version__", "of an unknown version"), 40)


def _has_news(before: ClusterView, after: ClusterView) -> bool:
    """Something that somebody wants to find in the file: a cell runs, or more has happened than that time went by."""
    return _is_busy(before) or _is_busy(after) or _gist(before) != _gist(after)


def _is_busy(state: ClusterView) -> bool:
    return state.cell is not None and state.cell.status == "running"


def _gist(state: ClusterView) -> tuple[object, ...]:
    nodes = [(node.name, node.condition, node.checkpoint) for node in state.nodes]
    return state.cell, nodes, [(job.name, job.round) for job in state.jobs], state.events[-1:]


def _static_bundle(
    state: ClusterView, series: Curves | Sequence[Series] = (), ended: str = "", as_class: bool = False
) -> dict[str, str]:
    # It is saved with the notebook: no code stands in it.
    state = msgspec.structs.replace(state, invitation="")
    # Whoever opens the file later must not take it for how things are.
    moment = "" if ended else f"as it was on {dated(state.now)}"
    return {
        "text/html": render_html(state, series, ended=ended, moment=moment, as_class=as_class),
        "text/plain": render_text(state, series, ended=ended, as_class=as_class),
    }


def _display_static(cluster: "Cluster", as_class: bool) -> None:
    from IPython import get_ipython
    from IPython.display import display

    bundle = _static_bundle(cluster.state(), cluster.series(), as_class=as_class)
    if get_ipython() is None:
        print(bundle["text/plain"])
    else:
        display(bundle, raw=True)
