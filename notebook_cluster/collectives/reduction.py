"""Reduce arrays of several ranks in their order: pure functions, the same bits on every machine.

Addition of two IEEE numbers is exact to the last bit everywhere, so a sum is the same on every node when its order is:
rank 0 + rank 1 + rank 2 and so on, never ``np.sum``. Half precision is summed in float32 and rounded once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from notebook_cluster.collectives.values import carrier

if TYPE_CHECKING:
    from numpy.typing import NDArray

Reduction = Literal["sum", "mean", "max", "min"]
REDUCTIONS: tuple[Reduction, ...] = ("sum", "mean", "max", "min")

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_COMPLEX = ("complex64", "complex128")
_HALVES = ("float16", "bfloat16")
_CHUNK = 48 * 1024
"""Elements reduced at a time, so that what is summed stays in the processor's cache."""


def check_reduction(op: str, dtype: str, operation: str) -> None:
    """Raise ValueError when ``op`` is unknown or not defined for arrays of canonical ``dtype``."""
    if op not in REDUCTIONS:
        raise ValueError(f"{operation}: op={op!r} is unknown: use one of {', '.join(REDUCTIONS)}")
    if dtype.startswith("float8"):
        raise ValueError(f"{operation}: {dtype} cannot be reduced: convert it to bfloat16 or float32 first")
    if dtype in _COMPLEX and op in ("max", "min"):
        raise ValueError(f"{operation}: complex numbers have no {op}: use 'sum' or 'mean'")
    if dtype == "bool" and op in ("sum", "mean"):
        raise ValueError(f"{operation}: the {op} of bool is not a bool: convert to an integer, or use 'max' or 'min'")
    if op == "mean" and dtype not in _FLOATS + _COMPLEX:
        raise ValueError(f"{operation}: the mean of {dtype} is not exact: use op='sum', or convert to float")


def wide(dtype: str) -> str:
    """The dtype in which canonical ``dtype`` is summed: float32 for half precision, else itself."""
    return "float32" if dtype in _HALVES else dtype


def reduce_arrays(parts: "Sequence[NDArray[Any]]", dtype: str, op: str) -> "NDArray[Any]":
    """The element-wise ``op`` of ``parts`` (in rank order) as a new flat array.

    Args:
        parts: flat arrays of equal size in the carrier of ``dtype`` (uint16 bits for bfloat16).
        dtype: canonical name.
        op: checked by :func:`check_reduction`.
    """
    import numpy

    out: NDArray[Any] = numpy.empty(parts[0].size, carrier(dtype))
    reduce_into([out], parts, dtype, op)
    return out


def reduce_into(outs: "Sequence[NDArray[Any]]", parts: "Sequence[NDArray[Any]]", dtype: str, op: str) -> None:
    """As :func:`reduce_arrays`, into each of ``outs`` (flat, of the same size); the first may be one of ``parts``."""
    import numpy

    first, count = outs[0], len(parts)
    function = _function(op)
    # What is added to a sum of others must still be there when it is its turn.
    late = next((index for index, part in enumerate(parts) if index > 1 and _is_same(part, first)), None)
    with numpy.errstate(all="ignore"):  # a diverged loss is the user's business, not a warning out of a collective
        for start in range(0, first.size, _CHUNK):
            chunk = slice(start, start + _CHUNK)
            out = first[chunk]
            if dtype in _HALVES:
                out[:] = finished(combine([widened(part[chunk], dtype) for part in parts], op), dtype, op, count)
            else:
                pieces = [part[chunk] for part in parts]
                if late is not None:
                    pieces[late] = pieces[late].copy()
                _add_up(function, pieces, out)
                if op == "mean":
                    _divide(out, count)
            for other in outs[1:]:
                numpy.copyto(other[chunk], out)


def combine(parts: "Sequence[NDArray[Any]]", op: str, out: "NDArray[Any] | None" = None) -> "NDArray[Any]":
    """Sum (also for a mean, which :func:`finished` divides), max or min of arrays in the dtype of the sum, in order."""
    import numpy

    if out is None:
        out = numpy.empty_like(parts[0])
    with numpy.errstate(all="ignore"):
        _add_up(_function(op), parts, out)
    return out


def _function(op: str) -> Any:
    import numpy

    return {"max": numpy.maximum, "min": numpy.minimum}.get(op, numpy.add)


def _add_up(function: Any, parts: "Sequence[NDArray[Any]]", out: "NDArray[Any]") -> None:
    if len(parts) == 1:
        out[:] = parts[0]
        return
    function(parts[0], parts[1], out)
    for part in parts[2:]:
        function(out, part, out)


def _is_same(part: "NDArray[Any]", out: "NDArray[Any]") -> bool:
    return bool(part.ctypes.data == out.ctypes.data)


def finished(total: "NDArray[Any]", dtype: str, op: str, count: int) -> "NDArray[Any]":
    """The carrier of ``dtype`` of a ``total`` over ``count`` ranks; may write to ``total``."""
    if op == "mean":
        _divide(total, count)
    return _narrow(total, dtype)


def widened(flat: "NDArray[Any]", dtype: str) -> "NDArray[Any]":
    """``flat`` in the dtype in which it is summed: itself where that is its own."""
    import numpy

    if dtype == "bfloat16":
        return (flat.astype(numpy.uint32) << numpy.uint32(16)).view(numpy.float32)
    return flat.astype(numpy.float32) if dtype == "float16" else flat


def reduce_numbers(values: Sequence[int | float], op: str) -> int | float:
    """As :func:`reduce_arrays` for Python numbers; integers stay exact, a mean is a float."""
    if op == "max":
        return max(values)
    if op == "min":
        return min(values)
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total / len(values) if op == "mean" else total


def _divide(total: "NDArray[Any]", count: int) -> None:
    import numpy

    with numpy.errstate(all="ignore"):
        numpy.divide(total, total.dtype.type(count), out=total)


def _narrow(total: "NDArray[Any]", dtype: str) -> "NDArray[Any]":
    import numpy

    if dtype == "float16":
        with numpy.errstate(all="ignore"):
            return total.astype(numpy.float16)
    if dtype != "bfloat16":
        return total
    bits = total.view(numpy.uint32)
    # Round to nearest even: half of the dropped part, one less where the kept part is even.
    rounded = (bits + numpy.uint32(0x7FFF) + ((bits >> numpy.uint32(16)) & numpy.uint32(1))) >> numpy.uint32(16)
    quiet_nan = (bits >> numpy.uint32(16)) | numpy.uint32(0x40)
    narrowed: NDArray[Any] = numpy.where(numpy.isnan(total), quiet_nan, rounded).astype(numpy.uint16)
    return narrowed
