"""One socket to a coordinator, owned by one I/O thread; any thread may ask, every answer is a Future."""

import concurrent.futures
import itertools
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import zmq

from notebook_cluster.protocol import decode, encode
from notebook_cluster.protocol.interaction import InputRequested, InputWithdrawn, NodeValue
from notebook_cluster.protocol.state import ClusterView
from notebook_cluster.protocol.views import (
    Attach,
    CellChanged,
    CellEnded,
    CellOutput,
    Closing,
    ConnectionFile,
    Incoming,
    LeaveCluster,
    Ping,
    Reply,
    Request,
    StateChanged,
    Unwatch,
)
from notebook_cluster.protocol.wire import ProtocolError
from notebook_cluster.security import Identity, dial
from notebook_cluster.sockets import IOThread

log = logging.getLogger(__name__)

PING_PERIOD = 3.0
_LOOK_PERIOD = 0.5
"""Between two looks whether the coordinator's process is there."""
_LINGER_MS = 500
"""For the word of leaving."""
CELL_EVENTS = (CellOutput, CellChanged, CellEnded, NodeValue, InputRequested, InputWithdrawn)
"""What goes to the queue of the cell that it names."""


class ClusterError(RuntimeError):
    """Something could not be done; the text is one line that names the thing and the way out."""


class _Waiting(NamedTuple):
    """Who waits for an answer."""

    future: concurrent.futures.Future[Any]
    asked: str
    kind: Any
    events: "queue.SimpleQueue[Any] | None"
    """Of the cell whose number the answer is."""


class Connection:
    """Requests to and events from one coordinator.

    ``on_event`` callbacks and event queues are served by the I/O thread. When the coordinator ends or dies, every
    open request fails with ClusterError and every queue gets None. A future may be cancelled: its answer is dropped.
    """

    def __init__(self, file: ConnectionFile, kind: Any, *, live: bool = True) -> None:
        self.file = file
        self.kind = kind
        self.latest: ClusterView | None = None
        self.closed: str | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._lock = threading.Lock()
        self._cells: dict[int, queue.SimpleQueue[Any]] = {}
        self._subscribers: list[Callable[[Any], None]] = []
        self._left = False
        self._loop = IOThread("notebook-cluster-client", io_threads=1, linger=_LINGER_MS)
        self._loop.at_close(self._finish)
        self._loop.start()
        self._loop.call_soon(lambda: self._guarded(self._dial))
        self.attached = self.request(
            Attach(kind=kind, live=live, kernel=own_kernel() if kind == "magics" else ""), ClusterView
        )

    # ---- for any thread

    def request(self, body: Any, kind: Any = Any, *, queue_for_cell: "queue.SimpleQueue[Any] | None" = None) -> Any:
        """Send ``body``; a Future of the reply's value as type ``kind``, or failing with ClusterError."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        number = next(self._ids)
        with self._lock:
            if self.closed is not None:
                raise ClusterError(self.closed)
            self._waiting[number] = _Waiting(future, type(body).__name__, kind, queue_for_cell)
            self._send(Request(id=number, body=body))
        return future

    def tell(self, body: Any) -> None:
        """Send ``body``, whose answer does not matter; nothing when the connection is closed."""
        with self._lock:
            if self.closed is not None:
                return
            self._send(Request(id=0, body=body))

    def _send(self, request: Request) -> None:
        # Encoded by the caller: what is sent is what the request was then, and what cannot be encoded is its error.
        data = encode(request)
        self._loop.call_soon(lambda: self._guarded(lambda: self._socket.send(data)))

    def watch_queue(self, cell: int, events: "queue.SimpleQueue[Any]") -> None:
        """Put the events of ``cell`` into ``events``."""
        with self._lock:
            self._cells[cell] = events

    def unwatch(self, cell: int, events: "queue.SimpleQueue[Any]") -> bool:
        """Put the events of ``cell`` into ``events`` no more; False: they go elsewhere, or nowhere."""
        with self._lock:
            if self._cells.get(cell) is not events:
                return False
            del self._cells[cell]
            return True

    def end_watching(self, cell: int) -> bool:
        """Whoever gets the events of ``cell`` gets an end, ``detached``; False: nobody does."""
        with self._lock:
            events = self._cells.pop(cell, None)
        if events is None:
            return False
        events.put(CellEnded(cell=cell, status="detached"))
        return True

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call ``callback(event)`` on the I/O thread for state, series and closing; returns how to stop."""
        self._subscribers.append(callback)

        def unsubscribe() -> None:
            if callback in self._subscribers:
                self._subscribers.remove(callback)

        return unsubscribe

    def close(self, *, clean: bool = False) -> None:
        """Leave; ``clean`` says that a notebook kernel was shut down."""
        with self._lock:
            if self._left:
                return
            self._left = True
            self._send(Request(id=next(self._ids), body=LeaveCluster(clean=clean)))
        self._loop.close()

    def wait_closed(self, timeout: float = 30.0) -> None:
        """Return when the coordinator's process has ended (it ends its kernels first).

        Raises:
            ClusterError: it still runs after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while is_alive(self.file.pid):
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"cluster {self.file.cluster!r} did not end within {timeout:g} s: end process {self.file.pid}"
                )
            time.sleep(0.02)
        self._left = True
        self._loop.close()

    # ---- the I/O thread

    def _guarded(self, work: Callable[[], object]) -> None:
        """Whoever waits must hear of it when the connection breaks: else they wait for ever."""
        try:
            work()
        except Exception as error:
            log.exception("the connection to cluster %s broke", self.file.cluster)
            self._end(f"the connection to cluster {self.file.cluster!r} broke ({error!r}): attach again")

    def _dial(self) -> None:
        self._socket = self._loop.context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)
        public, secret = self.file.view_public_key, self.file.view_secret_key
        dial(self._socket, Identity(public, secret), self.file.server_key)
        self._socket.connect(self.file.address)
        self._loop.register(self._socket, zmq.POLLIN, lambda flags: self._guarded(self._read))
        self._loop.every(PING_PERIOD, lambda now: self._send(Request(id=0, body=Ping())))
        self._loop.every(_LOOK_PERIOD, lambda now: self._guarded(self._look_for_coordinator))

    def _read(self) -> None:
        while self._socket.poll(0):
            self._on_message(self._socket.recv())
        if self.closed is not None:
            self._loop.close()

    def _look_for_coordinator(self) -> None:
        if self.file.head and not is_alive(self.file.pid):
            self._end(
                f"the window to cluster {self.file.cluster!r} on {self.file.head} is gone (process {self.file.pid}), "
                f"the cluster goes on there: %cluster attach {self.file.cluster}"
            )
        elif not is_alive(self.file.pid):
            self._end(
                f"the coordinator of cluster {self.file.cluster!r} is gone (process {self.file.pid}): "
                f"%cluster start {self.file.cluster} brings it back"
            )

    def _end(self, reason: str) -> None:
        self.closed = self.closed or reason
        self._loop.close()

    def _on_message(self, data: bytes) -> None:
        try:
            message = decode(data, Incoming)
        except ProtocolError as error:
            log.warning("a message of the coordinator is not readable: %s", error)
            return
        if isinstance(message, CELL_EVENTS):
            with self._lock:
                events = self._cells.get(message.cell)
            if events is not None:
                events.put(message)
            return
        match message:
            case Reply():
                self._on_reply(message)
            case Closing():
                self._tell(message)
                ended = f"cluster {self.file.cluster!r} has ended: {message.reason}"
                self.closed = message.reason if message.away else ended
            case _:
                if isinstance(message, StateChanged):
                    self.latest = message.state
                    if message.state.head != self.file.head:  # it was handed over
                        self.file = msgspec.structs.replace(self.file, head=message.state.head)
                self._tell(message)

    def _tell(self, event: Any) -> None:
        for callback in list(self._subscribers):
            try:
                callback(event)
            except Exception:
                log.exception("a subscriber failed")

    def _on_reply(self, reply: Reply) -> None:
        with self._lock:
            waiting = self._waiting.pop(reply.id, None)
        if waiting is None:
            return
        if not waiting.future.set_running_or_notify_cancel():
            if waiting.events is not None and not reply.error:
                self.tell(Unwatch(cell=reply.value))
            return
        if reply.error:
            waiting.future.set_exception(ClusterError(reply.error))
            return
        try:
            value = msgspec.convert(reply.value, waiting.kind)
        except Exception as error:
            what = f"answered {waiting.asked} with what this version cannot read ({error})"
            way_out = "use the same version of notebook-cluster for both"
            waiting.future.set_exception(ClusterError(f"cluster {self.file.cluster!r} {what}: {way_out}"))
            return
        if waiting.kind is ClusterView:
            self.latest = value
        if waiting.events is not None:
            self.watch_queue(value, waiting.events)
        waiting.future.set_result(value)

    def _finish(self) -> None:
        """The loop ends: nobody waits from here on."""
        with self._lock:
            broken = f"the connection to cluster {self.file.cluster!r} broke: attach again"
            reason = self.closed = self.closed or ("this view was closed" if self._left else broken)
            waiting, self._waiting = self._waiting, {}
            watching = list(self._cells.values())
        for one in waiting.values():
            if one.future.set_running_or_notify_cancel():
                one.future.set_exception(ClusterError(reason))
        for events in watching:
            events.put(None)
        self._tell(Closing(reason=reason))


def own_kernel() -> str:
    """Id of the Jupyter kernel that this process is, as Jupyter servers know it; empty where it is none."""
    app = getattr(sys.modules.get("ipykernel.kernelapp"), "IPKernelApp", None)
    if app is None or not app.initialized():
        return ""
    found = re.fullmatch(r"kernel-([\w-]{1,64})\.json", os.path.basename(app.instance().connection_file))
    return found[1] if found else ""


def is_alive(pid: int) -> bool:
    """True while process ``pid`` runs (a zombie does not)."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
