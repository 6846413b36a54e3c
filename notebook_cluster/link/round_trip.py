"""How long it takes to the other side and back, smoothed as TCP does (RFC 6298)."""

from collections import deque

_OPEN = 16


class RoundTrip:
    """Seconds there and back. A time counts once and only when it was sent: an echo is a claim of the other side.

    Attributes:
        mean: SRTT of RFC 6298 (alpha 1/8), None before the first measurement.
        deviation: RTTVAR (beta 1/4), None before the first measurement.
    """

    def __init__(self) -> None:
        self.mean: float | None = None
        self.deviation: float | None = None
        self._sent: deque[float] = deque(maxlen=_OPEN)

    def sent(self, time: float) -> None:
        """``time``, our clock, goes out now."""
        self._sent.append(time)

    def returned(self, echo: float, now: float) -> None:
        """The other side says ``echo``; ignored unless it is a time that is still out."""
        if echo in self._sent:
            self._sent.remove(echo)
            self.measured(now - echo)

    def measured(self, sample: float) -> None:
        """One time there and back."""
        if self.mean is None or self.deviation is None:
            self.mean, self.deviation = sample, sample / 2
        else:
            self.deviation += (abs(self.mean - sample) - self.deviation) / 4
            self.mean += (sample - self.mean) / 8
