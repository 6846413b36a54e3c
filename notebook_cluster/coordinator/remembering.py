"""Keeps on disk what neither the run log nor the nodes know: curves, events, checkpoints, the last state.

A coordinator that was killed gets it back; when the cluster is gone a report is made of it (:mod:`.remains`). None of
it decides anything, so nothing is fsynced, and a disk that is full costs the report and not the run.
"""

import logging
from typing import TYPE_CHECKING

import msgspec

from notebook_cluster.coordinator.remains import SERIES_FILE, VIEW_FILE, LastView, read_view, write_view
from notebook_cluster.coordinator.series_file import SeriesFile, read_series
from notebook_cluster.protocol.state import Series

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

log = logging.getLogger(__name__)

VIEW_PERIOD = 2.0


class Memory:
    """Of one coordinator. ``hub`` is asked for its curves, its state and its history."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self._folder = hub.settings.runtime
        self._series = SeriesFile(self._folder / SERIES_FILE, hub.series)
        self._view_due = 0.0
        self._failed = False

    def recall(self) -> None:
        """Go on from what the coordinator before this one has left."""
        self._hub.series.take_over(read_series(self._folder / SERIES_FILE))
        last = read_view(self._folder)
        if last is not None:
            self._hub.events.extend(last.state.events)
            self._hub.views.kernels |= last.state.kernels
            self._hub.rounds.history.checkpoints = last.checkpoints
            self._hub.rounds.take_over(last.state.nodes)
            self._hub.global_models.take_over(last.state.jobs)

    def forget(self) -> None:
        """A new run begins in this folder."""
        for name in (SERIES_FILE, VIEW_FILE):
            (self._folder / name).unlink(missing_ok=True)

    def keep(self, now: float) -> list[Series]:
        """Call a few times a second; ``now`` is monotonic. Returns the points that are new since the last call."""
        fresh = self._hub.series.take_fresh()
        if fresh:
            self._series.append(fresh)
        if now >= self._view_due:
            self._view_due = now + VIEW_PERIOD
            self._keep_view("")
        return fresh

    def close(self, reason: str) -> None:
        """The cluster ends, its nodes still as they were."""
        fresh = self._hub.series.take_fresh()
        if fresh:
            self._series.append(fresh)
        self._series.close()
        self._keep_view(reason)

    def _keep_view(self, ended: str) -> None:
        # No code stands in a file that outlives the cluster.
        state = msgspec.structs.replace(self._hub.view(), invitation="")
        history = self._hub.rounds.history
        try:
            write_view(
                self._folder, LastView(state=state, checkpoints=history.checkpoints, peers=history.peers(), ended=ended)
            )
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("the state of the run cannot be kept in %s: %s", self._folder, error)
            self._failed = True
