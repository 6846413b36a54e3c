"""The socket of pairing: a ROUTER that lets any key in, for as long as a code is open.

libzmq would hold any number of connections, and a message of endless parts. So :class:`PairingClients` limits how many
connections there may be, how long and how much they may say.
"""

import asyncio
import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from notebook_cluster.link.frames import Drops
from notebook_cluster.link.tcp import cut, port_error, received_bytes, remote_end
from notebook_cluster.protocol.pairing import MAX_PAIRING_BYTES
from notebook_cluster.security import Gate, serve
from notebook_cluster.security.codes import PAIRING_IDENTITY
from notebook_cluster.sockets import Pump, plain_context

_LAST_WORDS = 1.0
"""Seconds that guests have to read the last answer and leave before the connections are closed."""
_LOOK = 0.02
_QUEUE = 16
"""Messages that wait for or from one guest: a guest of ours has one under way."""
_REBIND_SECONDS = 1.0
T = TypeVar("T")


class PairingPort:
    """Listens at ``endpoint`` from :meth:`listen` to :meth:`close`; each time at the same port when it is free.

    ``on_frames`` gets ``[routing id, *parts]``. ``gate`` is the context's ZAP handler when it has one already.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        gate: Gate | None,
        on_frames: Callable[[list[Any]], None],
        drops: Drops,
    ) -> None:
        self._context = plain_context(context)
        self._place, _, port = endpoint.rpartition(":")
        self._any_port = port == "0"
        self._was_bound = False
        self._pump: Pump | None = None
        self._farewell: asyncio.TimerHandle | None = None
        self._gate = gate
        self._own_gate = gate is None
        self._domain = f"pairing-{id(self):x}"
        self._on_frames = on_frames
        self._drops = drops
        self.number = int(port)

    def listen(self) -> None:
        """Bind; :attr:`number` is the port then. Call inside the running loop.

        Raises:
            OSError: the port is taken or not allowed; the text names it and the way out.
        """
        if self._pump is not None and self._gate is not None:
            self._stay()
            self._gate.allow(self._domain, _anybody)
            return
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_PAIRING_BYTES)
        router.setsockopt(zmq.SNDHWM, _QUEUE)
        router.setsockopt(zmq.RCVHWM, _QUEUE)
        router.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        router.setsockopt(zmq.IPV6, "[" in self._place)
        serve(router, PAIRING_IDENTITY, self._domain)
        try:
            self.number = self._bind(router)
            if self._gate is None:
                self._gate = _patiently(lambda: Gate(self._context))
        except zmq.ZMQError as error:
            router.close()
            raise port_error(error, self.number) from None
        self._gate.allow(self._domain, _anybody)
        self._was_bound = True
        self._loop = asyncio.get_running_loop()
        self._clients = PairingClients(router, self._loop.time, self._drops)
        self._pump = Pump(router, self._on_frames, copy=False)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue one message, the routing id first. False: that guest is gone, or does not read."""
        return self._pump is not None and self._pump.send(frames)

    def look(self) -> None:
        """End connections that stayed or said too much; call a few times a second."""
        self._clients.look()

    def leave(self) -> None:
        """Let nobody in any more, and close as soon as those who are connected have left, in a second at most.

        Closing at once would lose what was just sent, whatever ZMQ_LINGER says: both sides must know that they paired.
        """
        if self._pump is not None and self._gate is not None:
            self._gate.forbid(self._domain)
            self._farewell = self._loop.call_later(_LOOK, self._see_off, self._loop.time() + _LAST_WORDS)

    def close(self) -> None:
        """Stop listening and close all connections now. May be called again."""
        if self._pump is None:
            return
        self._stay()
        self._clients.close()
        self._pump.close()
        self._pump = None
        if self._gate is not None:
            self._gate.forbid(self._domain)
            if self._own_gate:
                self._gate.close()
                self._gate = None

    def _stay(self) -> None:
        if self._farewell is not None:
            self._farewell.cancel()
            self._farewell = None

    def _see_off(self, deadline: float) -> None:
        if len(self._clients) == 0 or self._loop.time() >= deadline:
            self.close()
        else:
            self._farewell = self._loop.call_later(_LOOK, self._see_off, deadline)

    def _bind(self, router: zmq.Socket[Any]) -> int:
        address = f"{self._place}:{self.number}"
        try:
            if self._was_bound:
                _patiently(lambda: router.bind(address))
            else:
                router.bind(address)
        except zmq.ZMQError:
            if not self._any_port or not self._was_bound:
                raise
            router.bind(f"{self._place}:0")
        return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def source_of(frame: zmq.Frame) -> str:
    """IP address of the sender of ``frame``, which was received with ``copy=False``."""
    try:
        address = ipaddress.ip_address(str(frame.get("Peer-Address")).partition("%")[0])
    except (zmq.ZMQError, ValueError):
        return "unknown"
    return str(getattr(address, "ipv4_mapped", None) or address)


def _anybody(key: str) -> str:
    """The check of the ZAP handler: the key is one that the guest made for this connection."""
    return key


def _patiently(bind: Callable[[], T]) -> T:
    """Call ``bind`` until the address is free, for a second at most: libzmq closes a little later than it says.

    Raises:
        zmq.ZMQError: the address stays taken.
    """
    deadline = time.monotonic() + _REBIND_SECONDS
    while True:
        try:
            return bind()
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


MAX_CLIENTS = 256
MAX_OF_ONE_SOURCE = 32
MAX_SECONDS = 30.0
"""Pairing takes less than one; a guest that waits for its turn stays connected meanwhile."""
MAX_RECEIVED = 64 * 1024
"""Bytes from one connection, encryption included; pairing takes about 1 KiB."""


@dataclass(frozen=True, slots=True)
class _Client:
    remote: Any
    since: float


class PairingClients:
    """Watches the connections to ``server``, a bound zmq socket; call :meth:`look` a few times a second.

    Connections that it ends are counted in ``drops`` as ``too many``, ``too long`` or ``too much``.
    """

    def __init__(self, server: zmq.Socket[Any], clock: Callable[[], float], drops: Drops) -> None:
        self._server = server
        self._clock = clock
        self._drops = drops
        self._port = int(server.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._here: dict[int, _Client] = {}
        self._monitor = Pump(server.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED), self._on_event)

    def __len__(self) -> int:
        return len(self._here)

    def close(self) -> None:
        """Stop watching; call before the server is closed."""
        if not self._monitor.closed:
            self._server.disable_monitor()
            self._monitor.close()

    def look(self) -> None:
        """End the connections that stayed or said too much."""
        now = self._clock()
        for descriptor, client in list(self._here.items()):
            if now - client.since > MAX_SECONDS:
                self._end(descriptor, client, "too long")
            elif received_bytes(descriptor) > MAX_RECEIVED:
                self._end(descriptor, client, "too much")

    def _on_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)
        descriptor = int(event["value"])
        if event["event"] == zmq.EVENT_DISCONNECTED:
            self._here.pop(descriptor, None)
            return
        remote = remote_end(descriptor, self._port)
        if remote is None:
            return
        client = _Client(remote, self._clock())
        same = sum(other.remote[0] == remote[0] for other in self._here.values())
        if same >= MAX_OF_ONE_SOURCE or len(self._here) >= MAX_CLIENTS:
            self._end(descriptor, client, "too many")
        else:
            self._here[descriptor] = client

    def _end(self, descriptor: int, client: _Client, cause: str) -> None:
        """Shut the connection down, unless the descriptor means another one by now."""
        self._here.pop(descriptor, None)
        if remote_end(descriptor, self._port) == client.remote:
            self._drops.note(cause, "ended a connection of %s to the pairing port: %s", client.remote[0], cause)
            cut(descriptor, client.remote)
