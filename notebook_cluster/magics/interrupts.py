"""The Stop button while a cell waits: counted, not raised, and told from the end of the kernel."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Literal

SAME_PRESS_SECONDS = 0.5
SHUTDOWN_FOLLOWS_SECONDS = 0.5
"""Jupyter sends a kernel that is to restart or shut down SIGINT first, as for Stop, and the request right after it."""


class StopCounter:
    """Counts SIGINT instead of raising KeyboardInterrupt, so that no event is lost and no message is cut in two.

    What waits must look at ``count`` often; it waits in slices of at most 0.2 s. Outside the main thread, where Python
    allows no handler, it counts nothing.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None
        self._installed = False

    def __enter__(self) -> "StopCounter":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def asked_to_end(shell: Any) -> Literal["", "restart", "shutdown"]:
    """What a frontend has asked the kernel of ``shell`` to do: ipykernel keeps the answer to the request."""
    message = getattr(getattr(shell, "kernel", None), "_shutdown_message", None)
    if not isinstance(message, dict):
        return ""
    return "restart" if message.get("content", {}).get("restart") else "shutdown"
