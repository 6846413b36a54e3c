"""Curves of a run: at most 2,000 points each, thinned rather than cut."""

from collections.abc import Iterable

from notebook_cluster.protocol.runs import forgotten
from notebook_cluster.protocol.state import Series
from notebook_cluster.protocol.thinning import ThinnedCurve

AGAIN = 5.0
"""Seconds: a point of a curve that was taken over from a file is old news while it is not this much newer than the last
one and no step further. What agents had not sent for sure before the coordinator was killed, they send again."""
Key = tuple[str, str, int, str]
"""Node, job, run and name: the node is empty for the global model of a job, the job for what is of none."""


class SeriesStore:
    """All curves of a cluster."""

    def __init__(self) -> None:
        self._curves: dict[Key, ThinnedCurve] = {}
        self._fresh: dict[Key, list[tuple[int, float, float]]] = {}
        self._taken_over: dict[Key, tuple[int, float]] = {}

    def add(self, node: str, name: str, step: int, time: float, value: float, *, job: str = "", run: int = 0) -> None:
        key = node, job, run, name
        if key in self._taken_over:
            last_step, last_time = self._taken_over[key]
            if step <= last_step and time < last_time + AGAIN:
                return
            del self._taken_over[key]
        self._curve(key).add(step, time, value)
        self._fresh.setdefault(key, []).append((step, time, value))

    def take_over(self, series: Iterable[Series]) -> None:
        """Go on from curves that a coordinator before this one has left."""
        for one in series:
            key = one.node, one.job, one.run, one.name
            curve = self._curve(key)
            curve.extend(one.step, one.time, one.value, one.seen)
            if one.name != "memory" and curve.step:
                self._taken_over[key] = curve.step[-1], curve.time[-1]

    def _curve(self, key: Key) -> ThinnedCurve:
        if key not in self._curves:
            self._curves[key] = ThinnedCurve()
            for old in forgotten(self._curves):
                del self._curves[old]
        return self._curves.get(key) or ThinnedCurve()

    def all(self) -> list[Series]:
        return [
            Series(node=node, job=job, run=run, name=name, step=list(c.step), time=list(c.time), value=list(c.value),
                   seen=c.seen)
            for (node, job, run, name), c in self._curves.items()
        ]  # fmt: skip

    def take_fresh(self) -> list[Series]:
        """Points since the last call."""
        fresh, self._fresh = self._fresh, {}
        return [
            Series(node=node, job=job, run=run, name=name, step=[p[0] for p in points], time=[p[1] for p in points],
                   value=[p[2] for p in points])
            for (node, job, run, name), points in fresh.items()
        ]  # fmt: skip
