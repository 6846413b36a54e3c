"""What nodes have measured of the global model of a job, as one curve for each number.

Several nodes may measure the same round, on the same data or each on its part: the point of that round is the mean of
what they say. It is complete when every node of the cell has told, and at the latest WAIT seconds after the first.
"""

import time
from typing import TYPE_CHECKING

import msgspec

from notebook_cluster.protocol.node import GlobalMeasured
from notebook_cluster.protocol.state import JobView

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

WAIT = 3.0
MOST_VALUES = 64
MOST_NAME = 64


class _Round(msgspec.Struct):
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
    """One for each cluster. ``hub`` is asked for jobs, cells and curves."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self._rounds: dict[str, _Round] = {}
        self._losses: dict[str, tuple[int, float]] = {}

    def told(self, node: str, message: GlobalMeasured, when: float) -> None:
        """``node`` has measured at ``when`` (seconds since the epoch, our clock)."""
        committed = self._hub.rounds.committed(message.job)
        if committed is None:
            return
        values = {name: v for name, v in list(message.values.items())[:MOST_VALUES] if len(name) <= MOST_NAME}
        open_round = self._rounds.get(message.job)
        same = open_round is not None and open_round.run == message.run
        if open_round is not None and same and message.round < open_round.round <= committed:
            return  # it is late: the next round has its point already
        if open_round is not None and (not same or open_round.round != message.round or node in open_round.told):
            self._show(message.job, open_round)
            open_round = None
        if open_round is None:
            open_round = _Round(message.run, message.round, message.step, when, time.monotonic())
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

    def _waits_for(self, one: _Round) -> bool:
        # A node's cell may be known to have ended before its last measurement comes, which has a way of its own.
        state = self._hub.state
        cell = state.running() or next(reversed(state.cells.values()), None)
        nodes = cell.nodes if cell is not None else {}
        return any(status in ("running", "ok") and name not in one.told for name, status in nodes.items())

    def _show(self, job: str, one: _Round) -> None:
        if one.shown:
            return
        one.shown = True
        for name in dict.fromkeys(name for values in one.told.values() for name in values):
            found = [values[name] for values in one.told.values() if name in values]
            mean = sum(found) / len(found)
            self._hub.series.add("", name, one.step, one.time, mean, job=job, run=one.run)
            if name == "loss":
                self._losses[job] = one.round, mean
        self._hub.dirty()

    def shown_in(self, job: JobView) -> JobView:
        """``job`` with the newest loss of its global model."""
        found = self._losses.get(job.name)
        return job if found is None else msgspec.structs.replace(job, loss=found[1], loss_round=found[0])
