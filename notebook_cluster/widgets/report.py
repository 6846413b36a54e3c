"""The report of a run: one HTML page that needs no network and no script, for reading after the cluster is gone; last
its charts, the curves as pictures.
"""

import html
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from notebook_cluster.client.curve_rows import MeasuredRun
from notebook_cluster.client.whole_files import whole_file
from notebook_cluster.protocol.clock import dated
from notebook_cluster.protocol.state import ClusterView, RoundView, RunHistory, Series
from notebook_cluster.protocol.thinning import Point, ThinnedCurve
from notebook_cluster.widgets.curves import Curves, Line, run_line, run_notes, svg_chart
from notebook_cluster.widgets.formatting import (
    GLOBAL,
    NO_PLACE,
    global_label,
    integer,
    node_colours,
    palette_colour,
    plain,
)
from notebook_cluster.widgets.model import panel_model
from notebook_cluster.widgets.report_tables import (
    cells_part,
    checkpoints_part,
    events_part,
    nodes_part,
    results_part,
    rounds_part,
    settings_part,
    versions_part,
)
from notebook_cluster.widgets.static_html import block, style, text_block

ROUNDS_LISTED = 40
_STYLE = Path(__file__).with_name("report.css")


def write_report(run: MeasuredRun, path: str, *, overwrite: bool = False, ended: str = "") -> Path:
    """Write the report of ``run`` as it is now to ``path``; returns the file. It appears whole or not at all.

    ``ended`` says why the cluster is no more, where that is so.

    Raises:
        OSError: ``path`` is a folder, is there already (without ``overwrite``), or cannot be written; one line.
        ValueError: it is no ``.html`` file.
    """
    file = Path(path).expanduser()
    check_place(file, overwrite=overwrite)
    page = render_report(run.state(), run.series(), run.history(), ended=ended)
    try:
        with whole_file(file, overwrite=overwrite) as stream:
            stream.write(page.encode("utf-8", errors="replace"))
    except FileExistsError:
        raise _there_already(file) from None
    except OSError as error:
        raise OSError(f"{file} cannot be written: {error.strerror or error}") from None
    return file


def check_place(file: Path, *, overwrite: bool) -> None:
    """Raise what :func:`write_report` does for a file that must not be written."""
    if file.is_dir():
        raise OSError(f"{file} is a folder: name a file in it, for example {file / 'report.html'}")
    if file.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{file} would be an HTML page: give it a name that ends in .html")
    if not file.parent.is_dir():
        raise OSError(f"folder {file.parent} does not exist: make it first, or name another file")
    if file.exists() and not overwrite:
        raise _there_already(file)


def _there_already(file: Path) -> OSError:
    return OSError(f"{file} exists already: --overwrite replaces it")


def render_report(state: ClusterView, series: Sequence[Series], history: RunHistory, *, ended: str = "") -> str:
    """The page. Every text is escaped; there is no script and nothing is loaded from elsewhere."""
    model, curves = panel_model(state, ended), Curves(series)
    moment, began = dated(state.now), dated(state.started)
    facts = [
        *model["facts"],
        {"label": "Cells", "value": integer(history.cells_seen), "note": ""},
        {"label": "Checkpoints", "value": integer(len(history.checkpoints)), "note": ""},
    ]
    body = [
        block(
            "nbc-row nbc-wrap",
            [f"<h1>{_escaped(model['name'])}</h1>", text_block(f"nbc-pill nbc-{model['level']}", model["status"])],
        ),
        text_block("nbc-muted", f"Report of {moment}; the cluster was started {began}"),
        block("nbc-facts", [_fact(fact) for fact in facts]),
        *_section("Curves", charts(state, curves, history.rounds)),
        *_section("Results", results_part(curves)),
        *_section("Settings", settings_part(state)),
        *_section("Nodes", nodes_part(state, model)),
        *_section("Rounds", rounds_part(state, history)),
        *_section("Checkpoints", checkpoints_part(history, state.now)),
        *_section("Cells", cells_part(history)),
        *_section("Versions", versions_part(history)),
        *_section("Events", events_part(model)),
    ]
    title = _escaped(f"{model['name']}: report of {moment}")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{title}</title><style>{style()}{_STYLE.read_text("utf-8")}</style></head>'
        f"<body>{block('nbc-panel', body, role='main')}</body></html>\n"
    )


def _section(title: str, content: list[str]) -> list[str]:
    return [f"<h2>{_escaped(title)}</h2>", *content] if content else []


def _fact(fact: dict[str, str]) -> str:
    parts = ("label", "value", "note")
    return block("nbc-fact", [text_block(f"nbc-fact-{part}", fact[part]) for part in parts])


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


_MEAN = "mean of the nodes"
_MEAN_COLOUR = "#8b949e"
_MEAN_POINTS = 150
_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


def charts(state: ClusterView, curves: Curves, rounds: Sequence[RoundView]) -> list[str]:
    """Legend and pictures: loss over steps and time, memory over time, the wait of each round."""
    colours = node_colours(state.nodes)
    jobs = curves.models()
    names = [node for node in curves.nodes() if curves.get(node, "loss").value or curves.get(node, "memory").value]
    losses = curves.losses()

    def memory() -> list[Line]:
        found = []
        for node in names:
            points = curves.get(node, "memory").by_time(state.started)
            colour = colours.get(node, NO_PLACE)
            found.append(Line(plain(node, 64), colour, [(x, y / 1e9) for x, y in points]))
        return found

    def lines(*, steps: bool) -> list[Line]:
        def points(curve: ThinnedCurve) -> list[Point]:
            return curve.by_step() if steps else curve.by_time(state.started)

        found = [run_line(one, colours.get(one.node, NO_PLACE))._replace(points=points(one.curve)) for one in losses]
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
    legend = [(plain(node, 64), colours.get(node, NO_PLACE)) for node in names]
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
    return [Line(plain(job, 64), palette_colour(index), points) for index, (job, points) in enumerate(jobs.items())]
