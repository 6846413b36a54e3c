"""Memory for vectors of the model's size: every round needs the same few, so it takes them from those of the last."""

import numpy as np
from numpy.typing import NDArray

from notebook_cluster.codecs import Vector
from notebook_cluster.memory import Memory

_MEMORY = Memory(512 << 20)


def empty(count: int) -> Vector:
    """``count`` float32 elements with whatever is in them."""
    vector: Vector = _MEMORY.array(count, np.float32)
    return vector


def bytes_of(size: int) -> NDArray[np.uint8]:
    """``size`` bytes with whatever is in them."""
    return _MEMORY.array(size, np.uint8)


def difference(left: Vector, right: Vector) -> Vector:
    """``left - right`` as a new vector."""
    return np.subtract(left, right, out=empty(left.size))


def copy(vector: Vector) -> Vector:
    """A new vector with the same elements."""
    new = empty(vector.size)
    new[...] = vector
    return new


def forget() -> None:
    """The training loop is over: give the memory back that no vector is in."""
    _MEMORY.forget()
