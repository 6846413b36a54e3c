"""All sockets between one node and the others: who is in, who may send, what is counted."""

import contextlib
import logging
import socket as sockets
from collections import deque
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from notebook_cluster.mesh.connection import MeshSettings, Payload, on_one_machine
from notebook_cluster.mesh.listening import Listening
from notebook_cluster.mesh.measuring import Done, PairMeasurements
from notebook_cluster.mesh.outgoing import OWN_TICKET, Outgoing
from notebook_cluster.mesh.relay import RelayAcknowledgements, SendRelay
from notebook_cluster.protocol import ProtocolError, decode, encode
from notebook_cluster.protocol.awake import AwakeClock
from notebook_cluster.protocol.measuring import MeasurePair, PairMeasured, Way
from notebook_cluster.protocol.mesh import MeshHeader, ProbeFrame
from notebook_cluster.protocol.node import NodeAddress, RelayFrame, RelayTaken, Roster, UseRelay
from notebook_cluster.protocol.wire import Message
from notebook_cluster.security import new_identity
from notebook_cluster.sockets import IOThread

_log = logging.getLogger(__name__)

OnFrame = Callable[[str, MeshHeader, memoryview], None]
OnUnreachable = Callable[[str, int, str], None]
_TICK = 0.25
"""Seconds."""
_MOST_FORMER = 100
_FRAME_COST = 512
"""Bytes that a held frame may take beside header and payload."""
_MAX_ANSWERS_WAITING = 1000
"""Probes of a node to which so many frames wait are not answered."""


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

    It listens on TCP, where the roster's keys come in, and for nodes of the same peer on ipc. To each other node there
    is one way out, dialled when the roster brings a node of another machine (so that it is known early whether it can
    be reached), else at the first send. Where it cannot, the coordinator may order that frames go over the links. A
    frame is dropped and counted, never an error, when its sender is not in the roster, its header is unknown or over
    the limits.

    Attributes:
        key: CURVE public key of this kernel (made anew each time), port, ipc: what NodeHello tells the others.
        on_frame: called on the I/O thread with (sender, header, payload); the payload's memory may be kept as it is.
        on_unreachable: called on the I/O thread with (node, incarnation, endpoint) when no connection came about for
            2 s; once in a generation.
        send_relay: takes the RelayFrame and RelayTaken messages for the coordinator, in order.
        bytes_sent, bytes_received: counters of this node.
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
        self.on_unreachable: OnUnreachable = lambda node, incarnation, endpoint: None
        self.send_relay: SendRelay = lambda message: None
        self.bytes_sent = 0
        self.bytes_received = 0
        self._dropped = 0
        self._loop = loop
        self._settings = settings or MeshSettings()
        self._identity = new_identity()
        self._outgoing: dict[str, Outgoing] = {}
        self._generation = -1
        self._taken = RelayAcknowledgements(self._to_relay)
        self._measuring = PairMeasurements(self._send)
        self._nodes: dict[str, NodeAddress] = {}
        self._users: dict[str, str] = {}
        self._former: dict[str, str] = {}
        """Keys of nodes that were in a roster before and are not in this one -> name."""
        self._early: deque[tuple[str, bytes, bytes]] = deque()
        self._early_bytes = 0
        self._clock = AwakeClock()
        self._listening = loop.call(lambda: self._listen(host, socket_directory))
        self.port, self.ipc = self._listening.port, self._listening.ipc
        loop.at_close(self._close)
        loop.every(_TICK, self._tick)

    @property
    def key(self) -> str:
        return self._identity.public_key

    @property
    def dropped(self) -> int:
        """Frames dropped so far."""
        here = sum(outgoing.dropped for outgoing in list(self._outgoing.values()))
        return self._dropped + self._listening.dropped + here

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

    def call_soon(self, callback: Callable[[], None], *, wake: bool = True) -> None:
        """Run ``callback`` on the I/O thread, see :meth:`.IOThread.call_soon`."""
        self._loop.call_soon(callback, wake=wake)

    def chunk_bytes(self, node: str) -> int:
        """Largest payload of one frame to ``node``: 256 KiB over TCP with CURVE (1 MiB on the same machine), 8 MiB over
        ipc."""
        own, other = self._nodes.get(self.name), self._nodes.get(node)
        same_peer = own is not None and other is not None and own.peer == other.peer and bool(other.mesh_ipc)
        return self._settings.ipc_chunk if same_peer or node == self.name else self._tcp_chunk(other)

    def _tcp_chunk(self, other: NodeAddress | None) -> int:
        near = other is not None and on_one_machine(self._nodes.get(self.name), other)
        return self._settings.loopback_chunk if near else self._settings.tcp_chunk

    def ipc_path(self, node: str) -> str:
        """Where the ipc socket of ``node`` (also of this node) is; empty unless it is on this node's peer."""
        own, other = self._nodes.get(self.name), self._nodes.get(node)
        if own is None or other is None or own.peer != other.peer or not other.mesh_ipc.startswith("ipc://"):
            return ""
        return other.mesh_ipc.removeprefix("ipc://")

    def start_over(self, node: str) -> None:
        """Drop the connection to ``node`` with every frame on its way there, and make a new one. On the I/O thread."""
        outgoing = self._outgoing.get(node)
        if outgoing is not None:
            outgoing.start_over()

    def waiting(self, node: str) -> int:
        """Frames for ``node`` that wait for a connection or for room, or are on their way over the links."""
        outgoing = self._outgoing.get(node)
        return outgoing.waiting if outgoing is not None else 0

    def relayed(self, node: str) -> bool:
        """Whether frames to ``node`` go over the links now."""
        outgoing = self._outgoing.get(node)
        return outgoing is not None and outgoing.relaying

    # ---- on the I/O thread: what the coordinator says

    def use_relay(self, message: UseRelay) -> None:
        """Frames to ``message.node`` may go over the links."""
        outgoing = self._way_to(message.node)
        if outgoing is not None and outgoing.address.incarnation == message.incarnation:
            outgoing.use_relay()

    def relay_taken(self, message: RelayTaken) -> None:
        """The receiver has taken frames that went over the links."""
        outgoing = self._outgoing.get(message.node)
        if outgoing is not None and outgoing.address.incarnation == message.incarnation:
            outgoing.relay_taken(message.total)

    def relay_frame(self, message: RelayFrame) -> None:
        """A frame of another node came over the links: the same checks as on a socket."""
        address, sizes = self._nodes.get(message.node), (len(message.header), len(message.payload))
        if (
            address is None
            or address.incarnation != message.incarnation
            or sizes[0] > self._settings.header_bytes
            or sizes[1] > self._tcp_chunk(address)
        ):
            self._dropped += 1
            return
        self._taken.count(message)
        self._deliver(f"{message.node}/{message.incarnation}", message.header, memoryview(message.payload), hold=False)

    def measure(self, order: MeasurePair, done: Done) -> None:
        """Measure the way to ``order.node``; ``done`` gets the result, or the reason why there is none."""
        node = order.node
        if node == self.name or node not in self._nodes:
            done(PairMeasured(ticket=order.ticket, node=node, error=f"{node!r} is not another node of this cluster"))
            return

        def named(found: PairMeasured) -> None:
            direct: Way = "ipc" if self.ipc_path(node) else "tcp+curve"
            done(replace(found, way="relay" if self.relayed(node) else direct))

        self._measuring.start(order, self.chunk_bytes(node), named)

    def close(self) -> None:
        """Close every socket and remove the ipc file; the loop goes on."""
        with contextlib.suppress(TimeoutError):
            self._loop.call(self._close)

    def _listen(self, host: str, directory: Path | None) -> Listening:
        def user_of(key: str) -> str | None:
            return self._users.get(key)

        def on_frames(sender: str, header: memoryview, payload: memoryview, from_ipc: bool) -> None:
            self._deliver(sender, header, payload, hold=from_ipc)

        def why_not(key: str) -> str:
            if name := self._former.get(key):
                return f"{name} is out of the cluster, and let in again when it is back"
            # Also one that was told of this node before this node was told of it: nobody's cell prints that.
            return "no node that the coordinator has named here so far"

        return Listening(self._loop, self._identity, self._settings, host, directory, user_of, on_frames, why_not)

    def _close(self) -> None:
        for outgoing in self._outgoing.values():
            outgoing.close()
        self._outgoing.clear()
        self._listening.close()

    def _send(self, node: str, header: MeshHeader, payload: Payload) -> None:
        outgoing = self._way_to(node)
        if outgoing is None:
            self._dropped += 1
        else:
            outgoing.send(encode(header), payload)

    def _way_to(self, node: str) -> Outgoing | None:
        """The way to ``node``, which is dialled when it was not; None when it is not in the roster."""
        address, outgoing = self._nodes.get(node), self._outgoing.get(node)
        if outgoing is None and address is not None and node != self.name:
            outgoing = self._outgoing[node] = Outgoing(
                self._loop, self._identity, self._nodes.get(self.name), address, f"{self.name}/{self.incarnation}",
                self._settings, self._count_sent, self._to_relay,
            )  # fmt: skip
        return outgoing

    def _count_sent(self, count: int) -> None:
        self.bytes_sent += count

    def _to_relay(self, message: Message) -> None:
        self.send_relay(message)

    def _set_roster(self, roster: Roster) -> None:
        self._former |= {node.mesh_key: node.name for node in self._nodes.values()}
        self._nodes = {node.name: node for node in roster.nodes}
        for node in roster.nodes:
            self._former.pop(node.mesh_key, None)
        for key in list(self._former)[:-_MOST_FORMER]:
            del self._former[key]
        self._users = {node.mesh_key: f"{node.name}/{node.incarnation}" for node in roster.nodes}
        for name, outgoing in list(self._outgoing.items()):
            address = self._nodes.get(name)
            known = outgoing.address
            if address is None or (address.incarnation, address.mesh_key) != (known.incarnation, known.mesh_key):
                outgoing.close()
                self._dropped += outgoing.dropped
                del self._outgoing[name]
            elif roster.generation == self._generation:  # said again by a coordinator that was restarted
                outgoing.coordinator_came_back()
            else:
                outgoing.roster_changed()
        self._generation = roster.generation
        self._taken.keep({node.name: node.incarnation for node in roster.nodes})
        own = self._nodes.get(self.name)
        for node in roster.nodes:
            if own is not None and node.machine != own.machine:
                self._way_to(node.name)
        early, self._early, self._early_bytes = self._early, deque(), 0
        for user, header, payload in early:
            self._deliver(user, header, memoryview(payload), hold=False)

    def _deliver(self, user: str, header: bytes | memoryview, payload: memoryview, *, hold: bool) -> None:
        name, _, incarnation = user.rpartition("/")
        address = self._nodes.get(name)
        if address is None or str(address.incarnation) != incarnation:
            size = len(header) + len(payload) + _FRAME_COST
            if hold and address is None and self._early_bytes + size <= self._settings.held_bytes:
                # A joiner of this peer that has the new roster before us; the roster decides when it comes.
                self._early.append((user, bytes(header), bytes(payload)))
                self._early_bytes += size
            else:
                self._dropped += 1
            return
        try:
            decoded = decode(header, MeshHeader)
        except ProtocolError as error:
            self._drop(name, error)
            return
        self.bytes_received += len(header) + len(payload)
        try:
            if isinstance(decoded, ProbeFrame):
                self._on_probe(name, decoded)
            else:
                self.on_frame(name, decoded, payload)
        except Exception as error:
            self._drop(name, error)

    def _drop(self, sender: str, error: Exception) -> None:
        """Count it; the first of many is logged, with fewer and fewer of those that follow."""
        self._dropped += 1
        if self._dropped & (self._dropped - 1) == 0:
            _log.warning("a mesh frame of %s was dropped: %s: %s", sender, type(error).__name__, error)

    def _on_probe(self, sender: str, header: ProbeFrame) -> None:
        if not header.answer:
            if self.waiting(sender) < _MAX_ANSWERS_WAITING:
                self._send(sender, ProbeFrame(ticket=header.ticket, number=header.number, answer=True), b"")
            else:
                self._dropped += 1
        elif header.ticket == OWN_TICKET:
            if (outgoing := self._outgoing.get(sender)) is not None:
                outgoing.probe_answered()
        else:
            self._measuring.answered(sender, header)

    def _tick(self, now: float) -> None:
        self._clock.read(now)
        for name, outgoing in self._outgoing.items():
            outgoing.forget_pause(now, self._clock.pause)
            endpoint = outgoing.endpoint
            if outgoing.tick(now):
                self.on_unreachable(name, outgoing.address.incarnation, endpoint)
        self._taken.tell()
        self._measuring.tick(now, self._why_no_answer)

    def _why_no_answer(self, node: str) -> str:
        outgoing = self._outgoing.get(node)
        if outgoing is None:
            return f"{node!r} left the cluster"
        way = "over the links" if outgoing.relaying else f"at {outgoing.endpoint}"
        return f"{self.name} got no answer from {node} {way}"
