"""Elements drawn at random in each chunk of 4096: a record is their values in bfloat16, then what was drawn, 4 bytes.

One element is drawn from each of ``keep`` stretches, so every element has its turn: with 64 of 4096 0.258 bits per
parameter. Values are sent as they are, with error feedback (Stich, Cordonnier, Jaggi 2018), and not times 64: then what
is decoded would be the vector on average, and what is fed back would be counted twice.

All nodes draw the same elements for the same round, so the mean of their contributions has the same elements as each of
them. A contribution says itself what was drawn for it: one that is counted in a later round than it was made for has
other elements than the rest, and is read all the same.
"""

import copy
from typing import Any, Self

import numpy as np

from notebook_cluster.codecs.chunked import ELEMENTS, KeepsSome
from notebook_cluster.codecs.codec import Buffer, Vector, check_finite
from notebook_cluster.codecs.kept import Shortened

_DRAWN = 4
"""Bytes of a record that tell its places: 32 bits, mixed from the number of the draw and that of the chunk."""

_MASK = 2**64 - 1


class RandomK(KeepsSome):
    """Keeps ``keep`` elements of each chunk, others in each draw."""

    def __init__(self, name: str, keep: int) -> None:
        """``keep``: from 1 to 4096."""
        super().__init__(name, keep, Shortened(keep), _DRAWN)
        self._draw = self._first = 0

    def drawn(self, number: int) -> Self:
        """The same codec, which encodes with draw ``number``, from 0: take another one every round, the same on every
        node. All read what any of them wrote."""
        other = copy.copy(self)
        other._draw = number & _MASK
        return other

    def beginning(self, chunk: int) -> Self:
        """The same codec for a run that begins with that chunk of a longer vector."""
        other = copy.copy(self)
        other._first = chunk
        return other

    def choose(self, values: Any, records: Any, chunk: int, used: int) -> Any:
        check_finite(values, chunk * ELEMENTS)
        places = self.choose_unseen(records, chunk, used)
        places += np.arange(0, len(values) * ELEMENTS, ELEMENTS)[:, None]
        return places

    def choose_unseen(self, records: Any, chunk: int, used: int) -> Any:
        """:meth:`choose` for values that need not be looked at; counted from the beginning of each chunk."""
        chunks = np.arange(self._first + chunk, self._first + chunk + len(records), dtype=np.uint64)
        drawn = (_mixed(chunks, np.uint64(self._draw)) >> np.uint64(32)).astype("<u4")
        records[:, -_DRAWN:] = drawn[:, None].view(np.uint8)
        return self.read_places(records[:, -_DRAWN:], used)

    def read_places(self, data: Any, used: int) -> Any:
        edges = np.arange(self.keep + 1, dtype=np.int64) * used // self.keep
        widths = np.diff(edges).astype(np.uint64)
        drawn = np.ascontiguousarray(data).view("<u4").astype(np.uint64)
        places = _mixed(np.arange(self.keep, dtype=np.uint64), drawn)
        places >>= np.uint64(32)
        places *= widths
        places >>= np.uint64(32)
        found: Any = places.view(np.int64)
        found += edges[:-1]
        return found

    def draws(self, data: Buffer, count: int) -> bytes:
        """What tells the places of ``count`` elements: vectors in which it is equal have the same ones.

        Raises:
            DamagedError: another number of bytes.
        """
        encoded = self._checked(data, count)
        return b"".join(records[:, -_DRAWN:].tobytes() for records, _, _ in self._records(encoded, count))

    def with_values(self, data: Buffer, values: Vector, count: int) -> memoryview:
        """``data`` with other ``values`` (float32, finite) at its places, in the order of :meth:`entries`.

        Raises:
            DamagedError: another number of bytes.
        """
        encoded, position = self._checked(data, count).copy(), 0
        for records, _, _ in self._records(encoded, count):
            kept = values[position : position + len(records) * self.keep].reshape(-1, self.keep)
            self.write_values(kept, records)
            position += kept.size
        self._tail(encoded, count)[...] = values[position:]
        encoded.flags.writeable = False
        written: memoryview = encoded.data
        return written


def _mixed(numbers: Any, seeds: Any) -> Any:
    """splitmix64 (Steele, Lea, Flood 2014) of each number, from each seed: numpy's own generators may change between
    versions."""
    bits = numbers + np.uint64(1)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits = bits + seeds
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    return bits
