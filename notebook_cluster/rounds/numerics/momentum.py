"""How the outer momentum is kept: as float32, as bfloat16 in half the memory, or not, where the outer step has none.

bfloat16 is kept as its bits, uint16, so the type of an array says how it is kept. It is rounded to the nearest, halves
to even, with bit operations, which are the same on every machine; the outer step computes in float32 and rounds what it
leaves. Checkpoints have float32, which holds every bfloat16 exactly.

Where the outer step has none for good (LocalSGD, SparseLoCo), the momentum is a vector without elements, and so it is
on the wire, in the state's hash and in checkpoints.
"""

from typing import Any

import numpy as np

from notebook_cluster.codecs import Vector, from_bfloat16, to_bfloat16
from notebook_cluster.rounds.numerics import vectors

FLOAT32, BFLOAT16 = "float32", "bfloat16"
MOMENTUM_DTYPES = (FLOAT32, BFLOAT16)
NOT_KEPT = "none"
MEAN = "mean"
"""Of gradients, where others have an outer momentum."""

_GROUP = 64 * 1024


def item_size(name: str) -> int:
    """Bytes of one element."""
    return {FLOAT32: 4, BFLOAT16: 2, NOT_KEPT: 0}[name]


def is_bfloat16(momentum: Vector) -> bool:
    """Whether these are the bits of bfloat16."""
    return momentum.dtype.itemsize == item_size(BFLOAT16)


def kept_as(momentum: Vector) -> str:
    """The name of how it is kept."""
    if not momentum.size:
        return NOT_KEPT
    return BFLOAT16 if is_bfloat16(momentum) else FLOAT32


def zeros(count: int, name: str) -> Vector:
    """A momentum of 0, kept as ``name``."""
    momentum: Vector = np.zeros(count if name != NOT_KEPT else 0, np.uint16 if name == BFLOAT16 else np.float32)
    return momentum


def converted(momentum: Vector, name: str, count: int) -> Vector:
    """``momentum`` of a model of ``count`` elements kept as ``name``: itself where it is already. One that was not kept
    is 0."""
    if kept_as(momentum) == name:
        return momentum
    if not momentum.size or name == NOT_KEPT:
        return zeros(count, name)
    new = vectors.empty(momentum.size, np.dtype(np.uint16 if name == BFLOAT16 else np.float32))
    for start in range(0, momentum.size, _GROUP):
        part = slice(start, start + _GROUP)
        new[part] = widened(momentum[part]) if name == FLOAT32 else to_bfloat16(momentum[part])
    return new


def widened(momentum: Vector, out: Vector | None = None) -> Vector:
    """The elements as float32: the same array where they are."""
    if not is_bfloat16(momentum):
        return momentum
    wide: Vector = from_bfloat16(momentum, out)
    return wide


def check_momentum_dtype(name: Any) -> str:
    """How the outer momentum is kept.

    Raises:
        ValueError: not one of the ways.
    """
    if name not in MOMENTUM_DTYPES:
        raise ValueError(f"momentum_dtype={name!r}: use one of {', '.join(map(repr, MOMENTUM_DTYPES))}")
    return str(name)
