"""What an agent has of one cluster: the other end of that cluster's link, across connections and coordinators."""

import asyncio
from collections.abc import Callable, Sequence

from notebook_cluster.link.channel import Channel, Condition, LinkSettings
from notebook_cluster.link.conversation import Conversation, LinkEnd
from notebook_cluster.link.frames import SESSION_SHIFT, Drops, Hello, Welcome
from notebook_cluster.protocol import Message, decode, encode
from notebook_cluster.protocol.peer import FromCoordinator


def _ignore_message(message: Message, buffers: list[bytes]) -> None:
    """Until the owner has assigned ``on_message``."""


class Session(LinkEnd):
    """One per cluster id. It survives reconnects, and a restart of the coordinator (same key, higher epoch): outgoing
    numbers go on, so that nothing the agent said is lost; incoming numbers start again.

    The owner assigns these in ``Listener.on_session``:

    Attributes:
        on_message: called with (message, buffers); when it returns, the message counts as processed.
        on_condition: called with (condition, reason): connected, suspect, lost, or refused when its key was revoked.
        on_restart: called after another coordinator process took over; send it what it cannot know.
        has_taken_over: coordinators of the same key and cluster name that began before this one are refused.
        last_heard: time (``loop.time()``, monotonic, seconds) of the last frame.
    """

    def __init__(
        self,
        hello: Hello,
        key: str,
        now: float,
        *,
        settings: LinkSettings,
        drops: Drops,
        transmit: Callable[[bytes, Sequence[bytes | memoryview]], bool],
        on_close: Callable[["Session"], None],
    ) -> None:
        """``transmit(routing_id, frames)`` queues one message for a connection; False: it takes none now."""
        self._transmit_to, self._on_close = transmit, on_close
        self.cluster, self.cluster_name, self.epoch, self.key = hello.cluster, hello.cluster_name, hello.epoch, key
        self.condition: Condition = "connecting"
        self.last_heard = now
        self.on_message: Callable[[Message, list[bytes]], None] = _ignore_message
        self.on_condition: Callable[[Condition, str], None] = lambda condition, reason: None
        self.on_restart: Callable[[], None] = lambda: None
        self.has_taken_over = False
        self.number = hello.session
        self.routing_id = b""
        # Numbers go on after what the coordinator already has from an agent process that ended.
        super().__init__(
            Channel(
                outbox_bytes=settings.outbox_bytes,
                message_bytes=settings.message_bytes,
                received=hello.first - 1,
                sent=max(hello.received, hello.held),
            )
        )
        self.conversation = Conversation(self._channel, self._transmit, self._deliver, drops)

    def send(self, message: Message, buffers: Sequence[bytes] = (), *, droppable: bool = False) -> bool:
        """Send ``message`` with ``buffers``, now or when the coordinator is back. False: left out, see
        :meth:`.dialer.Dialer.send`, also for the ValueError."""
        return self.conversation.send([encode(message), *buffers], droppable=droppable)

    async def flushed(self, timeout: float) -> bool:
        """Wait until the coordinator has processed everything; False when that took over ``timeout`` seconds."""
        return await self.conversation.flushed(timeout)

    def close(self) -> None:
        """Forget this cluster. A coordinator that dials again gets a new session."""
        self._on_close(self)
        # After the message in whose handling this may be called, so that it is acknowledged as well.
        asyncio.get_running_loop().call_soon(self.conversation.close)

    # ---- called by the listener ------------------------------------------------------------------------------

    @property
    def last_sent(self) -> int:
        return self._channel.outbox.last

    def stands_for(self, hello: Hello) -> bool:
        """It is of the cluster of ``hello``, or of one that has taken that over."""
        return self.cluster == hello.cluster or (self.has_taken_over and self.cluster_name == hello.cluster_name)

    def is_older(self, hello: Hello) -> bool:
        """True for a Hello of an earlier connection of the same coordinator that was overtaken."""
        return self.is_same_dialer(hello) and hello.session < self.number

    def is_same_dialer(self, hello: Hello) -> bool:
        return (hello.epoch, hello.session >> SESSION_SHIFT) == (self.epoch, self.number >> SESSION_SHIFT)

    def resume(self, hello: Hello, routing_id: bytes, *, fresh: bool) -> None:
        """Go on with the connection on which ``hello`` arrived. ProtocolError when its numbers cannot be."""
        conversation, inbox, outbox = self.conversation, self._channel.inbox, self._channel.outbox
        taken_over = not fresh and not self.is_same_dialer(hello)
        repeated = not fresh and hello.session == self.number and routing_id == self.routing_id
        conversation.acknowledged(hello.received)
        self.number, self.epoch, self.routing_id = hello.session, hello.epoch, routing_id
        self.cluster_name = hello.cluster_name
        if taken_over or hello.first > inbox.held + 1:
            inbox.reset(hello.first - 1)
        conversation.open(self.cluster, self.epoch, self.number)
        welcome = Welcome(self.cluster, self.epoch, self.number, inbox.received, inbox.held, outbox.first, fresh)
        self._transmit([encode(welcome)])
        if not repeated:
            conversation.send_again(max(hello.received, hello.held) + 1)
        if taken_over:
            self.on_restart()

    def become(self, condition: Condition, reason: str) -> None:
        if condition != self.condition:
            self.condition = condition
            self.on_condition(condition, reason)

    def _transmit(self, frames: Sequence[bytes | memoryview]) -> bool:
        return self._transmit_to(self.routing_id, frames)

    def _deliver(self, frames: list[bytes]) -> None:
        self.on_message(decode(frames[0], FromCoordinator), frames[1:])
