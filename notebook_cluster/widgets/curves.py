"""The curves of a cluster, kept small: merge new points, thin long curves without losing their peaks.

Pure data, used by the plotly figure and by the static pictures.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from notebook_cluster.protocol.runs import forgotten, places
from notebook_cluster.protocol.state import Series
from notebook_cluster.protocol.thinning import ThinnedCurve, evenly

Point = tuple[float, float]


class PlottedCurve(ThinnedCurve):
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


Key = tuple[str, str, int, str]
"""Node (empty: the global model), job and run (empty and 0: of none), name."""


class LossCurve(NamedTuple):
    """The loss of a node, or of the global model, in one run of a job."""

    node: str
    job: str
    run: int
    curve: PlottedCurve
    newest: bool
    """No run of this job was begun later."""
    of_run: str
    """``generator``, ``model run 2``; empty where nothing else is drawn."""
    dash: int
    """0, 1, 2 ... for the jobs in the order in which they appeared: several are told apart by more than their names."""


class Curves:
    """All curves in the order in which they appeared: of nodes, and of the global models of jobs."""

    def __init__(self, series: Iterable[Series] = ()) -> None:
        self._curves: dict[Key, PlottedCurve] = {}
        for one in series:
            key = one.node, one.job, one.run, one.name
            self._curves.setdefault(key, PlottedCurve()).extend(one.step, one.time, one.value, one.seen)
        self._history_ends = {key: max(curve.time, default=0.0) for key, curve in self._curves.items()}

    def add_new(self, series: Iterable[Series]) -> None:
        """Append points of SeriesAdded events, except those that the first series held already."""
        for one in series:
            key = one.node, one.job, one.run, one.name
            end = self._history_ends.get(key, -math.inf)
            rows = [row for row in zip(one.step, one.time, one.value, strict=False) if row[1] > end]
            if rows:
                if key not in self._curves:
                    self._curves[key] = PlottedCurve()
                    for old in forgotten(self._curves):
                        del self._curves[old]
                curve = self._curves.get(key) or PlottedCurve()
                for row in rows:
                    curve.add(*row)

    def series(self) -> list[Series]:
        """All curves as messages."""
        return [
            Series(
                node=node,
                job=job,
                run=run,
                name=name,
                step=list(curve.step),
                time=list(curve.time),
                value=list(curve.value),
                seen=curve.seen,
            )
            for (node, job, run, name), curve in self._curves.items()
        ]

    def get(self, node: str, name: str) -> PlottedCurve:
        """The curve that was begun last, or an empty one."""
        found = [curve for key, curve in self._curves.items() if (key[0], key[3]) == (node, name) and curve.time]
        return max(found, key=lambda curve: curve.time[0], default=PlottedCurve())

    def nodes(self) -> list[str]:
        """Names of the nodes that have a curve, each once."""
        return list(dict.fromkeys(node for node, _, _, _ in self._curves if node))

    def losses(self) -> list[LossCurve]:
        """Of nodes: every run of every job, those begun first first."""
        return self._losses(of_nodes=True)

    def model_losses(self) -> list[LossCurve]:
        """Of the global models, likewise."""
        return self._losses(of_nodes=False)

    def _losses(self, *, of_nodes: bool) -> list[LossCurve]:
        keys = [key for key in self._curves if key[3] == "loss" and bool(key[0]) == of_nodes]
        runs: dict[str, list[int]] = {}
        for _, job, run, _ in keys:
            runs.setdefault(job, []).append(run)
        numbers, jobs = {job: places(of_job) for job, of_job in runs.items()}, list(runs)
        found = []
        for key in sorted(keys, key=lambda key: (key[2], jobs.index(key[1]))):
            node, job, run, _ = key
            several = len(numbers[job]) > 1
            named = f"{job or 'nc.report'} run {numbers[job][run]}" if several else job or "nc.report"
            found.append(
                LossCurve(
                    node, job, run, self._curves[key], run == max(numbers[job]),
                    named if several or len(jobs) > 1 else "", jobs.index(job),
                )
            )  # fmt: skip
        return found

    def of_model(self, job: str, name: str) -> PlottedCurve:
        """The curve of what was measured of the global model in the newest run of ``job``, or an empty one."""
        found = {key[2]: curve for key, curve in self._curves.items() if (key[0], key[1], key[3]) == ("", job, name)}
        return found[max(found)] if found else PlottedCurve()

    def models(self) -> list[str]:
        """Names of the jobs whose global model's loss was measured, each once."""
        return list(dict.fromkeys(job for node, job, _, name in self._curves if not node and name == "loss"))


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` of ``points`` (at least 4), chosen by :func:`.thinning.evenly`: a spike of the loss or of the
    memory stays visible."""
    return [points[index] for index in evenly([value for _, value in points], limit)]
