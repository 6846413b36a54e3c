"""Which tensors have a gradient, one bit each, as it travels with a round. Plain Python: the coordinator uses it too.

A gradient of zeros is one: an optimiser with momentum or weight decay moves the parameter. Where there is none (None in
torch) it does not. A mean of zeros does not say which it is, so each node says what it had, and the SEAL says of which
tensors any of those had one whose work it counts: with that every node makes the same step.

Bits are in the order of the model's schema, the lowest first. No bytes at all: every tensor has one, the usual case.
"""

from collections.abc import Iterable, Sequence


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
