"""One DEALER socket to a ROUTER, and what its monitor tells about it."""

from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from notebook_cluster.link.pump import Pump
from notebook_cluster.security import Identity, dial

MAX_FRAME_BYTES = 1 << 20
"""Larger frames end the connection before they are read: pieces are smaller, so nobody of ours sends one."""
_LINGER = 100
"""Milliseconds for the last acknowledgement when a socket is closed."""


def set_heartbeat(socket: zmq.Socket[Any]) -> None:
    """libzmq's own heartbeat: it finds a dead TCP connection, also while our event loop is busy."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, 0)


class Connection:
    """Connects to ``address`` and reconnects; ``on_up`` is called after each CURVE handshake, ``on_down(trouble)`` when
    the connection breaks or an attempt fails, ``on_refused`` when the other side does not trust our key (libzmq gives
    up then)."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        server_key: str,
        identity: Identity,
        *,
        on_frames: Callable[[list[bytes]], None],
        on_up: Callable[[], None],
        on_down: Callable[[str], None],
        on_refused: Callable[[], None],
    ) -> None:
        self._address = address
        self._on_up, self._on_down, self._on_refused = on_up, on_down, on_refused
        self.is_up = False
        self._was_up = False
        self._socket = context.socket(zmq.DEALER)
        set_heartbeat(self._socket)
        # Without a connection there is no queue: what is not delivered stays in the outbox.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, 5000)
        dial(self._socket, identity, server_key)
        events = (
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_DISCONNECTED
        )
        self._monitor = Pump(self._socket.get_monitor_socket(events), self._on_event)
        self._pump = Pump(self._socket, on_frames, linger=_LINGER)
        self._socket.connect(address)

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        return self._pump.send(frames)

    def close(self) -> None:
        if not self._pump.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._pump.close()

    def _on_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        place = self._address.removeprefix("tcp://")
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_up = self._was_up = True
            self._on_up()
            return
        self.is_up = False
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._on_refused()
        elif event == zmq.EVENT_DISCONNECTED:
            if self._was_up:
                self._was_up = False
                self._on_down(f"{place} closed the connection")
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._on_down(f"nothing answers at {place}: is it still shared there, and is its firewall open?")
        else:
            self._on_down(f"{place} does not answer as the peer that was found: another key or another program")
