"""Curves as pictures: inline SVG without script or external file, so they survive nbconvert, e-mail and a locked-down
viewer. Pure.
"""

import html
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from notebook_cluster.protocol.thinning import Point, evenly
from notebook_cluster.widgets.axes import LEAST, Axis, LinearAxis, LogAxis, is_drawable, spread_out, tick_text

_WIDTH, _HEIGHT = 460, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 26, 26
_POINTS = 200
_FOR_LABELS, _LABEL_HEIGHT, _LABEL_LETTERS = 150, 12, 20


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

    finite = [point for line in lines for point in line.points if drawn(point)]
    if not finite:
        return ""
    width, height = size
    right = width - (_FOR_LABELS if labels else _RIGHT)
    across = LinearAxis(min(x for x, _ in finite), max(x for x, _ in finite), _LEFT, right)
    low, high = 0.0 if from_zero and not log else min(y for _, y in finite), max(y for _, y in finite)
    upward: Axis = (LogAxis if log else LinearAxis)(low, high, height - _BOTTOM, _TOP)
    parts = [
        # The width inline too: pages that show notebooks bring style sheets of their own.
        f'<svg class="nbc-chart" style="max-width:{width}px" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{_escaped(title)}">',
        f'<text x="{_LEFT}" y="14" class="nbc-chart-title">{_escaped(title)}</text>',
        f'<text x="{right}" y="14" text-anchor="end">{_escaped(horizontal)}</text>',
        *grid(upward, across, (_LEFT, right), height),
    ]
    over = sorted(lines, key=lambda line: (not line.faint, not line.behind, line.strong))
    parts += [_path(line, across, upward, drawn) for line in over]
    parts += _labels(over[::-1], upward, drawn, (right, _TOP, height - _BOTTOM)) if labels else []
    return "".join([*parts, "</svg>"])


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


def _path(line: Line, across: Axis, upward: Axis, drawn: Callable[[Point], bool]) -> str:
    commands, dots, pen_down = [], [], False
    for x, y in thin(line.points, _POINTS):
        shown = drawn((x, y))
        if shown:
            # h0 draws a dot where a single value has nothing to be joined to.
            place = f"{across.place(x):.1f} {upward.place(y):.1f}"
            commands.append(f"L{place}" if pen_down else f"M{place}h0")
            dots.append(f"M{place}h0")
        pen_down = shown
    if not commands:
        return ""
    stroke = f'fill="none" stroke="{_escaped(line.colour)}" stroke-linejoin="round" stroke-linecap="round"'
    opacity = "0.15" if line.faint and line.behind else "0.3" if line.faint else "0.45" if line.behind else ""
    stroke += f' stroke-opacity="{opacity}"' if opacity else ""
    title = f"<title>{_escaped(line.label)}</title>"
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
        weight = ' font-weight="600"' if line.strong else ""
        parts.append(
            f'<path d="M{left + 5} {y:.1f}h7" stroke="{_escaped(line.colour)}" stroke-width="3" fill="none"/>'
            f'<text x="{left + 15}" y="{y + 3.5:.1f}"{weight}>{_escaped(text)}</text>'
        )
    return parts


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


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
