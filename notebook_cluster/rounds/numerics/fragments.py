"""How a model's flat vector is cut: in fragments that are exchanged in turn, and for DeMo in squares. Pure numpy.

The trainable part is cut into stripes of whole codec blocks, and stripe ``i`` belongs to fragment ``i % count``: as in
the paper's strided pattern (streaming DiLoCo, arXiv 2501.18512) each fragment has a part of every region of the model,
and all have nearly the same size. The running statistics of normalisation layers go with the last fragment. One
fragment is the vector itself.

DeMo (arXiv 2411.19870) transforms each parameter by itself, in squares of 64 x 64 elements, each of which becomes one
chunk of the codec: neighbours in a matrix, along both sides, have related momenta, those of different parameters have
not. A matrix is cut into squares, padded with zeros at its edges; of more than two dimensions all but the first become
one. A vector, or a matrix with less than 16 rows or columns, is cut every 4096 elements. Parameters of less than 1024
elements share chunks behind all others, so no padding makes a model larger on the wire than it is.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from notebook_cluster.codecs import Float32, Vector, WireFormat, get_codec
from notebook_cluster.protocol.rounds import fragment_of
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.momentum import FLOAT32, MEAN
from notebook_cluster.rounds.numerics.outer import Descent, state_hash
from notebook_cluster.rounds.numerics.vectors import TensorLayout

STRIPE = 64 * 1024
"""Most elements of a stripe."""

_LEAST_STRIPES = 8
"""Stripes of each fragment, where the model is large enough."""


class Fragments:
    """``count`` fragments of ``parameters`` elements in codec ``codec``, then ``buffers`` elements in float32."""

    def __init__(
        self,
        codec: str,
        parameters: int,
        buffers: int = 0,
        count: int = 1,
        *,
        over_senders: bool = False,
        gradients: bool = False,
        central_optimizer: bool = False,
        exact_every: int = 0,
        tiles: "Tiles | None" = None,
        descent: Descent | None = None,
        momentum_dtype: str = FLOAT32,
    ) -> None:
        """``over_senders``: a coordinate is averaged over those who sent it, not over all (:mod:`.weighted_mean`).
        ``gradients``: rounds carry gradients. Their mean is what momentum holds; theta is what every node's own
        optimiser made of it. ``central_optimizer``: one node's optimiser makes its step with their mean, and theta, in
        float32, is what all get instead of the mean. ``exact_every``: in every round whose number it divides the codec
        is float32; 0: never.
        ``descent``: rounds carry momenta, and this is made of their mean; ``tiles``: the order of their elements on the
        wire. Both need one fragment.
        ``momentum_dtype``: how the outer momentum is kept (:mod:`.momentum`).

        Raises:
            ValueError: more fragments than the model has codec blocks; says how many it can have.
        """
        self.codec = get_codec(codec)
        self.count = count
        self.all_gather = not (central_optimizer or self.codec.encodes_means)
        """Owners of slices send the contributions on instead of their mean (:mod:`.weighted_mean`)."""
        self.over_senders = over_senders
        self.gradients = gradients
        self.central_optimizer = central_optimizer
        self.size = parameters + buffers
        """Elements of the whole vector."""
        self.descent = descent
        self.momentum_dtype = momentum_dtype
        self._tiles = tiles
        self._ranges = _stripes(parameters, self.codec.block, count)
        if not all(self._ranges):
            blocks = -(-parameters // self.codec.block)
            raise ValueError(
                f"fragments={count}: this model has {parameters} parameters, which codec {codec!r} sends in {blocks} "
                f"blocks of {self.codec.block}: use fragments={blocks} or fewer"
            )
        if buffers:
            self._ranges[-1].append(slice(parameters, self.size))
        self.wires: tuple[WireFormat, ...] = tuple(
            WireFormat(self.codec, tiles.size if tiles is not None else size - tail, tail)
            for size, tail in zip(self._sizes(), [0] * (count - 1) + [buffers], strict=True)
        )
        """How each fragment is sent."""
        self._exact_every, self._exact = exact_every, WireFormat(Float32(self.codec.block), parameters, buffers)

    def of_round(self, round: int) -> int:
        """The fragment that round ``round`` exchanges."""
        return fragment_of(round, self.count)

    def wire(self, round: int) -> WireFormat:
        """How the fragment of round ``round`` is sent."""
        if self.is_exact(round):
            return self._exact
        return self.wires[self.of_round(round)]

    def made_for(self, round: int) -> WireFormat:
        """How a contribution made for round ``round`` is encoded."""
        return self.wire(round).drawn(round)

    def result(self, round: int) -> WireFormat:
        """How what the owners of slices made of the contributions is sent."""
        return self._exact if self.central_optimizer else self.wire(round)

    @property
    def advances(self) -> bool:
        """theta is what each node's own optimiser makes of a round, after its COMMIT."""
        return self.gradients and not self.central_optimizer

    @property
    def keeps(self) -> str:
        """What a state has beside theta: the outer momentum as this, or the ``mean`` of gradients. Kept otherwise it is
        another state, with another hash."""
        return MEAN if self.advances else self.momentum_dtype

    @property
    def by_slice(self) -> bool:
        """A slice of the next state depends on that slice of the means alone."""
        return self.count == 1 and self.descent is None and not self.central_optimizer

    def is_exact(self, round: int) -> bool:
        """True for the rounds that are sent in float32."""
        return self._exact_every > 0 and round % self._exact_every == 0

    def changed(self, before: int, after: int) -> list[int]:
        """The fragments that differ between the states after rounds ``before`` and ``after``."""
        if not before < after < before + self.count:
            return list(range(self.count))
        return [self.of_round(round) for round in range(before + 1, after + 1)]

    def state_hash(self, theta: Vector, momentum: Vector) -> str:
        """What nodes compare after each round; the mean only where each has an optimiser of its own."""
        return state_hash(theta[:0] if self.advances else theta, momentum)

    def take(self, vector: Vector, fragment: int) -> Vector:
        """The elements of ``fragment``: a new vector, or ``vector`` itself where there is only one. Of a momentum that
        is not kept there are none."""
        if self.count == 1:
            return vector
        if not vector.size:
            return vector.copy()
        ranges = self._ranges[fragment]
        taken = vectors.empty(sum(part.stop - part.start for part in ranges), vector.dtype)
        return np.concatenate([vector[part] for part in ranges], out=taken)

    def ranges(self, fragment: int) -> list[slice]:
        """Where the elements of ``fragment`` lie in the vector, in their order."""
        return self._ranges[fragment]

    def put(self, vector: Vector, fragment: int, elements: Vector) -> None:
        """Write ``elements``, as :meth:`take` gives them, to their places in ``vector``."""
        position = 0
        for part in self._ranges[fragment]:
            size = part.stop - part.start
            vector[part] = elements[position : position + size]
            position += size

    def stripes(self, fragment: int, pairs: Sequence[tuple[Vector, Vector]]) -> Iterator[list[Vector]]:
        """In order of the elements: of each pair (whole vector, elements of ``fragment`` as :meth:`take` gives them)
        what is there when those are put to their places."""
        ranges = sorted((part.start, part.stop, index) for index, parts in enumerate(self._ranges) for part in parts)
        position = 0
        for start, stop, index in ranges:
            if index != fragment:
                yield [whole[start:stop] for whole, _ in pairs]
                continue
            yield [elements[position : position + stop - start] for _, elements in pairs]
            position += stop - start

    def pack(self, elements: Vector) -> Vector:
        """Elements of a fragment in the order in which they are sent."""
        return elements if self._tiles is None else self._tiles.pack(elements)

    def unpack(self, sent: Vector) -> Vector:
        """The inverse of :meth:`pack`."""
        return sent if self._tiles is None else self._tiles.unpack(sent)

    def _sizes(self) -> list[int]:
        return [sum(part.stop - part.start for part in ranges) for ranges in self._ranges]


def _stripes(parameters: int, block: int, count: int) -> list[list[slice]]:
    """For each fragment the ranges that it consists of; only the last range of all may be no whole number of blocks."""
    if count == 1:
        return [[slice(0, parameters)]]
    blocks = -(-parameters // block)
    width = block * max(1, min(STRIPE // block, blocks // (count * _LEAST_STRIPES)))
    ranges: list[list[slice]] = [[] for _ in range(count)]
    for index, start in enumerate(range(0, parameters, width)):
        ranges[index % count].append(slice(start, min(start + width, parameters)))
    return ranges


SIDE = 64
CHUNK = SIDE * SIDE
_LEAST_SIDE = 16
_LEAST_ELEMENTS = 1024


class _Tile(NamedTuple):
    """One parameter: ``rows`` x ``columns`` from element ``start`` of the vector on, and from ``place`` on the wire;
    ``rows`` 0: as it is."""

    start: int
    elements: int
    place: int
    rows: int = 0
    columns: int = 0


class Tiles:
    """The order of ``shapes``, parameters that follow each other in a vector, on the wire. Whatever is behind them in
    the vector stays behind them."""

    def __init__(self, shapes: list[list[int]]) -> None:
        self._tiles: list[_Tile] = []
        starts, position, place = [], 0, 0
        for shape in shapes:
            starts.append(position)
            position += math.prod(shape)
        self.elements = position
        for shape, start in zip(shapes, starts, strict=True):
            elements = math.prod(shape)
            if elements >= _LEAST_ELEMENTS:
                rows, columns = _sides(shape, elements)
                self._tiles.append(_Tile(start, elements, place, rows, columns))
                place += _squares(rows) * _squares(columns) * CHUNK if rows else -(-elements // CHUNK) * CHUNK
        for shape, start in zip(shapes, starts, strict=True):
            elements = math.prod(shape)
            if 0 < elements < _LEAST_ELEMENTS:
                self._tiles.append(_Tile(start, elements, place))
                place += elements
        self.size = place
        """Elements of the parameters on the wire, with their padding."""

    def pack(self, vector: Vector) -> Vector:
        """``vector`` in the order of the wire: a new float32 vector, 0 where it is padded."""
        behind = vector.size - self.elements
        packed = np.zeros(self.size + behind, np.float32)
        packed[self.size :] = vector[self.elements :]
        for tile in self._tiles:
            values = vector[tile.start : tile.start + tile.elements]
            if not tile.rows:
                packed[tile.place : tile.place + tile.elements] = values
                continue
            high, wide = _squares(tile.rows), _squares(tile.columns)
            padded = np.zeros((high * SIDE, wide * SIDE), np.float32)
            padded[: tile.rows, : tile.columns] = values.reshape(tile.rows, tile.columns)
            squares = packed[tile.place : tile.place + padded.size].reshape(high, wide, SIDE, SIDE)
            squares[...] = padded.reshape(high, SIDE, wide, SIDE).swapaxes(1, 2)
        return packed

    def unpack(self, packed: Vector) -> Vector:
        """The inverse of :meth:`pack`; what is in the padding is left out."""
        behind = packed.size - self.size
        vector = np.empty(self.elements + behind, np.float32)
        vector[self.elements :] = packed[self.size :]
        for tile in self._tiles:
            values = vector[tile.start : tile.start + tile.elements]
            if not tile.rows:
                values[...] = packed[tile.place : tile.place + tile.elements]
                continue
            high, wide = _squares(tile.rows), _squares(tile.columns)
            squares = packed[tile.place : tile.place + high * wide * CHUNK].reshape(high, wide, SIDE, SIDE)
            padded = squares.swapaxes(1, 2).reshape(high * SIDE, wide * SIDE)
            values.reshape(tile.rows, tile.columns)[...] = padded[: tile.rows, : tile.columns]
        return vector


def tiles_of(layout: TensorLayout) -> Tiles:
    """The order of a model's trainable parameters on the wire."""
    trained = layout.size - layout.buffers
    return Tiles([shape for (_, shape, _), start in zip(layout.schema, layout.starts, strict=True) if start < trained])


def _sides(shape: list[int], elements: int) -> tuple[int, int]:
    """Rows and columns of the matrix that is cut into squares; (0, 0): it is taken as a vector."""
    if len(shape) < 2:
        return 0, 0
    rows = shape[0]
    columns = elements // rows
    return (rows, columns) if min(rows, columns) >= _LEAST_SIDE else (0, 0)


def _squares(side: int) -> int:
    return -(-side // SIDE)
