"""A ROUTER that only lets known keys in, and what is known about each TCP connection to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from notebook_cluster.link.connection import LINGER, set_heartbeat
from notebook_cluster.link.frames import MAX_FRAMES, Drops
from notebook_cluster.link.tcp import UndeliveredBytes, cut, host_port, port_error, remote_end
from notebook_cluster.security import Gate, Identity, serve, user_id
from notebook_cluster.sockets import Pump, plain_context


@dataclass(frozen=True, slots=True)
class Caller:
    """One connection: who is at its other end, by CURVE, and where."""

    routing_id: bytes
    key: str
    descriptor: int
    remote: object
    """What the operating system says of the other end; None when it was gone already."""

    @property
    def address(self) -> str:
        """``IP:PORT`` of the other end, for people."""
        if not isinstance(self.remote, tuple):
            return "an unknown address"
        return host_port(*self.remote[:2])


class AuthenticatedRouter:
    """Listens at ``endpoint`` as ``identity`` and lets in the keys for which ``authorise(key)`` (called on the ZAP
    thread) is not None. ``gate`` is the context's ZAP handler when it has one already; without any, nobody comes in.

    ``on_frames(caller, frames)`` gets each message without its routing id, one frame at least; ``on_closed(caller)``
    is called once when a connection that said something is gone.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        identity: Identity,
        *,
        authorise: Callable[[str], str | None],
        on_frames: Callable[[Caller, list[zmq.Frame]], None],
        on_closed: Callable[[Caller], None],
        drops: Drops,
        gate: Gate | None,
    ) -> None:
        self._context = plain_context(context)
        self._endpoint = endpoint
        self._identity = identity
        self._authorise = authorise
        self._on_frames, self._on_closed = on_frames, on_closed
        self._drops = drops
        self._own_gate = gate is None
        self._gate = gate
        self._domain = f"link-{id(self):x}"
        self._callers: dict[bytes, Caller] = {}

    def start(self) -> int:
        """Listen; returns the port. Call inside the running loop.

        Raises:
            OSError: the port is taken or not allowed; the text names it and the way out.
        """
        router = self._context.socket(zmq.ROUTER)
        set_heartbeat(router)
        # Says when a connection takes no more, instead of dropping silently.
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        serve(router, self._identity, self._domain)
        try:
            router.bind(self._endpoint)
        except zmq.ZMQError as error:
            router.close()
            raise port_error(error, self._endpoint.rpartition(":")[2]) from None
        if self._gate is None:
            self._gate = Gate(self._context)
        self._gate.allow(self._domain, lambda key: key if self._authorise(key) is not None else None)
        self._backlog = UndeliveredBytes(self._drops)
        self._monitor = Pump(router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED), self._on_event)
        self._pump = Pump(router, self._receive, copy=False, linger=LINGER)
        return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    @property
    def closed(self) -> bool:
        return self._pump.closed

    def close(self) -> None:
        """Close all connections and stop listening."""
        if self._pump.closed:
            return
        self._pump.socket.disable_monitor()
        self._monitor.close()
        self._backlog.close()
        self._pump.close()
        self._callers.clear()
        if self._gate is not None:
            self._gate.forbid(self._domain)
            if self._own_gate:
                self._gate.close()

    def send(self, routing_id: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """Queue one message for this connection. False: it is gone, or as much as may wait for it waits already."""
        return self._pump.send([routing_id, *frames])

    def cut(self, key: str) -> None:
        """Cut every connection of ``key``."""
        for caller in [caller for caller in self._callers.values() if caller.key == key]:
            cut(caller.descriptor, caller.remote)

    def cut_caller(self, caller: Caller) -> None:
        """Cut this connection; ``on_closed`` follows."""
        cut(caller.descriptor, caller.remote)

    # ---- incoming --------------------------------------------------------------------------------------------

    def _receive(self, frames: list[zmq.Frame]) -> None:
        if not 2 <= len(frames) <= MAX_FRAMES + 2:
            self._drops.note("garbage", "dropped a message in %d parts", len(frames) - 1)
            return
        routing_id, key = frames[0].bytes, user_id(frames[1])
        caller = self._callers.get(routing_id)
        if caller is None or caller.key != key:
            # What ended before this connection was made is to be known first: descriptors and chosen ids return.
            self._monitor.read_all()
            descriptor = int(frames[1].get(zmq.SRCFD))
            caller = self._callers[routing_id] = Caller(routing_id, key, descriptor, remote_end(descriptor))
        self._backlog.delivered(caller.descriptor, frames)
        self._on_frames(caller, frames[1:])

    def _on_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)
        descriptor = event["value"]
        if event["event"] == zmq.EVENT_ACCEPTED:
            self._backlog.opened(descriptor)
            return
        self._backlog.closed(descriptor)
        for caller in [caller for caller in self._callers.values() if caller.descriptor == descriptor]:
            del self._callers[caller.routing_id]
            self._on_closed(caller)
