"""Python begins with this in every process that the tests start (tests/conftest.py puts its folder on PYTHONPATH).

It leaves out what libraries do as they are imported, takes long and is not needed by most who import them:

- torch imports its compiler, which takes as long as torch itself, when the first optimizer is made; here when something
  compiles. What is left out tells the compiler where to stop, so it changes nothing while nobody has imported that.
- jsonschema makes a parser for addresses with letters that are not ASCII, which takes two seconds. Here it checks none
  of these, as where that package is not installed.
- JupyterLab starts Node.js, to see where packages would come from if it were built anew. Here it has the default.

Where a version of these has no such functions it is as slow as everywhere.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_LEFT_OUT = frozenset({"rfc3987_syntax"})


def _later(original: Callable[..., Any], without: Callable[..., Any]) -> Callable[..., Any]:
    """What ``original`` makes, once the compiler is there; before that ``without``."""

    @functools.wraps(original)
    def wrap(function: Callable[..., Any] | None = None, *arguments: Any, **keywords: Any) -> Any:
        if function is None:
            return functools.partial(wrap, *arguments, **keywords)
        stopping, plain = original(function, *arguments, **keywords), without(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (stopping if _COMPILER in sys.modules else plain)(*args, **kwargs)

        return call

    return wrap


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _without_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """``optimizer.step``, which computes no gradients unless the optimizer is differentiable."""

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        torch = sys.modules["torch"]
        with torch.set_grad_enabled(args[0].defaults["differentiable"]):
            return function(*args, **kwargs)

    return step


def _no_yarn(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_yarn_config`` where there is no Node.js."""
    return lambda logger: {"yarn config": {}, "npm config": {}}


_REPLACED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "torch._compile": ("_disable_dynamo", lambda original: _later(original, _as_it_is)),
    "torch.optim.optimizer": ("_use_grad_for_differentiable", lambda original: _later(original, _without_gradients)),
    "jupyterlab.commands": ("_yarn_config", _no_yarn),
}
"""Module -> a function in it, and what makes the one that takes its place."""


class _Changed:
    """A loader; without importlib.abc, whose import takes longer than all else here."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        name, replace = _REPLACED[module.__name__]
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, replace(original))


class _Finder:
    """As importlib.abc.MetaPathFinder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _LEFT_OUT:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        if fullname not in _REPLACED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changed(spec.loader)  # type: ignore[assignment]
        return spec


sys.meta_path.insert(0, _Finder())
