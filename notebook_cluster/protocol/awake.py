"""A clock that stands still while this process did not run: a judge who slept must not hold it against anybody. And one
that goes on while the machine sleeps."""

import sys
import time

LATE = 1.0
"""Seconds between two readings that are taken for a pause (a sleeping machine, a stopped or starved process)."""


class AwakeClock:
    """Reads as the clock it is given, less the pauses. To be read a few times a second.

    Attributes:
        pause: seconds that were left out at the last reading.
    """

    def __init__(self) -> None:
        self.pause = 0.0
        self._before: float | None = None
        self._paused = 0.0

    def read(self, now: float) -> float:
        """The time without pauses, when it is ``now`` (seconds, never going back) on the clock."""
        since = 0.0 if self._before is None else now - self._before
        self.pause = since if since > LATE else 0.0
        self._before = now
        self._paused += self.pause
        return now - self._paused


def clock_through_sleep() -> float:
    """Seconds, also those in which the machine sleeps. On Linux and macOS setting the time of day leaves them alone."""
    # macOS calls CLOCK_MONOTONIC what goes on during sleep; Python's monotonic() is another clock there.
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC if sys.platform == "darwin" else None)
    return time.time() if clock is None else time.clock_gettime(clock)
