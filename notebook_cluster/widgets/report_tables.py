"""The tables of a report, and the cells: what a run came to, with what it was trained, its nodes and its rounds.

Every function makes markup in which each text is escaped.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from notebook_cluster.protocol.clock import ABSENT, clock, duration
from notebook_cluster.protocol.state import CellView, ClusterView, JobView, RoundView, RunHistory
from notebook_cluster.widgets.curves import Curves, LossCurve, run_label
from notebook_cluster.widgets.formatting import byte_count, escaped, global_label, integer, number, plain, plural
from notebook_cluster.widgets.static_html import block, event_block, text_block

ROUNDS_LISTED = 40
_LINES_SHOWN = 12
"""Of a cell; a longer one is folded."""
_ROWS_SHOWN = 24
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
SETTINGS = {
    "strategy": "strategy", "mode": "mode", "every": "every", "codec": "codec", "outer_lr": "outer learning rate",
    "outer_momentum": "outer momentum", "nesterov": "nesterov", "lr": "learning rate", "fragments": "fragments",
    "overlap": "overlap", "mix": "mix", "quorum": "quorum", "grace": "grace", "parameters": "parameters",
    "framework": "framework",
}  # fmt: skip
"""Name of a setting -> how it is called, in the order in which people read them."""


def _readable(text: str) -> str:
    """``text`` of several lines without what turns its direction or is no character to see."""
    return _UNPRINTABLE.sub(" ", text.replace("\r\n", "\n"))


def fold(title: str, content: Sequence[str]) -> str:
    """``content`` (markup) behind a line that opens it."""
    return f'<details><summary class="nbc-fold">{escaped(title)}</summary>{"".join(content)}</details>'


def results_part(curves: Curves) -> list[str]:
    """Of every number that was trained for or reported: the last, the lowest and the highest value, of the model that
    all share and of each node. Which of them is the best depends on what the number is."""
    shared, own = [], []
    for metric in curves.metrics():
        jobs = curves.models(metric)
        for one in curves.model_losses(metric):
            name = global_label(one.job, jobs) + (f", {one.of_run}" if one.of_run and not one.newest else "")
            shared.append(_result(metric, name, one))
        own += [_result(metric, run_label(one), one) for one in curves.losses(metric)]
    heads = ("number", "of", "last", "lowest", "highest", "points")
    rows = [row for row in shared if row], [row for row in own if row]
    if len(rows[0]) + len(rows[1]) <= _ROWS_SHOWN or not rows[0]:
        every = [*rows[0], *rows[1]]
        shown = [table(heads, every[:_ROWS_SHOWN])] if every else []
        return shown + (
            [fold(f"{len(every) - _ROWS_SHOWN} more", [table(heads, every[_ROWS_SHOWN:])])]
            if every[_ROWS_SHOWN:]
            else []
        )
    return [table(heads, rows[0]), fold(f"of each node: {plural(len(rows[1]), 'row')}", [table(heads, rows[1])])]


def _result(metric: str, of: str, one: LossCurve) -> list[str]:
    points = [(step, value) for step, value in zip(one.curve.step, one.curve.value, strict=True)]
    if not points:
        return []
    finite = [point for point in points if math.isfinite(point[1])]

    def said(point: tuple[int, float] | None) -> str:
        return ABSENT if point is None else f"{number(point[1])} at step {integer(point[0])}"

    lowest = min(finite, key=lambda point: point[1], default=None)
    highest = max(finite, key=lambda point: point[1], default=None)
    seen = integer(max(one.curve.seen, len(points)))
    return [plain(metric, 64), of, said(points[-1]), said(lowest), said(highest), seen]


def settings_part(state: ClusterView) -> list[str]:
    """With what each job was trained, a column for each."""
    return settings_table({plain(job.name, 64): job_settings_shown(job) for job in state.jobs})


def job_settings_shown(job: JobView) -> dict[str, str]:
    """The settings of ``job``; of one that an earlier version kept, what its view says."""
    return job.settings or {"strategy": job.strategy, "parameters": str(job.parameters or "")}


def settings_table(columns: dict[str, dict[str, str]], *, mark: bool = False) -> list[str]:
    """Column -> settings, as a table with a row for each; ``mark``: where columns differ they stand out."""
    names = [name for name in SETTINGS if any(one.get(name) for one in columns.values())]
    names += sorted({name for one in columns.values() for name in one} - set(SETTINGS))
    rows = [[SETTINGS.get(name, plain(name, 40)), *(_setting(name, one) for one in columns.values())] for name in names]
    odd = frozenset(
        (place, column)
        for place, row in enumerate(rows)
        for column in range(1, len(row))
        if mark and len(set(row[1:])) > 1
    )
    return [table(("", *columns), rows, odd)] if rows else []


def _setting(name: str, settings: dict[str, str]) -> str:
    value = settings.get(name, "")
    if name == "parameters" and value.isdigit():
        return integer(int(value))
    return plain(value, 120) or ABSENT


def table(head: Sequence[str], rows: Sequence[Sequence[str]], odd: frozenset[tuple[int, int]] = frozenset()) -> str:
    """``odd``: (row, column) of cells that stand out."""
    titles = "".join(f"<th>{escaped(title)}</th>" if title else "<td></td>" for title in head)
    lines = []
    for place, row in enumerate(rows):
        cells = "".join(
            f"<td{' class=nbc-odd' if (place, column) in odd else ''}>{escaped(text)}</td>"
            for column, text in enumerate(row)
        )
        lines.append(f"<tr>{cells}</tr>")
    made = f'<table class="nbc-table"><thead><tr>{titles}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    name = ", ".join(title for title in head if title)
    # It scrolls sideways where it is wide: with the keyboard too.
    return block("nbc-wide", [made], tabindex="0", role="group", aria_label=plain(f"Table: {name}", 80))


def nodes_part(state: ClusterView, model: dict[str, Any]) -> list[str]:
    if not model["nodes"]:
        return [text_block("nbc-empty", "No nodes.")]
    rates = {plain(node.name, 64): node.samples_per_s for node in state.nodes}
    rows = []
    for node in model["nodes"]:
        rate = rates[node["name"]]
        rows.append(
            [node["rank"], node["name"], node["peer"], node["device"], node["memory"]["peak"], node["memory"]["total"]]
            + [node["step"], node["loss"], ABSENT if rate is None else plain(f"{rate:,.0f}", 20), node["round"]]
            + [node["condition"] + (f": {node['reason']}" if node["reason"] else "")]
        )
    bad = frozenset((place, 10) for place, node in enumerate(model["nodes"]) if node["level"] == "bad")
    head = ("rank", "node", "machine", "device", "memory peak", "of", "step", "loss", "samples/s", "round", "state")
    return [table(head, rows, bad)]


def rounds_part(state: ClusterView, history: RunHistory) -> list[str]:
    """How far each job came with what it sent, for whom was waited how often, and the last rounds."""
    if not history.rounds:
        return []
    jobs = {job.name: job for job in state.jobs}
    said = [_job_line(one, jobs.get(one.job)) for one in {one.job: one for one in history.rounds}.values()]
    seconds, times = defaultdict[str, float](float), Counter[str]()
    for one in history.rounds:
        if len(one.waits) > 1:
            last = _last(one)
            times[last] += 1
            seconds[last] += max(one.waits.values())
    blamed = [
        [plain(name, 64), integer(times[name]), duration(seconds[name])]
        for name in sorted(seconds, key=seconds.__getitem__, reverse=True)
    ]
    listed = [_round_row(one, state.now) for one in reversed(history.rounds[-ROUNDS_LISTED:])]
    more = history.rounds_seen - len(listed)
    return [
        *[text_block("", line) for line in said],
        *([table(("waited for", "rounds", "longest waits, together"), blamed)] if blamed else []),
        fold(
            f"The last {plural(len(listed), 'round')}{f', of {history.rounds_seen:,}' if more > 0 else ''}",
            [table(("round", "at", "last to arrive", "longest wait", "nodes", "state"), listed)],
        ),
    ]


def _job_line(last: RoundView, job: JobView | None) -> str:
    """A commit is written down before its nodes have said what they sent for it: the job's own count is the whole."""
    sent, unlike = last.bytes_sent, last.hash_mismatches
    if job is not None:
        sent, unlike = max(sent, job.bytes_sent), max(unlike, job.hash_mismatches)
    return (
        f"{plain(last.job, 64)}: round {integer(last.round)}, {byte_count(sent)} sent by all nodes, "
        f"{unlike or 'no'} hash mismatch{'es' if unlike > 1 else ''}"
    )


def _last(one: RoundView) -> str:
    return min(one.waits, key=one.waits.__getitem__)


def _round_row(one: RoundView, now: float) -> list[str]:
    known = len(one.waits) > 1
    last, longest = (plain(_last(one), 64), duration(max(one.waits.values()))) if known else (ABSENT, ABSENT)
    members = plain(", ".join(one.members), 120)
    name = f"{plain(one.job, 64)} {integer(one.round)}"
    return [name, clock(one.time, now), last, longest, members, one.state_hash[:8]]


def checkpoints_part(history: RunHistory, now: float) -> list[str]:
    rows = [
        [plain(one.name, 64), plain(one.job, 64), integer(one.round), clock(one.time, now), plain(one.path, 300)]
        for one in history.checkpoints
    ]
    return [table(("name", "job", "round", "at", "folder"), rows)] if rows else []


def cells_part(history: RunHistory) -> list[str]:
    """Each cell with its whole source, a long one folded."""
    if not history.cells:
        return []
    more = history.cells_seen - len(history.cells)
    before = [text_block("nbc-small nbc-muted", f"and {plural(more, 'cell')} before")] if more > 0 else []
    return [*(_cell(cell) for cell in history.cells), *before]


def _cell(cell: CellView) -> str:
    counts = Counter(cell.nodes.values())
    took = duration(cell.ended - cell.started) if cell.started and cell.ended is not None else ABSENT
    nodes = ", ".join(f"{count} {plain(status, 20)}" for status, count in counts.items())
    odd = " nbc-odd" if cell.status == "error" else ""
    head = [text_block("nbc-cell-number", f"Cell {cell.id}"), text_block(f"nbc-cell-status{odd}", cell.status)]
    head += [text_block("nbc-muted", text) for text in (f"took {took}", f"nodes: {nodes or 'none'}")]
    errors = [text_block("nbc-small nbc-odd", plain(f"{node}: {error}", 220)) for node, error in cell.errors.items()]
    return block("nbc-whole-cell", [block("nbc-row nbc-wrap", head), *errors, *_source(cell)])


def _source(cell: CellView) -> list[str]:
    text = _readable(cell.source.strip("\n"))
    lines = text.splitlines()
    rest = f"… {cell.more:,} characters more" if cell.more else ""
    short = len(lines) <= _LINES_SHOWN and len(text) <= 80 * _LINES_SHOWN
    scrolls = "" if short else ' tabindex="0"'
    whole = f'<pre class="nbc-code"{scrolls}>{escaped(text)}{escaped(rest and chr(10) + rest)}</pre>'
    if short:
        return [whole] if text else []
    first = next((line for line in lines if line.strip()), "")
    head = f'<span class="nbc-code nbc-cut">{escaped(plain(first, 100))}</span>'
    said = f'<span class="nbc-fold-said">{plural(len(lines), "line")}</span>'
    return [f'<details><summary class="nbc-fold">{head}{said}</summary>{whole}</details>']


def versions_part(history: RunHistory) -> list[str]:
    if not history.peers:
        return []
    names = dict.fromkeys(name for peer in history.peers for name in peer.packages)
    rows = [["Python", *(peer.python for peer in history.peers)]]
    rows += [["system", *(peer.platform for peer in history.peers)]]
    rows += [[name, *(peer.packages.get(name, ABSENT) for peer in history.peers)] for name in names]
    odd = frozenset(
        (place, column)
        for place, row in enumerate(rows)
        for column in range(1, len(row))
        if row[0] != "system" and len(set(row[1:])) > 1
    )
    rows = [[plain(text, 60) for text in row] for row in rows]
    return [table(("", *(plain(peer.peer, 64) for peer in history.peers)), rows, odd)]


def events_part(model: dict[str, Any]) -> list[str]:
    lines = [event_block(event) for event in model["events"]]
    return [block("", lines)] if lines else []
