"""A cell that runs in the background: one line that says how it is doing, with a button that stops it."""

from collections.abc import Callable
from html import escape
from typing import Any

from notebook_cluster.security.chart_grammar import NO_TEX
from notebook_cluster.widgets.subshell import Post, reroute

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
            description="Stop", icon="stop", tooltip="Interrupt the cell on every node", layout=Layout(width="auto")
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
