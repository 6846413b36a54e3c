"""The plotly curves of a panel: the loss, or another number that was reported, over steps and over time, and memory
over time; one colour per node. Where the global model was measured its curve lies above those of the nodes. The newest
run of each job is drawn plainly, the ones before it faint.

Loading plotly takes about a second and its widget ships about 5 MB of script, so a panel makes its figure on its own
thread when the first point is there; ``figure.js`` keeps what is sent while a browser reads that script.
"""

import math
import re
from collections.abc import Container, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import traitlets
from plotly.subplots import make_subplots

from notebook_cluster.protocol.thinning import ThinnedCurve
from notebook_cluster.widgets.columns import Column, Sent, by_step, by_time, smooth, thin
from notebook_cluster.widgets.curves import (
    CurveChoice,
    Curves,
    LossCurve,
    are_noise,
    metric_title,
    run_label,
)
from notebook_cluster.widgets.formatting import GLOBAL, NO_PLACE, global_label, plain
from notebook_cluster.widgets.pictures import memory_unit

POINTS_PER_CURVE = 300
POINTS_IN_ALL = 7500
"""About 60 kB a redraw, which leaves jupyter_server's limits (1 MB/s) to the cells' output."""
_EXACT_STEPS = float(1 << 24)
"""Up to here float32 has every whole number."""
_LARGEST = 3e38
_INK = "#8b949e"
_GRID = "rgba(139, 148, 158, 0.22)"
_CHARTS = 3
_TITLES = "Loss over steps", "Loss over time", "Memory"
_TITLE_CHARACTERS = 20
"""In a line of a title: so the titles stay apart where the notebook is narrow."""
EARLIER_RUNS = 2
"""Of each job, beside the newest; a report has all that are kept."""
_DASHES = ("solid", "dash", "dashdot", "longdash")
PRESENT = CurveChoice()
_FAINT = 0.3
_BEHIND = 0.6
"""Opacity of nodes behind the global model."""


@dataclass
class _Trace:
    """What the trace in this place of the figure has. To ask plotly takes longer than to draw."""

    chart: int
    name: str
    colour: str = ""
    opacity: float = 1.0
    listed: bool = False
    """In the legend."""
    seen: tuple[Any, ...] = (0,)
    """How many points, and of those the ends."""


class _BufferedFigure(go.FigureWidget):  # type: ignore[misc]
    """plotly's widget, begun by ``figure.js``, which reads plotly's script from here."""

    _esm = Path(__file__).with_name("figure.js")
    _plotly = traitlets.Unicode(str(go.FigureWidget._esm)).tag(sync=True)


class CurvesFigure:
    """One ``FigureWidget`` (``widget``) with two curves of a metric and one of memory a node. One thread at a time."""

    def __init__(self) -> None:
        figure = make_subplots(rows=1, cols=_CHARTS, subplot_titles=_TITLES, horizontal_spacing=0.07)
        # Mid-grey on transparent reads well on JupyterLab's light and dark theme; a figure cannot know which one is on.
        axis = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": _GRID, "automargin": True}
        figure.update_layout(
            height=290,
            autosize=True,
            margin={"l": 50, "r": 14, "t": 32, "b": 60},
            paper_bgcolor="rgba(0, 0, 0, 0)",
            plot_bgcolor="rgba(0, 0, 0, 0)",
            font={"color": _INK, "size": 11, "family": "system-ui, -apple-system, Segoe UI, sans-serif"},
            legend={"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "font": {"size": 12}},
            hovermode="closest",
            uirevision="kept",
        )
        figure.update_annotations(font={"size": 11, "color": _INK})
        figure.update_xaxes(**axis, showticksuffix="last")
        figure.update_yaxes(**axis)
        figure.update_yaxes(rangemode="tozero", col=_CHARTS)  # a few kB more or less must not look like a leak
        self.widget = _BufferedFigure(figure)
        # Its browser side does not look at its own width; then plotly does when the window tells of a change, which
        # panel.js makes it do. The picture that its camera saves stays sharp at any size.
        camera = {"format": "svg", "filename": "curves"}
        self.widget._config = {**self.widget._config, "responsive": True, "toImageButtonOptions": camera}
        self._nodes: dict[str, int] = {}
        self._others: dict[tuple[str, str, int], int] = {}
        """(Node, job, run) -> where the traces of its loss begin, beside those of the node."""
        self._models: dict[str, int] = {}
        self._traces: list[_Trace] = []
        self._points: dict[int, tuple[Sent, Sent]] = {}
        """Of the traces that have others since they were sent last."""
        self._titles = list(_TITLES)
        self._axes: list[tuple[bool | None, str, str]] = [(None, "", "")] * _CHARTS
        """Of each chart whether it has any, the kind of that which goes up, and the unit of the other one."""
        self._restyled = False

    def draw(
        self, curves: Curves, colours: Mapping[str, str], started: float, choice: CurveChoice = PRESENT
    ) -> bool:  # fmt: skip
        """Show ``curves``; ``colours``: of each node, ``started`` (epoch seconds) is the zero of the time axis.

        Returns True the first time: the caller then shows the widget.
        """
        is_first = not self._traces
        for node in curves.nodes():
            if node not in self._nodes:
                self._add(node)
        metric = choice.metric
        jobs = curves.models(metric)
        for job in jobs:
            if job not in self._models:
                self._add_model(job, global_label(job, jobs))
        losses = curves.losses(metric)
        choice = choice._replace(smooth=choice.smooth and are_noise(losses))
        main, others = _drawn_runs(losses)
        shown = {_key(one): one for one in others}
        for one in others:
            if _key(one) not in self._others and not self._take_over(one, shown):
                self._add_run(one)
        traces = _CHARTS * len(self._nodes) + 2 * len(self._others)
        limit = min(POINTS_PER_CURVE, max(POINTS_IN_ALL // max(traces, 1), 40))
        memory = {node: by_time(curves.get(node, "memory"), started) for node in self._nodes}
        most = (float(y.max(initial=0.0, where=np.isfinite(y))) for _, y in memory.values())
        scale, unit = memory_unit(max(most, default=0.0))
        minutes = max((float(x.max()) for x, _ in memory.values() if len(x)), default=0.0) > 300
        across = 60.0 if minutes else 1.0
        clock = started, across
        with self.widget.batch_update():
            for node, index in self._nodes.items():
                colour = colours.get(node, NO_PLACE)
                loss = main[node].curve if node in main else ThinnedCurve()
                self._show_metric(index, loss, colour, clock, limit, choice)
                self._fade(index, _BEHIND if jobs else 1.0)
                if node in main:
                    self._call(index, _CHARTS, run_label(main[node]))
                seconds, used = memory[node]
                places, used = thin(used, limit)
                self._show(index + 2, seconds[places] / across, used / scale, colour)
            for key, index in self._others.items():
                self._show_run(index, shown.get(key), colours.get(key[0], NO_PLACE), clock, limit, choice)
            for job, index in self._models.items():
                self._show_metric(index, curves.of_model(job, metric), "", clock, limit, choice._replace(smooth=False))
            self._entitle(0, _title(metric, "over steps"))
            self._entitle(1, _title(metric, "over time"))
            self._entitle(2, f"Memory ({unit})")
            self._show_axes(choice, " min" if minutes else " s")
        self._send_points()
        return is_first

    def _send_points(self) -> None:
        """The points of all traces that have others, in one message; and keep up to date what a new view or a reloaded
        page reads, which plotly leaves as it was at the beginning: in place, because an assignment would send
        everything once more."""
        places, points = list(self._points), list(self._points.values())
        self._points = {}
        if places:
            # As plotly_update does, and each trace where x and y are set; but these look for longer at what they are
            # given than all else takes.
            for place, (x, y) in zip(places, points, strict=True):
                self.widget._data[place].update(x=x, y=y)
            told = {"x": [x for x, _ in points], "y": [y for _, y in points]}
            self.widget._send_update_msg(told, {}, places)
        if self._restyled or len(self.widget._widget_data) != len(self.widget._data):
            self.widget._widget_data[:] = deepcopy(self.widget._data)
            self.widget._widget_layout.update(deepcopy(self.widget.layout.to_plotly_json()))
            self._restyled = False
        for place, (x, y) in zip(places, points, strict=True):
            self.widget._widget_data[place].update(x=x, y=y)

    def _add(self, node: str) -> None:
        """The traces of ``node``, one in each chart: one entry in the legend switches all."""
        self._nodes[node] = len(self.widget.data)
        common = {"mode": "lines", "name": _label(node), "legendgroup": node, "x": [], "y": []}
        self._add_traces([go.Scatter(**common, showlegend=chart == _CHARTS - 1) for chart in range(_CHARTS)])

    def _add_traces(self, traces: list[go.Scatter]) -> None:
        """One in each chart, from the first one on."""
        self.widget.add_traces(traces, rows=[1] * len(traces), cols=list(range(1, len(traces) + 1)))
        self._traces += [_Trace(chart, one.name or "", listed=one.showlegend) for chart, one in enumerate(traces)]

    def _add_run(self, one: LossCurve) -> None:
        """Two more traces of a node's loss: of an earlier run, or of another job."""
        self._others[_key(one)] = len(self.widget.data)
        line = {"dash": _DASHES[one.dash % len(_DASHES)], "width": 2}
        common = {"mode": "lines", "legendgroup": one.node, "x": [], "y": [], "line": line}
        self._add_traces([go.Scatter(**common, opacity=1.0, showlegend=False) for _ in range(_CHARTS - 1)])

    def _take_over(self, one: LossCurve, shown: Container[tuple[str, str, int]]) -> bool:
        """Give it the traces of a run of its node and job that is drawn no more, if there are any: a search over
        settings makes hundreds of runs, and each trace costs something at every redraw."""
        for key in self._others:
            if key[:2] == (one.node, one.job) and key not in shown:
                self._others[_key(one)] = self._others.pop(key)
                return True
        return False

    def _show_run(
        self,
        index: int,
        one: LossCurve | None,
        colour: str,
        clock: tuple[float, float],
        limit: int,
        choice: CurveChoice,
    ) -> None:
        """Where it is not drawn any more its traces stay, without points."""
        curve = ThinnedCurve() if one is None else one.curve
        self._show_metric(index, curve, colour, clock, limit, choice)
        if one is None:
            return
        faint = not one.newest or one.is_over
        self._call(index, _CHARTS - 1, run_label(one))
        self._fade(index, _FAINT if faint else 1.0)
        self._list(index, not faint)

    def _show_metric(
        self, index: int, curve: ThinnedCurve, colour: str, clock: tuple[float, float], limit: int, choice: CurveChoice
    ) -> None:  # fmt: skip
        """``curve`` over steps and over time, in the two traces from ``index`` on. ``clock``: the zero of the time
        axis, and how many seconds its unit has."""
        started, across = clock
        thinned = smooth if choice.smooth else thin
        steps, at_steps = by_step(curve)
        seconds, values = by_time(curve, started)
        places, drawn = thinned(values, limit)
        self._show(index + 1, seconds[places] / across, drawn, colour)
        if len(at_steps) != len(values):  # a gap between two runs
            places, drawn = thinned(at_steps, limit)
        self._show(index, steps[places], drawn, colour)

    def _call(self, index: int, charts: int, name: str) -> None:
        """Of the traces in the first ``charts``, from ``index`` on."""
        name = _label(name)
        for place in range(index, index + charts):
            if self._traces[place].name != name:
                self._traces[place].name = self.widget.data[place].name = name
                self._restyled = True

    def _fade(self, index: int, opacity: float) -> None:
        """The traces of the metric, from ``index`` on."""
        for place in range(index, index + _CHARTS - 1):
            if self._traces[place].opacity != opacity:
                self._traces[place].opacity = self.widget.data[place].opacity = opacity
                self._restyled = True

    def _list(self, index: int, listed: bool) -> None:
        """Whether the legend has this trace."""
        if self._traces[index].listed != listed:
            self._traces[index].listed = self.widget.data[index].showlegend = listed
            self._restyled = True

    def _entitle(self, chart: int, title: str) -> None:
        if self._titles[chart] != title:
            self._titles[chart] = self.widget.layout.annotations[chart].text = title
            self._restyled = True

    def _show_axes(self, choice: CurveChoice, unit: str) -> None:
        """The scale of the metric's axes, ``unit`` at those of time; a chart without a point has none, or it would go
        from -1 to 6."""
        filled = {trace.chart for trace in self._traces if trace.seen[0]}
        for chart in range(_CHARTS):
            shown, kind = chart in filled, "log" if choice.log and chart < _CHARTS - 1 else "linear"
            suffix = unit if chart else ""
            if self._axes[chart] == (shown, kind, suffix):
                continue
            self._axes[chart], self._restyled = (shown, kind, suffix), True
            name = "" if chart == 0 else str(chart + 1)
            across, up = self.widget.layout[f"xaxis{name}"], self.widget.layout[f"yaxis{name}"]
            across.visible = up.visible = shown
            across.ticksuffix = suffix
            up.type = kind

    def _add_model(self, job: str, label: str) -> None:
        """The traces of the global model of ``job``: its loss, a dot for each time it was measured."""
        self._models[job] = len(self.widget.data)
        common = {
            "mode": "lines+markers", "name": _label(label), "legendgroup": f"global model {job}", "x": [], "y": [],
            "line": {"color": GLOBAL, "width": 2.5, "dash": "dot"}, "marker": {"color": GLOBAL, "size": 6},
            "zorder": 1,
        }  # fmt: skip
        self._add_traces([go.Scatter(**common, showlegend=chart == 1) for chart in range(_CHARTS - 1)])

    def _show(self, index: int, x: Column, y: Column, colour: str = "") -> None:
        trace = self._traces[index]
        if colour and trace.colour != colour:
            line = self.widget.data[index].line
            line.color, line.width, trace.colour = colour, 2, colour
            self._restyled = True
        # What is not finite is a gap; NaN would not equal itself in what was drawn.
        ends = (float(x[0]), float(x[-1]), float(y[-1]) if math.isfinite(y[-1]) else None) if len(x) else ()
        seen = (len(x), *ends)
        if trace.seen == seen:
            return
        trace.seen = seen
        # 24 bits are finer than a screen.
        kind = np.float64 if len(x) and x[-1] > _EXACT_STEPS else np.float32
        heights = np.clip(np.where(np.isfinite(y), y, np.nan), -_LARGEST, _LARGEST)
        self._points[index] = x.astype(kind), heights.astype(np.float32)


def _key(one: LossCurve) -> tuple[str, str, int]:
    return one.node, one.job, one.run


def _drawn_runs(losses: list[LossCurve]) -> tuple[dict[str, LossCurve], list[LossCurve]]:
    """What the traces of each node show, the newest run of the first job that it trains now, and what is drawn beside
    it."""
    main: dict[str, LossCurve] = {}
    others: list[LossCurve] = []
    for one in losses:
        if one.newest and (one.node not in main or _first(one) < _first(main[one.node])):
            others += [main[one.node]] if one.node in main else []
            main[one.node] = one
        elif one.newest:
            others.append(one)
    earlier: dict[tuple[str, str], list[LossCurve]] = {}
    for one in losses:
        if not one.newest:
            earlier.setdefault((one.node, one.job), []).append(one)
    for runs in earlier.values():
        others += runs[-EARLIER_RUNS:]
    return main, others


def _first(one: LossCurve) -> tuple[bool, int]:
    """Of several jobs of a node: those that are trained now in their order, then those of cells before, the last one
    first."""
    return one.is_over, -one.run if one.is_over else one.dash


def _label(name: str) -> str:
    """Plotly reads a little HTML in names and hover texts; the name of a node or job has no use for any."""
    return re.sub("[<>&]", " ", plain(name, 64))


def _title(metric: str, over: str) -> str:
    """``Loss over steps``, or in two lines ``test_accuracy`` and ``over steps``."""
    name = _label(metric_title(metric, _TITLE_CHARACTERS))
    return f"{name}{' ' if len(name) + 1 + len(over) <= _TITLE_CHARACTERS else '<br>'}{over}"
