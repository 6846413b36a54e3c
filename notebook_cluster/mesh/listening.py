"""The two sockets on which a node hears the others: TCP with CURVE, and ipc in a 0700 folder."""

import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import zmq

from notebook_cluster.mesh.connection import MeshSettings
from notebook_cluster.security import Gate, Identity, serve, user_id
from notebook_cluster.sockets import RECEIVING, IOThread, give_up_unacknowledged, keep_alive

_log = logging.getLogger(__name__)

_DOMAIN = "mesh"
_MAX_IPC_PATH = 100
_FRAMES_PER_TURN = 64
_ENVELOPE = 1024
"""Bytes; CURVE adds some to each frame."""
_NOBLOCK, _POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)  # numbers: what combines enum members makes a new one each time

OnFrames = Callable[[str, memoryview, memoryview, bool], None]
"""(``name/incarnation`` of the sender, header, payload, whether it came over ipc); the views keep the frames."""


class Listening:
    """The ROUTERs of one node. Made and used on the I/O thread.

    Over TCP the sender is the User-Id that ``user_of`` gave to its key, over ipc, where the folder is the lock, its
    routing id. ``why_not`` says why a key is refused, where that is known.

    Attributes:
        gate: asks ``user_of`` who may come in.
        port, ipc: where the others reach this node; ``ipc`` is empty where there is none.
        dropped: messages that are not one small header and one payload.
    """

    def __init__(
        self,
        loop: IOThread,
        identity: Identity,
        settings: MeshSettings,
        host: str,
        directory: Path | None,
        user_of: Callable[[str], str | None],
        on_frames: OnFrames,
        why_not: Callable[[str], str] = lambda key: "",
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._on_frames = on_frames
        self.ipc = ""
        self.dropped = 0
        self.gate = Gate(loop.context)
        self.gate.allow(_DOMAIN, user_of, why_not)
        tcp = self._router(max(settings.tcp_chunk, settings.loopback_chunk), settings.tcp_high_water_mark)
        serve(tcp, identity, _DOMAIN)
        give_up_unacknowledged(tcp)
        keep_alive(tcp, settings.keepalive, settings.keepalive_timeout)
        self.port = tcp.bind_to_random_port(f"tcp://{host}")
        self._routers = [tcp]
        loop.register(tcp, zmq.POLLIN, lambda flags: self._receive(tcp, from_ipc=False))
        if directory is not None and zmq.has("ipc"):
            self._bind_ipc(directory / f"m-{secrets.token_hex(4)}")

    def close(self) -> None:
        """Close the sockets and remove the ipc file."""
        for router in self._routers:
            self._loop.unregister(router)
            router.close(linger=0)
        self._routers = []
        self.gate.close()
        if self.ipc:
            Path(self.ipc.removeprefix("ipc://")).unlink(missing_ok=True)

    def _bind_ipc(self, path: Path) -> None:
        if len(os.fsencode(path)) > _MAX_IPC_PATH:
            _log.warning("%s is too long for an ipc socket: nodes of this peer talk over TCP", path)
            return
        ipc = self._router(self._settings.ipc_chunk, self._settings.ipc_high_water_mark)
        self.ipc = f"ipc://{path}"
        ipc.bind(self.ipc)
        self._routers.append(ipc)
        self._loop.register(ipc, zmq.POLLIN, lambda flags: self._receive(ipc, from_ipc=True))

    def _router(self, largest: int, frames: int) -> zmq.Socket[bytes]:
        router = self._loop.context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.AFFINITY, RECEIVING)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.RCVHWM, frames)
        router.setsockopt(zmq.MAXMSGSIZE, largest + _ENVELOPE)
        return router

    def _receive(self, router: zmq.Socket[bytes], *, from_ipc: bool) -> None:
        for _ in range(_FRAMES_PER_TURN):
            try:
                frames = _next_message(router)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[1]) > self._settings.header_bytes:
                self.dropped += 1
                continue
            sender = frames[0].bytes.decode("utf-8", "replace") if from_ipc else user_id(frames[2])
            self._on_frames(sender, frames[1].buffer, frames[2].buffer, from_ipc)
            if not int(router.getsockopt(zmq.EVENTS)) & _POLLIN:
                return


def _next_message(router: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """As ``recv_multipart``, which asks the socket after each frame whether it was the last."""
    frames = [router.recv(_NOBLOCK, copy=False)]
    while frames[-1].more:
        frames.append(router.recv(_NOBLOCK, copy=False))
    return frames
