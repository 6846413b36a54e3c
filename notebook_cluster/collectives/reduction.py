"""Reduce arrays of all ranks in rank order: a pure function, the same bits on every machine.

Addition of two IEEE numbers is exact to the last bit everywhere, so a sum is the same on every node when its order is:
rank 0 + rank 1 + rank 2 and so on, never a tree, never ``np.sum``. Half precision is summed in float32 and rounded
once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from numpy.typing import NDArray

Reduction = Literal["sum", "mean", "max", "min"]
REDUCTIONS: tuple[Reduction, ...] = ("sum", "mean", "max", "min")

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_COMPLEX = ("complex64", "complex128")


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


def reduce_arrays(parts: "Sequence[NDArray[Any]]", dtype: str, op: str) -> "NDArray[Any]":
    """The element-wise ``op`` of ``parts`` (in rank order) as a new flat array.

    Args:
        parts: flat arrays of equal size in the carrier of ``dtype`` (uint16 bits for bfloat16).
        dtype: canonical name.
        op: checked by :func:`check_reduction`.
    """
    import numpy

    # A diverged loss is the user's business, not a warning out of the middle of a collective.
    with numpy.errstate(all="ignore"):
        total = _widen(parts[0], dtype)
        for part in parts[1:]:
            other = _widen(part, dtype)
            if op == "max":
                numpy.maximum(total, other, out=total)
            elif op == "min":
                numpy.minimum(total, other, out=total)
            else:
                numpy.add(total, other, out=total)
        if op == "mean":
            numpy.divide(total, total.dtype.type(len(parts)), out=total)
        return _narrow(total, dtype)


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


def _widen(flat: "NDArray[Any]", dtype: str) -> "NDArray[Any]":
    """A writable copy of ``flat`` in the dtype in which it is summed."""
    import numpy

    if dtype == "bfloat16":
        return (flat.astype(numpy.uint32) << numpy.uint32(16)).view(numpy.float32)
    if dtype == "float16":
        return flat.astype(numpy.float32)
    return flat.copy()


def _narrow(total: "NDArray[Any]", dtype: str) -> "NDArray[Any]":
    import numpy

    if dtype == "float16":
        return total.astype(numpy.float16)
    if dtype != "bfloat16":
        return total
    bits = total.view(numpy.uint32)
    # Round to nearest even: half of the dropped part, one less where the kept part is even.
    rounded = (bits + numpy.uint32(0x7FFF) + ((bits >> numpy.uint32(16)) & numpy.uint32(1))) >> numpy.uint32(16)
    quiet_nan = (bits >> numpy.uint32(16)) | numpy.uint32(0x40)
    narrowed: NDArray[Any] = numpy.where(numpy.isnan(total), quiet_nan, rounded).astype(numpy.uint16)
    return narrowed
