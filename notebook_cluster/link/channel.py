"""Exactly once and in order over connections that break: numbering, acknowledging, sending again. No I/O, no clock.

A :class:`Channel` is one end: a :class:`SendWindow` that keeps what is not acknowledged, and a :class:`ReceiveWindow`
that puts in order what arrives. Large messages are cut into numbered pieces: libzmq gives up a connection on which no
whole frame arrived for its heartbeat time-out, so a 20 MB frame on slow Wi-Fi would never arrive.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Literal

from notebook_cluster.link.frames import MAX_FRAMES
from notebook_cluster.protocol import ProtocolError

PIECE_BYTES = 256 * 1024
_JOIN_BELOW = 16 * 1024
"""Bytes below which a message of several buffers travels in one frame: each frame is encrypted and handed over by
itself, which costs more than joining and cutting."""
_FEW_FRAMES = 2
_MAX_AHEAD = 1024
_MAX_AHEAD_BYTES = 16 << 20
_FRAME_COST = 64
"""Bytes that a frame costs however short it is."""
_ASK_AGAIN = 0.25
"""Seconds before the same gap is asked for again."""
Condition = Literal["connecting", "connected", "suspect", "lost", "refused"]
"""How a link is."""


@dataclass(frozen=True)
class LinkSettings:
    """What people may want to change of a link. Times in seconds, sizes in bytes."""

    heartbeat: float = 1.0
    suspect: float = 2.5
    """Silence after which the other side is *suspect*."""
    lost: float = 10.0
    """Silence after which it is *lost*; the link keeps trying and loses nothing."""
    outbox_bytes: int = 64 << 20
    """Unacknowledged bytes beyond which stream output is left out."""
    message_bytes: int = 256 << 20
    """Largest message (struct and buffers together), in both directions."""
    retry: float = 5.0
    """Pause before a refused connection is tried again."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat <= self.suspect < self.lost:
            raise ValueError(
                f"heartbeat {self.heartbeat}, suspect {self.suspect}, lost {self.lost}: these times must be above 0 "
                "and in this order"
            )

    @property
    def stuck(self) -> float:
        """Seconds without even a failed attempt to connect after which a fresh socket is taken."""
        return max(self.lost, 3 * self.retry)

    def judge(self, silence: float) -> Condition:
        """The condition of an open session after ``silence`` seconds without a word from the other side."""
        if silence > self.lost:
            return "lost"
        return "suspect" if silence > self.suspect else "connected"


@dataclass(frozen=True, slots=True)
class Segment:
    """One numbered thing on the wire: a message, or with ``piece`` a part of one (``sizes`` in the first part)."""

    sequence: int
    frames: tuple[bytes | memoryview, ...]
    sizes: tuple[int, ...] = ()
    pieces_left: int = 0
    piece: bool = False

    @property
    def size(self) -> int:
        return sum(len(frame) for frame in self.frames)

    @property
    def cost(self) -> int:
        """Bytes of memory, about."""
        return self.size + _FRAME_COST * (1 + len(self.frames) + len(self.sizes))


class SendWindow:
    """What was sent and is not acknowledged. ``last`` is the newest sequence number, ``first`` the oldest kept."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.size = 0
        self._items: deque[Segment] = deque()

    @property
    def first(self) -> int:
        return self._items[0].sequence if self._items else self.last + 1

    def __len__(self) -> int:
        return len(self._items)

    def add(self, frames: Sequence[bytes], total: int) -> list[Segment]:
        """Number ``frames`` (of ``total`` bytes) and keep them; returns the items to put on the wire."""
        if total < _JOIN_BELOW and len(frames) > _FEW_FRAMES:
            sizes = tuple(len(frame) for frame in frames)
            added = [Segment(self.last + 1, (b"".join(frames),), sizes, piece=True)]
        elif total <= PIECE_BYTES:
            added = [Segment(self.last + 1, tuple(frames))]
        else:
            whole = memoryview(b"".join(frames))
            count = -(-total // PIECE_BYTES)
            added = [
                Segment(
                    self.last + 1 + index,
                    (whole[index * PIECE_BYTES : (index + 1) * PIECE_BYTES],),
                    sizes=tuple(len(frame) for frame in frames) if index == 0 else (),
                    pieces_left=count - 1 - index,
                    piece=True,
                )
                for index in range(count)
            ]
        self._items.extend(added)
        self.last += len(added)
        self.size += total
        return added

    def release(self, ack: int) -> None:
        """Forget everything up to ``ack``. ProtocolError when that was never sent."""
        if ack > self.last:
            raise ProtocolError(f"message {ack} is acknowledged but only {self.last} were sent")
        while self._items and self._items[0].sequence <= ack:
            self.size -= self._items.popleft().size

    def between(self, first: int, last: int) -> list[Segment]:
        """The kept items numbered ``first`` to ``last``; any two numbers will do."""
        start = min(max(first - self.first, 0), len(self._items))
        stop = min(last, self.last) - self.first + 1
        return list(islice(self._items, start, max(start, stop)))


class ReceiveWindow:
    """Puts items in order and pieces together.

    Attributes:
        received: last sequence number whose message is processed; this is what is acknowledged.
        held: last one that arrived without a gap.
        holding: ``received`` stays as it is, see :meth:`hold`.
    """

    def __init__(self, received: int, message_bytes: int) -> None:
        self._message_bytes = message_bytes
        self.duplicates = 0
        self.malformed = 0
        self.holding = False
        self.reset(received)

    def reset(self, received: int) -> None:
        """The other side's numbering goes on after ``received``; what was incomplete is forgotten."""
        self.received = self.held = self._processed = received
        self._announced = received
        self._ahead: dict[int, Segment] = {}
        self._ahead_bytes = 0
        self._sizes: tuple[int, ...] = ()
        self._parts = bytearray()
        self._asked: tuple[int, float] | None = None

    def accept(self, item: Segment) -> list[tuple[int, list[bytes]]]:
        """Take ``item``; returns (sequence number, frames) of the messages that are complete now, in order.

        Call :meth:`processed` with each number once its message is processed.
        """
        if item.sequence <= self.held or item.sequence in self._ahead:
            self.duplicates += 1
            return []
        self._announced = max(self._announced, item.sequence)
        if item.sequence != self.held + 1:
            self._hold(item)
            return []
        complete: list[tuple[int, list[bytes]]] = []
        following: Segment | None = item
        while following is not None:
            self.held = following.sequence
            frames = self._assemble(following)
            if frames is not None:
                complete.append((following.sequence, frames))
            following = self._ahead.pop(self.held + 1, None)
            if following is not None:
                self._ahead_bytes -= following.cost
        return complete

    def processed(self, sequence: int) -> None:
        """The message with this number has been processed and may be acknowledged."""
        self._processed = max(self._processed, sequence)
        self.hold(self.holding)

    def hold(self, holding: bool) -> None:
        """Whether messages that are processed are acknowledged later, not now."""
        self.holding = holding
        if not holding:
            self.received = self._processed

    def announce(self, sent: int) -> None:
        """The other side says that it sent everything up to ``sent``."""
        self._announced = max(self._announced, sent)

    def gap(self, now: float) -> tuple[int, int] | None:
        """(first, last) to ask for again, or None; the same gap at most every quarter of a second."""
        if self._announced <= self.held:
            return None
        first = self.held + 1
        if self._asked is not None and self._asked[0] == first and now - self._asked[1] < _ASK_AGAIN:
            return None
        self._asked = (first, now)
        return first, min(self._ahead, default=self._announced + 1) - 1

    def _hold(self, item: Segment) -> None:
        """Keep an item that came too early, within limits: beyond them it is asked for again later."""
        if len(self._ahead) < _MAX_AHEAD and self._ahead_bytes + item.cost <= _MAX_AHEAD_BYTES:
            self._ahead[item.sequence] = item
            self._ahead_bytes += item.cost

    def _assemble(self, item: Segment) -> list[bytes] | None:
        """The frames of the message that ``item`` completes, or None. A piece that fits nothing is counted."""
        if not item.piece:
            self._sizes = ()
            return [bytes(frame) for frame in item.frames]
        if item.sizes:
            self._parts = bytearray()
            fits = len(item.sizes) <= MAX_FRAMES and min(item.sizes) >= 0 and sum(item.sizes) <= self._message_bytes
            self._sizes = item.sizes if fits else ()
        total = sum(self._sizes)
        if len(item.frames) != 1 or not self._sizes or len(self._parts) + len(item.frames[0]) > total:
            self.malformed += 1
            self._sizes = ()
            return None
        self._parts += item.frames[0]
        if item.pieces_left:
            return None
        whole, sizes = bytes(self._parts), self._sizes
        self._sizes, self._parts = (), bytearray()
        if len(whole) != total:
            self.malformed += 1
            return None
        return [whole[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


class Channel:
    """Both directions of one end.

    Attributes:
        dropped: droppable messages left out so far because the outbox was full.
        on_shortened: called with the number left out since the last call, in front of the next message that is
            taken, or as soon as half of the outbox is free: the place for a visible marker.
    """

    def __init__(self, *, outbox_bytes: int, message_bytes: int, received: int = 0, sent: int = 0) -> None:
        self.outbox = SendWindow(sent)
        self.inbox = ReceiveWindow(received, message_bytes)
        self.dropped = 0
        self.on_shortened: Callable[[int], None] | None = None
        self._outbox_bytes = outbox_bytes
        self._message_bytes = message_bytes
        self._left_out = 0

    def send(self, frames: Sequence[bytes], *, droppable: bool = False) -> list[Segment]:
        """Number and keep one message; returns what to put on the wire, nothing when it was left out.

        A message that is not droppable is always taken, also over the limit.

        Raises:
            ValueError: it is over the largest size that the other side takes.
        """
        total = sum(len(frame) for frame in frames)
        if total > self._message_bytes or len(frames) > MAX_FRAMES:
            raise ValueError(
                f"a message of {total / 1e6:.1f} MB in {len(frames)} parts is over the link's limit of "
                f"{self._message_bytes / 1e6:.0f} MB in {MAX_FRAMES}: write it to a file and send less at a time"
            )
        if droppable and (self._left_out or self.outbox.size + total > self._outbox_bytes):
            self._left_out += 1
            self.dropped += 1
            return []
        self._tell_shortened()
        return self.outbox.add(frames, total)

    def acknowledge(self, ack: int) -> None:
        """The other side has processed everything up to ``ack``. ProtocolError when that was never sent."""
        self.outbox.release(ack)
        if self._left_out and self.outbox.size <= self._outbox_bytes // 2:
            self._tell_shortened()

    def _tell_shortened(self) -> None:
        if self._left_out:
            count, self._left_out = self._left_out, 0
            if self.on_shortened is not None:
                self.on_shortened(count)
