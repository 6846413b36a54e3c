"""A run that was written before there was a journal: ``run.jsonl``, ``series.jsonl`` and ``last.view``.

It is read once, into a journal; its files stay beside that, with ``.imported`` behind their names.
"""

import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from notebook_cluster.journal.curves import LastView, pack, unpack
from notebook_cluster.journal.events import Event
from notebook_cluster.journal.place import CURVES_FILE, JOURNAL_FILE, LOCK_FILE
from notebook_cluster.journal.records import Record
from notebook_cluster.journal.rows import Shape, to_row
from notebook_cluster.journal.store import CURVES, JOURNAL, VERSION, as_os_error
from notebook_cluster.protocol import ProtocolError, decode

log = logging.getLogger(__name__)

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
    if not (folder / LOG_FILE).exists() or (folder / JOURNAL_FILE).exists() or (not locked and _is_locked(folder)):
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


def _is_locked(folder: Path) -> bool:
    """True while a coordinator lives here."""
    try:
        with open(folder / LOCK_FILE, "rb") as file:
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
