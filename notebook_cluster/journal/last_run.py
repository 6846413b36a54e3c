"""A run that is over, from what it left on disk: a report is written of it when the cluster is gone."""

import time
from pathlib import Path

import msgspec

from notebook_cluster.journal.curves import read_series, read_view
from notebook_cluster.journal.old_format import import_old
from notebook_cluster.journal.place import curves_path, journal_path
from notebook_cluster.journal.reading import recover
from notebook_cluster.journal.series import SeriesStore
from notebook_cluster.journal.state import cell_view
from notebook_cluster.protocol.state import ClusterView, RunHistory, Series

MAX_CELLS = 500
"""The newest cells that a report has."""


class LastRun(msgspec.Struct, frozen=True):
    """A run that is over, as a report wants it."""

    view: ClusterView
    curves: list[Series]
    past: RunHistory
    ended: str
    """``ended at 12:00:00: stopped``."""

    def state(self) -> ClusterView:
        return self.view

    def series(self) -> list[Series]:
        return self.curves

    def history(self) -> RunHistory:
        return self.past


def last_run(folder: Path) -> LastRun | None:
    """The run that ended in ``folder``, also one that an earlier version has written; None when there was none.

    Raises:
        ValueError: its journal is damaged; names it.
    """
    import_old(folder)
    last = read_view(curves_path(folder))
    if last is None:
        return None
    recovered = recover(journal_path(folder))
    cells = [cell_view(cell) for cell in recovered.state.cells.values()]
    store = SeriesStore()
    store.take_over(read_series(curves_path(folder)))
    past = RunHistory(
        rounds=recovered.committed.rounds, rounds_seen=recovered.committed.seen, checkpoints=last.checkpoints,
        cells=cells[-MAX_CELLS:], cells_seen=len(cells), peers=last.peers,
    )  # fmt: skip
    clock = time.strftime("%H:%M:%S", time.localtime(last.state.now))
    ended = f"ended at {clock}: {last.ended}" if last.ended else f"its coordinator was killed after {clock}"
    return LastRun(view=last.state, curves=store.all(), past=past, ended=ended)
