"""What tensors of a torch module are called: as in the model itself, whatever it is wrapped in.

A wrapper puts its own attribute into every name (``module.`` of DistributedDataParallel, ``_orig_mod.`` of
torch.compile). A node that wraps its model and one that does not agree, and so do checkpoints. Wrappers are known by
their type: a submodule of the user's that happens to be called ``module`` keeps its name.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
    ("peft.peft_model", "PeftModel", "base_model"),
    ("peft.tuners.tuners_utils", "BaseTuner", "model"),
)
"""(module, class, the attribute with what is wrapped). What is not imported has wrapped nothing."""
_COMPILED = "_orig_mod."


def plain_names(model: "torch.nn.Module", names: list[str]) -> dict[str, str]:
    """Each of ``names``, as ``named_parameters()`` and ``named_buffers()`` have them, without the wrappers in it; as it
    is where two would then be called alike."""
    kinds = tuple(kind for home, name, _ in _WRAPPERS if (kind := _class(home, name)) is not None)
    if not any(isinstance(module, kinds) for module in model.modules()):
        return {name: name for name in names}
    plain = {name: _plain(model, name) for name in names}
    counts: dict[str, int] = {}
    for short in plain.values():
        counts[short] = counts.get(short, 0) + 1
    return {name: short if counts[short] == 1 else name for name, short in plain.items()}


def former_name(name: str) -> str:
    """What ``name`` was called in checkpoints that were written when only ``_orig_mod.`` was left out, by its text.

    Tensors still lie in the vector in the order of these, so that those checkpoints have the hash in their manifest.
    """
    return name.replace(_COMPILED, "")


def check_whole(model: "torch.nn.Module") -> None:
    """Raises:
    ValueError: ``model`` has only a part of its parameters here; names the module.
    """
    kind = _class("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    for name, module in model.named_modules() if kind is not None else ():
        if isinstance(module, kind) and module.process_group.size() > 1 and not _is_unsharded(module):
            raise ValueError(
                f"{name or type(model).__name__} is sharded by FullyShardedDataParallel over "
                f"{module.process_group.size()} nodes: each has only a part of the parameters. Give the sync object a "
                "model that is whole on each node (ShardingStrategy.NO_SHARD, or without FSDP)"
            )


def is_distributed_tensor(tensor: Any) -> bool:
    """Whether it is a DTensor, of which this node has a part only."""
    kind = _class("torch.distributed.tensor", "DTensor") or _class("torch.distributed._tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def _is_unsharded(module: Any) -> bool:
    return getattr(module.sharding_strategy, "name", "") == "NO_SHARD"


def _plain(model: "torch.nn.Module", name: str) -> str:
    kept: list[str] = []
    module: Any = model
    for part in name.split("."):
        wrapped = _wrapped(module)
        # Some wrappers leave their own attribute out of the names that they give.
        while wrapped is not None and part != wrapped and not _has(module, part):
            module = getattr(module, wrapped)
            wrapped = _wrapped(module)
        if part != wrapped:
            kept.append(part)
        module = module._modules.get(part) if module is not None and part in module._modules else None
    return ".".join(kept)


def _has(module: Any, part: str) -> bool:
    return part in module._modules or part in module._parameters or part in module._buffers


def _wrapped(module: Any) -> str | None:
    """The attribute of what ``module`` wraps; None when it is no wrapper."""
    for home, name, attribute in _WRAPPERS:
        kind = _class(home, name)
        if kind is not None and isinstance(module, kind) and attribute in module._modules:
            return attribute
    return None


def _class(home: str, name: str) -> Any:
    return getattr(sys.modules.get(home), name, None)


def check_usable(name: str, tensor: "torch.Tensor") -> None:
    """Raises:
    ValueError: ``tensor`` cannot be averaged; says why.
    """
    from torch.nn.parameter import is_lazy

    if is_lazy(tensor):
        raise ValueError(
            f"parameter {name!r} has no shape yet: run one batch through the model before making the sync object"
        )
    if tensor.is_meta:
        raise ValueError(f"parameter {name!r} is on the meta device: give it values before making the sync object")
    if is_distributed_tensor(tensor):
        raise ValueError(
            f"parameter {name!r} is a DTensor, of which each node has only a part: give the sync object a model with "
            "ordinary tensors (without fully_shard or parallelize_module)"
        )
    if not tensor.is_floating_point():
        way_out = "; torch.view_as_real(values) is two real ones" if tensor.is_complex() else ""
        raise ValueError(
            f"parameter {name!r} is {tensor.dtype}: only real floating point parameters can be averaged{way_out}"
        )
