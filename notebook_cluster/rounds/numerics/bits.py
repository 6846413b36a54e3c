"""What both sides of a round read and write as bits: outer settings, and which tensors have a gradient. Plain Python:
the coordinator uses it too.

float32 values travel as their 32 bits, so that every node computes with the same number.

A gradient of zeros is one: an optimiser with momentum or weight decay moves the parameter. Where there is none (None in
torch) it does not. A mean of zeros does not say which it is, so each node says what it had, one bit a tensor, and the
SEAL says of which tensors any of those had one whose work it counts: with that every node makes the same step. These
bits are in the order of the model's schema, the lowest first. No bytes at all: every tensor has one, the usual case.
"""

import struct
from collections.abc import Iterable, Sequence

DEFAULT_MOMENTUM = 0.9
"""DiLoCo, arXiv 2311.08105."""

_ALONE, _TOGETHER = 0.4, 0.6


def default_outer_lr(members: int) -> float:
    """Outer learning rate of DiLoCo for a round of ``members`` nodes.

    It depends on the number of nodes, not on the model's size (arXiv 2503.09799): 0.4 for one node and 0.6 for 2 or 4
    at 30 steps per round. For 8 nodes the paper has 0.8; the sweep in docs/training.md has 0.6 there as well or better.
    More steps per round bear a larger one (0.7 at 500 steps); ``outer_lr=`` sets it.
    """
    return _ALONE if members < 2 else _TOGETHER


def float_bits(value: float) -> int:
    """``value`` rounded to float32, as its 32 bits: what travels, so that every node computes with the same number.

    Raises:
        OverflowError: larger than float32 can hold.
    """
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def bits_float(bits: int) -> float:
    """The float32 number with these bits, exactly, as a Python float."""
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def packed(flags: Sequence[bool]) -> bytes:
    """``flags`` as bits; empty where all are set."""
    if all(flags):
        return b""
    return sum(1 << index for index, flag in enumerate(flags) if flag).to_bytes(byte_count(len(flags)), "little")


def unpacked(data: bytes, tensors: int) -> list[bool]:
    """What :func:`packed` was given for so many ``tensors``."""
    if not data:
        return [True] * tensors
    bits = int.from_bytes(data, "little")
    return [bool(bits >> index & 1) for index in range(tensors)]


def any_of(said: Iterable[bytes]) -> bytes:
    """The tensors of which any node has a gradient."""
    bits, size = 0, 0
    for data in said:
        if not data:
            return b""
        bits, size = bits | int.from_bytes(data, "little"), max(size, len(data))
    return bits.to_bytes(size, "little")


def byte_count(tensors: int) -> int:
    """How many bytes flags of so many tensors take, where not all are set."""
    return (tensors + 7) // 8
