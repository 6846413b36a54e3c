"""The last rosters of a node, and waiting for the one with which a cell began: it may come after the cell's code."""

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from notebook_cluster.protocol.node import Roster

_KEPT = 16


class Rosters:
    """``add`` is called on the I/O thread, ``wait_for`` on the main thread."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._kept: dict[int, Roster] = {}
        self._waiters: list[tuple[int, SimpleQueue[None]]] = []

    def add(self, roster: Roster) -> None:
        """The newest roster; the node already acts by it."""
        self._kept[roster.generation] = roster
        if len(self._kept) > _KEPT:
            del self._kept[min(self._kept)]
        self._wake()

    def wait_for(self, generation: int, timeout: float, call_soon: Callable[[Callable[[], None]], None]) -> Roster:
        """The roster of ``generation``, or a newer one where that is no longer kept. ``call_soon`` runs something on
        the I/O thread.

        Raises:
            RuntimeError: it did not come within ``timeout`` seconds.
        """
        arrived: SimpleQueue[None] = SimpleQueue()

        def ask() -> None:
            self._waiters.append((generation, arrived))
            self._wake()

        if self._newest() < generation:
            call_soon(ask)
            self._sleep(arrived, generation, timeout)
        return self._kept.get(generation) or self._kept[self._newest()]

    def _sleep(self, arrived: "SimpleQueue[None]", generation: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                return arrived.get(timeout=min(0.2, max(0.0, deadline - time.monotonic())))
            except Empty:
                continue
        have = self._newest() if self._kept else "none"
        raise RuntimeError(
            f"the roster of generation {generation} did not reach {self._node!r} within {timeout:g} s (it has {have}): "
            "run the cell again, or %cluster restart this node"
        )

    def _newest(self) -> int:
        return max(list(self._kept), default=-1)

    def _wake(self) -> None:
        for waiter in list(self._waiters):
            if waiter[0] <= self._newest():
                self._waiters.remove(waiter)
                waiter[1].put(None)
