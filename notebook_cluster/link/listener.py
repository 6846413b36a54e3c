"""The side of a link that is connected to: an agent, one :class:`Listener` for all its coordinators."""

import asyncio
import logging
import os
import socket as sockets
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from notebook_cluster.link.connection import set_heartbeat
from notebook_cluster.link.frames import AnyHeader, Beat, Header, Hello, Refusal
from notebook_cluster.link.pump import Pump, plain_context
from notebook_cluster.link.session import Session
from notebook_cluster.link.settings import LinkSettings
from notebook_cluster.protocol import PROTOCOL_VERSION, ProtocolError, decode, encode
from notebook_cluster.protocol.names import is_name
from notebook_cluster.protocol.version import mismatch
from notebook_cluster.security import Gate, Identity, fingerprint, serve, user_id

_LINGER = 100
_MAX_SENDER = 200
_log = logging.getLogger(__name__)


class Listener:
    """Accepts the links of coordinators whose key ``authorise`` knows.

    ``authorise(key)`` returns a name for people, or None to refuse; it is called on the ZAP thread when a connection
    is made and on the loop when a session is asked for. ``on_session(session)`` is called on the loop for each new
    cluster, before its first message. ``gate`` is the context's ZAP handler when it has one already.

    Attributes:
        sessions: cluster id -> Session.
        dropped: number of frames dropped, by cause (``garbage``, ``stale``, ``foreign``, ``undecodable``), and of
            ``gaps`` seen.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        identity: Identity,
        *,
        authorise: Callable[[str], str | None],
        on_session: Callable[[Session], None],
        settings: LinkSettings | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._context = plain_context(context)
        self._endpoint = endpoint
        self._identity = identity
        self._authorise = authorise
        self._on_session = on_session
        self.settings = settings or LinkSettings()
        self._own_gate = gate is None
        self._gate = gate
        self._domain = f"link-{id(self):x}"
        self.sessions: dict[str, Session] = {}
        self.dropped: Counter[str] = Counter()
        self._connections: dict[bytes, tuple[str, int, object]] = {}
        """Routing id -> (key, file descriptor, remote address) of the connections that said Hello."""

    def start(self) -> int:
        """Listen; returns the port. Call inside the running loop.

        Raises:
            OSError: the port is taken or not allowed; the text names it and the way out.
        """
        self._loop = asyncio.get_running_loop()
        router = self._context.socket(zmq.ROUTER)
        set_heartbeat(router)
        serve(router, self._identity, self._domain)
        try:
            router.bind(self._endpoint)
        except zmq.ZMQError as error:
            router.close()
            port = self._endpoint.rpartition(":")[2]
            cause = "is taken by another program" if error.errno == zmq.EADDRINUSE else f"cannot be used ({error})"
            raise OSError(error.errno, f"port {port} {cause}: choose another one with --port") from None
        if self._gate is None:
            self._gate = Gate(self._context)
        self._gate.allow(self._domain, lambda key: key if self._authorise(key) is not None else None)
        self._pump = Pump(router, self._on_frames, copy=False, linger=_LINGER)
        self._ticker = self._loop.call_later(self.settings.heartbeat / 2, self._tick)
        return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    async def close(self, *, flush: float = 1.0) -> None:
        """Wait at most ``flush`` seconds until connected coordinators have everything, then close all connections."""
        if self._pump.closed:
            return
        connected = [session for session in self.sessions.values() if session.condition == "connected"]
        if connected and flush > 0:
            await asyncio.gather(*(session.flushed(flush) for session in connected))
        self._ticker.cancel()
        for session in self.sessions.values():
            session.conversation.close()
        self.sessions.clear()
        self._pump.close()
        if self._gate is not None:
            self._gate.forbid(self._domain)
            if self._own_gate:
                self._gate.close()

    def revoke(self, key: str) -> None:
        """End the sessions of ``key`` and cut its connections. Remove it from what ``authorise`` knows first, so that
        it cannot come back."""
        for routing_id, (owner, descriptor, address) in list(self._connections.items()):
            if owner == key:
                del self._connections[routing_id]
                _cut(descriptor, address)
        for session in [session for session in self.sessions.values() if session.key == key]:
            session.close()
            session.become("refused", f"key {fingerprint(key)} was removed")

    # ---- called by sessions ----------------------------------------------------------------------------------

    def transmit(self, routing_id: bytes, frames: Sequence[bytes | memoryview]) -> None:
        self._pump.send([routing_id, *frames])

    def forget(self, session: Session) -> None:
        if self.sessions.get(session.cluster) is session:
            del self.sessions[session.cluster]
            self._connections.pop(session.routing_id, None)

    # ---- incoming --------------------------------------------------------------------------------------------

    def _on_frames(self, frames: list[zmq.Frame]) -> None:
        routing_id = frames[0].bytes
        try:
            if len(frames) < 2:
                raise ProtocolError("no header")
            header: Header = decode(frames[1].bytes, AnyHeader)
            key = user_id(frames[1])
            if isinstance(header, Hello):
                self._hello(header, routing_id, key, frames[1])
                return
            session = self.sessions.get(header.cluster)
            if session is None or (header.epoch, header.session) != (session.epoch, session.number):
                self.dropped["stale"] += 1
            elif key != session.key or routing_id != session.routing_id:
                self.dropped["foreign"] += 1
            else:
                session.last_heard = self._loop.time()
                session.become("connected", "")
                session.conversation.handle(header, [frame.bytes for frame in frames[2:]])
                if isinstance(header, Beat):
                    session.conversation.beat(echo=header.time)
        except ProtocolError as error:
            self.dropped["garbage"] += 1
            _log.warning("dropped a frame: %s", error)

    def _hello(self, hello: Hello, routing_id: bytes, key: str, frame: zmq.Frame) -> None:
        session = self.sessions.get(hello.cluster)
        reason = self._objection(hello, session, key)
        if reason is not None:
            _log.warning("refused cluster %.80r of key %s: %s", hello.cluster_name, fingerprint(key), reason)
            refusal = Refusal(hello.cluster, hello.epoch, hello.session, PROTOCOL_VERSION, reason)
            self.transmit(routing_id, [encode(refusal)])
            return
        if session is not None and session.is_older(hello):
            self.dropped["stale"] += 1
            return
        if session is not None and session.routing_id != routing_id:
            self._connections.pop(session.routing_id, None)
        self._remember(routing_id, key, frame)
        now = self._loop.time()
        fresh = session is None
        if session is None:
            session = self.sessions[hello.cluster] = Session(self, hello, key, now)
            self._on_session(session)
        session.last_heard = now
        session.resume(hello, routing_id, fresh=fresh)
        session.become("connected", "")

    def _objection(self, hello: Hello, session: Session | None, key: str) -> str | None:
        """Why there is no session for ``hello``, or None."""
        if (versions := mismatch(hello.sender[:_MAX_SENDER], hello.protocol)) is not None:
            return versions
        if not is_name(hello.cluster) or not is_name(hello.cluster_name):
            return f"{hello.cluster_name[:_MAX_SENDER]!r} is not a usable cluster name"
        if min(hello.received, hello.held, hello.session, hello.epoch) < 0 or hello.first < 1:
            return "its numbers are below zero"
        if self._authorise(key) is None:
            return f"key {fingerprint(key)} is not trusted"
        if session is None:
            return None
        if key != session.key:
            return f"cluster {hello.cluster_name} belongs to another key"
        if hello.epoch < session.epoch:
            return (
                f"start {session.epoch} of the coordinator of {hello.cluster_name} is running, this is start "
                f"{hello.epoch}: attach to the running one"
            )
        if hello.received > session.last_sent:
            return f"it has messages of {hello.cluster_name} that were never sent: stop the cluster and start it again"
        return None

    def _remember(self, routing_id: bytes, key: str, frame: zmq.Frame) -> None:
        if routing_id not in self._connections:
            descriptor = int(frame.get(zmq.SRCFD))
            self._connections[routing_id] = (key, descriptor, _remote_address(descriptor))

    # ---- time ------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(self.settings.heartbeat / 2, self._tick)
        now = self._loop.time()
        for session in list(self.sessions.values()):
            silence = now - session.last_heard
            verdict = self.settings.judge(silence)
            if verdict != "connected":
                session.become(verdict, f"cluster {session.cluster_name} has been silent for {silence:.1f} s")


def _remote_address(descriptor: int) -> object:
    """The address at the other end of a TCP connection that libzmq has open, or None when it is gone."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            return connection.getpeername()
    except OSError:
        return None


def _cut(descriptor: int, address: object) -> None:
    """Shut the connection down, unless the descriptor means another one by now. libzmq has no call for this."""
    if address is None or _remote_address(descriptor) != address:
        return
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(sockets.SHUT_RDWR)
    except OSError as error:
        _log.warning("could not cut the connection of %s: %s", address, error)
