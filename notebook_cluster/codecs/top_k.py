"""The elements of largest magnitude in each chunk of 4096: a record is their values, then their indices.

``topk`` keeps 64 values in bfloat16, 0.375 bits per parameter. ``sparse`` keeps 64 as well, with two bits each and two
levels per chunk (SparseLoCo, arXiv 2508.15706): 84 bytes per chunk, 0.164 bits per parameter. Decoding copies bits
and computes nothing.

What the search for the largest needs on the way is kept by each thread: new pages for each group of chunks cost as much
as the work on them.
"""

import itertools
import math
import threading
from typing import Any

import numpy as np

from notebook_cluster.codecs.chunked import ELEMENTS, KeepsSome, in_chunks
from notebook_cluster.codecs.codec import NotFiniteError, not_finite
from notebook_cluster.codecs.kept import Gaps, KeptValues
from notebook_cluster.memory import Scratch

_LARGEST = 16 << 20
"""Bytes: more than any group of chunks has."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.scratch = Scratch(_LARGEST)


_KEPT = _Kept()


def scratch(use: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array with whatever is in it, valid until this thread asks for the same ``use`` again."""
    kind = np.dtype(dtype)
    return _KEPT.scratch.take(use, math.prod(shape) * kind.itemsize).view(kind).reshape(shape)


_STRETCH = 16


def largest(magnitudes: Any, keep: int) -> Any:
    """Where the ``keep`` largest of each row are; of equal ones the first.

    Args:
        magnitudes: float32 (rows, columns).
        keep: from 1 to the number of columns.

    Returns:
        int64 (rows, keep), ascending, counted from the first element of the first row.

    Raises:
        NotFiniteError: a magnitude is NaN or infinite.
    """
    rows, columns = magnitudes.shape
    enough = np.greater_equal(magnitudes, _bound(magnitudes, keep), out=scratch("enough", magnitudes.shape, np.bool_))
    found = np.flatnonzero(enough)
    values = magnitudes.reshape(-1).take(found)
    begins = np.searchsorted(found, np.arange(0, (rows + 1) * columns, columns))
    counts = np.diff(begins)
    width = int(counts.max())
    table = np.full((rows, width), -1, np.float32)
    shifts = np.arange(0, rows * width, width) - begins[:-1]
    table.reshape(-1)[np.arange(found.size) + np.repeat(shifts, counts)] = values
    table.partition(width - keep, axis=1)
    threshold = np.repeat(table[:, -keep], counts)
    chosen = values >= threshold
    if np.count_nonzero(chosen) > rows * keep:
        _drop_ties(values == threshold, chosen, begins, keep)
    return found[chosen].reshape(rows, keep)


def _bound(magnitudes: Any, keep: int) -> Any:
    """float32 (rows, 1): at least ``keep`` of each row reach it, and few more.

    At least ``keep`` of the maxima of stretches of 16 reach the ``keep``-th largest of them: only a sixteenth of all
    has to be partitioned. A stretch has an element of each sixteenth, so that many of them are looked at at once.
    """
    rows, columns = magnitudes.shape
    stretch = _STRETCH if columns % _STRETCH == 0 and columns // _STRETCH >= keep else 1
    highest = magnitudes.reshape(rows, stretch, columns // stretch).max(axis=1)
    if not np.isfinite(highest.max()):  # a maximum does not lose a NaN
        raise NotFiniteError("NaN or infinity among the magnitudes")
    highest.partition(highest.shape[1] - keep, axis=1)
    return highest[:, -keep, None]


def _drop_ties(tied: Any, chosen: Any, begins: Any, keep: int) -> None:
    """Where more than ``keep`` of a row reach its threshold, those that just do so and come last are not chosen."""
    for begin, end in itertools.pairwise(begins):
        excess = int(np.count_nonzero(chosen[begin:end])) - keep
        if excess > 0:
            chosen[begin + np.flatnonzero(tied[begin:end])[-excess:]] = False


_SEARCHED = 64
"""Chunks that are searched at a time for what to keep: 1 MiB of float32 stays in a processor's cache."""


class TopK(KeepsSome):
    """Keeps exactly ``keep`` elements of each chunk, of equal magnitudes the first ones."""

    def __init__(self, name: str, keep: int, values: KeptValues) -> None:
        """``keep``: a multiple of 8; ``values``: how that many values are written."""
        self._gaps = Gaps(ELEMENTS, keep)
        super().__init__(name, keep, values, self._gaps.size)

    def choose(self, values: Any, records: Any, chunk: int, used: int) -> Any:
        places = np.empty((len(values), self.keep), np.int64)
        for start in range(0, len(values), _SEARCHED):
            searched = values[start : start + _SEARCHED]
            # padding is 0 and comes last, so among equal ones it is never taken: there are ``keep`` before it
            magnitudes = np.abs(searched, out=scratch("magnitudes", searched.shape, np.float32))
            try:
                found = largest(magnitudes, self.keep)
            except NotFiniteError:
                raise not_finite((chunk + start) * ELEMENTS) from None
            np.add(found, start * ELEMENTS, out=places[start : start + _SEARCHED])
        self.write_places(in_chunks(places), records)
        return places

    def write_places(self, indices: Any, records: Any) -> None:
        """int64 (chunks, keep), ascending, counted from the beginning of each chunk, into ``records``."""
        self._gaps.write(indices, records[:, self._values.size :])

    def read_places(self, data: Any, used: int) -> Any:
        return self._gaps.read(data, used)
