"""The journal of a run as the coordinator writes it: a row for every decision before anybody is told of it.

The rows are written by a thread of its own (:mod:`.writer`), so that a slow disk stops nothing that must go on. What
follows from a row is handed to :meth:`Journal.when_written` and happens, in order, when that row is in the journal.
"""

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from notebook_cluster.journal.events import Event
from notebook_cluster.journal.reading import RecoveredRun, StateSnapshot
from notebook_cluster.journal.records import Record, Shape, to_row
from notebook_cluster.journal.state import State
from notebook_cluster.journal.store import JOURNAL_FILE, as_os_error, make_place
from notebook_cluster.journal.writer import PendingRow, Writer

log = logging.getLogger(__name__)

STALLED_AFTER = 0.5
"""Seconds that the disk may take for a row, before messages are handled all the same and not acknowledged."""
SILENT_AFTER = 5.0
"""Seconds after which people are told of it."""
MOST_BYTES = 64 << 20
"""Bytes of rows that no recovery needs, at most; on a small disk an eighth of it."""
SNAPSHOT_ROWS = 10_000
"""Rows after which the state is written down: a recovery reads no more than those after the last one."""
_SHAPES = 256
_ROW_BYTES = 150

Call = Callable[[], None]


class Journal:
    """The journal of one coordinator. It is made, and called, in the thread of the event loop.

    A disk that takes no row ends nothing. From then on rows wait in memory, in order, and so does what was handed to
    :meth:`when_written`: nobody is told what the journal does not say. The same rows are tried again until they are in.

    Attributes:
        path: the journal in the run's folder.
        trouble: why rows wait; None while none do.
        on_holding: called with True when rows begin to wait (again when it becomes known why), with False when all are
            written and everything that waited for them is done.
        committed: the rounds for reports and panels.
        frozen: nothing more is decided, see :meth:`freeze`.
    """

    def __init__(self, folder: Path, recovered: RecoveredRun | None = None) -> None:
        """Raises OSError when the journal cannot be opened, ValueError when it was written by a later version."""
        recovered = recovered or RecoveredRun()
        self.path = folder / JOURNAL_FILE
        self.trouble: OSError | None = None
        self.frozen = False
        self.on_holding: Callable[[bool], None] = lambda holding: None
        self.committed, self._kept = recovered.committed, recovered.kept
        self._loop = asyncio.get_running_loop()
        place = make_place(folder)
        copy = None if place == folder else self.path
        try:
            self._writer = Writer(place / JOURNAL_FILE, self._note_written, self._note_error, copy)
        except sqlite3.Error as error:
            raise as_os_error(error, folder) from None
        self._limit = min(MOST_BYTES, shutil.disk_usage(place).total // 8)
        self._snapshot_rows = max(500, min(SNAPSHOT_ROWS, self._limit // 4 // _ROW_BYTES))
        self._next = self._writer.first_row
        self._shapes: OrderedDict[Shape, int] = OrderedDict()
        self._snapshot_at = recovered.snapshot
        self._handed = self._written = self._done = self._next - 1
        self._progress = threading.Condition()
        self._failure: OSError | None = None
        self._calls: deque[tuple[int, Call]] = deque()
        self._gated: deque[tuple[int, Call]] = deque()
        self._added: deque[tuple[int, Call]] | None = None
        self._holds = False
        self._waits_since: float | None = None
        self._held = 0.0
        self._writer.start()

    # ---- rows

    def freeze(self) -> None:
        """Another coordinator goes on from here: rows that come later, and what would follow from them, are left out,
        but for what :meth:`last_words` says."""
        self.frozen = True

    def last_words(self, event: Event | None, received: dict[str, int]) -> None:
        """Of a frozen journal: ``event``, durable, and ``received`` as of :meth:`received`."""
        self.frozen = False
        if event is not None:
            self.event(event, durable=True)
        self.received(received)
        self.frozen = True

    async def all_written(self, timeout: float) -> bool:
        """Return when every row so far is in the journal and what waited for it is done; False after ``timeout``
        seconds."""
        deadline = time.monotonic() + timeout
        while self._handed > self._written or self._calls or self._gated:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.002)
        return True

    def event(self, event: Event, *, durable: bool) -> None:
        """``durable``: it survives also the death of the machine; else that of this process."""
        body = msgspec.json.encode(event)
        self._put((("INSERT INTO events VALUES (?, ?, ?)", (self._next, time.time(), body)),), durable)

    def round(self, record: Record, *, durable: bool = True) -> None:
        """A record of the training rounds; ``durable`` as of :meth:`event`."""
        row, new = self._next, []

        def number(shape: Shape) -> int:
            known = self._shapes.get(shape)
            if known is None:
                known = self._shapes[shape] = row
                new.append(("INSERT INTO shapes VALUES (?, ?)", (row, msgspec.msgpack.encode(shape))))
                if len(self._shapes) > _SHAPES:
                    self._shapes.popitem(last=False)
            else:
                self._shapes.move_to_end(shape)
            return known

        columns = to_row(record, time.time(), number)
        self._kept.add(row, record)
        self.committed.replay(record, row)
        self._put((*new, ("INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (row, *columns))), durable)

    def received(self, sequences: dict[str, int]) -> None:
        """The last link message of each peer (by key) whose effect is in the journal."""
        if not self._holds:
            upsert = "INSERT OR REPLACE INTO received VALUES (?, ?, ?)"
            self._put(tuple((upsert, (key, number, self._next)) for key, number in sequences.items()), False)

    def snapshot_if_due(self, state: State) -> None:
        """Now and then, write down ``state``, which all rows so far have led to, and let go what it makes needless."""
        if self._holds or self._next - self._snapshot_at < self._snapshot_rows:
            return
        row = self._snapshot_at = self._next
        rows = self._kept.rows()
        body = msgspec.json.encode(StateSnapshot(state, rows, self.committed.rows(), self.committed.seen))
        self._shapes.clear()  # a shape that old rows alone name may go with them
        self._put(
            (
                ("INSERT INTO snapshots VALUES (?, ?)", (row, body)),
                ("DELETE FROM snapshots WHERE id < ?", (row,)),
            ),
            True,
        )
        self._prune(row, sorted({*rows, *self.committed.rows()}))

    def _prune(self, row: int, needed: list[int]) -> None:
        """Let the oldest rows go that neither a recovery nor a report needs, where there are too many bytes of them."""
        oldest = row - self._limit // _ROW_BYTES
        if oldest <= 0:
            return
        keep = msgspec.json.encode(needed).decode()
        many = self._snapshot_rows * 2
        rounds = (
            "DELETE FROM rounds WHERE id IN (SELECT id FROM rounds WHERE id < ? AND id NOT IN "
            "(SELECT value FROM json_each(?)) LIMIT ?)"
        )
        shapes = "DELETE FROM shapes WHERE id < ? AND id NOT IN (SELECT shape FROM rounds WHERE shape IS NOT NULL)"
        self._put(
            (
                (rounds, (oldest, keep, many)),
                ("DELETE FROM events WHERE id < ?", (oldest,)),
                (shapes, (oldest,)),
            ),
            False,
        )

    def _put(self, statements: tuple[tuple[str, tuple[object, ...]], ...], durable: bool) -> None:
        if self.frozen:
            return
        item = PendingRow(self._next, statements, durable)
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        self._handed, self._next = self._next, self._next + 1
        self._writer.put(item)

    # ---- what follows from them

    @property
    def holding(self) -> bool:
        """True while rows wait for room, and until what waited for them is done."""
        return self._holds and self._added is None

    def when_written(self, call: Call) -> None:
        """``call`` once every row so far is in the journal, after what was handed in before: now, or later."""
        if self.frozen:
            return
        queue = self._calls if self._added is None else self._added
        if queue or self._handed > self._written:
            queue.append((self._handed, call))
        else:
            call()

    def settled(self, call: Call) -> None:
        """``call`` once it is known of every row so far that it is in the journal, or that it has to wait."""
        if self._gated or (self._handed > self._written and not self._holds):
            self._gated.append((self._handed, call))
        else:
            call()

    def held_seconds(self) -> float:
        """How long rows have waited for the disk in all: time in which nothing could be decided."""
        since = self._waits_since
        return self._held + (time.monotonic() - since if self._holds and since is not None else 0.0)

    def look(self) -> None:
        """Call a few times a second: notes a disk that does not answer."""
        since = self._waits_since
        if since is None or self._handed == self._written:
            return
        waited = time.monotonic() - since
        if waited > STALLED_AFTER and not self._holds:
            self._hold()
        if waited > SILENT_AFTER and self.trouble is None:
            self._on_error(OSError(errno.ETIMEDOUT, f"it takes nothing for {SILENT_AFTER:g} s"))

    def _on_written(self, row: int) -> None:
        self._written = max(self._written, row)
        self.trouble = None
        if not self._holds:
            self._waits_since = None if self._handed == self._written else time.monotonic()
        self._drain()

    def _drain(self) -> None:
        """Do what waited, each after the rows before it. What one of them hands in comes before those behind it."""
        while self._calls and self._calls[0][0] <= self._written:
            _, call = self._calls.popleft()
            self._added = deque()
            _run(call)
            self._calls.extendleft(reversed(self._added))
            self._added = None
        if self._holds and not self._calls and self._handed == self._written:
            self._held, self._holds, self._waits_since = self.held_seconds(), False, None
            self.on_holding(False)
        self._open_gate()

    def _open_gate(self) -> None:
        while self._gated and (self._gated[0][0] <= self._written or self._holds):
            _run(self._gated.popleft()[1])

    def _hold(self) -> None:
        self._holds = True
        self.on_holding(True)
        self._open_gate()

    def _on_error(self, error: OSError) -> None:
        first, self.trouble = self.trouble is None, error
        if not self._holds:
            self._hold()
        elif first:
            self.on_holding(True)

    # ---- the writer's thread

    def _note_written(self, row: int) -> None:
        with self._progress:
            self._done, self._failure = row, None
            self._progress.notify_all()
        self._call_soon(lambda: self._on_written(row))

    def _note_error(self, error: OSError) -> None:
        with self._progress:
            self._failure = error
            self._progress.notify_all()
        self._call_soon(lambda: self._on_error(error))

    def _call_soon(self, call: Call) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call)

    # ---- the beginning and the end

    def flush(self, timeout: float) -> OSError | None:
        """Wait, also in the event loop, until every row so far is in the journal; why not, when it fails."""
        with self._progress:
            self._progress.wait_for(lambda: self._done >= self._handed or self._failure is not None, timeout)
            if self._done >= self._handed:
                return None
            return self._failure or OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    async def written(self, timeout: float) -> None:
        """Return when all that waited is done, or after ``timeout`` seconds."""
        done = asyncio.Event()
        self.when_written(done.set)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), timeout)

    def close(self) -> bool:
        """The last of it; False when rows could not be written."""
        error = self.flush(2.0)
        return self._writer.close(0.0 if error is not None else 10.0) and error is None


def _run(call: Call) -> None:
    try:
        call()
    except Exception:
        log.exception("what waited for the journal failed")
