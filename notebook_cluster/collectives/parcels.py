"""One value on its way between two nodes: cut into chunks, collected again, kept until the other side has it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from notebook_cluster.collectives.values import expected_bytes
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
"""A parcel comes in at most 16 pieces and one for each 4 KiB: each costs memory, however small it is."""


_LONG = 1024 * 1024
"""Bytes of which the copy takes longer than giving the GIL away."""

_MOST_QUESTIONS = 1000


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
    """Of a larger array so much is in shared memory at a time, from each node."""
    shared_direct: int = 1 << 20
    """With two nodes, arrays up to this size are added up in shared memory by everybody; with more, smaller ones."""
    shared_patience: float = 0.02
    """A node looks so long for the others in shared memory before it asks them and sleeps."""
    slice_block: int = 4 << 20
    """Over sockets, large arrays are reduced in blocks of so much of each slice: over ipc one frame."""
    lent_bytes: int = 8 << 20
    """Arrays of this size are sent from where they are, and nobody goes on before everybody has what it needs of them.
    Of smaller ones a copy is sent."""
    ring_block: int = 1 << 20
    """Bytes that go round a ring in one piece."""
    scratch_bytes: int = 256 << 20
    """Memory of this size is used again by the next operation, a larger one is given back."""
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
class Place:
    """Where the bytes of a parcel go. ``may_stay``: one that comes in one frame stays where it came."""

    data: memoryview
    may_stay: bool = False


@dataclass
class Parcel:
    """A value that arrives. ``header`` is its first frame's; ``data`` is complete when ``received`` is its length."""

    sender: str
    header: CellFrame
    data: memoryview
    may_stay: bool = False
    pieces: dict[int, int] = field(default_factory=dict)
    received: int = 0

    @property
    def complete(self) -> bool:
        return bool(self.pieces) and self.received == len(self.data)

    def add(self, header: CellFrame, payload: memoryview) -> bool:
        """Take one chunk; False when it is a duplicate or does not fit."""
        first = self.header
        same = (header.name, header.kind, header.dtype, header.shape) == (
            first.name, first.kind, first.dtype, first.shape
        )  # fmt: skip
        fits = header.offset >= 0 and header.offset + len(payload) <= len(self.data) == header.total
        if not same or not fits or header.offset in self.pieces or (header.total and not len(payload)):
            return False
        if len(self.pieces) > _SMALL_PIECES + len(self.data) // _PIECE_BYTES:
            return False
        if self.may_stay and len(payload) == header.total:
            self.data = payload
        else:
            _write(self.data, header.offset, payload)
        self.pieces[header.offset] = len(payload)
        self.received += len(payload)
        return True

    def first_missing(self) -> int:
        """Offset of the first byte that is not here."""
        offset = 0
        while offset in self.pieces and offset < len(self.data):
            offset += self.pieces[offset]
        return offset


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


@dataclass
class _Sent:
    header: CellFrame
    data: Payload


class Outbox:
    """What this node has sent in this cell and may have to send again. Used on the I/O thread only.

    A collective's parcel is forgotten when its receiver shows a later operation (nobody can be in operation n + 1
    without all of n), a message's when the receiver acknowledges it.

    Attributes:
        holding: parcels of collectives are kept that :meth:`forget_before` could let go.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.holding = False
        self._sent: dict[tuple[str, Channel], dict[tuple[int, int], _Sent]] = {}
        self._reached: dict[int, CellFrame] = {}
        self._asked: set[tuple[str, int, int]] = set()

    def clear(self) -> None:
        self._sent.clear()
        self._reached.clear()
        self._asked.clear()

    def reach(self, header: CellFrame) -> None:
        """This node has come to the phase of ``header``; who asks for it gets the header, everybody else sees it in
        shared memory. Called on the main thread, which alone writes here."""
        self._reached[header.operation] = header
        self._reached.pop(header.operation - 2, None)
        if self._asked:
            self._transport.call_soon(self._answer_all)

    def _answer_all(self) -> None:
        for question in list(self._asked):
            self._answer(*question)

    def _answer(self, node: str, operation: int, phase: int) -> None:
        """To a question that was noted; it stays so while this node has not come that far."""
        reached = self._reached.get(operation)
        if (operation, phase) in self._sent.get((node, "collective"), {}):
            self._asked.discard((node, operation, phase))  # it was sent since then
        elif reached is not None and reached.phase >= phase:
            self._asked.discard((node, operation, phase))
            self._transport.send(node, msgspec.structs.replace(reached, phase=phase))
        elif operation < max(self._reached, default=0) - 1:
            self._asked.discard((node, operation, phase))

    def post(self, node: str, header: CellFrame, data: Payload) -> None:
        """Send ``data`` to ``node`` in chunks; ``data`` must not change any more."""
        header = msgspec.structs.replace(header, total=len(data))
        key = (header.operation, header.phase)
        self._sent.setdefault((node, channel_of(header)), {})[key] = _Sent(header, data)
        self.holding = True
        self._transmit(node, header, data, 0)

    def send_again(self, node: str, want: CellFrame) -> None:
        """Answer a WANT, unless what it asks for waits in line anyway or is not there yet."""
        channel: Channel = "message" if want.kind == "message" else "collective"
        sent = self._sent.get((node, channel), {}).get((want.operation, want.phase))
        if sent is not None and not self._transport.waiting(node):
            self._transmit(node, sent.header, sent.data, want.offset)
        elif sent is None and channel == "collective":
            if len(self._asked) >= _MOST_QUESTIONS:
                self._asked.clear()  # whoever still waits asks again
            # Noted first and looked at then: the main thread does it the other way round, so one of the two sees it.
            self._asked.add((node, want.operation, want.phase))
            self._answer(node, want.operation, want.phase)

    def forget(self, node: str, channel: Channel, before: int) -> None:
        """``node`` has every parcel of operations below ``before``."""
        sent = self._sent.get((node, channel), {})
        for key in [key for key in sent if key[0] < before]:
            del sent[key]

    def forget_parts(self, operation: int, before: int | None = None) -> None:
        """Nobody gets any more of the collective ``operation`` from here, or of its phases below ``before``."""
        for (_, channel), sent in self._sent.items():
            for key in [key for key in sent if channel == "collective" and key[0] == operation]:
                if before is None or key[1] < before:
                    del sent[key]

    def forget_before(self, nodes: Sequence[str], operation: int) -> None:
        """All of ``nodes`` are in ``operation``, as shared memory says."""
        self.holding = False
        for node in nodes:
            self.forget(node, "collective", operation)

    def unacknowledged(self, node: str) -> int:
        """Bytes of messages to ``node`` that it has not acknowledged."""
        return sum(len(sent.data) for sent in self._sent.get((node, "message"), {}).values())

    def _transmit(self, node: str, header: CellFrame, data: Payload, start: int) -> None:
        chunk = self._transport.chunk_bytes(node)
        if not len(data):
            self._transport.send(node, header)
            return
        view = memoryview(data)
        start = max(0, start) // chunk * chunk
        for offset in range(start, len(data), chunk):
            piece = msgspec.structs.replace(header, offset=offset)
            self._transport.send(node, piece, view[offset : offset + chunk])


def as_bytes(array: Any) -> memoryview:
    """The bytes of a flat, contiguous numpy array, without a copy."""
    return memoryview(array.view("u1"))
