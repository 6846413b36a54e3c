"""When a node is at a boundary: after so many steps, or so many seconds, evenly spread over a model's fragments."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Seconds:
    """``every=nc.Seconds(30)``: a boundary at the first step that ends 30 seconds or more after the last round.

    Machines of unlike speed then reach it at nearly the same time, each with as many steps as it could take; a round
    weighs their work by samples.

    Raises:
        ValueError: not a finite number above 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        value = self.seconds
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value) and value > 0):
            raise ValueError(f"Seconds({value!r}): use a number of seconds above 0, for example nc.Seconds(30)")

    def __str__(self) -> str:
        return f"{self.seconds:g} seconds"


class Schedule:
    """Boundaries of one node: those of ``fragments`` fragments are spread evenly over ``every``."""

    def __init__(self, every: int | Seconds, fragments: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps = 0
        """Since the last boundary."""
        self._every, self._fragments, self._clock = every, fragments, clock
        self._from = clock()
        self._before = 0

    def count(self) -> None:
        """One inner step."""
        self.steps += 1

    def is_due(self, fragment: int) -> bool:
        """True when the contribution of ``fragment`` is to be sent: the last boundary was that of the one before."""
        if isinstance(self._every, Seconds):
            return self._clock() - self._from >= self._every.seconds / self._fragments
        return self.steps >= interval(self._every, self._fragments, fragment)

    def boundary(self) -> None:
        """The contribution was handed over: steps count towards the next one."""
        self._before, self.steps = self.steps, 0
        self._from = self._clock()

    def take_back(self) -> None:
        """The contribution came back: the node is at that boundary still."""
        self.steps += self._before
        self._before = 0

    def since_boundary(self, is_open: bool) -> int:
        """Steps since the last boundary, or where its round ``is_open`` since the one before."""
        return self.steps + (self._before if is_open else 0)

    def applied(self) -> None:
        """A round changed the model: seconds count from here, at nearly the same moment on all nodes."""
        self._from = self._clock()

    def keep(self, steps: int) -> None:
        """The state was taken over: at most ``steps`` of the work is still there."""
        self.steps = min(self.steps, steps)
        self._from = self._clock()


def interval(every: int, fragments: int, fragment: int) -> int:
    """Steps between the boundary of the fragment before and that of ``fragment``; they add up to ``every``."""
    return every * (fragment + 1) // fragments - every * fragment // fragments
