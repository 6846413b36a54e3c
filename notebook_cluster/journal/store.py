"""The SQLite files of a run: how they are opened, their tables, and where they lie.

Both files use a write-ahead log: a reader never waits for the writer, and half a row is no row. ``synchronous`` is set
for each transaction of the journal; the curves decide nothing and are never synced but when SQLite moves its log over.

They lie beside the run's other files, in its folder. But in a folder on a file system of another machine (NFS, SMB,
FUSE, 9p), where home directories of universities often lie, SQLite's write-ahead log does not work: there they lie on
this machine, in ``/var/tmp/notebook-cluster-UID``, and the folder gets a copy of them now and then and at the end.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import sqlite3
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

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
    written = sqlite3.connect(partial, isolation_level=None)
    try:
        connection.backup(written)
        written.execute("PRAGMA journal_mode=DELETE")  # so it needs no write-ahead log
    finally:
        written.close()
    os.replace(partial, target)


def copy(source: Path, target: Path) -> None:
    """:func:`back_up` of the database at ``source`` as it is now, also while it is written. OSError, sqlite3.Error: as
    there, or it cannot be read."""
    address = f"{source.absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
        back_up(connection, target)


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


JOURNAL_FILE = "run.journal"
CURVES_FILE = "curves.journal"
LOCK_FILE = "coordinator.lock"
"""The lock in the run's folder; the coordinator holds it (flock) as long as it lives."""
_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "afpfs", "webdav", "osxfuse", "macfuse", "sshfs")
_LOCAL_ROOT = Path("/var/tmp")


def journal_path(folder: Path) -> Path:
    """The journal of the run in ``folder``, or the copy of it where the journal is on another machine."""
    return _newest(folder, JOURNAL_FILE)


def curves_path(folder: Path) -> Path:
    """The curves of the run in ``folder``, as :func:`journal_path`."""
    return _newest(folder, CURVES_FILE)


def _newest(folder: Path, name: str) -> Path:
    path = place_of(folder) / name
    return path if path.exists() else folder / name


def place_of(folder: Path) -> Path:
    """The folder in which the journal is written: ``folder``, or one on this machine."""
    if not is_remote(folder):
        return folder
    root = _LOCAL_ROOT / f"notebook-cluster-{os.getuid()}"
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    place = root / f"{folder.name[:40]}-{name}"
    return folder if is_remote(_LOCAL_ROOT) else place


def make_place(folder: Path) -> Path:
    """:func:`place_of`, made (0700) where it is not there, with what the folder has copies of.

    Raises:
        OSError: somebody else's folder is in the way; names it.
    """
    place = place_of(folder)
    if place != folder:
        for part in (place.parent, place):
            part.mkdir(mode=0o700, exist_ok=True)
            found = part.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise OSError(f"{part} is not a private folder of this user: remove it, or have its owner remove it")
        for name in (JOURNAL_FILE, CURVES_FILE):
            if (folder / name).exists() and not (place / name).exists():
                shutil.copyfile(folder / name, place / name)
                (place / name).chmod(0o600)
    return place


def is_remote(folder: Path) -> bool:
    """True when the folder's file system is one of another machine, or of a program."""
    return file_system(folder).startswith(_REMOTE)


def file_system(folder: Path) -> str:
    """The type of the file system that ``folder`` is on, as the system names it; empty when it does not say."""
    path = os.path.realpath(folder)
    found = ("", "")
    for part in psutil.disk_partitions(all=True):
        mounted = part.mountpoint.rstrip("/")
        if (path == mounted or path.startswith(f"{mounted}/")) and len(mounted) >= len(found[0]):
            found = mounted, part.fstype
    return found[1].lower()
