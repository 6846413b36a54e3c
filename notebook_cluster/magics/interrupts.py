"""The Stop button while a cell waits: counted, not raised."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SAME_PRESS_SECONDS = 0.5


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
