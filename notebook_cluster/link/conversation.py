"""One end of an open session: what is the same for the side that dials and the side that listens."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from notebook_cluster.link.channel import PIECE_BYTES, Channel, Item
from notebook_cluster.link.frames import Ack, Beat, Data, Header, Resend
from notebook_cluster.protocol import ProtocolError, encode

_ACK_AFTER = 0.02
_ACK_COUNT = 64
_log = logging.getLogger(__name__)


class Conversation:
    """Sends and receives numbered messages while a session is open, keeps them while it is not.

    ``transmit(frames)`` puts frames on the wire if there is a connection; it may lose them. ``deliver(frames)``
    processes one message; when it returns, the message counts as processed. Nothing here waits.

    Attributes:
        handling: sequence number of the message that is in ``deliver`` now, else 0.
    """

    def __init__(
        self,
        channel: Channel,
        transmit: Callable[[Sequence[bytes | memoryview]], object],
        deliver: Callable[[list[bytes]], None],
        counts: "Counter[str]",
    ) -> None:
        self.channel = channel
        self.cluster, self.epoch, self.session = "", 0, 0
        self.is_open = False
        self.handling = 0
        self._transmit = transmit
        self._deliver = deliver
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._owed = 0
        self._ack_timer: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None

    def open(self, cluster: str, epoch: int, session: int) -> None:
        """From now on messages of this session, and only those, are sent and taken."""
        self.cluster, self.epoch, self.session = cluster, epoch, session
        self.is_open = True

    def pause(self) -> None:
        """The connection is gone: messages are kept until the next session is open."""
        self.is_open = False

    def send(self, frames: Sequence[bytes], *, droppable: bool) -> bool:
        """Number, keep and, when open, transmit a message. False: it was droppable and left out."""
        items = self.channel.send(frames, droppable=droppable)
        if self.is_open:
            for item in items:
                self._put(item)
        return bool(items)

    def send_again(self, first: int, last: int | None = None) -> None:
        """Transmit what is kept from ``first`` on."""
        for item in self.channel.outbox.between(first, self.channel.outbox.last if last is None else last):
            self._put(item)

    def beat(self, *, time: float = 0.0, echo: float = 0.0) -> None:
        self._owed = 0
        channel = self.channel
        self._transmit(
            [
                encode(
                    Beat(
                        self.cluster, self.epoch, self.session, channel.outbox.last, channel.inbox.received, time, echo
                    )
                )
            ]
        )

    def acknowledge(self) -> None:
        """Send the acknowledgement that is owed, if any."""
        if self._owed and self.is_open:
            self._owed = 0
            self._transmit([encode(Ack(self.cluster, self.epoch, self.session, self.channel.inbox.received))])

    def handle(self, header: Header, frames: Sequence[bytes]) -> None:
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
            self.send_again(header.first, header.last)
        self._ask_for_gap()

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

    def _put(self, item: Item) -> None:
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
        self._transmit([encode(header), *item.frames])

    def acknowledged(self, ack: int) -> None:
        """The other side has processed everything up to ``ack``. ProtocolError when that was never sent."""
        self.channel.acknowledge(ack)
        if self._emptied is not None and not self._emptied.done() and len(self.channel.outbox) == 0:
            self._emptied.set_result(None)

    def _take(self, header: Data, frames: Sequence[bytes]) -> None:
        inbox = self.channel.inbox
        item = Item(header.sequence, tuple(frames), header.sizes, header.pieces_left, header.piece)
        if item.size > PIECE_BYTES or not frames:
            raise ProtocolError(f"message {item.sequence} has {item.size} bytes in {len(frames)} frames")
        duplicates = inbox.duplicates
        for sequence, message in inbox.accept(item):
            self.handling = sequence
            try:
                self._deliver(message)
            except ProtocolError as error:
                self._counts["undecodable"] += 1
                _log.warning("dropped message %d of %s: %s", sequence, self.cluster, error)
            except Exception:
                _log.exception("message %d of %s could not be handled", sequence, self.cluster)
            self.handling = 0
            inbox.processed(sequence)
            self._owed += 1
        # A duplicate means that our acknowledgement was lost: say it again.
        self._owed += inbox.duplicates - duplicates
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
            self._counts["gaps"] += 1
            self._transmit([encode(Resend(self.cluster, self.epoch, self.session, *gap))])
