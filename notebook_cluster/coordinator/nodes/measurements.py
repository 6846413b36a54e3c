"""What agents and runtimes measure: memory, load, steps and losses of the nodes, and numbers of the global model."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from notebook_cluster.coordinator.core import Core, MembershipWatcher
from notebook_cluster.journal.curves import SeriesStore
from notebook_cluster.protocol import peer as p
from notebook_cluster.protocol.node import GlobalMeasured, RunLosses, Telemetry
from notebook_cluster.protocol.runs import IN_A_CELL
from notebook_cluster.protocol.state import JobView

CLOCK_WAS_SET = 12 * 3600.0
MOST_DEVICES = 64
MOST_RUNS = 16
"""Of which one message tells losses."""
WAIT = 3.0
"""Seconds after the first measurement of a round of the global model in which the other nodes may tell theirs."""
MOST_VALUES = 64
MOST_NAME = 64
Told = TypeVar("Told")


class _MeasuredRound(msgspec.Struct):
    """What was told of one round; ``shown``: it is in the curves."""

    run: int
    round: int
    step: int
    time: float
    """Of the first measurement, our clock."""
    since: float
    told: dict[str, dict[str, float]] = {}
    shown: bool = False


class GlobalModels:
    """What nodes have measured of the global model of a job, as one curve for each number.

    Several nodes may measure the same round, on the same data or each on its part: the point of that round is the mean
    of what they say. It is complete when every node of the cell has told, and at the latest WAIT seconds after the
    first.
    """

    def __init__(self, core: Core, series: SeriesStore, *, committed: Callable[[str], int | None]) -> None:
        """``committed`` as of :class:`Measurements`."""
        self._core = core
        self._series = series
        self._committed = committed
        self._rounds: dict[str, _MeasuredRound] = {}
        self._losses: dict[str, tuple[int, float]] = {}

    def told(self, node: str, message: GlobalMeasured, when: float) -> None:
        """``node`` has measured at ``when`` (seconds since the epoch, our clock)."""
        committed = self._committed(message.job)
        if committed is None:
            return
        values = _few(message.values)
        open_round = self._rounds.get(message.job)
        same = open_round is not None and open_round.run == message.run
        if open_round is not None and same and message.round < open_round.round <= committed:
            return  # it is late: the next round has its point already
        if open_round is not None and (not same or open_round.round != message.round or node in open_round.told):
            self._show(message.job, open_round)
            open_round = None
        if open_round is None:
            open_round = _MeasuredRound(message.run, message.round, message.step, when, time.monotonic())
            self._rounds[message.job] = open_round
        open_round.told[node] = values
        if not self._waits_for(open_round):
            self._show(message.job, open_round)

    def tick(self, now: float) -> None:
        """Show what was waited for long enough; ``now`` is monotonic."""
        for job, one in self._rounds.items():
            if not one.shown and now - one.since >= WAIT:
                self._show(job, one)

    def close(self) -> None:
        """The cluster ends: show what there is."""
        for job, one in self._rounds.items():
            self._show(job, one)

    def take_over(self, jobs: list[JobView]) -> None:
        """Go on from what the coordinator before this one has shown."""
        for job in jobs:
            if job.loss is not None and job.loss_round is not None:
                self._losses[job.name] = job.loss_round, job.loss

    def _waits_for(self, one: _MeasuredRound) -> bool:
        # A node's cell may be known to have ended before its last measurement comes, which has a way of its own.
        cell = self._core.state.shown_cell()
        nodes = cell.nodes if cell is not None else {}
        return any(status in ("running", "ok") and name not in one.told for name, status in nodes.items())

    def _show(self, job: str, one: _MeasuredRound) -> None:
        if one.shown:
            return
        one.shown = True
        for name in dict.fromkeys(name for values in one.told.values() for name in values):
            found = [values[name] for values in one.told.values() if name in values]
            mean = sum(found) / len(found)
            self._series.add("", name, one.step, one.time, mean, job=job, run=one.run)
            if name == "loss":
                self._losses[job] = one.round, mean
        self._core.dirty()

    def shown_in(self, job: JobView) -> JobView:
        """``job`` with the newest loss of its global model."""
        found = self._losses.get(job.name)
        return job if found is None else msgspec.structs.replace(job, loss=found[1], loss_round=found[0])


class Measurements(MembershipWatcher):
    """The newest numbers of nodes, devices and peers; what makes a curve goes into ``series``."""

    def __init__(
        self,
        core: Core,
        series: SeriesStore,
        global_models: GlobalModels,
        *,
        committed: Callable[[str], int | None],
        on_waiting: Callable[[str, str], None],
    ) -> None:
        """``committed(job)``: its last committed round, None when there is no such job; ``on_waiting(node, text)``:
        what a node waits for is another thing now."""
        self._core = core
        self._series = series
        self._global_models = global_models
        self._committed = committed
        self._on_waiting = on_waiting
        self._telemetry: dict[str, Telemetry] = {}
        self._samples: dict[str, p.NodeSample] = {}
        self._devices: dict[str, dict[str, p.DeviceSample]] = {}
        self._power: dict[str, tuple[float | None, bool]] = {}
        self._ahead: dict[str, float] = {}

    def on_telemetry(self, name: str, new: Telemetry) -> None:
        """What a node's runtime says about its training, at most 4 times a second."""
        before = self._telemetry.get(name, Telemetry())
        self._telemetry[name] = msgspec.structs.replace(new, scalars=_few(new.scalars), history={}, losses=[])
        if not self._core.state.nodes[name].is_in:
            return
        if new.waiting != before.waiting:
            self._on_waiting(name, new.waiting)
        # Not from its points: a node that computed for a minute tells them a minute late.
        ahead = self._clock_difference(name, new.sent)
        curves = [(reported, "", 0, points) for reported, points in _few(new.history).items()]
        curves += [("loss", told.job, told.run, told.points) for told in new.losses[:MOST_RUNS] if self._is_run(told)]
        for curve, job, run, points in curves:
            for step, when, value in points:
                if math.isfinite(when):  # a value that is not finite is a gap in the curve
                    self._series.add(name, curve, step, when + ahead, value, job=job, run=run)
        self._core.dirty()

    def _is_run(self, told: RunLosses) -> bool:
        """It is of a job that there is, and of a cell that was."""
        newest = (max(self._core.state.cells, default=0) + 1) * IN_A_CELL
        return self._committed(told.job) is not None and 0 <= told.run < newest

    def on_global(self, name: str, message: GlobalMeasured) -> None:
        """What a node has measured of a global model."""
        if self._core.state.nodes[name].is_in and math.isfinite(message.time):
            when = message.time + self._clock_difference(name, message.time)
            self._global_models.told(name, message, when)

    def _clock_difference(self, name: str, said: float) -> float:
        """Seconds that this machine's clock is ahead of the node's, about, from the time that a message says: of
        every one the time on the way is in it, so the smallest is the best."""
        if not math.isfinite(said):
            return self._ahead.get(name, 0.0)
        now = time.time() - said
        known = self._ahead.get(name, now)
        # A clock that was set is not a message that took half a day.
        self._ahead[name] = now if now - known > CLOCK_WAS_SET else min(known, now)
        return self._ahead[name]

    def on_sample(self, peer: str, sample: p.PeerSample) -> None:
        """What the agent of ``peer`` measures each second."""
        self._devices[peer] = {device.id: device for device in sample.devices[:MOST_DEVICES]}
        self._power[peer] = finite(sample.battery), sample.plugged
        for row in sample.nodes:
            node = self._core.state.nodes.get(row.node)
            if node is None or node.peer != peer:
                continue
            self._samples[row.node] = row
            step = self._telemetry[row.node].step if row.node in self._telemetry else None
            # Our clock: a peer's may be a day off.
            self._series.add(row.node, "memory", step or 0, time.time(), float(self.memory(row.node)[0]))
        self._core.dirty()

    def memory(self, name: str) -> tuple[int, int]:
        """(used, peak) bytes: of the accelerator where the node uses one, else resident."""
        sample, telemetry = self._samples.get(name), self._telemetry.get(name)
        if self._core.state.nodes[name].device not in ("", "cpu"):
            if telemetry is not None and telemetry.memory_used is not None:
                return telemetry.memory_used, telemetry.memory_peak or telemetry.memory_used
            if sample is not None and sample.device_memory is not None:
                return sample.device_memory, sample.device_memory
        return (sample.rss, sample.rss_peak) if sample is not None else (0, 0)

    def power(self, peer: str) -> tuple[float | None, bool]:
        """(charge of its battery in percent or None, whether it is on mains)."""
        return self._power.get(peer, (None, True))

    def node_removed(self, name: str) -> None:
        self._telemetry.pop(name, None)
        self._samples.pop(name, None)
        self._ahead.pop(name, None)

    # ---- what views see

    def telemetry(self, name: str) -> Telemetry:
        """The newest of a node."""
        return self._telemetry.get(name, Telemetry())

    def sample(self, name: str) -> p.NodeSample | None:
        """What its agent measured last of a node."""
        return self._samples.get(name)

    def device(self, peer: str, device: str) -> p.DeviceSample | None:
        """What the agent of ``peer`` measured last of a device."""
        return self._devices.get(peer, {}).get(device)


def _few(numbers: dict[str, Told]) -> dict[str, Told]:
    """As many as people look at, of what a node says under names of its own."""
    return {name: value for name, value in list(numbers.items())[:MOST_VALUES] if len(name) <= MOST_NAME}


def finite(value: float | None) -> float | None:
    """``value``; None when it is no number."""
    return value if value is not None and math.isfinite(value) else None
