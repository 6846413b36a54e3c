"""Every value by itself: float32 as it is, exact, and bfloat16, its upper half.

numpy has no bfloat16: it is made with bit operations, which are the same on every machine. To the nearest, halves to
even; what would round to infinity becomes the largest bfloat16, what is subnormal becomes 0 with its sign.
"""

from typing import Any

import numpy as np

from notebook_cluster.codecs.codec import BLOCK, CHUNK, Buffer, Vector, check_finite, check_size

LARGEST = np.uint16(0x7F7F)
"""Bits of 3.39e38."""

SMALLEST = np.uint16(0x0080)
"""Bits of 2^-126."""


def to_bfloat16(values: Any) -> Any:
    """The bits, uint16, of finite float32 values of any shape."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    short = rounded.astype("<u2")
    magnitude = short & np.uint16(0x7FFF)
    short &= np.uint16(0x8000)
    np.minimum(magnitude, LARGEST, out=magnitude)
    magnitude *= magnitude >= SMALLEST
    short |= magnitude
    return short


def from_bfloat16(short: Any, out: Any = None) -> Any:
    """float32 values of uint16 bits; with ``out`` (float32, of that shape) into it."""
    out = np.empty(short.shape, np.float32) if out is None else out
    bits = out.view("<u4")
    np.copyto(bits, short)
    bits <<= np.uint32(16)
    return out


def is_plain(short: Any) -> Any:
    """Which bits :func:`to_bfloat16` may have made: finite and not subnormal. A bool for each."""
    magnitude = short & np.uint16(0x7FFF)
    return (magnitude <= LARGEST) & ((magnitude >= SMALLEST) | (magnitude == 0))


class Float32:
    """Little-endian float32. ``decode`` is a view, not a copy."""

    name = "float32"
    lossy = False
    encodes_means = True

    def __init__(self, block: int = BLOCK) -> None:
        """``block``: another one where the same slices have to do for another codec."""
        self.block = block

    def size(self, count: int) -> int:
        return 4 * count

    def encode(self, flat: Vector) -> memoryview:
        encoded = np.empty(flat.size, "<f4")
        for start in range(0, flat.size, CHUNK):
            chunk = flat[start : start + CHUNK]
            check_finite(chunk, start)
            encoded[start : start + CHUNK] = chunk
        encoded.flags.writeable = False
        return encoded.view(np.uint8).data

    def decode(self, data: Buffer, count: int) -> Vector:
        check_size(self.name, data, self.size(count))
        return np.frombuffer(data, "<f4")


class BFloat16:
    """Little-endian bfloat16: the range of float32 with 8 bits of precision, so no scale is needed."""

    name = "bf16"
    block = BLOCK
    lossy = True
    encodes_means = True

    def size(self, count: int) -> int:
        return 2 * count

    def encode(self, flat: Vector) -> memoryview:
        encoded = np.empty(flat.size, "<u2")
        for start in range(0, flat.size, CHUNK):
            chunk = flat[start : start + CHUNK]
            check_finite(chunk, start)
            encoded[start : start + CHUNK] = to_bfloat16(chunk)
        encoded.flags.writeable = False
        return encoded.view(np.uint8).data

    def decode(self, data: Buffer, count: int) -> Vector:
        check_size(self.name, data, self.size(count))
        encoded, flat = np.frombuffer(data, "<u2"), np.empty(count, np.float32)
        for start in range(0, count, CHUNK):
            from_bfloat16(encoded[start : start + CHUNK], flat[start : start + CHUNK])
        return flat
