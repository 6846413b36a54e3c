"""Values of kept elements on the wire: bfloat16 each, or two bits each with two levels for a chunk.

Two levels: each value becomes plus or minus one of two magnitudes, the means of the smaller and of the larger ones.
Where the smaller ones end is the split with the least squared error. The levels are bfloat16: float16 overflows at
1e5 and vanishes at 1e-8.
"""

from typing import Any, Protocol

import numpy as np

from notebook_cluster.codecs.bfloat16 import from_bfloat16, is_plain, to_bfloat16
from notebook_cluster.codecs.codec import DamagedError


class Values(Protocol):
    """How the kept values of a chunk are written; arrays are (chunks, keep) and (chunks, size)."""

    @property
    def size(self) -> int:
        """Bytes for each chunk."""

    def write(self, values: Any, data: Any) -> Any:
        """float32 into uint8; what will be read of it."""

    def read(self, data: Any) -> Any:
        """float32.

        Raises:
            DamagedError: a number that is not finite or is subnormal.
        """


class Shortened:
    """bfloat16 for each of ``keep`` values."""

    def __init__(self, keep: int) -> None:
        self.size = 2 * keep

    def write(self, values: Any, data: Any) -> Any:
        short = to_bfloat16(values)
        data[...] = short.view(np.uint8)
        return from_bfloat16(short)

    def read(self, data: Any) -> Any:
        return from_bfloat16(_checked(data))


class TwoLevels:
    """``[low][high]`` in bfloat16, then a bit for each of ``keep`` signs and for each choice of the high level."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self.size = 4 + keep // 4

    def write(self, values: Any, data: Any) -> Any:
        magnitudes = np.abs(values)
        levels = to_bfloat16(_two_means(magnitudes))
        low, high = np.split(from_bfloat16(levels).astype(np.float64), 2, axis=1)
        negative, upper = values < 0, magnitudes > (low + high) / 2
        data[:, :4] = levels.view(np.uint8)
        data[:, 4 : 4 + self._keep // 8] = np.packbits(negative, axis=1)
        data[:, 4 + self._keep // 8 :] = np.packbits(upper, axis=1)
        return _of_levels(levels, negative, upper)

    def read(self, data: Any) -> Any:
        levels = _checked(data[:, :4])
        codes = np.unpackbits(data[:, 4:], axis=1)
        return _of_levels(levels, codes[:, : self._keep], codes[:, self._keep :])


def _of_levels(levels: Any, negative: Any, upper: Any) -> Any:
    """float32 (chunks, keep): the first or the second of ``levels``, bfloat16 bits (chunks, 2), with a sign."""
    low, high = levels[:, :1], levels[:, 1:]
    short = np.multiply(upper, high - low, dtype="<u2")  # modulo 2^16
    short += low
    short |= np.left_shift(negative, np.uint16(15), dtype="<u2")
    return from_bfloat16(short)


def _two_means(magnitudes: Any) -> Any:
    """float32 (chunks, 2): the means below and above the best split; the second is 0 where one level does."""
    keep = magnitudes.shape[1]
    sums = np.cumsum(np.sort(magnitudes, axis=1), axis=1, dtype=np.float64)
    low = np.arange(1, keep + 1)
    rest = sums[:, -1:] - sums
    high = np.maximum(keep - low, 1)
    # the squared error is a constant less the sum of count * mean^2
    best = np.argmax(sums * (sums / low) + rest * (rest / high), axis=1)[:, None]
    means = [np.take_along_axis(part, best, axis=1) / count[best] for part, count in ((sums, low), (rest, high))]
    return np.concatenate(means, axis=1).astype(np.float32)


def _checked(data: Any) -> Any:
    """uint8 (chunks, 2n) as bfloat16 bits (chunks, n)."""
    short = np.ascontiguousarray(data).view("<u2")
    if not is_plain(short).all():
        raise DamagedError("a value that is not finite, or subnormal")
    return short
