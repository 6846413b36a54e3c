"""What people register beside the model: optimizers, and under ``extra=`` schedulers, averages, random generators.

The state of each is a tree of arrays, numbers and texts. A checkpoint writes it (:mod:`.optimizer_bytes`); a cell that
Stop has ended keeps it in memory for the next time it is run.
"""

import random
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from notebook_cluster.training.models import mlx_optimizer

_WHAT = "pass what has state_dict() and load_state_dict(), a random generator, or an mlx.nn.Module"
_ABSENT = object()
_MOST_SETTINGS = 10_000


@dataclass(frozen=True)
class StateOf:
    """How the state of one object is read and put back. ``generator``: it has no settings, only a position."""

    read: Callable[[], Any]
    put: Callable[[Any], None]
    generator: bool = False


def state_access(name: str, thing: Any) -> StateOf:
    """How to get at the state of ``thing``, which was registered as ``name``.

    Raises:
        TypeError: it has none that could be read and put back; names it.
    """
    if mlx_optimizer.is_mlx_optimizer(thing):
        return StateOf(lambda: mlx_optimizer.state_tree(thing), lambda state: mlx_optimizer.load_state(thing, state))
    if callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
        return StateOf(thing.state_dict, thing.load_state_dict)
    if _is_of(thing, "torch", "Generator"):
        return StateOf(thing.get_state, thing.set_state, generator=True)
    if _is_of(thing, "numpy", "Generator"):
        bits = thing.bit_generator
        return StateOf(lambda: bits.state, lambda state: setattr(bits, "state", state), generator=True)
    if _is_of(thing, "numpy", "RandomState"):
        return StateOf(thing.get_state, thing.set_state, generator=True)
    if isinstance(thing, random.Random):
        return StateOf(thing.getstate, thing.setstate, generator=True)
    if _is_of(thing, "mlx", "Module"):
        return StateOf(lambda: dict(thing.parameters()), thing.update)
    raise TypeError(f"extra[{name!r}] is a {type(thing).__name__}: {_WHAT}")


def check_extra(extra: Any) -> dict[str, Any]:
    """``extra=`` as a dict; None leaves it out.

    Raises:
        TypeError: no dict of names and things that have a state; names the first.
    """
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise TypeError(f'extra={type(extra).__name__}: pass a dict, for example extra={{"scheduler": scheduler}}')
    for name, thing in extra.items():
        if not isinstance(name, str) or not name or len(name) > 100:
            raise TypeError(f"extra={{{name!r}: ...}}: name it with a text of 1 to 100 characters")
        state_access(name, thing)
    return dict(extra)


def copied(tree: Any) -> Any:
    """The tree with containers and arrays of its own; what never changes is shared."""
    if isinstance(tree, dict):
        made = {key: copied(value) for key, value in tree.items()}
        return type(tree)(made) if _remade(tree) else made
    if isinstance(tree, list):
        return [copied(value) for value in tree]
    if isinstance(tree, tuple):
        return tuple(copied(value) for value in tree)
    root = type(tree).__module__.partition(".")[0]
    if root == "mlx":
        return tree
    if hasattr(tree, "detach"):
        return tree.detach().to("cpu", copy=True)  # a card has no room for two
    return deepcopy(tree)


def bytes_of(tree: Any) -> int:
    """Of the arrays in ``tree``; those of mlx, which never change, are not copied."""
    if isinstance(tree, Mapping):
        return sum(map(bytes_of, tree.values()))
    if isinstance(tree, list | tuple):
        return sum(map(bytes_of, tree))
    return 0 if type(tree).__module__.startswith("mlx") else int(getattr(tree, "nbytes", 0))


def _remade(tree: Any) -> bool:
    """Whether a copy of it is of its own type; other kinds of dict may want more than their items."""
    return type(tree).__name__ in ("Counter", "OrderedDict")


def settings_in(state: Any, *, arrays: bool) -> Any:
    """The numbers and texts of a state, as a tree; ``arrays``: and those that are in an array of one element."""
    return _settings(state, arrays, [_MOST_SETTINGS])


def _settings(tree: Any, arrays: bool, left: list[int]) -> Any:
    left[0] -= 1
    if left[0] < 0:
        return _ABSENT
    if isinstance(tree, Mapping):
        return {key: _settings(value, arrays, left) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_settings(value, arrays, left) for value in tree]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if not arrays:
        return _ABSENT
    if getattr(tree, "size", None) == 1 or (hasattr(tree, "numel") and tree.numel() == 1):
        return tree.item()
    return _ABSENT


def with_edits(state: Any, then: Any, now: Any, now_state: Any, where: str = "") -> tuple[Any, list[str]]:
    """``state`` with those settings that the cell sets otherwise than ``then`` as they are ``now``; ``now_state`` is
    the whole state now.

    Returns:
        The tree, and the names of what was edited, for people.
    """
    if isinstance(state, dict) and isinstance(then, dict) and isinstance(now, dict):
        made, names = dict(state) if not _remade(state) else type(state)(state), list[str]()
        for key in state:
            if key in then and key in now:
                inner = f"{where}.{key}" if where else str(key)
                made[key], more = with_edits(state[key], then[key], now[key], now_state[key], inner)
                names += more
        return made, names
    if isinstance(state, list | tuple) and isinstance(then, list) and isinstance(now, list):
        if not len(state) == len(then) == len(now):
            return (state, []) if then == now else (now_state, [where])
        rows = [with_edits(*each, where) for each in zip(state, then, now, now_state, strict=True)]
        return type(state)(row for row, _ in rows), [name for _, names in rows for name in names]
    if then is _ABSENT or now is _ABSENT or isinstance(then, dict | list) or then == now:
        return state, []
    return now_state, [where]


# ---- generators that nobody has to register ------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """The state of the generators that libraries share: Python's, numpy's, torch's and mlx's, of those loaded."""
    states: dict[str, Any] = {"python": random.getstate()}
    numpy, torch, mlx = sys.modules.get("numpy"), sys.modules.get("torch"), sys.modules.get("mlx.core")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    if torch is not None:
        states["torch"] = torch.get_rng_state().numpy()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = [state.numpy() for state in torch.cuda.get_rng_state_all()]
        if torch.backends.mps.is_available():
            states["mps"] = torch.mps.get_rng_state().numpy()
    if mlx is not None:
        states["mlx"] = [int(word) for word in mlx.random.state[0].tolist()]
    return states


def put_random_states(states: Mapping[str, Any]) -> None:
    """The inverse of :func:`random_states`, for libraries that are loaded."""
    random.setstate(states["python"])
    numpy, torch, mlx = sys.modules.get("numpy"), sys.modules.get("torch"), sys.modules.get("mlx.core")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])
    if torch is not None and "torch" in states:
        torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([torch.from_numpy(state.copy()) for state in states["cuda"]])
        if "mps" in states and torch.backends.mps.is_available():
            torch.mps.set_rng_state(torch.from_numpy(states["mps"].copy()))
    if mlx is not None and "mlx" in states:
        high, low = states["mlx"]  # the key that this seed leads to
        mlx.random.seed(high << 32 | low)


class SharedGenerators:
    """All of them, as something with a state."""

    def state_dict(self) -> dict[str, Any]:
        return random_states()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        put_random_states(state)


def _is_of(thing: Any, library: str, name: str) -> bool:
    return any(base.__name__ == name and base.__module__.partition(".")[0] == library for base in type(thing).__mro__)
