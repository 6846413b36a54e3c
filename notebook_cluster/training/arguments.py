"""Checks of what people pass to a sync object: each error names the value and the way out."""

import math
import operator
from dataclasses import dataclass
from typing import Any

from notebook_cluster.codecs import CODEC_NAMES
from notebook_cluster.protocol.names import check_name
from notebook_cluster.training.outer_settings import float_bits
from notebook_cluster.training.parameters import Parameters
from notebook_cluster.training.saving import Settings


@dataclass(frozen=True)
class Strategy:
    """The validated settings of a sync object."""

    strategy: str
    every: int
    name: str
    outer_lr: float | None
    """None: by the number of members, decided at each round."""
    outer_momentum: float
    nesterov: bool
    codec: str

    def __post_init__(self) -> None:
        check_every(self.every)
        check_name(self.name, "job")
        lr, momentum = self.outer_lr, self.outer_momentum
        if lr is not None and not (_is_number(lr) and math.isfinite(lr) and lr > 0):
            raise ValueError(f"outer_lr={lr!r}: use a number above 0, or None to choose it by the number of nodes")
        if not (_is_number(momentum) and 0 <= momentum < 1):
            raise ValueError(f"outer_momentum={momentum!r}: use a number from 0 to below 1 (DiLoCo: 0.9)")
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"nesterov={self.nesterov!r}: use True or False")
        if self.codec not in CODEC_NAMES:
            raise ValueError(f"codec={self.codec!r}: use one of {', '.join(map(repr, CODEC_NAMES))}")

    @property
    def lr_bits(self) -> int | None:
        return None if self.outer_lr is None else float_bits(self.outer_lr)

    @property
    def momentum_bits(self) -> int:
        return float_bits(self.outer_momentum)

    def as_settings(self) -> Settings:
        """For a checkpoint's manifest."""
        return {
            "strategy": self.strategy, "every": f"{self.every} steps", "codec": self.codec,
            "outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum, "nesterov": self.nesterov,
        }  # fmt: skip


def check_every(every: object) -> int:
    """``every`` as a whole number of steps.

    Raises:
        ValueError: not a whole number from 1.
    """
    try:
        steps = operator.index(every)  # type: ignore[arg-type]
    except TypeError:
        steps = 0
    if isinstance(every, bool) or steps < 1:
        raise ValueError(f"every={every!r}: use a whole number of steps from 1, for example every=100")
    return steps


def check_samples(samples: Any) -> float:
    """How many examples a step used.

    Raises:
        ValueError: negative, not finite or not a number.
    """
    try:
        count = float(samples)
    except (TypeError, ValueError):
        raise ValueError(f"samples={samples!r}: pass the number of examples in the batch, for example len(x)") from None
    if not (math.isfinite(count) and count >= 0):
        raise ValueError(f"samples={samples!r}: pass the number of examples in the batch, for example len(x)")
    return count


def check_optimizer(optimizer: Any) -> Any:
    """``optimizer`` if its state can be saved.

    Raises:
        TypeError: not a torch optimizer.
    """
    if optimizer is not None and not (hasattr(optimizer, "state_dict") and hasattr(optimizer, "param_groups")):
        raise TypeError(f"optimizer={type(optimizer).__name__}: pass a torch.optim optimizer, or leave it out")
    return optimizer


def parameters_of(model: Any) -> Parameters:
    """The adapter for ``model``'s framework; neither framework is imported to find out.

    Raises:
        TypeError: neither a torch.nn.Module nor an mlx.nn.Module.
    """
    frameworks = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if "torch" in frameworks and hasattr(model, "named_parameters"):
        from notebook_cluster.training.torch_parameters import TorchParameters

        return TorchParameters(model)
    if "mlx" in frameworks and hasattr(model, "trainable_parameters"):
        from notebook_cluster.training.mlx_parameters import MlxParameters

        return MlxParameters(model)
    raise TypeError(f"model is a {type(model).__name__}: pass a torch.nn.Module or an mlx.nn.Module")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
