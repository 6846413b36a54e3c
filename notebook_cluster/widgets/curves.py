"""The curves of a cluster, kept small: merge new points, thin long curves without losing their peaks.

Pure data, used by the plotly figure and by the static pictures.
"""

import math
from collections.abc import Iterable, Sequence

from notebook_cluster.protocol.state import Series

KEPT_POINTS = 2000
Point = tuple[float, float]


class Curve:
    """One curve of one node: steps, times (seconds since the epoch) and values of equal length."""

    def __init__(self) -> None:
        self.step: list[int] = []
        self.time: list[float] = []
        self.value: list[float] = []

    def add(self, series: Series) -> None:
        """Append the points of ``series``; the oldest half is halved when there are more than KEPT_POINTS."""
        self.step += series.step
        self.time += series.time
        self.value += series.value
        while len(self.value) > KEPT_POINTS:
            half = KEPT_POINTS // 2
            self.step[:half] = self.step[:half:2]
            self.time[:half] = self.time[:half:2]
            self.value[:half] = self.value[:half:2]

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


class Curves:
    """All curves by (node, name), in the order in which they appeared."""

    def __init__(self, series: Iterable[Series] = ()) -> None:
        self._curves: dict[tuple[str, str], Curve] = {}
        for one in series:
            self._curves.setdefault((one.node, one.name), Curve()).add(one)
        self._history_ends = {key: max(curve.time, default=0.0) for key, curve in self._curves.items()}

    def add_new(self, series: Iterable[Series]) -> None:
        """Append points of SeriesAdded events, except those that the first series held already."""
        for one in series:
            key = (one.node, one.name)
            end = self._history_ends.get(key, -math.inf)
            rows = [row for row in zip(one.step, one.time, one.value, strict=False) if row[1] > end]
            if rows:
                step, moment, value = (list(column) for column in zip(*rows, strict=True))
                new = Series(node=one.node, name=one.name, step=step, time=moment, value=value)
                self._curves.setdefault(key, Curve()).add(new)

    def series(self) -> list[Series]:
        """All curves as messages."""
        return [
            Series(node=node, name=name, step=list(curve.step), time=list(curve.time), value=list(curve.value))
            for (node, name), curve in self._curves.items()
        ]

    def get(self, node: str, name: str) -> Curve:
        """The curve, or an empty one."""
        return self._curves.get((node, name)) or Curve()

    def nodes(self) -> list[str]:
        """Names of the nodes that have a curve, each once."""
        return list(dict.fromkeys(node for node, _ in self._curves))


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` of ``points`` (at least 4): first, last, lowest and highest of each slice between.

    Keeping both extremes of a slice is what keeps a spike of the loss or of the memory visible.
    """
    if len(points) <= limit:
        return list(points)
    slices = max((limit - 2) // 2, 1)
    inner = points[1:-1]
    kept = [points[0]]
    for index in range(slices):
        part = inner[index * len(inner) // slices : (index + 1) * len(inner) // slices]
        if part:
            kept += _extremes(part)
    kept.append(points[-1])
    return kept


def _extremes(part: Sequence[Point]) -> list[Point]:
    numbers = [index for index, point in enumerate(part) if math.isfinite(point[1])]
    if len(numbers) < len(part):  # A gap or a NaN must stay visible: it stands for the slice's second point.
        gap = next(index for index, point in enumerate(part) if not math.isfinite(point[1]))
        wanted = {gap} | ({max(numbers, key=lambda index: part[index][1])} if numbers else set())
    else:
        wanted = {min(numbers, key=lambda index: part[index][1]), max(numbers, key=lambda index: part[index][1])}
    return [part[index] for index in sorted(wanted)]
