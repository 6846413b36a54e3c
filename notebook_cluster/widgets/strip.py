"""The strip under a cell that trains: round, loss, nodes, speed and what was sent, as one picture without script.

It is an output like any other: the saved notebook keeps the last one, in every viewer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from notebook_cluster.protocol.clock import dated, duration
from notebook_cluster.protocol.state import GONE, ClusterView, JobView, NodeView, at_work, by_rank
from notebook_cluster.protocol.thinning import Point, ThinnedCurve
from notebook_cluster.widgets.curves import Curves, LossCurve, smoothed
from notebook_cluster.widgets.formatting import (
    GLOBAL,
    NO_PLACE,
    byte_count,
    escaped,
    integer,
    node_colour,
    node_colours,
    number,
    plain,
    plural,
)
from notebook_cluster.widgets.pictures import Line, svg_chart
from notebook_cluster.widgets.static_html import block, page, text_block

_SIZE = 760, 130
FEW_NODES = 6
"""So many have a line of their own; of more only the mean is drawn."""
_MEAN = "#6e7781"
_POINTS = 240
"""Of the mean that is drawn."""
_LEVELS = {"ok": "good", "running": "info", "error": "bad", "lost": "bad", "interrupted": "warning"}
_MARKS = {
    "running": "●", "queued": "○", "replaying": "◐", "ok": "✓", "error": "✕", "lost": "✕", "interrupted": "■",
    "cancelled": "\u2013",
}  # fmt: skip
_MOST = 1e15


class Training(NamedTuple):
    """What a strip is about.

    Attributes:
        cell: its number. status: ``running``, or how the cell ended.
        nodes: node -> its status in this cell.
        before: bytes sent, and bytes of data-parallel, of each job before this cell; None: not known.
        ended: seconds that it took; None while it runs.
    """

    cell: int
    status: str
    nodes: Mapping[str, str]
    before: Mapping[str, tuple[int, int]] | None
    ended: float | None = None


def jobs_of(state: ClusterView, cell: int) -> list[JobView]:
    """What is trained in ``cell``."""
    return [job for job in state.jobs if job.cell == cell]


def strip_html(training: Training, state: ClusterView, curves: Curves) -> str:
    """The strip as one ``<div>`` with its style. ``curves``: of the jobs of this cell. Every text is escaped."""
    jobs = jobs_of(state, training.cell)
    body = [
        part
        for job in jobs
        for part in (_head(training, job, state), _facts(training, job, state, curves), _chart(job, curves, state))
        if part
    ]
    body.append(_nodes(training, state))
    if training.ended is None:
        body.append(text_block("nbc-small nbc-muted", f"as it was at {dated(state.now)}", aria_hidden="true"))
    return page([block("nbc-strip", body)], f"training of cell {training.cell}")


def strip_text(training: Training, state: ClusterView, curves: Curves) -> str:
    """The same as lines of text."""
    lines = []
    for job in jobs_of(state, training.cell):
        facts = [f"{name} {value}" for name, value, _ in _told(training, job, state, curves)]
        lines.append(" · ".join([plain(job.name, 64), _condition(training), *facts]))
    return "\n".join(lines)


def _head(training: Training, job: JobView, state: ClusterView) -> str:
    level = _LEVELS.get(training.status, "muted")
    waits = _waits(job, state) if training.ended is None else ""
    return block(
        "nbc-row nbc-wrap",
        [
            text_block("nbc-strip-title nbc-cut", plain(job.name, 64)),
            text_block("nbc-small nbc-muted", plain(job.strategy, 60)),
            text_block(f"nbc-pill nbc-{level}", _condition(training)),
            text_block("nbc-small nbc-muted nbc-cut", waits),
        ],
    )


def _condition(training: Training) -> str:
    took = "" if training.ended is None else f" after {duration(training.ended)}"
    words = {"running": "training", "ok": "trained", "error": "failed", "interrupted": "stopped"}
    return f"{words.get(training.status, training.status)}{took}"


def _waits(job: JobView, state: ClusterView) -> str:
    """For whom the round waits, where that is not all of them."""
    names = [name for name in job.waiting_for if any(node.name == name for node in state.nodes)]
    if not names or len(names) == len(job.members):
        return ""
    rest = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"round {integer(job.round + 1)} waits for {', '.join(plain(name, 40) for name in names[:2])}{rest}"


def _told(training: Training, job: JobView, state: ClusterView, curves: Curves) -> list[tuple[str, str, str]]:
    """(label, value, note) of what there is to say."""
    nodes = [node for node in state.nodes if node.name in training.nodes or node.name in job.members]
    told = [("Round", integer(job.round), "")]
    here = [node for node in nodes if node.step_cell == training.cell]
    steps = [node for node in here if node.step is not None and 0 <= node.step < _MOST]
    if steps:
        told.append(("Step", *_step(max(steps, key=lambda node: node.step or 0))))
    working = at_work(nodes, training.nodes)
    told += _loss(job, curves, {node.name for node in nodes}.union(training.nodes) - {node.name for node in working})
    there = [node for node in working if node.condition not in GONE]
    rates = [one.samples_per_s for one in there if one.samples_per_s is not None and 0 < one.samples_per_s < _MOST]
    if rates and training.ended is None:
        told.append(("Samples/s", f"{sum(rates):,.0f}", plural(len(rates), "node")))
    return told + _traffic(training, job)


def _loss(job: JobView, curves: Curves, over: set[str]) -> list[tuple[str, str, str]]:
    """The newest one that was measured in this cell: of the global model, else of the nodes that work."""
    measured = curves.of_model(job.name, "loss").value
    if measured:
        newest = measured[-1]
        after = f"round {integer(job.loss_round)}" if job.loss == newest else ""
        return [("Loss of the global model", number(newest), after)]
    of_nodes = [one for one in curves.losses() if one.job == job.name and one.newest and one.curve.value]
    newest_of = [one.curve.value[-1] for one in of_nodes if one.node not in over]
    losses = [value for value in newest_of if math.isfinite(value)]
    if not losses:
        return [("Loss, mean of the nodes", "NaN", "last batches")] if newest_of else []
    return [("Loss, mean of the nodes", number(sum(losses) / len(losses)), "last batches")]


def _step(node: NodeView) -> tuple[str, str]:
    """The step of the node that is furthest, and how far that is."""
    step, total = integer(node.step), node.of_steps
    if total is not None and (node.step or 0) <= total < _MOST:
        return step, f"of {integer(total)}"
    if not 0 < node.epoch < _MOST:
        return step, ""
    share = node.epoch_share
    done = "" if share is None else f", {min(max(share, 0.0), 1.0):.0%}"
    return step, f"epoch {integer(node.epoch)}{done}"


def _traffic(training: Training, job: JobView) -> list[tuple[str, str, str]]:
    label = "Sent" if training.before is not None else "Sent in all cells"
    sent, parallel = (training.before or {}).get(job.name, (0, 0))
    sent, parallel = job.bytes_sent - sent, job.bytes_data_parallel - parallel
    if sent <= 0:
        return []
    if parallel <= 1.05 * sent:
        return [(label, byte_count(sent), "by all nodes")]
    times = parallel / sent
    return [(label, byte_count(sent), f"data-parallel: {byte_count(parallel)}, {times:,.{times < 9.95:d}f}x as much")]


def _facts(training: Training, job: JobView, state: ClusterView, curves: Curves) -> str:
    kinds = ("nbc-fact-label", "nbc-fact-value", "nbc-fact-note")
    facts = [
        block("nbc-fact", [text_block(kind, text) for kind, text in zip(kinds, told, strict=True)])
        for told in _told(training, job, state, curves)
    ]
    return block("nbc-facts", facts)


def _chart(job: JobView, curves: Curves, state: ClusterView) -> str:
    """The loss of the global model where it is measured, else the mean of the nodes', and theirs behind it."""
    of_nodes = [one for one in curves.losses() if one.job == job.name and one.newest]
    measured = [_line("global model", GLOBAL, one, dotted=True) for one in curves.model_losses() if one.job == job.name]
    colours = node_colours(state.nodes)
    few = len(of_nodes) <= FEW_NODES
    lines = [_line(one.node, colours.get(one.node, NO_PLACE), one, faint=True) for one in of_nodes] if few else []
    if not measured and of_nodes:
        lines.append(Line("mean of the nodes, smoothed", _MEAN, _smooth(_mean([one.curve for one in of_nodes]))))
    what = "Loss of the global model" if measured else "Loss: mean of the nodes' batches, smoothed"
    return svg_chart(what + (", faint: each node" if lines and few else ""), "step", [*lines, *measured], size=_SIZE)


def _line(label: str, colour: str, one: LossCurve, **how: bool) -> Line:
    return Line(plain(label, 64), colour, one.curve.by_step(), **how)


def _smooth(points: Sequence[Point]) -> list[Point]:
    return list(zip([x for x, _ in points], smoothed(y for _, y in points), strict=True))


def _mean(curves: Sequence[ThinnedCurve]) -> list[Point]:
    """The mean of ``curves`` at the steps of the one that is furthest: each counts with its newest value there. Where
    that node was started again, the steps that it goes once more are left out."""
    import numpy as np  # only where there is something to draw: it takes a while

    columns = [(np.array(curve.step), np.array(curve.value)) for curve in curves if curve.step]
    if not columns:
        return []
    longest = max((steps for steps, _ in columns), key=np.max)
    places = longest[:: max(1, len(longest) // _POINTS)]
    furthest = np.maximum.accumulate(places)
    places = places[np.append(True, furthest[1:] > furthest[:-1])]
    sums, counts = np.zeros(len(places)), np.zeros(len(places), np.int64)
    for steps, values in columns:
        newest = np.searchsorted(np.maximum.accumulate(steps), places, side="right") - 1
        there = np.where(newest >= 0, values[newest], np.nan)
        finite = np.isfinite(there)
        sums += np.where(finite, there / len(columns), 0.0)  # divided first: the sum may be beyond a float
        counts += finite
    return [
        (int(step), float(total) * len(columns) / int(count))
        for step, total, count in zip(places, sums, counts, strict=True)
        if count
    ]


def _nodes(training: Training, state: ClusterView) -> str:
    """A mark and a name for each node of the cell."""
    shown = [node for node in by_rank(state.nodes) if node.name in training.nodes]
    known = {node.name for node in shown}
    chips = [_chip(node.name, node_colour(node), training.nodes[node.name], node) for node in shown]
    gone = {name: status for name, status in training.nodes.items() if name not in known}
    chips += [_chip(name, NO_PLACE, status, None) for name, status in gone.items()]
    return block("nbc-strip-nodes", chips, role="list")


def _chip(name: str, colour: str, status: str, node: NodeView | None) -> str:
    lost = node is None or node.condition in GONE
    if status == "running" and lost:
        status = "lost"
    elif status == "running" and node is not None and node.condition in ("suspect", "refused"):
        status = node.condition
    mark = _MARKS.get(status, "◌")
    said = "" if status in ("running", "ok") else f" {status}"
    inside = f'<span aria-hidden="true">{mark}</span> {escaped(plain(name, 64))}{escaped(said)}'
    level = f" nbc-{_LEVELS[status]}" if _LEVELS.get(status) in ("bad", "warning") else ""
    return (
        f'<span class="nbc-strip-node{level}" role="listitem" style="--nbc-rank:{colour}" '
        f'title="{escaped(f"{plain(name, 64)}: {status}")}">{inside}</span>'
    )
