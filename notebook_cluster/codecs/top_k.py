"""The elements of largest magnitude in each chunk of 4096: a record is their values, then their indices.

``topk`` keeps 64 values in bfloat16, 0.375 bits per parameter. ``sparse`` keeps 64 as well, with two bits each and two
levels per chunk (SparseLoCo, arXiv 2508.15706): 84 bytes per chunk, 0.164 bits per parameter. Decoding copies bits
and computes nothing.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from notebook_cluster.codecs.chunked import ELEMENTS, Chunked
from notebook_cluster.codecs.codec import Buffer, NotFiniteError, Vector, not_finite
from notebook_cluster.codecs.gaps import Gaps
from notebook_cluster.codecs.levels import Values
from notebook_cluster.codecs.scratch import scratch
from notebook_cluster.codecs.selection import largest

_CHUNKS = 512
"""Chunks whose kept elements are read at a time."""


class TopK(Chunked):
    """Keeps exactly ``keep`` elements of each chunk, of equal magnitudes the first ones; the others become 0."""

    def __init__(self, name: str, keep: int, values: Values) -> None:
        """``keep``: a multiple of 8; ``values``: how that many values are written."""
        self.keep = keep
        """Elements of each chunk."""
        self._values = values
        self._gaps = Gaps(ELEMENTS, keep)
        super().__init__(name, values.size + self._gaps.size, fewest=keep)

    def write(self, values: Any, records: Any, chunk: int, used: int) -> None:
        # padding is 0 and comes last, so among equal ones it is never taken: there are ``keep`` before it
        magnitudes = np.abs(values, out=scratch("magnitudes", values.shape, np.float32))
        try:
            indices = largest(magnitudes, self.keep)
        except NotFiniteError:
            raise not_finite(chunk * ELEMENTS) from None
        self.write_kept(indices, np.take_along_axis(values, indices, axis=1), records)

    def write_kept(self, indices: Any, kept: Any, records: Any) -> None:
        """What was found to be largest into ``records``, uint8 (chunks, record bytes).

        Args:
            indices: int64 (chunks, keep), ascending, counted from the beginning of each chunk.
            kept: float32 (chunks, keep), finite.
        """
        self._values.write(kept, records[:, : self._values.size])
        self._gaps.write(indices, records[:, self._values.size :])

    def read(self, records: Any, values: Any, chunk: int, used: int) -> None:
        indices, kept = self._kept(records, used)
        np.put_along_axis(values, indices, kept, axis=1)

    def entries(self, data: Buffer, count: int) -> tuple[NDArray[np.int64], Vector]:
        encoded = self._checked(data, count)
        places, values = [], []
        for records, chunk, used in self._records(encoded, count, at_a_time=_CHUNKS):
            with self._named(chunk, len(records)):
                indices, kept = self._kept(records, used)
            indices += np.arange(chunk * ELEMENTS, (chunk + len(records)) * ELEMENTS, ELEMENTS)[:, None]
            places.append(indices.ravel())
            values.append(kept.ravel())
        tail = self._plain(encoded, count)
        places.append(np.arange(count - tail.size, count))
        return np.concatenate(places), np.concatenate([*values, tail])

    def _kept(self, records: Any, used: int) -> tuple[Any, Any]:
        """Indices in their chunks and values, (chunks, keep) both."""
        kept = self._values.read(records[:, : self._values.size])
        return self._gaps.read(records[:, self._values.size :], used), kept
