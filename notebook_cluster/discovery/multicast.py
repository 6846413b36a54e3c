"""A thread that owns one Zeroconf object and follows the machine's network interfaces.

zeroconf takes over a running asyncio loop when it is made on one and then refuses its blocking calls; in a thread of
its own it works the same everywhere. Wi-Fi may come later, a cable may be pulled: interfaces are compared regularly.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from notebook_cluster.discovery.addresses import local_addresses

if TYPE_CHECKING:
    from zeroconf import Zeroconf

_INTERFACE_SECONDS = 3.0
_CLOSE_SECONDS = 5.0
OLD_RECORDS_STAY = 1.2
"""Seconds after which a record has given way to a newer one everywhere (RFC 6762, 10.2: one second)."""
_log = logging.getLogger(__name__)


class MulticastThread:
    """Makes a Zeroconf on all interfaces and calls, always on its own thread:

    - ``opened(zeroconf)`` once it is there, again after an exception in it, at each look at the interfaces
    - ``looked(zeroconf)`` at each later look, after it follows the interfaces that are there now
    - ``closing(zeroconf)`` before it is closed

    Attributes:
        problem: why mDNS does not work now, or empty.
    """

    def __init__(
        self,
        name: str,
        *,
        opened: "Callable[[Zeroconf], None]",
        looked: "Callable[[Zeroconf], None]",
        closing: "Callable[[Zeroconf], None]",
    ) -> None:
        self.problem = ""
        self._opened, self._looked, self._closing = opened, looked, closing
        self._tasks: queue.SimpleQueue[Callable[[Zeroconf], None] | None] = queue.SimpleQueue()
        self._later: list[tuple[float, Callable[[Zeroconf], None]]] = []
        self._zeroconf: Zeroconf | None = None
        self._is_open = False
        self._interfaces: tuple[str, ...] = ()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, task: "Callable[[Zeroconf], None]") -> None:
        """Call ``task(zeroconf)`` on the thread."""
        self._tasks.put(task)

    def post_later(self, seconds: float, task: "Callable[[Zeroconf], None]") -> None:
        """Call ``task(zeroconf)`` on the thread after ``seconds``. Only from the thread itself."""
        self._later.append((time.monotonic() + seconds, task))

    def close(self) -> None:
        """Say goodbye on the network and end the thread. May be called again, or without start."""
        if not self._closed and self._thread.is_alive():
            self._closed = True
            self._tasks.put(None)
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        look_at = 0.0
        while True:
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _INTERFACE_SECONDS
                self._guarded(self._follow_interfaces)
            for entry in [entry for entry in self._later if entry[0] <= now]:
                self._later.remove(entry)
                self.post(entry[1])
            wake_at = min([look_at, *(when for when, _ in self._later)])
            try:
                task = self._tasks.get(timeout=max(wake_at - time.monotonic(), 0.0))
            except queue.Empty:
                continue
            if task is None:
                break
            if self._zeroconf is not None:
                self._guarded(task, self._zeroconf)
        if self._zeroconf is not None:
            self._guarded(self._closing, self._zeroconf)
            self._guarded(self._zeroconf.close)

    def _follow_interfaces(self) -> None:
        interfaces = local_addresses()
        if self._zeroconf is None:
            from zeroconf import IPVersion, Zeroconf

            self._zeroconf = Zeroconf(interfaces=list(interfaces), ip_version=IPVersion.V4Only)
        elif interfaces != self._interfaces:
            _log.info("network changed: mDNS on %s", ", ".join(interfaces))
            self._zeroconf.update_interfaces(interfaces=list(interfaces))
        self._interfaces = interfaces
        if not self._is_open:
            self._opened(self._zeroconf)
            self._is_open = True
        else:
            self._looked(self._zeroconf)
        self.problem = ""

    def _guarded(self, action: Callable[..., None], *arguments: object) -> None:
        """Run ``action``; the network may make anything of it fail, which must not end the thread."""
        try:
            action(*arguments)
        except Exception as error:
            problem = str(error) or type(error).__name__
            if problem != self.problem:
                _log.warning("mDNS: %s", problem)
            self.problem = problem
