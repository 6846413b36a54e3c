"""The axes of a picture: values onto pixels, and where they have numbers. Pure.

Whatever finite values a node tells, every place is a finite number: a picture never has NaN in it.
"""

import math
from typing import Protocol

LEAST = 1e-300
"""Of what is spread over an axis, and what has a place on a logarithmic one."""
MOST = 1e300
"""What is beyond cannot be drawn: the difference of two such numbers may be infinite."""


def is_drawable(value: float) -> bool:
    """True when an axis has a place for ``value``."""
    return math.isfinite(value) and abs(value) < MOST


class Axis(Protocol):
    """Maps values onto pixels."""

    def place(self, value: float) -> float: ...

    def ticks(self) -> list[float]: ...


class LinearAxis:
    """Values from ``low`` to ``high`` onto pixels from ``first`` to ``last``."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        spread = max(high - low if high > low else abs(high) or 1.0, LEAST)
        if high <= low:
            low = max(low - spread / 2, 0.0) if low >= 0 else low - spread / 2
        self.low, self.spread, self.first, self.last = low, spread, first, last

    def place(self, value: float) -> float:
        return self.first + (value - self.low) / self.spread * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Two to six round values (1, 2, 2.5 or 5 times a power of ten) inside the axis."""
        rough = self.spread / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= rough)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor((self.low + self.spread) / step + 1e-9) + 1)]


class LogAxis:
    """Values above 0 from ``low`` to ``high``, each factor of ten as long as another."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        if high <= low:
            low, high = low / 2, high * 2
        self._low, self._high = max(low, LEAST), high
        self._axis = LinearAxis(math.log10(self._low), math.log10(high), first, last)

    def place(self, value: float) -> float:
        return self._axis.place(math.log10(value))

    def ticks(self) -> list[float]:
        """Powers of ten, at most six of them; of less than two also 2 and 5 times those, or round values."""
        low, high = math.log10(self._low), math.log10(self._high)
        powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
        if len(powers) > 1:
            every = -(-len(powers) // 6)
            return [10.0**power for power in powers if power % every == 0]
        between = range(math.floor(low), math.ceil(high) + 1)
        found = [factor * 10.0**power for power in between for factor in (1, 2, 5)]
        inside = [value for value in found if self._low <= value <= self._high]
        if len(inside) > 1:
            return inside
        return [value for value in LinearAxis(self._low, self._high, 0, 1).ticks() if value > 0]


def tick_text(value: float, ticks: list[float]) -> str:
    """``value``, one of ``ticks``, with as many digits as tell them apart."""
    for digits in (6, 9, 12, 15):
        texts = {f"{one:.{digits}g}" for one in ticks}
        if len(texts) == len(ticks):
            return _short(value, digits)
    return _short(value, 15)


def _short(value: float, digits: int) -> str:
    return f"{value:.{digits}g}" if abs(value) < 1e5 or digits > 6 else f"{value:.1e}"


_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


def time_unit(last: float) -> tuple[float, str]:
    """For an axis of times that ends at ``last`` seconds: the seconds of its unit, and the unit."""
    return next((scale, unit) for least, scale, unit in _UNITS if last >= least or least == 0.0)


def spread_out(places: list[float], first: float, last: float, apart: float) -> list[float]:
    """``places``, in rising order, moved as little as is needed to be ``apart`` and between ``first`` and ``last``,
    where there is room for all."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + apart if moved else first))
    limit = last
    for index in range(len(moved) - 1, -1, -1):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - apart
    return moved
