"""Connections of strangers: how many there may be, how long and how much they may say.

A pairing socket lets any key in, and libzmq would hold any number of connections, and a message of endless parts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from notebook_cluster.link.drops import Drops
from notebook_cluster.link.pump import Pump
from notebook_cluster.link.tcp import cut, received_bytes, remote_end

MAX_VISITORS = 256
MAX_OF_ONE_SOURCE = 32
MAX_SECONDS = 30.0
"""Pairing takes less than one; a guest that waits for its turn stays connected meanwhile."""
MAX_RECEIVED = 64 * 1024
"""Bytes from one connection, encryption included; pairing takes about 1 KiB."""


@dataclass(frozen=True, slots=True)
class _Visitor:
    remote: Any
    since: float


class Visitors:
    """Watches the connections to ``server``, a bound zmq socket; call :meth:`look` a few times a second.

    Connections that it ends are counted in ``drops`` as ``too many``, ``too long`` or ``too much``.
    """

    def __init__(self, server: zmq.Socket[Any], clock: Callable[[], float], drops: Drops) -> None:
        self._server = server
        self._clock = clock
        self._drops = drops
        self._port = int(server.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._here: dict[int, _Visitor] = {}
        self._monitor = Pump(server.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED), self._on_event)

    def __len__(self) -> int:
        return len(self._here)

    def close(self) -> None:
        """Stop watching; call before the server is closed."""
        if not self._monitor.closed:
            self._server.disable_monitor()
            self._monitor.close()

    def look(self) -> None:
        """End the connections that stayed or said too much."""
        now = self._clock()
        for descriptor, visitor in list(self._here.items()):
            if now - visitor.since > MAX_SECONDS:
                self._end(descriptor, visitor, "too long")
            elif received_bytes(descriptor) > MAX_RECEIVED:
                self._end(descriptor, visitor, "too much")

    def _on_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)
        descriptor = int(event["value"])
        if event["event"] == zmq.EVENT_DISCONNECTED:
            self._here.pop(descriptor, None)
            return
        remote = remote_end(descriptor, self._port)
        if remote is None:
            return
        visitor = _Visitor(remote, self._clock())
        same = sum(other.remote[0] == remote[0] for other in self._here.values())
        if same >= MAX_OF_ONE_SOURCE or len(self._here) >= MAX_VISITORS:
            self._end(descriptor, visitor, "too many")
        else:
            self._here[descriptor] = visitor

    def _end(self, descriptor: int, visitor: _Visitor, cause: str) -> None:
        """Shut the connection down, unless the descriptor means another one by now."""
        self._here.pop(descriptor, None)
        if remote_end(descriptor, self._port) == visitor.remote:
            self._drops.note(cause, "ended a connection of %s to the pairing port: %s", visitor.remote[0], cause)
            cut(descriptor, visitor.remote)
