"""How often something is sent to the browser."""


class Pace:
    """Lets at most one act pass per ``interval`` seconds; the last one asked for is never lost."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._next = 0.0
        self._asked = False

    def take_from(self, now: float) -> None:
        """An act was made at ``now`` by other means."""
        self._next = now + self.interval

    def ask(self) -> None:
        """Something changed that should be sent."""
        self._asked = True

    def wait(self, now: float) -> float | None:
        """Seconds from ``now`` (monotonic) until the next act is due; None when nothing was asked for."""
        return max(self._next - now, 0.0) if self._asked else None

    def take(self, now: float) -> bool:
        """True once when an act is due at ``now``; the caller then does it."""
        if not self._asked or now < self._next:
            return False
        self._asked, self._next = False, now + self.interval
        return True
