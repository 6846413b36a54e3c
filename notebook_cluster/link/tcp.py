"""TCP under zmq sockets: connections by their file descriptors, where libzmq has no calls for what is done here, and
addresses as people write them.

libzmq limits a part and the number of messages that wait, not the number of parts: it would keep a message that never
ends for ever. What waits within the limits is far less, so :class:`UndeliveredBytes` cuts such a connection.
"""

import asyncio
import logging
import os
import socket as sockets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from notebook_cluster.link.frames import Drops

_INFO_BYTES = 192
_RECEIVED_AT = slice(128, 136)
"""Where Linux has ``tcpi_bytes_received`` in ``struct tcp_info``."""
_log = logging.getLogger(__name__)


def host_port(host: str, port: int) -> str:
    """``HOST:PORT``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_host_port(text: str) -> tuple[str, int] | None:
    """Host and port (1 to 65535) of ``HOST:PORT``; None when it is something else. Brackets stay."""
    host, _, port = text.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() and 0 < int(port) < 65536 else None


def port_error(error: zmq.ZMQError, port: object) -> OSError:
    """What to raise when ``port`` could not be bound; names it and the way out."""
    cause = "is taken by another program" if error.errno == zmq.EADDRINUSE else f"cannot be used ({error})"
    return OSError(error.errno, f"port {port} {cause}: choose another one with --port")


def remote_end(descriptor: int, at_port: int | None = None) -> Any:
    """The address at the other end, or None when the connection is gone, or is not one to our port ``at_port``."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            remote = connection.getpeername()
            return remote if at_port is None or connection.getsockname()[1] == at_port else None
    except (OSError, IndexError):
        return None


def cut(descriptor: int, remote: object) -> None:
    """Shut the connection to ``remote`` down, unless the descriptor means another one by now."""
    if remote is None or remote_end(descriptor) != remote:
        return
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(sockets.SHUT_RDWR)
    except OSError as error:
        _log.warning("could not cut the connection of %s: %s", remote, error)


def received_bytes(descriptor: int) -> int:
    """Bytes that came so far; 0 where the operating system does not say (all but Linux)."""
    if not hasattr(sockets, "TCP_INFO"):
        return 0
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            information = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _INFO_BYTES)
    except OSError:
        return 0
    return int.from_bytes(information[_RECEIVED_AT], sys.byteorder)


MAX_UNDELIVERED = 320 << 20
"""Bytes: the longest queue of the largest pieces, and some."""
LOOK_EVERY = 0.5
"""Seconds."""
_PART_COST = 64
"""Bytes that a part costs on the wire beside its content, at most."""


@dataclass(slots=True)
class _Open:
    remote: object
    delivered: int = 0


class UndeliveredBytes:
    """Watches the connections of one socket, known by their file descriptors; make it inside the running loop."""

    def __init__(self, drops: Drops) -> None:
        self._drops = drops
        self._open: dict[int, _Open] = {}
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(LOOK_EVERY, self._look)

    def opened(self, descriptor: int) -> None:
        """A connection was made."""
        self._open[descriptor] = _Open(remote_end(descriptor))

    def closed(self, descriptor: int) -> None:
        """It is gone."""
        self._open.pop(descriptor, None)

    def delivered(self, descriptor: int, parts: Sequence[Any]) -> None:
        """A message of these parts was taken from the socket."""
        if (connection := self._open.get(descriptor)) is not None:
            connection.delivered += sum(len(part) + _PART_COST for part in parts)

    def close(self) -> None:
        self._timer.cancel()
        self._open.clear()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_EVERY, self._look)
        for descriptor, connection in list(self._open.items()):
            if received_bytes(descriptor) - connection.delivered > MAX_UNDELIVERED:
                self._drops.note("endless", "cut the connection of %s: a message without end", connection.remote)
                self._open.pop(descriptor)
                cut(descriptor, connection.remote)
