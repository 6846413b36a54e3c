"""How a handle is shown: a live line with a Stop button, and the same as plain HTML and text."""

import threading
import time
import uuid
from collections.abc import Callable
from html import escape
from typing import Any

from notebook_cluster.magics.display.publishing import ShellPublisher, is_headless
from notebook_cluster.magics.display.slots import Bundle
from notebook_cluster.magics.errors import ClusterProblem
from notebook_cluster.magics.execution.waiting import SAME_PRESS_SECONDS
from notebook_cluster.protocol.interaction import WIDGET_MIME, view_of_widget
from notebook_cluster.security.chart_grammar import NO_TEX
from notebook_cluster.widgets.subshell import Pace, Post, reroute

_SECONDS = 0.5


class HandleView:
    """All displays of one handle: they share a widget, and become still pictures when the cell has ended."""

    def __init__(
        self, publisher: ShellPublisher, say: Callable[[], tuple[str, str]], cancel: Callable[[bool], None]
    ) -> None:
        """Args:
        say: the handle's status and its summary, a line.
        cancel: what the Stop button does; with True (a second click) it kills.
        """
        self._publisher = publisher
        self._say = say
        self._cancel = cancel
        self._display_id = f"nbc-handle-{uuid.uuid4().hex[:12]}"
        self._displayed = False
        self._over = False
        self._widget: RunningWidget | None = None
        self._stopped_at: float | None = None
        self._pace = Pace(_SECONDS)
        self._lock = threading.Lock()

    def display(self, shell: Any, post: "Post | None") -> None:
        """Show the handle in the cell that runs now; ``post`` hands clicks to the handle's thread."""
        with self._lock:
            bundle = self._bundle()
            kernel = getattr(shell, "kernel", None)
            if not self._over and post is not None and kernel is not None and not is_headless(shell):
                if self._widget is None:
                    self._widget = RunningWidget(kernel, bundle["text/html"], post, self._stop)
                bundle = {WIDGET_MIME: view_of_widget(self._widget.model_id), **bundle}
            self._displayed = True
            shell.display_pub.publish(data=bundle, metadata={}, transient={"display_id": self._display_id})

    # ---- the handle's thread

    def changed(self) -> None:
        """There is something new to say."""
        self._pace.ask()

    def due(self) -> float | None:
        """Seconds until :meth:`refresh` is wanted; None when nothing is new."""
        return self._pace.wait(time.monotonic())

    def refresh(self) -> None:
        """Bring the live line up to date, at most twice a second."""
        if self._pace.take(time.monotonic()) and self._widget is not None:
            self._widget.show(self._bundle()["text/html"])

    def finish(self) -> None:
        """The cell has ended: what is saved with the notebook needs no kernel."""
        with self._lock:
            self._over = True
            if self._displayed and self._publisher.live:
                self._publisher.publish(self._bundle(), {}, self._display_id, True)
            if self._widget is not None:
                self._widget.close()

    def _stop(self) -> None:
        now = time.monotonic()
        if self._stopped_at is not None and now - self._stopped_at < SAME_PRESS_SECONDS:
            return  # a double click is one Stop: killing a kernel loses its state
        try:
            self._cancel(self._stopped_at is not None)
        except ClusterProblem:
            return  # the handle hears of it too, and says it
        if self._stopped_at is None and self._widget is not None:
            self._widget.offer_kill()
        self._stopped_at = now

    def _bundle(self) -> Bundle:
        status, text = self._say()
        return {"text/html": running_html(status, text), "text/plain": text}


_COLOURS = {"running": "#2f81f7", "ok": "#2da876", "error": "#d9534f", "lost": "#d9534f"}
_OTHER = "#c9a227"


def running_html(status: str, text: str) -> str:
    """``text`` behind a dot in the colour of ``status``."""
    return (
        f'<div class="{NO_TEX}" style="font-family:var(--jp-ui-font-family,sans-serif);'
        'font-size:var(--jp-ui-font-size1,13px)">'
        f'<span style="color:{_COLOURS.get(status, _OTHER)}">\u25cf</span> {escape(text)}</div>'
    )


class RunningWidget:
    """The live line. Made in the cell that shows it, changed by one thread."""

    def __init__(self, kernel: Any, html: str, post: Post, on_stop: Callable[[], None]) -> None:
        """Args:
        kernel: the running ipykernel kernel.
        post: called on a kernel thread with what a click asks for; must return at once.
        on_stop: what the click on the button asks for.
        """
        from ipywidgets import HTML, Button, HBox, Layout

        self._line = HTML(html)
        self._button = Button(
            description="Stop",
            icon="stop",
            tooltip="Interrupt the cell on every node",
            layout=Layout(width="auto", flex="0 0 auto"),
        )
        self._button.on_click(lambda button: on_stop())
        self._box = HBox([self._button, self._line])
        reroute(kernel, [self._button], post)

    @property
    def model_id(self) -> str:
        """Of the widget that holds the others."""
        return str(self._box.model_id)

    def show(self, html: str) -> None:
        """Change the line."""
        if self._line.value != html:
            self._line.value = html

    def offer_kill(self) -> None:
        """The next click kills the kernels."""
        self._button.description = "Kill"
        self._button.tooltip = "Kill and restart the kernels that do not stop"

    def close(self) -> None:
        """Take everything out of the browser."""
        for widget in (self._box, self._line, self._button):
            widget.close()
