"""Elements drawn at random in each chunk of 4096: only values travel, both sides draw the same places from a seed.

One element is drawn from each stretch of 64, so every element is as likely as any other and 64 of 4096 are sent, as
float32: 0.5 bits per parameter. Either the values are sent times 64, then the mean over seeds is the vector itself and
nothing may be fed back; or they are sent as they are, with error feedback. Both at once would count what is left out
twice: ``lossy`` tells which it is.
"""

from typing import Any

import numpy as np

from notebook_cluster.codecs.chunked import ELEMENTS, Chunked
from notebook_cluster.codecs.codec import DamagedError, check_finite, not_finite
from notebook_cluster.codecs.scaled import SMALLEST_NORMAL

_STRETCH = 64
_KEEP = ELEMENTS // _STRETCH
_MASK = 2**64 - 1


class RandomK(Chunked):
    """Draws anew for each seed: take another one every round, the same on every node."""

    def __init__(self, seed: int, *, unbiased: bool = False, first: int = 0) -> None:
        """
        Args:
            seed: 0 to 2^64 - 1.
            unbiased: send values times 64, so that what is decoded is the vector on average; no error feedback then.
            first: number of the first chunk, where a run of chunks of a longer vector is encoded or decoded.

        Raises:
            ValueError: seed out of range, or first below 0.
        """
        if not 0 <= seed <= _MASK:
            raise ValueError(f"seed={seed}: use a whole number from 0 to 2^64 - 1")
        if first < 0:
            raise ValueError(f"first={first}: chunks are numbered from 0")
        super().__init__("randomk", 4 * _KEEP)
        self.lossy = not unbiased
        self._seed = seed
        self._first = first
        self._factor = np.float32(_STRETCH if unbiased else 1)

    def write(self, values: Any, records: Any, chunk: int, used: int) -> None:
        check_finite(values, chunk * ELEMENTS)
        kept = np.take_along_axis(values, self._places(chunk, len(values)), axis=1)
        with np.errstate(over="ignore"):
            kept *= self._factor
        if not np.isfinite(kept).all():
            raise not_finite(chunk * ELEMENTS)
        kept[np.abs(kept) < SMALLEST_NORMAL] = 0
        records.view("<f4")[...] = kept

    def read(self, records: Any, values: Any, chunk: int, used: int) -> None:
        kept = records.view("<f4")
        if not np.isfinite(kept).all():
            raise DamagedError("a value that is not finite")
        np.put_along_axis(values, self._places(chunk, len(values)), kept, axis=1)

    def _places(self, chunk: int, chunks: int) -> Any:
        """int64 (chunks, 64): for each stretch the element drawn."""
        stretches = np.arange(chunks * _KEEP, dtype=np.uint64).reshape(chunks, _KEEP)
        stretches += np.uint64((self._first + chunk) * _KEEP)
        drawn = (mixed(stretches, self._seed) >> np.uint64(58)).astype(np.int64)
        drawn += np.arange(0, ELEMENTS, _STRETCH)
        return drawn


def mixed(numbers: Any, seed: int) -> Any:
    """splitmix64 (Steele, Lea, Flood 2014) of each number: numpy's own generators may change between versions."""
    bits = numbers + np.uint64(1)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits += np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    return bits
