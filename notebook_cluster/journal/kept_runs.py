"""Runs that are over: kept ones, each in a folder of its own under ``runs/`` of its cluster's folder, and the last run
of a cluster as a report wants it.
"""

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from notebook_cluster.journal.curves import SeriesStore, read_series, read_view
from notebook_cluster.journal.old_format import LOG_FILE, SERIES_FILE, VIEW_FILE, import_old
from notebook_cluster.journal.place import CURVES_FILE, JOURNAL_FILE, curves_path, journal_path, place_of
from notebook_cluster.journal.reading import recover
from notebook_cluster.journal.state import cell_view
from notebook_cluster.journal.store import CURVES, JOURNAL, checkpoint, open_to_write, remove
from notebook_cluster.protocol.state import ClusterView, RunHistory, Series

RUNS = "runs"
MOST_RUNS, MOST_MEGABYTES = 50, 1000
RUNS_VARIABLE, MEGABYTES_VARIABLE = "NOTEBOOK_CLUSTER_KEEP_RUNS", "NOTEBOOK_CLUSTER_KEEP_MB"
"""How many runs of all clusters of this user are kept, and how many megabytes of them."""


class KeptRun(NamedTuple):
    """One run: ``folder`` is where its journal lies, ``ended`` why it ended (empty: it runs, or was killed)."""

    cluster: str
    folder: Path
    view: ClusterView
    ended: str


def set_aside(folder: Path) -> Path | None:
    """Move what the last run has left in ``folder``, whose lock the caller holds, to a folder of its own below; None
    when there is nothing. What cannot be read is moved as it is."""
    with contextlib.suppress(ValueError, OSError):
        import_old(folder, locked=True)
    place = place_of(folder)
    names = [*_parts(JOURNAL_FILE), *_parts(CURVES_FILE), LOG_FILE, SERIES_FILE, VIEW_FILE]
    names += [f"{name}.imported" for name in (LOG_FILE, SERIES_FILE, VIEW_FILE)]
    if not any((where / name).exists() for where in {folder, place} for name in names):
        return None
    for name, tables in ((JOURNAL_FILE, JOURNAL), (CURVES_FILE, CURVES)):
        _finish(place / name, tables)
    target = _new_folder(folder / RUNS)
    for where in dict.fromkeys((folder, place)):  # what lies on this machine is newer than its copy
        for name in names:
            if (where / name).exists():
                shutil.move(where / name, target / name)
        for name in (JOURNAL_FILE, CURVES_FILE):
            (where / f"{name}-shm").unlink(missing_ok=True)
    return target


def _parts(name: str) -> tuple[str, str]:
    return name, f"{name}-wal"


def _finish(path: Path, tables: str) -> None:
    """Move the write-ahead log over, so that the file stands alone; one that cannot be is kept with its log."""
    if not path.exists():
        return
    with contextlib.suppress(sqlite3.Error, ValueError):
        connection = open_to_write(path, tables)
        checkpoint(connection)
        connection.execute("PRAGMA journal_mode=DELETE")  # nobody writes it any more, and it may be read over a network
        connection.close()


def _new_folder(runs: Path) -> Path:
    runs.mkdir(mode=0o700, exist_ok=True)
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        target = runs / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            target.mkdir(mode=0o700)
            return target
    raise FileExistsError(f"{runs} has a thousand runs of this second: remove some")


def kept_runs(clusters: Path) -> list[KeptRun]:
    """The runs of all clusters whose folders are in ``clusters``, the newest first: the kept ones, and the last of each
    cluster, whether it runs or is over. One that nobody has looked at, or that cannot be read, is left out."""
    found = []
    for cluster, folder in _folders(clusters):
        view = read_view(curves_path(folder))
        if view is not None:
            found.append(KeptRun(cluster, folder, view.state, view.ended))
    return sorted(found, key=lambda run: run.view.started, reverse=True)


def _folders(clusters: Path) -> Iterator[tuple[str, Path]]:
    for folder in sorted(clusters.glob("*/")):
        with contextlib.suppress(ValueError, OSError):
            import_old(folder)
        yield folder.name, folder
        for kept in sorted(folder.glob(f"{RUNS}/*/")):
            yield folder.name, kept


def let_old_runs_go(clusters: Path) -> None:
    """Delete the oldest kept runs of all clusters until few enough are left. The last run of a cluster, which lies in
    its own folder, is never among them.

    Raises:
        ValueError: one of the variables is no number.
    """
    most, megabytes = _setting(RUNS_VARIABLE, MOST_RUNS), _setting(MEGABYTES_VARIABLE, MOST_MEGABYTES)
    runs = sorted(clusters.glob(f"*/{RUNS}/*/"), key=lambda folder: (folder.name, str(folder)), reverse=True)
    room = megabytes * 1_000_000
    for number, folder in enumerate(runs):
        room -= sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        if number >= most or room < 0:
            for name in (JOURNAL_FILE, CURVES_FILE):
                remove(folder / name)
            shutil.rmtree(folder, ignore_errors=True)


def _setting(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdigit():
        raise ValueError(f"{variable}={text}: use a whole number, 0 or more")
    return int(text)


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
