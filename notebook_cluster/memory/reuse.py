"""Arrays that are handed out again once nothing refers to them.

Where a system gives the pages of a freed array back, as it does beyond some megabytes, the next one costs as much time
again for its first use as several copies: a virtual machine may have to ask its host for every page.
"""

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORTH_KEEPING = 1 << 20
"""Bytes."""


def _references_of_unused() -> int:
    """What ``sys.getrefcount`` says of a list's element that nothing else refers to."""
    held = [object()]
    return sys.getrefcount(held[0])


_UNUSED = _references_of_unused()


class Memory:
    """At most ``most`` bytes of arrays that were handed out, found again once nothing refers to them any more. For any
    thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[NDArray[Any]] = []
        self._lock = threading.Lock()

    def array(self, count: int, dtype: Any) -> "NDArray[Any]":
        """A flat array with whatever is in it: the memory of an earlier one that nothing refers to, or new memory."""
        import numpy

        kind = numpy.dtype(dtype)
        size = count * kind.itemsize
        if not _WORTH_KEEPING <= size <= self._most:
            return numpy.empty(count, kind)
        with self._lock:
            for index in range(len(self._kept)):
                # Views of an array, torch's tensors among them, count as references to the array whose memory it is.
                if self._kept[index].size == size and sys.getrefcount(self._kept[index]) == _UNUSED:
                    self._kept.append(self._kept.pop(index))
                    return self._kept[-1].view(kind)
            found = numpy.empty(size, numpy.uint8)
            self._kept.append(found)
            while sum(array.size for array in self._kept) > self._most:
                del self._kept[0]
        return found.view(kind)

    def forget(self) -> None:
        """Give back what is unused, at once or when nothing refers to it any more."""
        with self._lock:
            self._kept.clear()
