"""What data-parallel training and checkpoints need of an ``mlx.optimizers.Optimizer``: its step, its state as a tree.

``optimizer.state`` is a dict of settings that may change (``step``, ``learning_rate``) and, beside them, one dict of
arrays for each parameter. A ``MultiOptimizer`` has several of those.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_RATE = "learning_rate"
_STEP = "apply_gradients"
_WITHOUT_NUMPY = {"bfloat16": np.uint16}
"""dtypes that numpy lacks, and what holds their bits."""

_DIRECTIONS = frozenset({"m", "exp_avg"})
"""Where the steps of optimizers go that divide them by something."""


def is_mlx_optimizer(optimizer: Any) -> bool:
    """Whether it is an ``mlx.optimizers.Optimizer``; mlx is not imported to find out."""
    frameworks = {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}
    return "mlx" in frameworks and hasattr(optimizer, "apply_gradients") and hasattr(optimizer, "state")


def evaluate(optimizer: Any) -> None:
    """Compute the state now. What is still to be computed later can only be computed on the thread that asked for it.

    Raises:
        ValueError: it cannot be computed here.
    """
    import mlx.core as mx

    try:
        mx.eval(optimizer.state)
    except RuntimeError as error:
        raise ValueError(
            f"the state of {type(optimizer).__name__} was never computed ({error}): call mx.eval(optimizer.state) "
            "where it is changed"
        ) from None


def state_tree(optimizer: Any) -> dict[str, Any]:
    """The state as dicts and lists of mlx arrays, all of them computed.

    Raises:
        ValueError: as :func:`evaluate`.
    """
    evaluate(optimizer)
    return {"states": [dict(leaf.state) for leaf in stepping(optimizer)]}


def load_state(optimizer: Any, saved: dict[str, Any]) -> None:
    """What :func:`state_tree` gave becomes the state; compiled functions that took ``optimizer.state`` go on with it.

    Raises:
        ValueError: it is not the state of such an optimizer; nothing was changed.
    """
    leaves, states = stepping(optimizer), saved["states"]
    if len(leaves) != len(states):
        raise ValueError(f"{len(states)} optimizers in one, this one has {len(leaves)}")
    for leaf, state in zip(leaves, states, strict=True):
        if _settings(leaf.state) != _settings(state):
            held, here = ", ".join(_settings(state)), ", ".join(_settings(leaf.state))
            raise ValueError(f"it has {held} of {type(leaf).__name__}, this one {here}")
        _check_kept(leaf, state)
    for leaf, state in zip(leaves, states, strict=True):
        _replace(leaf, state)


def kept_state(optimizer: Any) -> list[Any]:
    """The state now, for :func:`put_state`. mlx never writes to arrays, so only what holds them is copied."""
    return [_copied(leaf.state) for leaf in stepping(optimizer)]


def put_state(optimizer: Any, kept: list[Any]) -> None:
    """The state that :func:`kept_state` gave; it can be put more than once."""
    for leaf, state in zip(stepping(optimizer), kept, strict=True):
        _replace(leaf, _copied(state))


def put_back(optimizer: Any, kept: list[Any], parameters: dict[str, Any]) -> None:
    """What :func:`kept_state` gave becomes the state of these ``parameters`` (name -> array) again, after a step that
    was not theirs; of one that had none yet the state begins."""
    for leaf, before in zip(stepping(optimizer), kept, strict=True):
        for name, array in parameters.items():
            state, old = _state_of(leaf.state, name), _state_of(before, name)
            if not state:  # another leaf steps it
                continue
            state.clear()
            if old:
                state.update(old)
            else:
                leaf.init_single(array, state)


def count_steps(optimizer: Any, steps: int) -> None:
    """So many steps were made for this optimizer."""
    if steps:
        for leaf in stepping(optimizer):
            leaf.state["step"] = leaf.step + steps
        evaluate(optimizer)


def clear_state(optimizer: Any) -> None:
    """Forget what it gathered for each parameter; step and learning rate stay."""
    for leaf in stepping(optimizer):
        settings = _settings(leaf.state)
        _replace(leaf, {name: value for name, value in leaf.state.items() if name in settings})


def forget_direction(optimizer: Any) -> bool:
    """As :func:`.torch_optimizer.forget_direction`, of an mlx optimizer."""
    import mlx.core as mx

    evaluate(optimizer)
    states = []
    for leaf in stepping(optimizer):
        for _, state in _kept(leaf.state, ""):
            if not _divides(leaf, set(state)):
                return False
            states.append(state)
    kept = [array for state in states for name, array in state.items() if name not in _DIRECTIONS]
    if not kept or not all(bool(mx.isfinite(array).all()) for array in kept):
        return False
    for state in states:
        state.update({name: mx.zeros_like(state[name]) for name in _DIRECTIONS & state.keys()})
    evaluate(optimizer)
    return True


def check_rate(optimizer: Any) -> None:
    """Raises:
    ValueError: it has no learning rate that could be multiplied.
    """
    for leaf in stepping(optimizer):
        if _RATE not in leaf.state or getattr(leaf, "relative_step", False):
            raise ValueError(
                f"scale_lr=True: this {type(leaf).__name__} chooses its learning rate itself: give it learning_rate= "
                "(and relative_step=False), or leave scale_lr out"
            )


def make_step(optimizer: Any, model: Any, gradients: Any, factor: int) -> None:
    """``optimizer.update`` with ``factor`` times the learning rate; computed when this returns."""
    import mlx.core as mx

    with contextlib.ExitStack() as stack:
        if factor != 1:
            for leaf in stepping(optimizer):
                stack.enter_context(_times(leaf, factor))
        _steps_here.add(id(optimizer))
        stack.callback(_steps_here.discard, id(optimizer))
        optimizer.update(model, gradients)
    mx.eval(model.parameters(), optimizer.state)


_steps_here: set[int] = set()
"""Ids of the optimizers that :func:`make_step` steps now."""


def refuse_other_steps(optimizer: Any, refuses: Callable[[], bool]) -> None:
    """As :func:`.torch_optimizer.refuse_other_steps`, of an mlx optimizer; not in what was compiled before."""
    vars(optimizer).pop(_STEP, None)  # what an earlier sync object has put there
    key, name, plain = id(optimizer), type(optimizer).__name__, getattr(optimizer, _STEP)

    def apply_gradients(gradients: Any, parameters: Any) -> Any:
        if key not in _steps_here and refuses():
            raise ValueError(
                f"{name}.update() was called, and sync.step() of nc.DataParallel makes the step of all nodes: leave "
                "optimizer.update(model, grads) out"
            )
        return plain(gradients, parameters)

    setattr(optimizer, _STEP, apply_gradients)


def rate_of(leaf: Any) -> float | None:
    """The learning rate of the next step of one of those in :func:`stepping`; None: it chooses that itself."""
    schedule = getattr(leaf, "_schedulers", {}).get(_RATE)
    rate = schedule(leaf.step) if schedule is not None else leaf.state.get(_RATE)
    return None if rate is None else float(rate)


def to_numpy(array: Any) -> tuple[Any, str]:
    """A computed mlx array as a numpy array of its bits, and its dtype where numpy lacks that (else empty). On any
    thread: it asks mlx to compute nothing."""
    dtype = str(array.dtype).removeprefix("mlx.core.")
    if dtype not in _WITHOUT_NUMPY:
        return np.array(array, order="C"), ""
    held = _WITHOUT_NUMPY[dtype]
    return np.frombuffer(bytearray(memoryview(array).tobytes()), held).reshape(array.shape), dtype


def from_numpy(array: Any, dtype: str) -> Any:
    """The inverse of :func:`to_numpy`."""
    import mlx.core as mx

    return mx.array(array).view(getattr(mx, dtype)) if dtype in _WITHOUT_NUMPY else mx.array(array)


def _copied(tree: Any) -> Any:
    """A tree with the same arrays, in dicts and lists of its own."""
    if isinstance(tree, dict):
        return {name: _copied(value) for name, value in tree.items()}
    return type(tree)(_copied(value) for value in tree) if isinstance(tree, list | tuple) else tree


def stepping(optimizer: Any) -> list[Any]:
    """The optimizers that make steps: itself, or those of a ``MultiOptimizer``."""
    parts = getattr(optimizer, "optimizers", None)
    return [optimizer] if parts is None else [leaf for part in parts for leaf in stepping(part)]


def _settings(state: dict[str, Any]) -> list[str]:
    """Names of what is not kept for each parameter."""
    return sorted(name for name, value in state.items() if not isinstance(value, dict | list | tuple))


def _check_kept(leaf: Any, state: dict[str, Any]) -> None:
    """Raises:
    ValueError: of some parameter it has less than ``leaf`` wants at its next step (which depends on its settings).
    """
    import mlx.core as mx

    wanted: list[set[str]] = []
    for shape in ((1,), (1, 1)):  # what Adafactor keeps of a vector and of a matrix differs
        fresh: dict[str, Any] = {}
        leaf.init_single(mx.zeros(shape), fresh)
        wanted.append(set(fresh))
    for where, kept in _kept(state, ""):
        if not any(names <= kept.keys() for names in wanted):
            raise ValueError(
                f"of {where!r} it has {', '.join(sorted(kept))}, {type(leaf).__name__} here keeps "
                f"{', '.join(sorted(wanted[0]))} of a vector"
            )


def _divides(leaf: Any, names: set[str]) -> bool:
    """Whether what it keeps under these ``names`` is what it divides a step by, beside where the steps went."""
    import mlx.optimizers as optimizers

    if "v" in names:
        return not isinstance(leaf, optimizers.SGD | optimizers.Muon)  # theirs is a velocity
    return any(name.startswith("exp_avg_sq") for name in names)


def _kept(tree: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each parameter's name and what is kept for it, the very dict."""
    import mlx.core as mx

    items = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    if where and isinstance(tree, dict) and any(isinstance(value, mx.array) for _, value in items):
        yield where, tree
    for name, value in items:
        if isinstance(value, dict | list | tuple):
            yield from _kept(value, f"{where}.{name}" if where else str(name))


def _state_of(tree: Any, name: str) -> dict[str, Any] | None:
    """What is kept for the parameter of this name."""
    for key in name.split("."):
        if isinstance(tree, list | tuple):
            tree = tree[int(key)] if key.isdigit() and int(key) < len(tree) else None
        else:
            tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else None


def _replace(leaf: Any, state: dict[str, Any]) -> None:
    kept, new = leaf.state, dict(state)
    kept.clear()
    kept.update(new)
    leaf.state = kept  # so that it looks for parameters without a state at its next step


@contextlib.contextmanager
def _times(leaf: Any, factor: int) -> Iterator[None]:
    """``factor`` times the learning rate for one step. One on a schedule is computed anew in every step: then the
    schedule is multiplied, and afterwards the state has what it gave."""
    schedules, before = getattr(leaf, "_schedulers", {}), leaf.state[_RATE]
    schedule: Callable[[Any], Any] | None = schedules.get(_RATE)
    if schedule is None:
        leaf.state[_RATE] = before * factor
        try:
            yield
        finally:
            leaf.state[_RATE] = before
        return
    plain = [before]

    def scaled(step: Any) -> Any:
        plain.append(schedule(step))
        return plain[-1] * factor

    schedules[_RATE] = scaled
    try:
        yield
    finally:
        leaf.state[_RATE], schedules[_RATE] = plain[-1], schedule
