"""The run log: one JSON object a line, appended before a decision leaves this process."""

import logging
import os
import time
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
    with it also that of the machine (fsync)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._file).st_size
        self._encoder = msgspec.json.Encoder()

    def _append(self, line: LogLine, durable: bool) -> None:
        data = self._encoder.encode(line) + b"\n"
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            if durable:
                os.fsync(self._file)
        except OSError:
            # Half a line would be glued to the next one.
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def event(self, event: Event, *, durable: bool) -> None:
        self._append(LogLine(time=time.time(), event=event), durable)

    def round(self, record: dict[str, Any]) -> None:
        """A record of the training rounds, always durable."""
        self._append(LogLine(time=time.time(), round=record), True)

    def received(self, sequences: dict[str, int]) -> None:
        """The last link message of each peer (by key) whose effect is in the log."""
        self._append(LogLine(time=time.time(), received=sequences), False)

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
