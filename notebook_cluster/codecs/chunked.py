"""What the codecs share whose blocks are chunks of 4096: one record of fixed length for each chunk.

:class:`KeepsSome` is for those that keep some elements of a chunk as they are and make the others 0; ``dct`` keeps
coefficients instead.

A last, shorter chunk is padded with zeros, or sent as float32 where that is no longer than a record.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from notebook_cluster.codecs.codec import Buffer, DamagedError, Vector, check_finite, check_size
from notebook_cluster.codecs.kept import KeptValues

ELEMENTS = 4096
"""Elements of a chunk."""


class Chunked:
    """Base of codecs whose blocks are chunks; they say how chunks become records."""

    block = ELEMENTS
    lossy = True
    encodes_means = False
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


class KeepsSome(Chunked):
    """Base of codecs that keep exactly ``keep`` elements of each chunk: a record has their values, then what tells
    their places. They say which they keep, and how the places are written."""

    at_a_time = 256
    """Of 64 the work on what is kept takes no longer than calling numpy for it."""

    def __init__(self, name: str, keep: int, values: KeptValues, place_bytes: int) -> None:
        """``values``: how they are written; ``place_bytes``: of the places in a record."""
        super().__init__(name, values.size + place_bytes, fewest=keep)
        self.keep = keep
        """Elements of each chunk."""
        self._values = values

    def choose(self, values: Any, records: Any, chunk: int, used: int) -> Any:
        """Which elements of each row are kept, written into ``records``; arguments as of :meth:`write`.

        Returns:
            int64 (chunks, keep), ascending, counted from the first element of ``values``.

        Raises:
            NotFiniteError: a value is NaN or infinite.
        """
        raise NotImplementedError

    def read_places(self, data: Any, used: int) -> Any:
        """int64 (chunks, keep), ascending, counted from the beginning of each chunk; all are below ``used``.

        Raises:
            DamagedError: no encoder writes such bytes.
        """
        raise NotImplementedError

    def write(self, values: Any, records: Any, chunk: int, used: int) -> None:
        self.write_values(values.reshape(-1).take(self.choose(values, records, chunk, used)), records)

    def write_values(self, kept: Any, records: Any) -> Any:
        """float32 (chunks, keep), finite, into ``records``; what decoding gives in their place."""
        return self._values.write(kept, records[:, : self._values.size])

    def read(self, records: Any, values: Any, chunk: int, used: int) -> None:
        indices, kept = self._kept(records, used)
        np.put_along_axis(values, indices, kept, axis=1)

    def encode_from(self, flat: Vector) -> memoryview:
        """:meth:`encode`, and what the bytes say is taken away from ``flat``: a NotFiniteError may leave it half
        done."""
        encoded = np.empty(self.size(flat.size), np.uint8)
        for values, records, chunk, used in self._rows(flat, encoded):
            places = self.choose(values, records, chunk, used)
            kept = values.reshape(-1).take(places)
            kept -= self.write_values(kept, records)
            flat[chunk * ELEMENTS :][places] = kept
        flat[flat.size - self._tail(encoded, flat.size).size :] = 0
        encoded.flags.writeable = False
        return encoded.data

    def entries(self, data: Buffer, count: int) -> tuple[NDArray[np.int64], Vector]:
        """What was kept of ``count`` elements: ascending indices and their float32 values, those of :meth:`decode` (a
        value may be 0).

        Raises:
            DamagedError: as decode.
        """
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
        return self.read_places(records[:, self._values.size :], used), kept


def in_chunks(places: Any) -> Any:
    """Indices in each chunk of what is kept, (chunks, kept), from ``places`` that count from the first chunk's first
    element."""
    return places - np.arange(0, len(places) * ELEMENTS, ELEMENTS)[:, None]
