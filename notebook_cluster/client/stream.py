"""What a cell does, event by event, and waiting that Stop can end."""

import concurrent.futures
import contextlib
import queue
from typing import Any, TypeVar

from notebook_cluster.client.connection import ClusterError, Connection
from notebook_cluster.protocol import views as v

T = TypeVar("T")


class CellStream:
    """The events of one cell, in order."""

    def __init__(self, connection: Connection, events: "queue.SimpleQueue[Any]", cell: int) -> None:
        self._connection = connection
        self._events = events
        self.cell = cell

    def get(self, timeout: float | None = None) -> v.CellOutput | v.CellChanged | v.CellEnded | None:
        """The next event, or None after ``timeout`` seconds. CellEnded is the last one.

        Raises:
            ClusterError: the cluster ended or its coordinator died.
        """
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if event is None:
            raise ClusterError(self._connection.closed or "the cluster has ended")
        if isinstance(event, v.CellEnded):
            self.close()
        return event  # type: ignore[no-any-return]

    def close(self) -> None:
        """Stop listening; the cell goes on."""
        self._connection.unwatch(self.cell)


def wait(future: "concurrent.futures.Future[T]") -> T:
    """The result; waits in short slices, so that Stop works everywhere."""
    while True:
        with contextlib.suppress(concurrent.futures.TimeoutError):
            return future.result(0.2)
