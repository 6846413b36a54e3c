"""What waits to be sent to one browser, as JSON, and what a browser may say."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from notebook_cluster.protocol.sidebar import Action, ServerMessage

MAX_OPEN_ACTIONS = 16
"""Of one browser, at a time."""


class BrowserOutbox:
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


MAX_ACTION_BYTES = 16 * 1024


class BadAction(ValueError):
    """What a browser or script sent is not an Action; one line that says why. ``id`` is its id, 0 if it has none."""

    def __init__(self, text: str, id: int = 0) -> None:
        super().__init__(text)
        self.id = id


def to_json(message: ServerMessage) -> str:
    """``message`` with its type and every field; numbers that are not finite become null."""
    return msgspec.json.encode({"type": type(message).__name__, **_plain(message)}).decode()


def _plain(value: Any) -> Any:
    # msgspec leaves out what has its default value, which is right between Python programs only.
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list):
        # Curves and lists of text go through whole.
        return [_plain(item) for item in value] if value and isinstance(value[0], msgspec.Struct) else value
    return value


def to_action(data: bytes | str) -> Action:
    """The Action in ``data``.

    Raises:
        BadAction: it is too long, or not one.
    """
    if len(data) > MAX_ACTION_BYTES:
        raise BadAction(f"an action of {len(data)} bytes is over the limit of {MAX_ACTION_BYTES}")
    try:
        return msgspec.json.decode(data, type=Action)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadAction(f"this is not an action ({error}): see protocol/sidebar.py", _id_in(data)) from None


def _id_in(data: bytes | str) -> int:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return 0
    number = found.get("id") if isinstance(found, dict) else 0
    return number if isinstance(number, int) and not isinstance(number, bool) else 0
