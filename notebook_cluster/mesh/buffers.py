"""What the system holds of a connection between nodes of one peer.

On Linux an AF_UNIX socket holds 208 KiB by default, on macOS 8 KiB: threads of libzmq that pass megabytes through it
wait for each other all the time. libzmq's own option (ZMQ_SNDBUF) is for TCP only. The system may grant less than asked
(``net.core.wmem_max``).
"""

import socket as sockets


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
