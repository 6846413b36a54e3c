"""The writer's side of a checkpoint: collect one part per member, then write in a thread of its own.

Called on the runtime's thread only. A part may arrive before the order to save (mesh and link are not ordered with
respect to each other), and a member may be lost while its part is on the way. A ticket is given once: a coordinator
that was restarted orders with a new one, so that what was on its way for the old order is not taken for the new.

Parts, and the states that joiners fetch, go between nodes in :class:`Pieces`: frames that may arrive in any order and
twice.

A node whose cluster is out of reach keeps one by itself before its kernel ends. It is like any other,
``checkpoints/<job>-kept/``, with the parts of the nodes that share the folder: those of one peer hold the same state,
so each adds its own part to what the one before it has written.
"""

import contextlib
import dataclasses
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from notebook_cluster.checkpoints import CheckpointError, Contents, Part, find_latest, load, save
from notebook_cluster.checkpoints.kept import CLUSTER_ID, EPOCH
from notebook_cluster.checkpoints.reading import SUFFIX
from notebook_cluster.codecs import Vector
from notebook_cluster.collectives.chunked_messages import reserve
from notebook_cluster.memory import Ranges, first_gap, with_range
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.names import check_name
from notebook_cluster.protocol.rounds import PartMissing, Save, Saved
from notebook_cluster.rounds.numerics.momentum import FLOAT32, converted
from notebook_cluster.rounds.numerics.vectors import TensorLayout
from notebook_cluster.training.runtime import Payload, Runtime
from notebook_cluster.training.settings.arguments import Settings

CHUNK = 256 * 1024
"""Bytes per frame: the most that is good over TCP with CURVE."""

MAX_PART_BYTES = 8 * 1024**3
"""What one node's optimiser state may take: more is refused before anything is allocated."""

OPEN_TICKETS = 8
"""Saves whose parts are kept at the same time, ordered ones and ones to come; the oldest is dropped beyond that."""


class Beside(Protocol):
    """A :class:`notebook_cluster.training.checkpointing.beside.StateBeside`."""

    def metadata(self) -> dict[str, str]: ...

    def files(self) -> dict[str, Callable[[Path], None]]: ...


@dataclass(frozen=True)
class Description:
    """What does not change while a sync object lives: how to name the vector's elements, what to write beside them."""

    layout: TensorLayout
    settings: Settings
    beside: Beside | None = None


@dataclass(frozen=True)
class TrainingSnapshot:
    """What is saved for all nodes: the state after ``round`` and what describes it."""

    round: int
    state_hash: str
    theta: Vector
    momentum: Vector
    layout: TensorLayout
    settings: Settings
    beside: Beside | None = None
    """What else the model consists of."""

    def contents(self, job: str, parts: list[Part]) -> Contents:
        """A checkpoint of ``job`` with this state and the ``parts`` of nodes."""
        return Contents(
            job=job,
            round=self.round,
            state_hash=self.state_hash,
            parameters=self.layout.tensors(self.theta),
            momentum=self.layout.tensors(converted(self.momentum, FLOAT32, 0)) if self.momentum.size else {},
            parts=parts,
            settings=self.settings,
            about=self.beside.metadata() if self.beside is not None else {},
            files=self.beside.files() if self.beside is not None else {},
        )


@dataclass
class _Collection:
    """One save in progress."""

    parts: "dict[str, Pieces]" = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    order: Save | None = None
    snapshot: TrainingSnapshot | None = None
    ranks: dict[str, int] = field(default_factory=dict)


class CheckpointWriter:
    """Collects parts by ticket; ``answer`` gets a Saved (from the writing thread) for every save that was ordered."""

    def __init__(self, directory: Callable[[], Path], answer: Callable[[Saved], None]) -> None:
        self._directory = directory
        self._answer = answer
        self._open: dict[int, _Collection] = {}
        self._writing = threading.Lock()

    def order(self, message: Save, snapshot: TrainingSnapshot | None, ranks: dict[str, int]) -> None:
        """The coordinator made this node the writer. ``snapshot`` must be of the round that it names."""
        if snapshot is None or (snapshot.round, snapshot.state_hash) != (message.round, message.state_hash):
            here = f"round {snapshot.round}" if snapshot else "no state"
            self._finish(
                message, error=f"the writer holds {here}, not round {message.round}: save again after the next round"
            )
            return
        for ticket, waiting in list(self._open.items()):
            if waiting.order is not None and replace(waiting.order, ticket=message.ticket) == message:
                del self._open[ticket]  # of a coordinator that is no more
        collection = self._collection(message.ticket)
        collection.order, collection.snapshot, collection.ranks = message, snapshot, ranks
        self._write_when_complete(message.ticket)
        self._drop_oldest()

    def part(self, sender: str, header: JobFrame, payload: Payload) -> None:
        """A frame of a member's part.

        Raises:
            TransferError: the frame cannot belong to a part; names the sender.
        """
        pieces = self._collection(header.ticket).parts.setdefault(sender, Pieces(MAX_PART_BYTES))
        try:
            pieces.add_piece(header.offset, header.total, payload)
        except TransferError as error:
            raise TransferError(f"part of {sender!r} for checkpoint {header.ticket}: {error}") from None
        self._write_when_complete(header.ticket)

    def part_missing(self, message: PartMissing) -> None:
        """``message.node`` is gone: its part is not waited for."""
        self._collection(message.ticket).missing.add(message.node)
        self._write_when_complete(message.ticket)

    def _collection(self, ticket: int) -> _Collection:
        if ticket not in self._open:
            waiting = [number for number, collection in self._open.items() if collection.order is None]
            if len(waiting) >= OPEN_TICKETS:
                del self._open[waiting[0]]
            self._open[ticket] = _Collection()
        return self._open[ticket]

    def _drop_oldest(self) -> None:
        """Give the oldest orders up, where too many wait for parts."""
        orders = [collection.order for collection in self._open.values() if collection.order is not None]
        for order in orders[:-OPEN_TICKETS]:
            del self._open[order.ticket]
            self._finish(order, error=f"checkpoint {order.name!r} waited too long for the parts of the other nodes")

    def _write_when_complete(self, ticket: int) -> None:
        collection = self._open[ticket]
        order = collection.order
        if order is None:
            return
        here = {name for name, pieces in collection.parts.items() if pieces.complete}
        if not set(order.members) <= here | collection.missing:
            return
        del self._open[ticket]
        thread = threading.Thread(
            target=self._write, args=(collection, order, here), name="checkpoint-writer", daemon=True
        )
        thread.start()

    def _write(self, collection: _Collection, order: Save, here: set[str]) -> None:
        snapshot = collection.snapshot
        assert snapshot is not None
        ranks = {name: collection.ranks.get(name, index) for index, name in enumerate(order.members)}
        parts = [
            Part(name, ranks[name], collection.parts[name].data if name in here else None) for name in order.members
        ]
        contents = snapshot.contents(order.job, parts)
        try:
            with self._writing:
                folder, manifest_hash = save(self._directory().absolute(), order.name, contents)
        except (CheckpointError, ValueError, OSError) as error:
            self._finish(order, error=str(error))
        else:
            self._finish(order, path=str(folder), manifest_hash=manifest_hash)

    def _finish(self, order: Save, path: str = "", manifest_hash: str = "", error: str = "") -> None:
        saved = Saved(
            job=order.job, name=order.name, round=order.round, ticket=order.ticket,
            path=path, manifest_hash=manifest_hash, error=error,
        )  # fmt: skip
        self._answer(saved)


# ---- bytes in pieces -----------------------------------------------------------------------------------------


class TransferError(ValueError):
    """A frame that cannot belong to the transfer; it is dropped."""


class Pieces:
    """The bytes of one array, put together. ``limit``: the most bytes it may have."""

    def __init__(self, limit: int, room: Callable[[int], memoryview] = reserve) -> None:
        """``room``: memory for so many bytes."""
        self.limit, self._room = limit, room
        self._total: int | None = None
        self._data = reserve(0)
        self._received: Ranges = ()

    @property
    def complete(self) -> bool:
        return self._total is not None and self.first_missing == self._total

    @property
    def data(self) -> memoryview:
        """All bytes; only meaningful when ``complete``."""
        return self._data

    @property
    def first_missing(self) -> int:
        """Offset of the first byte that has not come."""
        return first_gap(self._received)

    def add_piece(self, offset: int, total: int, payload: Payload) -> bool:
        """Put one frame in its place; True when it was new.

        Raises:
            TransferError: too large, or not one of the frames that :func:`frames_of` cuts.
        """
        if self._total is None:
            if not 0 <= total <= self.limit:
                raise TransferError(f"{total} bytes announced where at most {self.limit} can be right")
            self._total, self._data = total, self._room(total)
        cut = offset % CHUNK == 0 and 0 <= offset <= total and len(payload) == min(CHUNK, total - offset)
        if total != self._total or not cut:
            raise TransferError(f"a piece of {len(payload)} bytes at {offset} of {total} in an array of {self._total}")
        self._received, new = with_range(self._received, offset, offset + len(payload))
        for start, stop in new:
            self._data[start:stop] = payload[start - offset : stop - offset]
        return bool(new) or total == 0


def frames_of(data: Payload) -> Iterator[tuple[int, int, memoryview]]:
    """(offset, total, payload) for every frame of ``data``; one empty frame for no bytes."""
    view = memoryview(data).cast("B")
    for offset in range(0, max(1, len(view)), CHUNK):
        yield offset, len(view), view[offset : offset + CHUNK]


# ---- without a cluster ----------------------------------------------------------------------------------------

_MAX_NAME = 63


def kept_name(job: str) -> str:
    """The checkpoint's name, which ``resume=`` takes."""
    return check_name(job[: _MAX_NAME - len(SUFFIX)] + SUFFIX, "checkpoint")


def kept_writer(
    runtime: Runtime, job: str, snapshot: TrainingSnapshot, rank: int, part: Callable[[], bytes | None]
) -> Callable[[], Path]:
    """What saves ``snapshot`` with the ``part`` of this node (None: without it) and whose training it is, and returns
    the folder. It raises CheckpointError when that was not possible: the checkpoint before is then still valid."""
    directory, node, roster = runtime.checkpoint_directory(), runtime.name, runtime.roster
    if roster is not None:
        whose: Settings = {CLUSTER_ID: roster.cluster_id, EPOCH: roster.epoch}
        snapshot = dataclasses.replace(snapshot, settings=snapshot.settings | whose)

    def write() -> Path:
        name, own = kept_name(job), Part(node, rank, part())
        with _one_at_a_time(directory.absolute() / name):
            parts = [*_parts_of_others(directory, name, snapshot, node), own]
            return save(directory.absolute(), name, snapshot.contents(job, parts))[0]

    return write


def _parts_of_others(directory: Path, name: str, snapshot: TrainingSnapshot, node: str) -> list[Part]:
    """What other nodes than ``node`` put into the newest kept checkpoint, when that is of the same state."""
    try:
        found = find_latest(directory, name)
        checkpoint = load(found.path) if found is not None else None
    except CheckpointError:
        return []
    if checkpoint is None or checkpoint.manifest.state_hash != snapshot.state_hash:
        return []
    rows = [row for row in checkpoint.manifest.nodes if row.name != node]
    return [Part(row.name, row.rank, checkpoint.part(row.name, row.rank)) for row in rows]


@contextlib.contextmanager
def _one_at_a_time(home: Path) -> Iterator[None]:
    """Nodes of one peer may write there at the same moment."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(home / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        cause, way_out = error.strerror or error, "make room or use another folder"
        raise CheckpointError(f"checkpoint not written to {home}: {cause}: {way_out}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
