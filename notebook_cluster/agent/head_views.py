"""What one window has open of a head: a socket for each of its views, also while nothing is heard from the window."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq

from notebook_cluster.agent.head_process import Head
from notebook_cluster.link import Session
from notebook_cluster.protocol import encode
from notebook_cluster.protocol import heads as h
from notebook_cluster.protocol.views import ConnectionFile, Ping, Request
from notebook_cluster.security import Identity, dial
from notebook_cluster.sockets import Pump

log = logging.getLogger(__name__)

MOST_VIEWS = 64
"""Of one window at a time."""
MOST_WAITING = 16 << 20
"""Bytes for views of a window that cannot be reached; with more its views are gone."""
PING_S = 4.0
"""Between two words to the head in the place of views whose window cannot be reached."""


class HeadViews:
    """``session`` is the window's. ``on_full`` is called when too much waits for it."""

    def __init__(self, head: Head, session: Session, on_full: Callable[[], None]) -> None:
        self.head = head
        self.session = session
        self._on_full = on_full
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pumps: dict[int, Pump] = {}
        self._keeping: asyncio.Task[None] | None = None
        """While nothing is heard from the window."""
        self._waiting = 0

    def take(self, message: h.ToHead, buffers: Sequence[bytes]) -> None:
        """What a view says, or (nothing) that it is gone. One that is not known, and is not opened now, is told so."""
        file = self.head.file
        if not buffers:
            if (pump := self._pumps.pop(message.view, None)) is not None:
                pump.close()
        elif message.view in self._pumps:
            self._pumps[message.view].send(list(buffers[:1]))
        elif not message.opens or file is None or len(self._pumps) >= MOST_VIEWS:
            self.session.send(h.FromHead(view=message.view))
        else:
            pump = self._pumps[message.view] = self._dial(message.view, file)
            pump.send(list(buffers[:1]))

    def silent(self) -> None:
        """Nothing is heard from the window: its views stay, and what is for them waits."""
        if self._keeping is None:
            self._waiting = 0
            self._keeping = asyncio.create_task(self._keep())

    def heard(self) -> None:
        """The window is there again."""
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None

    async def _keep(self) -> None:
        word = encode(Request(id=0, body=Ping()))
        while True:
            for pump in self._pumps.values():
                pump.send([word])
            await asyncio.sleep(PING_S)

    def _dial(self, view: int, file: ConnectionFile) -> Pump:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.LINGER, 500)
        dial(socket, Identity(file.view_public_key, file.view_secret_key), file.server_key)
        socket.connect(file.address)
        return Pump(socket, lambda frames: self._tell(view, frames))

    def _tell(self, view: int, frames: list[bytes]) -> None:
        if self._keeping is not None:
            self._waiting += sum(map(len, frames))
            if self._waiting > MOST_WAITING:
                log.warning("cluster %s: too much waits for its window: its views are gone", self.head.cluster)
                self._on_full()
                return
        self.session.send(h.FromHead(view=view), frames)

    def close(self, *, told: bool) -> None:
        """All views are gone; ``told``: the window hears that the head is."""
        self.heard()
        for pump in self._pumps.values():
            pump.close()
        self._pumps.clear()
        self._context.destroy(linger=500)
        if told:
            self.session.send(h.FromHead(view=0))
