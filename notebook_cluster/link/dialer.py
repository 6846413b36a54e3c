"""The side of a link that connects: a coordinator, one :class:`Dialer` for each agent."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from notebook_cluster.link.channel import Channel, Condition, LinkSettings
from notebook_cluster.link.connection import AgentConnection, DialledConnection
from notebook_cluster.link.conversation import Conversation, Gate, LinkEnd, RoundTrip, at_once
from notebook_cluster.link.frames import SESSION_SHIFT, AnyHeader, Beat, Drops, Hello, SessionRefusal, Welcome
from notebook_cluster.link.inbound_listener import ArrivedConnection, InboundListener, way_out
from notebook_cluster.protocol import PROTOCOL_VERSION, Message, ProtocolError, decode, encode
from notebook_cluster.protocol.awake import LATE, AwakeClock, clock_through_sleep
from notebook_cluster.protocol.peer import FromAgent
from notebook_cluster.protocol.wire import mismatch
from notebook_cluster.security import Identity
from notebook_cluster.sockets import plain_context

STRANGER_AFTER = 3
"""Attempts in a row that failed because of the key: one may be an agent that was just ending."""
_log = logging.getLogger(__name__)


class Dialer(LinkEnd):
    """A resumable link to the agent at ``address`` whose public key is ``server_key``.

    ``on_message(message, buffers)`` and ``on_condition(condition, reason)`` are called on the loop. When ``on_message``
    returns, the message counts as processed and is acknowledged; a message that was acknowledged never comes again.
    Conditions: *connecting* at first; *connected*; *suspect* and *lost* by silence; *refused* with the reason (not
    trusted, another protocol version, a newer coordinator of this cluster). From every one of them the Dialer keeps
    trying, and on return to *connected* nothing is lost or doubled.

    After a time in which it did not run it sends nothing before the agent, which may follow another, welcomes it again.

    With a ``reception`` it does not connect: the agent does, and ``address`` is only shown. All else is the same.

    Attributes:
        newer: epoch of the coordinator that the agent follows instead, as it said when it refused; 0: it did not.
        condition, reason: as last told to ``on_condition``; ``reason`` also says what *connecting* waits for.
        dropped: number of frames dropped, by cause (``garbage``, ``stale``, ``undecodable``, ``resends``,
            ``endless``), and of ``gaps`` seen.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        server_key: str,
        identity: Identity,
        *,
        cluster: str,
        epoch: int,
        sender: str,
        on_message: Callable[[Message, list[bytes]], None],
        on_condition: Callable[[Condition, str], None],
        received: int = 0,
        cluster_name: str = "",
        peer: str = "",
        settings: LinkSettings | None = None,
        reception: InboundListener | None = None,
        gate: Gate = at_once,
    ) -> None:
        """``cluster`` identifies the cluster at the agent and ``cluster_name`` (default: the same) is shown to people;
        both must be usable names. ``received`` is the last sequence number that an earlier coordinator of this cluster
        processed from this agent. ``peer`` is the agent's name in messages (default: its address). ``gate`` calls what
        it is given in order: a message is handled, and then acknowledged, when the gate lets it."""
        self._gate = gate
        self._context = plain_context(context)
        self._address = address
        self._server_key = server_key
        self._identity = identity
        self._cluster, self._epoch, self._sender = cluster, epoch, sender
        self._cluster_name = cluster_name or cluster
        self._peer = peer or address.removeprefix("tcp://")
        self._on_message = on_message
        self._on_condition = on_condition
        self._settings = most = settings or LinkSettings()
        self._reception = reception
        super().__init__(Channel(outbox_bytes=most.outbox_bytes, message_bytes=most.message_bytes, received=received))
        self.condition: Condition = "connecting"
        self.reason = ""
        self.dropped = Drops()
        self._times = RoundTrip()
        # Upper bits: this Dialer. Lower bits: its connections, counted.
        self._session = secrets.randbits(62 - SESSION_SHIFT) << SESSION_SHIFT
        self._trouble = ""
        self._answered = self._hello_open = self._closed = False
        self.newer, self._asks_again = 0, False

    @property
    def round_trip(self) -> float | None:
        """Smoothed time to the agent and back in seconds, None before the first measurement."""
        return self._times.mean

    @property
    def jitter(self) -> float | None:
        """How much the time to the agent and back varies: its smoothed mean deviation (RTTVAR of RFC 6298) in seconds,
        None before the first measurement."""
        return self._times.deviation

    @property
    def silence(self) -> float:
        """Seconds since the last frame of the agent, or since this side began to dial."""
        return self._loop.time() - self._last_heard

    @property
    def silent(self) -> bool:
        """True while *suspect* or *lost* by nothing but silence: since it was last heard the agent's machine neither
        closed nor refused a connection. So it is when the machine sleeps, has no power or left the network."""
        return self.condition in ("suspect", "lost") and not self._answered

    @property
    def meets_stranger(self) -> bool:
        """True while somebody else answers at the agent's address, time after time."""
        return isinstance(self._connection, DialledConnection) and self._connection.strangers >= STRANGER_AFTER

    @property
    def trouble(self) -> str:
        """How the last attempt to connect failed, or empty."""
        return self._trouble

    @property
    def received(self) -> int:
        """Last incoming sequence number that is processed, and inside ``on_message`` that of the message at hand: write
        it into the log with what the message changed. While acknowledgements are held, the last acknowledged one."""
        inbox = self._channel.inbox
        return inbox.received if inbox.holding else self._conversation.handling or inbox.received

    @property
    def handling(self) -> int:
        """Inside ``on_message`` the sequence number of the message at hand, else 0."""
        return self._conversation.handling

    def hold(self, holding: bool) -> None:
        """Acknowledge nothing from now on, the message at hand included, and all of it later: what messages change
        cannot be written down now, so the agent has to keep them."""
        self._channel.inbox.hold(holding)

    def freeze(self) -> None:
        """Handle no message from now on: another coordinator goes on after :attr:`received`."""
        self._conversation.freeze()

    def start(self) -> None:
        """Begin to connect; call inside the running loop."""
        self._loop = asyncio.get_running_loop()
        self._last_heard = self._last_sign = self._hello_time = self._loop.time()
        self._retry_time: float | None = None
        self._clock = AwakeClock()
        self._awake = clock_through_sleep()
        if self._reception is not None:
            self._trouble = self.reason = f"{self._peer} has not dialled in: {way_out(self._peer)}"
        self._connection = self._connect()
        self._conversation = Conversation(self._channel, self._transmit, self._deliver, self.dropped, self._gate)
        self._beat_time = 0.0
        self._ticker = self._loop.call_later(self._settings.heartbeat / 2, self._tick)

    def send(self, message: Message, buffers: Sequence[bytes] = (), *, droppable: bool = False) -> bool:
        """Send ``message`` with ``buffers``, now or when the agent can be reached again.

        Returns False when it is ``droppable`` and was left out because ``settings.outbox_bytes`` wait already.

        Raises:
            ValueError: larger than ``settings.message_bytes``.
        """
        return self._conversation.send([encode(message), *buffers], droppable=droppable)

    def move(self, address: str) -> None:
        """The agent is at ``address`` (``tcp://HOST:PORT``) now: connect there. What waits for it goes there too."""
        self._address = address
        if not self._closed and self._reception is None:
            self._reconnect()

    async def close(self, *, flush: float = 1.0) -> None:
        """Wait at most ``flush`` seconds until the agent has everything (if it is there), then disconnect."""
        if self._closed:
            return
        if self.condition == "connected" and flush > 0:
            await self._conversation.flushed(flush)
        self._closed = True
        self._ticker.cancel()
        self._conversation.close()
        self._connection.close()

    # ---- connection ------------------------------------------------------------------------------------------

    def _connect(self) -> AgentConnection:
        self._last_sign = self._loop.time()
        if self._reception is not None:
            return ArrivedConnection(
                self._reception,
                self._server_key,
                self._peer,
                on_frames=self._on_frames,
                on_up=self._on_up,
                on_down=self._on_down,
            )
        return DialledConnection(
            self._context,
            self._address,
            self._server_key,
            self._identity,
            on_frames=self._on_frames,
            on_up=self._on_up,
            on_down=self._on_down,
            on_refused=lambda: self._on_refused(
                f"{self._peer} does not trust this machine: pair with it first, or run it as the same user here"
            ),
            drops=self.dropped,
        )

    def _reconnect(self) -> None:
        """A fresh socket: libzmq does not try again after a refusal or a protocol error."""
        self._conversation.pause()
        self._connection.close()
        self._retry_time = None
        self._connection = self._connect()

    def _transmit(self, frames: Sequence[bytes | memoryview]) -> bool:
        self._ask_again_after_a_pause()
        return not self._asks_again and self._connection.send(frames)

    def _ask_again_after_a_pause(self) -> None:
        now = clock_through_sleep()
        if self._conversation.is_open and now - self._awake > LATE:
            self._awake, self._asks_again = now, True
            self._conversation.pause()
            self._hello()

    def _on_up(self) -> None:
        self._session += 1
        self._asks_again = False
        self._last_sign = self._loop.time()
        self._conversation.pause()
        self._hello()

    def _on_down(self, trouble: str, answered: bool) -> None:
        self._last_sign = self._loop.time()
        self._trouble = trouble
        self._answered = self._answered or answered
        self._conversation.pause()

    def _on_refused(self, reason: str) -> None:
        self._conversation.pause()
        self._retry_time = self._loop.time() + self._settings.retry
        self._become("refused", reason)

    def _hello(self) -> None:
        self._hello_time = self._loop.time()
        inbox, outbox = self._channel.inbox, self._channel.outbox
        hello = Hello(
            self._cluster,
            self._epoch,
            self._session,
            PROTOCOL_VERSION,
            self._sender,
            self._cluster_name,
            inbox.received,
            inbox.held,
            outbox.first,
        )
        self._hello_open = True
        self._connection.send([encode(hello)])

    # ---- incoming --------------------------------------------------------------------------------------------

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            header = decode(frames[0], AnyHeader)
            if header.session != self._session or (header.cluster, header.epoch) != (self._cluster, self._epoch):
                self.dropped["stale"] += 1
                return
            self._heard()
            if isinstance(header, Welcome):
                self._welcome(header)
            elif isinstance(header, SessionRefusal):
                self.newer = header.newer
                reason = "".join(letter if letter.isprintable() else " " for letter in header.reason)
                self._on_refused(mismatch(self._peer, header.protocol) or f"{self._peer} refuses: {reason}")
            elif self._conversation.is_open or self._asks_again:
                self._conversation.handle(header, frames[1:])
                if isinstance(header, Beat):
                    self._times.returned(header.echo, self._loop.time())
        except ProtocolError as error:
            self.dropped.note("garbage", "dropped a frame of %s: %s", self._peer, error)

    def _heard(self) -> None:
        self._last_heard = self._last_sign = self._loop.time()
        self._answered = False
        if self.condition in ("suspect", "lost") and self._conversation.is_open:
            self._become("connected", "")

    def _welcome(self, welcome: Welcome) -> None:
        if not self._hello_open or (self._conversation.is_open and not welcome.fresh):
            return
        self._hello_open, self._asks_again, self.newer = False, False, 0
        self._times.measured(self._loop.time() - self._hello_time)
        inbox, conversation = self._channel.inbox, self._conversation
        if welcome.fresh or welcome.first > inbox.held + 1:
            if welcome.first > inbox.held + 1:
                # Acknowledged by an earlier coordinator after it last wrote its number down.
                _log.info(
                    "messages of %s go on at %d, %d was the last one known", self._peer, welcome.first, inbox.held
                )
            inbox.reset(welcome.first - 1)
        conversation.acknowledged(welcome.received)
        conversation.open(self._cluster, self._epoch, self._session)
        self._become("connected", "")
        conversation.send_again(max(welcome.received, welcome.held) + 1)

    def _deliver(self, frames: list[bytes]) -> None:
        self._on_message(decode(frames[0], FromAgent), frames[1:])

    # ---- time ------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(self._settings.heartbeat / 2, self._tick)
        now, settings = self._loop.time(), self._settings
        self._clock.read(now)
        self._ask_again_after_a_pause()
        self._awake = clock_through_sleep()
        self._last_heard = min(now, self._last_heard + self._clock.pause)  # who did not run could not hear
        silence = now - self._last_heard
        if self._retry_time is not None:
            if now >= self._retry_time:
                self._reconnect()
            return
        if self._conversation.is_open:
            if now - self._beat_time >= settings.heartbeat * 0.9:
                self._beat_time = now
                self._times.sent(now)
                self._conversation.beat(time=now)
            if silence > settings.suspect:
                self._hello()
        elif self._connection.is_up and now - self._hello_time >= settings.heartbeat:
            self._hello()
        elif now - self._last_sign > settings.stuck:
            # Not even a failed attempt since: whatever state the socket is in, a new one is not worse.
            self._reconnect()
        self._judge(silence)

    def _judge(self, silence: float) -> None:
        verdict = self._settings.judge(silence)
        if self.condition == "connecting":
            if verdict == "lost":
                self._become("lost", self._trouble or f"nothing answers at {self._peer}")
        elif self.condition in ("connected", "suspect") and verdict != "connected":
            self._become(verdict, self._trouble or f"{self._peer} has been silent for {silence:.1f} s")

    def _become(self, condition: Condition, reason: str) -> None:
        if condition == "connected":
            self._trouble = ""
        if condition != self.condition or (condition == "refused" and reason != self.reason):
            self.condition, self.reason = condition, reason
            self._on_condition(condition, reason)
