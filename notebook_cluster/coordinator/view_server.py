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
from notebook_cluster.protocol.hand_over import Freeze, HandOver, KeptView, ViewKind
from notebook_cluster.protocol.views import AnyEvent, Attach, Closing, LeaveCluster, Reply, Request, RequestError
from notebook_cluster.protocol.wire import ProtocolError
from notebook_cluster.security import Gate as KeyGate
from notebook_cluster.security import Identity, serve
from notebook_cluster.sockets import Pump

log = logging.getLogger(__name__)

SILENT_AFTER = 15.0
"""Seconds without a word after which a view counts as gone where nobody is at its end any more, and stands still
otherwise: a stopped process, or one whose interpreter is held. It is sent no state until it is heard again."""


KERNELS_KEPT = 16
MAX_KERNEL = 64
"""Characters of a kernel's id."""


class View:
    """One view: what it watches and when it was last heard."""

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.kind: ViewKind = "client"
        self.live = False
        self.watching: set[int] = set()
        self.watches_widgets = False
        self.background: set[int] = set()
        """Cells that it watches, or watched, without anybody who waits."""
        self.answers: set[int] = set()
        """Cells whose questions it answers."""
        self.asked: set[int] = set()
        """Questions that were put to it by the coordinator before this one."""
        self.last_heard = self.last_tried = time.monotonic()
        self.missed = False
        """It was not sent what others were."""

    @property
    def stands_still(self) -> bool:
        """It has said nothing for long."""
        return self.last_heard < time.monotonic() - SILENT_AFTER

    def take(self, kept: KeptView) -> None:
        """Be as the coordinator before this one knew it."""
        self.kind, self.live, self.watches_widgets = kept.kind, kept.live, kept.widgets
        self.watching, self.background = set(kept.watching), set(kept.background)
        self.answers, self.asked = set(kept.answers), set(kept.asked)

    def kept(self) -> KeptView:
        """For the next coordinator."""
        return KeptView(
            kind=self.kind, live=self.live, watching=sorted(self.watching), background=sorted(self.background),
            answers=sorted(self.answers), asked=sorted(self.asked), widgets=self.watches_widgets,
        )  # fmt: skip

    def watch(self, cell: int, background: bool) -> None:
        """The events of ``cell`` go to this view from now on."""
        self.watching.add(cell)
        if background:
            self.background.add(cell)


class ViewSocket:
    """The socket itself, with its keys: it stays when who answers behind it changes.

    Attributes:
        server, view_identity: for the connection file.
    """

    def __init__(self) -> None:
        self.server = Identity(*_curve_pair())
        self.view_identity = Identity(*_curve_pair())
        self._context: zmq.Context[Any] = zmq.Context()
        self._keys = KeyGate(self._context)
        self._keys.allow("views", lambda key: "view" if key == self.view_identity.public_key else None)
        self._pump: Pump | None = None
        self._address = ""

    def open(self, on_frames: Callable[[list[Any]], None]) -> str:
        """Bind, unless it is; what comes goes to ``on_frames`` from now on. Returns the address."""
        if self._pump is not None:
            self._pump.hand_to(on_frames)
            return self._address
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 500)
        socket.set(zmq.SNDHWM, 20_000)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        serve(socket, self.server, "views")
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        self._pump, self._address = Pump(socket, on_frames), f"tcp://127.0.0.1:{port}"
        return self._address

    def send(self, frames: list[bytes]) -> bool:
        """To the view whose identity is the first frame; nothing before :meth:`open`. False: nobody takes it there."""
        return self._pump is not None and self._pump.send(frames)

    def close(self) -> None:
        """Nobody is behind its address any more."""
        if self._pump is not None:
            self._pump.close()
        self._keys.close()
        self._context.term()


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
        self._before: ViewServer | None = None
        self.on_hand_over: Callable[[View, Request], None] = lambda view, request: self.refuse(
            view, request, "this coordinator does not move"
        )
        """Gets each HandOver."""
        self.views: dict[bytes, View] = {}
        self.kernels: dict[str, float] = {}
        """Jupyter kernels that have attached, the newest last: see ClusterView. One that was restarted, or left, is
        kept, because its notebook comes back."""
        self.socket: ViewSocket
        """Once it is started."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept: list[list[bytes]] | None = None
        """What views have said since :meth:`hold`."""
        self._over = False

    def adopt(self, before: "ViewServer | None") -> None:
        """Have the socket and the views of the one that this process had before, which has left."""
        if before is not None:
            self._before, self.socket, self.views, self.kernels = before, before.socket, before.views, before.kernels

    def start(self) -> str:
        """Return the address, where requests are heard from now on. After one before it is that one's, and what views
        say is kept until :meth:`go_on`."""
        if self._before is None:
            self.socket = ViewSocket()
        else:
            self._kept = self._before.take_kept()
            self._before = None
        return self.socket.open(self._on_frames)

    def say_last(self, reason: str) -> None:
        """To every view: the cluster cannot be reached from here any more; also after :meth:`leave`."""
        for view in self.views.values():
            self.socket.send([view.identity, encode(Closing(reason=reason, away=True))])

    @property
    def started(self) -> bool:
        """It has a socket."""
        return hasattr(self, "socket")

    @property
    def has_left(self) -> bool:
        """Another one takes over, or has."""
        return self._over

    @property
    def is_busy(self) -> bool:
        """Requests are being answered, beside the one that waits for that."""
        return bool(self._others())

    async def quiet(self, timeout: float) -> str:
        """Wait until those are answered; what still is not after ``timeout`` seconds, for people, or empty."""
        if others := self._others():
            await asyncio.wait(others, timeout=timeout)
        return ", ".join(sorted({task.get_name() for task in self._others()}))

    def _others(self) -> "set[asyncio.Task[None]]":
        return {task for task in self._tasks if task.get_name() != Freeze.__name__}

    def hold(self) -> None:
        """Keep what views say, for :meth:`go_on` or the one that takes over."""
        self._kept = []

    def take_kept(self) -> list[list[bytes]]:
        """What was kept, once."""
        kept, self._kept = self._kept, None
        return kept or []

    def go_on(self) -> None:
        """Hear what was kept."""
        for frames in self.take_kept():
            self._on_frames(frames)

    def leave(self) -> None:
        """Send nothing more: another one takes over."""
        for task in self._tasks:
            task.cancel()
        self._over = True

    def _on_frames(self, frames: list[Any]) -> None:
        if len(frames) != 2:
            return
        if self._kept is not None:
            self._kept.append(frames)
            if (there := self.views.get(bytes(frames[0]))) is not None:
                there.last_heard = time.monotonic()
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
        if isinstance(request.body, HandOver):
            self.on_hand_over(view, request)
            return
        task = asyncio.create_task(self._answer(view, request), name=type(request.body).__name__)
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
        if not self._over:
            self.socket.send(frames)

    def refuse(self, view: View, request: Request, error: str) -> None:
        """Answer ``request`` with one line."""
        self._put([view.identity, encode(Reply(id=request.id, error=error))])

    def answer(self, view: View, request: Request, value: Any) -> None:
        """Answer ``request``."""
        self._put([view.identity, encode(Reply(id=request.id, value=value))])

    @property
    def looked_at(self) -> bool:
        """Somebody may look at a view: a Jupyter server with no browser before it is there too, but nobody at it."""
        return any(view.kind != "server" and not view.stands_still for view in self.views.values())

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

    def wants_state(self, changed: bool) -> bool:
        """Whether there is a view to send a state to, which has ``changed``, or which it has missed."""
        return any(view.live and (changed or (view.missed and not view.stands_still)) for view in self.views.values())

    def send_live(self, event: AnyEvent) -> None:
        """To every view that wants state and series."""
        data = b""
        for view in self.views.values():
            if view.live:
                view.missed = view.stands_still
                if not view.missed:
                    self._put([view.identity, data := data or encode(event)])

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
        """Forget views that were not heard for a while and whose process is gone (a killed kernel says no goodbye)."""
        if self._kept is not None:
            return  # the loop may have had much else to do
        now = time.monotonic()
        for view in [view for view in self.views.values() if view.stands_still]:
            if now - view.last_tried < SILENT_AFTER:
                continue
            view.last_tried = now
            if not self.socket.send([view.identity, encode(Reply(id=0))]):  # an answer that nobody waits for
                del self.views[view.identity]
                self._on_left(view, False)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.socket.close()


def _curve_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()
