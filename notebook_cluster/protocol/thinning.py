"""Curves that stay small however long the run is: thinned, never cut, and their peaks stay."""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

MAX_POINTS = 2000
OLD_POINTS = 200
"""Of a curve of an older job, where all curves together have too many."""
ALL_POINTS = 20_000
"""Of all curves, before those of older jobs are thinned to OLD_POINTS, which is as many as are drawn."""
QUIET = 120.0
"""Seconds without a point after which a job is an older one, where another has got some."""
ALL_CURVES = 2000
NODE_CURVES = 64
"""Of one node, of what belongs to no job: a name that is new each time must not take the room of others."""
KEPT_RUNS = 8
"""How many of the newest runs of each job are kept: the curves of those before are dropped."""
_LOOK_AGAIN = 1000
"""Points after which all are counted again."""
_LARGEST_STEP = (1 << 63) - 1
Point = tuple[float, float]
Key = tuple[str, str, int, str]
"""Node (empty: the global model of the job), job and run (empty and 0: of none), name."""


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
        # Arrays: lists of numbers take four times as much, and a run of a day has hundreds of curves.
        self.step, self.time, self.value = array("q"), array("d"), array("d")
        self.seen = 0
        self._order = array("d")

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

    def by_step(self) -> list[Point]:
        """(step, value) points; a point with value NaN between two runs whose steps begin again."""
        points: list[Point] = []
        for step, value in zip(self.step, self.value, strict=False):
            if points and step < points[-1][0]:
                points.append((step, math.nan))
            points.append((step, value))
        return points

    def by_time(self, start: float) -> list[Point]:
        """(seconds since ``start``, value) points."""
        return [(moment - start, value) for moment, value in zip(self.time, self.value, strict=False)]

    def thin(self, most: int) -> None:
        """Keep about ``most`` points, where there are more."""
        count = len(self.value) - 1
        if count < most:
            return
        # Two points of each bucket, so that of a full curve half is free again.
        buckets = most // 2
        width = (self._order[-1] + 1) / buckets
        kept, begin = [0], 1
        while begin < count:
            end, bucket = begin + 1, int(self._order[begin] / width)
            while end < count and int(self._order[end] / width) == bucket:
                end += 1
            kept += extremes(self.value, begin, end)
            begin = end
        kept.append(count)
        self.step = array("q", [self.step[index] for index in kept])
        self.time, self.value, self._order = (
            array("d", [column[index] for index in kept]) for column in (self.time, self.value, self._order)
        )

    def _append(self, step: int, time: float, value: float, order: float) -> None:
        self.step.append(max(-_LARGEST_STEP, min(step, _LARGEST_STEP)))
        self.time.append(time)
        self.value.append(value)
        self._order.append(order)
        if len(self.value) > MAX_POINTS:
            self.thin(MAX_POINTS // 2)


class ThinnedCurves:
    """Curves of nodes and models in the order in which they began.

    Of each job those of the KEPT_RUNS newest runs; where all have more than ALL_POINTS points together, those of the
    jobs that got none for QUIET seconds are thinned to OLD_POINTS each; where there are more than ``most`` curves, the
    jobs that got a point longest ago are dropped. Nothing of the job that got the newest point is touched, nor of what
    belongs to no job, of which each node has NODE_CURVES at most.
    """

    def __init__(self, most: int = ALL_CURVES) -> None:
        self._most = most
        self._curves: dict[Key, ThinnedCurve] = {}
        self._unseen = 0

    def __iter__(self) -> Iterator[Key]:
        return iter(self._curves)

    def __contains__(self, key: Key) -> bool:
        return key in self._curves

    def __getitem__(self, key: Key) -> ThinnedCurve:
        return self._curves[key]

    def items(self) -> Iterable[tuple[Key, ThinnedCurve]]:
        """Every key with its curve."""
        return self._curves.items()

    def begun(self, key: Key) -> ThinnedCurve | None:
        """The curve of ``key``, made where there was none; None where it is of what is not kept: of an old run, or one
        too many of its job, or of its node."""
        if key not in self._curves:
            if not key[1] and sum(other[:2] == key[:2] for other in self._curves) >= NODE_CURVES:
                return None
            self._curves[key] = ThinnedCurve()
            for old in _of_old_runs(self._curves):
                del self._curves[old]
            for job in self._older(0.0) if len(self._curves) > self._most else ():
                if job != key[1]:
                    for old in [one for one in self._curves if one[1] == job]:
                        del self._curves[old]
                if len(self._curves) <= self._most:
                    break
            if len(self._curves) > self._most:
                self._curves.pop(key, None)
        return self._curves.get(key)

    def extend(
        self, key: Key, step: Sequence[int], time: Sequence[float], value: Sequence[float], seen: int = 0
    ) -> ThinnedCurve | None:
        """Append points as :meth:`ThinnedCurve.extend` does. Returns the curve, or None as :meth:`begun`."""
        curve = self.begun(key)
        if curve is not None:
            curve.extend(step, time, value, seen)
            self._unseen += len(step)
            if self._unseen >= _LOOK_AGAIN:
                self._unseen = 0
                self._thin_older()
        return curve

    def _older(self, quiet: float) -> list[str]:
        """The jobs that got no point in the ``quiet`` seconds before the newest one; who got one longest ago first."""
        last: dict[str, float] = {}
        for (_, job, _, _), curve in self._curves.items():
            if job:
                last[job] = max(last.get(job, -math.inf), curve.time[-1] if curve.time else -math.inf)
        ordered = sorted(last, key=last.__getitem__)
        return [job for job in ordered[:-1] if last[job] <= last[ordered[-1]] - quiet]

    def _thin_older(self) -> None:
        count = sum(len(curve.value) for curve in self._curves.values())
        for job in self._older(QUIET) if count > ALL_POINTS else ():
            for curve in [curve for key, curve in self._curves.items() if key[1] == job]:
                count -= len(curve.value)
                curve.thin(OLD_POINTS)
                count += len(curve.value)
            if count <= ALL_POINTS:
                break


def _of_old_runs(keys: Iterable[Key]) -> list[Key]:
    """Those whose run is not one of its job's newest."""
    found, runs = list(keys), dict[str, set[int]]()
    for _, job, run, _ in found:
        runs.setdefault(job, set()).add(run)
    kept = {job: set(sorted(numbers)[-KEPT_RUNS:]) for job, numbers in runs.items()}
    return [key for key in found if key[2] not in kept[key[1]]]


def extremes(values: Sequence[float], begin: int, end: int) -> list[int]:
    """Indices, in order, of the lowest and the highest of ``values[begin:end]``; when some are not finite, of the
    highest and of the first that is not: a gap must stay visible."""
    part = values[begin:end]
    if math.isfinite(sum(part)):  # so all are
        return sorted({begin + part.index(min(part)), begin + part.index(max(part))})
    numbers = [index for index in range(begin, end) if math.isfinite(values[index])]
    if len(numbers) == end - begin:  # too large to be added
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
