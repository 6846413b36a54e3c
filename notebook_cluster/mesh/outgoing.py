"""The way to one other node: a connection, the frames that wait for it, and the relay where there is no direct way."""

import logging
import time
from collections import deque
from collections.abc import Callable

from notebook_cluster.mesh.connection import MeshConnection, MeshSettings, Payload
from notebook_cluster.mesh.relay import Credit, SendRelay
from notebook_cluster.protocol import encode
from notebook_cluster.protocol.mesh import ProbeFrame
from notebook_cluster.protocol.node import NodeAddress, RelayFrame
from notebook_cluster.security import Identity
from notebook_cluster.sockets import IOThread

_log = logging.getLogger(__name__)

OWN_TICKET = 0
"""The ticket of probes that the mesh sends by itself; the doctor's tickets begin at 1."""


class Outgoing:
    """One incarnation of one other node. Used on the I/O thread only.

    Once the coordinator has allowed the relay, frames go that way while there is no connection. Where there is one and
    nothing gets through all the same (training stood still), they go that way until a probe comes back. A change of
    the way may change the order of frames.

    Attributes:
        address: of the node, as in the roster.
        dropped: frames that did not find room here.
        relaying: frames go over the links now.
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
        send_relay: SendRelay,
    ) -> None:
        self.address = address
        self.dropped = 0
        self.relaying = False
        self._settings = settings
        self._count_sent = count_sent
        self._send_relay = send_relay
        self._waiting: deque[tuple[bytes, Payload]] = deque()
        self._waiting_bytes = 0
        self._complained = False
        self._relay_allowed = False
        self._distrusted = False
        """The connection stands, but nothing seems to get through it."""
        self._probed_at: float | None = None
        self._credit = Credit()
        self._connection = MeshConnection(
            loop, identity, own, address, routing_id, settings, self._on_connected, self._flush
        )

    @property
    def endpoint(self) -> str:
        """What is dialled."""
        return self._connection.endpoint

    @property
    def waiting(self) -> int:
        """Frames not yet handed to libzmq, or on their way over the links."""
        return len(self._waiting) + self._credit.frames

    def send(self, header: bytes, payload: Payload) -> None:
        size = len(payload)
        if self._waiting and self._waiting_bytes + size > self._settings.waiting_bytes:
            self.dropped += 1
            return
        self._waiting.append((header, payload))
        self._waiting_bytes += size
        if not self._connection.watching:
            self._flush()

    def start_over(self) -> None:
        """Drop every frame that is on its way; whoever misses one asks for it."""
        self._waiting.clear()
        self._waiting_bytes = 0
        self._connection.start_over()

    def close(self) -> None:
        self._connection.close()
        self._waiting.clear()

    # ---- the relay -------------------------------------------------------------------------------------------

    def use_relay(self) -> None:
        """The coordinator allows it: because we said that there is no way, or because training stands still."""
        if self._connection.ipc:
            return
        self._relay_allowed = True
        if self._connection.connected and not self._distrusted:
            self._distrusted, self._probed_at = True, None
            self._probe(time.monotonic())
        self._choose_way(at_once=True)

    def relay_taken(self, position: int) -> None:
        self._credit.take(position)
        if self.relaying:
            self._flush()

    def coordinator_came_back(self) -> None:
        """It may have lost what it had from us: frames on their way, and our word that there is no way."""
        self._credit.forget()
        self.roster_changed()
        if self.relaying:
            self._flush()

    def roster_changed(self) -> None:
        """What was said of this way in an older generation may be said again."""
        self._complained = False

    def probe_answered(self) -> None:
        """A frame got through the connection, and the answer came back."""
        self._distrusted, self._probed_at = False, None
        self._choose_way()

    def forget_pause(self, now: float, seconds: float) -> None:
        """This process did not run for so long: in that time no connection could come about."""
        self._connection.no_way_since = min(now, self._connection.no_way_since + seconds)
        if self._probed_at is not None:
            self._probed_at = min(now, self._probed_at + seconds)

    def tick(self, now: float) -> bool:
        """True when the coordinator should hear now, for the first time, that there is no way."""
        if self._connection.ipc:
            return False
        without = now - self._connection.no_way_since
        if self._distrusted and self._connection.connected:
            self._probe(now)
            without = now - self._probed_at if self._probed_at is not None else 0.0
        elif self._connection.connected:
            return False
        if without < self._settings.unreachable:
            return False
        self._choose_way()
        complains = not self._complained and (not self._relay_allowed or self._distrusted)
        if not self._connection.connected:
            self._connection.try_next_host(now - self._settings.unreachable)
        self._complained = self._complained or complains
        return complains

    def _probe(self, now: float) -> None:
        """A whole chunk: small packets get through where large ones are lost. One at a time."""
        if self._probed_at is not None:
            return
        header = encode(ProbeFrame(ticket=OWN_TICKET, number=0))
        if self._connection.give(header, bytes(self._settings.tcp_chunk)):
            self._probed_at = now

    def _on_connected(self) -> None:
        self._probed_at = None
        self._choose_way()

    def _choose_way(self, at_once: bool = False) -> None:
        connection, was = self._connection, self.relaying
        if connection.connected:
            self.relaying = self._relay_allowed and self._distrusted
        elif not was:
            broken = at_once or time.monotonic() - connection.no_way_since >= self._settings.unreachable
            self.relaying = self._relay_allowed and broken
        if was != self.relaying:
            _log.info("frames to %s go %s", self.address.name, "over the links" if self.relaying else "directly")
            self._connection.watch_for_room(False)
            self._flush()

    # ---- sending ---------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        sent, give = 0, self._give_to_relay if self.relaying else self._connection.give
        while self._waiting:
            header, payload = self._waiting[0]
            if not give(header, payload):
                break
            self._waiting.popleft()
            self._waiting_bytes -= len(payload)
            sent += len(header) + len(payload)
        if sent:
            self._count_sent(sent)
        self._connection.watch_for_room(bool(self._waiting) and not self.relaying)

    def _give_to_relay(self, header: bytes, payload: Payload) -> bool:
        if not self._credit.is_open:
            return False
        address, position = self.address, self._credit.give(len(header) + len(payload))
        self._send_relay(
            RelayFrame(
                node=address.name, incarnation=address.incarnation, header=header, payload=bytes(payload),
                position=position,
            )
        )  # fmt: skip
        return True
