"""One end of an open session: what is the same for the side that dials and the side that listens."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from notebook_cluster.link.channel import PIECE_BYTES, Channel, Segment
from notebook_cluster.link.connection import QUEUE_MESSAGES
from notebook_cluster.link.frames import MAX_FRAMES, Ack, Beat, Data, Drops, FrameHeader, Resend
from notebook_cluster.protocol import ProtocolError, encode

_ACK_AFTER = 0.02
_ACK_COUNT = 64
_RESEND_PAUSE = 0.05
"""Seconds between two Resend that are answered; who misses something asks again after a longer time."""
_log = logging.getLogger(__name__)


Gate = Callable[[Callable[[], None]], None]
"""Calls what it is given, in order: at once, or when what was done before is written down."""


def at_once(call: Callable[[], None]) -> None:
    """The gate of who writes nothing down."""
    call()


class Conversation:
    """Sends and receives numbered messages while a session is open, keeps them while it is not.

    ``transmit(frames)`` puts frames on the wire and may lose them; False says that the connection takes none now: what
    follows then waits until the other side is heard. ``deliver(frames)`` processes one message; when it has returned
    and ``gate`` lets it, the message counts as processed. Nothing here waits.

    Attributes:
        handling: sequence number of the message that is in ``deliver`` now, else 0.
    """

    def __init__(
        self,
        channel: Channel,
        transmit: Callable[[Sequence[bytes | memoryview]], bool],
        deliver: Callable[[list[bytes]], None],
        drops: Drops,
        gate: Gate = at_once,
    ) -> None:
        self.channel = channel
        self.cluster, self.epoch, self.session = "", 0, 0
        self.is_open = False
        self.handling = 0
        self._frozen = False
        self._transmit = transmit
        self._deliver = deliver
        self._drops = drops
        self._gate = gate
        self._loop = asyncio.get_running_loop()
        self._waiting: int | None = None
        """The first kept message that is not on the wire of this session."""
        self._resent_time = 0.0
        self._owed = 0
        self._ack_timer: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None

    def open(self, cluster: str, epoch: int, session: int) -> None:
        """From now on messages of this session, and only those, are sent and taken."""
        self.cluster, self.epoch, self.session = cluster, epoch, session
        self.is_open = True
        self._waiting = None

    def pause(self) -> None:
        """The connection is gone: messages are kept until the next session is open."""
        self.is_open = False

    def send(self, frames: Sequence[bytes], *, droppable: bool) -> bool:
        """Number, keep and, when open, transmit a message. False: it was droppable and left out."""
        items = self.channel.send(frames, droppable=droppable)
        if self.is_open and self._waiting is None:
            self._put_all(items)
        return bool(items)

    def send_again(self, first: int) -> None:
        """Transmit what is kept from ``first`` on, as much as the connection takes at once, the rest bit by bit."""
        outbox = self.channel.outbox
        first = max(first, outbox.first)
        self._waiting = None
        self._put_all(outbox.between(first, first + QUEUE_MESSAGES - 1))
        if self._waiting is None and first + QUEUE_MESSAGES <= outbox.last:
            self._waiting = first + QUEUE_MESSAGES

    def beat(self, *, time: float = 0.0, echo: float = 0.0) -> None:
        self._owed = 0
        sent = self.channel.outbox.last if self._waiting is None else self._waiting - 1
        received = self.channel.inbox.received
        self._transmit([encode(Beat(self.cluster, self.epoch, self.session, sent, received, time, echo))])

    def acknowledge(self) -> None:
        """Send the acknowledgement that is owed, if any."""
        if self._owed and self.is_open:
            self._owed = 0
            self._transmit([encode(Ack(self.cluster, self.epoch, self.session, self.channel.inbox.received))])

    def handle(self, header: FrameHeader, frames: Sequence[bytes]) -> None:
        """A header of this session and the frames after it. ProtocolError for numbers that cannot be."""
        if isinstance(header, Data):
            self.acknowledged(header.ack)
            self._take(header, frames)
        elif isinstance(header, Ack):
            self.acknowledged(header.ack)
        elif isinstance(header, Beat):
            self.acknowledged(header.ack)
            self.channel.inbox.announce(header.sent)
        elif isinstance(header, Resend):
            self._resend(header)
        self._ask_for_gap()
        if self._waiting is not None and self.is_open:
            self.send_again(self._waiting)

    async def flushed(self, timeout: float) -> bool:
        """Wait until everything is acknowledged; False when that took longer than ``timeout`` seconds."""
        if len(self.channel.outbox) == 0:
            return True
        if self._emptied is None or self._emptied.done():
            self._emptied = self._loop.create_future()
        done, _ = await asyncio.wait([self._emptied], timeout=timeout)
        return bool(done)

    def close(self) -> None:
        """Send the last acknowledgement and end."""
        self.acknowledge()
        self.is_open = False
        if self._ack_timer is not None:
            self._ack_timer.cancel()

    def _put_all(self, items: Sequence[Segment]) -> None:
        for item in items:
            if not self._put(item):
                self._waiting = item.sequence if self._waiting is None else min(self._waiting, item.sequence)
                return

    def _put(self, item: Segment) -> bool:
        self._owed = 0
        header = Data(
            self.cluster,
            self.epoch,
            self.session,
            item.sequence,
            self.channel.inbox.received,
            item.sizes,
            item.pieces_left,
            item.piece,
        )
        return self._transmit([encode(header), *item.frames])

    def _resend(self, header: Resend) -> None:
        """Answer, but not so often and so much that asking is a way to keep this side busy."""
        now = self._loop.time()
        if now - self._resent_time < _RESEND_PAUSE:
            self._drops.note("resends", "cluster %s: asked too often to send again", self.cluster)
            return
        self._resent_time = now
        first = max(header.first, self.channel.outbox.first)
        self._put_all(self.channel.outbox.between(first, min(header.last, first + QUEUE_MESSAGES - 1)))

    def acknowledged(self, ack: int) -> None:
        """The other side has processed everything up to ``ack``. ProtocolError when that was never sent."""
        self.channel.acknowledge(ack)
        if self._emptied is not None and not self._emptied.done() and len(self.channel.outbox) == 0:
            self._emptied.set_result(None)

    def _take(self, header: Data, frames: Sequence[bytes]) -> None:
        inbox = self.channel.inbox
        item = Segment(header.sequence, tuple(frames), header.sizes, header.pieces_left, header.piece)
        if item.size > PIECE_BYTES or not 0 < len(frames) <= MAX_FRAMES:
            raise ProtocolError(f"message {item.sequence} has {item.size} bytes in {len(frames)} frames")
        duplicates = inbox.duplicates
        for sequence, message in inbox.accept(item):
            self._gate(partial(self._process, sequence, message))
        # A duplicate means that our acknowledgement was lost: say it again.
        self._owe(inbox.duplicates - duplicates)

    def freeze(self) -> None:
        """No message is handled, or acknowledged, from now on: they come to the next coordinator. What was handled
        before is acknowledged as ever, and sending goes on."""
        self._frozen = True

    def _process(self, sequence: int, message: list[bytes]) -> None:
        if self._frozen:
            return
        self.handling = sequence
        try:
            self._deliver(message)
        except ProtocolError as error:
            self._drops.note("undecodable", "dropped message %d of %s: %s", sequence, self.cluster, error)
        except Exception:
            _log.exception("message %d of %s could not be handled", sequence, self.cluster)
        self.handling = 0
        self._gate(partial(self._processed, sequence))  # only now the gate knows what this message has changed

    def _processed(self, sequence: int) -> None:
        if sequence <= self.channel.inbox.held:  # else the other side numbers anew since
            self.channel.inbox.processed(sequence)
        self._owe(1)

    def _owe(self, count: int) -> None:
        self._owed += count
        if self._owed >= _ACK_COUNT:
            self.acknowledge()
        elif self._owed and self._ack_timer is None:
            self._ack_timer = self._loop.call_later(_ACK_AFTER, self._acknowledge_now)

    def _acknowledge_now(self) -> None:
        self._ack_timer = None
        self.acknowledge()

    def _ask_for_gap(self) -> None:
        gap = self.channel.inbox.gap(self._loop.time())
        if gap is not None and self.is_open:
            self._drops["gaps"] += 1
            self._transmit([encode(Resend(self.cluster, self.epoch, self.session, *gap))])


class LinkEnd:
    """One end of a link as its owner sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def waiting_bytes(self) -> int:
        """Sent, or about to be, and not acknowledged."""
        return self._channel.outbox.size

    @property
    def left_out(self) -> int:
        """Droppable messages left out so far because the outbox was full."""
        return self._channel.dropped

    @property
    def on_shortened(self) -> Callable[[int], None] | None:
        """Called with the number of droppable messages left out; see :class:`.channel.Channel`."""
        return self._channel.on_shortened

    @on_shortened.setter
    def on_shortened(self, callback: Callable[[int], None] | None) -> None:
        self._channel.on_shortened = callback


_OPEN = 16


class RoundTrip:
    """Seconds there and back. A time counts once and only when it was sent: an echo is a claim of the other side.

    Attributes:
        mean: SRTT of RFC 6298 (alpha 1/8), None before the first measurement.
        deviation: RTTVAR (beta 1/4), None before the first measurement.
    """

    def __init__(self) -> None:
        self.mean: float | None = None
        self.deviation: float | None = None
        self._sent: deque[float] = deque(maxlen=_OPEN)

    def sent(self, time: float) -> None:
        """``time``, our clock, goes out now."""
        self._sent.append(time)

    def returned(self, echo: float, now: float) -> None:
        """The other side says ``echo``; ignored unless it is a time that is still out."""
        if echo in self._sent:
            self._sent.remove(echo)
            self.measured(now - echo)

    def measured(self, sample: float) -> None:
        """One time there and back."""
        if self.mean is None or self.deviation is None:
            self.mean, self.deviation = sample, sample / 2
        else:
            self.deviation += (abs(self.mean - sample) - self.deviation) / 4
            self.mean += (sample - self.mean) / 8
