"""Curves as pictures: inline SVG without script or external file, so they survive nbconvert, e-mail and a locked-down
viewer. Pure.

Whatever finite values a node tells, every place on an axis is a finite number: a picture never has NaN in it.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from notebook_cluster.protocol.thinning import Point, evenly
from notebook_cluster.widgets.formatting import escaped

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


_MEMORY_UNITS = ((1e9, "GB"), (1e6, "MB"), (1.0, "bytes"))
_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


def memory_unit(largest: float) -> tuple[float, str]:
    """Divisor and name of the unit in which ``largest`` bytes read well."""
    return next(((scale, name) for scale, name in _MEMORY_UNITS if largest >= scale), _MEMORY_UNITS[-1])


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


_WIDTH, _HEIGHT = 460, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 26, 26
_POINTS, _FEW_POINTS = 200, 60
"""Of a line; where there are more than _MANY lines they share what those have, down to the second number."""
_MANY = 16
_FOR_LABELS, _LABEL_HEIGHT, _LABEL_LETTERS = 150, 12, 18


class Line(NamedTuple):
    """One curve of a picture; ``colour`` is ``#rrggbb``. ``dotted``: a broken line with a dot at each point. ``faint``:
    of an earlier run. ``dash``: 0 solid, else another pattern for each number. ``behind``: pale, others are drawn over
    it. ``strong``: thick, over the others; what is dotted too is not broken then."""

    label: str
    colour: str
    points: Sequence[Point]
    dotted: bool = False
    faint: bool = False
    dash: int = 0
    behind: bool = False
    strong: bool = False


_DASHES = ("", "7 4", "2 3", "9 3 2 3")


def svg_chart(
    title: str,
    horizontal: str,
    lines: Sequence[Line],
    *,
    from_zero: bool = False,
    size: tuple[int, int] = (_WIDTH, _HEIGHT),
    log: bool = False,
    labels: bool = False,
) -> str:
    """One chart as an ``<svg>`` element with axes and a line per curve; empty when no value can be drawn.

    ``horizontal`` labels the x axis. A value that is not finite interrupts its line. With ``from_zero`` the
    y axis begins at 0, for quantities that are never negative. ``size``: pixels where there is room for them. ``log``:
    the y axis is logarithmic, and a value that is not above 0 interrupts its line too. ``labels``: the lines have their
    names at their ends, as many as there is room for, those of strong lines first.
    """

    def drawn(point: Point) -> bool:
        return is_drawable(point[1]) and (point[1] >= LEAST or not log)

    boxes = [box for line in lines if (box := _box(line.points, drawn, log))]
    if not boxes:
        return ""
    width, height = size
    right = width - (_FOR_LABELS if labels else _RIGHT)
    across = LinearAxis(min(box[0] for box in boxes), max(box[1] for box in boxes), _LEFT, right)
    low, high = 0.0 if from_zero and not log else min(box[2] for box in boxes), max(box[3] for box in boxes)
    upward: Axis = (LogAxis if log else LinearAxis)(low, high, height - _BOTTOM, _TOP)
    parts = [
        # The width inline too: pages that show notebooks bring style sheets of their own.
        f'<svg class="nbc-chart" style="max-width:{width}px" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escaped(title)}">',
        f'<text x="{_LEFT}" y="14" class="nbc-chart-title">{escaped(title)}</text>',
        f'<text x="{right}" y="14" text-anchor="end">{escaped(horizontal)}</text>',
        *grid(upward, across, (_LEFT, right), height),
    ]
    over = sorted(lines, key=lambda line: (not line.faint, not line.behind, line.strong))
    points = max(_POINTS * _MANY // max(len(lines), _MANY), _FEW_POINTS)
    parts += [_path(line, across, upward, drawn, points) for line in over]
    parts += _labels(over[::-1], upward, drawn, (right, _TOP, height - _BOTTOM)) if labels else []
    return "".join([*parts, "</svg>"])


def _box(
    points: Sequence[Point], drawn: Callable[[Point], bool], log: bool
) -> tuple[float, float, float, float] | None:
    """Lowest and highest x and y of the ``points`` that are drawn; None when none is."""
    if not points:
        return None
    xs, ys = zip(*points, strict=True)
    # All at once where that is enough: a run has a hundred thousand points, and most have none to leave out.
    if not all(map(math.isfinite, ys)) or max(ys) >= MOST or (min(ys) < LEAST if log else min(ys) <= -MOST):
        points = [point for point in points if drawn(point)]
        if not points:
            return None
        xs, ys = zip(*points, strict=True)
    return min(xs), max(xs), min(ys), max(ys)


def grid(upward: Axis, across: Axis, sides: tuple[float, float], height: int) -> list[str]:
    """Lines and numbers of both axes; ``sides``: where the picture begins and ends across."""
    parts, ticks = [], upward.ticks()
    for tick in ticks:
        y = upward.place(tick)
        parts.append(f'<line x1="{sides[0]}" x2="{sides[1]}" y1="{y:.1f}" y2="{y:.1f}" class="nbc-chart-grid"/>')
        parts.append(f'<text x="{sides[0] - 6}" y="{y + 3.5:.1f}" text-anchor="end">{tick_text(tick, ticks)}</text>')
    return parts + numbers_below(across, height)


def numbers_below(across: Axis, height: int) -> list[str]:
    """The numbers of the axis across."""
    ticks = across.ticks()
    return [
        f'<text x="{across.place(tick):.1f}" y="{height - 8}" text-anchor="middle">{tick_text(tick, ticks)}</text>'
        for tick in ticks
    ]


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` of ``points`` (at least 4), chosen by :func:`.thinning.evenly`: a spike of the loss or of the
    memory stays visible."""
    return [points[index] for index in evenly([value for _, value in points], limit)]


def _path(line: Line, across: Axis, upward: Axis, drawn: Callable[[Point], bool], points: int) -> str:
    commands, dots, pen_down = [], [], False
    for x, y in thin(line.points, points):
        shown = drawn((x, y))
        if shown:
            # h0 draws a dot where a single value has nothing to be joined to.
            place = f"{across.place(x):.1f} {upward.place(y):.1f}"
            commands.append(f"L{place}" if pen_down else f"M{place}h0")
            dots.append(f"M{place}h0")
        pen_down = shown
    if not commands:
        return ""
    stroke = f'fill="none" stroke="{escaped(line.colour)}" stroke-linejoin="round" stroke-linecap="round"'
    opacity = "0.15" if line.faint and line.behind else "0.3" if line.faint else "0.45" if line.behind else ""
    stroke += f' stroke-opacity="{opacity}"' if opacity else ""
    title = f"<title>{escaped(line.label)}</title>"
    width = "2.6" if line.strong and not line.faint else "1.2" if line.faint or line.behind else "1.8"
    if not line.dotted or line.strong:
        dash = _DASHES[line.dash % len(_DASHES)]
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        path = f'<path d="{"".join(commands)}" {stroke}{dashes} stroke-width="{width}">{title}</path>'
    else:
        path = f'<path d="{"".join(commands)}" {stroke} stroke-width="{width}" stroke-dasharray="1 5">{title}</path>'
    return path + (f'<path d="{"".join(dots)}" {stroke} stroke-width="5">{title}</path>' if line.dotted else "")


def _labels(
    lines: Sequence[Line], upward: Axis, drawn: Callable[[Point], bool], room: tuple[float, float, float]
) -> list[str]:
    """The names of ``lines``, the most important first, right of where they end; ``room``: left, top and bottom."""
    left, top, bottom = room
    ends = [(next((y for x, y in reversed(line.points) if drawn((x, y))), None), line) for line in lines]
    named = [(upward.place(y), line) for y, line in ends if y is not None][: int((bottom - top) / _LABEL_HEIGHT)]
    named.sort(key=lambda one: one[0])
    texts = short_labels([line.label for _, line in named], _LABEL_LETTERS)
    parts = []
    for y, (_, line), text in zip(
        spread_out([y for y, _ in named], top, bottom, _LABEL_HEIGHT), named, texts, strict=True
    ):
        weight = ' font-weight="600"' if line.strong and not line.faint else ""
        parts.append(
            f'<path d="M{left + 5} {y:.1f}h7" stroke="{escaped(line.colour)}" stroke-width="3" fill="none"/>'
            f'<text x="{left + 15}" y="{y + 3.5:.1f}"{weight}>{escaped(text)}</text>'
        )
    return parts


def short_labels(names: Sequence[str], most: int) -> list[str]:
    """``names`` in at most ``most`` letters, cut in the middle; of those that would be alike then the part in which
    they begin to differ, and a number where that is alike too."""
    ends = (most - 1) // 2
    cut = [name if len(name) <= most else f"{name[: most - 1 - ends]}…{name[-ends:]}" for name in names]
    alike: dict[str, list[str]] = {}
    for short, name in zip(cut, names, strict=True):
        alike.setdefault(short, []).append(name)
    found = []
    for short, name in zip(cut, names, strict=True):
        others = sorted(set(alike[short]))
        if len(others) > 1:
            columns = enumerate(zip(*others, strict=False))
            begin = next((at for at, letters in columns if len(set(letters)) > 1), min(map(len, others)))
            parts = [f"…{one[begin:]}"[:most] for one in others]
            short = parts[others.index(name)]
            short = short if parts.count(short) == 1 else f"{short[: most - 4]} #{others.index(name) + 1}"
        found.append(short)
    return found


_PAPER = (
    "<style>text{font:11px sans-serif;fill:#57606a}.nbc-chart-title{fill:#1f2328;font-weight:600}"
    ".nbc-chart-grid{stroke:#d0d7de}</style><rect width='100%' height='100%' fill='#ffffff'/>"
)
_NO_XML = re.compile("[\ud800-\udfff\ufffe\uffff]")


def standalone(svg: str) -> str:
    """A picture of :func:`svg_chart` as a file of its own, black on white."""
    whole = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return _NO_XML.sub("\N{REPLACEMENT CHARACTER}", whole.replace(">", f">{_PAPER}", 1))


def memory_lines(lines: list[Line]) -> tuple[str, list[Line]]:
    """The title of a chart of ``lines``, whose points are bytes, and these in the unit that it names."""
    scale, unit = memory_unit(max((y for line in lines for _, y in line.points if math.isfinite(y)), default=0.0))
    return f"Memory ({unit})", [line._replace(points=[(x, y / scale) for x, y in line.points]) for line in lines]
