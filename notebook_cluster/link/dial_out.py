"""The side of a link that is connected to, dialling nevertheless: an agent that nobody can reach from outside."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from notebook_cluster.link.channel import Condition, LinkSettings
from notebook_cluster.link.connection import DialledConnection
from notebook_cluster.link.frames import Arrival, Drops
from notebook_cluster.protocol import PROTOCOL_VERSION, encode
from notebook_cluster.security import Identity

_MAX_BACKOFF = 6
"""The pause after a refusal grows to this many times ``LinkSettings.retry``."""


class DialOut:
    """A connection to the reception of a coordinator, kept up for ever: made by :meth:`.listener.Listener.dial_out`.

    ``on_condition(condition, reason)`` is called on the loop: *connecting* at first, *connected*, *lost* (the
    connection broke or none can be made), *refused* (the coordinator does not know this agent's key). From each it
    keeps trying.

    Attributes:
        condition, reason: as last told to ``on_condition``.
        routing_id: names this connection among the listener's.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        server_key: str,
        identity: Identity,
        *,
        routing_id: bytes,
        settings: LinkSettings,
        on_frames: Callable[[list[bytes]], None],
        on_condition: Callable[[str, str], None],
        on_close: Callable[[], None],
        drops: Drops,
    ) -> None:
        self.address = address
        self.server_key = server_key
        self.routing_id = routing_id
        self.condition: Condition = "connecting"
        self.reason = ""
        self._context, self._identity, self._settings = context, identity, settings
        self._on_frames, self._on_condition, self._on_close = on_frames, on_condition, on_close
        self._drops = drops
        self._loop = asyncio.get_running_loop()
        self._refusals = 0
        self._closed = False
        self._watch: asyncio.TimerHandle | None = None
        self._connect()

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        """Queue one message. False: no connection now, or as much as may wait for it waits already."""
        return self._connection.send(frames)

    def close(self) -> None:
        """Disconnect and stop trying. May be called again."""
        if not self._closed:
            self._closed = True
            self._stop_watching()
            self._connection.close()
            self._on_close()

    def _connect(self) -> None:
        self._connection = DialledConnection(
            self._context,
            self.address,
            self.server_key,
            self._identity,
            on_frames=self._on_frames,
            on_up=self._on_up,
            on_down=self._on_down,
            on_refused=self._on_refused,
            drops=self._drops,
        )
        self._watch_for(self._settings.stuck)

    def _reconnect(self) -> None:
        """A fresh socket: libzmq does not try again after a refusal or a protocol error."""
        self._connection.close()
        self._connect()

    def _watch_for(self, seconds: float) -> None:
        """Take a fresh socket unless there is a sign of this one within ``seconds``."""
        self._stop_watching()
        if not self._closed:
            self._watch = self._loop.call_later(seconds, self._reconnect)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _on_up(self) -> None:
        self._stop_watching()
        self._refusals = 0
        self._connection.send([encode(Arrival(PROTOCOL_VERSION))])
        self._become("connected", "")

    def _on_down(self, trouble: str, answered: bool) -> None:
        self._watch_for(self._settings.stuck)
        self._become("lost", trouble)

    def _on_refused(self) -> None:
        self._refusals += 1
        self._watch_for(min(2 ** (self._refusals - 1), _MAX_BACKOFF) * self._settings.retry)
        self._become(
            "refused",
            f"{self.address.removeprefix('tcp://')} does not trust this machine: pair again with "
            "`notebook-cluster share --dial HOST:PORT --code CODE`",
        )

    def _become(self, condition: Condition, reason: str) -> None:
        if (condition, reason) != (self.condition, self.reason):
            self.condition, self.reason = condition, reason
            self._on_condition(condition, reason)
