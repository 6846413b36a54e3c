"""Arrays as bytes and back: numpy (numbers, text, dates), torch, MLX. The result never shares memory with the value."""

import re
from typing import Any

from notebook_cluster.collectives.values import carrier, expected_bytes, from_wire, to_wire

Buffer = bytes | bytearray | memoryview
_DTYPE = re.compile(r"[<>|=]([biufcSUMm])(\d{1,10})(\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
"""Of numpy, as ``dtype.str`` writes it: no objects, no records, nothing that numpy would have to evaluate."""
_MOST_DIMENSIONS = 64


def pack_array(value: Any, library: str) -> tuple[dict[str, Any], Buffer]:
    """What kind of array ``value`` of ``library`` (numpy, torch, mlx) is, and its bytes in C order.

    Raises:
        TypeError: its elements are not numbers, text or dates, or it is sparse.
    """
    if library == "numpy":
        packed = _pack_numpy(value)
        if packed is not None:
            return packed
    elif library == "torch" and value.is_quantized:
        raise TypeError("a quantized tensor does not travel: send its .dequantize()")
    try:
        wire = to_wire(value, "")
    except TypeError as error:
        text = str(error).removeprefix(": ").replace("cannot travel between nodes", "does not travel")
        raise TypeError(text) from None
    data: Buffer = memoryview(wire.data).cast("B") if wire.data.size else b""
    return {"kind": wire.kind, "dtype": wire.dtype, "shape": list(wire.shape)}, data


def unpack_array(meta: dict[str, Any], data: Buffer) -> Any:
    """The array; it can be changed. An MLX array comes as numpy where MLX is not installed (bfloat16 as float32).

    Raises:
        ValueError: header and bytes do not make an array.
    """
    kind, dtype, shape = meta["kind"], meta["dtype"], meta["shape"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise ValueError("the header of an array is not readable")
    import numpy

    if kind in ("numpy", "scalar") and _DTYPE.fullmatch(dtype):
        return _unpack_numpy(kind, dtype, shape, data)
    if len(data) != expected_bytes(kind, dtype, shape):
        raise ValueError(f"{len(data)} bytes are not an array of {dtype}, shape {shape}")
    flat = numpy.frombuffer(data, carrier(dtype))
    if not flat.flags.writeable:
        flat = flat.copy()
    if kind == "mlx":
        try:
            import mlx.core  # noqa: F401
        except ImportError:
            return _without_mlx(flat, dtype, shape)
    return from_wire(kind, dtype, shape, flat)


def _pack_numpy(value: Any) -> tuple[dict[str, Any], Buffer] | None:
    """None for elements that numpy knows from an extension (bfloat16)."""
    import numpy

    scalar = isinstance(value, numpy.generic)
    array = numpy.asarray(value)
    if isinstance(value, numpy.ma.MaskedArray):
        raise TypeError("a masked array does not travel: send its .data and .mask, or .filled(...)")
    if array.dtype.hasobject or array.dtype.names is not None or array.dtype.char == "T":
        raise TypeError(f"an array of {array.dtype} does not travel, only numbers, text and dates do: send .tolist()")
    if array.dtype.kind in "fc" and array.dtype.char in "gG":
        raise TypeError("a long double differs from machine to machine: send it as float64")
    if array.dtype.kind == "V":
        return None
    meta = {"kind": "scalar" if scalar else "numpy", "dtype": array.dtype.str, "shape": list(array.shape)}
    return meta, array.tobytes()


def _unpack_numpy(kind: str, dtype: str, shape: list[int], data: Buffer) -> Any:
    import numpy

    element = numpy.dtype(dtype)
    sizes_fit = len(shape) <= _MOST_DIMENSIONS and all(0 <= size < 1 << 48 for size in shape)
    if not sizes_fit or not element.itemsize:
        raise ValueError("the shape of an array is not usable")
    expected = element.itemsize
    for size in shape:
        expected *= size
    if len(data) != expected:
        raise ValueError(f"{len(data)} bytes are not an array of {dtype}, shape {shape}")
    array = numpy.frombuffer(data, element).reshape(shape) if data else numpy.empty(shape, element)
    if kind == "scalar":
        return array[()]
    return array if array.flags.writeable else array.copy()


def _without_mlx(flat: Any, dtype: str, shape: list[int]) -> Any:
    import numpy

    if dtype == "bfloat16":
        # A bfloat16 is the upper half of a float32.
        flat = (flat.astype("<u4") << 16).view(numpy.float32)
    return flat.reshape(shape)
