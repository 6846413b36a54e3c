"""Numbers, texts and colours as people read them. Pure functions.

Every text that a node or peer sent goes through :func:`plain`.
"""

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from notebook_cluster.protocol.clock import ABSENT, duration
from notebook_cluster.protocol.state import NodeView

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_UNPRINTABLE = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]"  # terminal colours and cursor moves
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles and links of a terminal
    "|[\\x00-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]"  # control characters, text direction marks
)


def plain(text: object, limit: int = 200) -> str:
    """``text`` on one line of at most ``limit`` characters, without control characters or terminal escapes."""
    return _short(" ".join(_UNPRINTABLE.sub(" ", str(text)).split()), limit)


def printable(text: str, limit: int) -> str:
    """The same with its white space as it is: a line of a program's output."""
    return _short(_UNPRINTABLE.sub("", text), limit)


def escaped(text: str) -> str:
    """``text`` for HTML and SVG, also inside an attribute."""
    return html.escape(text, quote=True)


def _short(cleaned: str, limit: int) -> str:
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"


def byte_count(count: float) -> str:
    """``count`` bytes in decimal units: ``0 B``, ``812 kB``, ``1.2 GB``."""
    if not math.isfinite(count) or count <= 0:
        return "0 B"
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if value < 10 and unit > 0 else f"{value:.0f} {_UNITS[unit]}"


def round_trip(milliseconds: float, jitter: float | None) -> str:
    """``1.8 ms ± 0.4 ms``: mean and mean deviation; ``1.8 ms`` while the deviation is not known."""

    def one(value: float) -> str:
        return f"{value:.1f} ms" if value < 10 else duration(value / 1000)

    return one(milliseconds) if jitter is None else f"{one(milliseconds)} ± {one(jitter)}"


def integer(value: int | None) -> str:
    """``value`` with thousands separated, a dash for None."""
    return ABSENT if value is None else f"{value:,}"


def number(value: float | None) -> str:
    """A loss or scalar with four significant digits, 0 as ``0``; ``NaN`` and ``∞`` by name, a dash for None."""
    if value is None:
        return ABSENT
    if value == 0:
        return "0"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3e}"
    digits = 4 if abs(value) < 10 else 3 if abs(value) < 100 else 2 if abs(value) < 1000 else 1
    return f"{value:,.{digits}f}"


def percent(share: float) -> str:
    """``share`` (1.0: all) as ``93 %``, held between 0 and 100."""
    return f"{100 * min(max(share, 0.0), 1.0):.0f} %" if math.isfinite(share) else ABSENT


def global_label(job: str, jobs: Sequence[str]) -> str:
    """What the curve of the global model of ``job`` is called; ``jobs``: all that have one."""
    return plain("global model" if len(jobs) == 1 else f"global model {job}", 64)


def plural(count: int, word: str) -> str:
    """``1 node``, ``3 nodes``."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


PALETTE = (
    "#2f81f7", "#e8853d", "#2da876", "#8f7ae5", "#c9a227", "#35a7c2", "#d9534f", "#7f9a3b", "#a9746e", "#5a7d9a",
    "#28b428", "#9852ec", "#7c7c52", "#ec28ec", "#448a7c", "#b48ac2", "#ec2828", "#52a6ec", "#ec6ede", "#ec286e",
)  # fmt: skip
NO_PLACE = "#8b949e"
GLOBAL = "#c9508a"
"""The global model of a job, which no node has; its line is dotted as well."""


class Placed(Protocol):
    """A node, or what it has put out."""

    @property
    def rank(self) -> int | None: ...

    @property
    def place(self) -> int | None: ...


def palette_colour(place: int | None) -> str:
    """The colour with that number as ``#rrggbb``, the first again after the last; grey for None."""
    return NO_PLACE if place is None else PALETTE[place % len(PALETTE)]


def node_colour(node: Placed) -> str:
    """The colour of ``node`` as ``#rrggbb``: it goes by its place, so that it stays the same when others go. Views kept
    by a version that knew none have the rank."""
    return palette_colour(node.rank if node.place is None else node.place)


def node_colours(nodes: Iterable[NodeView]) -> dict[str, str]:
    """Name -> colour; of nodes that are not in it :func:`palette_colour` of None."""
    return {node.name: node_colour(node) for node in nodes}
