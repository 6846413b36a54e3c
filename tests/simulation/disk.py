"""The disk under the journal: SQLite's own files, written by the journal's real writer on a thread of the schedule.

What a commit has synced survives a machine without power, and any part of what came after it may. A disk can be slow or
full, and say that a commit failed which is in the file all the same.
"""

import contextlib
import sqlite3
from pathlib import Path

from notebook_cluster.journal import store
from notebook_cluster.journal.writer import Writer
from tests.simulation.schedule import Thread

PAGE = 4096


class Disk:
    """Of one host.

    Attributes:
        full: every commit fails.
        slow: seconds that a commit takes at most.
        unclear: how likely a commit says that it failed although it did not.
    """

    def __init__(self, schedule):
        self.schedule = schedule
        self.mend()
        self.deadly = False
        """The process that next writes an event, not only rounds, is killed before that is in the file."""
        self.lost_bytes = 0
        """Written and not synced when power went."""
        self.connections = []

    def mend(self):
        """It is as it was at first."""
        self.full, self.slow, self.unclear = False, 0.003, 0.0

    def crash(self, process, *, power_lost):
        """The process is gone: its files stay as they are, or as far as they were synced."""
        for connection in [held for held in self.connections if held.process is process]:
            self.connections.remove(connection)
            self.lost_bytes += connection.crash(power_lost=power_lost, rng=self.schedule.rng)


class DiskConnection:
    """A connection that writes, on a disk with faults."""

    def __init__(self, disk, process, path, *arguments, **options):
        self._disk, self.process, self._path = disk, process, Path(path)
        self._connection = store.open_to_write(path, *arguments, **options)
        self._connection.execute("PRAGMA wal_autocheckpoint=0")
        self._level = options.get("synchronous", "NORMAL")
        self._synced = self._log_state()
        self._has_event = False
        disk.connections.append(self)

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def execute(self, statement, values=()):
        if statement.startswith("PRAGMA synchronous="):
            self._level = statement.rpartition("=")[2]
        if statement == "COMMIT":
            return self._commit()
        self._has_event = (
            self._has_event or statement.startswith("INSERT INTO events")
        ) and statement != "BEGIN IMMEDIATE"
        result = self._connection.execute(statement, values)
        if statement.startswith("PRAGMA wal_checkpoint"):
            self._synced = self._log_state()
        return result

    def _commit(self):
        disk = self._disk
        thread = disk.schedule.current
        if disk.deadly and self._has_event and thread is not None:
            disk.deadly = False
            disk.schedule.later(0.1, self.process.end)
            thread.park(1.0)
        if thread is not None:
            thread.park(disk.schedule.rng.random() * disk.slow)
        if disk.full:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        result = self._connection.execute("COMMIT")
        if self._level == "FULL":
            self._synced = self._log_state()
        if self._log_state()[1] > store.AUTOCHECKPOINT * PAGE:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            self._synced = self._log_state()
        if disk.schedule.rng.random() < disk.unclear:
            raise sqlite3.OperationalError("disk I/O error")
        return result

    def close(self):
        if self in self._disk.connections:
            self._disk.connections.remove(self)
        self._connection.close()

    def _log(self):
        return Path(f"{self._path}-wal")

    def _log_state(self):
        """(which generation the write-ahead log is of, its length)."""
        log = self._log()
        if not log.exists():
            return b"", 0
        with log.open("rb") as file:
            head = file.read(32)
            return head[16:24], file.seek(0, 2)

    def crash(self, *, power_lost, rng):
        """SQLite would tidy up at the last close: the files are put back as the process left them. Returns how many
        bytes of the write-ahead log are lost."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.rollback()
        data = self._path.read_bytes()
        log = self._log().read_bytes() if self._log().exists() else b""
        written = len(log)
        if power_lost:
            generation, length = self._synced
            kept = length if log[16:24] == generation else 0
            log = log[: rng.randint(min(kept, len(log)), len(log))]
        self._connection.close()
        self._path.write_bytes(data)
        self._log().write_bytes(log)
        Path(f"{self._path}-shm").unlink(missing_ok=True)
        return written - len(log)


class SimulatedWriter(Writer):
    """The journal's writer, whose thread is one of the schedule."""

    schedule = None

    def start(self):
        self._simulated = Thread(self.schedule.process, self.run, "journal")
        self._simulated.start()

    def is_alive(self):
        return not self._simulated.done and self._simulated.process.alive

    def join(self, timeout=None):
        deadline = None if timeout is None else self.schedule.now + timeout
        while self.is_alive() and (deadline is None or self.schedule.now < deadline):
            self.schedule.current.park(0.01)
