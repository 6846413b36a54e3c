"""What an optimiser steps with, as one line: nodes of data-parallel training, which each make the step, compare it."""

from collections.abc import Iterator
from numbers import Real
from typing import Any

import xxhash

from notebook_cluster.training.models.mlx_optimizer import is_mlx_optimizer, rate_of, stepping

COMPARED = "lr", "momentum", "dampening", "nesterov", "betas", "alpha", "weight_decay"
"""Settings that mean the same by that name in torch and in MLX; lr is a learning rate on a schedule, too."""
MOST = 120
"""Characters of the settings; of more of them the beginning is named, and a hash of all."""


def settings_of(optimizer: Any) -> str:
    """``SGD(lr=0.1, momentum=0.9)``: what the next step of a torch.optim or mlx.optimizers optimizer is made with, not
    what it has gathered. What is off or 0 is left out; of several groups each value is named once."""
    groups = list(_groups(optimizer))
    told = {name: "/".join(dict.fromkeys(_text(each[name]) for each in groups if name in each)) for name in COMPARED}
    text = ", ".join(f"{name}={value}" for name, value in told.items() if name == "lr" or value.strip("0/"))
    if len(text) > MOST:
        text = f"{text[:MOST]}… {xxhash.xxh3_64_hexdigest(text.encode())}"
    return f"{type(optimizer).__name__}({text})"


def _groups(optimizer: Any) -> Iterator[dict[str, Any]]:
    if is_mlx_optimizer(optimizer):
        for leaf in stepping(optimizer):
            yield {**vars(leaf), "lr": rate_of(leaf)}
    else:
        yield from optimizer.param_groups


def _text(value: Any) -> str:
    """Six digits, for a float32 number is not quite the one that people wrote."""
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value))
    if hasattr(value, "item") and not value.ndim:  # a learning rate may be a tensor
        value = value.item()
    return f"{value:.6g}" if isinstance(value, Real) else str(value)
