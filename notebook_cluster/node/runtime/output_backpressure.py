"""``print()`` on a node waits while the link to the coordinator is behind, as it would on a slow terminal.

ipykernel's streams take whatever is written and keep it in memory. The agent says when that is more than the link takes
(:class:`.HoldOutput`); until it says that the link is free again, whoever writes from the main thread or through the
kernel's file descriptors waits. Stop ends such a wait. A long text goes in pieces, so that all of it fits.
"""

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from notebook_cluster.protocol.node import HoldOutput

BELIEVED_SECONDS = 10.0
"""An agent that holds says so again every 2 s."""
_SLICE = 0.1
PIECE = 1 << 18
"""Characters that are handed on at once."""
_PAUSE = 0.01
"""Seconds between two of them: 25 MB/s is more than is read, and leaves an agent that is behind the time to say so."""


class OutputGate:
    """Open, until the agent says that output is to wait."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._until = 0.0
        self._pid = os.getpid()
        self._wrapped: list[Any] = []

    def install(self) -> None:
        """Let ``sys.stdout`` and ``sys.stderr`` pass here; streams that are not ipykernel's are left as they are."""
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "pub_thread"):
                stream.write = functools.partial(self._write, stream, stream.write)  # type: ignore[method-assign]
                self._wrapped.append(stream)

    def uninstall(self) -> None:
        """Take that back."""
        self._open.set()
        for stream in self._wrapped:
            del stream.write
        self._wrapped.clear()

    def on_message(self, message: HoldOutput) -> None:
        """What the agent says."""
        if message.hold:
            self._until = time.monotonic() + BELIEVED_SECONDS
            self._open.clear()
        else:
            self._open.set()

    def _write(self, stream: Any, write: Callable[[str], int | None], text: str) -> int | None:
        self._wait(stream)
        if not isinstance(text, str) or len(text) <= PIECE or os.getpid() != self._pid:
            return write(text)
        # In one message it would be more than the link takes, and all of it left out.
        for start in range(0, len(text), PIECE):
            self._wait(stream)
            write(text[start : start + PIECE])
            stream.flush()
            time.sleep(_PAUSE)
        return len(text)

    def _wait(self, stream: Any) -> None:
        if not self._open.is_set() and self._may_wait(stream):
            while not self._open.wait(_SLICE) and time.monotonic() < self._until:
                pass

    def _may_wait(self, stream: Any) -> bool:
        """Not the threads that send what was written, or that hear that it goes on; nor a forked child."""
        thread = threading.current_thread()
        if os.getpid() != self._pid:
            return False
        return thread is threading.main_thread() or thread is getattr(stream, "watch_fd_thread", None)
