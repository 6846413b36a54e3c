"""Runs laid over each other: one number of several runs in one chart, and their settings beside each other. Pure."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from notebook_cluster.client.connection import ClusterError
from notebook_cluster.client.curve_rows import MeasuredRun
from notebook_cluster.protocol.clock import ABSENT, duration
from notebook_cluster.protocol.state import JobView, Series
from notebook_cluster.protocol.thinning import Point
from notebook_cluster.widgets.curves import Curves, metric_title
from notebook_cluster.widgets.formatting import PALETTE, byte_count, integer, number, palette_colour, plain
from notebook_cluster.widgets.pictures import Line, standalone, svg_chart
from notebook_cluster.widgets.report_charts import mean_of_nodes
from notebook_cluster.widgets.report_tables import SETTINGS, job_settings_shown, settings_table
from notebook_cluster.widgets.saving import csv_text, data_link
from notebook_cluster.widgets.static_html import block, legend, page, text_block
from notebook_cluster.widgets.text import aligned

_SIZE = (980, 340)
_STANDS_OUT = (
    "<style>.nbc-panel td.nbc-odd{font-weight:650;background:var(--nbc-soft)}"
    ".nbc-panel .nbc-wide{overflow-x:auto}.nbc-panel .nbc-compared .nbc-chart{max-width:980px}</style>"
)


class Compared(NamedTuple):
    """A comparison as it is shown."""

    text: str
    html: str


class _Column(NamedTuple):
    """A job of a run."""

    name: str
    settings: dict[str, str]
    points: list[Point]
    """(Step, value)."""
    shared: bool
    """The points are of the model that all share; else the mean of the nodes."""


def compare_runs(
    runs: Sequence[tuple[str, MeasuredRun]], metric: str = "loss", *, job: str | None = None, log: bool = False
) -> Compared:  # fmt: skip
    """The runs, each with its name, by ``metric``: of the model that all share, else the mean of the nodes. ``job``:
    of this training job alone; ``log``: the axis is logarithmic, and what is not above 0 is a gap.

    Raises:
        ClusterError: one is named twice, or none of them has measured ``metric``, or has ``job``; names what they have.
    """
    names = [name for name, _ in runs]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise ClusterError(f"run {twice!r} is named twice: name each run once")
    jobs = dict.fromkeys(one.name for _, run in runs for one in run.state().jobs)
    if job is not None and job not in jobs:
        there = f"there is {', '.join(plain(one, 64) for one in jobs)}" if jobs else "nothing was trained"
        raise ClusterError(f"none of these runs has a job {job!r}: {there} (--job NAME)")
    columns = [column for name, run in runs for column in _columns(name, run, metric, job)]
    if not any(column.points for column in columns):
        known = dict.fromkeys(one for _, run in runs for one in Curves(run.series()).metrics())
        there = f"there is {', '.join(plain(one, 64) for one in known)}" if known else "nothing was measured"
        raise ClusterError(f"none of these runs has measured {metric!r}: {there} (--metric NAME)")
    return Compared(_text(columns, metric), _html(columns, metric, log))


def _columns(name: str, run: MeasuredRun, metric: str, chosen: str | None) -> list[_Column]:
    state, series = run.state(), run.series()
    curves = Curves(series)
    jobs: list[JobView | None] = [job for job in state.jobs if chosen in (None, job.name)]
    if not jobs and chosen is None:
        jobs = [None]
    found = []
    for job in jobs:
        of = job.name if job is not None else ""
        points, shared = _points(curves, of, metric)
        settings = job_settings_shown(job) if job is not None else {}
        settings |= {"nodes": str(len(state.nodes)), "rounds": integer(job.round if job is not None else 0)}
        settings["sent by all nodes"] = byte_count(job.bytes_sent) if job is not None else ABSENT
        settings["trained for"] = duration(_seconds(series, of))
        values = [y for _, y in points if math.isfinite(y)]
        settings[f"last {metric}"] = number(values[-1] if values else None)
        settings[f"lowest {metric}"] = number(min(values, default=None))
        settings[f"highest {metric}"] = number(max(values, default=None))
        settings["drawn"] = ("global model" if shared else "mean of the nodes") if points else ABSENT
        found.append(_Column(plain(f"{name} {of}" if len(jobs) > 1 else name, 64), settings, points, shared))
    return found


def _seconds(series: Sequence[Series], job: str) -> float:
    """From the first to the last point of the newest run of ``job``; NaN: nothing of it was measured."""
    newest = max((one.run for one in series if one.job == job), default=0)
    times = [one.time for one in series if (one.job, one.run) == (job, newest) and one.name != "memory" and one.time]
    return max(own[-1] for own in times) - min(own[0] for own in times) if times else math.nan


def _points(curves: Curves, job: str, metric: str) -> tuple[list[Point], bool]:
    """Of the newest run of ``job``. What ``nc.report`` said of a node belongs to no job."""
    shared = [one for one in curves.model_losses(metric) if one.job == job and one.newest]
    if shared:
        return shared[0].curve.by_step(), True
    own = [one for one in curves.losses(metric) if one.job == job and one.newest]
    own = own or [one for one in curves.losses(metric) if not one.job]
    if len(own) == 1:
        return own[0].curve.by_step(), False
    return mean_of_nodes([Line(one.node, "", one.curve.by_step()) for one in own], whole=True), False


def _differs(columns: Sequence[_Column], name: str) -> bool:
    return len({column.settings.get(name, "") for column in columns}) > 1


def _text(columns: Sequence[_Column], metric: str) -> str:
    names = list(dict.fromkeys(name for column in columns for name in column.settings))
    rows = [["", plain(metric, 64), *(column.name for column in columns)]]
    rows += [
        ["*" if _differs(columns, name) else "", SETTINGS.get(name, plain(name, 64))]
        + [plain(column.settings.get(name, "") or ABSENT, 60) for column in columns]
        for name in names
    ]
    return "\n".join([*aligned(rows), *(["* differs"] if any(row[0] for row in rows[1:]) else [])])


def _html(columns: Sequence[_Column], metric: str, log: bool) -> str:
    lines = [
        Line(column.name, palette_colour(place), column.points, dotted=column.shared, strong=True,
             dash=place // len(PALETTE))
        for place, column in enumerate(columns)
        if column.points
    ]  # fmt: skip
    chart = svg_chart(metric_title(metric), "steps", lines, size=_SIZE, log=log, labels=True)
    rows = [(column.name, *point) for column in columns for point in column.points]
    links = [data_link(f"runs-{metric}", "image/svg+xml", standalone(chart))] if chart else []
    links.append(data_link(f"runs-{metric}", "text/csv", csv_text(("run", "step", "value"), rows)))
    nothing = text_block("nbc-empty", "No value is above 0: a logarithmic axis has no place for one.")
    keys = legend((column.name, palette_colour(place)) for place, column in enumerate(columns))
    # Two columns of one name would be one: they are told apart by their place.
    named = {column.name if len(columns) == 1 else f"{place}. {column.name}": column.settings
             for place, column in enumerate(columns, 1)}  # fmt: skip
    parts = [chart or nothing, block("nbc-saves", links), keys, *settings_table(named, mark=True)]
    return page([_STANDS_OUT, block("nbc-compared", parts)], "runs")
