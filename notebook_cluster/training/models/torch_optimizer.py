"""What steps made aside need of a ``torch.optim.Optimizer``: its state, copied and put back; and what is forgotten of
it after work that was refused."""

import contextlib
import functools
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

_SCALES = frozenset({"exp_avg_sq", "exp_inf", "square_avg", "sum", "row_var", "variance"})
"""What torch's optimizers divide a step by."""

_DIRECTIONS = frozenset({"exp_avg", "momentum_buffer", "grad_avg"})
"""Where their steps go."""


_watched: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()
"""Optimizer -> the hook that looks at its steps."""
_steps_here: set[int] = set()
"""Ids of the optimizers that :func:`make_step` steps now."""


def make_step(optimizer: Any) -> None:
    """The step of all nodes."""
    _steps_here.add(id(optimizer))
    try:
        optimizer.step()
    finally:
        _steps_here.discard(id(optimizer))


def refuse_other_steps(optimizer: Any, refuses: Callable[[], bool]) -> None:
    """A step that :func:`make_step` does not make raises from now on where ``refuses()``: the models of the nodes would
    differ."""
    key, name = id(optimizer), type(optimizer).__name__

    def look(stepped: Any, args: Any, kwargs: Any) -> None:
        if key not in _steps_here and refuses():
            raise ValueError(
                f"{name}.step() was called, and sync.step() of nc.DataParallel makes the step of all nodes: leave "
                "optimizer.step() out (and optimizer.zero_grad(), unless another model's loss leaves gradients in this "
                "one, as a GAN's does: then before backward())"
            )

    if optimizer in _watched:
        _watched[optimizer].remove()
    with contextlib.suppress(AttributeError):  # a wrapper of one of torch
        _watched[optimizer] = optimizer.register_step_pre_hook(look)


_scaled: "WeakSet[Any]" = WeakSet()
"""Each ``torch.amp.GradScaler`` that has multiplied a loss since its last update."""


def watch_scalers(framework: str) -> None:
    """Notice from now on which ``torch.amp.GradScaler`` multiplies a loss: gradients do not tell. Other frameworks than
    torch have none."""
    if framework != "torch":
        return
    from torch.amp import GradScaler

    _scaled.clear()
    scale, update = GradScaler.scale, GradScaler.update
    if hasattr(scale, "__wrapped__"):
        return

    @functools.wraps(scale)
    def noted(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            _scaled.add(self)
        return scale(self, outputs)

    @functools.wraps(update)
    def forgotten(self: Any, *args: Any, **kwargs: Any) -> None:
        _scaled.discard(self)
        update(self, *args, **kwargs)

    GradScaler.scale, GradScaler.update = noted, forgotten  # type: ignore[method-assign]


def check_unscaled(optimizer: Any = None) -> bool:
    """Whether a GradScaler has multiplied the loss, and the gradients were divided again.

    Raises:
        ValueError: those of ``optimizer``, or of any where there is none, were not divided.
    """
    found = False
    for scaler in list(_scaled):
        _scaled.discard(scaler)
        # torch has no public word for it
        stages = {key: state["stage"].name for key, state in scaler._per_optimizer_states.items()}
        asked = stages if optimizer is None else {id(optimizer)}
        unscaled = any(stages.get(key) == "UNSCALED" for key in asked)
        if unscaled or scaler.get_scale() == 1:
            found = found or unscaled
            continue
        what = "optimizer" if optimizer is not None else "any optimizer of the model"
        raise ValueError(
            f"the gradients are {scaler.get_scale():g} times too large, for {type(scaler).__name__} has multiplied the "
            f"loss: call scaler.unscale_({what}) before sync.step() and scaler.update() after it, or use autocast with "
            "torch.bfloat16, which needs no scaler"
        )
    return found


@dataclass(frozen=True)
class TorchOptimizerState:
    """What a step changes of an optimizer."""

    state: dict[Any, Any]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: Any) -> "TorchOptimizerState":
        """The state of ``optimizer``: its own tensors, not copies of them."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return cls(dict(optimizer.state), groups)

    def copy(self) -> "TorchOptimizerState":
        """The keys of ``state`` are the parameters themselves."""
        return TorchOptimizerState({key: deepcopy(value) for key, value in self.state.items()}, deepcopy(self.groups))

    def put(self, optimizer: Any) -> None:
        optimizer.state.clear()
        optimizer.state.update(self.state)
        for group, values in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(values)


def forget_direction(optimizer: Any) -> bool:
    """Forget where the steps went, and keep what they are divided by (Adam's second moments).

    Returns:
        False: it divides by nothing that is kept, or there is NaN or infinity in that; nothing was changed.
    """
    import torch

    states = list(optimizer.state.values())
    if not states or not all(isinstance(state, dict) and _SCALES & state.keys() for state in states):
        return False
    kept = [v for state in states for name, v in state.items() if name not in _DIRECTIONS and torch.is_tensor(v)]
    if not all(bool(torch.isfinite(value).all()) for value in kept):
        return False
    for state in states:
        for name in _DIRECTIONS & state.keys():
            state[name] = torch.zeros_like(state[name])
    return True
