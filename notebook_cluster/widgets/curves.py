"""The curves of a cluster, kept small: new points are merged, and each has a name. Pure data."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from notebook_cluster.protocol.runs import IN_A_CELL, places
from notebook_cluster.protocol.state import Series
from notebook_cluster.protocol.thinning import Point, ThinnedCurve, ThinnedCurves
from notebook_cluster.widgets.formatting import plain
from notebook_cluster.widgets.pictures import Line


class LossCurve(NamedTuple):
    """The loss of a node, or of the global model, in one run of a job."""

    node: str
    job: str
    run: int
    curve: ThinnedCurve
    newest: bool
    """No run of this job was begun later."""
    of_run: str
    """``generator``, ``model run 2``; empty where nothing else is drawn."""
    dash: int
    """0, 1, 2 ... for the jobs in the order in which they appeared: several are told apart by more than their names."""
    is_over: bool = False
    """A later cell has trained another job."""


class CurveChoice(NamedTuple):
    """What the curves of a panel show."""

    metric: str = "loss"
    smooth: bool = True
    """Nodes' numbers as a running mean; those of a global model are never."""
    log: bool = False
    """The axis of the metric is logarithmic: what is not above 0 is a gap."""


class Curves:
    """All curves in the order in which they appeared: of nodes, and of the global models of jobs."""

    @classmethod
    def of(cls, series: "Curves | Iterable[Series]") -> "Curves":
        """``series``; itself where it has its curves already, which costs nothing."""
        return series if isinstance(series, Curves) else cls(series)

    def __init__(self, series: Iterable[Series] = ()) -> None:
        self._curves = ThinnedCurves()
        for one in series:
            key = one.node, one.job, one.run, one.name
            self._curves.extend(key, one.step, one.time, one.value, one.seen)
        self._history_ends = {key: max(curve.time, default=0.0) for key, curve in self._curves.items()}

    def add_new(self, series: Iterable[Series]) -> None:
        """Append points of SeriesAdded events, except those that the first series held already."""
        for one in series:
            key = one.node, one.job, one.run, one.name
            end = self._history_ends.get(key, -math.inf)
            rows = [row for row in zip(one.step, one.time, one.value, strict=False) if row[1] > end]
            if rows:
                step, time, value = zip(*rows, strict=True)
                self._curves.extend(key, step, time, value)

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

    def get(self, node: str, name: str) -> ThinnedCurve:
        """The curve that was begun last, or an empty one."""
        found = [curve for key, curve in self._curves.items() if (key[0], key[3]) == (node, name) and curve.time]
        return max(found, key=lambda curve: curve.time[0], default=ThinnedCurve())

    def nodes(self) -> list[str]:
        """Names of the nodes that have a curve, each once."""
        return list(dict.fromkeys(node for node, _, _, _ in self._curves if node))

    def metrics(self) -> list[str]:
        """Names of what is trained for or reported, those begun first first, but the loss before all."""
        names = dict.fromkeys(name for _, _, _, name in self._curves if name != "memory")
        return sorted(names, key=lambda name: name != "loss")

    def losses(self, metric: str = "loss") -> list[LossCurve]:
        """Of nodes: every run of every job, those begun first first. ``metric``: another number than the loss."""
        return self._runs(metric, of_nodes=True)

    def model_losses(self, metric: str = "loss") -> list[LossCurve]:
        """Of the global models, likewise."""
        return self._runs(metric, of_nodes=False)

    def _runs(self, metric: str, *, of_nodes: bool) -> list[LossCurve]:
        keys = [key for key in self._curves if key[3] == metric and bool(key[0]) == of_nodes]
        runs: dict[str, list[int]] = {}
        for _, job, run, _ in keys:
            runs.setdefault(job, []).append(run)
        numbers, jobs = {job: places(of_job) for job, of_job in runs.items()}, list(runs)
        cell = max((run for of_job in runs.values() for run in of_job), default=0) // IN_A_CELL
        found = []
        for key in sorted(keys, key=lambda key: (key[2], jobs.index(key[1]))):
            node, job, run, _ = key
            several = len(numbers[job]) > 1
            named = f"{job or 'nc.report'} run {numbers[job][run]}" if several else job or "nc.report"
            found.append(
                LossCurve(
                    node, job, run, self._curves[key], run == max(numbers[job]),
                    named if several or len(jobs) > 1 else "", jobs.index(job), bool(job) and run // IN_A_CELL < cell,
                )
            )  # fmt: skip
        return found

    def of_model(self, job: str, name: str) -> ThinnedCurve:
        """The curve of what was measured of the global model in the newest run of ``job``, or an empty one."""
        found = {key[2]: curve for key, curve in self._curves.items() if (key[0], key[1], key[3]) == ("", job, name)}
        return found[max(found)] if found else ThinnedCurve()

    def models(self, metric: str = "loss") -> list[str]:
        """Names of the jobs whose global model's loss (or ``metric``) was measured, each once."""
        return list(dict.fromkeys(job for node, job, _, name in self._curves if not node and name == metric))


_FEW_POINTS = 50
_SMOOTHING = 0.9


def metric_title(metric: str, limit: int = 40) -> str:
    """``Loss``, or what was reported by its name."""
    return "Loss" if metric == "loss" else plain(metric, limit)


def are_noise(losses: Iterable[LossCurve]) -> bool:
    """Whether the curves of nodes in a chart are drawn as running means where people wish it: all of them or none, or
    one that ended early would seem to be elsewhere. A few points, measured now and then, are no noise."""
    return any(len(one.curve.step) > _FEW_POINTS for one in losses)


def smoothed(values: Iterable[float]) -> list[float]:
    """The exponential mean of ``values`` up to each, without the pull to the first (as Adam's first moment); a value
    that is not finite stays one and counts for nothing."""
    found, total, weight = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            total = _SMOOTHING * total + (1 - _SMOOTHING) * value
            weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        found.append(total / weight if math.isfinite(value) else value)
    return found


def smoothed_points(points: list[Point]) -> list[Point]:
    """``points`` with the mean of :func:`smoothed` in place of each value."""
    return [(x, y) for (x, _), y in zip(points, smoothed(y for _, y in points), strict=True)]


DASH_NAMES = ("solid", "dashed", "short dashes", "dashes and dots")


def run_label(one: LossCurve) -> str:
    """``desk``, or ``desk, model run 2`` where there is more than one run or job."""
    return plain(f"{one.node}, {one.of_run}" if one.of_run else one.node, 64)


def run_line(one: LossCurve, colour: str) -> Line:
    """Its line, without points."""
    return Line(run_label(one), colour, [], faint=not one.newest, dash=one.dash)


def run_notes(losses: Sequence[LossCurve], what: str = "Loss") -> list[str]:
    """Lines of a legend of ``what`` is drawn: which job has which kind of line, and which runs are faint."""
    plainly = list(dict.fromkeys((one.of_run, one.dash) for one in losses if one.newest and one.of_run))
    earlier = list(dict.fromkeys(one.of_run for one in losses if not one.newest))
    several = len(plainly) > 1
    names = [
        f"{plain(name, 40)} ({DASH_NAMES[dash % len(DASH_NAMES)]})" if several else plain(name, 40)
        for name, dash in plainly
    ]
    notes = [f"{what}: {', '.join(names)}"] if names else []
    notes += [f"Faint: {', '.join(plain(name, 40) for name in earlier)}"] if earlier else []
    return ["; ".join(notes)] if notes else []
