"""What the codecs share that keep some elements of each chunk of 4096: one record of fixed length for each chunk.

A last, shorter chunk is padded with zeros, or sent as float32 where that is no longer than a record.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from notebook_cluster.codecs.codec import Buffer, DamagedError, Vector, check_finite, check_size

ELEMENTS = 4096
"""Elements of a chunk."""


class Chunked:
    """Base of codecs whose blocks are chunks; they say how chunks become records."""

    block = ELEMENTS
    lossy = True
    at_a_time = 64
    """Chunks worked on at a time: 1 MiB of float32 stays in a processor's cache."""

    def __init__(self, name: str, record: int, fewest: int = 1) -> None:
        """``record``: bytes for each chunk; ``fewest``: elements that a shorter last chunk needs for a record."""
        self.name = name
        self._record = record
        self._fewest = fewest

    def write(self, values: Any, records: Any, chunk: int, used: int) -> None:
        """float32 ``values`` (n, 4096), the first being chunk number ``chunk``, into ``records`` (n, record bytes);
        what is behind the first ``used`` elements of a row is padding.

        Raises:
            NotFiniteError: a value is NaN or infinite.
        """
        raise NotImplementedError

    def read(self, records: Any, values: Any, chunk: int, used: int) -> None:
        """``records`` into ``values``, which are zeros.

        Raises:
            DamagedError: no encoder writes such a record.
        """
        raise NotImplementedError

    def size(self, count: int) -> int:
        chunks, rest = divmod(count, ELEMENTS)
        return chunks * self._record + (4 * rest if self._is_plain(rest) else self._record)

    def encode(self, flat: Vector) -> memoryview:
        encoded = np.empty(self.size(flat.size), np.uint8)
        for values, records, chunk, used in self._rows(flat, encoded):
            self.write(values, records, chunk, used)
        encoded.flags.writeable = False
        return encoded.data

    def decode(self, data: Buffer, count: int) -> Vector:
        encoded = self._checked(data, count)
        flat = np.zeros(count, np.float32)
        for records, chunk, used in self._records(encoded, count):
            if used == ELEMENTS:
                values = flat[chunk * ELEMENTS : (chunk + len(records)) * ELEMENTS].reshape(-1, ELEMENTS)
                self._read(records, values, chunk, used)
            else:
                padded = np.zeros((1, ELEMENTS), np.float32)
                self._read(records, padded, chunk, used)
                flat[-used:] = padded[0, :used]
        tail = self._plain(encoded, count)
        flat[count - tail.size :] = tail
        return flat

    def _rows(self, flat: Vector, encoded: Any) -> Iterator[tuple[Any, Any, int, int]]:
        """(values, their records, number of the first one's chunk, used elements of each) of the chunks that are worked
        on at a time; at the end a last chunk that travels as float32 is written.

        Raises:
            NotFiniteError: a value of that chunk is NaN or infinite.
        """
        for records, chunk, used in self._records(encoded, flat.size):
            if used == ELEMENTS:
                values = flat[chunk * ELEMENTS : (chunk + len(records)) * ELEMENTS].reshape(-1, ELEMENTS)
            else:
                values = np.zeros((1, ELEMENTS), np.float32)
                values[0, :used] = flat[chunk * ELEMENTS :]
            yield values, records, chunk, used
        tail = self._tail(encoded, flat.size)
        if tail.size:
            last = flat[flat.size - tail.size :]
            check_finite(last, flat.size - tail.size)
            tail[...] = last

    def _checked(self, data: Buffer, count: int) -> Any:
        """The bytes of ``count`` elements as uint8."""
        check_size(self.name, data, self.size(count))
        return np.frombuffer(data, np.uint8)

    def _records(self, encoded: Any, count: int) -> Iterator[tuple[Any, int, int]]:
        """(records, number of the first one's chunk, used elements of each) of the chunks that are worked on at a
        time."""
        chunks, rest = divmod(count, ELEMENTS)
        records = encoded[: chunks * self._record].reshape(chunks, self._record)
        for start in range(0, chunks, self.at_a_time):
            yield records[start : start + self.at_a_time], start, ELEMENTS
        if rest and not self._is_plain(rest):
            yield encoded[None, chunks * self._record :], chunks, rest

    def _plain(self, encoded: Any, count: int) -> Vector:
        """The elements of a last chunk that travels as float32, often none.

        Raises:
            DamagedError: one is not finite.
        """
        tail = self._tail(encoded, count)
        if not np.isfinite(tail).all():
            raise DamagedError(f"no {self.name} vector: a value of its last {tail.size} is not finite")
        return tail

    def _tail(self, encoded: Any, count: int) -> Vector:
        """Where in ``encoded`` the elements of a last chunk are that travels as float32."""
        chunks, rest = divmod(count, ELEMENTS)
        plain = encoded[chunks * self._record :] if rest and self._is_plain(rest) else encoded[:0]
        tail: Vector = plain.view("<f4")
        return tail

    def _read(self, records: Any, values: Any, chunk: int, used: int) -> None:
        with self._named(chunk, len(records)):
            self.read(records, values, chunk, used)

    @contextlib.contextmanager
    def _named(self, chunk: int, chunks: int) -> Iterator[None]:
        """A DamagedError inside says where."""
        try:
            yield
        except DamagedError as error:
            last = chunk + chunks - 1
            raise DamagedError(f"no {self.name} vector, in chunks {chunk} to {last}: {error}") from None

    def _is_plain(self, rest: int) -> bool:
        """A last chunk of ``rest`` elements travels as float32."""
        return rest < self._fewest or 4 * rest <= self._record


def in_chunks(places: Any) -> Any:
    """Indices in each chunk of what is kept, (chunks, kept), from ``places`` that count from the first chunk's first
    element."""
    return places - np.arange(0, len(places) * ELEMENTS, ELEMENTS)[:, None]
