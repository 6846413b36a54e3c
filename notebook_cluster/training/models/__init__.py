"""A model of torch or MLX as one flat float32 vector and back, and what training needs of the framework's optimisers.

May import: ``rounds.numerics`` and ``codecs``. No framework is imported before a model of it is there. Called by:
everything above in ``training``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from notebook_cluster.training.models import mlx_optimizer, torch_optimizer
from notebook_cluster.training.models.lora import freeze_a_of_mlx, freeze_a_of_torch
from notebook_cluster.training.models.mlx_optimizer import is_mlx_optimizer
from notebook_cluster.training.models.parameters import WithGradients


def check_optimizer(optimizer: Any) -> Any:
    """``optimizer`` if its state can be saved.

    Raises:
        TypeError: neither a torch optimizer nor an mlx one.
    """
    of_torch = hasattr(optimizer, "state_dict") and hasattr(optimizer, "param_groups")
    if optimizer is not None and not of_torch and not is_mlx_optimizer(optimizer):
        name = type(optimizer).__name__
        one = ": one optimizer can have several groups of parameters" if isinstance(optimizer, list | tuple) else ""
        raise TypeError(f"optimizer={name}: pass a torch.optim optimizer, one of mlx.optimizers, or leave it out{one}")
    return optimizer


def check_trains(optimizers: Sequence[Any], model: Any) -> None:
    """Raises:
    ValueError: the torch ``optimizers`` step parameters, and none of those is the ``model``'s.
    """
    stepped = [id(one) for each in optimizers for group in getattr(each, "param_groups", []) for one in group["params"]]
    named = getattr(model, "named_parameters", None)  # that mlx has not
    if stepped and callable(named) and {id(one) for _, one in named()}.isdisjoint(stepped):
        raise ValueError(
            f"optimizer={type(optimizers[0]).__name__} steps no parameter of this {type(model).__name__}: it was made "
            "for another model, or for this one before it was made anew; make the optimizer from model.parameters() "
            "again, before the sync object"
        )


def shared_parameter(model: Any, other: Any) -> str:
    """A name in ``model`` of what it trains and ``other`` does too; empty: there is nothing."""
    theirs = set(map(id, _trained(other).values()))
    return next((name for name, one in _trained(model).items() if id(one) in theirs), "")


def _trained(model: Any) -> dict[str, Any]:
    """Empty for what is no model."""
    if callable(named := getattr(model, "named_parameters", None)):
        return {name: one for name, one in named() if one.requires_grad}
    if callable(tree := getattr(model, "trainable_parameters", None)):
        from mlx.utils import tree_flatten

        return dict(tree_flatten(tree()))
    return {}


_synced: "WeakSet[Any]" = WeakSet()
"""The torch models that sync objects were made for."""


def check_steps_only(optimizer: Any, model: Any) -> None:
    """Raises:
    ValueError: the torch ``optimizer`` steps trained parameters that the ``model`` has not: each node would step those
        with gradients of its own.
    """
    if text := _steps_more([optimizer], model, [model]):
        raise ValueError(f"{text}, or make an optimizer for each model")


def differing(optimizers: Sequence[Any], model: Any) -> str:
    """A line about the parameters that the torch ``optimizers`` step and no sync object averages, or empty."""
    text = _steps_more(optimizers, model, _synced)
    return f"{text}, or make a sync object with name= for each model" if text else ""


def _steps_more(optimizers: Sequence[Any], model: Any, models: Iterable[Any]) -> str:
    """What one of ``optimizers`` steps that none of the ``models`` has."""
    own = {id(one) for each in models if hasattr(each, "named_parameters") for _, one in each.named_parameters()}
    for optimizer in optimizers:
        groups = getattr(optimizer, "param_groups", [])
        stepped = [one for group in groups for one in group["params"] if one.requires_grad]
        others = [one for one in stepped if id(one) not in own]
        if 0 < len(others) < len(stepped):  # of none of the model's check_trains() tells
            many = f"{len(others)} of its parameters are" if len(others) > 1 else "one of its parameters is"
            shapes = ", ".join(str(tuple(one.shape)) for one in others[:3]) + (", ..." if len(others) > 3 else "")
            return (
                f"optimizer={type(optimizer).__name__}: {many} not in this {type(model).__name__} (shape {shapes}) and "
                "would differ between the nodes: put all that it steps into one model, as torch.nn.ModuleList([a, b]) "
                "or as an attribute"
            )
    return ""


def refuse_other_steps(optimizer: Any, refuses: Callable[[], bool]) -> None:
    """A step of ``optimizer`` that is not the one of all nodes raises from now on where ``refuses()``."""
    of = mlx_optimizer if is_mlx_optimizer(optimizer) else torch_optimizer
    of.refuse_other_steps(optimizer, refuses)


def parameters_of(model: Any, *, freeze_a: bool = False) -> WithGradients:
    """The adapter for ``model``'s framework; neither framework is imported to find out. ``freeze_a``: the first factor
    of every LoRA in it is frozen before.

    Raises:
        TypeError: neither a torch.nn.Module nor an mlx.nn.Module.
        ValueError: nothing is trainable, or cannot be trained; names it.
    """
    frameworks = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if "torch" in frameworks and hasattr(model, "named_parameters"):
        from notebook_cluster.training.models.torch_parameters import TorchParameters

        if freeze_a:
            freeze_a_of_torch(model)
        _synced.add(model)
        return TorchParameters(model)
    if "mlx" in frameworks and hasattr(model, "trainable_parameters"):
        from notebook_cluster.training.models.mlx_parameters import MlxParameters

        if freeze_a:
            freeze_a_of_mlx(model)
        return MlxParameters(model)
    way_out = "nc.all_reduce(x, 'mean') averages the arrays of any other model"
    if isinstance(model, list | tuple):
        way_out = "torch.nn.ModuleList(models) is one of several, or make a sync object with name= for each"
    elif isinstance(model, Mapping | Iterator):
        way_out = "the model itself, not what it holds"
    raise TypeError(f"model is a {type(model).__name__}: pass a torch.nn.Module or an mlx.nn.Module; {way_out}")
