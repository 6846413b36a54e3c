"""How much came over a connection and was not delivered.

libzmq limits a part and the number of messages that wait, not the number of parts: it would keep a message that never
ends for ever. What waits within the limits is far less, so such a connection is cut.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from notebook_cluster.link.drops import Drops
from notebook_cluster.link.tcp import cut, received_bytes, remote_end

MAX_UNDELIVERED = 320 << 20
"""Bytes: the longest queue of the largest pieces, and some."""
LOOK_EVERY = 0.5
"""Seconds."""
_PART_COST = 64
"""Bytes that a part costs on the wire beside its content, at most."""


@dataclass(slots=True)
class _Open:
    remote: object
    delivered: int = 0


class Backlog:
    """Watches the connections of one socket, known by their file descriptors; make it inside the running loop."""

    def __init__(self, drops: Drops) -> None:
        self._drops = drops
        self._open: dict[int, _Open] = {}
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(LOOK_EVERY, self._look)

    def opened(self, descriptor: int) -> None:
        """A connection was made."""
        self._open[descriptor] = _Open(remote_end(descriptor))

    def closed(self, descriptor: int) -> None:
        """It is gone."""
        self._open.pop(descriptor, None)

    def delivered(self, descriptor: int, parts: Sequence[Any]) -> None:
        """A message of these parts was taken from the socket."""
        if (connection := self._open.get(descriptor)) is not None:
            connection.delivered += sum(len(part) + _PART_COST for part in parts)

    def close(self) -> None:
        self._timer.cancel()
        self._open.clear()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_EVERY, self._look)
        for descriptor, connection in list(self._open.items()):
            if received_bytes(descriptor) - connection.delivered > MAX_UNDELIVERED:
                self._drops.note("endless", "cut the connection of %s: a message without end", connection.remote)
                self._open.pop(descriptor)
                cut(descriptor, connection.remote)
