"""One DEALER socket to a ROUTER, and what its monitor tells about it."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from notebook_cluster.link.frames import Drops
from notebook_cluster.link.tcp import UndeliveredBytes
from notebook_cluster.security import Identity, dial
from notebook_cluster.sockets import UNACKNOWLEDGED, Pump, give_up_unacknowledged

MAX_FRAME_BYTES = 1 << 20
"""Larger frames end the connection before they are read: pieces are smaller, so nobody of ours sends one."""
QUEUE_MESSAGES = 1000
"""Messages that may wait in one connection: whoever does not read cannot make us keep more."""
LINGER = 100
"""Milliseconds for the last acknowledgement when a socket is closed."""
_SILENCE = 5.0
"""Seconds after which libzmq ends a connection on which nothing arrives, or no handshake is made."""
_QUICK = 1.0
"""An attempt to connect that fails within this many seconds was refused; one that nobody answers takes longer, except
when somebody else's attempt to find that machine was about to fail. Hence two in a row."""


def is_silence(seconds: float) -> bool:
    """True when a connection that ended, after so many seconds without a word, was given up on this side."""
    return seconds > 0.8 * min(_SILENCE, UNACKNOWLEDGED)


def set_heartbeat(socket: zmq.Socket[Any]) -> None:
    """libzmq's own heartbeat: it finds a dead TCP connection, also while our event loop is busy."""
    give_up_unacknowledged(socket)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(_SILENCE * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(_SILENCE * 1000))
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, 0)


class AgentConnection(Protocol):
    """What a link runs over: a :class:`DialledConnection`, or one that the other side made."""

    @property
    def is_up(self) -> bool: ...

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        """Queue one message. False: no connection now, or as much as may wait for it waits already."""
        ...

    def close(self) -> None: ...


class DialledConnection:
    """Connects to ``address`` and reconnects; ``on_up`` is called after each CURVE handshake, ``on_down(trouble,
    answered)`` when the connection breaks or an attempt fails, ``on_refused`` when the other side does not trust our
    key (libzmq gives up then). ``answered`` is True when the other machine closed or refused it, False when it just
    said nothing.

    Attributes:
        strangers: how often in a row somebody answered who could not be the one with ``server_key``.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        server_key: str,
        identity: Identity,
        *,
        on_frames: Callable[[list[bytes]], None],
        on_up: Callable[[], None],
        on_down: Callable[[str, bool], None],
        on_refused: Callable[[], None],
        drops: Drops | None = None,
    ) -> None:
        self._address = address
        self._on_frames, self._on_up, self._on_down, self._on_refused = on_frames, on_up, on_down, on_refused
        self._loop = asyncio.get_running_loop()
        self._up = False
        self._was_up = False
        self._heard = self._attempt = self._loop.time()
        self._quick_failures = 0
        self.strangers = 0
        self._shaking_hands = self._met = False
        self._descriptor = -1
        self._backlog = UndeliveredBytes(Drops() if drops is None else drops)
        self._socket = context.socket(zmq.DEALER)
        set_heartbeat(self._socket)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, 5000)
        dial(self._socket, identity, server_key)
        events = (
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_CONNECTED
            | zmq.EVENT_CONNECT_DELAYED
            | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_DISCONNECTED
        )
        self._monitor = Pump(self._socket.get_monitor_socket(events), self._on_event)
        self._pump = Pump(self._socket, self._receive, linger=LINGER)
        self._socket.connect(address)

    @property
    def is_up(self) -> bool:
        return self._up

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        # Without a connection nothing is queued: what is not delivered stays in the outbox. IMMEDIATE would do the
        # same, but libzmq 4.3 aborts the process when such a connection breaks while it reads a message of parts.
        return self._up and self._pump.send(frames)

    def close(self) -> None:
        if not self._pump.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._backlog.close()
            self._pump.close()

    def _receive(self, frames: list[bytes]) -> None:
        self._heard = self._loop.time()
        self._backlog.delivered(self._descriptor, frames)
        self._on_frames(frames)

    def _on_event(self, frames: list[bytes]) -> None:
        told, now = parse_monitor_message(frames), self._loop.time()
        event, place = told["event"], self._address.removeprefix("tcp://")
        if event == zmq.EVENT_CONNECT_DELAYED:
            self._attempt = now
            return
        if event == zmq.EVENT_CONNECTED:
            self._backlog.closed(self._descriptor)
            self._descriptor = int(told["value"])
            self._backlog.opened(self._descriptor)
            self._shaking_hands = self._met = True
            return
        shaking_hands, self._shaking_hands = self._shaking_hands, False
        self._up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self._up:
            self._was_up = True
            self._quick_failures = self.strangers = 0
            self._heard = now
            self._on_up()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._on_refused()
        elif event == zmq.EVENT_DISCONNECTED:
            self._backlog.closed(self._descriptor)
            if self._was_up:
                self._was_up = False
                silent = is_silence(now - self._heard)
                self._connect_anew()
                self._on_down(f"{place} {'fell silent' if silent else 'closed the connection'}", not silent)
            elif shaking_hands:
                self._on_stranger(now)
        elif event == zmq.EVENT_CONNECT_RETRIED:
            met, self._met = self._met, False
            if met:
                return  # somebody answered: how that ended was said
            self.strangers = 0
            trouble = f"nothing answers at {place}: is it still shared there, and is its firewall open?"
            self._quick_failures = self._quick_failures + 1 if now - self._attempt < _QUICK else 0
            self._on_down(trouble, self._quick_failures >= 2)
        else:
            self._on_stranger(now)

    def _on_stranger(self, now: float) -> None:
        """Whoever is there ended the handshake: it was not made for its key."""
        self.strangers += 1
        place = self._address.removeprefix("tcp://")
        trouble = f"{place} does not answer as the peer that was found: another key or another program"
        self._on_down(trouble, not is_silence(now - self._attempt))

    def _connect_anew(self) -> None:
        """Forget what was queued for the connection that is gone, and make another one."""
        with contextlib.suppress(zmq.ZMQError):  # libzmq has given it up already
            self._socket.disconnect(self._address)
        self._socket.connect(self._address)
