"""The elements of largest magnitude in each chunk of 4096: a record is their values, then their indices.

``topk`` keeps 64 values in bfloat16, 0.375 bits per parameter. ``sparse`` keeps 64 as well, with two bits each and two
levels per chunk (SparseLoCo, arXiv 2508.15706): 84 bytes per chunk, 0.164 bits per parameter. Decoding copies bits
and computes nothing.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from notebook_cluster.codecs.chunked import ELEMENTS, Chunked, in_chunks
from notebook_cluster.codecs.codec import Buffer, NotFiniteError, Vector, not_finite
from notebook_cluster.codecs.kept import Gaps, KeptValues
from notebook_cluster.codecs.selection import largest, scratch

_SEARCHED = 64
"""Chunks that are searched at a time for what to keep: 1 MiB of float32 stays in a processor's cache."""


class TopK(Chunked):
    """Keeps exactly ``keep`` elements of each chunk, of equal magnitudes the first ones; the others become 0."""

    at_a_time = 256
    """Of 64 the work on what is kept takes no longer than calling numpy for it."""

    def __init__(self, name: str, keep: int, values: KeptValues) -> None:
        """``keep``: a multiple of 8; ``values``: how that many values are written."""
        self.keep = keep
        """Elements of each chunk."""
        self._values = values
        self._gaps = Gaps(ELEMENTS, keep)
        super().__init__(name, values.size + self._gaps.size, fewest=keep)

    def write(self, values: Any, records: Any, chunk: int, used: int) -> None:
        places = self._largest(values, chunk)
        self.write_kept(in_chunks(places), values.reshape(-1).take(places), records)

    def encode_from(self, flat: Vector) -> memoryview:
        encoded = np.empty(self.size(flat.size), np.uint8)
        for values, records, chunk, _ in self._rows(flat, encoded):
            places = self._largest(values, chunk)
            kept = values.reshape(-1).take(places)
            kept -= self.write_kept(in_chunks(places), kept, records)
            flat[chunk * ELEMENTS :][places] = kept
        flat[flat.size - self._tail(encoded, flat.size).size :] = 0
        encoded.flags.writeable = False
        return encoded.data

    def _largest(self, values: Any, chunk: int) -> Any:
        """int64 (chunks, keep), ascending: where in ``values`` (chunks, 4096) what is kept is.

        Raises:
            NotFiniteError: a value is NaN or infinite.
        """
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
        return places

    def write_kept(self, indices: Any, kept: Any, records: Any) -> Any:
        """What was found to be largest into ``records``, uint8 (chunks, record bytes).

        Args:
            indices: int64 (chunks, keep), ascending, counted from the beginning of each chunk.
            kept: float32 (chunks, keep), finite.

        Returns:
            What decoding gives in their place, float32 (chunks, keep).
        """
        self._gaps.write(indices, records[:, self._values.size :])
        return self._values.write(kept, records[:, : self._values.size])

    def read(self, records: Any, values: Any, chunk: int, used: int) -> None:
        indices, kept = self._kept(records, used)
        np.put_along_axis(values, indices, kept, axis=1)

    def entries(self, data: Buffer, count: int) -> tuple[NDArray[np.int64], Vector]:
        encoded = self._checked(data, count)
        places, values = [], []
        for records, chunk, used in self._records(encoded, count):
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
