"""What the codecs share that keep some elements of each chunk of 4096: one record of fixed length for each chunk.

A last, shorter chunk is padded with zeros, or sent as float32 where that is no longer than a record.
"""

from typing import Any

import numpy as np

from notebook_cluster.codecs.codec import Buffer, DamagedError, Vector, check_finite, check_size

ELEMENTS = 4096
"""Elements of a chunk."""

_CHUNKS = 32
"""Chunks worked on at a time: 512 KiB of float32 stay in a core's cache."""


class Chunked:
    """Base of codecs whose blocks are chunks; they say how chunks become records."""

    block = ELEMENTS
    lossy = True

    def __init__(self, name: str, record: int, fewest: int = 1) -> None:
        """``record``: bytes for each chunk; ``fewest``: elements that a shorter last chunk needs for a record."""
        self.name = name
        self._record = record
        self._fewest = fewest

    def write(self, values: Any, records: Any, chunk: int, used: int) -> None:
        """float32 ``values`` (n, 4096), finite, the first being chunk number ``chunk``, into ``records`` (n, record
        bytes); what is behind the first ``used`` elements of a row is padding."""
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
        chunks, rest = divmod(flat.size, ELEMENTS)
        encoded = np.empty(self.size(flat.size), np.uint8)
        records = encoded[: chunks * self._record].reshape(chunks, self._record)
        for start in range(0, chunks, _CHUNKS):
            stop = min(start + _CHUNKS, chunks)
            values = flat[start * ELEMENTS : stop * ELEMENTS].reshape(-1, ELEMENTS)
            check_finite(values, start * ELEMENTS)
            self.write(values, records[start:stop], start, ELEMENTS)
        if rest:
            tail, last = encoded[chunks * self._record :], flat[chunks * ELEMENTS :]
            check_finite(last, chunks * ELEMENTS)
            if self._is_plain(rest):
                tail.view("<f4")[...] = last
            else:
                padded = np.zeros((1, ELEMENTS), np.float32)
                padded[0, :rest] = last
                self.write(padded, tail[None, :], chunks, rest)
        encoded.flags.writeable = False
        return encoded.data

    def decode(self, data: Buffer, count: int) -> Vector:
        check_size(self.name, data, self.size(count))
        encoded = np.frombuffer(data, np.uint8)
        chunks, rest = divmod(count, ELEMENTS)
        flat = np.zeros(count, np.float32)
        records = encoded[: chunks * self._record].reshape(chunks, self._record)
        for start in range(0, chunks, _CHUNKS):
            stop = min(start + _CHUNKS, chunks)
            values = flat[start * ELEMENTS : stop * ELEMENTS].reshape(-1, ELEMENTS)
            self._read(records[start:stop], values, start, ELEMENTS)
        tail = encoded[chunks * self._record :]
        if rest and self._is_plain(rest):
            flat[-rest:] = tail.view("<f4")
            if not np.isfinite(flat[-rest:]).all():
                raise DamagedError(f"no {self.name} vector: a value of its last {rest} is not finite")
        elif rest:
            padded = np.zeros((1, ELEMENTS), np.float32)
            self._read(tail[None, :], padded, chunks, rest)
            flat[-rest:] = padded[0, :rest]
        return flat

    def _read(self, records: Any, values: Any, chunk: int, used: int) -> None:
        try:
            self.read(records, values, chunk, used)
        except DamagedError as error:
            last = chunk + len(records) - 1
            raise DamagedError(f"no {self.name} vector, in chunks {chunk} to {last}: {error}") from None

    def _is_plain(self, rest: int) -> bool:
        """A last chunk of ``rest`` elements travels as float32."""
        return rest < self._fewest or 4 * rest <= self._record
