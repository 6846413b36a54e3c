"""The curves of one cluster, so that a browser that comes later draws what was before."""

from notebook_cluster.protocol import state
from notebook_cluster.protocol.runs import forgotten
from notebook_cluster.protocol.sidebar import Curve
from notebook_cluster.protocol.thinning import ThinnedCurve, evenly

SENT_POINTS = 200
"""Of a curve, to a browser that connects."""
MAX_CURVES = 512
Key = tuple[str, str, int, str]
"""Node, job, run, name."""


class CurveHistory:
    """What has come so far, thinned, and what has come since :meth:`take_fresh`."""

    def __init__(self) -> None:
        self._all: dict[Key, ThinnedCurve] = {}
        self._fresh: dict[Key, ThinnedCurve] = {}
        self._overlaps = False
        self._whole = False

    def begin(self, series: list[state.Series]) -> None:
        """Everything that the coordinator has; the first :meth:`add` after it may say some of it again."""
        self._all, self._fresh = {}, {}
        self._overlaps = self._whole = True
        for curve in series[:MAX_CURVES]:
            points = self._all[curve.node, curve.job, curve.run, curve.name] = ThinnedCurve()
            points.extend(curve.step, curve.time, curve.value, curve.seen)

    def add(self, series: list[state.Series]) -> None:
        """New points."""
        overlaps, self._overlaps = self._overlaps, False
        for curve in series:
            key = curve.node, curve.job, curve.run, curve.name
            if key not in self._all:
                dropped = forgotten([*self._all, key])
                for old in dropped:
                    self._all.pop(old, None)
                    self._fresh.pop(old, None)
                if key in dropped or len(self._all) >= MAX_CURVES:
                    continue
            known, fresh = self._all.setdefault(key, ThinnedCurve()), self._fresh.setdefault(key, ThinnedCurve())
            after = known.time[-1] if overlaps and known.time else float("-inf")
            for row in zip(curve.step, curve.time, curve.value, strict=True):
                if row[1] > after:
                    known.add(*row)
                    fresh.add(*row)

    def all(self) -> list[Curve]:
        """Every curve with at most 200 points: its ends, and the highest and lowest points between."""
        return [_chosen(key, points, evenly(points.value, SENT_POINTS)) for key, points in self._all.items()]

    def take_whole(self) -> bool:
        """True once after :meth:`begin`: who watched before it needs :meth:`all`."""
        whole, self._whole = self._whole, False
        return whole

    def take_fresh(self) -> list[Curve]:
        """Points since the last call."""
        fresh, self._fresh = self._fresh, {}
        return [_chosen(key, points, evenly(points.value, SENT_POINTS)) for key, points in fresh.items() if points.step]


def _chosen(key: Key, points: ThinnedCurve, indices: list[int]) -> Curve:
    step, time, value = points.step, points.time, points.value
    return Curve(
        node=key[0], job=key[1], run=key[2], name=key[3], step=[step[index] for index in indices],
        time=[time[index] for index in indices], value=[value[index] for index in indices],
    )  # fmt: skip
