"""The run log: one JSON object a line, appended before a decision leaves this process."""

import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.coordinator.events import Event, LogLine
from notebook_cluster.coordinator.state import State, apply

log = logging.getLogger(__name__)


class RunLog:
    """Appends lines to ``path`` (mode 0600). Without ``durable`` a line survives the death of this process;
    with it also that of the machine (fsync)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._encoder = msgspec.json.Encoder()

    def _append(self, line: LogLine, durable: bool) -> None:
        data = self._encoder.encode(line) + b"\n"
        while data:
            data = data[os.write(self._file, data) :]
        if durable:
            os.fsync(self._file)

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
    """What a log says: the state, the records of the rounds in order and the last message of each peer (by key)."""

    state: State
    rounds: list[dict[str, Any]]
    received: dict[str, int]


def read_log(path: Path) -> Recovered:
    """Apply every line of ``path``. A last line that was cut by a crash is left out and cut away; any other
    unreadable line raises ValueError naming its number."""
    recovered = Recovered(State(), [], {})
    if not path.exists():
        return recovered
    decoder = msgspec.json.Decoder(LogLine)
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        log.warning("the last line of %s was cut off by a crash: %d bytes left out", path, len(data) - whole)
        os.truncate(path, whole)
    for number, raw in enumerate(data[:whole].splitlines(), 1):
        try:
            line = decoder.decode(raw)
        except msgspec.DecodeError as error:
            raise ValueError(
                f"{path} line {number} is not readable ({error}): start a new cluster with --fresh"
            ) from None
        if line.event is not None:
            recovered.state = apply(recovered.state, line.event)
        if line.round is not None:
            recovered.rounds.append(line.round)
        if line.received is not None:
            recovered.received.update(line.received)
    return recovered
