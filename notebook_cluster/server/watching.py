"""One running cluster as the server sees it: a live connection, its newest state, its curves."""

import asyncio
import contextlib
import time
from typing import Any

from notebook_cluster.client import ClusterError
from notebook_cluster.client.connection import Connection
from notebook_cluster.protocol import state as s
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.sidebar import ClusterCondition, ClusterRow, Curve
from notebook_cluster.protocol.thinning import Key, ThinnedCurve, ThinnedCurves, evenly

ANSWERS_WITHIN = 2.0
SENT_POINTS = 200
"""Of a curve, to a browser that connects."""
MAX_CURVES = 512


class WatchedCluster:
    """Begins at once; :meth:`row` is what browsers see. Everything here runs on the loop.

    Args:
        looked_at: there is a browser, see :meth:`look_at`.
        unreachable_after: seconds without a word from the coordinator; after a third of them it is asked for one.
    """

    def __init__(self, file: v.ConnectionFile, looked_at: bool, unreachable_after: float) -> None:
        self.file = file
        self._unreachable_after = unreachable_after
        self.state: s.ClusterView | None = None
        self.condition: ClusterCondition = "unreachable"
        self.reason = f"cluster {file.cluster!r}: its coordinator (process {file.pid}) has not answered yet"
        self.history = CurveHistory()
        self.ended_at: float | None = None
        self.known = asyncio.Event()
        """Set when it has answered, or has ended."""
        self._loop = asyncio.get_running_loop()
        self._heard = time.monotonic()
        self._asked = False
        self.connection = Connection(file, "panel" if looked_at else "server")
        self.connection.subscribe(lambda event: self._on_loop(self._event, event))
        self.connection.attached.add_done_callback(lambda future: self._on_loop(self._attached, future))

    def _on_loop(self, call: Any, value: Any) -> None:
        # The server may be gone while the connection's thread still runs.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, value)

    def look_at(self, looked_at: bool) -> None:
        """Whether there is a browser: without one this view does not keep the cluster from ending by itself."""
        self.connection.tell(v.Attach(kind="panel" if looked_at else "server"))

    @property
    def just_met(self) -> bool:
        """Nothing can be said about it yet: it answers within milliseconds, or is in trouble."""
        return not self.known.is_set() and time.monotonic() - self._heard < ANSWERS_WITHIN

    def row(self) -> ClusterRow:
        return ClusterRow(name=self.file.cluster, condition=self.condition, reason=self.reason, state=self.state)

    def check(self) -> None:
        """Call every second: a coordinator that stands still says nothing, not even that."""
        silent = time.monotonic() - self._heard
        if self.condition == "ended" or silent < self._unreachable_after / 3:
            return
        if not self._asked:
            self._asked = True
            with contextlib.suppress(ClusterError):
                asked = self.connection.request(v.GetState(), s.ClusterView)
                asked.add_done_callback(lambda future: self._on_loop(self._attached, future))
        if silent > self._unreachable_after:
            self.condition = "unreachable"
            self.reason = (
                f"the coordinator of cluster {self.file.cluster!r} (process {self.file.pid}) has not answered for "
                f"{silent:.0f} s: if that stays so, end that process"
            )

    async def ask_state(self, seconds: float) -> s.ClusterView:
        """The state as it is now.

        Raises:
            ClusterError: the cluster has ended.
            TimeoutError: its coordinator did not answer within ``seconds``.
        """
        asked = asyncio.wrap_future(self.connection.request(v.GetState(), s.ClusterView))
        state: s.ClusterView = await asyncio.wait_for(asked, seconds)
        return state

    def _attached(self, future: Any) -> None:
        first = self.state is None
        self._asked = False
        try:
            self._heard_state(future.result())
        except ClusterError as error:
            self._ended(str(error))
            return
        if first:
            with contextlib.suppress(ClusterError):
                asked = self.connection.request(v.GetSeries(), list[s.Series])
                asked.add_done_callback(lambda series: self._on_loop(self._series, series))

    def _series(self, future: Any) -> None:
        with contextlib.suppress(ClusterError):
            self.history.begin(future.result())
        self.known.set()

    def _heard_state(self, state: s.ClusterView) -> None:
        self._heard = time.monotonic()
        if self.condition != "ended":
            self.state, self.condition, self.reason = state, "running", ""

    def _event(self, event: Any) -> None:
        match event:
            case v.StateChanged():
                self._heard_state(event.state)
            case v.SeriesAdded():
                self.history.add(event.series)
            case v.Closing():
                self._ended(f"cluster {self.file.cluster!r} has ended: {event.reason}")

    def _ended(self, reason: str) -> None:
        # The connection says it once more when its thread ends.
        if self.condition != "ended":
            self.condition, self.reason, self.ended_at = "ended", reason, time.monotonic()
        self.known.set()

    def close(self) -> None:
        """Leave the cluster; blocks for up to two seconds."""
        self.connection.close()


class CurveHistory:
    """The curves of one cluster, thinned, so that a browser that comes later draws what was before; and what has come
    since :meth:`take_fresh`."""

    def __init__(self) -> None:
        self._all, self._fresh = ThinnedCurves(MAX_CURVES), ThinnedCurves(MAX_CURVES)
        self._overlaps = False
        self._whole = False

    def begin(self, series: list[s.Series]) -> None:
        """Everything that the coordinator has; the first :meth:`add` after it may say some of it again."""
        self._all, self._fresh = ThinnedCurves(MAX_CURVES), ThinnedCurves(MAX_CURVES)
        self._overlaps = self._whole = True
        for curve in series:
            key = curve.node, curve.job, curve.run, curve.name
            self._all.extend(key, curve.step, curve.time, curve.value, curve.seen)

    def add(self, series: list[s.Series]) -> None:
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
        # what was dropped meanwhile is none of a browser's any more
        new = [(key, points) for key, points in fresh.items() if key in self._all]
        return [_chosen(key, points, evenly(points.value, SENT_POINTS)) for key, points in new]


def _chosen(key: Key, points: ThinnedCurve, indices: list[int]) -> Curve:
    step, time, value = points.step, points.time, points.value
    return Curve(
        node=key[0], job=key[1], run=key[2], name=key[3], step=[step[index] for index in indices],
        time=[time[index] for index in indices], value=[value[index] for index in indices],
    )  # fmt: skip
