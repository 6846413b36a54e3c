"""A model's parameters as squares of 64 x 64 elements, each of which becomes one chunk of the codec. Pure numpy.

DeMo (arXiv 2411.19870) transforms each parameter by itself: neighbours in a matrix, along both sides, have related
momenta, those of different parameters have not. A matrix is cut into squares, padded with zeros at its edges; of more
than two dimensions all but the first become one. A vector, or a matrix with less than 16 rows or columns, is cut every
4096 elements. Parameters of less than 1024 elements share chunks behind all others, so no padding makes a model larger
on the wire than it is.
"""

import math
from typing import NamedTuple

import numpy as np

from notebook_cluster.codecs import Vector
from notebook_cluster.rounds.numerics.layout import TensorLayout

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
