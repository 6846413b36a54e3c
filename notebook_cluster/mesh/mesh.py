"""All sockets between one node and the others: who is in, who may send, what is counted."""

import contextlib
import logging
import os
import secrets
import socket as sockets
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq

from notebook_cluster.mesh.io_thread import IOThread
from notebook_cluster.mesh.outgoing import MeshSettings, Outgoing, Payload
from notebook_cluster.protocol import ProtocolError, decode, encode
from notebook_cluster.protocol.mesh import MeshHeader
from notebook_cluster.protocol.node import NodeAddress, Roster
from notebook_cluster.security import Gate, new_identity, serve, user_id

_log = logging.getLogger(__name__)

OnFrame = Callable[[str, MeshHeader, memoryview], None]
OnUnreachable = Callable[[str, str], None]
_DOMAIN = "mesh"
_MAX_IPC_PATH = 100
_FRAMES_PER_TURN = 64


def free_port() -> int:
    """A TCP port that is free now on all interfaces of this machine."""
    with sockets.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _as_bytes_view(payload: Payload) -> Payload:
    """``payload`` as a flat view of bytes, so that its len() is its size."""
    view = memoryview(payload)
    if view.nbytes == 0:
        return b""
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class Mesh:
    """The mesh end of one node. ``send`` and ``set_roster`` may be called from any thread.

    Two ROUTERs listen: one on TCP with CURVE, where the roster's keys come in and a frame's sender is its ZAP User-Id,
    and one on ipc in a 0700 folder for nodes of the same peer, where the folder is the lock and the sender is the
    routing id. To each other node there is one DEALER, made at the first send. A frame is dropped and counted, never
    an error, when its sender is not in the roster, its header is unknown or over the limits.

    Attributes:
        key: CURVE public key of this kernel (made anew each time), port, ipc: what NodeHello tells the others.
        on_frame: called on the I/O thread with (sender, header, payload); the payload is only valid during the call.
        on_unreachable: called on the I/O thread, once, with (node, endpoint) when frames found no way for 5 s.
        bytes_sent, bytes_received, dropped: counters of this node.
    """

    def __init__(
        self,
        loop: IOThread,
        name: str,
        incarnation: int,
        *,
        socket_directory: Path | None = None,
        host: str = "0.0.0.0",
        settings: MeshSettings | None = None,
        on_frame: OnFrame | None = None,
    ) -> None:
        """Bind the sockets. ``loop`` runs already. Without ``socket_directory`` (0700), or where the OS has no ipc, all
        frames go over TCP."""
        self.name = name
        self.incarnation = incarnation
        self.on_frame: OnFrame = on_frame or (lambda sender, header, payload: None)
        self.on_unreachable: OnUnreachable = lambda node, endpoint: None
        self.bytes_sent = 0
        self.bytes_received = 0
        self.dropped = 0
        self.port = 0
        self.ipc = ""
        self._loop = loop
        self._settings = settings or MeshSettings()
        self._identity = new_identity()
        self._outgoing: dict[str, Outgoing] = {}
        self._nodes: dict[str, NodeAddress] = {}
        self._users: dict[str, str] = {}
        self._early: deque[tuple[str, bytes, bytes]] = deque()
        self._early_bytes = 0
        self._routers: list[zmq.Socket[bytes]] = []
        loop.call(lambda: self._bind(host, socket_directory))
        loop.at_close(self._close)
        loop.every(1.0, self._tick)

    @property
    def key(self) -> str:
        return self._identity.public_key

    def send(self, node: str, header: MeshHeader, payload: Payload = b"") -> None:
        """Send one frame, in order with those before it. ``payload`` (at most ``chunk_bytes(node)``) is not copied: it
        must not change any more. Frames to a node that is not in the roster are dropped and counted."""
        if not isinstance(payload, bytes):
            payload = _as_bytes_view(payload)
        if node == self.name:
            self._loop.call_soon(lambda: self.on_frame(self.name, header, memoryview(payload)))
        elif self._loop.on_loop():
            self._send(node, header, payload)
        else:
            self._loop.call_soon(lambda: self._send(node, header, payload))

    def set_roster(self, roster: Roster) -> None:
        """Who is in from now on: others are cut off, nodes with a new incarnation are dialled anew."""
        if self._loop.on_loop():
            self._set_roster(roster)
        else:
            self._loop.call_soon(lambda: self._set_roster(roster))

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` on the I/O thread."""
        self._loop.call_soon(callback)

    def chunk_bytes(self, node: str) -> int:
        """Largest payload of one frame to ``node``: 256 KiB over TCP with CURVE, 1 MiB over ipc."""
        own, other = self._nodes.get(self.name), self._nodes.get(node)
        same_peer = own is not None and other is not None and own.peer == other.peer and bool(other.mesh_ipc)
        return self._settings.ipc_chunk if same_peer or node == self.name else self._settings.tcp_chunk

    def waiting(self, node: str) -> int:
        """Frames for ``node`` that wait for a connection or for room."""
        outgoing = self._outgoing.get(node)
        return outgoing.waiting if outgoing is not None else 0

    def close(self) -> None:
        """Close every socket and remove the ipc file; the loop goes on."""
        with contextlib.suppress(TimeoutError):
            self._loop.call(self._close)

    def _bind(self, host: str, directory: Path | None) -> None:
        self._gate = Gate(self._loop.context)
        self._gate.allow(_DOMAIN, lambda key: self._users.get(key))
        tcp = self._router()
        serve(tcp, self._identity, _DOMAIN)
        tcp.setsockopt(zmq.HEARTBEAT_IVL, int(self._settings.heartbeat * 1000))
        tcp.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._settings.heartbeat_timeout * 1000))
        self.port = tcp.bind_to_random_port(f"tcp://{host}")
        self._routers.append(tcp)
        self._loop.register(tcp, zmq.POLLIN, lambda flags: self._receive(tcp, encrypted=True))
        if directory is None or not zmq.has("ipc"):
            return
        path = directory / f"m-{secrets.token_hex(4)}"
        if len(os.fsencode(path)) > _MAX_IPC_PATH:
            _log.warning("%s is too long for an ipc socket: nodes of this peer talk over TCP", path)
            return
        ipc = self._router()
        self.ipc = f"ipc://{path}"
        ipc.bind(self.ipc)
        self._routers.append(ipc)
        self._loop.register(ipc, zmq.POLLIN, lambda flags: self._receive(ipc, encrypted=False))

    def _router(self) -> zmq.Socket[bytes]:
        router = self._loop.context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.RCVHWM, self._settings.high_water_mark)
        router.setsockopt(zmq.MAXMSGSIZE, max(self._settings.ipc_chunk, self._settings.tcp_chunk))
        return router

    def _close(self) -> None:
        for outgoing in self._outgoing.values():
            outgoing.close()
        self._outgoing.clear()
        for router in self._routers:
            self._loop.unregister(router)
            router.close(linger=0)
        self._routers = []
        self._gate.close()
        if self.ipc:
            Path(self.ipc.removeprefix("ipc://")).unlink(missing_ok=True)

    def _send(self, node: str, header: MeshHeader, payload: Payload) -> None:
        address = self._nodes.get(node)
        if address is None:
            self.dropped += 1
            return
        outgoing = self._outgoing.get(node)
        if outgoing is None:
            own, routing_id = self._nodes.get(self.name), f"{self.name}/{self.incarnation}"
            outgoing = self._outgoing[node] = Outgoing(
                self._loop, self._identity, own, address, routing_id, self._settings, self._count_sent
            )
        outgoing.send(encode(header), payload)

    def _count_sent(self, count: int) -> None:
        self.bytes_sent += count

    def _set_roster(self, roster: Roster) -> None:
        self._nodes = {node.name: node for node in roster.nodes}
        self._users = {node.mesh_key: f"{node.name}/{node.incarnation}" for node in roster.nodes}
        for name, outgoing in list(self._outgoing.items()):
            address = self._nodes.get(name)
            known = outgoing.address
            if address is None or (address.incarnation, address.mesh_key) != (known.incarnation, known.mesh_key):
                outgoing.close()
                self.dropped += outgoing.dropped
                del self._outgoing[name]
        early, self._early, self._early_bytes = self._early, deque(), 0
        for user, header, payload in early:
            self._deliver(user, header, memoryview(payload), hold=False)

    def _receive(self, router: zmq.Socket[bytes], *, encrypted: bool) -> None:
        for _ in range(_FRAMES_PER_TURN):
            try:
                frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[1]) > self._settings.header_bytes:
                self.dropped += 1
                continue
            user = user_id(frames[2]) if encrypted else frames[0].bytes.decode("utf-8", "replace")
            self._deliver(user, frames[1].buffer, frames[2].buffer, hold=not encrypted)

    def _deliver(self, user: str, header: bytes | memoryview, payload: memoryview, *, hold: bool) -> None:
        name, _, incarnation = user.rpartition("/")
        address = self._nodes.get(name)
        if address is None or str(address.incarnation) != incarnation:
            if hold and address is None and self._early_bytes + len(payload) <= self._settings.held_bytes:
                # A joiner of this peer that has the new roster before us; the roster decides when it comes.
                self._early.append((user, bytes(header), bytes(payload)))
                self._early_bytes += len(payload) + len(header)
            else:
                self.dropped += 1
            return
        try:
            decoded = decode(header, MeshHeader)
        except ProtocolError as error:
            self.dropped += 1
            _log.warning("a mesh frame of %s was dropped: %s", name, error)
            return
        self.bytes_received += len(header) + len(payload)
        try:
            self.on_frame(name, decoded, payload)
        except Exception:
            self.dropped += 1
            _log.exception("a mesh frame of %s was not usable", name)

    def _tick(self, now: float) -> None:
        for name, outgoing in self._outgoing.items():
            self.dropped, outgoing.dropped = self.dropped + outgoing.dropped, 0
            if outgoing.seconds_stuck(time.monotonic()) > self._settings.unreachable and not outgoing.unreachable_said:
                outgoing.unreachable_said = True
                self.on_unreachable(name, outgoing.endpoint)
