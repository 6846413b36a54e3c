"""What a node writes down while it trains, one file for each process and leg, and how it is read again.

A row is there before what it tells of goes on: the end of the process at any point loses none that others know of.
"""

import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

_PROGRESS = struct.Struct("<qqqdqd")


@dataclass
class Progress:
    """How far a node is, as it says itself: looked at while it trains. Times are those of ``time.monotonic``, which
    all hosts of the network share."""

    pid: int = 0
    incarnation: int = 0
    round: int = 0
    heard: float = 0.0
    """When it heard of the last COMMIT."""
    counted: int = 0
    counted_at: float = 0.0
    """The last round with its own work in it."""

    @classmethod
    def read(cls, path: Path) -> "Progress":
        """All zeros where the node has said nothing yet."""
        try:
            return cls(*_PROGRESS.unpack(path.read_bytes()))
        except (OSError, struct.error):
            return cls()


class Recorder:
    """Notes what the node of this kernel does in the job ``job``. Used in kernels."""

    def __init__(self, folder: Path, job: str, node: str, incarnation: int) -> None:
        self.job, self.node = job, node
        (folder / job).mkdir(parents=True, exist_ok=True)
        (folder / "progress").mkdir(exist_ok=True)
        self._file = open(folder / job / f"{node}.{incarnation}.rows", "ab", buffering=0)  # noqa: SIM115
        self._progress_file = os.open(folder / "progress" / node, os.O_WRONLY | os.O_CREAT, 0o600)
        self._progress = Progress(os.getpid(), incarnation)
        self._local: dict[str, Any] = {}
        self.done = 0
        """Steps that this node has taken."""
        self.note("begins", pid=os.getpid(), incarnation=incarnation)
        self.tell()

    def note(self, kind: str, payload: Any = b"", **fields: Any) -> None:
        """One row, written at once."""
        data = msgspec.msgpack.encode((kind, {**fields, "at": time.monotonic()}, bytes(payload)))
        self._file.write(struct.pack("<I", len(data)) + data)

    def tell(self) -> None:
        """Say how far this node is."""
        row = self._progress
        data = _PROGRESS.pack(row.pid, row.incarnation, row.round, row.heard, row.counted, row.counted_at)
        os.pwrite(self._progress_file, data, 0)

    # ---- what is looked at -----------------------------------------------------------------------------------

    def watch(self, runtime: Any) -> None:
        """From now on, whatever the job does is noted as it passes the places through which all of it goes."""
        from notebook_cluster.training.background.job import Job
        from notebook_cluster.training.loop.replica import Replica

        stop_watching()
        before(Job, "apply_event", self._event)
        before(Job, "on_control", self._hears)
        before(Replica, "contribution", self._contributes)
        before(Replica, "discard", self._is_refused)
        before(type(runtime), "send_mesh", self._sends)

    def _contributes(self, replica: Any, *_more: Any, **_options: Any) -> None:
        """Main thread: the model as it is at the boundary, and the round that it is based on."""
        local = replica.parameters.read()
        self._local = {"base": replica.round, "done": self.done, "local": np.ascontiguousarray(local, "<f4").tobytes()}

    def _event(self, job: Any, event: Any) -> None:
        """Thread of the runtime: the encoded contribution, before anybody hears of it."""
        if job.name == self.job and type(event).__name__ == "Boundary" and event.samples:
            self.note("contribution", event.encoded, serial=job.member.serial + 1, samples=event.samples, **self._local)

    def _is_refused(self, _replica: Any) -> None:
        self.note("refused", done=self.done)

    def _hears(self, job: Any, message: Any) -> None:
        if job.name != self.job or type(message).__name__ != "Commit":
            return
        row = self._progress
        row.round, row.heard = message.round, time.monotonic()
        if self.node in message.members:
            row.counted, row.counted_at = row.round, row.heard
        self.note("heard", round=message.round)
        self.tell()

    def _sends(self, _runtime: Any, node: str, header: Any, payload: Any = b"") -> None:
        if header.job == self.job and header.kind in ("contribution", "mean"):
            names = ("round", "attempt", "slice", "offset", "total")
            place = {name: getattr(header, name) for name in names}
            self.note("sent", payload, to=node, part=header.kind, **place)


_undo: list[Callable[[], None]] = []


def before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Call ``look`` with the arguments of ``owner.name`` before that is called."""
    original = getattr(owner, name)

    def wrapper(*arguments: Any, **options: Any) -> Any:
        look(*arguments, **options)
        return original(*arguments, **options)

    setattr(owner, name, wrapper)
    _undo.append(lambda: setattr(owner, name, original))


def stop_watching() -> None:
    """Everything is called as it was."""
    while _undo:
        _undo.pop()()


def hash_of(values: Any) -> str:
    """Of the numbers of a model."""
    return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(values, "<f4").tobytes()))


# ---- reading it again ----------------------------------------------------------------------------------------


@dataclass
class Contribution:
    """What a process has handed over at a boundary; kept until a round counts it."""

    serial: int
    samples: float
    encoded: bytes
    local: Any
    """The model's numbers at the boundary."""
    base: int
    """The round that they are based on."""
    done: int
    """Steps that the process had taken."""


@dataclass
class Sent:
    """A piece of a contribution or of a mean that went to another node."""

    to: str
    part: str
    round: int
    attempt: int
    slice: int
    offset: int
    total: int
    data: bytes


@dataclass
class Life:
    """What one process of a node has done in one leg."""

    node: str
    incarnation: int = 0
    pid: int = 0
    contributions: dict[int, Contribution] = field(default_factory=dict)
    sent_in: dict[tuple[str, int, int], list[Sent]] = field(default_factory=dict)
    """(part, round, attempt) -> what was sent of it."""
    heard: dict[int, float] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)
    """Steps taken when the cluster did not use its work."""
    poisoned: list[int] = field(default_factory=list)
    """Steps that put NaN into the parameters."""
    received: list[dict[str, Any]] = field(default_factory=list)
    """Rounds as ``sync.step`` returned them, with the hash of the model."""
    ends: dict[str, Any] | None = None
    """None: the process did not get to the end of the leg."""

    def take(self, kind: str, fields: dict[str, Any], payload: bytes) -> None:
        """One row."""
        at = fields.pop("at")
        match kind:
            case "begins":
                self.pid, self.incarnation = fields["pid"], fields["incarnation"]
            case "contribution":
                fields["local"] = np.frombuffer(fields["local"], "<f4")
                self.contributions.setdefault(fields["serial"], Contribution(encoded=payload, **fields))
            case "sent":
                place = fields["part"], fields["round"], fields["attempt"]
                self.sent_in.setdefault(place, []).append(Sent(data=payload, **fields))
            case "heard":
                self.heard.setdefault(fields["round"], at)
            case "refused":
                self.refused.append(fields["done"])
            case "poisoned":
                self.poisoned.append(fields["step"])
            case "received":
                self.received.append(fields)
            case "ends":
                self.ends = fields


def read_lives(folder: Path) -> list[Life]:
    """All processes that took part in the leg whose files are in ``folder``."""
    return [read_life(path) for path in sorted(folder.glob("*.rows"))]


def read_life(path: Path) -> Life:
    """One process; the row that it was writing when it was killed is left out."""
    data, position, life = path.read_bytes(), 0, Life(path.name.split(".")[0])
    while position + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, position)
        row = data[position + 4 : position + 4 + size]
        position += 4 + size
        if len(row) == size:
            life.take(*msgspec.msgpack.decode(row))
    return life
