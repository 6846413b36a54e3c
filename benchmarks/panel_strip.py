"""Panel and strip of a training, for the notebook of ``benchmarks.panel``.

Its nodes are played and train no model, so one is put into what the cluster says: their losses become those of a job of
cell 1, and each state is a new round. All else is what people see.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from notebook_cluster.client import Cluster
from notebook_cluster.journal.kept_rounds import SHOWN_WAITS
from notebook_cluster.magics.display.training_strip import TrainingStrip
from notebook_cluster.protocol.runs import run_number
from notebook_cluster.protocol.state import ClusterView, JobView, RoundWait, Series
from notebook_cluster.protocol.views import SeriesAdded, StateChanged
from notebook_cluster.widgets import show_panel

CELL = 1
JOB = "model"


class WithTraining:
    """``cluster`` with a job that all of its nodes train, and rounds that wait for each of them in turn."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rounds = 0
        self._waits: list[RoundWait] = []

    @property
    def name(self) -> str:
        """As of the cluster."""
        return self._cluster.name

    @property
    def latest(self) -> ClusterView:
        """As of the cluster."""
        return self.state()

    def state(self) -> ClusterView:
        """As of the cluster."""
        return self._with_job(self._cluster.latest or self._cluster.state())

    def series(self) -> list[Series]:
        """As of the cluster."""
        return [_of_job(one) for one in self._cluster.series()]

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """As of the cluster."""

        def tell(event: object) -> None:
            match event:
                case StateChanged():
                    callback(StateChanged(state=self._with_job(event.state)))
                case SeriesAdded():
                    callback(SeriesAdded(series=[_of_job(one) for one in event.series]))
                case _:
                    callback(event)

        return self._cluster.subscribe(tell)

    def _with_job(self, state: ClusterView) -> ClusterView:
        self._rounds += 1
        members = [node.name for node in state.nodes]
        self._waits += (
            [RoundWait(self._rounds, members[self._rounds % len(members)], 0.1, time.time())] if members else []
        )
        self._waits = self._waits[-SHOWN_WAITS:]
        nodes = [msgspec.structs.replace(node, step_cell=CELL) for node in state.nodes]
        job = JobView(
            name=JOB, strategy="DiLoCo", round=self._rounds, attempt=0, phase="training", cell=CELL,
            members=members, waits=self._waits, parameters=1_000_000, bytes_sent=4_000_000 * self._rounds,
            bytes_data_parallel=400_000_000 * self._rounds,
        )  # fmt: skip
        return msgspec.structs.replace(state, nodes=nodes, jobs=[job])


def _of_job(one: Series) -> Series:
    return msgspec.structs.replace(one, job=JOB, run=run_number(CELL, 0)) if one.name == "loss" else one


def show_training_panel(cluster: Cluster) -> None:
    """The panel of ``cluster`` with :data:`JOB`."""
    show_panel(WithTraining(cluster))  # type: ignore[arg-type]


def show_strip(cluster: Cluster, shell: Any) -> TrainingStrip:
    """The strip of :data:`JOB`, under the cell that calls this; it moves until the cluster ends."""
    training = WithTraining(cluster)
    strip = TrainingStrip(training, CELL, shell, attached=True)  # type: ignore[arg-type]
    strip.states({node.name: "running" for node in training.state().nodes})
    return strip
