"""fp16, int8, int4 and e3m0 with one float32 scale per block of 256: a record is the scale, then the codes.

Symmetric: ``value = scale * code``, and the block's largest magnitude, absmax, becomes the largest code. fp16 codes are
``value / absmax``, so neither 1e5 overflows nor 1e-8 vanishes. A block whose scale or smallest values would be
subnormal is sent as zeros: machines differ in whether they flush subnormals. A last block of one element travels as
plain float32, else it would be longer than that.

Four-bit codes are packed two per byte, the first in the low half. int4 is ``code + 8`` with codes from -7 to 7. e3m0 is
a sign bit and three bits of exponent (as in arXiv 2501.18512): 0 or a power of two from 1 to 64, nearest, upwards
from halfway. Reading is exact: codes are whole numbers (fp16: 11 bits), and the product with the scale is one rounding.
"""

from typing import Any, Protocol

import numpy as np

from notebook_cluster.codecs.codec import BLOCK, CHUNK, Buffer, Vector, check_size, not_finite

_BLOCKS = CHUNK // BLOCK
"""Blocks worked on at a time."""

SMALLEST_NORMAL = np.float32(2.0**-126)


class BlockCodes(Protocol):
    """How scaled values are written. Arrays are (blocks, elements) or (blocks, bytes), rows of any stride."""

    @property
    def largest(self) -> float:
        """What the largest value of a block becomes."""

    @property
    def smallest_scale(self) -> np.float32:
        """Times the smallest code above 0 it is still no subnormal number, which machines may flush to zero."""

    def size(self, elements: int) -> int:
        """Bytes of the codes of a block."""

    def write(self, scaled: Any, data: Any) -> None:
        """float32 values of at most ``largest`` into uint8 ``data``; ``scaled`` is overwritten."""

    def read(self, data: Any, values: Any) -> None:
        """uint8 ``data`` into float32 ``values``."""


class Cast:
    """A numpy type of its own for each code: int8 rounds to the nearest, halves to even."""

    def __init__(self, code: str, largest: float, smallest: float) -> None:
        """``code``: name of the type; ``smallest``: its smallest number above 0."""
        self.code = np.dtype(code)
        self.largest = largest
        self.smallest_scale = np.float32(SMALLEST_NORMAL / smallest)

    def size(self, elements: int) -> int:
        return elements * self.code.itemsize

    def write(self, scaled: Any, data: Any) -> None:
        if self.code.kind == "i":
            np.rint(scaled, out=scaled)
        np.copyto(data.view(self.code), scaled, casting="unsafe")

    def read(self, data: Any, values: Any) -> None:
        np.copyto(values, data.view(self.code))


class Int4:
    """Whole numbers from -7 to 7, halves to even."""

    largest = 7.0
    smallest_scale = SMALLEST_NORMAL

    def size(self, elements: int) -> int:
        return -(-elements // 2)

    def write(self, scaled: Any, data: Any) -> None:
        np.rint(scaled, out=scaled)
        scaled += np.float32(8)
        codes = _room_for_pairs(scaled, 8)
        np.copyto(codes[:, : scaled.shape[1]], scaled, casting="unsafe")
        _pack(codes, data)

    def read(self, data: Any, values: Any) -> None:
        pairs = data.astype("<u2")
        pairs |= pairs << np.uint16(4)
        pairs &= np.uint16(0x0F0F)
        codes = pairs.view(np.uint8)
        codes -= np.uint8(8)  # modulo 256: as int8 it is -7 to 7
        np.copyto(values, codes.view(np.int8)[:, : values.shape[1]])


class E3m0:
    """0, 1, 2, 4 ... 64 with a sign: relative precision is the same for large and small values of a block."""

    largest = 64.0
    smallest_scale = SMALLEST_NORMAL

    def size(self, elements: int) -> int:
        return -(-elements // 2)

    def write(self, scaled: Any, data: Any) -> None:
        bits = scaled.view("<u4")
        codes = _room_for_pairs(scaled, 0)
        used = codes[:, : scaled.shape[1]]
        sign = (bits >> np.uint32(28)).astype(np.uint8)
        sign &= np.uint8(8)
        np.abs(scaled, out=scaled)
        one = scaled >= np.float32(0.5)
        # half of the step between two powers of two, then the exponent alone: 1 has 127 and becomes code 1
        bits += np.uint32(0x0040_0000)
        bits >>= np.uint32(23)
        np.maximum(bits, np.uint32(126), out=bits)
        bits -= np.uint32(126)
        np.copyto(used, bits, casting="unsafe")
        np.maximum(used, one.view(np.uint8), out=used)
        used |= sign
        _pack(codes, data)

    def read(self, data: Any, values: Any) -> None:
        if values.shape[1] % 2 == 0 and values.flags.c_contiguous:
            np.take(_E3M0_PAIRS, data, out=values.view(np.uint64), mode="clip")
        else:
            pairs = np.take(_E3M0_PAIRS, data).view(np.float32)
            np.copyto(values, pairs[:, : values.shape[1]])


def _e3m0_pairs() -> Any:
    """For each byte its two values, as eight bytes to be copied at once."""
    magnitudes = [0.0] + [2.0**exponent for exponent in range(7)]
    values = np.array(magnitudes + [-magnitude for magnitude in magnitudes], np.float32)
    byte = np.arange(256)
    return np.stack([values[byte & 15], values[byte >> 4]], axis=1).view(np.uint64).ravel()


_E3M0_PAIRS = _e3m0_pairs()


def _room_for_pairs(scaled: Any, zero: int) -> Any:
    """uint8, one for each value, made even with the code of 0."""
    blocks, elements = scaled.shape
    codes = np.empty((blocks, elements + elements % 2), np.uint8)
    codes[:, elements:] = zero
    return codes


def _pack(codes: Any, data: Any) -> None:
    """BlockCodes below 16, an even number in each row, two per byte of ``data``."""
    pairs = codes.view("<u2")
    pairs |= pairs >> np.uint16(4)
    np.copyto(data, pairs, casting="unsafe")


# ---- blocks --------------------------------------------------------------------------------------------------


class BlockScaled:
    """A codec whose blocks are records ``[scale: float32][codes]``."""

    block = BLOCK
    lossy = True
    encodes_means = True

    def __init__(self, name: str, codes: BlockCodes) -> None:
        self.name = name
        self.codes = codes
        self.largest_scale = _largest_scale(np.float32(codes.largest))
        self._largest = np.float32(codes.largest)
        self._record = 4 + codes.size(BLOCK)

    def size(self, count: int) -> int:
        blocks, rest = divmod(count, BLOCK)
        tail = 0 if rest == 0 else 4 if rest == 1 else 4 + self.codes.size(rest)
        return blocks * self._record + tail

    def encode(self, flat: Vector) -> memoryview:
        blocks = flat.size // BLOCK
        whole = blocks * BLOCK
        encoded = np.empty(self.size(flat.size), np.uint8)
        records = encoded[: blocks * self._record].reshape(blocks, self._record)
        scratch = np.empty((min(blocks, _BLOCKS), BLOCK), np.float32)
        for start in range(0, blocks, _BLOCKS):
            stop = min(start + _BLOCKS, blocks)
            values = flat[start * BLOCK : stop * BLOCK].reshape(-1, BLOCK)
            self._encode_blocks(values, records[start:stop], scratch[: stop - start], start * BLOCK)
        self._encode_tail(flat[whole:], encoded[blocks * self._record :], whole)
        encoded.flags.writeable = False
        return encoded.data

    def decode(self, data: Buffer, count: int) -> Vector:
        check_size(self.name, data, self.size(count))
        encoded = np.frombuffer(data, np.uint8)
        blocks, rest = divmod(count, BLOCK)
        flat = np.empty(count, np.float32)
        records = encoded[: blocks * self._record].reshape(blocks, self._record)
        for start in range(0, blocks, _BLOCKS):
            stop = min(start + _BLOCKS, blocks)
            self._decode_blocks(records[start:stop], flat[start * BLOCK : stop * BLOCK].reshape(-1, BLOCK))
        tail = encoded[blocks * self._record :]
        if rest == 1:
            flat[-1:] = tail.view("<f4")
        elif rest:
            self._decode_blocks(tail[None, :], flat[None, -rest:])
        return flat

    def _decode_blocks(self, records: Any, values: Any) -> None:
        """``records`` (n, record bytes) into ``values`` (n, block)."""
        self.codes.read(records[:, 4:], values)
        scale = records[:, :4].view("<f4")
        with np.errstate(invalid="ignore", over="ignore"):  # a scale that is not finite: see Codec.decode
            values *= scale

    def _encode_blocks(self, values: Any, records: Any, scratch: Any, start: int) -> None:
        """``values`` (n, block) into ``records`` (n, record bytes); ``start``: first element, for the error."""
        np.abs(values, out=scratch)
        absmax = _maxima(scratch)
        if not np.isfinite(absmax).all():
            raise not_finite(start)
        scale = np.minimum(absmax / self._largest, self.largest_scale)
        empty = scale < self.codes.smallest_scale
        scale[empty] = 0
        absmax[empty] = np.inf  # codes become 0
        np.multiply(values, self._largest / absmax, out=scratch)
        records[:, :4].view("<f4")[...] = scale
        self.codes.write(scratch, records[:, 4:])

    def _encode_tail(self, values: Vector, record: Any, start: int) -> None:
        """The last, shorter block."""
        if values.size == 1:
            if not np.isfinite(values[0]):
                raise not_finite(start)
            record.view("<f4")[0] = values[0]
        elif values.size:
            self._encode_blocks(values[None, :], record[None, :], np.empty((1, values.size), np.float32), start)


def _maxima(magnitudes: Any) -> Any:
    """float32 (n, 1): the largest of each row, NaN where one is NaN. Without a sign floats are ordered as their bits
    are, which numpy compares four times as fast, and NaN comes last."""
    rows, elements = magnitudes.shape
    starts = np.arange(0, rows * elements, elements)
    return np.maximum.reduceat(magnitudes.view("<i4").reshape(-1), starts).view("<f4")[:, None]


def _largest_scale(largest: np.float32) -> np.float32:
    """The largest scale whose product with the largest code is finite: rounding may carry the quotient past it."""
    scale = np.finfo(np.float32).max / largest
    with np.errstate(over="ignore"):
        while not np.isfinite(scale * largest):
            scale = np.nextafter(scale, np.float32(0))
    return np.float32(scale)
