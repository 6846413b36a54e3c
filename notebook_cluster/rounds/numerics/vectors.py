"""A model's flat float32 vector: memory for those of its size, and where each tensor lies in it.

Every round needs the same few vectors, so it takes them from those of the last one. What nodes must agree on before
they average is the layout: ``[trainable parameters | float buffers of normalisation layers]``, each part in sorted
order of names.
"""

import bisect
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from notebook_cluster.codecs import Vector
from notebook_cluster.memory import ArrayPool, give_back, keep_freed
from notebook_cluster.memory.nameless import WrittenBehind, array_in, file_of

_log = logging.getLogger(__name__)

_PARTS = 8 << 20
"""Bytes of what is decoded or encoded at a time, at most."""
_MEMORY = ArrayPool(512 << 20)
_BEHIND = WrittenBehind()


def empty(count: int, dtype: Any = np.float32) -> Vector:
    """``count`` elements with whatever is in them."""
    vector: Vector = _MEMORY.array(count, dtype)
    return vector


def bytes_of(size: int) -> NDArray[np.uint8]:
    """``size`` bytes with whatever is in them."""
    return _MEMORY.array(size, np.uint8)


def difference(left: Vector, right: Vector) -> Vector:
    """``left - right`` as a new vector."""
    return np.subtract(left, right, out=empty(left.size))


def copy(vector: Vector) -> Vector:
    """A new vector with the same elements, in a file where ``vector`` is in one."""
    new = like(vector)
    new[...] = vector
    return new


def like(vector: Vector, count: int | None = None, dtype: Any = None) -> Vector:
    """A new vector as large as ``vector``, or of ``count`` elements, with whatever is in it: in a file where ``vector``
    is in one and the disk has room, else in memory, so that a round never fails for a full disk."""
    count, dtype = vector.size if count is None else count, vector.dtype if dtype is None else dtype
    file = file_of(vector)
    if file is not None and count:
        try:
            new: Vector = array_in(file.folder, count, dtype)
        except OSError as error:
            _log.warning("%d elements of a state are kept in memory: %s", count, error)
        else:
            return new
    return empty(count, dtype)


def is_in_file(vector: Vector | None) -> bool:
    """Whether it is not in memory."""
    return vector is not None and file_of(vector) is not None


def placed(vector: Vector, folder: Path | None) -> Vector:
    """``vector`` in a file below ``folder``, or for None in memory: itself where it is there already.

    Raises:
        OSError: there is no room for it.
    """
    if (file_of(vector) is None) == (folder is None) or not vector.size:
        return vector
    new = empty(vector.size, vector.dtype) if folder is None else array_in(folder, vector.size, vector.dtype)
    new[...] = vector
    write_behind([new])
    return new


def write_behind(of: Iterable[Any]) -> None:
    """Those of these vectors that are in files go to the disk, on another thread; what nobody uses of them then is no
    memory of this process."""
    _BEHIND.write(of)


def references(holder: Any, name: str) -> int | None:
    """How many there are to the vector ``holder.name`` beside that one; None: this Python cannot say."""
    return _MEMORY.references(holder, name)


def keep_up_to(size: int) -> None:
    """Until :func:`forget`, find up to ``size`` bytes again for the next round. So it is with what is computed part by
    part: new pages for each of them take longer than decoding, adding and encoding it."""
    _MEMORY.keep_up_to(size)
    keep_freed(_PARTS)


def forget() -> None:
    """The training loop is over: give the memory back that no vector is in."""
    _MEMORY.forget()
    give_back()


SchemaRow = tuple[str, list[int], str]
"""(name, shape, dtype)."""


@dataclass(frozen=True)
class TensorLayout:
    """Where each named tensor lies in the vector. ``buffers``: number of elements at its end that are buffers;
    ``former``: name -> another one that checkpoints of before may have for it."""

    schema: list[SchemaRow]
    starts: list[int]
    size: int
    buffers: int
    former: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, parameters: list[SchemaRow], buffers: list[SchemaRow], former: dict[str, str] | None = None
    ) -> "TensorLayout":
        """The layout of already sorted rows."""
        starts, position = [], 0
        for _name, shape, _dtype in parameters + buffers:
            starts.append(position)
            position += _count(shape)
        last = sum(_count(shape) for _, shape, _ in buffers)
        return cls(parameters + buffers, starts, position, last, former or {})

    def hash(self, codec: str) -> str:
        """xxh3-128 of names, shapes, dtypes, buffers and the codec's name: equal on nodes that may average."""
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((self.schema, self.buffers, codec)))

    def within(self, part: slice) -> Iterator[tuple[int, slice]]:
        """(number of a tensor, which of its elements) of what ``part`` of the vector consists of, in order."""
        position = part.start
        while position < part.stop:
            index = bisect.bisect_right(self.starts, position) - 1  # where several begin, the last is not empty
            end = self.starts[index + 1] if index + 1 < len(self.starts) else self.size
            stop, start = min(part.stop, end), self.starts[index]
            yield index, slice(position - start, stop - start)
            position = stop

    def tensors(self, vector: Vector) -> dict[str, Vector]:
        """``vector`` (float32, ``size`` elements) as name -> view in the tensor's shape."""
        return {
            name: vector[start : start + _count(shape)].reshape(shape)
            for (name, shape, _), start in zip(self.schema, self.starts, strict=True)
        }

    def vector(self, tensors: dict[str, Vector], where: str) -> Vector:
        """The inverse of :meth:`tensors`; ``where`` names the source in errors.

        Raises:
            ValueError: a tensor is missing, left over or of another shape.
        """
        own = {former: name for name, former in self.former.items() if name not in tensors}
        tensors = {own.get(name, name): value for name, value in tensors.items()}
        left_over = sorted(set(tensors) - {name for name, _, _ in self.schema})
        if left_over:
            raise ValueError(
                f"{where} has {left_over[0]!r}, which this model has not: build the model it was saved from"
            )
        flat = np.empty(self.size, np.float32)
        for (name, shape, _), start in zip(self.schema, self.starts, strict=True):
            if name not in tensors:
                raise ValueError(f"{where} lacks {name!r} of this model: build the model it was saved from")
            if list(tensors[name].shape) != shape:
                raise ValueError(
                    f"{where} has {name!r} {shape_text(list(tensors[name].shape))}, this model {shape_text(shape)}: "
                    "build the model it was saved from"
                )
            flat[start : start + _count(shape)] = tensors[name].reshape(-1)
        return flat


def shape_text(shape: list[int]) -> str:
    """``32x1x3x3``; ``scalar`` for no dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
