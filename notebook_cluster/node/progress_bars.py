"""tqdm's bars as text on a node.

``tqdm.auto`` sees an IPython kernel and draws widgets, ten for each bar of each node. They are gone in a saved notebook
and where nobody looks (nbclient, papermill), and bars of several nodes that agree cannot be shown as one; with the text
of ``tqdm.std`` all of that works. tqdm has no setting for it, so the two modules that decide are replaced when a cell
imports them.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_REPLACED = ("tqdm.autonotebook", "tqdm.notebook")
_STANDARD = {"tqdm_notebook": "tqdm", "tnrange": "trange"}


class _TextBars(ModuleType):
    """A module with the names of ``tqdm.notebook`` and what ``tqdm.std`` has for them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module("tqdm.std"), _STANDARD.get(name, name))


class _Bars(MetaPathFinder, Loader):
    """Finds and makes the replaced modules."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in _REPLACED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _TextBars(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run: names are looked up when they are used."""


def show_bars_as_text() -> None:
    """From now on ``tqdm.auto`` and ``tqdm.notebook`` write text; nothing is imported before a cell does."""
    if not any(isinstance(finder, _Bars) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Bars())
