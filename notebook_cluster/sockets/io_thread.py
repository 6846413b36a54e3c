"""One thread with its own zmq.Context that owns all sockets of a node or a view: no other thread touches them."""

import contextlib
import functools
import heapq
import itertools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import zmq

_log = logging.getLogger(__name__)

SENDING, RECEIVING = 1, 2
"""ZMQ_AFFINITY of sockets that mostly send or receive: by itself libzmq gives both ways the same thread at times."""

T = TypeVar("T")
Ready = Callable[[int], None]
"""Called with the ready flags (zmq.POLLIN, zmq.POLLOUT) of a registered socket."""


class IOThread:
    """A poll loop. ``call_soon``, ``call``, ``call_later`` and ``close`` may be called from any thread, the rest on the
    loop only.

    An exception in a callback is logged and the loop goes on: one bad frame must not end a node's network.

    Args:
        io_threads: of libzmq. With two what comes is decrypted while what goes is encrypted (SENDING, RECEIVING).
        linger: milliseconds at the end for what is not sent yet.
    """

    def __init__(self, name: str = "node-io", *, io_threads: int = 2, linger: int = 0) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=io_threads)
        self._linger = linger
        self._poller = zmq.Poller()
        self._ready: dict[Any, Ready] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._closers: list[Callable[[], None]] = []
        self._awake = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether calls are still taken."""
        return self._thread.is_alive() and not self._closing

    @property
    def ended(self) -> bool:
        """Whether the thread is over, and all that was to be done at its end."""
        return not self._thread.is_alive()

    def on_loop(self) -> bool:
        """True on the loop's own thread."""
        return threading.current_thread() is self._thread

    def call_soon(self, callback: Callable[[], None], *, wake: bool = True) -> None:
        """Run ``callback`` on the loop, after those given before it. Without ``wake`` it need not be at once: the loop
        goes on sleeping, and whatever wakes it (the next message, call or timer) finds ``callback`` in front."""
        self._calls.append(callback)
        if wake and not self._awake and not self.on_loop():
            self._awake = True
            with contextlib.suppress(OSError):
                self._wake_sender.send(b"\0")

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Run ``callback`` on the loop after ``delay`` seconds."""
        timer = (time.monotonic() + delay, next(self._timer_numbers), callback)
        if self.on_loop():
            heapq.heappush(self._timers, timer)
        else:
            self.call_soon(lambda: heapq.heappush(self._timers, timer))

    def every(self, period: float, callback: Callable[[float], None]) -> None:
        """Run ``callback(time.monotonic())`` on the loop every ``period`` seconds, until the loop ends."""

        def again() -> None:
            self.call_later(period, again)
            callback(time.monotonic())

        self.call_later(period, again)

    def call(self, callback: Callable[[], T], timeout: float = 5.0) -> T:
        """Run ``callback`` on the loop and return its result or raise its exception.

        Raises:
            TimeoutError: the loop has ended, or did not get to it within ``timeout`` seconds.
        """
        if self.on_loop():
            return callback()
        if not self.running:
            raise TimeoutError("the I/O thread has ended")
        done: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                done.put((callback(), None))
            except BaseException as error:  # handed over to the caller's thread
                done.put((None, error))

        self.call_soon(run)
        try:
            value, error = done.get(timeout=timeout)
        except Exception:
            raise TimeoutError(f"the I/O thread did not answer within {timeout:g} s") from None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def register(self, socket: Any, flags: int, ready: Ready) -> None:
        """Call ``ready(flags)`` whenever ``socket`` is ready; registering again changes flags and callback."""
        self._poller.register(socket, flags)
        self._ready[socket] = ready

    def unregister(self, socket: Any) -> None:
        if socket in self._ready:
            del self._ready[socket]
            self._poller.unregister(socket)

    def at_close(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` on the loop just before it ends."""
        self._closers.append(callback)

    def close(self, timeout: float = 2.0) -> None:
        """End the loop and close every socket of its context; frames not sent within ``linger`` are lost. May be called
        again."""
        if self._thread.is_alive() and not self._closing:
            self.call_soon(self._stop)
        if self._thread.is_alive() and not self.on_loop():
            self._thread.join(timeout)

    def _stop(self) -> None:
        self._closing = True

    def _run(self) -> None:
        self._poller.register(self._wake_receiver.fileno(), zmq.POLLIN)
        wake = self._wake_receiver.fileno()
        try:
            while not self._closing:
                for ready, flags in self._poller.poll(self._wait_ms()):
                    if ready == wake:
                        self._swallow_wake()
                    elif (callback := self._ready.get(ready)) is not None:
                        self._guarded(functools.partial(callback, flags))
                self._run_calls()
                self._run_timers()
        finally:
            self._closing = True
            for closer in self._closers:
                self._guarded(closer)
            self.context.destroy(linger=self._linger)
            self._wake_receiver.close()
            self._wake_sender.close()

    def _wait_ms(self) -> int:
        if self._calls:
            return 0
        if not self._timers:
            return 1000
        return max(0, min(1000, int((self._timers[0][0] - time.monotonic()) * 1000) + 1))

    def _swallow_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)
        # From here on a new call writes a new byte; calls already queued are run below, in this turn.
        self._awake = False

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):
            self._guarded(self._calls.popleft())

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._guarded(heapq.heappop(self._timers)[2])

    def _guarded(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            _log.exception("a callback of the I/O thread failed")
