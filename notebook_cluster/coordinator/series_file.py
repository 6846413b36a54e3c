"""The curves of a run on disk, beside the run log: a coordinator that was killed gets them back, and a report of a run
that is over draws them.

Each line is a list of pieces of curves. New points are appended without fsync: they survive the death of this process.
When the file has grown much it is written anew from the thinned curves, so it stays within a few MB.
"""

import logging
import math
import os
from pathlib import Path

import msgspec

from notebook_cluster.coordinator.series import SeriesStore
from notebook_cluster.protocol.state import Series

log = logging.getLogger(__name__)

GROWTH = 1_000_000
"""Bytes that are appended at least before the file is written anew; for a large one as many as it had then."""


class _Piece(msgspec.Struct, array_like=True):
    """Points of one curve; a value that is not finite is null."""

    node: str
    job: str
    name: str
    step: list[int]
    time: list[float]
    value: list[float | None]
    seen: int = 0
    run: int = 0


def _line(series: list[Series]) -> bytes:
    return msgspec.json.encode(
        [_Piece(s.node, s.job, s.name, s.step, s.time, list(s.value), s.seen, s.run) for s in series]
    )


def read_series(path: Path) -> list[Series]:
    """The curves in ``path``, pieces in order; empty when there is no file. A line that cannot be read is left out: a
    crash may have cut it, and the rest is worth more than an error."""
    found: list[Series] = []
    decoder = msgspec.json.Decoder(list[_Piece])
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return found
    for number, line in enumerate(lines, 1):
        try:
            pieces = decoder.decode(line)
        except msgspec.DecodeError as error:
            log.warning("%s line %d is not readable and left out: %s", path, number, error)
            continue
        for piece in pieces:
            value = [math.nan if one is None else one for one in piece.value]
            found.append(
                Series(node=piece.node, job=piece.job, name=piece.name, step=piece.step, time=piece.time, value=value,
                       seen=piece.seen, run=piece.run)
            )  # fmt: skip
    return found


class SeriesFile:
    """Keeps ``path`` (mode 0600) up to date with ``store``. A disk that is full costs the curves of the file, not the
    run: it is tried again with the next points."""

    def __init__(self, path: Path, store: SeriesStore) -> None:
        self._path, self._store = path, store
        self._file: int | None = None
        self._size = self._base = 0
        self._failed = False

    def append(self, fresh: list[Series]) -> None:
        """``fresh``: points that ``store`` has got since the last call."""
        try:
            if self._file is None or self._size - self._base > max(self._base, GROWTH):
                self.rewrite()
            else:
                self._size += self._write(self._file, fresh)
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("the curves cannot be kept in %s: %s", self._path, error)
            self._failed = True
            self.close()

    def rewrite(self) -> None:
        """Write the file anew from all curves; it appears whole or not at all. OSError: it cannot be written."""
        self.close()
        partial = self._path.with_suffix(".partial")
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            self._size = self._base = sum(self._write(file, [one]) for one in self._store.all())
            os.replace(partial, self._path)
        except BaseException:
            os.close(file)
            raise
        self._file = file

    def _write(self, file: int, series: list[Series]) -> int:
        data = _line(series) + b"\n"
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
        return len(data)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
