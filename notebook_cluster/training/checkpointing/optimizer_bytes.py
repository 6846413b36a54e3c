"""What one node alone knows, as the bytes of a safetensors file: counters, its optimiser's state, what it registered
beside that. No pickle.

Arrays become safetensors entries, bit for bit; everything around them (steps, learning rates, groups) becomes JSON in
the file's metadata, with the arrays' places marked. The state of a torch optimiser is its ``state_dict()``, that of an
mlx one its ``state``; of the rest see :mod:`.registered`.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from notebook_cluster.training.checkpointing.registered import state_access
from notebook_cluster.training.models import mlx_optimizer

PART_SECONDS = 2.0
"""How long the main thread may take for this node's own part. One in the middle of a long step does not come."""

_TENSOR, _DTYPE, _OF = "__tensor__", "dtype", "of"
_PAIRS, _TUPLE, _COUNTER = "__pairs__", "__tuple__", "__counter__"


class OptimizerBytesError(ValueError):
    """The bytes or the optimiser do not fit; one line."""


class OtherFrameworkError(OptimizerBytesError):
    """The state is that of the same optimiser in another framework."""


def pack(
    counters: Mapping[str, float],
    optimizer: Any,
    extra: Mapping[str, Any] | None = None,
    positions: Any = None,
) -> bytes:
    """``counters`` and, if given, the optimiser's state, that of what was registered as ``extra``, and where the loops
    over data are, as safetensors bytes.

    Raises:
        OptimizerBytesError: a state holds something that is neither array nor plain data, or an mlx state is not
            computed yet; names it.
    """
    metadata, arrays = {"counters": json.dumps(dict(counters))}, dict[str, Any]()
    if optimizer is not None:
        kind = _kind_of(optimizer)
        skeleton = _skeleton(_read(lambda: kind.state(optimizer)), arrays, type(optimizer).__name__)
        metadata |= {"optimizer": kind.title + type(optimizer).__name__, "skeleton": json.dumps(skeleton)}
    if extra:
        rows = {}
        for name, thing in extra.items():
            state = _read(state_access(name, thing).read)
            rows[name] = {"of": type(thing).__name__, "skeleton": _skeleton(state, arrays, f"extra[{name!r}]")}
        metadata["extra"] = json.dumps(rows)
    if positions is not None:
        metadata["positions"] = json.dumps(positions)
    return _saved(arrays, metadata)


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ValueError as error:
        raise OptimizerBytesError(str(error)) from None


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
        arrays = _Arrays(data, kind.title.strip() or ("numpy" if kind.numpy else "torch"))
        kind.put(optimizer, _filled(json.loads(metadata["skeleton"]), arrays))
    except OptimizerBytesError:
        raise
    except Exception as error:  # safetensors, json and the frameworks each raise their own
        raise OptimizerBytesError(
            f"the checkpoint's optimizer state does not fit ({error}): the optimizer starts afresh"
        ) from None
    return counters


def unpack_extra(data: bytes, extra: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Put what ``data`` has of it into the things of ``extra``.

    Returns:
        The names that have their state back, and a line for each that has not.
    """
    rows = json.loads(_metadata(data).get("extra", "{}"))
    restored, warnings = list[str](), list[str]()
    for name, thing in extra.items():
        if name not in rows:
            warnings.append(f"the checkpoint has no state of extra[{name!r}]: it begins anew")
            continue
        try:
            state_access(name, thing).put(_filled(rows[name]["skeleton"], _Arrays(data, "numpy")))
            restored.append(name)
        except Exception as error:  # each library raises its own
            warnings.append(
                f"the checkpoint's state of extra[{name!r}], a {rows[name].get('of')}, does not fit this "
                f"{type(thing).__name__} ({error}): it begins anew"
            )
    return restored, warnings


def extra_in(data: bytes, name: str) -> Any:
    """The state that ``data`` has of ``extra[name]``; None: it has none."""
    rows = json.loads(_metadata(data).get("extra", "{}"))
    return _filled(rows[name]["skeleton"], _Arrays(data, "numpy")) if name in rows else None


def positions_in(data: bytes) -> Any:
    """Where the loops over data were, as :func:`pack` took it; None: it is not said."""
    text = _metadata(data).get("positions")
    return None if text is None else json.loads(text)


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
    """How the state of one kind of optimiser is read and put back."""

    state: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    title: str = ""
    """In front of the optimiser's name: two frameworks have an AdamW."""
    numpy: bool = False
    """Its arrays are numpy's, not torch's."""


def _kind_of(optimizer: Any) -> _Kind:
    if mlx_optimizer.is_mlx_optimizer(optimizer):
        return _Kind(mlx_optimizer.state_tree, mlx_optimizer.load_state, "mlx ")
    of_numpy = getattr(optimizer, "arrays", "torch") == "numpy"
    return _Kind(lambda one: one.state_dict(), lambda one, state: one.load_state_dict(state), numpy=of_numpy)


# ---- arrays of several libraries in one file -----------------------------------------------------------------


def _library(value: Any) -> str:
    """torch, numpy or mlx, where ``value`` is an array of it; else empty."""
    root = type(value).__module__.partition(".")[0]
    if hasattr(value, "detach") and hasattr(value, "numel"):
        return "torch"
    if root == "numpy" and hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return "numpy"
    return "mlx" if root == "mlx" and hasattr(value, "dtype") and hasattr(value, "shape") else ""


def _saved(arrays: dict[str, Any], metadata: dict[str, str]) -> bytes:
    """One file; where a tensor of torch is among them it is torch that writes, for it has dtypes that numpy lacks."""
    if any(_library(array) == "torch" for array in arrays.values()):
        import torch
        from safetensors.torch import save as save_torch

        # numpy has two names for the same integers, and torch knows one of them
        tensors = {
            key: array if _library(array) == "torch" else torch.from_numpy(array.astype(array.dtype.str))
            for key, array in arrays.items()
        }
        return bytes(save_torch(tensors, metadata))
    from safetensors.numpy import save as save_numpy

    return bytes(save_numpy(arrays, metadata))


class _Arrays:
    """The arrays of a file, each as its library's. ``library``: of those that do not say."""

    def __init__(self, data: bytes, library: str) -> None:
        self._data, self._library = data, library
        self._read: dict[str, dict[str, Any]] = {}

    def array(self, key: str, library: str, dtype: str) -> Any:
        library = library or self._library
        if library == "torch":
            return self._with("torch")[key]
        try:
            value = self._with("numpy")[key]
        except Exception:  # beside tensors of dtypes that numpy lacks
            value = self._with("torch")[key].numpy()
        return mlx_optimizer.from_numpy(value, dtype) if library == "mlx" else value

    def _with(self, library: str) -> dict[str, Any]:
        if library not in self._read:
            if library == "torch":
                from safetensors.torch import load as load_with
            else:
                from safetensors.numpy import load as load_with
            self._read[library] = load_with(self._data)
        return self._read[library]


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


def _skeleton(value: Any, arrays: dict[str, Any], where: str) -> Any:
    """``value`` as JSON data; arrays go into ``arrays`` and leave their key behind."""
    library = _library(value)
    if library:
        return _placed(value, library, arrays)
    if isinstance(value, Counter):
        return {_COUNTER: [[key, count] for key, count in value.items()]}
    if isinstance(value, dict):
        return {_PAIRS: [[key, _skeleton(item, arrays, f"{where}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_skeleton(item, arrays, where) for item in value]}
    if isinstance(value, list):
        return [_skeleton(item, arrays, where) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise OptimizerBytesError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: {_LEAVE_OUT}")


_LEAVE_OUT = "leave it out of optimizer= or extra="


def _placed(value: Any, library: str, arrays: dict[str, Any]) -> dict[str, str]:
    key, dtype = str(len(arrays)), ""
    if library == "torch":
        arrays[key] = value.detach().cpu().clone().contiguous()
    elif library == "mlx":
        arrays[key], dtype = mlx_optimizer.to_numpy(value)
    else:
        import numpy

        arrays[key] = numpy.array(value, order="C")
    place = {_TENSOR: key, _OF: library}
    return place | {_DTYPE: dtype} if dtype else place


def _filled(skeleton: Any, arrays: _Arrays) -> Any:
    """The inverse of :func:`_skeleton`."""
    if isinstance(skeleton, list):
        return [_filled(item, arrays) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if _TENSOR in skeleton:
        return arrays.array(skeleton[_TENSOR], skeleton.get(_OF, ""), skeleton.get(_DTYPE, ""))
    if _TUPLE in skeleton:
        return tuple(_filled(item, arrays) for item in skeleton[_TUPLE])
    if _COUNTER in skeleton:
        return Counter(dict(skeleton[_COUNTER]))
    return {key: _filled(item, arrays) for key, item in skeleton[_PAIRS]}


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
