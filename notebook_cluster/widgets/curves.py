"""The curves of a cluster, kept small: merge new points, thin long curves without losing their peaks.

Pure data, used by the plotly figure and by the static pictures.
"""

import math
from collections.abc import Iterable, Sequence

from notebook_cluster.protocol.state import Series
from notebook_cluster.protocol.thinning import ThinnedCurve, extremes

Point = tuple[float, float]


class Curve(ThinnedCurve):
    """One curve of one node: steps, times (seconds since the epoch) and values of equal length."""

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
    """All curves in the order in which they appeared: of nodes, and of the global models of jobs."""

    def __init__(self, series: Iterable[Series] = ()) -> None:
        self._curves: dict[tuple[str, str, str], Curve] = {}
        for one in series:
            key = one.node, one.job, one.name
            self._curves.setdefault(key, Curve()).extend(one.step, one.time, one.value, one.seen)
        self._history_ends = {key: max(curve.time, default=0.0) for key, curve in self._curves.items()}

    def add_new(self, series: Iterable[Series]) -> None:
        """Append points of SeriesAdded events, except those that the first series held already."""
        for one in series:
            key = one.node, one.job, one.name
            end = self._history_ends.get(key, -math.inf)
            rows = [row for row in zip(one.step, one.time, one.value, strict=False) if row[1] > end]
            if rows:
                curve = self._curves.setdefault(key, Curve())
                for row in rows:
                    curve.add(*row)

    def series(self) -> list[Series]:
        """All curves as messages."""
        return [
            Series(
                node=node,
                job=job,
                name=name,
                step=list(curve.step),
                time=list(curve.time),
                value=list(curve.value),
                seen=curve.seen,
            )
            for (node, job, name), curve in self._curves.items()
        ]

    def get(self, node: str, name: str) -> Curve:
        """The curve, or an empty one."""
        return self._curves.get((node, "", name)) or Curve()

    def nodes(self) -> list[str]:
        """Names of the nodes that have a curve, each once."""
        return list(dict.fromkeys(node for node, job, _ in self._curves if not job))

    def of_model(self, job: str, name: str) -> Curve:
        """The curve of what was measured of the global model of ``job``, or an empty one."""
        return self._curves.get(("", job, name)) or Curve()

    def models(self) -> list[str]:
        """Names of the jobs whose global model's loss was measured, each once."""
        return list(dict.fromkeys(job for _, job, name in self._curves if job and name == "loss"))


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` of ``points`` (at least 4): first, last, lowest and highest of each slice between.

    Keeping both extremes of a slice is what keeps a spike of the loss or of the memory visible.
    """
    if len(points) <= limit:
        return list(points)
    slices = max((limit - 2) // 2, 1)
    values = [value for _, value in points[1:-1]]
    kept = [points[0]]
    for index in range(slices):
        begin, end = index * len(values) // slices, (index + 1) * len(values) // slices
        if begin < end:
            kept += [points[1 + place] for place in extremes(values, begin, end)]
    kept.append(points[-1])
    return kept
