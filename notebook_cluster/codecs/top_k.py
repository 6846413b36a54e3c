"""The elements of largest magnitude in each chunk of 4096: a record is their values, then their indices.

``topk`` keeps 64 values in bfloat16, 0.375 bits per parameter. ``sparse`` keeps 64 as well, with two bits each and two
levels per chunk (SparseLoCo, arXiv 2508.15706): 84 bytes per chunk, 0.164 bits per parameter. Decoding copies bits
and computes nothing.
"""

from typing import Any

import numpy as np

from notebook_cluster.codecs.chunked import ELEMENTS, KeepsSome, in_chunks
from notebook_cluster.codecs.codec import NotFiniteError, not_finite
from notebook_cluster.codecs.kept import Gaps, KeptValues
from notebook_cluster.codecs.selection import largest, scratch

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
