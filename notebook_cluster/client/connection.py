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
from collections import deque
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

log = logging.getLogger(__name__)

PING_PERIOD = 3.0
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
        self._context = zmq.Context()
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._outgoing: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._cells: dict[int, queue.SimpleQueue[Any]] = {}
        self._subscribers: list[Callable[[Any], None]] = []
        self._wake_lock = threading.Lock()
        wake_address = f"inproc://wake-{id(self)}"
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.bind(wake_address)
        self._wake_out = self._context.socket(zmq.PAIR)
        self._wake_out.connect(wake_address)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notebook-cluster-client", daemon=True)
        self._thread.start()
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
            self._outgoing.append(encode(Request(id=number, body=body)))
        self._wake()
        return future

    def tell(self, body: Any) -> None:
        """Send ``body``, whose answer does not matter; nothing when the connection is closed."""
        with self._lock:
            if self.closed is not None:
                return
            self._outgoing.append(encode(Request(id=0, body=body)))
        self._wake()

    def _wake(self) -> None:
        with self._wake_lock:
            try:
                self._wake_out.send(b"", zmq.NOBLOCK)
            except zmq.ZMQError:
                pass  # full: the thread is about to wake anyway; or closed

    def watch_queue(self, cell: int, events: "queue.SimpleQueue[Any]") -> None:
        """Put the events of ``cell`` into ``events``."""
        with self._lock:
            self._cells[cell] = events

    def unwatch(self, cell: int) -> None:
        with self._lock:
            self._cells.pop(cell, None)

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call ``callback(event)`` on the I/O thread for state, series and closing; returns how to stop."""
        self._subscribers.append(callback)

        def unsubscribe() -> None:
            if callback in self._subscribers:
                self._subscribers.remove(callback)

        return unsubscribe

    def close(self, *, clean: bool = False) -> None:
        """Leave; ``clean`` says that a notebook kernel was shut down."""
        if self._end.is_set():
            return
        with self._lock:
            self._outgoing.append(encode(Request(id=next(self._ids), body=LeaveCluster(clean=clean))))
        self._end.set()
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2)

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
        self._end.set()
        self._wake()
        self._thread.join(2)

    # ---- the I/O thread

    def _run(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        try:
            reason = self._serve(socket)
        except Exception as error:
            # Whoever waits must hear of it: a thread that ends without a word leaves them waiting for ever.
            log.exception("the connection to cluster %s broke", self.file.cluster)
            reason = f"the connection to cluster {self.file.cluster!r} broke ({error!r}): attach again"
        self._finish(reason)
        socket.close()
        self._wake_in.close()
        with self._wake_lock:
            self._wake_out.close()
        self._context.term()

    def _serve(self, socket: zmq.Socket[bytes]) -> str:
        """Until this view or the coordinator ends; returns why."""
        socket.set(zmq.LINGER, 500)
        socket.set(zmq.SNDHWM, 0)
        public, secret = self.file.view_public_key, self.file.view_secret_key
        dial(socket, Identity(public, secret), self.file.server_key)
        socket.connect(self.file.address)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        last_ping = last_look = time.monotonic()
        while True:
            poller.poll(500)
            while self._wake_in.poll(0):
                self._wake_in.recv()
            while self._outgoing:
                socket.send(self._outgoing.popleft())
            if self._end.is_set():
                return "this view was closed"
            while socket.poll(0):
                self._on_message(socket.recv())
            now = time.monotonic()
            if now - last_ping > PING_PERIOD:
                last_ping = now
                socket.send(encode(Request(id=0, body=Ping())))
            if self.closed is not None:
                return self.closed
            if now - last_look > 0.5:
                last_look = now
                if not is_alive(self.file.pid):
                    return (
                        f"the coordinator of cluster {self.file.cluster!r} is gone (process {self.file.pid}): "
                        f"%cluster start {self.file.cluster} brings it back"
                    )

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
                self.closed = f"cluster {self.file.cluster!r} has ended: {message.reason}"
            case _:
                if isinstance(message, StateChanged):
                    self.latest = message.state
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

    def _finish(self, reason: str) -> None:
        with self._lock:
            self.closed = reason
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
