"""What one node alone knows, as the bytes of a safetensors file: counters and its optimiser's state. No pickle.

Arrays of the optimiser's state become safetensors entries, bit for bit; everything around them (steps, learning rates,
groups) becomes JSON in the file's metadata, with the arrays' places marked. The state of a torch optimiser is its
``state_dict()``, that of an mlx one its ``state``.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from notebook_cluster.training.models import mlx_optimizer

PART_SECONDS = 2.0
"""How long the main thread may take for this node's own part. One in the middle of a long step does not come."""

_TENSOR, _DTYPE, _PAIRS, _TUPLE = "__tensor__", "dtype", "__pairs__", "__tuple__"


class OptimizerBytesError(ValueError):
    """The bytes or the optimiser do not fit; one line."""


class OtherFrameworkError(OptimizerBytesError):
    """The state is that of the same optimiser in another framework."""


def pack(counters: Mapping[str, float], optimizer: Any) -> bytes:
    """``counters`` and, if given, the optimiser's state as safetensors bytes.

    Raises:
        OptimizerBytesError: the state holds something that is neither array nor plain data, or an mlx state is not
            computed yet; names it.
    """
    metadata = {"counters": json.dumps(dict(counters))}
    if optimizer is None:
        from safetensors.numpy import save

        return bytes(save({}, metadata=metadata))
    kind, arrays = _kind_of(optimizer), dict[str, Any]()
    try:
        state = kind.state(optimizer)
    except ValueError as error:
        raise OptimizerBytesError(str(error)) from None
    skeleton = _skeleton(state, arrays, kind, type(optimizer).__name__)
    metadata |= {"optimizer": kind.title + type(optimizer).__name__, "skeleton": json.dumps(skeleton)}
    return bytes(kind.save(arrays, metadata))


def unpack(data: bytes, optimizer: Any) -> dict[str, float]:
    """Put the state in ``data`` into ``optimizer`` (if given) and return the counters.

    Raises:
        OptimizerBytesError: not such bytes, or another optimiser's state (OtherFrameworkError: that of its namesake in
            torch or mlx); ``optimizer`` is then unchanged.
    """
    metadata = _metadata(data)
    try:
        counters: dict[str, float] = json.loads(metadata["counters"])
        if optimizer is None or "skeleton" not in metadata:
            return counters
        kind, name = _kind_of(optimizer), type(optimizer).__name__
        saved, here = metadata["optimizer"], kind.title + name
        if saved != here:
            kind_of_error = OtherFrameworkError if saved.rpartition(" ")[2] == name else OptimizerBytesError
            raise kind_of_error(f"the checkpoint's optimizer is {saved}, this one {here}: it starts afresh")
        kind.put(optimizer, _filled(json.loads(metadata["skeleton"]), kind.load(data), kind))
    except OptimizerBytesError:
        raise
    except Exception as error:  # safetensors, json and the frameworks each raise their own
        raise OptimizerBytesError(
            f"the checkpoint's optimizer state does not fit ({error}): the optimizer starts afresh"
        ) from None
    return counters


def holds_state(data: bytes) -> bool:
    """An optimiser's state is in ``data``, which :func:`unpack` has taken."""
    return "skeleton" in _metadata(data)


def has_optimizer(data: bytes, round: int) -> bool:
    """An optimiser's state after ``round`` is in ``data``, which :func:`pack` made."""
    try:
        metadata = _metadata(data)
        return "skeleton" in metadata and json.loads(metadata["counters"])["round"] == round
    except (OptimizerBytesError, ValueError, KeyError, TypeError):
        return False


@dataclass(frozen=True)
class _Kind:
    """How the state of one kind of optimiser gets into a safetensors file and out of it."""

    state: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    array: type
    saved: Callable[[Any], tuple[Any, str]]
    """Array -> what ``save`` takes of it, and its dtype where that does not tell."""
    restored: Callable[[Any, str], Any]
    save: Callable[[dict[str, Any], dict[str, str]], bytes]
    load: Callable[[bytes], dict[str, Any]]
    title: str = ""
    """In front of the optimiser's name: two frameworks have an AdamW."""


def _kind_of(optimizer: Any) -> _Kind:
    if mlx_optimizer.is_mlx_optimizer(optimizer):
        return _mlx()
    return _numpy() if getattr(optimizer, "arrays", "torch") == "numpy" else _torch()


def _torch() -> _Kind:
    import torch
    from safetensors.torch import load, save

    return _Kind(
        state=lambda optimizer: optimizer.state_dict(),
        put=lambda optimizer, state: optimizer.load_state_dict(state),
        array=torch.Tensor,
        saved=lambda tensor: (tensor.detach().cpu().clone().contiguous(), ""),
        restored=lambda tensor, dtype: tensor,
        save=save,
        load=load,
    )


def _numpy() -> _Kind:
    import numpy
    from safetensors.numpy import load, save

    return _Kind(
        state=lambda optimizer: optimizer.state_dict(),
        put=lambda optimizer, state: optimizer.load_state_dict(state),
        array=numpy.ndarray,
        saved=lambda array: (numpy.array(array, order="C"), ""),
        restored=lambda array, dtype: array,
        save=save,
        load=load,
    )


def _mlx() -> _Kind:
    import mlx.core
    from safetensors.numpy import load, save

    return _Kind(
        state=mlx_optimizer.state_tree,
        put=mlx_optimizer.load_state,
        array=mlx.core.array,
        saved=mlx_optimizer.to_numpy,
        restored=mlx_optimizer.from_numpy,
        save=save,
        load=load,
        title="mlx ",
    )


def _metadata(data: bytes) -> dict[str, str]:
    """The ``__metadata__`` of safetensors bytes: an 8-byte length, then JSON."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise OptimizerBytesError(f"{len(data)} bytes that are no safetensors file: the optimizer starts afresh")
    try:
        return dict(json.loads(data[8 : 8 + length])["__metadata__"])
    except (ValueError, KeyError, TypeError):
        raise OptimizerBytesError(
            "a safetensors file without notebook-cluster's metadata: the optimizer starts afresh"
        ) from None


def _skeleton(value: Any, arrays: dict[str, Any], kind: _Kind, where: str) -> Any:
    """``value`` as JSON data; arrays go into ``arrays`` and leave their key behind."""
    if isinstance(value, kind.array):
        key = str(len(arrays))
        arrays[key], dtype = kind.saved(value)
        return {_TENSOR: key, _DTYPE: dtype} if dtype else {_TENSOR: key}
    if isinstance(value, dict):
        return {_PAIRS: [[key, _skeleton(item, arrays, kind, f"{where}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_skeleton(item, arrays, kind, where) for item in value]}
    if isinstance(value, list):
        return [_skeleton(item, arrays, kind, where) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise OptimizerBytesError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: leave optimizer= out"
    )


def _filled(skeleton: Any, arrays: dict[str, Any], kind: _Kind) -> Any:
    """The inverse of :func:`_skeleton`."""
    if isinstance(skeleton, list):
        return [_filled(item, arrays, kind) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if _TENSOR in skeleton:
        return kind.restored(arrays[skeleton[_TENSOR]], skeleton.get(_DTYPE, ""))
    if _TUPLE in skeleton:
        return tuple(_filled(item, arrays, kind) for item in skeleton[_TUPLE])
    return {key: _filled(item, arrays, kind) for key, item in skeleton[_PAIRS]}


class StateRequest:
    """Asks the main thread for this node's own part at its next sync call; ``then`` gets it there as well."""

    def __init__(self, then: Callable[[bytes], None] = lambda part: None) -> None:
        self._given: SimpleQueue[bytes] = SimpleQueue()
        self._then = then

    def give(self, part: bytes) -> None:
        self._given.put(part)
        self._then(part)

    def wait(self) -> bytes | None:
        """The part, or None when the main thread did not come by in time."""
        try:
            return self._given.get(timeout=PART_SECONDS)
        except Empty:
            return None
