"""tqdm's bars for notebooks on a node: a widget while a bar moves, a line of text when it has ended.

tqdm's own bars for notebooks stay widgets for ever, eleven for each bar. So they are gone in a saved notebook, bars of
several nodes that ended alike cannot be shown as one, and a loop with a bar in each epoch has more of them than a
notebook takes. Here the few widgets of a cell are used again by its next bars, and go at its end; what stays is the
line that ``tqdm.std`` would have written. Where nobody is shown widgets (nbclient, papermill, a replay) bars are text
from the beginning. tqdm has no setting for it, so the two modules that decide are replaced when a cell imports them.
"""

import os
import sys
import threading
import weakref
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_cluster.node.shell.tqdm_bar import BarStack, BarView, NotebookBar

MOST_VIEWS = 12
"""Bars that are widgets at the same time; those beyond are text."""
_REPLACED = ("tqdm.autonotebook", "tqdm.notebook")
_OURS = {"tqdm": "NotebookBar", "tqdm_notebook": "NotebookBar", "trange": "bar_range", "tnrange": "bar_range"}


class Bars:
    """The bars of the cell that runs, and the widgets that show them."""

    def __init__(self) -> None:
        self.cell = 0
        """Counts cells: a bar decides once in each whether it is a widget there."""
        self._widgets = False
        self._stack: BarStack | None = None
        self._free: list[BarView] = []
        # A bar that nobody holds any more closes itself.
        self._shown: dict[BarView, weakref.ref[NotebookBar]] = {}

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

    def take(self, bar: "NotebookBar") -> "BarView | None":
        """A view for ``bar``; None when it is to be text."""
        if not self._may_show(bar):
            return None
        from notebook_cluster.node.shell.tqdm_bar import BarStack, BarView

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

    def _may_show(self, bar: "NotebookBar") -> bool:
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
