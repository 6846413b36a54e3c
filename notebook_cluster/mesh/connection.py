"""The connection to one other node: a DEALER that dials until it is in.

On Linux an AF_UNIX socket holds 208 KiB by default, on macOS 8 KiB: threads of libzmq that pass megabytes through it
wait for each other all the time. libzmq's own option (ZMQ_SNDBUF) is for TCP only, so :func:`enlarge` sets the size by
the descriptor. The system may grant less than asked (``net.core.wmem_max``).
"""

import contextlib
import logging
import socket as sockets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from notebook_cluster.protocol.node import NodeAddress
from notebook_cluster.security import Identity, dial
from notebook_cluster.sockets import SENDING, IOThread, give_up_unacknowledged, keep_alive

_log = logging.getLogger(__name__)

Payload = bytes | bytearray | memoryview

ZERO_COPY_BYTES = 64 * 1024
"""Payloads above this size are handed to libzmq without a copy; below it the copy is cheaper than the bookkeeping."""

_MAX_HOSTS = 8
# Numbers: what combines enum members makes a new one each time.
_NOBLOCK, _MORE_TO_COME = int(zmq.NOBLOCK), int(zmq.SNDMORE | zmq.NOBLOCK)
_WATCHED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.DISCONNECTED


@dataclass(frozen=True)
class MeshSettings:
    """Sizes in bytes, times in seconds."""

    tcp_chunk: int = 256 * 1024
    """Between machines: on a slow link a longer frame would look as if nothing came."""
    loopback_chunk: int = 1024 * 1024
    """Over TCP between nodes of one machine that are not of one peer, where each frame costs time and no link is
    slow."""
    ipc_chunk: int = 8 * 1024 * 1024
    tcp_high_water_mark: int = 64
    """Frames that libzmq holds for one connection; more wait here, where they cost a reference each."""
    loopback_high_water_mark: int = 16
    ipc_high_water_mark: int = 8
    ipc_send_buffer: int = 320 * 1024
    waiting_bytes: int = 16 << 30
    """Payload that may wait for one node; what comes on top is dropped and counted."""
    header_bytes: int = 64 * 1024
    held_bytes: int = 16 << 20
    """ipc frames of nodes that the roster does not have yet."""
    keepalive: float = 2.0
    keepalive_timeout: float = 20.0
    """A Wi-Fi break shorter than this costs nothing: TCP repeats what was lost."""
    unreachable: float = 2.0
    """Without a handshake, or an answer to a probe, for so long: the coordinator is asked for a relay."""


def on_one_machine(own: NodeAddress | None, other: NodeAddress) -> bool:
    """Whether the way from ``own`` to ``other`` is the loopback interface, where they use TCP."""
    return own is not None and own.machine == other.machine


def tcp_hosts(own: NodeAddress | None, other: NodeAddress) -> list[str]:
    """The addresses at which ``own`` may reach ``other``: loopback on the same machine, else all that are not."""
    if on_one_machine(own, other):
        return ["127.0.0.1"]
    outside = [host for host in other.hosts if not host.startswith("127.") and host not in ("::1", "localhost")]
    hosts = (outside or other.hosts[:1] or ["127.0.0.1"])[:_MAX_HOSTS]
    return [f"[{host}]" if ":" in host else host for host in hosts]


class MeshConnection:
    """A DEALER to one incarnation of one other node. Used on the I/O thread only.

    It takes frames only while it is connected (IMMEDIATE), so what could not be given survives a refusal: a node whose
    roster is older than ours refuses our key, libzmq then gives the connection up for good, and we dial again.

    Args:
        on_connected: called when a connection came about (not over ipc, where only the first is heard of).
        on_room: called while :meth:`watch_for_room` is on and a frame can be given.

    Attributes:
        connected: over TCP, whether the handshake succeeded.
        no_way_since: while not connected: since when (monotonic seconds).
    """

    def __init__(
        self,
        loop: IOThread,
        identity: Identity,
        own: NodeAddress | None,
        address: NodeAddress,
        routing_id: str,
        settings: MeshSettings,
        on_connected: Callable[[], None],
        on_room: Callable[[], None],
    ) -> None:
        self.ipc = bool(address.mesh_ipc) and own is not None and own.peer == address.peer
        self.connected = False
        self.no_way_since = time.monotonic()
        self._loopback = on_one_machine(own, address)
        self._address = address
        self._hosts = deque(tcp_hosts(own, address))
        self._loop = loop
        self._identity = identity
        self._routing_id = routing_id
        self._settings = settings
        self._on_connected = on_connected
        self._on_room = on_room
        self._backoff = 0.02
        self._dialled_at = 0.0
        self._closed = False
        self._watching = False
        self._socket, self._monitor = self._dial()

    @property
    def endpoint(self) -> str:
        """What is dialled."""
        return self._address.mesh_ipc if self.ipc else f"tcp://{self._hosts[0]}:{self._address.mesh_port}"

    @property
    def watching(self) -> bool:
        """``on_room`` will be called."""
        return self._watching

    def give(self, header: bytes, payload: Payload) -> bool:
        """Hand one frame to libzmq; False when there is no connection or no room."""
        if self._socket.closed:  # it was refused, and is dialled again in a moment
            return False
        try:
            self._socket.send(header, _MORE_TO_COME)
            self._socket.send(payload, _NOBLOCK, copy=len(payload) <= ZERO_COPY_BYTES)
        except zmq.Again:
            return False
        return True

    def watch_for_room(self, wanted: bool) -> None:
        """Call ``on_room`` when the next frame can be given, or no more."""
        if wanted == self._watching or self._socket.closed:
            return
        self._watching = wanted
        if wanted:
            self._loop.register(self._socket, zmq.POLLOUT, lambda flags: self._on_room())
        else:
            self._loop.unregister(self._socket)

    def try_next_host(self, before: float) -> None:
        """Dial another of the machine's addresses, if it has several and this one was dialled ``before`` that time."""
        if len(self._hosts) > 1 and self._dialled_at <= before:
            self._hosts.rotate(-1)
            self._hang_up()
            self._dial_again()

    def start_over(self) -> None:
        """Drop what is on its way, and dial again."""
        if self._socket.closed:  # as in :meth:`give`
            return
        self._hang_up()
        self.no_way_since = time.monotonic()
        self._dial_again()

    def close(self) -> None:
        self._closed = True
        self._hang_up()

    def _dial(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes] | None]:
        socket = self._loop.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.AFFINITY, SENDING)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, self._high_water_mark())
        socket.setsockopt(zmq.ROUTING_ID, self._routing_id.encode())
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self.ipc:
            monitor = socket.get_monitor_socket(zmq.Event.CONNECTED)
        else:
            if "[" in self.endpoint:
                socket.setsockopt(zmq.IPV6, 1)
            dial(socket, self._identity, self._address.mesh_key)
            give_up_unacknowledged(socket)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)  # TCP repeats its first packet later and later
            keep_alive(socket, self._settings.keepalive, self._settings.keepalive_timeout)
            monitor = socket.get_monitor_socket(_WATCHED)
        self._loop.register(monitor, zmq.POLLIN, self._on_monitor)
        self._dialled_at = time.monotonic()
        socket.connect(self.endpoint)
        return socket, monitor

    def _high_water_mark(self) -> int:
        settings = self._settings
        if self.ipc:
            return settings.ipc_high_water_mark
        return settings.loopback_high_water_mark if self._loopback else settings.tcp_high_water_mark

    def _hang_up(self) -> None:
        self._loop.unregister(self._socket)
        self._watching = self.connected = False
        self._stop_monitoring()
        self._socket.close(linger=0)

    def _stop_monitoring(self) -> None:
        if self._monitor is not None:
            self._loop.unregister(self._monitor)
            self._socket.disable_monitor()
            self._monitor = None

    def _on_monitor(self, flags: int) -> None:
        while self._monitor is not None:
            try:
                told = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            event = told["event"]
            if event == zmq.Event.CONNECTED:  # over ipc; nothing else is to be heard of it
                self._stop_monitoring()
                path = self._address.mesh_ipc.removeprefix("ipc://")
                enlarge(int(told["value"]), path, self._settings.ipc_send_buffer)
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.connected, self._backoff = True, 0.02
                self._on_connected()
            elif event == zmq.Event.DISCONNECTED:
                if self.connected:
                    self.connected, self.no_way_since = False, time.monotonic()
            else:
                _log.debug("%s does not know this node yet: dialling again", self._address.name)
                self.no_way_since = time.monotonic()  # its refusal came back: there is a way
                self._hang_up()
                self._loop.call_later(self._backoff, self._dial_again)
                self._backoff = min(1.0, self._backoff * 2)

    def _dial_again(self) -> None:
        if self._closed:
            return
        with contextlib.suppress(zmq.ContextTerminated):
            self._socket, self._monitor = self._dial()
            self._on_room()


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
