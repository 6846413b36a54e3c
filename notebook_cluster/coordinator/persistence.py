"""Keeps on disk what neither the journal nor the nodes know: curves, events, checkpoints, the last state.

A coordinator that was killed gets it back; when the cluster is gone a report is made of it.
"""

from typing import TYPE_CHECKING

import msgspec

from notebook_cluster.journal.curves import CurvesFile, LastView, read_series, read_view
from notebook_cluster.journal.place import curves_path
from notebook_cluster.protocol.state import Series

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

VIEW_PERIOD = 2.0


class ViewPersistence:
    """Of one coordinator. ``hub`` is asked for its curves, its state and its history."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self._folder = hub.settings.runtime
        self._curves = CurvesFile(self._folder, hub.series)
        self._view_due = 0.0

    def recall(self) -> None:
        """Go on from what the coordinator before this one has left."""
        self._hub.series.take_over(read_series(curves_path(self._folder)))
        last = read_view(curves_path(self._folder))
        if last is not None:
            self._hub.events.extend(last.state.events)
            self._hub.views.kernels |= last.state.kernels
            self._hub.rounds.history.checkpoints = last.checkpoints
            self._hub.rounds.take_over(last.state.nodes)
            self._hub.global_models.take_over(last.state.jobs)

    def keep(self, now: float) -> list[Series]:
        """Call a few times a second; ``now`` is monotonic. Returns the points that are new since the last call."""
        fresh = self._hub.series.take_fresh()
        if fresh:
            self._curves.append(fresh)
        if now >= self._view_due:
            self._view_due = now + VIEW_PERIOD
            self._keep_view("")
        return fresh

    def close(self, reason: str) -> None:
        """The cluster ends, its nodes still as they were."""
        fresh = self._hub.series.take_fresh()
        if fresh:
            self._curves.append(fresh)
        self._keep_view(reason)
        self._curves.close()

    def _keep_view(self, ended: str) -> None:
        # No code stands in a file that outlives the cluster.
        state = msgspec.structs.replace(self._hub.view(), invitation="")
        history = self._hub.rounds.history
        self._curves.keep_view(
            LastView(state=state, checkpoints=history.checkpoints, peers=history.peers(), ended=ended)
        )
