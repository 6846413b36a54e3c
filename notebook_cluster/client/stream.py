"""What a cell does, event by event; waiting that Stop can end; and many requests of which a few are open at a time."""

import concurrent.futures
import contextlib
import queue
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from notebook_cluster.client.connection import ClusterError, Connection
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.transfers import CHUNKS_AT_ONCE

T = TypeVar("T")
_WAKE = object()
TELL_BYTES = 512 * 1024
"""Of output between two words to the coordinator about how far this view has read."""


class CellStream:
    """The events of one cell, in order."""

    def __init__(self, connection: Connection, events: "queue.SimpleQueue[Any]", cell: int) -> None:
        self._connection = connection
        self._events = events
        self.cell = cell
        self._told = 0
        self._ended = False

    def get(self, timeout: float | None = None) -> Any:
        """The next event (one of ``CELL_EVENTS``), or None after ``timeout`` seconds. CellEnded is the last one.

        Raises:
            ClusterError: the cluster ended or its coordinator died.
        """
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if event is _WAKE:
            return None
        if event is None:
            raise ClusterError(self._connection.closed or "the cluster has ended")
        if isinstance(event, v.CellEnded):
            self._ended = True
            self.close()
        elif isinstance(event, v.CellOutput) and event.position - self._told > TELL_BYTES:
            self._told = event.position
            self._connection.tell(v.OutputTaken(cell=self.cell, position=event.position))
        return event

    def wake(self) -> None:
        """Let :meth:`get` return None now. From any thread, and from a signal handler."""
        self._events.put(_WAKE)

    def put_back(self, event: Any) -> None:
        """Have :meth:`get` return ``event``, which it has returned before, once more; None: raise again."""
        self._events.put(event)

    def close(self) -> None:
        """Stop listening; the cell goes on."""
        watched = self._connection.unwatch(self.cell, self._events)
        if not self._ended:
            self._ended = True
            if watched:
                self._connection.tell(v.Unwatch(cell=self.cell))


def wait(future: "concurrent.futures.Future[T]") -> T:
    """The result; waits in short slices, so that Stop works everywhere."""
    while True:
        with contextlib.suppress(concurrent.futures.TimeoutError):
            return future.result(0.2)


Answer = TypeVar("Answer")
Progress = Callable[[int, int], None]
"""Called with (bytes that have arrived, bytes in all)."""


def paced(requests: "Iterator[concurrent.futures.Future[Answer]]", at_once: int = CHUNKS_AT_ONCE) -> Iterator[Answer]:
    """The answers in order; taking the next item of ``requests`` sends one more, at most ``at_once`` ahead."""
    waiting: deque[concurrent.futures.Future[Answer]] = deque()
    for request in requests:
        waiting.append(request)
        if len(waiting) >= at_once:
            yield wait(waiting.popleft())
    while waiting:
        yield wait(waiting.popleft())
