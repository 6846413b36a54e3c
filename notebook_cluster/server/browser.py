"""What waits to be sent to one browser. A slow one gets the newest state and skips what was between."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

MAX_OPEN_ACTIONS = 16
"""Of one browser, at a time."""


class Browser:
    """The outbox of one WebSocket, from :meth:`run` until that is cancelled.

    Args:
        write: sends one text; returns when the socket has taken it.
        history: cluster -> all its curves as one text, or None when it is gone.
    """

    def __init__(self, write: Callable[[str], Awaitable[None]], history: Callable[[str], str | None]) -> None:
        self._write = write
        self._history = history
        self._overview: str | None = None
        self._series: dict[str, str | None] = {}
        """Cluster -> new points, or None: it missed some, or has none yet, and gets all."""
        self._answers: deque[str] = deque(maxlen=16 * MAX_OPEN_ACTIONS)
        self._wake = asyncio.Event()
        self.open_actions = 0

    def put_overview(self, text: str) -> None:
        """In place of one that was not sent yet."""
        self._overview = text
        self._wake.set()

    def put_series(self, cluster: str, text: str | None) -> None:
        """New points of ``cluster``; None: everything."""
        self._series[cluster] = None if cluster in self._series else text
        self._wake.set()

    def put_answer(self, text: str) -> None:
        """What became of an action."""
        self._answers.append(text)
        self._wake.set()

    async def run(self) -> None:
        """Send what is put, answers first."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (text := self._next()) is not None:
                if text:
                    await self._write(text)

    def _next(self) -> str | None:
        """The next text, empty when it is nothing any more, None when there is none."""
        if self._answers:
            return self._answers.popleft()
        if self._overview is not None:
            text, self._overview = self._overview, None
            return text
        if self._series:
            cluster = next(iter(self._series))
            points = self._series.pop(cluster)
            return points if points is not None else self._history(cluster) or ""
        return None
