"""Notices that this machine was asleep."""

import sys
import time
from collections.abc import Callable

SLEPT_S = 3.0
"""A shorter gap is none: clocks are not read at the same moment."""


class SleepWatch:
    """Compares a clock that goes on during sleep with one that stands still.

    Linux and macOS have such a pair, which setting the time of day leaves alone. Elsewhere it is the wall clock
    against the monotonic one, and a wall clock that somebody sets forward looks like sleep.

    Args:
        through: seconds of a clock that goes on during sleep.
        awake: seconds of one that does not.
    """

    def __init__(self, through: Callable[[], float] | None = None, awake: Callable[[], float] | None = None) -> None:
        self._through = through or _through_sleep
        self._awake = awake or time.monotonic
        self._offset = self._difference()

    def check(self) -> float:
        """Seconds of sleep since the last call; 0.0 for none."""
        offset = self._difference()
        slept, self._offset = offset - self._offset, offset
        return slept if slept > SLEPT_S else 0.0

    def _difference(self) -> float:
        return self._through() - self._awake()


def _through_sleep() -> float:
    # macOS calls CLOCK_MONOTONIC what goes on during sleep; Python's monotonic() is another clock there.
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC if sys.platform == "darwin" else None)
    return time.time() if clock is None else time.clock_gettime(clock)
