"""A picture of a few curves for a notebook: SVG, so that it needs no script and a saved notebook keeps it."""

import math
from collections.abc import Mapping, Sequence

from notebook_cluster.widgets.formatting import number, palette_colour, plain
from notebook_cluster.widgets.pictures import Line, svg_chart
from notebook_cluster.widgets.static_html import block, legend, page, text_block

_SIZE = 760, 250


class LineChart:
    """The last expression of a cell shows it.

    Args:
        title: above the picture.
        lines: name -> points (x, y), in the order of x; what is not finite is a gap. Drawn in this order, each in a
            colour of its own, and named below with its last number.
        across: what x is, for example ``seconds``.
    """

    def __init__(self, title: str, lines: Mapping[str, Sequence[tuple[float, float]]], across: str) -> None:
        self._title, self._across = plain(title, 120), plain(across, 40)
        points = {plain(name, 64): [(float(x), float(y)) for x, y in of_line] for name, of_line in lines.items()}
        self._points = {name: [(x, y) for x, y in of_line if math.isfinite(x)] for name, of_line in points.items()}

    def _lines(self) -> list[Line]:
        return [Line(name, palette_colour(place), points) for place, (name, points) in enumerate(self._points.items())]

    def _last(self, name: str) -> str:
        """``three nodes: 0.967 after 6.0``"""
        finite = [(x, y) for x, y in self._points[name] if math.isfinite(y)]
        return f"{name}: {number(finite[-1][1])} after {finite[-1][0]:,.1f}" if finite else f"{name}: nothing yet"

    def _repr_html_(self) -> str:
        lines = self._lines()
        chart = svg_chart(self._title, self._across, lines, size=_SIZE)
        keys = legend((f"{self._last(line.label)} {self._across}", line.colour) for line in lines)
        nothing = text_block("nbc-empty", f"{self._title}: no number to draw yet")
        return page([block("nbc-line-chart", [chart or nothing, keys])], self._title)

    def __repr__(self) -> str:
        return "\n".join([self._title, *(f"  {self._last(name)} {self._across}" for name in self._points)])
