"""The curves of one cluster, so that a browser that comes later draws what was before."""

from notebook_cluster.protocol import state
from notebook_cluster.protocol.sidebar import Curve
from notebook_cluster.protocol.thinning import Key, ThinnedCurve, ThinnedCurves, evenly

SENT_POINTS = 200
"""Of a curve, to a browser that connects."""
MAX_CURVES = 512


class CurveHistory:
    """What has come so far, thinned, and what has come since :meth:`take_fresh`."""

    def __init__(self) -> None:
        self._all, self._fresh = ThinnedCurves(MAX_CURVES), ThinnedCurves(MAX_CURVES)
        self._overlaps = False
        self._whole = False

    def begin(self, series: list[state.Series]) -> None:
        """Everything that the coordinator has; the first :meth:`add` after it may say some of it again."""
        self._all, self._fresh = ThinnedCurves(MAX_CURVES), ThinnedCurves(MAX_CURVES)
        self._overlaps = self._whole = True
        for curve in series:
            key = curve.node, curve.job, curve.run, curve.name
            self._all.extend(key, curve.step, curve.time, curve.value, curve.seen)

    def add(self, series: list[state.Series]) -> None:
        """New points."""
        overlaps, self._overlaps = self._overlaps, False
        for curve in series:
            key = curve.node, curve.job, curve.run, curve.name
            known = self._all.begun(key)
            if known is None:
                continue
            after = known.time[-1] if overlaps and known.time else float("-inf")
            new = [row for row in zip(curve.step, curve.time, curve.value, strict=True) if row[1] > after]
            if new:
                step, time, value = zip(*new, strict=True)
                for curves in (self._all, self._fresh):
                    curves.extend(key, step, time, value)

    def all(self) -> list[Curve]:
        """Every curve with at most 200 points: its ends, and the highest and lowest points between."""
        return [_chosen(key, points, evenly(points.value, SENT_POINTS)) for key, points in self._all.items()]

    def take_whole(self) -> bool:
        """True once after :meth:`begin`: who watched before it needs :meth:`all`."""
        whole, self._whole = self._whole, False
        return whole

    def take_fresh(self) -> list[Curve]:
        """Points since the last call."""
        fresh, self._fresh = self._fresh, ThinnedCurves(MAX_CURVES)
        return [_chosen(key, points, evenly(points.value, SENT_POINTS)) for key, points in fresh.items()]


def _chosen(key: Key, points: ThinnedCurve, indices: list[int]) -> Curve:
    step, time, value = points.step, points.time, points.value
    return Curve(
        node=key[0], job=key[1], run=key[2], name=key[3], step=[step[index] for index in indices],
        time=[time[index] for index in indices], value=[value[index] for index in indices],
    )  # fmt: skip
