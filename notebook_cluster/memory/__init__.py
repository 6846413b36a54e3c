"""Large arrays in memory that was used before.

- :class:`ArrayPool` hands arrays out again once nothing refers to them
- :class:`Scratch` hands arrays out again for the same use
- :func:`keep_freed` keeps freed memory with the process, :func:`give_back` gives it to the system
- :mod:`.nameless` has arrays in files instead, which the system may write to a disk
- :func:`with_range` keeps account of the bytes of one that have come
- :func:`amount` says to people how much it is

Where a system gives the pages of a freed array back, as it does beyond some megabytes, the next one costs as much time
again for its first use as several copies: a virtual machine may have to ask its host for every page.

May import: nothing of ours. Called by: ``training``, ``rounds``, ``collectives``, ``codecs``, ``agent``, ``magics``.
Importing this room does not import numpy.
"""

import contextlib
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ArrayPool", "Ranges", "Scratch", "amount", "first_gap", "give_back", "keep_freed", "with_range"]

Ranges = tuple[tuple[int, int], ...]
"""[start, stop) of each run of bytes that is here, sorted, with gaps between them."""

_WORTH_KEEPING = 1 << 20
"""Bytes."""
_LOOSE = 32
"""An array may lie in memory that is larger by one part of so many: fragments of a model differ by less."""


def _references_of_unused() -> int:
    """What ``sys.getrefcount`` says of a list's element that nothing else refers to."""
    held = [object()]
    return sys.getrefcount(held[0])


_UNUSED = _references_of_unused() if hasattr(sys, "getrefcount") else 0


def _counts_tell_use() -> bool:
    """Whether a count of references says that nobody has an array. Without the global lock another thread may just be
    taking one, and its count does not show that yet."""
    is_gil_enabled = getattr(sys, "_is_gil_enabled", None)  # Python 3.13 and later
    return _UNUSED > 0 and (is_gil_enabled is None or is_gil_enabled())


class ArrayPool:
    """At most ``most`` bytes of arrays that were handed out, found again once nothing refers to them any more;
    :meth:`keep_up_to` raises it until :meth:`forget`. For any thread. Where this Python cannot say that nothing refers
    to an array, every array is new memory."""

    def __init__(self, most: int) -> None:
        self._least = self._most = most
        self._kept: list[NDArray[Any]] = []
        self._lock = threading.Lock()

    def array(self, count: int, dtype: Any) -> "NDArray[Any]":
        """A flat array with whatever is in it: the memory of an earlier one that nothing refers to, or new memory."""
        import numpy

        kind = numpy.dtype(dtype)
        size = count * kind.itemsize
        if not _WORTH_KEEPING <= size <= self._most or not _counts_tell_use():
            return numpy.empty(count, kind)
        with self._lock:
            for index in range(len(self._kept)):
                # Views of an array, torch's tensors among them, count as references to the array whose memory it is.
                fits = size <= self._kept[index].size <= size + size // _LOOSE
                if fits and sys.getrefcount(self._kept[index]) == _UNUSED:
                    self._kept.append(self._kept.pop(index))
                    return self._kept[-1][:size].view(kind)
            found = numpy.empty(size, numpy.uint8)
            self._kept.append(found)
            while sum(array.size for array in self._kept) > self._most:
                places = range(len(self._kept) - 1)
                unused = (place for place in places if sys.getrefcount(self._kept[place]) == _UNUSED)
                del self._kept[next(unused, 0)]
        return found.view(kind)

    def references(self, holder: Any, name: str) -> int | None:
        """How many references there are to the array ``holder.name``, or to the memory it lies in, beside the one that
        ``holder`` has; views count. None: this Python cannot say."""
        import numpy

        if not _counts_tell_use():
            return None
        count = sys.getrefcount(getattr(holder, name)) - _UNUSED
        if isinstance(getattr(holder, name).base, numpy.ndarray):
            # the array's own reference to its memory is that of a holder, the pool's is none
            with self._lock:
                pooled = any(array is getattr(holder, name).base for array in self._kept)
                count += sys.getrefcount(getattr(holder, name).base) - _UNUSED - pooled
        return count

    def keep_up_to(self, most: int) -> None:
        """Keep up to ``most`` bytes, where that is more than now."""
        with self._lock:
            self._most = max(self._most, most)

    def forget(self) -> None:
        """Give back what is unused, at once or when nothing refers to it any more."""
        with self._lock:
            self._kept.clear()
            self._most = self._least


class Scratch:
    """Memory for what is on its way, used again by the next operation: new pages cost more than the copy into them. For
    one thread."""

    def __init__(self, largest: int) -> None:
        """``largest``: bytes; larger arrays are not kept."""
        self._largest = largest
        self._kept: dict[str, NDArray[Any]] = {}
        self._results = ArrayPool(largest)

    def take(self, use: str, size: int) -> "NDArray[Any]":
        """``size`` bytes for ``use``, with whatever is in them. Nobody else may still need what was taken before."""
        import numpy

        kept = self._kept.pop(use, None)
        if kept is None or kept.size < size:
            kept = numpy.empty(size, numpy.uint8)
        if size <= self._largest:
            self._kept[use] = kept
        return kept[:size]

    def result(self, count: int, dtype: Any) -> "NDArray[Any]":
        """A flat array for a result: the memory of an earlier one that nothing refers to any more, or new memory."""
        return self._results.array(count, dtype)

    def forget(self) -> None:
        """An operation was left in the middle, so others may still read what it sent; or the cell is over."""
        self._kept.clear()
        self._results.forget()


_LARGEST = (32 << 20) - (64 << 10)
"""Bytes, with what the allocator adds at most 32 MiB."""


@functools.cache
def keep_freed(largest: int = _LARGEST) -> None:
    """Have glibc keep blocks of up to ``largest`` bytes (32 MiB) that are freed, twice as much at most, as it does in
    any process that has freed one so large (mallopt(3), on the dynamic threshold of M_MMAP_THRESHOLD). Before that,
    what libzmq receives comes in new pages each time, which cost as much as two copies. Elsewhere this does nothing."""
    import numpy

    numpy.empty(largest, numpy.uint8)


def give_back() -> None:
    """Have glibc give what it has kept to the system. Elsewhere this does nothing."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def amount(size: float) -> str:
    """Bytes for people: ``12.3 MB``, ``4 kB``, ``17 bytes``, in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.3g} {unit}" if size < 1000 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size:.0f} byte{'' if round(size) == 1 else 's'}"


def with_range(ranges: Ranges, start: int, stop: int) -> tuple[Ranges, Ranges]:
    """``ranges`` and one more, and what of that one was not here."""
    apart, new, position, low, high = [], [], start, start, stop
    for first, end in ranges:
        if end < start or first > stop:
            apart.append((first, end))
            continue
        if position < first:
            new.append((position, first))
        position, low, high = max(position, end), min(low, first), max(high, end)
    if position < stop:
        new.append((position, stop))
    return tuple(sorted([*apart, (low, high)])), tuple(new)


def first_gap(ranges: Ranges) -> int:
    """The first byte that is not here."""
    return ranges[0][1] if ranges and not ranges[0][0] else 0
