"""The side of a link that is connected to: an agent, one :class:`Listener` for all its coordinators."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from notebook_cluster.link.authenticated_router import AuthenticatedRouter, Caller
from notebook_cluster.link.channel import LinkSettings
from notebook_cluster.link.dial_out import DialOut
from notebook_cluster.link.frames import MAX_FRAMES, AnyHeader, Beat, Drops, FrameHeader, Hello, SessionRefusal
from notebook_cluster.link.session import Session
from notebook_cluster.link.tcp import read_host_port
from notebook_cluster.protocol import PROTOCOL_VERSION, ProtocolError, decode, encode
from notebook_cluster.protocol.names import is_name
from notebook_cluster.protocol.wire import mismatch
from notebook_cluster.security import Gate, Identity, fingerprint
from notebook_cluster.sockets import plain_context

_MAX_SENDER = 200
_MAX_SESSIONS = 32
"""Clusters of one key."""


class Listener:
    """Accepts the links of coordinators whose key ``authorise`` knows, and dials out to those that cannot come here.

    ``authorise(key)`` returns a name for people, or None to refuse; it is called on the ZAP thread when a connection
    is made and on the loop when a session is asked for. ``on_session(session)`` is called on the loop for each new
    cluster, before its first message. ``gate`` is the context's ZAP handler when it has one already.
    ``objection(key, cluster)``: why a key that is let in has no cluster of that name here; empty when it may have.
    ``succeeds(key, before)``: a coordinator with ``key`` may go on with the session of one with ``before`` (the cluster
    was handed over); only in a higher epoch.

    Attributes:
        sessions: cluster id -> Session.
        dropped: number of frames dropped, by cause (``garbage``, ``stale``, ``foreign``, ``undecodable``, ``refused``,
            ``resends``, ``endless``), and of ``gaps`` seen.
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
        objection: Callable[[str, str], str] = lambda key, cluster: "",
        succeeds: Callable[[str, str], bool] = lambda key, before: key == before,
    ) -> None:
        self._context = plain_context(context)
        self._identity = identity
        self._authorise = authorise
        self._refuses, self._succeeds = objection, succeeds
        self._on_session = on_session
        self.settings = settings or LinkSettings()
        self.sessions: dict[str, Session] = {}
        self.dropped = Drops()
        self._door = AuthenticatedRouter(
            context,
            endpoint,
            identity,
            authorise=authorise,
            on_frames=self._on_frames,
            on_closed=lambda caller: None,
            drops=self.dropped,
            gate=gate,
        )
        self._dial_outs: dict[bytes, DialOut] = {}

    def start(self) -> int:
        """Listen; returns the port. Call inside the running loop.

        Raises:
            OSError: the port is taken or not allowed; the text names it and the way out.
        """
        self._loop = asyncio.get_running_loop()
        port = self._door.start()
        self._ticker = self._loop.call_later(self.settings.heartbeat / 2, self._tick)
        return port

    def dial_out(
        self,
        address: str,
        server_key: str,
        on_condition: Callable[[str, str], None] = lambda condition, reason: None,
    ) -> DialOut:
        """Connect to the reception of a coordinator at ``address`` ("HOST:PORT") with ``server_key``, and keep trying
        until it is closed. The coordinator then opens its sessions over that connection as if it had dialled; so
        ``authorise`` must know its key. Call after :meth:`start`.

        Raises:
            ValueError: ``address`` is none.
        """
        routing_id = secrets.token_bytes(16)
        place = address.removeprefix("tcp://")
        if read_host_port(place) is None:
            raise ValueError(f"{address!r} is no address to dial: give HOST:PORT, as the cluster shows it")
        dialled = self._dial_outs[routing_id] = DialOut(
            self._context,
            f"tcp://{place}",
            server_key,
            self._identity,
            routing_id=routing_id,
            settings=self.settings,
            on_frames=lambda frames: self._handle(routing_id, server_key, frames),
            on_condition=on_condition,
            on_close=lambda: self._hung_up(routing_id),
            drops=self.dropped,
        )
        return dialled

    def _hung_up(self, routing_id: bytes) -> None:
        del self._dial_outs[routing_id]

    async def close(self, *, flush: float = 1.0) -> None:
        """Wait at most ``flush`` seconds until connected coordinators have everything, then close all connections."""
        if self._door.closed:
            return
        connected = [session for session in self.sessions.values() if session.condition == "connected"]
        if connected and flush > 0:
            await asyncio.gather(*(session.flushed(flush) for session in connected))
        self._ticker.cancel()
        for session in self.sessions.values():
            session.conversation.close()
        self.sessions.clear()
        for dialled in list(self._dial_outs.values()):
            dialled.close()
        self._door.close()

    def revoke(self, key: str) -> None:
        """End the sessions of ``key``, cut its connections and stop dialling it. Remove it from what ``authorise``
        knows first, so that it cannot come back."""
        self._door.cut(key)
        for dialled in [dialled for dialled in self._dial_outs.values() if dialled.server_key == key]:
            dialled.close()
        for session in [session for session in self.sessions.values() if session.key == key]:
            session.close()
            session.become("refused", f"key {fingerprint(key)} was removed")

    # ---- called by sessions ----------------------------------------------------------------------------------

    def _transmit(self, routing_id: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """Queue one message for this connection. False: it is gone, or as much as may wait for it waits already."""
        dialled = self._dial_outs.get(routing_id)
        return self._door.send(routing_id, frames) if dialled is None else dialled.send(frames)

    def _forget(self, session: Session) -> None:
        if self.sessions.get(session.cluster) is session:
            del self.sessions[session.cluster]

    # ---- incoming --------------------------------------------------------------------------------------------

    def _on_frames(self, caller: Caller, frames: list[zmq.Frame]) -> None:
        self._handle(caller.routing_id, caller.key, [frame.bytes for frame in frames])

    def _handle(self, routing_id: bytes, key: str, frames: Sequence[bytes]) -> None:
        """A message on one connection; ``key`` is proved by CURVE."""
        try:
            if len(frames) > MAX_FRAMES + 1:
                raise ProtocolError(f"{len(frames)} parts")
            header: FrameHeader = decode(frames[0], AnyHeader)
            if isinstance(header, Hello):
                self._hello(header, routing_id, key)
                return
            session = self.sessions.get(header.cluster)
            if session is None or (header.epoch, header.session) != (session.epoch, session.number):
                self.dropped["stale"] += 1
            elif key != session.key or routing_id != session.routing_id:
                self.dropped.note("foreign", "dropped a frame of key %s in another's session", fingerprint(key))
            else:
                session.last_heard = self._loop.time()
                session.become("connected", "")
                session.conversation.handle(header, frames[1:])
                if isinstance(header, Beat):
                    session.conversation.beat(echo=header.time)
        except ProtocolError as error:
            self.dropped.note("garbage", "dropped a frame of key %s: %s", fingerprint(key), error)

    def _hello(self, hello: Hello, routing_id: bytes, key: str) -> None:
        session = self.sessions.get(hello.cluster)
        reason = self._objection(hello, session, key)
        if reason is not None:
            name = hello.cluster_name
            self.dropped.note("refused", "refused cluster %.80r of key %s: %s", name, fingerprint(key), reason)
            newer = self._newer(hello, key)
            refusal = SessionRefusal(hello.cluster, hello.epoch, hello.session, PROTOCOL_VERSION, reason, newer)
            self._transmit(routing_id, [encode(refusal)])
            return
        if session is not None and session.is_older(hello):
            self.dropped["stale"] += 1
            return
        now = self._loop.time()
        fresh = session is None
        if session is None:
            session = self.sessions[hello.cluster] = Session(
                hello,
                key,
                now,
                settings=self.settings,
                drops=self.dropped,
                transmit=self._transmit,
                on_close=self._forget,
            )
            self._on_session(session)
        session.last_heard, session.key = now, key
        session.resume(hello, routing_id, fresh=fresh)
        session.become("connected", "")

    def _objection(self, hello: Hello, session: Session | None, key: str) -> str | None:
        """Why there is no session for ``hello``, or None."""
        if (versions := mismatch(hello.sender[:_MAX_SENDER], hello.protocol)) is not None:
            return versions
        if not is_name(hello.cluster) or not is_name(hello.cluster_name):
            return f"{hello.cluster_name[:_MAX_SENDER]!r} is not a usable cluster name"
        if self._authorise(key) is None:
            return f"key {fingerprint(key)} is not trusted"
        if objection := self._refuses(key, hello.cluster_name):
            return objection
        if (newer := self._newer(hello, key)) and session is None:
            return (
                f"start {newer} of the coordinator of {hello.cluster_name} has taken over, this is start {hello.epoch}"
            )
        if session is None:
            held = sum(session.key == key for session in self.sessions.values())
            many = f"{held} clusters of key {fingerprint(key)} are here already: stop one of them first"
            return many if held >= _MAX_SESSIONS else None
        succeeds = hello.cluster_name == session.cluster_name and self._succeeds(key, session.key)
        if not (key == session.key or succeeds):
            return f"cluster {hello.cluster_name} belongs to another key"
        if hello.epoch < session.epoch or (key != session.key and hello.epoch == session.epoch):
            return (
                f"start {session.epoch} of the coordinator of {hello.cluster_name} is running, this is start "
                f"{hello.epoch}: attach to the running one"
            )
        if hello.received > session.last_sent:
            return f"it has messages of {hello.cluster_name} that were never sent: stop the cluster and start it again"
        return None

    def _newer(self, hello: Hello, key: str) -> int:
        """The epoch of the coordinator that is followed in place of the one of ``hello``, or 0."""
        later = [session for session in self.sessions.values() if session.epoch > hello.epoch]
        same = [session for session in later if session.key == key or self._succeeds(key, session.key)]
        return max((session.epoch for session in same if session.stands_for(hello)), default=0)

    # ---- time ------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(self.settings.heartbeat / 2, self._tick)
        now = self._loop.time()
        for session in list(self.sessions.values()):
            silence = now - session.last_heard
            verdict = self.settings.judge(silence)
            if verdict != "connected":
                session.become(verdict, f"cluster {session.cluster_name} has been silent for {silence:.1f} s")
