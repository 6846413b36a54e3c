"""Curves that stay small however long the run is: thinned, never cut, and their peaks stay."""

import math
from collections.abc import Sequence
from itertools import pairwise

MAX_POINTS = 2000
_BUCKETS = MAX_POINTS // 4
"""A full curve is thinned to two points of each bucket, so half of it is free again."""


class ThinnedCurve:
    """At most MAX_POINTS points of all that were added, spread evenly over them.

    A full curve is cut into buckets of equally many of the points that were ever added, and of each bucket the lowest
    and the highest value stay: a spike of the loss or of the memory is still there after a million points. So do the
    first and the newest point, and in each bucket one that is not finite, for it is a gap.

    Attributes:
        step, time, value: columns of equal length; ``time`` in seconds since the epoch.
        seen: how many points were added.
    """

    def __init__(self) -> None:
        self.step: list[int] = []
        self.time: list[float] = []
        self.value: list[float] = []
        self.seen = 0
        self._order: list[float] = []

    def add(self, step: int, time: float, value: float) -> None:
        """Append one point."""
        self._append(step, time, value, float(self.seen))
        self.seen += 1

    def extend(self, step: Sequence[int], time: Sequence[float], value: Sequence[float], seen: int = 0) -> None:
        """Append points that stand for ``seen`` points, or (0) each for itself."""
        rows = list(zip(step, time, value, strict=False))
        stride = max(seen / len(rows), 1.0) if rows else 1.0
        begin = self.seen
        for index, row in enumerate(rows):
            self._append(*row, begin + index * stride)
            self.seen = max(begin + int((index + 1) * stride), self.seen + 1)

    def _append(self, step: int, time: float, value: float, order: float) -> None:
        self.step.append(step)
        self.time.append(time)
        self.value.append(value)
        self._order.append(order)
        if len(self.value) > MAX_POINTS:
            self._thin()

    def _thin(self) -> None:
        width = (self._order[-1] + 1) / _BUCKETS
        kept, begin, count = [0], 1, len(self.value) - 1
        while begin < count:
            end, bucket = begin + 1, int(self._order[begin] / width)
            while end < count and int(self._order[end] / width) == bucket:
                end += 1
            kept += extremes(self.value, begin, end)
            begin = end
        kept.append(count)
        self.step, self.time = [self.step[index] for index in kept], [self.time[index] for index in kept]
        self.value, self._order = [self.value[index] for index in kept], [self._order[index] for index in kept]


def extremes(values: Sequence[float], begin: int, end: int) -> list[int]:
    """Indices, in order, of the lowest and the highest of ``values[begin:end]``; when some are not finite, of the
    highest and of the first that is not: a gap must stay visible."""
    numbers = [index for index in range(begin, end) if math.isfinite(values[index])]
    if len(numbers) == end - begin:
        return sorted({min(numbers, key=values.__getitem__), max(numbers, key=values.__getitem__)})
    gap = next(index for index in range(begin, end) if not math.isfinite(values[index]))
    return sorted({gap} | ({max(numbers, key=values.__getitem__)} if numbers else set()))


def evenly(values: Sequence[float], most: int) -> list[int]:
    """At most ``most`` (at least 4) indices of ``values``: the first, the last, and of equal slices between them the
    lowest and the highest."""
    if len(values) <= most:
        return list(range(len(values)))
    last, slices = len(values) - 1, max((most - 2) // 2, 1)
    edges = [1 + place * (last - 1) // slices for place in range(slices + 1)]
    inner = [index for begin, end in pairwise(edges) for index in extremes(values, begin, end)]
    return [0, *inner, last]
