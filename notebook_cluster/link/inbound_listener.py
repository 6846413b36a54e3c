"""Where agents behind NAT or a firewall dial in: the coordinator listens, and the links run over what they opened."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq

from notebook_cluster.link.authenticated_router import AuthenticatedRouter, Caller
from notebook_cluster.link.connection import is_silence
from notebook_cluster.link.frames import Arrival, Drops
from notebook_cluster.protocol import ProtocolError, decode, encode
from notebook_cluster.protocol.launches import Enlist, Enlisted, NotEnlisted
from notebook_cluster.security import Gate, Identity, fingerprint

_log = logging.getLogger(__name__)


class Enlisting(Protocol):
    """Decides about agents that come with the key of a launch."""

    def is_launch(self, key: str) -> bool:
        """``key`` opens a connection only to say :class:`Enlist`."""
        ...

    def enlist(self, key: str, address: str, message: Enlist, answer: Callable[[Enlisted | NotEnlisted], None]) -> None:
        """Call ``answer`` once, now or later."""
        ...


class InboundListener:
    """Accepts the connections that agents make (:meth:`.listener.Listener.dial_out`), if ``authorise`` knows their key.

    ``authorise(key)`` returns a name for people, or None to refuse; it is called on the ZAP thread when a connection
    is made and on the loop when an agent arrives. ``on_arrival(key, "IP:PORT")`` is called on the loop at each
    (re)connection. A :class:`.dialer.Dialer` with ``reception=`` this and the agent's key then uses the connection. An
    agent has one connection: a newer one replaces it.

    Attributes:
        dropped: number of frames dropped, by cause: ``garbage``, ``foreign`` (key not trusted any more), ``unwanted``
            (no Dialer for this agent), ``endless`` (a message without end).
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        identity: Identity,
        *,
        authorise: Callable[[str], str | None],
        on_arrival: Callable[[str, str], None],
        enlisting: Enlisting | None = None,
        gate: Gate | None = None,
    ) -> None:
        """``enlisting`` hears of those whose key, which ``authorise`` knows, is that of a launch. ``gate`` is the
        context's ZAP handler when it has one already."""
        self._enlisting = enlisting
        self._authorise = authorise
        self._on_arrival = on_arrival
        self.dropped = Drops()
        self._door = AuthenticatedRouter(
            context,
            endpoint,
            identity,
            authorise=authorise,
            on_frames=self._on_frames,
            on_closed=self._on_closed,
            drops=self.dropped,
            gate=gate,
        )
        self._here: dict[str, Caller] = {}
        self._wanted: dict[str, ArrivedConnection] = {}

    def start(self) -> int:
        """Listen; returns the port. Call inside the running loop.

        Raises:
            OSError: the port is taken or not allowed; the text names it and the way out.
        """
        return self._door.start()

    def close(self) -> None:
        """Close all connections and stop listening."""
        self._door.close()
        self._here.clear()
        for connection in list(self._wanted.values()):
            connection.lost("this machine takes no more connections of agents", answered=True)

    def revoke(self, key: str) -> None:
        """Cut the connections of ``key``. Remove it from what ``authorise`` knows first, so that it cannot come
        back."""
        self._door.cut(key)
        if self._here.pop(key, None) is not None and (connection := self._wanted.get(key)) is not None:
            connection.lost(f"key {fingerprint(key)} was removed", answered=True)

    def is_here(self, key: str) -> bool:
        """True while the agent with ``key`` has a connection."""
        return key in self._here

    # ---- called by dialers -----------------------------------------------------------------------------------

    def attach(self, connection: "ArrivedConnection") -> None:
        """From now on ``connection`` gets what its agent says; an earlier one for the same agent gets no more."""
        earlier = self._wanted.get(connection.key)
        self._wanted[connection.key] = connection
        if earlier is not None:
            earlier.lost("another link to it took over", answered=True)
        # Not at once: the Dialer does not have its connection yet.
        asyncio.get_running_loop().call_soon(self._tell, connection.key)

    def detach(self, connection: "ArrivedConnection") -> None:
        if self._wanted.get(connection.key) is connection:
            del self._wanted[connection.key]

    def send(self, caller: Caller, frames: Sequence[bytes | memoryview]) -> bool:
        return self._door.send(caller.routing_id, frames)

    # ---- incoming --------------------------------------------------------------------------------------------

    def _on_frames(self, caller: Caller, frames: list[zmq.Frame]) -> None:
        if self._here.get(caller.key) == caller:
            connection = self._wanted.get(caller.key)
            if connection is None:
                self.dropped.note("unwanted", "agent %s is not in this cluster", caller.address)
            else:
                connection.received([frame.bytes for frame in frames])
            return
        if self._enlisting is not None and self._enlisting.is_launch(caller.key):
            self._enlist(self._enlisting, caller, frames)
            return
        try:
            decode(frames[0].bytes, Arrival)
        except ProtocolError as error:
            self.dropped.note("garbage", "dropped a frame of %s: %s", caller.address, error)
            return
        if (name := self._authorise(caller.key)) is None:
            self.dropped.note("foreign", "key %s at %s is not trusted", fingerprint(caller.key), caller.address)
            self._door.cut_caller(caller)
            return
        earlier = self._here.get(caller.key)
        self._here[caller.key] = caller
        if earlier is not None:
            self._door.cut_caller(earlier)
        _log.info("%.80r dialled in from %s", name, caller.address)
        self._on_arrival(caller.key, caller.address)
        self._tell(caller.key)

    def _enlist(self, enlisting: Enlisting, caller: Caller, frames: list[zmq.Frame]) -> None:
        def answer(message: Enlisted | NotEnlisted) -> None:
            self._door.send(caller.routing_id, [encode(message)])

        try:
            message = decode(frames[0].bytes, Enlist)
        except ProtocolError as error:
            self.dropped.note("garbage", "dropped a frame of %s: %s", caller.address, error)
            return
        enlisting.enlist(caller.key, caller.address, message, answer)

    def _tell(self, key: str) -> None:
        caller, connection = self._here.get(key), self._wanted.get(key)
        if caller is not None and connection is not None:
            connection.arrived(caller)

    def _on_closed(self, caller: Caller) -> None:
        if self._here.get(caller.key) != caller:
            return
        del self._here[caller.key]
        if (connection := self._wanted.get(caller.key)) is not None:
            connection.closed_by_agent()


class ArrivedConnection:
    """What a Dialer has instead of a :class:`.connection.DialledConnection`: the connection that the agent with ``key``
    made, now and whenever it comes back. Same callbacks; ``peer`` is the agent's name in them."""

    def __init__(
        self,
        reception: InboundListener,
        key: str,
        peer: str,
        *,
        on_frames: Callable[[list[bytes]], None],
        on_up: Callable[[], None],
        on_down: Callable[[str, bool], None],
    ) -> None:
        self.key = key
        self._reception = reception
        self._peer = peer
        self._on_frames, self._on_up, self._on_down = on_frames, on_up, on_down
        self._loop = asyncio.get_running_loop()
        self._caller: Caller | None = None
        self._heard = 0.0
        reception.attach(self)

    @property
    def is_up(self) -> bool:
        return self._caller is not None

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        return self._caller is not None and self._reception.send(self._caller, frames)

    def close(self) -> None:
        self._caller = None
        self._reception.detach(self)

    # ---- called by the reception -----------------------------------------------------------------------------

    def arrived(self, caller: Caller) -> None:
        """This connection is the agent's now."""
        if caller != self._caller:
            self._caller = caller
            self._heard = self._loop.time()
            self._on_up()

    def received(self, frames: list[bytes]) -> None:
        self._heard = self._loop.time()
        self._on_frames(frames)

    def closed_by_agent(self) -> None:
        """It is gone; libzmq also ends one on which nothing is heard."""
        silent = is_silence(self._loop.time() - self._heard)
        what = "fell silent" if silent else "closed its connection"
        self.lost(f"{self._peer} {what} and has not dialled in again: {way_out(self._peer)}", answered=not silent)

    def lost(self, trouble: str, *, answered: bool) -> None:
        if self._caller is not None:
            self._caller = None
            self._on_down(trouble, answered)


def way_out(peer: str) -> str:
    """What to look at when ``peer`` does not dial in."""
    return f"is `notebook-cluster share --dial` running on {peer}?"
