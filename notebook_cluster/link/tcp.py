"""The TCP connection under a zmq socket, by its file descriptor: libzmq has no calls for what is done here."""

import logging
import os
import socket as sockets
import sys

_INFO_BYTES = 192
_RECEIVED_AT = slice(128, 136)
"""Where Linux has ``tcpi_bytes_received`` in ``struct tcp_info``."""
_log = logging.getLogger(__name__)


def remote_end(descriptor: int) -> object:
    """The address at the other end, or None when the connection is gone."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            return connection.getpeername()
    except OSError:
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
