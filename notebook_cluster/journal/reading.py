"""What a journal says: to a coordinator that is started again, and to whoever looks at the run."""

import errno
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from notebook_cluster.journal.events import Event
from notebook_cluster.journal.kept_rounds import KeptRounds, Rounds
from notebook_cluster.journal.records import COMMIT, SEAL, Record, RoundRow, Shape, from_row
from notebook_cluster.journal.state import State, apply
from notebook_cluster.journal.store import as_os_error, reading

_event_decoder = msgspec.json.Decoder(Event)
_shape_decoder = msgspec.msgpack.Decoder(Shape)
MOST_COMMITS = 10_000
"""That :func:`read_history` reads, about: a run may have a million."""
_PROGRESS_ROWS = 4096
_BATCH = 256
_COLUMNS = "id, time, kind, job, round, attempt, hash, shape, body"


class StateSnapshot(msgspec.Struct):
    """What all rows before it have led to."""

    state: State
    kept: list[int]
    """Rows of ``rounds`` that the round machine needs."""
    shown: list[int]
    """Rows of ``rounds`` that a report shows, and how many rounds there were in all."""
    seen: int


class RecoveredRun:
    """What a journal says: the state, the records of the rounds that still matter, in order, the last message of each
    peer (by key), the rounds for a report, and the row of the last snapshot."""

    def __init__(self) -> None:
        self.state = State()
        self.rounds: Iterable[Record] = ()
        self.received: dict[str, int] = {}
        self.committed = Rounds()
        self.kept = KeptRounds()
        self.snapshot = 0


class Noted(NamedTuple):
    """A record of the rounds, and when it was written."""

    time: float
    record: Record


class PackedRecords:
    """Records of the rounds, each made when its turn comes, as often as somebody iterates. A long run has thousands:
    as objects each would take 3 kB, packed it takes 100 bytes."""

    def __init__(self, rows: Iterator[RoundRow], shape_body: Callable[[int], bytes]) -> None:
        self._batches: list[bytes] = []
        while batch := [(row, b"" if row.shape is None else shape_body(row.shape)) for row in islice(rows, _BATCH)]:
            self._batches.append(zlib.compress(msgspec.msgpack.encode(batch), 1))

    def __iter__(self) -> Iterator[Record]:
        for batch in map(zlib.decompress, self._batches):
            for row, body in msgspec.msgpack.decode(batch, type=list[tuple[RoundRow, bytes]]):
                shapes = {} if row.shape is None else {row.shape: _shape_decoder.decode(body)}
                yield from_row(row, shapes.__getitem__)


def recover(path: Path, on_progress: Callable[[int, int], None] = lambda done, size: None) -> RecoveredRun:
    """The last snapshot in ``path`` and what follows it. ``on_progress`` is called with the bytes read so far and those
    of the file.

    Raises:
        ValueError: it is not readable; names the file and the way out.
        OSError: the disk is full, so that SQLite cannot even read.
    """
    if not path.exists():
        return RecoveredRun()
    size = path.stat().st_size
    on_progress(0, size)
    try:
        with reading(path) as connection:
            return _recover(connection, lambda share: on_progress(int(size * share), size))
    except FileNotFoundError:
        return RecoveredRun()
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
        raise unreadable(path, error) from None


def _recover(connection: sqlite3.Connection, on_progress: Callable[[float], None]) -> RecoveredRun:
    found = RecoveredRun()
    snapshot = _snapshot(connection)
    found.state = _state(connection, snapshot, found)
    kept, shown = set(snapshot.kept), set(snapshot.shown)
    found.committed = Rounds(snapshot.seen - len(shown))
    (last,) = connection.execute("SELECT ifnull(max(id), 0) FROM rounds").fetchone()
    needed = sorted(kept | shown)
    for count, (row, noted) in enumerate(_rounds(connection, needed, found.snapshot), 1):
        if row > found.snapshot or row in shown:
            found.committed.replay(noted.record, row)
        if row > found.snapshot or row in kept:
            found.kept.add(row, noted.record)
        if count % _PROGRESS_ROWS == 0:
            on_progress(min(1.0, row / max(last, 1)))
    rows = (row for _, row in _rows(connection, found.kept.rows(), last))
    found.rounds = PackedRecords(rows, partial(_shape_body, connection))
    found.received = dict(connection.execute("SELECT key, sequence FROM received").fetchall())
    return found


def _snapshot(connection: sqlite3.Connection) -> StateSnapshot:
    row = connection.execute("SELECT body FROM snapshots ORDER BY id DESC LIMIT 1").fetchone()
    return StateSnapshot(State(), [], [], 0) if row is None else msgspec.json.decode(row[0], type=StateSnapshot)


def _state(connection: sqlite3.Connection, snapshot: StateSnapshot, found: RecoveredRun) -> State:
    (found.snapshot,) = connection.execute("SELECT ifnull(max(id), 0) FROM snapshots").fetchone()
    state = snapshot.state
    for (body,) in connection.execute("SELECT body FROM events WHERE id > ? ORDER BY id", (found.snapshot,)):
        state = apply(state, _event_decoder.decode(body))
    return state


def _rounds(connection: sqlite3.Connection, needed: Iterable[int], after: int) -> Iterator[tuple[int, Noted]]:
    """The rows ``needed`` and all that come ``after``, in order."""
    shape = lru_cache(_BATCH)(lambda number: _shape_decoder.decode(_shape_body(connection, number)))
    for number, row in _rows(connection, needed, after):
        yield number, Noted(row.time, from_row(row, shape))


def _rows(connection: sqlite3.Connection, needed: Iterable[int], after: int) -> Iterator[tuple[int, RoundRow]]:
    numbers = msgspec.json.encode(list(needed)).decode()
    chosen = f"SELECT {_COLUMNS} FROM rounds WHERE id IN (SELECT value FROM json_each(?)) OR id > ? ORDER BY id"
    for number, *columns in connection.execute(chosen, (numbers, after)):
        yield number, RoundRow(*columns)


def _shape_body(connection: sqlite3.Connection, number: int) -> bytes:
    row = connection.execute("SELECT body FROM shapes WHERE id = ?", (number,)).fetchone()
    if row is None:
        raise ValueError(f"shape {number} is missing")
    return bytes(row[0])


def has_crashed(path: Path) -> bool:
    """True when the journal in ``path`` ends without a word about its end, and there were nodes.

    Raises:
        ValueError: as :func:`recover`.
    """
    state = read_state(path)
    return state.stopped is None and not state.left and bool(state.nodes)


def read_state(path: Path) -> State:
    """What the rows of the journal in ``path`` have led to; of none where there is none. ValueError as
    :func:`recover`."""
    if not path.exists():
        return State()
    try:
        with reading(path) as connection:
            return _state(connection, _snapshot(connection), RecoveredRun())
    except FileNotFoundError:
        return State()
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
        raise unreadable(path, error) from None


def read_rounds(path: Path) -> list[Noted]:
    """Every record of the rounds that is still in the journal, oldest first.

    Raises:
        FileNotFoundError: there is no journal.
        sqlite3.Error, ValueError: it is not readable.
    """
    with reading(path) as connection:
        return [noted for _, noted in _rounds(connection, (), 0)]


class PastEvents(NamedTuple):
    """What happened from ``begin`` on (Unix time; None: nothing), when ``state`` was that of the cluster. ``whole``:
    that is the start of the run. The records of the rounds are also those of before."""

    begin: float | None
    state: State
    events: list[tuple[float, Event]]
    rounds: list[Noted]
    whole: bool


def read_history(path: Path) -> PastEvents:
    """All of the journal, or where old events were taken out, what came after its last snapshot: events with their
    times and records of the rounds, oldest first. There are no seals among these, and of a long run's commits about
    MOST_COMMITS at equal distances, the last one of each job among them. Raises as :func:`read_rounds`."""
    with reading(path) as connection:
        (first,) = connection.execute("SELECT min(id) FROM events").fetchone()
        state, after = State(), 0
        if first != 1:
            state = _snapshot(connection).state
            (after,) = connection.execute("SELECT ifnull(max(id), 0) FROM snapshots").fetchone()
        rows = connection.execute("SELECT time, body FROM events WHERE id > ? ORDER BY id", (after,)).fetchall()
        tables = ("SELECT min(time) FROM events WHERE id > ?", "SELECT min(time) FROM rounds WHERE id > ?")
        times = [connection.execute(one, (after,)).fetchone()[0] for one in tables]
        begin = min((time for time in times if time is not None), default=None)
        noted = _some_rounds(connection)
    return PastEvents(begin, state, [(time, _event_decoder.decode(body)) for time, body in rows], noted, first == 1)


def _some_rounds(connection: sqlite3.Connection) -> list[Noted]:
    shape = lru_cache(_BATCH)(lambda number: _shape_decoder.decode(_shape_body(connection, number)))
    (count,) = connection.execute("SELECT count(*) FROM rounds WHERE kind = ?", (COMMIT,)).fetchone()
    last_ones = "SELECT max(id) FROM rounds WHERE kind = ? GROUP BY job"
    chosen = (
        f"SELECT {_COLUMNS} FROM rounds WHERE kind NOT IN (?, ?) "
        f"OR (kind = ? AND (round % ? = 0 OR id IN ({last_ones}))) ORDER BY id"
    )
    values = (SEAL, COMMIT, COMMIT, count // MOST_COMMITS + 1, COMMIT)
    rows = (RoundRow(*columns) for _, *columns in connection.execute(chosen, values))
    return [Noted(row.time, from_row(row, shape)) for row in rows]


def unreadable(path: Path, error: Exception) -> Exception:
    """What is said of a journal that cannot be read, with the way out."""
    if isinstance(error, sqlite3.OperationalError):
        trouble = as_os_error(error, path.parent)
        if trouble.errno == errno.ENOSPC:
            return OSError(errno.ENOSPC, f"the disk of {path.parent} is full, and SQLite needs room to read: free 1 MB")
    return ValueError(
        f"{path} is not readable ({error}): put a copy of it back, or begin anew with %cluster start "
        f"{path.parent.name} --fresh, which keeps this file under runs/; checkpoints stay"
    )
