"""What is kept of each chunk, on the wire: values, and the sorted indices that they belong to.

Values are bfloat16 each, or two bits each with two levels for a chunk: each value becomes plus or minus one of two
magnitudes, the means of the smaller and of the larger ones. Where the smaller ones end is the split with the least
squared error. The levels are bfloat16: float16 overflows at 1e5 and vanishes at 1e-8.

Indices are Rice codes of the gaps between them, in a field of fixed length for each chunk. A gap is how many elements
are left out before the next kept one. Rice(b) writes ``gap >> b`` in unary (so many zeros, then a one) and the lowest
``b`` bits as they are. All gaps of a chunk add up to at most ``chunk - keep``, so the unary codes need at most
``keep + (chunk - keep >> b)`` bits: with 64 of 4096 and b = 5 at most 190, in 24 bytes. That bound is what makes every
record equally long, so that a run of chunks is a range of bytes. The lowest bits lie in ``b`` planes of ``keep`` bits,
then comes the unary code, which numpy reads for many chunks at once.
"""

from typing import Any, Protocol

import numpy as np

from notebook_cluster.codecs.codec import DamagedError
from notebook_cluster.codecs.dense import from_bfloat16, is_plain, to_bfloat16


class KeptValues(Protocol):
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


# ---- indices -------------------------------------------------------------------------------------------------


class Gaps:
    """``keep`` (a multiple of 8) different indices below ``chunk``, ascending."""

    def __init__(self, chunk: int, keep: int) -> None:
        self._chunk = chunk
        self._keep = keep
        self._bits = max((chunk // keep).bit_length() - 2, 0)
        self._planes = self._bits * keep // 8
        self._unary = -(-(keep + ((chunk - keep) >> self._bits)) // 8)
        self._low = np.uint8 if self._bits <= 8 else np.uint16
        """Holds the lowest bits of a gap."""
        self._small = np.int16 if chunk < 2**15 else np.int32
        """Holds any index."""
        self.size = self._planes + self._unary
        """Bytes for each chunk."""

    def write(self, indices: Any, data: Any) -> None:
        """int64 (chunks, keep) into uint8 (chunks, size)."""
        gaps = indices.astype(self._small)
        gaps[:, 1:] -= gaps[:, :-1] + self._small(1)
        low = gaps.astype(self._low)  # the bits above are not looked at
        for bit in range(self._bits):
            start = bit * self._keep // 8
            plane = np.packbits(low & self._low(1 << bit) != 0, axis=1)
            data[:, start : start + plane.shape[1]] = plane
        gaps >>= self._bits
        gaps += 1
        ones = np.cumsum(gaps, axis=1, dtype=np.int64)
        ones += np.arange(-1, len(gaps) * (8 * self._unary) - 1, 8 * self._unary)[:, None]
        unary = np.zeros((len(gaps), 8 * self._unary), np.uint8)
        unary.ravel()[ones] = 1
        data[:, self._planes :] = np.packbits(unary, axis=1)

    def read(self, data: Any, below: int) -> Any:
        """The indices, int64 (chunks, keep), all of them less than ``below``.

        Raises:
            DamagedError: too few or too many indices, or one that is too large.
        """
        width = 8 * self._unary
        found = np.flatnonzero(np.unpackbits(data[:, self._planes :], axis=1).view(np.bool_))
        if found.size != len(data) * self._keep:
            raise DamagedError(f"{found.size} indices for {len(data)} chunks of {self._keep}")
        ones = found.reshape(-1, self._keep)
        ones -= np.arange(0, len(data) * width, width)[:, None]
        if (ones[:, 0] < 0).any() or (ones[:, -1] >= width).any():
            raise DamagedError(f"a chunk has not {self._keep} indices")
        # before the one with number j there are j ones, and as many zeros as the upper parts of the gaps up to j add
        # up to; an index is the sum of the gaps up to it, and j
        indices = np.left_shift(ones, self._bits, out=ones)
        indices += np.arange(self._keep) * (1 - (1 << self._bits))
        indices += np.cumsum(self._lowest(data), axis=1, dtype=np.int64)
        if (indices[:, -1] >= below).any():
            raise DamagedError(f"index {indices[:, -1].max()} in a chunk of {below} elements")
        return indices

    def _lowest(self, data: Any) -> Any:
        """The lowest bits of all gaps, (chunks, keep)."""
        planes = np.unpackbits(data[:, : self._planes], axis=1)
        low = np.zeros((len(data), self._keep), self._low)
        for bit in reversed(range(self._bits)):
            low += low  # numpy adds many at once, and shifts one
            low |= planes[:, bit * self._keep : (bit + 1) * self._keep]
        return low
