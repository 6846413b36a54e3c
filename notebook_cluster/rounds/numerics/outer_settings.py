"""Outer optimiser settings as both sides of a round see them: float32 bits. Plain Python: the coordinator uses it
too."""

import struct

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
