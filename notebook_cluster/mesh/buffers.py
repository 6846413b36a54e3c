"""What the system holds of a connection between nodes of one peer.

On Linux an AF_UNIX socket holds 208 KiB by default, on macOS 8 KiB: threads of libzmq that pass megabytes through it
wait for each other all the time. libzmq's own option (ZMQ_SNDBUF) is for TCP only. The system may grant less than asked
(``net.core.wmem_max``).
"""

import contextlib
import socket as sockets

import zmq
from zmq.utils.monitor import parse_monitor_message

from notebook_cluster.mesh.io_thread import IOThread


class SendBuffer:
    """Gives a DEALER's ipc connection a larger send buffer as soon as it is there. Used on the I/O thread only.

    Only the first connection has it: a node that is started again has another socket.
    """

    def __init__(self, loop: IOThread, socket: "zmq.Socket[bytes]", path: str, size: int) -> None:
        """``socket`` is going to dial ``path``; ``size`` in bytes."""
        self._loop, self._socket = loop, socket
        self._path, self._size = path, size
        self._monitor: zmq.Socket[bytes] | None = socket.get_monitor_socket(zmq.Event.CONNECTED)
        loop.register(self._monitor, zmq.POLLIN, lambda flags: self._on_connected())

    def close(self) -> None:
        """Wait no longer; before ``socket`` is closed."""
        if self._monitor is not None:
            self._loop.unregister(self._monitor)
            self._monitor = None
            self._socket.disable_monitor()

    def _on_connected(self) -> None:
        with contextlib.suppress(zmq.Again):
            if self._monitor is not None:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                self.close()
                enlarge(int(event["value"]), self._path, self._size)


def enlarge(descriptor: int, path: str, size: int) -> bool:
    """Let the socket ``descriptor`` hold ``size`` bytes (Linux: twice that, half of it for its own use) that the other
    side has not read. False when it is not a connection to ``path`` any more, or the system says no."""
    try:
        socket = sockets.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        mine = socket.family == getattr(sockets, "AF_UNIX", None) and socket.getpeername() == path
        if mine and socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF) < size:
            socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, size)
        return mine
    except OSError:
        return False
    finally:
        socket.detach()  # it is libzmq's
