"""Changes of widgets on their way to views: only the newest value of each trait, and not faster than a notebook takes.

jupyter_server drops what comes faster than 1,000 messages or 1 MB a second, and the text of a cell is shown beside the
widgets: so 50 changes and about 100 KB a second for all widgets of all nodes together.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from notebook_cluster.coordinator.kernels.widget_models import Model
from notebook_cluster.protocol.comms import NodeComm

FLUSH_SECONDS = 0.2
MOST_PER_FLUSH = 10
BYTES_PER_SECOND = 100_000
LONGEST_PAUSE = 3.0


class WidgetUpdates:
    """``send`` gets one event for each widget that changed, the one that has waited longest first."""

    def __init__(self, send: Callable[[NodeComm], None]) -> None:
        self._send = send
        self._waiting: dict[str, Model] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_flush = 0.0

    def add(self, model: Model, names: set[str]) -> None:
        """The traits ``names`` of ``model`` have changed."""
        model.changed |= names
        self._waiting.setdefault(model.public, model)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            # Not at once: a callback on a node changes several traits one after the other.
            self._timer = loop.call_at(max(self._next_flush, loop.time() + 0.005), self._flush)

    def forget(self, model: Model) -> None:
        """It is closed."""
        self._waiting.pop(model.public, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _flush(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        size = 0
        for public in list(self._waiting)[:MOST_PER_FLUSH]:
            model = self._waiting.pop(public)
            size += sum(model.sizes.get(name, 0) for name in model.changed)
            state: dict[str, Any] = {name: model.state[name] for name in model.changed if name in model.state}
            model.changed.clear()
            if state:
                self._send(model.event("update", state))
            if size > BYTES_PER_SECOND * FLUSH_SECONDS:
                break
        self._next_flush = loop.time() + min(LONGEST_PAUSE, max(FLUSH_SECONDS, size / BYTES_PER_SECOND))
        if self._waiting:
            self._timer = loop.call_at(self._next_flush, self._flush)
