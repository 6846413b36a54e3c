"""Moving whole arrays between nodes: the state for a joiner, a node's part for the writer of a checkpoint.

Bytes go out in frames of ``CHUNK``; they may arrive in any order and twice. Pure: frames in, frames out.

On a slow link nothing may come for seconds though everything is on its way. So a state is not pushed a second time
because it is asked for again. Behind it comes SENT, also as the answer to who asks again: what has not come by then is
lost (a connection broke), and only that is sent again. The member's ``retransmission``
does the same with slices.
"""

from collections.abc import Iterator

import numpy as np

from notebook_cluster.codecs import Vector
from notebook_cluster.collectives.parcels import reserve
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.rounds.numerics.outer import state_hash
from notebook_cluster.training.runtime import Payload

CHUNK = 256 * 1024
"""Bytes per frame: the most that is good over TCP with CURVE."""

MAX_PART_BYTES = 8 * 1024**3
"""What one node's optimiser state may take: more is refused before anything is allocated."""

RETRY_SECONDS = 3.0
"""A fetch that hears nothing for this long asks again; after ``RETRIES`` of them its source is given up."""

RETRIES = 3


class TransferError(ValueError):
    """A frame that cannot belong to the transfer; it is dropped."""


class Pieces:
    """The bytes of one array, put together. ``limit``: the most bytes it may have."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._total: int | None = None
        self._data = reserve(0)
        self._missing: set[int] = set()

    @property
    def complete(self) -> bool:
        return self._total is not None and not self._missing

    @property
    def data(self) -> memoryview:
        """All bytes; only meaningful when ``complete``."""
        return self._data

    @property
    def first_missing(self) -> int:
        """Offset of the first byte that has not come."""
        return min(self._missing) if self._total is not None and self._missing else 0

    def add(self, offset: int, total: int, payload: Payload) -> bool:
        """Put one frame in its place; True when it was new.

        Raises:
            TransferError: too large, or not one of the frames that :func:`frames_of` cuts.
        """
        if self._total is None:
            if not 0 <= total <= self.limit:
                raise TransferError(f"{total} bytes announced where at most {self.limit} can be right")
            self._total, self._data = total, reserve(total)
            self._missing = set(range(0, total, CHUNK))
        if total != self._total or (total and len(payload) != min(CHUNK, total - offset)):
            raise TransferError(f"a piece of {len(payload)} bytes at {offset} of {total} in an array of {self._total}")
        if offset not in self._missing:
            return total == 0
        self._missing.discard(offset)
        self._data[offset : offset + len(payload)] = payload
        return True


def frames_of(data: Payload) -> Iterator[tuple[int, int, memoryview]]:
    """(offset, total, payload) for every frame of ``data``; one empty frame for no bytes."""
    view = memoryview(data).cast("B")
    for offset in range(0, max(1, len(view)), CHUNK):
        yield offset, len(view), view[offset : offset + CHUNK]


class Fetch:
    """One attempt to get (theta, momentum, the node's saved optimiser state) from ``source``.

    The source pushes a snapshot; what arrives is checked against the hash that its frames announce.
    """

    def __init__(self, job: str, source: str, incarnation: int, wanted: int, elements: int, now: float) -> None:
        """``incarnation`` is this node's; ``wanted`` the oldest round that is good enough."""
        self.job, self.source, self.incarnation, self.wanted, self.elements = job, source, incarnation, wanted, elements
        self.round, self.state_hash = -1, ""
        self._pieces: dict[str, Pieces] = {}
        self._asked_at, self._asked = now, 1
        self._passed = 0
        """Number of the last push that is over."""
        self._in_vain = 0
        """Pushes one after the other of which nothing came."""
        self._came = False

    def request(self) -> JobFrame:
        """Ask the source for its newest snapshot, as soon as that is of the wanted round or later; of one that is here
        in part, from the first piece on that is missing."""
        name = next((name for name, pieces in self._pieces.items() if not pieces.complete), "")
        return JobFrame(
            job=self.job, incarnation=self.incarnation, kind="state_request", round=self.wanted, ticket=self._passed,
            name=name, offset=self._pieces[name].first_missing if name else 0, state_hash=self.state_hash,
        )  # fmt: skip

    def sent(self, header: JobFrame, now: float) -> JobFrame | None:
        """The source says that all it ever pushed came before this: a request for what is lost, or None.

        Raises:
            TransferError: nothing of the last ``RETRIES`` pushes came.
        """
        if header.ticket <= self._passed:
            return None
        self._in_vain = 0 if self._came else self._in_vain + 1
        if self._in_vain >= RETRIES:
            raise TransferError(f"nothing of the state that {self.source!r} sent {RETRIES} times has come")
        self._passed, self._came = header.ticket, False
        self._asked_at, self._asked = now, 1
        return self.request()

    def retry(self, now: float) -> JobFrame | None:
        """A request to send again after ``RETRY_SECONDS`` without progress, or None.

        Raises:
            TransferError: the source did not answer ``RETRIES`` times in a row.
        """
        if now - self._asked_at < RETRY_SECONDS:
            return None
        if self._asked >= RETRIES:
            raise TransferError(f"{self.source!r} sent no state for {RETRY_SECONDS * RETRIES:.0f} s")
        self._asked_at, self._asked = now, self._asked + 1
        return self.request()

    def add(self, header: JobFrame, payload: Payload, now: float) -> bool:
        """Take one ``state`` frame of the source; True when the snapshot is whole.

        Raises:
            TransferError: sizes that cannot be this model's.
        """
        if (header.round, header.state_hash) != (self.round, self.state_hash):
            if header.round < max(self.round, self.wanted):
                return False
            self.round, self.state_hash = header.round, header.state_hash
            size = 4 * self.elements
            self._pieces = {"theta": Pieces(size), "momentum": Pieces(size), "optimizer": Pieces(MAX_PART_BYTES)}
        pieces = self._pieces.get(header.name)
        if pieces is None or (header.name != "optimizer" and header.total != 4 * self.elements):
            raise TransferError(f"{self.source!r} sent {header.total} bytes of {header.name!r}")
        if pieces.add(header.offset, header.total, payload):
            self._asked_at, self._asked, self._came = now, 1, True
        return all(piece.complete for piece in self._pieces.values())

    def result(self, gradients: bool = False) -> tuple[Vector, Vector, bytes]:
        """theta, momentum and the optimiser's part (empty: none). ``gradients``: the hash may be that of momentum only.

        Raises:
            TransferError: the arrays do not have the announced hash.
        """
        theta = np.frombuffer(self._pieces["theta"].data, np.float32)
        momentum = np.frombuffer(self._pieces["momentum"].data, np.float32)
        of_mean = gradients and state_hash(theta[:0], momentum) == self.state_hash
        if not of_mean and state_hash(theta, momentum) != self.state_hash:
            raise TransferError(
                f"the state of round {self.round} from {self.source!r} does not have the hash it announced"
            )
        return theta, momentum, bytes(self._pieces["optimizer"].data)


def snapshot_frames(
    job: str, incarnation: int, round: int, hash: str, arrays: dict[str, Payload], wanted: JobFrame | None = None
) -> Iterator[tuple[JobFrame, memoryview]]:
    """Every ``state`` frame of a snapshot, in order. ``arrays`` must not be written to afterwards. ``wanted``: a
    request; of a snapshot that its sender has in part, what is before its first gap is left out."""
    names = list(arrays)
    first, begin = 0, 0
    if wanted is not None and wanted.state_hash == hash and wanted.name in names:
        first, begin = names.index(wanted.name), wanted.offset
    for place, name in enumerate(names):
        for offset, total, payload in frames_of(arrays[name]):
            if (place, offset) < (first, begin):
                continue
            header = JobFrame(
                job=job, incarnation=incarnation, kind="state", round=round, name=name,
                offset=offset, total=total, state_hash=hash,
            )  # fmt: skip
            yield header, payload
