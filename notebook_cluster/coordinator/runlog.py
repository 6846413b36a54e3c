"""The run log: one JSON object a line, appended before a decision leaves this process."""

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.coordinator.events import Event, LogLine, StoredLine
from notebook_cluster.coordinator.kept_rounds import KeptRounds
from notebook_cluster.coordinator.state import State, apply

log = logging.getLogger(__name__)

_PROGRESS_BYTES = 4 << 20
"""Between two words about how far reading is."""


class RunLog:
    """Appends lines to ``path`` (mode 0600). Without ``durable`` a line survives the death of this process;
    with it also that of the machine (fsync).

    A disk that takes no line ends nothing. From then on lines wait in memory, in order, and so does what was handed to
    :meth:`when_written`: nobody is told what the log does not say. :meth:`retry` writes the same lines.

    Attributes:
        trouble: why lines wait; None while none do.
        on_holding: called with True when lines begin to wait, with False when all are written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: OSError | None = None
        self.on_holding: Callable[[bool], None] = lambda holding: None
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._file).st_size
        self._encoder = msgspec.json.Encoder()
        self._waiting: deque[tuple[bytes, bool] | Callable[[], None]] = deque()
        self._since = self._held = 0.0

    @property
    def holding(self) -> bool:
        """True while lines wait."""
        return bool(self._waiting)

    def held_seconds(self) -> float:
        """How long lines have waited in all: time in which nothing could be decided."""
        return self._held + (time.monotonic() - self._since if self.trouble is not None else 0.0)

    def event(self, event: Event, *, durable: bool) -> None:
        self._append(LogLine(time=time.time(), event=event), durable)

    def round(self, record: dict[str, Any]) -> None:
        """A record of the training rounds, always durable."""
        self._append(LogLine(time=time.time(), round=record), True)

    def received(self, sequences: dict[str, int]) -> None:
        """The last link message of each peer (by key) whose effect is in the log."""
        if not self._waiting:
            self._append(LogLine(time=time.time(), received=sequences), False)

    def when_written(self, call: Callable[[], None]) -> None:
        """``call`` once every line so far is written: now, or after :meth:`retry`."""
        if self._waiting:
            self._waiting.append(call)
        else:
            call()

    def retry(self) -> None:
        """Write what waits, as much as the disk takes. What is called meanwhile may add lines of its own: they come
        before what waited behind it."""
        waiting, self._waiting = self._waiting, deque()
        while waiting and not self._waiting:
            entry = waiting.popleft()
            if isinstance(entry, tuple):
                self._write_or_wait(*entry)
                continue
            try:
                entry()
            except Exception:
                log.exception("what waited for the run log failed")
        self._waiting.extend(waiting)
        if self.trouble is not None and not self._waiting:
            self._held, self.trouble = self.held_seconds(), None
            self.on_holding(False)

    def _append(self, line: LogLine, durable: bool) -> None:
        data = self._encoder.encode(line) + b"\n"
        if self._waiting:
            self._waiting.append((data, durable))
        else:
            self._write_or_wait(data, durable)

    def _write_or_wait(self, data: bytes, durable: bool) -> None:
        try:
            self._write(data, durable)
        except OSError as error:
            self._waiting.append((data, durable))
            first, self.trouble = self.trouble is None, error
            if first:
                self._since = time.monotonic()
                self.on_holding(True)

    def _write(self, data: bytes, durable: bool) -> None:
        if self.trouble is not None:
            # Half a line may be there: the next one would be glued to it.
            os.ftruncate(self._file, self._size)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            if durable:
                os.fsync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        os.close(self._file)


class Recovered(msgspec.Struct):
    """What a log says: the state, the records of the rounds that still matter, in order, and the last message of each
    peer (by key)."""

    state: State
    rounds: list[dict[str, Any]]
    received: dict[str, int]


def read_log(
    path: Path,
    *,
    on_round: Callable[[dict[str, Any]], None] = lambda record: None,
    on_progress: Callable[[int, int], None] = lambda done, size: None,
) -> Recovered:
    """Apply every line of ``path``, one after the other: what is superseded is not kept in memory.

    A last line that was cut by a crash is left out and cut away. ``on_round`` gets every record of a round that was
    committed or taken back; ``on_progress`` is called with the bytes read so far and those of the file.

    Raises:
        ValueError: another line is not readable; names the file, the number and the way out.
    """
    recovered = Recovered(State(), [], {})
    if not path.exists():
        return recovered
    decoder, kept = msgspec.json.Decoder(StoredLine), KeptRounds(on_round)
    size, done, told = path.stat().st_size, 0, 0
    on_progress(0, size)
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                if not raw.endswith(b"\n"):
                    raise ValueError("it has no end")
                line = decoder.decode(raw)
                if bytes(line.round) not in (b"", b"null"):
                    kept.add(line.round)
            except (ValueError, KeyError, TypeError) as error:
                if done + len(raw) < size:
                    raise ValueError(_damaged(path, number, error)) from None
                log.warning("the last line of %s was cut off by a crash: %d bytes left out", path, len(raw))
                os.truncate(path, done)
                break
            if line.event is not None:
                recovered.state = apply(recovered.state, line.event)
            if line.received is not None:
                recovered.received.update(line.received)
            done += len(raw)
            if done - told > _PROGRESS_BYTES:
                told = done
                on_progress(done, size)
    recovered.rounds = kept.records()
    return recovered


def has_crashed(path: Path) -> bool:
    """True when the log in ``path`` ends without a word about its end, and there were nodes. Lines about rounds, nearly
    all of a long log, are not looked into.

    Raises:
        ValueError: as :func:`read_log`.
    """
    if not path.exists():
        return False
    decoder, state = msgspec.json.Decoder(StoredLine), State()
    size, done = path.stat().st_size, 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            done += len(raw)
            if b',"round":{' in raw[:64]:
                continue
            try:
                line = decoder.decode(raw)
            except msgspec.DecodeError as error:
                if done < size:
                    raise ValueError(_damaged(path, number, error)) from None
                break
            if line.event is not None:
                state = apply(state, line.event)
    return state.stopped is None and bool(state.nodes)


def _damaged(path: Path, number: int, error: Exception) -> str:
    return (
        f"{path} line {number} is not readable ({error}): mend or delete that line, or begin anew with "
        f"%cluster start {path.parent.name} --fresh, which keeps this file as run.previous.jsonl; checkpoints stay"
    )
