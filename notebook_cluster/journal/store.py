"""The SQLite files of a run: how they are opened, and their tables.

Both files use a write-ahead log: a reader never waits for the writer, and half a row is no row. ``synchronous`` is set
for each transaction of the journal; the curves decide nothing and are never synced but when SQLite moves its log over.
"""

import contextlib
import errno
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

VERSION = 1
"""The version of the tables; a journal of a later one is refused."""
AUTOCHECKPOINT = 64
"""Pages of 4 KiB in the write-ahead log after which SQLite moves them over."""
LOG_LIMIT = 512 << 10
"""Bytes that the write-ahead log keeps on disk when it was moved over."""
_BUSY = 2.0
"""Seconds that a lock of another connection is waited for."""
_ROOM = 128 << 10
"""Bytes of free disk below which an error of the disk counts as a full one."""

JOURNAL = """
CREATE TABLE IF NOT EXISTS events(id INTEGER PRIMARY KEY, time REAL, body BLOB);
CREATE TABLE IF NOT EXISTS rounds(id INTEGER PRIMARY KEY, time REAL, kind INTEGER, job TEXT, round INTEGER,
                                  attempt INTEGER, hash BLOB, shape INTEGER, body BLOB);
CREATE TABLE IF NOT EXISTS shapes(id INTEGER PRIMARY KEY, body BLOB);
CREATE TABLE IF NOT EXISTS received(key TEXT PRIMARY KEY, sequence INTEGER, id INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS snapshots(id INTEGER PRIMARY KEY, body BLOB);
"""
CURVES = """
CREATE TABLE IF NOT EXISTS pieces(id INTEGER PRIMARY KEY, body BLOB);
CREATE TABLE IF NOT EXISTS view(id INTEGER PRIMARY KEY CHECK (id = 1), body BLOB);
"""


def open_to_write(path: Path, tables: str, *, synchronous: str = "NORMAL") -> sqlite3.Connection:
    """A connection that writes ``path`` (mode 0600), which is made with ``tables`` when it is not there.

    Raises:
        sqlite3.Error: it cannot be written, or is none.
        ValueError: it was written by a later version.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # SQLite's other files get this mode
    connection = sqlite3.connect(path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA mmap_size=0")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute(f"PRAGMA wal_autocheckpoint={AUTOCHECKPOINT}")
        connection.execute(f"PRAGMA journal_size_limit={LOG_LIMIT}")
        connection.execute("PRAGMA cache_size=-2000")
        if sys.platform == "darwin":
            connection.execute("PRAGMA fullfsync=1")
            connection.execute("PRAGMA checkpoint_fullfsync=1")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise ValueError(f"{path} was written by a later notebook-cluster: use that one")
        if version < VERSION:
            connection.executescript(f"BEGIN; {tables} PRAGMA user_version={VERSION}; COMMIT;")
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that reads ``path`` and changes nothing. Copy out what you want and leave within a second: while
    somebody reads, the write-ahead log cannot be moved over and grows.

    Raises:
        FileNotFoundError: there is none, or nothing in it.
        ValueError: it was written by a later version.
        sqlite3.Error: it cannot be read, or is none.
    """
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY, isolation_level=None)
    try:
        connection.execute("PRAGMA mmap_size=0")
        connection.execute("BEGIN")  # all of it is of one moment
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            raise FileNotFoundError(errno.ENOENT, "nothing was written yet", str(path))
        if version > VERSION:
            raise ValueError(f"{path} was written by a later notebook-cluster: use that one")
        yield connection
    finally:
        connection.close()


def checkpoint(connection: sqlite3.Connection) -> None:
    """Move the write-ahead log over, now, and give its room back; a reader that is busy only delays it."""
    with contextlib.suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA busy_timeout=50")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    connection.execute(f"PRAGMA busy_timeout={int(_BUSY * 1000)}")


def give_up(connection: sqlite3.Connection) -> None:
    """Close a connection after an error: what it had begun is taken back, and it need not work any more."""
    for end in (connection.rollback, connection.close):
        with contextlib.suppress(sqlite3.Error):
            end()


def back_up(connection: sqlite3.Connection, target: Path) -> None:
    """Copy the database to ``target`` (mode 0600), which appears whole or not at all.

    Raises:
        OSError, sqlite3.Error: it cannot be written.
    """
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    copy = sqlite3.connect(partial, isolation_level=None)
    try:
        connection.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")
    finally:
        copy.close()
    os.replace(partial, target)


def remove(path: Path) -> None:
    """Delete a database with its other files."""
    for end in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{end}").unlink(missing_ok=True)


def as_os_error(error: Exception, folder: Path) -> OSError:
    """What SQLite said of the disk, as the system would have said it."""
    if isinstance(error, OSError):
        return error
    full = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    with contextlib.suppress(OSError):
        full = full or shutil.disk_usage(folder).free < _ROOM
    if full:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    return OSError(errno.EIO, str(error), str(folder))
