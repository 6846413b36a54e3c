"""The curves of a cluster, kept small, and as pictures.

New points are merged, long curves thinned without losing their peaks: pure data, used by the plotly figure too. The
pictures are inline SVG: no script, no external file, so they survive nbconvert, e-mail and a locked-down viewer.
"""

import html
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from notebook_cluster.protocol.runs import places
from notebook_cluster.protocol.state import Series
from notebook_cluster.protocol.thinning import Point, ThinnedCurve, ThinnedCurves, evenly
from notebook_cluster.widgets.formatting import plain


class LossCurve(NamedTuple):
    """The loss of a node, or of the global model, in one run of a job."""

    node: str
    job: str
    run: int
    curve: ThinnedCurve
    newest: bool
    """No run of this job was begun later."""
    of_run: str
    """``generator``, ``model run 2``; empty where nothing else is drawn."""
    dash: int
    """0, 1, 2 ... for the jobs in the order in which they appeared: several are told apart by more than their names."""


class CurveChoice(NamedTuple):
    """What the curves of a panel show."""

    metric: str = "loss"
    smooth: bool = True
    """Nodes' numbers as a running mean; those of a global model are never."""
    log: bool = False
    """The axis of the metric is logarithmic: what is not above 0 is a gap."""


class Curves:
    """All curves in the order in which they appeared: of nodes, and of the global models of jobs."""

    def __init__(self, series: Iterable[Series] = ()) -> None:
        self._curves = ThinnedCurves()
        for one in series:
            key = one.node, one.job, one.run, one.name
            self._curves.extend(key, one.step, one.time, one.value, one.seen)
        self._history_ends = {key: max(curve.time, default=0.0) for key, curve in self._curves.items()}

    def add_new(self, series: Iterable[Series]) -> None:
        """Append points of SeriesAdded events, except those that the first series held already."""
        for one in series:
            key = one.node, one.job, one.run, one.name
            end = self._history_ends.get(key, -math.inf)
            rows = [row for row in zip(one.step, one.time, one.value, strict=False) if row[1] > end]
            if rows:
                step, time, value = zip(*rows, strict=True)
                self._curves.extend(key, step, time, value)

    def series(self) -> list[Series]:
        """All curves as messages."""
        return [
            Series(
                node=node,
                job=job,
                run=run,
                name=name,
                step=list(curve.step),
                time=list(curve.time),
                value=list(curve.value),
                seen=curve.seen,
            )
            for (node, job, run, name), curve in self._curves.items()
        ]

    def get(self, node: str, name: str) -> ThinnedCurve:
        """The curve that was begun last, or an empty one."""
        found = [curve for key, curve in self._curves.items() if (key[0], key[3]) == (node, name) and curve.time]
        return max(found, key=lambda curve: curve.time[0], default=ThinnedCurve())

    def nodes(self) -> list[str]:
        """Names of the nodes that have a curve, each once."""
        return list(dict.fromkeys(node for node, _, _, _ in self._curves if node))

    def metrics(self) -> list[str]:
        """Names of what is trained for or reported, those begun first first, but the loss before all."""
        names = dict.fromkeys(name for _, _, _, name in self._curves if name != "memory")
        return sorted(names, key=lambda name: name != "loss")

    def losses(self, metric: str = "loss") -> list[LossCurve]:
        """Of nodes: every run of every job, those begun first first. ``metric``: another number than the loss."""
        return self._runs(metric, of_nodes=True)

    def model_losses(self, metric: str = "loss") -> list[LossCurve]:
        """Of the global models, likewise."""
        return self._runs(metric, of_nodes=False)

    def _runs(self, metric: str, *, of_nodes: bool) -> list[LossCurve]:
        keys = [key for key in self._curves if key[3] == metric and bool(key[0]) == of_nodes]
        runs: dict[str, list[int]] = {}
        for _, job, run, _ in keys:
            runs.setdefault(job, []).append(run)
        numbers, jobs = {job: places(of_job) for job, of_job in runs.items()}, list(runs)
        found = []
        for key in sorted(keys, key=lambda key: (key[2], jobs.index(key[1]))):
            node, job, run, _ = key
            several = len(numbers[job]) > 1
            named = f"{job or 'nc.report'} run {numbers[job][run]}" if several else job or "nc.report"
            found.append(
                LossCurve(
                    node, job, run, self._curves[key], run == max(numbers[job]),
                    named if several or len(jobs) > 1 else "", jobs.index(job),
                )
            )  # fmt: skip
        return found

    def of_model(self, job: str, name: str) -> ThinnedCurve:
        """The curve of what was measured of the global model in the newest run of ``job``, or an empty one."""
        found = {key[2]: curve for key, curve in self._curves.items() if (key[0], key[1], key[3]) == ("", job, name)}
        return found[max(found)] if found else ThinnedCurve()

    def models(self, metric: str = "loss") -> list[str]:
        """Names of the jobs whose global model's loss (or ``metric``) was measured, each once."""
        return list(dict.fromkeys(job for node, job, _, name in self._curves if not node and name == metric))


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` of ``points`` (at least 4), chosen by :func:`.thinning.evenly`: a spike of the loss or of the
    memory stays visible."""
    return [points[index] for index in evenly([value for _, value in points], limit)]


_SMOOTHING = 0.9


def smoothed(values: Iterable[float]) -> list[float]:
    """The exponential mean of ``values`` up to each, without the pull to the first (as Adam's first moment); a value
    that is not finite stays one and counts for nothing."""
    found, total, weight = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            total = _SMOOTHING * total + (1 - _SMOOTHING) * value
            weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        found.append(total / weight if math.isfinite(value) else value)
    return found


_WIDTH, _HEIGHT = 460, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 26, 26
_POINTS = 200


class Line(NamedTuple):
    """One curve of a picture; ``colour`` is ``#rrggbb``. ``dotted``: a broken line with a dot at each point. ``faint``:
    of an earlier run. ``dash``: 0 solid, else another pattern for each number."""

    label: str
    colour: str
    points: Sequence[Point]
    dotted: bool = False
    faint: bool = False
    dash: int = 0


_DASHES = ("", "7 4", "2 3", "9 3 2 3")


def svg_chart(
    title: str,
    horizontal: str,
    lines: Sequence[Line],
    *,
    from_zero: bool = False,
    size: tuple[int, int] = (_WIDTH, _HEIGHT),
) -> str:
    """One chart as an ``<svg>`` element with axes and a line per curve; empty when no value is finite.

    ``horizontal`` labels the x axis. A value that is not finite interrupts its line. With ``from_zero`` the
    y axis begins at 0, for quantities that are never negative. ``size``: pixels where there is room for them.
    """
    finite = [point for line in lines for point in line.points if math.isfinite(point[1])]
    if not finite:
        return ""
    width, height = size
    across = _Axis(min(x for x, _ in finite), max(x for x, _ in finite), _LEFT, width - _RIGHT)
    low = 0.0 if from_zero else min(y for _, y in finite)
    upward = _Axis(low, max(y for _, y in finite), height - _BOTTOM, _TOP)
    parts = [
        # The width inline too: pages that show notebooks bring style sheets of their own.
        f'<svg class="nbc-chart" style="max-width:{width}px" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{_escaped(title)}">',
        f'<text x="{_LEFT}" y="14" class="nbc-chart-title">{_escaped(title)}</text>',
        f'<text x="{width - _RIGHT}" y="14" text-anchor="end">{_escaped(horizontal)}</text>',
    ]
    for tick in upward.ticks():
        y = upward.place(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="nbc-chart-grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{_tick(tick)}</text>')
    for tick in across.ticks():
        parts.append(f'<text x="{across.place(tick):.1f}" y="{height - 8}" text-anchor="middle">{_tick(tick)}</text>')
    parts += [_path(line, across, upward) for line in sorted(lines, key=lambda line: not line.faint)]
    return "".join([*parts, "</svg>"])


class _Axis:
    """Maps values from low to high onto pixels from ``first`` to ``last``."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        spread = (high - low) or abs(high) or 1.0
        self.low, self.spread, self.first, self.last = (low if high > low else low - spread / 2), spread, first, last

    def place(self, value: float) -> float:
        return self.first + (value - self.low) / self.spread * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Two to six round values (1, 2, 2.5 or 5 times a power of ten) inside the axis."""
        rough = self.spread / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor((self.low + self.spread) / step + 1e-9) + 1)]


def _path(line: Line, across: _Axis, upward: _Axis) -> str:
    commands, dots, pen_down = [], [], False
    for x, y in thin(line.points, _POINTS):
        if math.isfinite(y):
            # h0 draws a dot where a single value has nothing to be joined to.
            place = f"{across.place(x):.1f} {upward.place(y):.1f}"
            commands.append(f"L{place}" if pen_down else f"M{place}h0")
            dots.append(f"M{place}h0")
        pen_down = math.isfinite(y)
    stroke = f'fill="none" stroke="{_escaped(line.colour)}" stroke-linejoin="round" stroke-linecap="round"'
    stroke += ' stroke-opacity="0.3"' if line.faint else ""
    title = f"<title>{_escaped(line.label)}</title>"
    if not line.dotted:
        dash = _DASHES[line.dash % len(_DASHES)]
        stroke += f' stroke-dasharray="{dash}"' if dash else ""
        width = "1.2" if line.faint else "1.8"
        return f'<path d="{"".join(commands)}" {stroke} stroke-width="{width}">{title}</path>'
    return (
        f'<path d="{"".join(commands)}" {stroke} stroke-width="1.8" stroke-dasharray="1 5">{title}</path>'
        f'<path d="{"".join(dots)}" {stroke} stroke-width="5">{title}</path>'
    )


def _tick(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e5 else f"{value:.1e}"


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


DASH_NAMES = ("solid", "dashed", "short dashes", "dashes and dots")


def run_label(one: LossCurve) -> str:
    """``desk``, or ``desk, model run 2`` where there is more than one run or job."""
    return plain(f"{one.node}, {one.of_run}" if one.of_run else one.node, 64)


def run_line(one: LossCurve, colour: str) -> Line:
    """Its line, without points."""
    return Line(run_label(one), colour, [], faint=not one.newest, dash=one.dash)


def run_notes(losses: Sequence[LossCurve]) -> list[str]:
    """Lines of a legend: which job has which kind of line, and which runs are faint."""
    plainly = list(dict.fromkeys((one.of_run, one.dash) for one in losses if one.newest and one.of_run))
    earlier = list(dict.fromkeys(one.of_run for one in losses if not one.newest))
    several = len(plainly) > 1
    names = [
        f"{plain(name, 40)} ({DASH_NAMES[dash % len(DASH_NAMES)]})" if several else plain(name, 40)
        for name, dash in plainly
    ]
    notes = [f"Loss: {', '.join(names)}"] if names else []
    notes += [f"Faint: {', '.join(plain(name, 40) for name in earlier)}"] if earlier else []
    return ["; ".join(notes)] if notes else []
