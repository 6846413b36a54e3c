"""The way to one other node: a DEALER, and the frames that wait for it."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from notebook_cluster.mesh.io_thread import IOThread
from notebook_cluster.protocol.node import NodeAddress
from notebook_cluster.security import Identity, dial

_log = logging.getLogger(__name__)

Payload = bytes | bytearray | memoryview

ZERO_COPY_BYTES = 64 * 1024
"""Payloads above this size are handed to libzmq without a copy; below it the copy is cheaper than the bookkeeping."""

_WATCHED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.DISCONNECTED


@dataclass(frozen=True)
class MeshSettings:
    """Sizes in bytes, times in seconds."""

    tcp_chunk: int = 256 * 1024
    ipc_chunk: int = 1024 * 1024
    high_water_mark: int = 64
    """Frames that libzmq holds for one connection; more wait here, where they cost a reference each."""
    waiting_bytes: int = 16 << 30
    """Payload that may wait for one node; what comes on top is dropped and counted."""
    header_bytes: int = 64 * 1024
    held_bytes: int = 16 << 20
    """ipc frames of nodes that the roster does not have yet."""
    heartbeat: float = 2.0
    heartbeat_timeout: float = 20.0
    """A Wi-Fi break shorter than this costs nothing: TCP repeats what was lost."""
    unreachable: float = 5.0


def tcp_host(own: NodeAddress | None, other: NodeAddress) -> str:
    """The address at which ``own`` reaches ``other``: loopback on the same machine, else the first that is not."""
    if own is not None and own.machine == other.machine:
        return "127.0.0.1"
    for host in other.hosts:
        if not host.startswith("127.") and host not in ("::1", "localhost"):
            return f"[{host}]" if ":" in host else host
    return other.hosts[0] if other.hosts else "127.0.0.1"


class Outgoing:
    """One incarnation of one other node. Used on the I/O thread only.

    The socket takes frames only while it is connected (IMMEDIATE), so what waits here survives a refusal: a node whose
    roster is older than ours refuses our key, libzmq then gives the connection up for good, and we dial again.
    """

    def __init__(
        self,
        loop: IOThread,
        identity: Identity,
        own: NodeAddress | None,
        address: NodeAddress,
        routing_id: str,
        settings: MeshSettings,
        count_sent: Callable[[int], None],
    ) -> None:
        self.address = address
        self.dropped = 0
        self.unreachable_said = False
        self.ipc = bool(address.mesh_ipc) and own is not None and own.peer == address.peer
        self.endpoint = address.mesh_ipc if self.ipc else f"tcp://{tcp_host(own, address)}:{address.mesh_port}"
        self._loop = loop
        self._identity = identity
        self._routing_id = routing_id
        self._settings = settings
        self._count_sent = count_sent
        self._waiting: deque[tuple[bytes, Payload]] = deque()
        self._waiting_bytes = 0
        self._waiting_since = 0.0
        self._backoff = 0.02
        self._closed = False
        self._watching = False
        self._socket, self._monitor = self._dial()

    @property
    def chunk_bytes(self) -> int:
        return self._settings.ipc_chunk if self.ipc else self._settings.tcp_chunk

    @property
    def waiting(self) -> int:
        """Frames not yet handed to libzmq."""
        return len(self._waiting)

    def seconds_stuck(self, now: float) -> float:
        """How long the oldest waiting frame has found no connection or no room; 0 when none waits."""
        return now - self._waiting_since if self._waiting else 0.0

    def send(self, header: bytes, payload: Payload) -> None:
        size = len(payload)
        if self._waiting and self._waiting_bytes + size > self._settings.waiting_bytes:
            self.dropped += 1
            return
        if not self._waiting:
            self._waiting_since = time.monotonic()
        self._waiting.append((header, payload))
        self._waiting_bytes += size
        if not self._watching:
            self._flush()

    def close(self) -> None:
        self._closed = True
        self._hang_up()
        self._waiting.clear()

    def _dial(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes] | None]:
        socket = self._loop.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, self._settings.high_water_mark)
        socket.setsockopt(zmq.ROUTING_ID, self._routing_id.encode())
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        monitor: zmq.Socket[bytes] | None = None
        if not self.ipc:
            if "[" in self.endpoint:
                socket.setsockopt(zmq.IPV6, 1)
            dial(socket, self._identity, self.address.mesh_key)
            socket.setsockopt(zmq.HEARTBEAT_IVL, int(self._settings.heartbeat * 1000))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._settings.heartbeat_timeout * 1000))
            monitor = socket.get_monitor_socket(_WATCHED)
            self._loop.register(monitor, zmq.POLLIN, self._on_monitor)
        socket.connect(self.endpoint)
        return socket, monitor

    def _hang_up(self) -> None:
        self._loop.unregister(self._socket)
        self._watching = False
        if self._monitor is not None:
            self._loop.unregister(self._monitor)
            self._socket.disable_monitor()
            self._monitor = None
        self._socket.close(linger=0)

    def _flush(self) -> None:
        sent = 0
        while self._waiting:
            header, payload = self._waiting[0]
            try:
                self._socket.send(header, zmq.SNDMORE | zmq.NOBLOCK)
                self._socket.send(payload, zmq.NOBLOCK, copy=len(payload) <= ZERO_COPY_BYTES)
            except zmq.Again:
                break
            self._waiting.popleft()
            self._waiting_bytes -= len(payload)
            sent += len(header) + len(payload)
        if sent:
            self._count_sent(sent)
            self._waiting_since = time.monotonic()
            self.unreachable_said = False
        self._watch_for_room(bool(self._waiting))

    def _watch_for_room(self, wanted: bool) -> None:
        if wanted == self._watching:
            return
        self._watching = wanted
        if wanted:
            self._loop.register(self._socket, zmq.POLLOUT, lambda flags: self._flush())
        else:
            self._loop.unregister(self._socket)

    def _on_monitor(self, flags: int) -> None:
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._backoff = 0.02
            elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                _log.debug("%s does not know this node yet: dialling again", self.address.name)
                self._hang_up()
                self._loop.call_later(self._backoff, self._dial_again)
                self._backoff = min(1.0, self._backoff * 2)

    def _dial_again(self) -> None:
        if self._closed:
            return
        with contextlib.suppress(zmq.ContextTerminated):
            self._socket, self._monitor = self._dial()
            self._flush()
