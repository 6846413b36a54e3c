"""tqdm's bars for notebooks on a node: a widget while a bar moves, a line of text when it has ended.

tqdm's own bars for notebooks stay widgets for ever, eleven for each bar. So they are gone in a saved notebook, bars of
several nodes that ended alike cannot be shown as one, and a loop with a bar in each epoch has more of them than a
notebook takes. Here the few widgets of a cell are used again by its next bars, and go at its end; what stays is the
line that ``tqdm.std`` would have written. Where nobody is shown widgets (nbclient, papermill, a replay) bars are text
from the beginning. tqdm has no setting for it, so the two modules that decide are replaced when a cell imports them.
"""

import os
import re
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Protocol

from notebook_cluster.protocol.interaction import WIDGET_MIME, view_of_widget

LEAST_SECONDS = 0.1
"""Between two changes of a bar: a loop that sets a postfix each time makes thousands."""
_BAR = re.compile(r"\|?<bar/>\|?")

MOST_VIEWS = 12
"""Bars that are widgets at the same time; those beyond are text."""
_REPLACED = ("tqdm.autonotebook", "tqdm.notebook")
_OURS = {"tqdm": "NotebookBar", "tqdm_notebook": "NotebookBar", "trange": "bar_range", "tnrange": "bar_range"}


class Bar(Protocol):
    """What is shown: :class:`.tqdm_bar.NotebookBar`, a tqdm."""

    fp: Any
    desc: str
    colour: str | None

    @property
    def format_dict(self) -> dict[str, Any]:
        """The bar's numbers."""

    def format_meter(self, *args: Any, **numbers: Any) -> str:
        """They as text."""

    def settle(self, *, failed: bool) -> None:
        """Write the line that stays."""

    def detach(self, *, again: bool = False) -> None:
        """Have no view any more."""


class Bars:
    """The bars of the cell that runs, and the widgets that show them."""

    def __init__(self) -> None:
        self.cell = 0
        """Counts cells: a bar decides once in each whether it is a widget there."""
        self._widgets = False
        self._stack: BarStack | None = None
        self._free: list[BarView] = []
        # A bar that nobody holds any more closes itself.
        self._shown: dict[BarView, weakref.ref[Bar]] = {}

    def begin(self, widgets: bool) -> None:
        """A cell begins; ``widgets``: somebody is shown them."""
        self.cell += 1
        self._widgets = widgets

    def end(self, *, failed: bool) -> None:
        """The cell has ended: what it left unfinished becomes text, and its widgets go."""
        self._widgets = False
        self.settle(failed=failed)
        if self._stack is not None:
            self._stack.remove()
        self._close()

    def settle(self, *, failed: bool) -> None:
        """Every bar that has not ended writes its line as it is; with ``failed`` its loop goes on no more."""
        for view, reference in list(self._shown.items()):
            bar = reference()
            if bar is None:
                self.give_back(view)
            else:
                bar.settle(failed=failed)

    def cleared(self) -> None:
        """The cell's output was cleared: a bar that goes on is shown anew."""
        for reference in list(self._shown.values()):
            bar = reference()
            if bar is not None:
                bar.detach(again=True)
        if self._stack is not None:
            self._stack.close()
        self._close()

    def take(self, bar: "Bar") -> "BarView | None":
        """A view for ``bar``; None when it is to be text."""
        if not self._may_show(bar):
            return None
        if self._stack is None:
            self._stack = BarStack()
        view = self._free.pop(0) if self._free else BarView(self._stack)
        self._shown[view] = weakref.ref(bar)
        return view

    def give_back(self, view: "BarView") -> None:
        """Its bar needs ``view`` no more."""
        if self._shown.pop(view, None) is not None:
            view.hide()
            self._free.append(view)

    def _close(self) -> None:
        for view in [*self._shown, *self._free]:
            view.close()
        self._stack = None
        self._shown.clear()
        self._free.clear()

    def _may_show(self, bar: "Bar") -> bool:
        if not self._widgets or len(self._shown) >= MOST_VIEWS:
            return False
        if threading.current_thread() is not threading.main_thread():
            return False  # a display of another thread may land below another cell
        # Not what %%capture, redirect_stderr or file= take away.
        stream = next((stream for stream in (sys.stderr, sys.stdout) if bar.fp == stream), None)
        if stream is None or not hasattr(stream, "pub_thread"):
            return False
        try:
            from ipywidgets import Output, Widget
        except ImportError:
            return False
        # An Output widget keeps what was displayed in it, also when it is gone.
        return not any(isinstance(one, Output) and one.msg_id for one in list(_instances(Widget)))


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
        # Where there is little room the bar gives way, and not what it says.
        self._left, self._right = (Label(layout={"flex": "0 0 auto"}) for _ in range(2))
        self._bar = FloatProgress(min=0.0, max=1.0, layout={"flex": "1 1 auto", "min_width": "0"})
        self._box = HBox([self._left, self._bar, self._right])
        self._process = os.getpid()
        self._displayed = False
        self._of: weakref.ref[Bar] | None = None
        self._changed_at = 0.0
        self._timer: threading.Timer | None = None

    def show(self, bar: Bar, text: str | None = None) -> None:
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

    def _change(self, bar: Bar, text: str | None) -> None:
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

    def _late(self, reference: "weakref.ref[Bar]") -> None:
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


bars = Bars()
"""Those of this kernel."""


def _instances(widget: Any) -> Any:
    return sys.modules[widget.__module__].__dict__.get("_instances", {}).values()


class _BarModule(ModuleType):
    """A module with the names of ``tqdm.notebook``: our bars, and what ``tqdm.std`` has for the rest."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in _OURS:
            return getattr(import_module("notebook_cluster.node.shell.tqdm_bar"), _OURS[name])
        return getattr(import_module("tqdm.std"), name)


class _Finder(MetaPathFinder, Loader):
    """Finds and makes the replaced modules."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in _REPLACED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _BarModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run: names are looked up when they are used."""


def install_bars(ip: Any) -> None:
    """From now on ``tqdm.auto`` and ``tqdm.notebook`` make our bars; nothing is imported before a cell does."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    clear, show = ip.display_pub.clear_output, ip._showtraceback
    process = os.getpid()

    def clear_output(wait: bool = False) -> None:
        clear(wait)
        if os.getpid() == process:
            bars.cleared()

    def show_traceback(*error: Any) -> None:
        # In front of it: so far the bar came before it moved no more.
        try:
            if os.getpid() == process and threading.current_thread() is threading.main_thread():
                bars.settle(failed=True)
        finally:
            show(*error)

    ip.display_pub.clear_output, ip._showtraceback = clear_output, show_traceback
