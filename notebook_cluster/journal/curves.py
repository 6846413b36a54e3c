"""The curves of a run and its last view, in memory and on disk beside the journal: a coordinator that was killed gets
them back, and a report of a run that is over draws them.

A curve has at most 2,000 points: it is thinned rather than cut. No curve decides anything, so nothing is synced, and a
thread of its own writes the file: a disk that is slow or full costs the curves, not the run. New points are appended;
when the file has grown much it is written anew from the thinned curves.
"""

import contextlib
import logging
import math
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from notebook_cluster.journal.store import (
    CURVES,
    CURVES_FILE,
    back_up,
    checkpoint,
    give_up,
    make_place,
    open_to_write,
    reading,
)
from notebook_cluster.protocol import decode, encode
from notebook_cluster.protocol.state import CheckpointView, ClusterView, PeerVersions, Series
from notebook_cluster.protocol.thinning import Key, ThinnedCurves
from notebook_cluster.protocol.wire import Message, ProtocolError

AGAIN = 5.0
"""Seconds: a point of a curve that was taken over from a file is old news while it is not this much newer than the last
one and no step further. What agents had not sent for sure before the coordinator was killed, they send again."""


class SeriesStore:
    """All curves of a cluster."""

    def __init__(self) -> None:
        self._curves = ThinnedCurves()
        self._fresh: dict[Key, list[tuple[int, float, float]]] = {}
        self._taken_over: dict[Key, tuple[int, float]] = {}

    def add(self, node: str, name: str, step: int, time: float, value: float, *, job: str = "", run: int = 0) -> None:
        key = node, job, run, name
        if key in self._taken_over:
            last_step, last_time = self._taken_over[key]
            if step <= last_step and time < last_time + AGAIN:
                return
            del self._taken_over[key]
        if self._curves.extend(key, [step], [time], [value]) is not None:
            self._fresh.setdefault(key, []).append((step, time, value))

    def take_over(self, series: Iterable[Series]) -> None:
        """Go on from curves that a coordinator before this one has left."""
        for one in series:
            key = one.node, one.job, one.run, one.name
            curve = self._curves.extend(key, one.step, one.time, one.value, one.seen)
            if one.name != "memory" and curve is not None and curve.step:
                self._taken_over[key] = curve.step[-1], curve.time[-1]

    def each(self) -> Iterator[Series]:
        """Every curve, one at a time: as lists all of them take several times their memory."""
        for (node, job, run, name), c in self._curves.items():
            yield Series(
                node=node, job=job, run=run, name=name, step=list(c.step), time=list(c.time), value=list(c.value),
                seen=c.seen,
            )  # fmt: skip

    def all(self) -> list[Series]:
        return list(self.each())

    def take_fresh(self) -> list[Series]:
        """Points since the last call."""
        fresh, self._fresh = self._fresh, {}
        return [
            Series(node=node, job=job, run=run, name=name, step=[p[0] for p in points], time=[p[1] for p in points],
                   value=[p[2] for p in points])
            for (node, job, run, name), points in fresh.items()
        ]  # fmt: skip


log = logging.getLogger(__name__)

GROWTH = 1_000_000
"""Bytes that are appended at least before the curves are written anew; of many curves as many as they had then. On a
small disk a sixteenth of it."""


class LastView(Message, frozen=True):
    """The cluster as it was last, and what is in no row. ``ended``: why it ended, empty while it runs."""

    state: ClusterView
    checkpoints: list[CheckpointView]
    peers: list[PeerVersions]
    ended: str = ""


class _Piece(msgspec.Struct, array_like=True):
    """Points of one curve; a value that is not finite is null. ``above``, ``below``: which of those are infinite."""

    node: str
    job: str
    name: str
    step: list[int]
    time: list[float]
    value: list[float | None]
    seen: int = 0
    run: int = 0
    above: list[int] = []
    below: list[int] = []

    def values(self) -> list[float]:
        found = [math.nan if one is None else one for one in self.value]
        for places, infinite in ((self.above, math.inf), (self.below, -math.inf)):
            for place in places:
                if 0 <= place < len(found):
                    found[place] = infinite
        return found


_decoder = msgspec.json.Decoder(list[_Piece])


def pack(series: list[Series]) -> bytes:
    """Pieces of curves as bytes."""

    def infinite(values: list[float], sign: float) -> list[int]:
        return [place for place, value in enumerate(values) if math.isinf(value) and value * sign > 0]

    return msgspec.json.encode(
        [
            _Piece(
                s.node, s.job, s.name, s.step, s.time, list(s.value), s.seen, s.run,
                infinite(s.value, 1.0), infinite(s.value, -1.0),
            )
            for s in series
        ]
    )  # fmt: skip


def unpack(data: bytes) -> list[Series]:
    """The inverse of :func:`pack`. msgspec.DecodeError: it is none."""
    return [
        Series(node=piece.node, job=piece.job, name=piece.name, step=piece.step, time=piece.time,
               value=piece.values(), seen=piece.seen, run=piece.run)
        for piece in _decoder.decode(data)
    ]  # fmt: skip


def read_series(path: Path) -> Iterator[Series]:
    """The curves in ``path``, pieces in order; none when there is no file, or it is not readable: what is left of a
    run is worth more than an error."""
    try:
        with reading(path) as connection:
            for (body,) in connection.execute("SELECT body FROM pieces ORDER BY id"):
                yield from unpack(body)
    except FileNotFoundError:
        pass
    except (sqlite3.Error, msgspec.DecodeError) as error:
        log.warning("not all curves in %s are readable: %s", path, error)


def read_view(path: Path) -> LastView | None:
    """What was kept last in ``path``; None when nothing was, or by a version that wrote it differently."""
    try:
        with reading(path) as connection:
            row = connection.execute("SELECT body FROM view").fetchone()
        view: LastView | None = None if row is None else decode(row[0], LastView)
    except (FileNotFoundError, ProtocolError, sqlite3.Error):
        return None
    return view


class CurvesFile:
    """Keeps the curves of the run in ``folder`` up to date with ``store``, and its last view."""

    def __init__(self, folder: Path, store: SeriesStore) -> None:
        self._folder, self._store = folder, store
        self._thread = ThreadPoolExecutor(1, "curves")
        self._connection: sqlite3.Connection | None = None
        self._working: Future[None] | None = None
        self._behind = True
        """The points since the last rewriting are not all in the file."""
        self._size = self._base = 0
        self._growth = GROWTH
        self._failed = False

    def append(self, fresh: list[Series]) -> None:
        """``fresh``: points that ``store`` has got since the last call. Returns before they are written."""
        if self._working is not None and not self._working.done():
            self._behind = True  # the disk is slow: all of it later
        elif self._behind or self._size - self._base > max(self._base, self._growth):
            self._behind = False
            whole = [pack([one]) for one in self._store.each()]
            self._working = self._submit(lambda connection: self._rewrite(connection, whole))
        else:
            piece = pack(fresh)
            self._working = self._submit(lambda connection: self._append(connection, piece))

    def keep_view(self, view: LastView) -> None:
        """Keep ``view`` in place of the one before."""
        body = encode(view)
        self._submit(
            lambda connection: self._write(connection, [("INSERT OR REPLACE INTO view VALUES (1, ?)", (body,))])
        )

    def close(self) -> None:
        """Write what is missing, and return when it is done or cannot be."""
        if self._behind or (self._working is not None and not self._working.done()):
            whole = [pack([one]) for one in self._store.each()]
            self._submit(lambda connection: self._rewrite(connection, whole))
        last = self._thread.submit(self._end)
        with contextlib.suppress(TimeoutError):
            last.result(5.0)
        self._thread.shutdown(wait=False)

    # ---- on the thread

    def _submit(self, work: Callable[[sqlite3.Connection], None]) -> "Future[None]":
        return self._thread.submit(self._try, work)

    def _try(self, work: Callable[[sqlite3.Connection], None]) -> None:
        try:
            if self._connection is None:
                place = make_place(self._folder)
                self._growth = min(GROWTH, shutil.disk_usage(place).total // 16)
                self._connection = open_to_write(place / CURVES_FILE, CURVES)
            work(self._connection)
            self._failed = False
        except (sqlite3.Error, OSError, ValueError) as error:
            if not self._failed:
                log.warning("the curves cannot be kept in %s: %s", self._folder, error)
            self._failed = self._behind = True
            self._drop()

    def _rewrite(self, connection: sqlite3.Connection, whole: list[bytes]) -> None:
        rows = [("INSERT INTO pieces (body) VALUES (?)", (one,)) for one in whole]
        self._write(connection, [("DELETE FROM pieces", ()), *rows])
        self._size = self._base = sum(map(len, whole))

    def _append(self, connection: sqlite3.Connection, piece: bytes) -> None:
        self._write(connection, [("INSERT INTO pieces (body) VALUES (?)", (piece,))])
        self._size += len(piece)

    def _write(self, connection: sqlite3.Connection, statements: list[tuple[str, tuple[bytes, ...]]]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        for statement, values in statements:
            connection.execute(statement, values)
        connection.execute("COMMIT")

    def _drop(self) -> None:
        if self._connection is not None:
            give_up(self._connection)
        self._connection = None

    def _end(self) -> None:
        if self._connection is not None:
            checkpoint(self._connection)
            place = make_place(self._folder)
            if place != self._folder:
                with contextlib.suppress(OSError, sqlite3.Error):
                    back_up(self._connection, self._folder / CURVES_FILE)
        self._drop()
