"""The socket to the agent that started this kernel: the node's only way to the coordinator."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from notebook_cluster.protocol import ProtocolError, decode, encode
from notebook_cluster.protocol.node import ToNodeBody
from notebook_cluster.protocol.wire import MAX_MESSAGE_BYTES, Message
from notebook_cluster.sockets import IOThread

_log = logging.getLogger(__name__)


class Control:
    """A DEALER to the agent's ipc ROUTER, one encoded struct per message, in order.

    What the agent cannot take yet waits here; when the agent is gone the kernel ends by itself. ``send`` may be called
    from any thread.
    """

    def __init__(self, loop: IOThread, endpoint: str, routing_id: str, on_message: Callable[[Any], None]) -> None:
        self._loop = loop
        self._on_message = on_message
        self._waiting: deque[bytes] = deque()
        self._watching = False
        self._socket = loop.call(lambda: self._dial(endpoint, routing_id))

    def send(self, message: Message) -> None:
        # Encoded by the caller: what it sends is what the message was then.
        data = encode(message)
        if self._loop.on_loop():
            self._send(data)
        else:
            self._loop.call_soon(lambda: self._send(data))

    def _dial(self, endpoint: str, routing_id: str) -> zmq.Socket[bytes]:
        socket = self._loop.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 1000)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.setsockopt(zmq.ROUTING_ID, routing_id.encode())
        socket.connect(endpoint)
        self._loop.register(socket, zmq.POLLIN, self._on_ready)
        return socket

    def _send(self, data: bytes) -> None:
        self._waiting.append(data)
        if not self._watching:
            self._flush()

    def _flush(self) -> None:
        while self._waiting:
            try:
                self._socket.send(self._waiting[0], zmq.NOBLOCK)
            except zmq.Again:
                break
            self._waiting.popleft()
        if bool(self._waiting) != self._watching:
            self._watching = bool(self._waiting)
            flags = zmq.POLLIN | (zmq.POLLOUT if self._watching else 0)
            self._loop.register(self._socket, flags, self._on_ready)

    def _on_ready(self, flags: int) -> None:
        if flags & zmq.POLLOUT:
            self._flush()
        while flags & zmq.POLLIN:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode(data, ToNodeBody)
            except ProtocolError as error:
                _log.warning("a control message was dropped: %s", error)
                continue
            try:
                self._on_message(message)
            except Exception:
                _log.exception("a %s from the coordinator failed here", type(message).__name__)
