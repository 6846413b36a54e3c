"""One value on its way between two nodes, in chunks: what sends them, what collects them again."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from notebook_cluster.collectives.values import expected_bytes
from notebook_cluster.memory import Ranges, first_gap, with_range
from notebook_cluster.protocol.mesh import CellFrame

Payload = bytes | bytearray | memoryview

Channel = Literal["collective", "message"]
"""Collectives and ``send``/``recv`` are numbered apart."""

WANT = "want"
ACKNOWLEDGE = "ack"
MESSAGE = "send"

_MAX_TEXT = 64
"""Longest name, kind or dtype, and most dimensions, in a usable header."""

_SMALL_PIECES = 16
_PIECE_BYTES = 4096
"""A message has at most 16 gaps and one for each 4 KiB: each costs memory, however small it is."""


_LONG = 1024 * 1024
"""Bytes of which the copy takes longer than giving the GIL away."""


class Transport(Protocol):
    """What collectives need from the mesh; methods may be called from any thread unless they say otherwise."""

    name: str

    def send(self, node: str, header: CellFrame, payload: Payload = b"") -> None: ...

    def chunk_bytes(self, node: str) -> int: ...

    def start_over(self, node: str) -> None:
        """Drop every frame that is on its way to ``node``. On the I/O thread."""

    def waiting(self, node: str) -> int:
        """Frames for ``node`` that have not left this process."""

    def ipc_path(self, node: str) -> str:
        """Where the ipc socket of ``node`` (also of this node) is; empty unless it is on this node's peer."""

    def call_soon(self, callback: Callable[[], None], *, wake: bool = True) -> None: ...


@dataclass(frozen=True)
class CellWorld:
    """Who takes part in a cell; fixed when it starts.

    Attributes:
        nodes: name -> rank, in rank order.
        peers: name -> the peer that it runs on; those of one peer may share memory.
        excluded: why this node cannot use collectives in this cell; empty when it can.
        replay: the cell ran before and is repeated on this node alone.
    """

    cell: int
    generation: int
    nodes: dict[str, int]
    excluded: str = ""
    replay: bool = False
    peers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectiveSettings:
    """Sizes in bytes, times in seconds."""

    limit: int = 8 << 30
    """Largest value, and the most that may be held of values that nobody asked for yet."""
    held_bytes: int = 64 << 20
    """Frames of a cell that this node has not begun."""
    unread_bytes: int = 1 << 30
    """Messages held for recv(); above this they are not acknowledged, so the sender's send() waits."""
    unacknowledged_bytes: int = 256 << 20
    """Messages on their way to one node before send() waits."""
    small_bytes: int = 16 * 1024
    """Arrays up to this size are reduced in one step: everybody gets everything and sums it."""
    want_after: float = 0.5
    shared_memory: bool = True
    """Nodes of one peer exchange arrays through memory that they share."""
    shared_block: int = 16 << 20
    """So much of a larger array is in shared memory at a time, from each node."""
    shared_direct: int = 1 << 20
    """With two nodes, arrays up to this size are added up in shared memory by everybody; with more, smaller ones."""
    shared_patience: float = 0.02
    """A node looks so long for the others in shared memory before it asks them and sleeps."""
    slice_block: int = 8 << 20
    """Over sockets, large arrays are reduced in blocks of so much of each slice: over ipc one frame."""
    ahead_bytes: int = 32 << 20
    """So much of the next blocks, of all nodes together, may be on its way to a node that adds up one; at least one of
    each."""
    lent_bytes: int = 8 << 20
    """Arrays of this size are sent from where they are, and nobody goes on before everybody has what it needs of them.
    Of smaller ones a copy is sent."""
    ring_block: int = 1 << 20
    """Bytes that go round a ring in one piece."""
    scratch_bytes: int = 2 << 30
    """Memory of this size is used again by the cell's next operation, a larger one is given back; also one above
    ``scratch_share``."""
    scratch_share: float = 1 / 16
    """A share of the machine's memory."""
    give_up_after: float = 1.0
    """Wait this long without a byte from a node that has finished the cell."""


def reserve(size: int) -> memoryview:
    """``size`` bytes of zeros that take memory only where they are written: announcing much and sending little costs
    the receiver nothing. MemoryError when the system does not even promise that much."""
    import numpy

    return numpy.zeros(size, numpy.uint8).data


def channel_of(header: CellFrame) -> Channel:
    """Whose numbers this frame has."""
    return "message" if header.name == MESSAGE else "collective"


@dataclass(frozen=True)
class Landing:
    """Where the bytes of a message go. ``may_stay``: one that comes in one frame stays where it came."""

    data: memoryview
    may_stay: bool = False


def place_for(header: CellFrame, payload: memoryview) -> Landing:
    """Where a message goes of which this is the first frame, and nobody said where: a long one that is whole stays
    where it came, others get memory of their own."""
    if len(payload) == header.total >= _LONG and not payload.readonly:
        return Landing(payload, may_stay=True)
    return Landing(reserve(header.total))


@dataclass
class ChunkedMessage:
    """A value that arrives. ``header`` is its first frame's. Nodes cut what they send again into other pieces when they
    find another way, so a piece may have come in part."""

    sender: str
    header: CellFrame
    data: memoryview
    may_stay: bool = False
    received: Ranges = ()

    @property
    def complete(self) -> bool:
        return bool(self.received) and self.first_missing() == len(self.data)

    def add(self, header: CellFrame, payload: memoryview) -> bool:
        """Take one chunk; False when it is a duplicate or does not fit."""
        first = self.header
        same = (header.name, header.kind, header.dtype, header.shape) == (
            first.name, first.kind, first.dtype, first.shape
        )  # fmt: skip
        fits = header.offset >= 0 and header.offset + len(payload) <= len(self.data) == header.total
        if not same or not fits or (header.total and not len(payload)):
            return False
        received, new = with_range(self.received, header.offset, header.offset + len(payload))
        if received == self.received or len(received) > _SMALL_PIECES + len(self.data) // _PIECE_BYTES:
            return False
        if self.may_stay and len(payload) == header.total:
            self.data = payload
        else:
            for start, stop in new:
                _write(self.data, start, payload[start - header.offset : stop - header.offset])
        self.received = received
        return True

    def first_missing(self) -> int:
        """Offset of the first byte that is not here."""
        return first_gap(self.received)


def _write(data: memoryview, offset: int, payload: memoryview) -> None:
    """``payload`` into ``data``, without the GIL where that takes long."""
    if len(payload) < _LONG:
        data[offset : offset + len(payload)] = payload
        return
    import numpy

    numpy.copyto(numpy.frombuffer(data, "u1", len(payload), offset), numpy.frombuffer(payload, "u1"))


def is_usable(header: CellFrame) -> bool:
    """Whether a header from the network may be kept."""
    texts = max(len(header.kind), len(header.dtype), len(header.name))
    numbers = (header.cell, header.generation, header.operation, header.phase, header.offset)
    return max(texts, len(header.shape)) <= _MAX_TEXT and min(numbers) >= 0


def may_be_kept(header: CellFrame, limit: int) -> bool:
    """Whether the value that a header announces has at most ``limit`` bytes, and not more than its shape."""
    if not 0 <= header.total <= limit:
        return False
    try:
        return header.kind == "json" or header.total <= expected_bytes(header.kind, header.dtype, header.shape)
    except ValueError:
        return False


def as_bytes(array: Any) -> memoryview:
    """The bytes of a flat, contiguous numpy array, without a copy."""
    return memoryview(array.view("u1"))
