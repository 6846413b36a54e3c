"""float32 to bfloat16 and back, in bits: numpy has no such type, and bit operations are the same on every machine.

To the nearest, halves to even; what would round to infinity becomes the largest bfloat16, what is subnormal becomes 0
with its sign.
"""

from typing import Any

import numpy as np

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
