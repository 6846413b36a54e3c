"""LoRA of which only the second factor is trained (FFA-LoRA, arXiv 2403.12313).

An adapter adds ``B A`` to a weight. The mean of the nodes' ``B`` times the mean of their ``A`` is not the mean of their
products; with one ``A`` on all nodes it is.
"""

from typing import Any

_NAMES = frozenset({"lora_A", "lora_embedding_A", "lora_a"})
"""Modules and parameters with an ``A``: of PEFT; of mlx-lm and torchtune."""


def freeze_a_of_torch(model: Any) -> None:
    """Freeze every ``A`` of a torch module, and forget its gradient.

    Raises:
        ValueError: there is none.
    """
    found = [tensor for name, tensor in model.named_parameters() if _is_a(name)]
    _check(model, found)
    for tensor in found:
        tensor.requires_grad_(False)
        tensor.grad = None  # else an optimiser would go on with it


def freeze_a_of_mlx(model: Any) -> None:
    """As :func:`freeze_a_of_torch`, of an mlx module.

    Raises:
        ValueError: there is none.
    """
    from mlx.utils import tree_flatten

    _check(model, [name for name, _ in tree_flatten(model.parameters()) if _is_a(name)])
    model.freeze(keys=sorted(_NAMES), strict=False)


def _is_a(name: str) -> bool:
    return not _NAMES.isdisjoint(name.split("."))


def _check(model: Any, found: list[Any]) -> None:
    if not found:
        raise ValueError(
            f"freeze_a=True: {type(model).__name__} has no lora_A (PEFT) and no lora_a (mlx): give it its adapter "
            "before the sync object is made"
        )
