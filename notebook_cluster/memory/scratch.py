"""Arrays that are handed out again for the same use, and for results, of operations that come one after the other."""

from typing import TYPE_CHECKING, Any

from notebook_cluster.memory.reuse import Memory

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Scratch:
    """Memory for what is on its way, used again by the next operation: new pages cost more than the copy into them. For
    one thread."""

    def __init__(self, largest: int) -> None:
        """``largest``: bytes; larger arrays are not kept."""
        self._largest = largest
        self._kept: dict[str, NDArray[Any]] = {}
        self._results = Memory(largest)

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
