"""One contribution on the wire: trainable parameters in the job's codec, then normalisation buffers as float32.

Buffers (a BatchNorm's running mean and variance) must not go through a lossy codec: a variance of 1 came back as
-0.026. To the rest of the program both parts are one run of blocks and one run of bytes, though the blocks of the
parameters may be longer (4096 elements where a codec keeps some of them) than the 256 elements of the buffers'.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from notebook_cluster.codecs.chunked import KeepsSome
from notebook_cluster.codecs.codec import Buffer, Codec, Memory, NotFiniteError, Vector, block_count
from notebook_cluster.codecs.dense import Float32
from notebook_cluster.codecs.random_k import RandomK
from notebook_cluster.codecs.registry import get_codec

_GROUP = 256 * 1024
"""Elements."""


class _Part(NamedTuple):
    codec: Codec
    elements: int
    element: int
    block: int
    byte: int
    """First element, block and byte of this part."""
    keeps_some: KeepsSome | None


class Group(NamedTuple):
    """A run of blocks whose elements stay in the processor's cache."""

    first: int
    end: int
    bytes: slice
    elements: slice
    """Both counted from those of the first block asked for."""
    are_buffers: bool


class WireFormat:
    """``codec``, or the one of that name, for the first ``parameters`` elements, float32 for the ``buffers`` behind
    them."""

    def __init__(self, codec: str | Codec, parameters: int, buffers: int = 0) -> None:
        self.codec = get_codec(codec) if isinstance(codec, str) else codec
        self.parameters = parameters
        self.buffers = buffers
        self.count = parameters + buffers
        self.size = self.codec.size(parameters) + 4 * buffers
        self.blocks = block_count(parameters, self.codec.block) + block_count(buffers)

    @property
    def draws(self) -> bool:
        """Which elements travel is drawn at random, the same ones in all contributions made for one round."""
        return isinstance(self.codec, RandomK)

    @property
    def is_float32(self) -> bool:
        """The bytes are those of the vector: little-endian float32, and nothing is left out."""
        return isinstance(self.codec, Float32)

    def drawn(self, number: int) -> "WireFormat":
        """How contributions made for round ``number`` are encoded. Whoever decodes need not know it."""
        if not isinstance(self.codec, RandomK):
            return self
        return WireFormat(self.codec.drawn(number), self.parameters, self.buffers)

    @cached_property
    def _parts(self) -> tuple[_Part, _Part]:
        keeps_some = self.codec if isinstance(self.codec, KeepsSome) else None
        first = _Part(self.codec, self.parameters, 0, 0, 0, keeps_some)
        second = _Part(
            get_codec("float32"),
            self.buffers,
            self.parameters,
            block_count(self.parameters, self.codec.block),
            self.codec.size(self.parameters),
            None,
        )
        return first, second

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        """Where blocks ``start`` <= b < ``stop`` lie in the encoded bytes."""
        return self._byte(start), self._byte(stop)

    def element_range(self, start: int, stop: int) -> tuple[int, int]:
        """Where blocks ``start`` <= b < ``stop`` lie in the vector."""
        return self._element(start), self._element(stop)

    @property
    def encoded_at_a_time(self) -> int:
        """Elements for each of :meth:`groups` to be encoded: where some are kept, the calls of numpy for these take
        longer than bringing the others into the cache twice."""
        return _GROUP if self._parts[0].keeps_some is None else 4 * _GROUP

    @property
    def largest_group(self) -> int:
        """Elements, at most."""
        return min(self.count, _GROUP)

    def groups(self, start: int = 0, stop: int | None = None, elements: int = _GROUP) -> Iterator[Group]:
        """Blocks ``start`` to ``stop`` in groups of ``elements`` or fewer: decoded one after the other they need no
        memory of the vector's size. None has both parameters and buffers."""
        stop = self.blocks if stop is None else stop
        byte, element = self._byte(start), self._element(start)
        for part in self._parts:
            step = max(1, elements // part.codec.block)
            blocks = block_count(part.elements, part.codec.block)
            for first in range(max(start, part.block), min(stop, part.block + blocks), step):
                end = min(first + step, stop, part.block + blocks)
                yield Group(
                    first,
                    end,
                    slice(self._byte(first) - byte, self._byte(end) - byte),
                    slice(self._element(first) - element, self._element(end) - element),
                    part.element > 0 or not self.parameters,
                )

    def encode(self, flat: Vector, start: int = 0, stop: int | None = None) -> memoryview:
        """The bytes of blocks ``start`` to ``stop``; ``flat`` (float32) holds exactly their elements.

        Raises:
            NotFiniteError: a value is NaN or infinite.
        """
        return self._encode(flat, start, stop, lambda codec, values: codec.encode(values))

    def encode_in(self, memory: Memory, flat: Vector) -> memoryview:
        """:meth:`encode` of all, in ``memory`` (of so many bytes).

        Raises:
            NotFiniteError: as encode.
        """
        data = memory(self.size)
        for group in self.groups():
            data[group.bytes] = self.encode(flat[group.elements], group.first, group.end)
        return data.data.toreadonly()

    def encode_from(self, flat: Vector, start: int = 0, stop: int | None = None) -> memoryview:
        """:meth:`encode`, and what the bytes say is taken away from ``flat``: the error feedback is left.

        Raises:
            NotFiniteError: as encode; ``flat`` may be half done.
        """
        return self._encode(flat, start, stop, _encode_from)

    def _encode(
        self, flat: Vector, start: int, stop: int | None, encode: Callable[[Codec, Vector], memoryview]
    ) -> memoryview:
        pieces, position = [], 0
        for part, count in self._cut(start, self.blocks if stop is None else stop):
            codec = part.codec.beginning(start) if isinstance(part.codec, RandomK) else part.codec
            with _naming(part):
                pieces.append(encode(codec, flat[position : position + count]))
            position += count
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def decode(self, data: Buffer, start: int = 0, stop: int | None = None) -> Vector:
        """The float32 values of blocks ``start`` to ``stop`` from exactly their bytes; may be a read-only view.

        Raises:
            ValueError: another number of bytes.
        """
        stop = self.blocks if stop is None else stop
        pieces, view = [], self._checked(data, start, stop)
        for part, count in self._cut(start, stop):
            size = part.codec.size(count)
            pieces.append(part.codec.decode(view[:size], count))
            view = view[size:]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.empty(0, np.float32)

    def decode_into(self, data: Buffer, out: Vector, start: int = 0, stop: int | None = None) -> None:
        """:meth:`decode` into ``out``, which has exactly as many elements.

        Raises:
            ValueError: another number of bytes.
        """
        stop = self.blocks if stop is None else stop
        view = self._checked(data, start, stop)
        for group in self.groups(start, stop):
            out[group.elements] = self.decode(view[group.bytes], group.first, group.end)

    def keeps_some(self, group: Group) -> bool:
        """Only some elements of ``group`` travel: the others are 0."""
        return self._part_of(group.first).keeps_some is not None

    def kept(self, data: Buffer, group: Group) -> tuple[NDArray[np.int64], Vector]:
        """(places, values) of the elements of ``group``, from exactly its bytes: the places count from its first
        element, and the elements that are not named are 0.

        Raises:
            ValueError: as of :meth:`decode`.
        """
        keeps_some, count = self._part_of(group.first).keeps_some, group.elements.stop - group.elements.start
        if keeps_some is not None:
            return keeps_some.entries(data, count)
        return np.arange(count), self.decode(data, group.first, group.end)

    def kept_of_all(
        self, contributions: Sequence[Buffer], group: Group
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """:meth:`kept` of each of ``contributions``, a row for each: all keep as many. All at once where that is
        possible: the work on a few thousand kept elements takes no longer than calling numpy for it.

        Raises:
            ValueError: as of :meth:`decode`.
        """
        part, count = self._part_of(group.first), group.elements.stop - group.elements.start
        if part.keeps_some is None or count % part.codec.block:
            kept = [self.kept(data, group) for data in contributions]
            return np.stack([places for places, _ in kept]), np.stack([values for _, values in kept])
        places, values = part.keeps_some.entries(b"".join(contributions), len(contributions) * count)
        places = places.reshape(len(contributions), -1)
        places -= np.arange(0, len(contributions) * count, count)[:, None]
        return places, values.reshape(len(contributions), -1)

    def places(self, data: Buffer, start: int, stop: int) -> bytes:
        """What tells which elements of blocks ``start`` to ``stop`` travel, where that is drawn: where it is equal the
        same ones do.

        Raises:
            ValueError: as of :meth:`decode`.
        """
        view, told = self._checked(data, start, stop), b""
        for part, count in self._cut(start, stop):
            size = part.codec.size(count)
            told += part.codec.draws(view[:size], count) if isinstance(part.codec, RandomK) else b""
            view = view[size:]
        return told

    def with_values(self, data: Buffer, values: Vector, group: Group) -> Buffer:
        """The bytes of ``group`` with other ``values`` (finite) at the places of ``data``, in the order of
        :meth:`kept`."""
        codec = self._part_of(group.first).codec
        if isinstance(codec, RandomK):
            return codec.with_values(data, values, group.elements.stop - group.elements.start)
        return codec.encode(values)

    def _checked(self, data: Buffer, start: int, stop: int) -> memoryview:
        """``data``, which has as many bytes as blocks ``start`` to ``stop``."""
        view, (low, high) = memoryview(data), self.byte_range(start, stop)
        if len(view) != high - low:
            raise ValueError(
                f"{len(view)} bytes do not fit blocks {start} to {stop} of a {self.codec.name} contribution"
            )
        return view

    def _cut(self, start: int, stop: int) -> list[tuple[_Part, int]]:
        """(part, number of its elements) in blocks ``start`` to ``stop``."""
        first, last = self.element_range(start, stop)
        cut = []
        for part in self._parts:
            count = min(last, part.element + part.elements) - max(first, part.element)
            if count > 0:
                cut.append((part, count))
        return cut

    def _part_of(self, block: int) -> _Part:
        first, second = self._parts
        return second if block >= second.block else first

    def _element(self, block: int) -> int:
        part = self._part_of(block)
        return part.element + min((block - part.block) * part.codec.block, part.elements)

    def _byte(self, block: int) -> int:
        part = self._part_of(block)
        return part.byte + part.codec.size(min((block - part.block) * part.codec.block, part.elements))


@contextlib.contextmanager
def _naming(part: _Part) -> Iterator[None]:
    """An error says which part of the model it is about."""
    try:
        yield
    except NotFiniteError:
        kind = "parameters" if part.block == 0 else "buffers"
        text = f"NaN or infinity among the {kind}: lower the learning rate or clip gradients"
        raise NotFiniteError(text) from None


def _encode_from(codec: Codec, flat: Vector) -> memoryview:
    if isinstance(codec, KeepsSome):
        return codec.encode_from(flat)
    data = codec.encode(flat)
    flat -= codec.decode(data, flat.size)
    return data
