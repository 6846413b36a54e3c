"""The curves of a report as pictures without script. Pure functions."""

import math
from collections import defaultdict
from collections.abc import Sequence

from notebook_cluster.protocol.state import ClusterView, RoundView
from notebook_cluster.widgets.curves import Curves, PlottedCurve, Point
from notebook_cluster.widgets.formatting import GLOBAL, global_label, plain, rank_colour
from notebook_cluster.widgets.picture import Line, run_line, run_notes, svg_chart
from notebook_cluster.widgets.static_html import block, text_block

_MEAN = "mean of the nodes"
_MEAN_COLOUR = "#8b949e"
_MEAN_POINTS = 150
_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


def charts(state: ClusterView, curves: Curves, rounds: Sequence[RoundView]) -> list[str]:
    """Legend and pictures: loss over steps and time, memory over time, the wait of each round."""
    colours = {node.name: rank_colour(node.rank) for node in state.nodes}
    jobs = curves.models()
    names = [node for node in curves.nodes() if curves.get(node, "loss").value or curves.get(node, "memory").value]
    losses = curves.losses()

    def memory() -> list[Line]:
        found = []
        for node in names:
            points = curves.get(node, "memory").by_time(state.started)
            colour = colours.get(node, rank_colour(None))
            found.append(Line(plain(node, 64), colour, [(x, y / 1e9) for x, y in points]))
        return found

    def lines(*, steps: bool) -> list[Line]:
        def points(curve: PlottedCurve) -> list[Point]:
            return curve.by_step() if steps else curve.by_time(state.started)

        found = [
            run_line(one, colours.get(one.node, rank_colour(None)))._replace(points=points(one.curve)) for one in losses
        ]
        for one in curves.model_losses():
            label = global_label(one.job, jobs) + ("" if one.newest else f", {one.of_run}")
            found.append(Line(label, GLOBAL, points(one.curve), dotted=True, faint=not one.newest))
        return found

    by_step = lines(steps=True)
    newest = {one.job for one in losses}
    mean = _mean([line for line in by_step if not line.dotted and not line.faint]) if len(newest) == 1 else []
    if mean:
        by_step.append(Line(_MEAN, _MEAN_COLOUR, mean))
    drawn = [
        svg_chart("Loss", "steps", by_step),
        _over_time("Loss", lines(steps=False)),
        _over_time("Memory (GB)", memory(), from_zero=True),
        svg_chart("Longest wait (seconds)", "rounds", _wait_lines(rounds), from_zero=True),
    ]
    shown = [chart for chart in drawn if chart]
    if not shown:
        return [text_block("nbc-empty", "Nothing was measured yet: nc.report(step=, loss=) and nc.DiLoCo make curves.")]
    legend = [(plain(node, 64), colours.get(node, rank_colour(None))) for node in names]
    legend += [(_MEAN, _MEAN_COLOUR)] if mean else []
    legend += [(f"{global_label(job, jobs)} (dotted)", GLOBAL) for job in jobs]
    keys = [
        block("nbc-key", [block("nbc-swatch", [], style=f"background:{colour}"), text_block("", name)])
        for name, colour in legend
    ]
    notes = [text_block("nbc-small nbc-muted", text) for text in run_notes(losses)]
    return [block("nbc-keys", keys), *notes, block("nbc-charts", shown)]


def _over_time(title: str, lines: list[Line], *, from_zero: bool = False) -> str:
    last = max((x for line in lines for x, _ in line.points), default=0.0)
    _, scale, unit = next(row for row in _UNITS if last >= row[0] or row[0] == 0.0)
    scaled = [line._replace(points=[(x / scale, y) for x, y in line.points]) for line in lines]
    return svg_chart(title, unit, scaled, from_zero=from_zero)


def _mean(lines: Sequence[Line]) -> list[Point]:
    """The mean over the nodes at each part of the steps at which at least two of them have a finite loss."""
    if len([line for line in lines if line.points]) < 2:
        return []
    low = min(x for line in lines for x, _ in line.points)
    high = max(x for line in lines for x, _ in line.points)
    width = max((high - low) / _MEAN_POINTS, 1.0)
    parts: dict[int, list[float]] = defaultdict(list)
    for line in lines:
        own: dict[int, list[float]] = defaultdict(list)
        for x, y in line.points:
            if math.isfinite(y):
                own[int((x - low) / width)].append(y)
        for place, values in own.items():
            parts[place].append(sum(values) / len(values))
    return [(low + (place + 0.5) * width, sum(v) / len(v)) for place, v in sorted(parts.items()) if len(v) > 1]


def _wait_lines(rounds: Sequence[RoundView]) -> list[Line]:
    jobs: dict[str, list[Point]] = defaultdict(list)
    for one in rounds:
        if one.waits:
            jobs[one.job].append((float(one.round), max(one.waits.values())))
    return [Line(plain(job, 64), rank_colour(index), points) for index, (job, points) in enumerate(jobs.items())]
