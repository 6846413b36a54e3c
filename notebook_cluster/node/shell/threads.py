"""How many threads libraries take in this kernel: its share of the machine's cores, looked at when a cell begins.

The agent has put the share into the environment before anything was imported. When nodes came or went since, it is
another one: then the environment, torch and the BLAS and OpenMP libraries that are loaded are told, on the main thread
and never in the middle of a cell. What the user has set is theirs from then on: a variable, with the agent or in a
cell, ``torch.set_num_threads(...)``, or a library's own number.
"""

import functools
import importlib.util
import sys
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from notebook_cluster.processors import PLACE, count_nodes, thread_variables, threads_for, variables_of_ours


class NodeThreads:
    """The threads of one kernel.

    Args:
        tell: called with (threads, whether the user chose them) whenever one of them is another.
    """

    def __init__(self, environment: MutableMapping[str, str], tell: Callable[[int, bool], None]) -> None:
        self._environment = environment
        self._tell = tell
        self._place = environment.get(PLACE, "")
        self._threads = _first_number(environment)
        self._users = not variables_of_ours(environment)
        """The user has set a variable that is meant for everything."""
        self._torch_set = _original(sys.modules.get("torch"))
        self._users_torch = False
        self._seen: dict[str, int] = {}
        """File of a library -> what it was set to here."""
        self._users_libraries: set[str] = set()
        self._told: tuple[int, bool] = (0, False)
        self._finder = _TorchFinder(self._watch_torch)
        if self._place:
            self._watch(sys.modules.get("torch"))

    def begin_cell(self) -> None:
        """On the main thread, before the user's code: give each library its share, if that is another than before."""
        if not self._place:
            return
        if not self._users and not variables_of_ours(self._environment):
            self._users = True
        share = threads_for(count_nodes(self._place))
        if not self._users and share != self._threads:
            self._apply(share)
        self._say()

    def close(self) -> None:
        """Look for no import any more."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)

    def _apply(self, share: int) -> None:
        before, self._threads = self._threads, share
        self._environment.update(thread_variables(self._environment, share))
        if self._torch_set is not None and not self._users_torch:
            self._torch_set(share)
        for library in _libraries():
            self._apply_to(library, before, share)

    def _apply_to(self, library: Any, before: int, share: int) -> None:
        path = library.filepath
        if self._torch_set is not None and "torch" in Path(path).parts:
            return  # it is torch that tells those that came with it
        if library.user_api == "openmp" and self._users_torch:
            return
        number = library.num_threads
        if number not in (share, self._seen.get(path, before)):
            self._users_libraries.add(path)
        if path not in self._users_libraries:
            library.set_num_threads(share)
            self._seen[path] = library.num_threads

    def _say(self) -> None:
        users = self._users or self._users_torch
        threads = self._threads
        if users:
            ask = getattr(sys.modules.get("torch"), "get_num_threads", None)
            threads = ask() if ask is not None else _first_number(self._environment)
        if (threads, users) != self._told:
            self._told = (threads, users)
            self._tell(threads, users)

    # ---- torch.set_num_threads ---------------------------------------------------------------------------------

    def _watch(self, torch: ModuleType | None) -> None:
        if torch is None:
            sys.meta_path.insert(0, self._finder)
        else:
            self._watch_torch(torch)

    def _watch_torch(self, torch: ModuleType) -> None:
        original = self._torch_set = _original(torch)
        if original is None:
            return

        @functools.wraps(original)
        def set_num_threads(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self._users_torch = True

        torch.set_num_threads = set_num_threads  # type: ignore[attr-defined]


def _original(torch: ModuleType | None) -> Callable[..., None] | None:
    return getattr(torch, "set_num_threads", None)


def _first_number(environment: MutableMapping[str, str]) -> int:
    """What the environment says; 0 when it says nothing."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        # OpenMP takes a list, a number for each level of nesting.
        number = environment.get(name, "").partition(",")[0].strip()
        if number.isdigit():
            return int(number)
    return 0


def _libraries() -> list[Any]:
    """The BLAS and OpenMP libraries that are loaded, as threadpoolctl controls them."""
    from threadpoolctl import ThreadpoolController

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that do not go together; it is not ours to say
        return list(ThreadpoolController().lib_controllers)


class _TorchFinder:
    """Calls ``on_import`` with torch when it has been imported, once. Libraries look whether torch is there long before
    they import it (``importlib.util.find_spec``): such a look is not the import."""

    def __init__(self, on_import: Callable[[ModuleType], None]) -> None:
        self._on_import = on_import
        self._looks = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch" or self._looks:
            return None
        self._looks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looks = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._on_import(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
