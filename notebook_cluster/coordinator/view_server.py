"""The socket that views dial: requests in, replies and events out. Loopback TCP with CURVE; only the holder of the
connection file (0600) gets through."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import zmq

from notebook_cluster.link.conversation import Gate, at_once
from notebook_cluster.protocol import decode, encode
from notebook_cluster.protocol.views import AnyEvent, Attach, LeaveCluster, Reply, Request, RequestError
from notebook_cluster.protocol.wire import ProtocolError
from notebook_cluster.security import Gate as KeyGate
from notebook_cluster.security import Identity, serve
from notebook_cluster.sockets import Pump

log = logging.getLogger(__name__)

SILENT_AFTER = 15.0
"""Seconds without a word after which a view counts as gone."""


KERNELS_KEPT = 16
MAX_KERNEL = 64
"""Characters of a kernel's id."""


class View:
    """One view: what it watches and when it was last heard."""

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.kind = "client"
        self.live = False
        self.watching: set[int] = set()
        self.watches_widgets = False
        self.background: set[int] = set()
        """Cells that it watches, or watched, without anybody who waits."""
        self.last_heard = time.monotonic()

    def watch(self, cell: int, background: bool) -> None:
        """The events of ``cell`` go to this view from now on."""
        self.watching.add(cell)
        if background:
            self.background.add(cell)


class ViewServer:
    """Reads requests and hands them to ``handler(view, body)``; what it returns or raises is the reply."""

    def __init__(
        self,
        handler: Callable[[View, Any], Awaitable[Any]],
        on_left: Callable[[View, bool], None],
        gate: Gate = at_once,
    ) -> None:
        """``gate`` calls what it is given in order, at once or when what it tells of is in the journal."""
        self._gate = gate
        self._handler = handler
        self._on_left = on_left
        self.views: dict[bytes, View] = {}
        self.kernels: dict[str, float] = {}
        """Jupyter kernels that have attached, the newest last: see ClusterView. One that was restarted, or left, is
        kept, because its notebook comes back."""
        self.server = Identity(*_curve_pair())
        self.view_identity = Identity(*_curve_pair())
        self._context = zmq.Context()
        self._keys = KeyGate(self._context)
        self._keys.allow("views", lambda key: "view" if key == self.view_identity.public_key else None)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> str:
        """Bind and return the address."""
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 500)
        socket.set(zmq.SNDHWM, 20_000)
        serve(socket, self.server, "views")
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        self._pump = Pump(socket, self._on_frames)
        return f"tcp://127.0.0.1:{port}"

    def _on_frames(self, frames: list[Any]) -> None:
        if len(frames) != 2:
            return
        identity, data = bytes(frames[0]), bytes(frames[1])
        try:
            request: Request = decode(data, Request)
        except ProtocolError as error:
            log.warning("a view sent a message that is not a request: %s", error)
            return
        view = self.views.get(identity)
        if view is None:
            view = self.views[identity] = View(identity)
        view.last_heard = time.monotonic()
        if isinstance(request.body, Attach):
            view.kind, view.live = request.body.kind, request.body.live
        self._take(view, request, data)

    def _take(self, view: View, request: Request, data: bytes) -> None:
        """``request``, which came as ``data``."""
        task = asyncio.ensure_future(self._answer(view, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, view: View, request: Request) -> None:
        if isinstance(request.body, LeaveCluster):
            self.views.pop(view.identity, None)
            self._on_left(view, request.body.clean)
            return
        try:
            value = await self._handler(view, request.body)
            reply = Reply(id=request.id, value=value)
        except RequestError as error:
            reply = Reply(id=request.id, error=str(error))
        except Exception as error:
            log.exception("request %s failed", type(request.body).__name__)
            reply = Reply(id=request.id, error=f"{type(error).__name__}: {error}")
        self._put([view.identity, encode(reply)])

    def _put(self, frames: list[bytes]) -> None:
        self._gate(lambda: self._send_now(frames))

    def _send_now(self, frames: list[bytes]) -> None:
        self._pump.send(frames)

    @property
    def looked_at(self) -> bool:
        """Somebody may look at a view: a Jupyter server with no browser before it is there too, but nobody at it."""
        return any(view.kind != "server" for view in self.views.values())

    def note_kernel(self, kernel: str) -> bool:
        """``kernel`` has attached now; False where a view lives in none."""
        if not kernel or len(kernel) > MAX_KERNEL:
            return False
        self.kernels.pop(kernel, None)
        self.kernels[kernel] = time.time()
        while len(self.kernels) > KERNELS_KEPT:
            del self.kernels[next(iter(self.kernels))]
        return True

    def send(self, view: View, event: AnyEvent) -> None:
        self._put([view.identity, encode(event)])

    def send_live(self, event: AnyEvent) -> None:
        """To every view that wants state and series."""
        listeners = [view for view in self.views.values() if view.live]
        if listeners:
            data = encode(event)
            for view in listeners:
                self._put([view.identity, data])

    def send_watching(self, cell: int, event: AnyEvent) -> None:
        """To every view that watches ``cell``."""
        self.send_to(self.watching(cell), event)

    def watching(self, cell: int) -> list[View]:
        """The views that get the events of ``cell``."""
        return [view for view in self.views.values() if cell in view.watching]

    def send_to(self, views: list[View], event: AnyEvent) -> None:
        """To these views, encoded once."""
        if views:
            data = encode(event)
            for view in views:
                self._put([view.identity, data])

    def drop_silent(self) -> None:
        """Forget views that were not heard for a while (a killed kernel says no goodbye)."""
        limit = time.monotonic() - SILENT_AFTER
        for view in [view for view in self.views.values() if view.last_heard < limit]:
            del self.views[view.identity]
            self._on_left(view, False)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._pump.close()
        self._keys.close()
        self._context.term()


def _curve_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()
