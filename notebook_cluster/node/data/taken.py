"""Which positions of an epoch are taken."""

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from notebook_cluster.protocol.wire import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Positions = NDArray[Any]

MAX_COUNT = 8 * (MAX_MESSAGE_BYTES - (1 << 20))
"""Elements of a data set that is followed: one bit for each must fit into a message. Of a stream: how many may lie
between the first that is not taken and the last that is."""


class Taken:
    """All positions below ``base``, and of those from there on the ones whose bit is set, the lowest of a byte first.

    Bits only ever go from 0 to 1.

    Args:
        count: of the data; 0: of a stream, whose bits grow, and whose base follows.
    """

    __slots__ = ("base", "bits", "count")

    def __init__(self, count: int, base: int = 0, bits: bytes | bytearray | None = None) -> None:
        self.count, self.base = count, base
        self.bits = bytearray(-(-count // 8)) if bits is None else bytearray(bits)

    def copy(self) -> "Taken":
        return Taken(self.count, self.base, self.bits)

    def __contains__(self, position: int) -> bool:
        at = position - self.base
        return at < 0 or (at >> 3 < len(self.bits) and bool(self.bits[at >> 3] >> (at & 7) & 1))

    @property
    def top(self) -> int:
        """None from here on is taken."""
        return self.base + 8 * len(self.bits)

    def mark(self, positions: Sequence[int]) -> None:
        """These are taken; those out of range are ignored."""
        for position in positions:
            at = position - self.base
            if 0 <= at < (self.count or MAX_COUNT):
                if at >> 3 >= len(self.bits):
                    self.bits.extend(bytes((at >> 3) + 64 - len(self.bits)))
                self.bits[at >> 3] |= 1 << (at & 7)
        if not self.count and len(self.bits) > 1 << 16 and self.bits.startswith(b"\xff" * (1 << 15)):
            self._trim()

    def mark_all(self) -> None:
        """Of data with a count."""
        self.bits[:] = ((1 << self.count) - 1).to_bytes(len(self.bits), "little")

    def join(self, other: "Taken") -> None:
        """What is taken in either."""
        base = max(self.base, other.base)
        known = 0
        for one in (self, other):
            known |= int.from_bytes(one.bits[(base - one.base) // 8 :], "little")
        size = max(len(self.bits) - (base - self.base) // 8, len(other.bits) - (base - other.base) // 8, 0)
        self.base, self.bits = base, bytearray(known.to_bytes(size, "little"))

    def all_below(self, end: int) -> bool:
        """Whether all positions below ``end`` are taken."""
        left = end - self.base
        if left <= 0:
            return True
        if left > 8 * len(self.bits):
            return False
        mask = (1 << left) - 1
        return int.from_bytes(self.bits, "little") & mask == mask

    def free(self) -> "Positions":
        """Those below :attr:`top` that are not taken: int64, ascending."""
        import numpy

        count = self.count or 8 * len(self.bits)
        bits = numpy.unpackbits(numpy.frombuffer(bytes(self.bits), numpy.uint8), count=count, bitorder="little")
        return numpy.flatnonzero(bits == 0) + self.base

    def settled(self) -> "Taken":
        """The same in the one form in which all nodes write it."""
        copy = self.copy()
        if not self.count:
            copy.bits = bytearray(bytes(copy.bits).rstrip(b"\0"))
            copy._trim()
        return copy

    def _trim(self) -> None:
        full = len(self.bits) - len(self.bits.lstrip(b"\xff"))
        self.base += 8 * full
        del self.bits[:full]

    def packed(self) -> bytes:
        return zlib.compress(self.base.to_bytes(8, "little") + bytes(self.bits), 1)


def unpacked(compressed: bytes, count: int) -> Taken:
    """What :meth:`Taken.packed` made.

    Raises:
        ValueError: it is not of data of ``count`` elements.
    """
    size = 8 + -(-(count or MAX_COUNT) // 8)
    try:
        data = zlib.decompressobj().decompress(compressed, size + 1)
    except zlib.error as error:
        raise ValueError(f"the bits of a shard cannot be read: {error}") from None
    base = int.from_bytes(data[:8], "little")
    if len(data) < 8 or len(data) > size or (count and (len(data) != size or base)) or base % 8 or base >> 62:
        raise ValueError(f"the bits of a shard are {len(data)} bytes, at most {size} are right")
    return Taken(count, base, data[8:])
