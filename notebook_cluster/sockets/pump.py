"""A plain zmq socket on an asyncio loop, without ``zmq.asyncio``: one callback per message, no task per operation.

libzmq's file descriptor is edge-triggered: it says "something changed", once. So every wake-up reads until nothing is
left, and a send, which may swallow the edge of a message that arrived meanwhile, is followed by a look as well.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import zmq

_log = logging.getLogger(__name__)
_BURST = 64
"""Messages read before other callbacks of the loop get their turn."""
_COPY_BELOW = 64 * 1024
"""Handing small frames over without copying costs more than the copy."""

UNACKNOWLEDGED = 3.0
"""Seconds, see :func:`give_up_unacknowledged`."""


def give_up_unacknowledged(socket: zmq.Socket[Any]) -> None:
    """Have the system end a TCP connection on which nothing was acknowledged for 3 s (TCP_USER_TIMEOUT; Linux), so that
    libzmq makes a new one. TCP repeats what was lost after twice as long each time: a cable that was out for four
    seconds would cost seven. Only for who sends again what was on its way; a receiver that reads nothing for so long
    ends it too."""
    socket.setsockopt(zmq.TCP_MAXRT, int(UNACKNOWLEDGED * 1000))


def keep_alive(socket: zmq.Socket[Any], pause: float, timeout: float) -> None:
    """Have the system end a TCP connection whose other side is gone without a word: asked each ``pause`` seconds (whole
    ones, at least 1), silent for ``timeout``. In place of libzmq's own heartbeat (ZMQ_HEARTBEAT_IVL): when a connection
    ends while its receiver is at the high-water mark, the next one aborts the process (4.3.5: assertion !_io_error in
    stream_engine_base.cpp)."""
    seconds = max(1, round(pause))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, seconds)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, seconds)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, max(1, round(timeout / seconds) - 1))


def plain_context(context: zmq.Context[Any]) -> "zmq.Context[zmq.Socket[bytes]]":
    """``context`` itself, or for a ``zmq.asyncio.Context`` a plain view of it (its sockets would return futures)."""
    return context if type(context) is zmq.Context else zmq.Context.shadow(context.underlying)


class Pump:
    """Owns ``socket``: calls ``on_frames(frames)`` on the running loop for every message, sends without waiting.

    Make it inside a running loop and use it only there. ``copy=False`` delivers ``zmq.Frame`` objects (for
    ``User-Id``) instead of bytes. An exception in ``on_frames`` is logged and the next message is delivered.
    """

    def __init__(
        self, socket: zmq.Socket[Any], on_frames: Callable[[list[Any]], None], *, copy: bool = True, linger: int = 0
    ) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._copy = copy
        self._linger = linger
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._scheduled = False
        self.closed = False
        self._loop.add_reader(self._descriptor, self._drain)
        self._look_again()

    @property
    def socket(self) -> zmq.Socket[Any]:
        """The socket, for options and ``disconnect``; reading and writing is the pump's."""
        return self._socket

    def hand_to(self, on_frames: Callable[[list[Any]], None]) -> None:
        """Messages go to ``on_frames`` from now on."""
        self._on_frames = on_frames

    def send(self, frames: Sequence[Any]) -> bool:
        """Queue one message. False when libzmq takes none now: no connection yet, an unknown ROUTER peer, or closed."""
        if self.closed:
            return False
        copy = all(len(frame) < _COPY_BELOW for frame in frames)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
        except zmq.Again:
            # A connection that was just made is only seen after libzmq's own commands ran, which EVENTS enforces.
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                return False
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
            except zmq.ZMQError:
                return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        finally:
            self._look_again()
        return True

    def close(self) -> None:
        """Stop and close the socket. May be called again, also from ``on_frames``."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._descriptor)
            self._socket.close(self._linger)

    def _look_again(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def read_all(self) -> None:
        """Deliver everything that has arrived, now instead of in the loop's next turn."""
        while self._read_one():
            pass

    def _drain(self) -> None:
        self._scheduled = False
        for _ in range(_BURST):
            if not self._read_one():
                return
        self._look_again()

    def _read_one(self) -> bool:
        if self.closed:
            return False
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=self._copy)
        except zmq.Again:
            return False
        try:
            self._on_frames(frames)
        except Exception:
            _log.exception("a message could not be handled")
        return True
