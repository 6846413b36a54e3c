"""Control messages, mesh frames and ticks to the training job that they are for. Used on the I/O thread only."""

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from pathlib import Path

from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.node import Kept, Roster
from notebook_cluster.protocol.wire import Message
from notebook_cluster.training.runtime import JobHandler

_log = logging.getLogger(__name__)

_MAX_MESSAGES = 1000
_MAX_FRAME_BYTES = 64 << 20
_MAX_JOBS = 64
_MAX_TEXT = 64
_FRAME_COST = 1024
"""Bytes that a held frame may take beside its payload."""


class Jobs:
    """The jobs of one node by name. What comes for a job that no cell has made yet waits, bounded."""

    def __init__(self, on_error: Callable[[str], None]) -> None:
        self.dropped = 0
        self._handlers: dict[str, JobHandler] = {}
        self._messages: defaultdict[str, deque[Message]] = defaultdict(lambda: deque(maxlen=_MAX_MESSAGES))
        self._frames: deque[tuple[str, JobFrame, bytes]] = deque()
        self._frame_bytes = 0
        self._on_error = on_error

    def get(self, name: str) -> JobHandler | None:
        return self._handlers.get(name)

    def register(self, name: str, handler: JobHandler) -> None:
        """From now on ``handler`` is job ``name`` for :meth:`get`; :meth:`deliver_held` then brings what waited."""
        self._handlers[name] = handler

    def deliver_held(self, name: str, roster: Roster | None) -> None:
        """Hand over the roster and, in order, all that came for ``name`` before it was there."""
        handler = self._handlers[name]
        if roster is not None:
            self._guarded(name, lambda: handler.on_roster(roster))
        for message in self._messages.pop(name, ()):
            self.on_control(name, message)
        frames, self._frames, self._frame_bytes = self._frames, deque(), 0
        for sender, header, payload in frames:
            self.on_mesh(sender, header, memoryview(payload))

    def on_control(self, name: str, message: Message) -> None:
        handler = self._handlers.get(name)
        if handler is not None:
            self._guarded(name, lambda: handler.on_control(message))
        elif name in self._messages or len(self._messages) < _MAX_JOBS:
            self._messages[name].append(message)
        else:
            self.dropped += 1

    def on_mesh(self, sender: str, header: JobFrame, payload: memoryview) -> None:
        handler = self._handlers.get(header.job)
        if handler is not None:
            self._guarded(header.job, lambda: handler.on_mesh(sender, header, payload))
        elif is_usable(header) and self._frame_bytes + len(payload) <= _MAX_FRAME_BYTES:
            self._frames.append((sender, header, bytes(payload)))
            self._frame_bytes += len(payload) + _FRAME_COST
        else:
            self.dropped += 1  # asked for again when the job is there

    def keep(self, answer: Callable[[Kept], None], names: Collection[str] = ()) -> None:
        """Save the last committed state of these jobs (no names: of all) in a thread of its own; ``answer`` gets the
        outcome there."""
        wanted = [handler for name, handler in self._handlers.items() if not names or name in names]
        writers = [writer for handler in wanted if (writer := handler.keep()) is not None]
        if not writers:
            answer(Kept(folders=[]))
            return
        threading.Thread(target=_keep, args=(writers, answer), name="checkpoint-keeper", daemon=True).start()

    def tick(self, now: float) -> None:
        for name, handler in list(self._handlers.items()):
            self._guarded(name, lambda handler=handler: handler.on_tick(now))  # type: ignore[misc]

    def on_roster(self, roster: Roster) -> None:
        for name, handler in list(self._handlers.items()):
            self._guarded(name, lambda handler=handler: handler.on_roster(roster))  # type: ignore[misc]

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            _log.exception("job %s failed in the background", name)
            self._on_error(f"job {name!r} failed in the background: {type(error).__name__}: {error}")


def is_usable(header: JobFrame) -> bool:
    """Whether a header from another node may be kept: its names are short."""
    return max(len(header.job), len(header.name), len(header.state_hash)) <= _MAX_TEXT


def _keep(writers: list[Callable[[], Path]], answer: Callable[[Kept], None]) -> None:
    folders, errors = [], []
    for writer in writers:
        try:
            folders.append(str(writer()))
        except Exception as error:  # a job that cannot be saved must not keep the others from it
            errors.append(str(error) or type(error).__name__)
    answer(Kept(folders=folders, error="; ".join(errors)))
