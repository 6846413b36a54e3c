"""What every codec offers, and the arithmetic of whole blocks."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
"""Flat, C-contiguous float32."""

Buffer = bytes | bytearray | memoryview

Memory = Callable[[int], NDArray[np.uint8]]
"""Gives so many bytes, with whatever is in them, for what will be sent."""


BLOCK = 256
"""Elements per block (a scale for each block, never a global one)."""

CHUNK = 64 * 1024
"""Elements worked on at a time: 256 KiB of float32 stay in a core's cache."""


class NotFiniteError(ValueError):
    """A vector to encode holds NaN or infinity."""


class DamagedError(ValueError):
    """Bytes to decode that no encoder writes."""


class Codec(Protocol):
    """``count`` is always the number of elements of the whole vector, ``data`` the bytes of the vector it belongs
    to. A run of whole blocks, or a run that goes to the end, is encoded and decoded as a vector of its own."""

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> int:
        """Elements per block; only the last block may have fewer."""

    @property
    def lossy(self) -> bool:
        """True: contributions need error feedback."""

    @property
    def encodes_means(self) -> bool:
        """False: a mean has more elements than are kept, so contributions are sent on to all who need it."""

    def size(self, count: int) -> int:
        """Bytes of an encoded vector; never more than ``4 * count``."""

    def encode(self, flat: Vector) -> memoryview:
        """The bytes of ``flat`` (float32, any length), read-only.

        Raises:
            NotFiniteError: a value is NaN or infinite (found on the way, without a pass of its own where blocks have
            a scale).
        """

    def decode(self, data: Buffer, count: int) -> Vector:
        """``count`` float32 values, the same bits on every machine; may be a read-only view of ``data``.

        Codecs in which every element has a place of its own give NaN or infinity where the sender put them, so that
        a round can name who sent them; those that keep some elements raise.

        Raises:
            DamagedError: ``data`` has not ``size(count)`` bytes, or no encoder writes such bytes.
        """


def block_count(count: int, block: int = BLOCK) -> int:
    """Blocks of ``block`` elements in a vector of ``count`` elements."""
    return -(-count // block)


def check_size(codec: str, data: Buffer, expected: int) -> None:
    """Raise DamagedError unless ``data`` has ``expected`` bytes."""
    if len(data) != expected:
        raise DamagedError(
            f"{len(data)} bytes are no {codec} vector of {expected} bytes: the sender uses another model or codec"
        )


def not_finite(start: int) -> NotFiniteError:
    """The error for a NaN or infinity in the chunk or block that begins at element ``start``."""
    return NotFiniteError(f"NaN or infinity at or after element {start}: lower the learning rate or clip gradients")


def check_finite(values: Vector, start: int) -> None:
    """Raise NotFiniteError where ``values`` (at least one) hold NaN or infinity; they begin at element ``start``."""
    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.dot(flat, flat)):  # one pass; NaN and infinity stay in the sum
            return
    # the sum may be too large where no value is; max and min see NaN and both infinities, and allocate nothing
    if not (np.isfinite(values.max()) and np.isfinite(values.min())):
        raise not_finite(start)
