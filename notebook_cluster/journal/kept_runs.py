"""Runs that are over: kept ones, each in a folder of its own under ``runs/`` of its cluster's folder, the last run of a
cluster as a report wants it, and runs that were written before there was a journal.

Such a run (``run.jsonl``, ``series.jsonl`` and ``last.view``) is read once, into a journal; its files stay beside that,
with ``.imported`` behind their names.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from notebook_cluster.journal.curves import LastView, SeriesStore, pack, read_series, read_view, unpack
from notebook_cluster.journal.events import Event
from notebook_cluster.journal.reading import recover
from notebook_cluster.journal.records import Record, Shape, to_row
from notebook_cluster.journal.state import cells_of_report
from notebook_cluster.journal.store import (
    CURVES,
    CURVES_FILE,
    JOURNAL,
    JOURNAL_FILE,
    LOCK_FILE,
    VERSION,
    as_os_error,
    checkpoint,
    curves_path,
    journal_path,
    open_to_write,
    place_of,
    remove,
)
from notebook_cluster.protocol import ProtocolError, decode
from notebook_cluster.protocol.clock import clock
from notebook_cluster.protocol.state import ClusterView, RunHistory, Series

log = logging.getLogger(__name__)

RUNS = "runs"
TRACKED, EVENT_FILES = "track-", "tensorboard"
"""With which the names of files begin that a tracker of the run has left in its folder, and TensorBoard's folder there.
"""
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
    for tracked in (*folder.glob(f"{TRACKED}*"), *folder.glob(EVENT_FILES)):
        shutil.move(tracked, target / tracked.name)
        for name in (JOURNAL_FILE, CURVES_FILE):
            (where / f"{name}-shm").unlink(missing_ok=True)
    return target


def put_back(folder: Path, kept: Path) -> None:
    """Undo :func:`set_aside`, which returned ``kept``: the run that began in ``folder`` since, and came to nothing, is
    deleted. The caller holds the lock of ``folder``."""
    if (nothing := set_aside(folder)) is not None:
        _delete(nothing)
    for path in sorted(kept.iterdir()):
        is_written = path.name in (*_parts(JOURNAL_FILE), *_parts(CURVES_FILE))
        shutil.move(path, (place_of(folder) if is_written else folder) / path.name)
    kept.rmdir()


def _delete(run: Path) -> None:
    for name in (JOURNAL_FILE, CURVES_FILE):
        remove(run / name)
    shutil.rmtree(run, ignore_errors=True)


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
        room -= sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if number >= most or room < 0:
            _delete(folder)


def _setting(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdigit():
        raise ValueError(f"{variable}={text}: use a whole number, 0 or more")
    return int(text)


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
    store = SeriesStore()
    store.take_over(read_series(curves_path(folder)))
    past = RunHistory(
        rounds=recovered.committed.rounds, rounds_seen=recovered.committed.seen, checkpoints=last.checkpoints,
        cells=cells_of_report(recovered.state), cells_seen=len(recovered.state.cells), peers=last.peers,
    )  # fmt: skip
    moment = clock(last.state.now)
    ended = f"ended at {moment}: {last.ended}" if last.ended else f"its coordinator was killed after {moment}"
    return LastRun(view=last.state, curves=store.all(), past=past, ended=ended)


LOG_FILE, SERIES_FILE, VIEW_FILE = "run.jsonl", "series.jsonl", "last.view"
_PROGRESS_BYTES = 4 << 20
"""Bytes that are read between two words about how far reading is."""


class _Line(msgspec.Struct):
    """An event, a record of the training rounds, or the last message of a peer that was processed."""

    time: float
    event: Event | None = None
    round: Record | None = None
    received: dict[str, int] | None = None


def import_old(
    folder: Path, on_progress: Callable[[int, int], None] = lambda done, size: None, *, locked: bool = False
) -> bool:
    """Make a journal of the run in ``folder`` when an earlier version wrote it; True when there was one.

    A run that still goes on is left alone, unless it is the caller who holds its lock (``locked``). A last line that
    was cut by a crash is left out. ``on_progress`` is called with the bytes read so far and those of the run log.

    Raises:
        ValueError: a line of the run log is not readable; names the file, the number and the way out.
        OSError: the journal cannot be written; the old files are as they were.
    """
    if not (folder / LOG_FILE).exists() or (folder / JOURNAL_FILE).exists() or (not locked and is_locked(folder)):
        return False
    made = []
    try:
        for name, tables, fill in ((JOURNAL_FILE, JOURNAL, _fill_journal), (CURVES_FILE, CURVES, _fill_curves)):
            partial = folder / f"{name}.partial"
            partial.unlink(missing_ok=True)
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            made.append(partial)
            connection = sqlite3.connect(partial, isolation_level=None)
            try:
                connection.executescript(f"PRAGMA journal_mode=OFF; BEGIN; {tables} PRAGMA user_version={VERSION};")
                fill(connection, folder, on_progress)
                connection.execute("COMMIT")
            finally:
                connection.close()
    except (sqlite3.Error, OSError) as error:
        raise as_os_error(error, folder) from None
    else:
        for partial in reversed(made):  # the journal last: while it is not there, all begins anew
            os.replace(partial, partial.with_suffix(""))
        for name in (LOG_FILE, SERIES_FILE, VIEW_FILE):
            if (folder / name).exists():
                os.replace(folder / name, folder / f"{name}.imported")
        return True
    finally:
        for partial in made:
            partial.unlink(missing_ok=True)


def is_locked(folder: Path) -> bool:
    """True while a coordinator lives in ``folder``, which a cluster has."""
    return is_held(folder / LOCK_FILE)


def is_held(lock: Path) -> bool:
    """True while a process holds the lock on the file ``lock``, which need not be there."""
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _fill_journal(connection: sqlite3.Connection, folder: Path, on_progress: Callable[[int, int], None]) -> None:
    shapes: dict[Shape, int] = {}

    def number_of(shape: Shape) -> int:
        known = shapes.get(shape)
        if known is None:
            known = shapes[shape] = len(shapes) + 1
            connection.execute("INSERT INTO shapes VALUES (?, ?)", (known, msgspec.msgpack.encode(shape)))
        return known

    for row, line in enumerate(_lines(folder / LOG_FILE, on_progress), 1):
        if line.event is not None:
            body = msgspec.json.encode(line.event)
            connection.execute("INSERT INTO events VALUES (?, ?, ?)", (row, line.time, body))
        if line.round is not None:
            columns = to_row(line.round, line.time, number_of)
            connection.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (row, *columns))
        for key, sequence in (line.received or {}).items():
            connection.execute("INSERT OR REPLACE INTO received VALUES (?, ?, ?)", (key, sequence, row))


def _lines(path: Path, on_progress: Callable[[int, int], None]) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    size, done, told = path.stat().st_size, 0, 0
    on_progress(0, size)
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            done += len(raw)
            try:
                if not raw.endswith(b"\n"):
                    raise ValueError("it has no end")
                yield decoder.decode(raw)
            except ValueError as error:
                if done < size:
                    raise ValueError(_damaged(path, number, error)) from None
                log.warning("the last line of %s was cut off by a crash: %d bytes left out", path, len(raw))
            if done - told > _PROGRESS_BYTES:
                told = done
                on_progress(done, size)


def _fill_curves(connection: sqlite3.Connection, folder: Path, _on_progress: Callable[[int, int], None]) -> None:
    """A line that cannot be read is left out: a crash may have cut it, and the rest is worth more than an error."""
    series, view = folder / SERIES_FILE, folder / VIEW_FILE
    for number, line in enumerate(series.read_bytes().splitlines() if series.exists() else (), 1):
        try:
            connection.execute("INSERT INTO pieces (body) VALUES (?)", (pack(unpack(line)),))
        except msgspec.DecodeError as error:
            log.warning("%s line %d is not readable and left out: %s", series, number, error)
    if view.exists():
        body = view.read_bytes()
        try:
            decode(body, LastView)
        except ProtocolError as error:
            log.warning("%s is not readable and left out: %s", view, error)
        else:
            connection.execute("INSERT INTO view VALUES (1, ?)", (body,))


def _damaged(path: Path, number: int, error: Exception) -> str:
    return (
        f"{path} line {number} is not readable ({error}): mend or delete that line, or begin anew with "
        f"%cluster start {path.parent.name} --fresh, which keeps this file under runs/; checkpoints stay"
    )
