"""What may travel between nodes, how it becomes a flat buffer of bytes and back, and where a result goes (``out=``).

Nothing is ever unpickled. A value is one of: an array (numpy, torch, mlx; numbers of any size, bool, complex,
bfloat16), a number, or plain data (None, str, lists and dicts of these with string keys). An array travels as its bytes
in C order, little endian.
"""

import json
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Array = NDArray[Any]
    from numpy.typing import NDArray

_ITEM_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Canonical dtype -> bytes of one element. Anything else from the network is refused before it reaches a library."""

_CARRIERS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""dtypes that numpy lacks -> the numpy dtype that holds their bits."""

ARRAY_KINDS = ("numpy", "scalar", "torch", "mlx")
_MAX_DIMENSIONS = 64
_MAX_SIZE = 1 << 48
"""The largest dimension: libraries fail in ways of their own where products leave 64 bits."""


@dataclass(frozen=True)
class WireValue:
    """A value ready to travel.

    Attributes:
        kind: ``numpy``, ``scalar`` (a numpy scalar), ``torch``, ``mlx`` or ``json``.
        dtype: canonical name (``bfloat16``), empty for json.
        shape: of the array.
        data: flat array of the elements (their bits, see ``carrier``); bytes for json.
        like: the local value, for the device and type of a result.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    data: Any
    like: Any = None

    @property
    def is_array(self) -> bool:
        return self.kind in ARRAY_KINDS

    def describe(self) -> str:
        """``float32 3x4``, for errors."""
        return describe(self.kind, self.dtype, self.shape)


def describe(kind: str, dtype: str, shape: "tuple[int, ...] | list[int]") -> str:
    """``float32 3x4``; ``plain data`` for what is no array."""
    if kind not in ARRAY_KINDS:
        return "a number" if kind == "json" and dtype == "number" else "plain data"
    return f"{dtype} {'x'.join(str(size) for size in shape) or 'scalar'}"


def carrier(dtype: str) -> str:
    """The numpy dtype that holds the bits of canonical ``dtype``."""
    return _CARRIERS.get(dtype, dtype)


def expected_bytes(kind: str, dtype: str, shape: "tuple[int, ...] | list[int]") -> int:
    """Bytes of an array as a header announces it.

    Raises:
        ValueError: the header names no array that may travel.
    """
    if kind not in ARRAY_KINDS or dtype not in _ITEM_BYTES:
        raise ValueError(f"an array of kind {kind[:20]!r}, dtype {dtype[:20]!r} cannot travel between nodes")
    if len(shape) > _MAX_DIMENSIONS or any(not 0 <= size <= _MAX_SIZE for size in shape):
        raise ValueError("a shape from another node is not usable")
    return _ITEM_BYTES[dtype] * math.prod(shape)


def to_wire(value: Any, operation: str, *, copy: bool = True) -> WireValue:
    """A private copy of ``value`` as it travels; without ``copy`` it may share memory with ``value``.

    Raises:
        TypeError: a value of this type cannot travel; the message names ``operation`` and the way out.
    """
    if (module := library_of(value)) == "torch":
        return _torch_to_wire(value, operation, copy)
    if module == "mlx":
        return _mlx_to_wire(value, operation, copy)
    if module == "numpy":
        return _numpy_to_wire(value, operation, copy)
    _check_plain(value, operation, 0)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return WireValue("json", "number" if is_number else "", (), json.dumps(value).encode(), value)


def from_wire(kind: str, dtype: str, shape: "tuple[int, ...] | list[int]", data: Any, like: Any = None) -> Any:
    """The value of a received buffer: an array of ``kind`` on the device of ``like`` (a torch tensor), else on the CPU.

    Args:
        data: a flat numpy array of the carrier dtype, or any buffer; the result may share its memory.

    Raises:
        ValueError: header and bytes do not make a value.
    """
    if kind == "json":
        return json.loads(bytes(data))
    import numpy

    expected = expected_bytes(kind, dtype, shape)
    flat = data if isinstance(data, numpy.ndarray) else numpy.frombuffer(data, dtype=carrier(dtype))
    if flat.nbytes != expected:
        raise ValueError(f"{flat.nbytes} bytes are not {describe(kind, dtype, shape)}")
    if kind == "torch":
        return _torch_from_flat(flat, dtype, shape, like)
    if kind == "mlx":
        return _mlx_from_flat(flat, dtype, shape)
    array = flat.reshape(tuple(shape))
    if dtype in _CARRIERS:
        array = array.view(_extension_dtype(dtype))
    return array[()] if kind == "scalar" else array


def library_of(value: Any) -> str:
    """``numpy``, ``torch``, ``mlx`` or empty, without importing any of them."""
    for kind in type(value).__mro__:
        name = kind.__module__.partition(".")[0]
        if name == "torch" and (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
            return "torch"
        if name == "mlx" and kind.__name__ == "array":
            return "mlx"
        if name == "numpy" and kind.__name__ in ("ndarray", "generic"):
            return "numpy"
    return ""


def _numpy_to_wire(value: Any, operation: str, copy: bool) -> WireValue:
    import numpy

    array = numpy.asarray(value)
    dtype = array.dtype.name
    if dtype not in _ITEM_BYTES:
        raise TypeError(f"{operation}: a numpy array of {array.dtype} cannot travel between nodes: use .tolist()")
    if dtype in _CARRIERS:
        array = array.view(_CARRIERS[dtype])
    little = numpy.dtype(carrier(dtype)).newbyteorder("<")
    flat = numpy.array(array, dtype=little, order="C", copy=copy or None).reshape(-1)
    kind = "scalar" if isinstance(value, numpy.generic) else "numpy"
    return WireValue(kind, dtype, tuple(array.shape), flat, value)


def _torch_to_wire(value: Any, operation: str, copy: bool) -> WireValue:
    import torch

    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in _ITEM_BYTES:
        raise TypeError(f"{operation}: a tensor of {value.dtype} cannot travel between nodes: convert it first")
    if value.layout is not torch.strided:
        raise TypeError(f"{operation}: a {value.layout} tensor cannot travel between nodes: use .to_dense()")
    tensor = value.detach().resolve_conj().resolve_neg()
    flat = tensor.to("cpu", copy=copy, memory_format=torch.contiguous_format).reshape(-1)
    bits = flat.view(getattr(torch, _CARRIERS[dtype])) if dtype in _CARRIERS else flat
    return WireValue("torch", dtype, tuple(value.shape), bits.numpy(), value)


def _torch_from_flat(flat: "Array", dtype: str, shape: "tuple[int, ...] | list[int]", like: Any) -> Any:
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"a torch tensor has come, and this node has no torch ({error}): install it there") from None

    wanted = getattr(torch, dtype, None)
    if wanted is None:
        raise ValueError(f"torch {torch.__version__} on this node has no {dtype}: upgrade torch")
    tensor = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
    if dtype in _CARRIERS:
        tensor = tensor.view(wanted)
    tensor = tensor.reshape(tuple(shape))
    return tensor.to(like.device) if isinstance(like, torch.Tensor) else tensor


def _mlx_to_wire(value: Any, operation: str, copy: bool) -> WireValue:
    import mlx.core as mx
    import numpy

    dtype = str(value.dtype).removeprefix("mlx.core.")
    dtype = {"bool_": "bool"}.get(dtype, dtype)
    if dtype not in _ITEM_BYTES:
        raise TypeError(f"{operation}: an mlx array of {value.dtype} cannot travel between nodes: convert it first")
    flat = value.reshape(-1)
    bits = flat.view(getattr(mx, _CARRIERS[dtype])) if dtype in _CARRIERS else flat
    return WireValue("mlx", dtype, tuple(value.shape), numpy.array(bits), value)


def _mlx_from_flat(flat: "Array", dtype: str, shape: "tuple[int, ...] | list[int]") -> Any:
    import mlx.core as mx

    array = mx.array(flat)
    if dtype in _CARRIERS:
        array = array.view(getattr(mx, dtype))
    return array.reshape(tuple(shape))


def _extension_dtype(dtype: str) -> "numpy.dtype[Any]":
    """numpy's view of a dtype that only ml_dtypes defines."""
    import numpy

    try:
        import ml_dtypes  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise ValueError(f"numpy on this node has no {dtype}: install ml_dtypes, or send a torch tensor") from None
    extension: numpy.dtype[Any] = numpy.dtype(getattr(ml_dtypes, dtype))
    return extension


def _check_plain(value: Any, operation: str, depth: int) -> None:
    """Raise TypeError unless ``value`` comes back from JSON as it went (tuples come back as lists)."""
    if depth > 50:
        raise TypeError(f"{operation}: data nested deeper than 50 levels cannot travel between nodes")
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(item, operation, depth + 1)
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{operation}: the dict key {key!r} is no string: use str keys between nodes")
            _check_plain(item, operation, depth + 1)
        return
    inside = " inside a list or dict" if depth else ""
    raise TypeError(
        f"{operation}: a {type(value).__name__}{inside} cannot travel between nodes: use an array or tensor by itself, "
        "a number, or lists, dicts and strings of these"
    )


class ResultBuffer:
    """``out`` of one operation whose result is like its array ``wire``.

    Attributes:
        memory: of ``out``, flat, in the carrier dtype, where a result can be written straight into it: it may be the
            memory of ``wire``, but does not overlap with it in part. None: the result is copied there.

    Raises:
        TypeError: ``out`` is nothing that a result can be written to.
        ValueError: it has another library, dtype or shape than the array, or is read-only.
    """

    def __init__(self, out: Any, wire: WireValue, operation: str) -> None:
        import numpy

        if not wire.is_array:
            raise TypeError(f"{operation}: out= takes the result of an array: leave it out for {wire.describe()}")
        kind = library_of(out)
        if kind not in ("numpy", "torch") or isinstance(out, numpy.generic):
            raise TypeError(
                f"{operation}: out cannot be a {type(out).__name__}, which is not written to: pass a numpy array or a "
                "torch tensor, or take what is returned"
            )
        dtype = str(out.dtype).removeprefix("torch.") if kind == "torch" else out.dtype.name
        if (kind, dtype, tuple(out.shape)) != (wire.kind, wire.dtype, wire.shape):
            raise ValueError(
                f"{operation}: out is {kind} {describe(kind, dtype, tuple(out.shape))}, the array {wire.kind} "
                f"{wire.describe()}: they must be alike"
            )
        if kind == "numpy" and not out.flags.writeable:
            raise ValueError(f"{operation}: out is a read-only array: pass a copy of it")
        self._out = out
        self._wire = wire
        self.memory: NDArray[Any] | None = None
        flat = _memory(out, dtype, kind)
        if flat is not None and (_begin(flat) == _begin(wire.data) or not numpy.may_share_memory(flat, wire.data)):
            self.memory = flat

    def take(self, flat: "NDArray[Any]") -> Any:
        """``out``, with the result ``flat``, in the carrier dtype."""
        wire = self._wire
        if wire.kind == "numpy":
            if flat is not self.memory:
                self._out[...] = from_wire(wire.kind, wire.dtype, wire.shape, flat)
            return self._out
        import torch

        with torch.no_grad():
            if flat is not self.memory:
                self._out.copy_(from_wire(wire.kind, wire.dtype, wire.shape, flat, self._out))
            elif not self._out.is_inference():
                torch.autograd.graph.increment_version(self._out)  # autograd did not see that it was written to
        return self._out


def _memory(out: Any, dtype: str, kind: str) -> "NDArray[Any] | None":
    """The memory of ``out`` itself, if its elements lie there one after the other as they travel."""
    flat: NDArray[Any] | None = None
    if kind == "torch":
        if out.device.type == "cpu" and out.is_contiguous() and not out.is_conj() and not out.is_neg():
            import torch

            flat = out.detach().reshape(-1).view(getattr(torch, carrier(dtype))).numpy()
    elif out.flags.c_contiguous and out.dtype.isnative:
        import numpy

        flat = numpy.asarray(out).reshape(-1).view(carrier(dtype))
    return flat


def _begin(flat: "NDArray[Any]") -> int:
    return int(flat.ctypes.data)
