"""What one node alone knows, as the bytes of a safetensors file: counters and its optimiser's state. No pickle.

Tensors of the optimiser's ``state_dict`` become safetensors entries; everything around them (steps, learning rates,
groups) becomes JSON in the file's metadata, with the tensors' places marked.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAX_PART_BYTES = 64 * 1024**3

_TENSOR, _PAIRS, _TUPLE = "__tensor__", "__pairs__", "__tuple__"


class PartError(ValueError):
    """The bytes or the optimiser do not fit; one line."""


def pack(counters: Mapping[str, float], optimizer: "torch.optim.Optimizer | None") -> bytes:
    """``counters`` and, if given, the optimiser's state as safetensors bytes.

    Raises:
        PartError: the state holds something that is neither tensor nor plain data; names it.
    """
    metadata = {"counters": json.dumps(dict(counters))}
    if optimizer is None:
        from safetensors.numpy import save as save_empty

        return bytes(save_empty({}, metadata=metadata))
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    skeleton = _skeleton(optimizer.state_dict(), tensors, type(optimizer).__name__)
    metadata |= {"optimizer": type(optimizer).__name__, "skeleton": json.dumps(skeleton)}
    return bytes(save(tensors, metadata=metadata))


def unpack(data: bytes, optimizer: "torch.optim.Optimizer | None") -> dict[str, float]:
    """Put the state in ``data`` into ``optimizer`` (if given) and return the counters.

    Raises:
        PartError: not such bytes, or another optimiser's state; ``optimizer`` is then unchanged.
    """
    metadata = _metadata(data)
    try:
        counters: dict[str, float] = json.loads(metadata["counters"])
        if optimizer is None or "skeleton" not in metadata:
            return counters
        if metadata["optimizer"] != type(optimizer).__name__:
            saved, here = metadata["optimizer"], type(optimizer).__name__
            raise PartError(f"the checkpoint's optimizer is {saved}, this one {here}: it starts afresh")
        from safetensors.torch import load

        optimizer.load_state_dict(_filled(json.loads(metadata["skeleton"]), load(data)))
    except PartError:
        raise
    except Exception as error:  # safetensors, json and torch each raise their own
        raise PartError(
            f"the checkpoint's optimizer state does not fit ({error}): the optimizer starts afresh"
        ) from None
    return counters


def _metadata(data: bytes) -> dict[str, str]:
    """The ``__metadata__`` of safetensors bytes: an 8-byte length, then JSON."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise PartError(f"{len(data)} bytes that are no safetensors file: the optimizer starts afresh")
    try:
        return dict(json.loads(data[8 : 8 + length])["__metadata__"])
    except (ValueError, KeyError, TypeError):
        raise PartError("a safetensors file without notebook-cluster's metadata: the optimizer starts afresh") from None


def _skeleton(value: Any, tensors: dict[str, "torch.Tensor"], where: str) -> Any:
    """``value`` as JSON data; tensors go into ``tensors`` and leave their key behind."""
    import torch

    if isinstance(value, torch.Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach().cpu().clone().contiguous()
        return {_TENSOR: key}
    if isinstance(value, dict):
        return {_PAIRS: [[key, _skeleton(item, tensors, f"{where}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_skeleton(item, tensors, where) for item in value]}
    if isinstance(value, list):
        return [_skeleton(item, tensors, where) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise PartError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: leave optimizer= out")


def _filled(skeleton: Any, tensors: dict[str, "torch.Tensor"]) -> Any:
    """The inverse of :func:`_skeleton`."""
    if isinstance(skeleton, list):
        return [_filled(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if _TENSOR in skeleton:
        return tensors[skeleton[_TENSOR]]
    if _TUPLE in skeleton:
        return tuple(_filled(item, tensors) for item in skeleton[_TUPLE])
    return {key: _filled(item, tensors) for key, item in skeleton[_PAIRS]}
