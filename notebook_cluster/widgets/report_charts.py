"""The charts of a report: any number over steps or time, memory, and the rounds with whom they waited for.

Pure, and without script: which chart is seen is chosen by radio buttons and CSS. Each has links that save it: the
picture as SVG and the kept points, as they were measured, as CSV.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from notebook_cluster.protocol.state import ClusterView, RoundView, Series
from notebook_cluster.protocol.thinning import Point, ThinnedCurve
from notebook_cluster.widgets.curves import Curves, are_noise, metric_title, run_line, run_notes, smoothed_points
from notebook_cluster.widgets.formatting import GLOBAL, NO_PLACE, escaped, global_label, node_colours, plain, plural
from notebook_cluster.widgets.pictures import Line, memory_lines, standalone, svg_chart, time_unit
from notebook_cluster.widgets.saving import csv_text, data_link, series_csv, thinned
from notebook_cluster.widgets.static_html import block, legend, text_block
from notebook_cluster.widgets.timeline import timeline

NUMBERS_SHOWN = 10
"""Of what was reported, beside the loss; the others are in the CSV file of an export."""
MOST_SAVED = 50_000
"""Points that all links of a page hold; of more each curve is thinned."""
_ALL_OF_THEM = "%cluster export FILE.csv writes all"
_SIZE = (980, 340)
_SMALL = (980, 200)
_MEAN = "mean of the nodes"
_MEAN_COLOUR = "#8b949e"
_MEAN_POINTS = 150


class _Run(NamedTuple):
    """What all charts of a page are made of."""

    state: ClusterView
    curves: Curves
    colours: dict[str, str]
    series: list[Series]
    rounds: Sequence[RoundView]


def charts(state: ClusterView, curves: Curves, rounds: Sequence[RoundView]) -> list[str]:
    """The chooser with its charts, memory, and the rounds: markup."""
    run = _Run(state, curves, node_colours(state.nodes), curves.series(), rounds)
    numbers = [name for name in curves.metrics() if _is_drawn(run, name)]
    more = numbers[NUMBERS_SHOWN + 1 :]
    parts = [
        _chooser(run, numbers[: NUMBERS_SHOWN + 1]) if numbers else "",
        text_block("nbc-small nbc-muted", _without_charts(more)) if more else "",
        _memory(run),
        _rounds(run),
    ]
    share = _share_saved(run)
    if share < 1:
        said = f"CSV here has {share:.0%} of the kept points, with ends and peaks; {_ALL_OF_THEM}"
        parts.append(text_block("nbc-small nbc-muted", said))
    shown = [part for part in parts if part]
    nothing = "Nothing was measured yet: nc.report(step=, loss=) and nc.DiLoCo make curves."
    return shown if numbers or shown else [text_block("nbc-empty", nothing)]


def _without_charts(metrics: Sequence[str]) -> str:
    named = ", ".join(plain(name, 40) for name in metrics[:NUMBERS_SHOWN])
    others = f" and {plural(len(metrics) - NUMBERS_SHOWN, 'other')}" if len(metrics) > NUMBERS_SHOWN else ""
    return f"{plural(len(metrics), 'number')} without a chart here: {named}{others}; {_ALL_OF_THEM}"


def _is_drawn(run: _Run, metric: str) -> bool:
    return any(math.isfinite(value) for one in run.series if one.name == metric for value in one.value)


def _over_time(run: _Run, lines: Iterable[Line]) -> tuple[str, list[Line]]:
    """The unit, and ``lines`` (seconds) in it."""
    found = list(lines)
    last = max((x for line in found for x, _ in line.points), default=0.0)
    scale, unit = time_unit(last)
    return unit, [line._replace(points=[(x / scale, y) for x, y in line.points]) for line in found]


# ---- numbers -------------------------------------------------------------------------------------------------------


def _chooser(run: _Run, metrics: Sequence[str]) -> str:
    """Radio buttons, a switch, and behind them the charts of which CSS shows one."""
    inputs = [_input("radio", f"nbc-number-{place}", "number", metric_title(name), not place)
              for place, name in enumerate(metrics)]  # fmt: skip
    inputs = inputs if len(inputs) > 1 else [inputs[0].replace("nbc-pick", "nbc-pick nbc-only", 1)]
    inputs += [
        _input("radio", "nbc-over-steps", "over", "over steps", True),
        _input("radio", "nbc-over-time", "over", "over time", False),
        _input("checkbox", "nbc-logarithmic", "log", "logarithmic axis", False),
    ]
    rules = "".join(
        f".nbc-panel .nbc-chooser:has(#nbc-number-{place}:checked) .nbc-number-{place}{{display:block}}"
        for place in range(len(metrics))
    )
    views = [block(f"nbc-view nbc-number-{place}", _of_number(run, name)) for place, name in enumerate(metrics)]
    return f"<style>{rules}</style>" + block(
        "nbc-chooser", [*inputs, block("nbc-views", views)], role="group", aria_label="Chart of a number"
    )


def _input(kind: str, name: str, group: str, text: str, checked: bool) -> str:
    chosen = " checked" if checked else ""
    return (
        f'<span class="nbc-pick"><input type="{kind}" id="{name}" name="nbc-{group}"{chosen}>'
        f'<label for="{name}">{escaped(text)}</label></span>'
    )


def _of_number(run: _Run, metric: str) -> list[str]:
    """The four charts of ``metric``, legend and notes."""
    by_step = _lines(run, metric, steps=True)
    unit, by_time = _over_time(run, _lines(run, metric, steps=False))
    pictures, links = [], []
    for over, horizontal, lines in (("steps", "steps", by_step), ("time", unit, by_time)):
        for kind in ("linear", "logarithmic"):
            log = kind == "logarithmic"
            picture = svg_chart(metric_title(metric), horizontal, lines, size=_SIZE, log=log, labels=True)
            nothing = text_block("nbc-empty", "No value is above 0: a logarithmic axis has no place for one.")
            shown = f"nbc-over-{over} nbc-{kind}"
            pictures.append(block(f"nbc-picture {shown}", [picture or nothing]))
            links.append(_svg_link(run, picture, f"{metric}-over-{over}{'-log' if log else ''}", shown))
    links.append(_csv_link(run, metric))
    return [*pictures, *_links(links), _legend(run, metric, by_step), *_notes(run, metric, by_step)]


def _lines(run: _Run, metric: str, *, steps: bool) -> list[Line]:
    """The model that all share is strong, or the mean of the nodes where it was not measured; nodes are behind."""
    jobs = run.curves.models(metric)
    own, shared = run.curves.losses(metric), run.curves.model_losses(metric)

    def points(curve: ThinnedCurve) -> list[Point]:
        return curve.by_step() if steps else curve.by_time(run.state.started)

    found, means = [], smoothed_points if are_noise(own) else list
    for one in own:
        line = run_line(one, run.colours.get(one.node, NO_PLACE))
        found.append(line._replace(points=means(points(one.curve)), behind=True))
    if len(own) == 1 and not shared:
        return [found[0]._replace(behind=False)]
    for one in shared:
        label = global_label(one.job, jobs) + ("" if one.newest else f", {one.of_run}")
        dash = jobs.index(one.job)
        found.append(Line(label, GLOBAL, points(one.curve), dotted=True, faint=not one.newest, dash=dash, strong=True))
    newest = {one.job for one in own if one.newest}
    mean = [] if shared or len(newest) != 1 else mean_of_nodes([line for line in found if not line.faint], whole=steps)
    if mean:
        return [*found, Line(_MEAN, _MEAN_COLOUR, mean, strong=True)]
    return found if shared else [line._replace(behind=False) for line in found]


def mean_of_nodes(lines: Sequence[Line], *, whole: bool) -> list[Point]:
    """The mean over the nodes at each part of the axis at which at least two of them have a finite value. ``whole``:
    no part is shorter than 1."""
    if len([line for line in lines if line.points]) < 2:
        return []
    low = min(x for line in lines for x, _ in line.points)
    high = max(x for line in lines for x, _ in line.points)
    width = max((high - low) / _MEAN_POINTS, 1.0 if whole else 1e-9)
    parts: dict[int, list[float]] = defaultdict(list)
    for line in lines:
        own: dict[int, list[float]] = defaultdict(list)
        for x, y in line.points:
            if math.isfinite(y):
                own[int((x - low) / width)].append(y)
        for place, values in own.items():
            parts[place].append(sum(values) / len(values))
    return [(low + (place + 0.5) * width, sum(v) / len(v)) for place, v in sorted(parts.items()) if len(v) > 1]


def _legend(run: _Run, metric: str, lines: Sequence[Line]) -> str:
    named = dict.fromkeys(one.node for one in run.curves.losses(metric))
    keys = [(plain(node, 64), run.colours.get(node, NO_PLACE)) for node in named]
    keys += [(line.label, line.colour) for line in lines if line.strong and not line.faint]
    return legend(keys)


def _notes(run: _Run, metric: str, lines: Sequence[Line]) -> list[str]:
    own, shared = run.curves.losses(metric), run.curves.model_losses(metric)
    notes = run_notes(own, metric_title(metric)) if own else []
    if are_noise(own):
        pale = " behind it" if any(line.strong for line in lines) else ""
        notes.append(
            f"Nodes{pale}: an exponential running mean (0.9) of the kept points; the CSV has these as measured"
        )
    if not shared:
        notes.append("The model that all share was not measured: nc.report in with sync.global_model() does")
    return [text_block("nbc-small nbc-muted", text) for text in notes]


# ---- memory and rounds ---------------------------------------------------------------------------------------------


def _memory(run: _Run) -> str:
    lines = []
    for node in run.curves.nodes():
        points = run.curves.get(node, "memory").by_time(run.state.started)
        line = Line(plain(node, 64), run.colours.get(node, NO_PLACE), points)
        lines += [line] if points else []
    title, lines = memory_lines(lines)
    unit, scaled = _over_time(run, lines)
    picture = svg_chart(title, unit, scaled, from_zero=True, size=_SMALL, labels=True)
    links = [_svg_link(run, picture, "memory"), _csv_link(run, "memory")]
    return block("nbc-picture", [picture, *_links(links)]) if picture else ""


def _rounds(run: _Run) -> str:
    picture, more = timeline(run.rounds, run.state.started, run.colours)
    if not picture:
        return ""
    rows = [
        (one.job, one.round, f"{one.time:.3f}", min(one.waits, key=one.waits.__getitem__), max(one.waits.values()))
        for one in run.rounds
        if len(one.waits) > 1
    ]
    heads = ("job", "round", "time", "waited_for", "wait")
    saved = data_link(f"{run.state.name}-rounds", "text/csv", csv_text(heads, rows))
    said = "A bar is the time that the others waited for that node; more than one in two pixels: the longest"
    notes = [text_block("nbc-small nbc-muted", said)]
    notes += [text_block("nbc-small nbc-muted", f"and {plural(more, 'node')} more")] if more else []
    return block("nbc-picture", [picture, *_links([_svg_link(run, picture, "rounds"), saved]), *notes])


# ---- what is saved -------------------------------------------------------------------------------------------------


def _links(links: Sequence[str]) -> list[str]:
    return [block("nbc-saves", [link for link in links if link])]


def _svg_link(run: _Run, picture: str, name: str, classes: str = "") -> str:
    if not picture:
        return ""
    return data_link(f"{run.state.name}-{name}", "image/svg+xml", standalone(picture), classes)


def _csv_link(run: _Run, metric: str) -> str:
    chosen = [one for one in run.series if one.name == metric and one.step]
    return data_link(f"{run.state.name}-{metric}", "text/csv", series_csv(thinned(chosen, _share_saved(run))))


def _share_saved(run: _Run) -> float:
    """Of the points that are kept, how many the links of the page hold."""
    return min(MOST_SAVED / max(sum(len(one.step) for one in run.series), 1), 1.0)
