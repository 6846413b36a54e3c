"""What a run leaves on disk beside its log and its curves, so that a report can be written when the cluster is gone."""

import time
from pathlib import Path

import msgspec

from notebook_cluster.coordinator.cells import cell_view
from notebook_cluster.coordinator.history import MAX_CELLS, Rounds
from notebook_cluster.coordinator.runlog import read_log
from notebook_cluster.coordinator.series import SeriesStore
from notebook_cluster.coordinator.series_file import read_series
from notebook_cluster.protocol import decode, encode
from notebook_cluster.protocol.history import CheckpointView, PeerVersions, RunHistory
from notebook_cluster.protocol.state import ClusterView, Series
from notebook_cluster.protocol.wire import Message, ProtocolError

VIEW_FILE = "last.view"
SERIES_FILE = "series.jsonl"
LOG_FILE = "run.jsonl"


class LastView(Message, frozen=True):
    """The cluster as it was last, and what is in no log. ``ended``: why it ended, empty while it runs."""

    state: ClusterView
    checkpoints: list[CheckpointView]
    peers: list[PeerVersions]
    ended: str = ""


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


def write_view(folder: Path, view: LastView) -> None:
    """Keep ``view``; the file appears whole or not at all. OSError: it cannot be written."""
    partial = folder / f".{VIEW_FILE}.partial"
    partial.touch(mode=0o600)
    partial.write_bytes(encode(view))
    partial.replace(folder / VIEW_FILE)


def read_view(folder: Path) -> LastView | None:
    """What was kept last in ``folder``; None when nothing was, or by a version that wrote it differently."""
    try:
        view: LastView = decode((folder / VIEW_FILE).read_bytes(), LastView)
    except (FileNotFoundError, ProtocolError):
        return None
    return view


def last_run(folder: Path) -> LastRun | None:
    """The run that ended in ``folder``; None when there was none.

    Raises:
        ValueError: its log is damaged; names the line.
    """
    last = read_view(folder)
    if last is None:
        return None
    rounds = Rounds()
    recovered = read_log(folder / LOG_FILE, on_round=rounds.replay)
    cells = [cell_view(cell) for cell in recovered.state.cells.values()]
    store = SeriesStore()
    store.take_over(read_series(folder / SERIES_FILE))
    past = RunHistory(
        rounds=rounds.rounds, rounds_seen=rounds.seen, checkpoints=last.checkpoints, cells=cells[-MAX_CELLS:],
        cells_seen=len(cells), peers=last.peers,
    )  # fmt: skip
    clock = time.strftime("%H:%M:%S", time.localtime(last.state.now))
    ended = f"ended at {clock}: {last.ended}" if last.ended else f"its coordinator was killed after {clock}"
    return LastRun(view=last.state, curves=store.all(), past=past, ended=ended)
