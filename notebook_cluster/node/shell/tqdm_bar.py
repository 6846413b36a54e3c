"""One tqdm bar and the widgets that show it; imported when a cell makes its first bar. See :mod:`.progress_bars`."""

import os
import re
import sys
import threading
import time
import uuid
import weakref
from typing import Any

from tqdm.std import tqdm

from notebook_cluster.node.shell.progress_bars import bars
from notebook_cluster.protocol.interaction import WIDGET_MIME, view_of_widget

LEAST_SECONDS = 0.1
"""Between two changes of a bar: a loop that sets a postfix each time makes thousands."""
_BAR = re.compile(r"\|?<bar/>\|?")


class NotebookBar(tqdm):  # type: ignore[misc]
    """``tqdm.notebook.tqdm`` and the notebook's half of ``tqdm.auto.tqdm`` on a node, with tqdm's arguments.

    ``display`` and a width in words (``ncols="80%"``) are accepted and have no effect.
    """

    _view: "BarView | None" = None
    _decided = 0
    """The cell (as ``bars`` counts) for which it is decided whether this is a widget."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("display", None)
        if isinstance(options.get("ncols"), str):
            del options["ncols"]
        if "disable" in options:
            options["disable"] = bool(options["disable"])  # None means: where no terminal is
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Show how far it is."""
        if self._decided != bars.cell and not self.disable:
            self._decided = bars.cell
            self._view = bars.take(self)
        if self._view is None:
            return super().display(msg, pos)
        self._view.show(self, msg)
        return True

    def clear(self, nolock: bool = False) -> None:
        """Take the text away, so that other text can be written; a widget stays."""
        if self._view is None:
            super().clear(nolock)

    def close(self) -> None:
        """The bar has ended: its widgets are free, and with ``leave`` its text stays."""
        if self._view is None:
            super().close()
            return
        position = abs(self.pos)
        bars.give_back(self._view)
        self.detach()
        if position == 0 if self.leave is None else self.leave:
            self._ema_dt = lambda: None  # from here on its rate is that of the whole time
            self._write_line()
        self._end()

    def settle(self, *, failed: bool) -> None:
        """The cell ends, or fails, before the bar does: its text stays as it is now. In a later cell it may go on,
        unless it belongs to a loop of a cell that has ``failed``."""
        if self._view is not None:
            bars.give_back(self._view)
        self.detach()
        self._write_line()
        if failed and self.iterable is not None:
            # The loop is kept by the traceback; when that goes the bar would be closed, and written once more.
            self._end()

    def detach(self, *, again: bool = False) -> None:
        """It has no view any more; with ``again`` it gets another one when it moves."""
        self._view = None
        if again:
            self._decided = 0

    def _write_line(self) -> None:
        # What was printed before comes before it, though tqdm writes to stderr.
        sys.stdout.flush()
        self.fp.write(f"{self}\n")
        self.fp.flush()

    def _end(self) -> None:
        self.disable = True
        self._decr_instances(self)


def bar_range(*args: Any, **options: Any) -> NotebookBar:
    """``tqdm.notebook.trange``: ``tqdm(range(*args), **options)``."""
    return NotebookBar(range(*args), **options)


class BarStack:
    """The bars of a cell below each other, in one display: so those of a node stand together below its name."""

    def __init__(self) -> None:
        from ipywidgets import VBox

        self._box = VBox()
        self._display_id = f"progress-{uuid.uuid4().hex}"
        self._displayed = False

    def add(self, row: Any, description: str) -> None:
        """Show ``row`` below those that are there. ``description``: what the first bar is called."""
        from IPython.display import display

        self._box.children = (*self._box.children, row)
        if not self._displayed:
            self._displayed = True
            view = view_of_widget(self._box.model_id)
            # The text is seen where the node died before its bars ended.
            text = f"[progress bar {description}".rstrip() + "]"
            display({WIDGET_MIME: view, "text/plain": text}, raw=True, display_id=self._display_id)

    def remove(self) -> None:
        """Take it off the page."""
        from IPython.display import update_display

        if self._displayed:
            update_display({"text/plain": ""}, raw=True, display_id=self._display_id)
        self.close()

    def close(self) -> None:
        """Close its widgets."""
        _close(self._box)


class BarView:
    """The widgets of one bar at a time: its description, the bar, its numbers."""

    def __init__(self, stack: BarStack) -> None:
        from ipywidgets import FloatProgress, HBox, Label

        self._stack = stack
        self._left, self._bar, self._right = Label(), FloatProgress(min=0.0, max=1.0), Label()
        self._box = HBox([self._left, self._bar, self._right])
        self._process = os.getpid()
        self._displayed = False
        self._of: weakref.ref[NotebookBar] | None = None
        self._changed_at = 0.0
        self._timer: threading.Timer | None = None

    def show(self, bar: NotebookBar, text: str | None = None) -> None:
        """Show ``bar`` as it is now, or soon when it was changed just before; ``text`` in place of its numbers."""
        if os.getpid() != self._process:
            return  # a forked child has no part in this kernel's widgets
        begins = self._of is None or self._of() is not bar
        if not begins and time.monotonic() - self._changed_at < LEAST_SECONDS:
            if self._timer is None:
                self._timer = threading.Timer(LEAST_SECONDS, self._late, [self._of])
                self._timer.daemon = True
                self._timer.start()
            return
        self._change(bar, text)
        if begins:
            self._of = weakref.ref(bar)
            self._bar.style.bar_color = bar.colour
            self._box.layout.display = "flex"
        if not self._displayed:
            self._displayed = True
            self._stack.add(self._box, bar.desc.removesuffix(": "))

    def hide(self) -> None:
        """No bar needs it now."""
        self._of = None
        self._cancel()
        if os.getpid() == self._process:
            self._box.layout.display = "none"

    def close(self) -> None:
        """Close its widgets."""
        self._of = None
        self._cancel()
        if os.getpid() == self._process:
            _close(self._box, self._left, self._bar, self._right)

    def _change(self, bar: NotebookBar, text: str | None) -> None:
        self._changed_at = time.monotonic()
        numbers = bar.format_dict
        total, done = numbers["total"], numbers["n"]
        if text is None:
            wanted = (numbers["bar_format"] or "{l_bar}<bar/>{r_bar}").replace("{bar}", "<bar/>")
            text = bar.format_meter(**{**numbers, "bar_format": wanted})
        left, _, right = _BAR.sub("\0", text, count=1).rpartition("\0")
        # A label folds spaces; these are as wide as digits.
        self._left.value, self._right.value = (part.replace(" ", "\u2007") for part in (left, right))
        self._bar.value = min(1.0, max(0.0, done / total)) if total else 1.0
        self._bar.bar_style = "" if total else "info"

    def _late(self, reference: "weakref.ref[NotebookBar]") -> None:
        self._timer = None
        bar = reference()
        if bar is not None and self._of is reference:
            self._change(bar, None)

    def _cancel(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


def _close(*widgets: Any) -> None:
    for widget in widgets:
        for part in (widget, widget.layout, getattr(widget, "style", None)):
            if part is not None:
                part.close()
