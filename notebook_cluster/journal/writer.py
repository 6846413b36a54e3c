"""The thread that writes the journal of a run: the only one, with the only connection that writes."""

import contextlib
import errno
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.journal.store import JOURNAL, as_os_error, back_up, checkpoint, give_up, open_to_write

log = logging.getLogger(__name__)

RETRY = 0.25
"""Seconds between two tries to write what could not be written."""
SYNC_PERIOD = 1.0
"""Seconds within which also rows are synced that need not be at once; and of silence after which the write-ahead log is
moved over."""
SYNC_ROWS = 512
"""Rows after which they are synced at the latest. Where every step is a round, nodes keep more rounds than this can be:
they are asked for those that a machine without power has lost."""
_LAST_ROW = "SELECT max(ifnull((SELECT max(id) FROM events), 0), ifnull((SELECT max(id) FROM rounds), 0), " \
            "ifnull((SELECT max(id) FROM received), 0), ifnull((SELECT max(id) FROM snapshots), 0))"  # fmt: skip


class PendingRow(msgspec.Struct, frozen=True):
    """Statements that belong together. Each row of them has the number ``row``; a later item has a higher one."""

    row: int
    statements: tuple[tuple[str, tuple[Any, ...]], ...]
    durable: bool
    """It is synced before it counts as written."""


def last_row(connection: sqlite3.Connection) -> int:
    """The number of the newest row, 0 in an empty journal."""
    return int(connection.execute(_LAST_ROW).fetchone()[0])


class Writer(threading.Thread):
    """Writes items in order, those that wait together in one transaction.

    After any error the outcome is unknown. So the transaction is taken back, the file opened again and read: what is
    in it is written, and the rest, the same rows, is tried again until it is.

    Args:
        on_written: called on this thread with the number of the last row that is in the journal.
        on_error: called on this thread with each failure.
        copy: where a copy goes now and then and at the end; None: nowhere.
    """

    def __init__(
        self,
        path: Path,
        on_written: Callable[[int], None],
        on_error: Callable[[OSError], None],
        copy: Path | None = None,
    ) -> None:
        super().__init__(name="journal", daemon=True)
        self._path, self._copy = path, copy
        self._on_written, self._on_error = on_written, on_error
        self._items: queue.SimpleQueue[PendingRow | None] = queue.SimpleQueue()
        self._connection: sqlite3.Connection | None = open_to_write(path, JOURNAL)
        self.first_row = last_row(self._connection) + 1
        self._closing = threading.Event()
        self._synced = time.monotonic()
        self._unsynced = self._grown = False
        self._rows = 0
        self._level = ""
        self._shared = False
        """Rows have the numbers of ours that we have not written: the folder's lock did not keep another one away."""

    def put(self, item: PendingRow) -> None:
        self._items.put(item)

    def close(self, timeout: float) -> bool:
        """Write what waits, then end; True when all of it was written within ``timeout`` seconds."""
        self._items.put(None)
        self.join(timeout)
        self._closing.set()
        self.join(1.0)
        return not self.is_alive()

    def run(self) -> None:
        ended = False
        while not ended:
            batch, ended = self._next()
            if batch:
                self._write_all(batch)
            elif not ended and (self._grown or self._unsynced):
                self._tidy_up()
        self._end()

    def _next(self) -> tuple[list[PendingRow], bool]:
        """What waits, when there is something or after a while; True when it is the last."""
        batch: list[PendingRow] = []
        try:
            item = self._items.get(timeout=SYNC_PERIOD if self._grown or self._unsynced else None)
            while item is not None:
                batch.append(item)
                item = self._items.get_nowait()
        except queue.Empty:
            return batch, False
        return batch, True

    def _write_all(self, batch: list[PendingRow]) -> None:
        while batch:
            try:
                if self._connection is None:
                    self._connection = open_to_write(self._path, JOURNAL)
                    self._level = ""
                    written = last_row(self._connection)
                    if self._shared or written > batch[-1].row:
                        raise OSError(errno.EBUSY, "another process writes it too", str(self._path))
                    batch = [item for item in batch if item.row > written]
                self._write(batch)
                self._on_written(batch[-1].row if batch else written)
                return
            except Exception as error:
                self._drop_connection()
                self._shared = self._shared or isinstance(error, sqlite3.IntegrityError)
                self._on_error(as_os_error(error, self._path.parent))
                if self._closing.wait(RETRY):
                    return

    def _write(self, batch: list[PendingRow]) -> None:
        connection = self._connection
        if connection is None or not batch:
            return
        now = time.monotonic()
        self._rows += len(batch)
        late = now - self._synced > SYNC_PERIOD or self._rows > SYNC_ROWS
        durable = late or any(item.durable for item in batch)
        level = "FULL" if durable else "NORMAL"
        if level != self._level:
            connection.execute(f"PRAGMA synchronous={level}")
            self._level = level
        connection.execute("BEGIN IMMEDIATE")
        for item in batch:
            for statement, values in item.statements:
                connection.execute(statement, values)
        connection.execute("COMMIT")
        self._grown, self._unsynced = True, not durable
        if durable:
            self._synced, self._rows = now, 0

    def _drop_connection(self) -> None:
        if self._connection is not None:
            give_up(self._connection)
        self._connection = None

    def _tidy_up(self) -> None:
        """Nothing was written for a moment: sync, and give the room of the write-ahead log back."""
        self._grown = self._unsynced = False
        if self._connection is None:
            return
        try:
            checkpoint(self._connection)
            if self._copy is not None:
                back_up(self._connection, self._copy)
        except (sqlite3.Error, OSError) as error:
            log.warning("the journal %s could not be tidied up: %s", self._path, error)

    def _end(self) -> None:
        if self._connection is not None:
            self._tidy_up()
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
