"""PowerSGD (arXiv 1905.13727): each matrix as the product of two thin ones, tensors of one dimension as they are.

Of a matrix M the nodes exchange twice. First ``P = M Q``, whose mean one node makes orthonormal and sends as bytes: the
basis. Then ``Q = M^T basis``, whose mean is also the next round's Q (warm start). What is decoded is ``basis Q^T``: the
mean of the nodes' matrices, projected. Error feedback is the caller's.

Matrix products and QR differ between machines in their last bits, so nothing that nodes must agree on is computed with
them in floating point: the basis is whole multiples of 2^-24, Q is rounded to 24 bits of its largest element, and their
product is a sum of whole numbers below 2^53, which float64 holds exactly in whatever order it is added.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from notebook_cluster.codecs.codec import Buffer, DamagedError, Vector, check_finite, check_size
from notebook_cluster.codecs.random_k import mixed

MAX_RANK = 32
_BASIS_BITS = 24
_FACTOR_BITS = 23
"""With ranks up to 2^5 every sum stays at or below 2^(24 + 23 + 5) = 2^52."""

_SMALLEST_EXPONENT = -100
"""Smaller factors are taken as zeros, so that no decoded value is subnormal."""


class _Matrix(NamedTuple):
    element: int
    rows: int
    columns: int
    first: int
    """Where P (or, with ``rank`` 0, the tensor itself) begins in the first exchange."""
    second: int
    """Where Q begins in the second exchange."""
    rank: int


class PowerSgd:
    """The parts of PowerSGD for one flat vector of tensors; every method is a pure function.

    ``first`` elements go into the first exchange (float32: P of every matrix, and the tensors that are sent whole),
    ``second`` into the second one (float32: Q), ``basis_size`` bytes from one node to all in between. A matrix whose
    parts would need as much as itself is sent whole.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], rank: int = 4) -> None:
        """
        Args:
            shapes: of the tensors, in the order in which they lie in the vector. The first dimension is rows, the
                others columns.
            rank: 1 to 32; higher keeps more.

        Raises:
            ValueError: rank out of range.
        """
        if not 1 <= rank <= MAX_RANK:
            raise ValueError(f"rank={rank}: use a whole number from 1 to {MAX_RANK}")
        self._matrices: list[_Matrix] = []
        self.count = self.first = self.second = 0
        basis = 0
        for shape in shapes:
            rows, elements = (shape[0] if len(shape) > 1 else 1), prod(shape)
            columns = elements // rows if rows else 0
            own = rank if rank * (2 * rows + columns) < elements and rank <= rows else 0
            self._matrices.append(_Matrix(self.count, rows, columns, self.first, self.second, own))
            self.count += elements
            self.first += own * rows if own else elements
            self.second += own * columns
            basis += own * rows
        self.basis_size = 4 * basis
        self.size = 4 * (self.first + self.second) + self.basis_size
        """Bytes of a round."""

    def start(self, seed: int = 0) -> Vector:
        """The Q that all nodes begin with: float32 (second,), uniform in -1 to 1, the same bits for the same seed."""
        bits = mixed(np.arange(self.second, dtype=np.uint64), seed) >> np.uint64(40)
        start: Vector = bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
        return start

    def project(self, flat: Vector, factor: Vector) -> Vector:
        """What this node adds to the first exchange: float32 (first,).

        Args:
            flat: float32 (count,).
            factor: Q, float32 (second,).

        Raises:
            NotFiniteError: ``flat`` holds NaN or infinity.
        """
        if flat.size:
            check_finite(flat, 0)
        sent = np.empty(self.first, np.float32)
        for matrix in self._matrices:
            whole = self._whole(matrix, flat)
            if matrix.rank:
                left = whole @ self._right(matrix, factor)
                sent[matrix.first : matrix.first + left.size] = left.ravel()
            else:
                sent[matrix.first : matrix.first + whole.size] = whole.ravel()
        return sent

    def orthogonal(self, mean: Vector) -> bytes:
        """The basis, by the node that sends it to all.

        Args:
            mean: of the first exchange, float32 (first,).

        Raises:
            NotFiniteError: ``mean`` holds NaN or infinity.
        """
        if mean.size:
            check_finite(mean, 0)
        parts = []
        for matrix in self._low_rank():
            left = mean[matrix.first : matrix.first + matrix.rows * matrix.rank].astype(np.float64)
            # a column's length does not matter, and far apart lengths would be lost in the sums
            left = left.reshape(matrix.rows, matrix.rank)
            left /= np.maximum(np.abs(left).max(axis=0), np.finfo(np.float64).tiny)
            basis, _ = np.linalg.qr(left)
            parts.append(np.rint(basis * 2.0**_BASIS_BITS).astype("<i4").tobytes())
        return b"".join(parts)

    def factors(self, flat: Vector, basis: Buffer) -> Vector:
        """What this node adds to the second exchange, Q: float32 (second,).

        Raises:
            DamagedError: ``basis`` is not one.
        """
        sent = np.empty(self.second, np.float32)
        for matrix, left in self._bases(basis):
            right = self._whole(matrix, flat).T @ (left * 2.0**-_BASIS_BITS).astype(np.float32)
            sent[matrix.second : matrix.second + right.size] = right.ravel()
        return sent

    def decode(self, mean: Vector, basis: Buffer, factor: Vector) -> Vector:
        """The vector, float32 (count,), the same bits on every machine.

        Args:
            mean: of the first exchange, for the tensors that were sent whole.
            basis: as it was sent.
            factor: mean of the second exchange.

        Raises:
            DamagedError: ``basis`` is not one, or a factor is not finite.
        """
        flat = np.empty(self.count, np.float32)
        for matrix in self._matrices:
            if not matrix.rank:
                elements = matrix.rows * matrix.columns
                flat[matrix.element : matrix.element + elements] = mean[matrix.first : matrix.first + elements]
        for matrix, left in self._bases(basis):
            right = self._right(matrix, factor)
            largest = np.abs(right).max()
            if not np.isfinite(largest):
                raise DamagedError("no powersgd factor: a value is not finite")
            exponent = int(np.frexp(largest)[1]) - _FACTOR_BITS
            whole = np.rint(np.ldexp(right.astype(np.float64), -exponent))
            if exponent < _SMALLEST_EXPONENT:
                whole[...] = 0
            product = np.ldexp(left @ whole.T, exponent - _BASIS_BITS)
            largest = np.finfo(np.float32).max
            self._whole(matrix, flat)[...] = np.clip(product, -largest, largest, out=product)
        return flat

    def _low_rank(self) -> Iterator[_Matrix]:
        return (matrix for matrix in self._matrices if matrix.rank)

    def _whole(self, matrix: _Matrix, flat: Vector) -> Any:
        """A view of the matrix in the vector."""
        elements = matrix.rows * matrix.columns
        return flat[matrix.element : matrix.element + elements].reshape(matrix.rows, matrix.columns)

    def _right(self, matrix: _Matrix, factor: Vector) -> Any:
        elements = matrix.columns * matrix.rank
        return factor[matrix.second : matrix.second + elements].reshape(matrix.columns, matrix.rank)

    def _bases(self, basis: Buffer) -> Iterator[tuple[_Matrix, Any]]:
        """Each matrix with its basis, whole numbers in float64 (rows, rank)."""
        check_size("powersgd", basis, self.basis_size)
        whole = np.frombuffer(basis, "<i4")
        limit = 2**_BASIS_BITS
        if whole.size and (whole.max() > limit or whole.min() < -limit):
            raise DamagedError("no powersgd basis: a number above 1")
        start = 0
        for matrix in self._low_rank():
            elements = matrix.rows * matrix.rank
            yield matrix, whole[start : start + elements].reshape(matrix.rows, matrix.rank).astype(np.float64)
            start += elements
