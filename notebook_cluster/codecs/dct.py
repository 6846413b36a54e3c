"""DeMo's transform (arXiv 2411.19870): of each chunk of 4096, as 64 x 64, the 32 largest coefficients of its cosine
transform, or another number of them.

A record is an exponent, 32 whole numbers of 8 bits and their sorted indices: 69 bytes per chunk, 0.135 bits per
parameter. Matrix products differ between machines in their last bits, so decoding multiplies whole numbers only: the
cosines are rounded to multiples of 2^-22, the coefficients are whole, and every sum stays below 2^53, which float64
holds exactly in whatever order it is added. The power of two that the result is multiplied with is exact as well.
"""

from typing import Any

import numpy as np

from notebook_cluster.codecs.chunked import ELEMENTS, Chunked, in_chunks
from notebook_cluster.codecs.codec import DamagedError, check_finite
from notebook_cluster.codecs.kept import Gaps
from notebook_cluster.codecs.top_k import largest

SIDE = 64
KEEP = 32
MOST = 128
"""Coefficients of a chunk, more than which the sums are not exact."""

_FRACTION = 22
"""Bits of a cosine behind the point: 128 coefficients below 2^7 times two cosines below 2^(22 - 2.5) stay below
2^(7 + 7 + 39) = 2^53."""

_LARGEST = 127
_SMALLEST, _HIGHEST = -80, 120
"""Exponents of 32 coefficients, or fewer. What is smaller than the step vanishes, so that no decoded value is
subnormal; larger ones saturate, so that none is infinite."""


def _cosines() -> Any:
    """The orthonormal DCT-II, float64 (64, 64): row k is frequency k."""
    frequency, place = np.arange(SIDE)[:, None], np.arange(SIDE)[None, :]
    matrix = np.cos(np.pi * (2 * place + 1) * frequency / (2 * SIDE)) * np.sqrt(2 / SIDE)
    matrix[0] = np.sqrt(1 / SIDE)
    return matrix


class Dct(Chunked):
    """Keeps exactly ``keep`` coefficients of each chunk, of equal magnitudes the first ones."""

    def __init__(self, name: str = "dct", keep: int = KEEP) -> None:
        """``keep``: a multiple of 8, at most ``MOST``."""
        self._keep = keep
        self._highest = _HIGHEST - (-(-keep // KEEP) - 1).bit_length()
        self._gaps = Gaps(ELEMENTS, keep)
        super().__init__(name, 1 + keep + self._gaps.size, fewest=keep)
        self._forward = _cosines().astype(np.float32)
        # a cosine is nowhere near halfway between two multiples, so every machine rounds it alike
        self._whole = np.rint(_cosines() * 2.0**_FRACTION)

    def write(self, values: Any, records: Any, chunk: int, used: int) -> None:
        check_finite(values, chunk * ELEMENTS)
        absmax = np.abs(values).max(axis=1, keepdims=True)
        size = np.clip(np.frexp(absmax)[1], -100, 126)
        squares = (values * np.ldexp(np.float32(1), -size)).reshape(-1, SIDE, SIDE)
        coefficients = (self._forward @ squares @ self._forward.T).reshape(-1, ELEMENTS)
        places = largest(np.abs(coefficients), self._keep)
        kept = coefficients.reshape(-1).take(places)
        step = np.frexp(np.abs(kept).max(axis=1, keepdims=True))[1] - 7
        exponent = np.clip(step + size, _SMALLEST, self._highest)
        codes = np.clip(np.rint(np.ldexp(kept, size - exponent)), -_LARGEST, _LARGEST)
        records[:, :1].view(np.int8)[...] = exponent
        records[:, 1 : 1 + self._keep].view(np.int8)[...] = codes
        self._gaps.write(in_chunks(places), records[:, 1 + self._keep :])

    def read(self, records: Any, values: Any, chunk: int, used: int) -> None:
        exponent = records[:, :1].view(np.int8).astype(np.int32)
        if exponent.min() < _SMALLEST or exponent.max() > self._highest:
            raise DamagedError(f"an exponent outside {_SMALLEST} to {self._highest}")
        codes = records[:, 1 : 1 + self._keep].view(np.int8)
        indices = self._gaps.read(records[:, 1 + self._keep :], ELEMENTS)
        whole = np.zeros((len(records), ELEMENTS))
        np.put_along_axis(whole, indices, codes, axis=1)
        squares = self._whole.T @ whole.reshape(-1, SIDE, SIDE) @ self._whole
        np.ldexp(squares.reshape(-1, ELEMENTS), exponent - 2 * _FRACTION, out=values, casting="same_kind")
