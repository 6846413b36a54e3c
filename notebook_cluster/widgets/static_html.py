"""A ClusterView as self-contained HTML without script: saved notebooks, nbconvert, viewers without widgets."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from notebook_cluster.protocol.state import ClusterView, PeerView, Series
from notebook_cluster.security.chart_grammar import NO_TEX
from notebook_cluster.widgets.class_board import class_board
from notebook_cluster.widgets.curves import (
    CurveChoice,
    Curves,
    are_noise,
    metric_title,
    run_line,
    run_notes,
    smoothed_points,
)
from notebook_cluster.widgets.formatting import GLOBAL, NO_PLACE, escaped, global_label, node_colours
from notebook_cluster.widgets.model import panel_model, peer_row
from notebook_cluster.widgets.pictures import Line, memory_lines, svg_chart

_FEW_POINTS = 3
"""A cluster that has just started has so few: two dots on large axes say nothing."""
AS_MEASURED = CurveChoice(smooth=False)
"""What a saved picture shows: the loss, as it was reported."""
WAITS = "Rounds, and who was waited for"
_NUMBERS = (("step", "Step"), ("loss", "Loss"), ("round", "Round"), ("wait", "Wait"))


def render_html(
    state: ClusterView,
    series: Curves | Sequence[Series] = (),
    *,
    ended: str = "",
    moment: str = "",
    as_class: bool = False,
) -> str:
    """``state`` as one ``<div>`` with its style, the node cards (``as_class``: the rows of the class) and, from
    ``series``, loss and memory curves as SVG.

    ``ended`` says why the cluster is no more, where that is so; ``moment`` when it was so, for a picture that is kept.
    Every text is escaped; there is no script and nothing is loaded from elsewhere.
    """
    model = panel_model(state, ended)
    body = [_head(model, moment), block("nbc-facts", [fact_block(fact) for fact in model["facts"]])]
    if model["invitation"]:
        # This is saved with the notebook, and whoever reads that must not get the code.
        body.append(text_block("nbc-small nbc-muted", "Peers may join with a code: %cluster status shows it."))
    body += [text_block("nbc-small nbc-launch", text) for text in model["launches"]]
    if model["cell"]:
        body.append(_cell(model["cell"]))
    if as_class:
        body.append(_class(class_board(state, ended)))
    else:
        nodes = [_node(node) for node in model["nodes"]]
        kind = "nbc-nodes nbc-compact" if model["compact"] else "nbc-nodes"
        body.append(block(kind, nodes, role="list") if nodes else text_block("nbc-empty", "No nodes yet."))
    body.append(charts(Curves.of(series), node_colours(state.nodes), state.started))
    lists = {
        "waits": (WAITS, [block("nbc-waits", [_wait(wait) for wait in model["waits"]])]),
        "peers": ("Peers", [_peer(peer) for peer in model["peers"]]),
        "events": ("Events", [block("nbc-events", [event_block(e) for e in reversed(model["events"])])]),
    }
    body += [_fold(title, content, model["folds"][name]) for name, (title, content) in lists.items() if model[name]]
    return page(body, f"cluster {model['name']}")


def render_peers_html(peers: Sequence[PeerView]) -> str:
    """``peers`` as one ``<div>``: name, device, address, condition and why one cannot be added."""
    rows = [_peer(peer_row(peer)) for peer in peers]
    nothing = "No peer found: run “notebook-cluster share” on a machine of this network."
    return page(rows or [text_block("nbc-empty", nothing)], "peers")


@cache
def style() -> str:
    """The style sheet shared with the live panel, without the white space and comments that each saved output would
    repeat."""
    text = re.sub(r"/\*.*?\*/", "", Path(__file__).with_name("panel.css").read_text("utf-8"), flags=re.DOTALL)
    return re.sub(r"\s*([{};,])\s*", r"\1", re.sub(r"\s+", " ", text)).strip()


def page(body: Sequence[str], label: str) -> str:
    """``body``, markup that is escaped already, with what it needs of the panel's style; ``label`` is what a screen
    reader calls it.

    Texts of nodes in it are no mathematics: MathJax would read them all.
    """
    shown = block("nbc-panel", body, role="region", aria_label=label)
    return block(NO_TEX, [f"<style>{_style_of(shown)}</style>", shown])


def _style_of(markup: str) -> str:
    """The rules of :func:`style` that can apply to ``markup``: a notebook keeps one copy for each output."""
    classes = set(re.findall(r"nbc-[\w-]+", markup))
    return "".join(rule for needed, rule in _rules(style()) if any(one <= classes for one in needed))


@cache
def _rules(sheet: str) -> list[tuple[list[set[str]], str]]:
    """The rules of ``sheet``, each with the classes that every one of its selectors needs. A block of rules
    (``@container``) is one rule with the selectors of all in it."""
    found = []
    for rule in re.findall(r"[^{}]+\{(?:[^{}]|\{[^{}]*\})*\}", sheet):
        selectors = ",".join(re.findall(r"([^{}]+)\{", re.sub(r"^@[^{]*\{", "", rule)))
        selectors = re.sub(r":not\([^)]*\)", "", selectors)
        found.append(([set(re.findall(r"\.(nbc-[\w-]+)", one)) for one in selectors.split(",")], rule))
    return found


def block(classes: str, children: Sequence[str], **attributes: str) -> str:
    """A ``<div>`` around markup that is escaped already."""
    written = "".join(f' {name.replace("_", "-")}="{escaped(value)}"' for name, value in attributes.items())
    return f'<div class="{classes}"{written}>{"".join(children)}</div>'


def text_block(classes: str, text: str, **attributes: str) -> str:
    """A ``<div>`` around ``text``, which is escaped here."""
    return block(classes, [escaped(text)], **attributes)


def legend(keys: Iterable[tuple[str, str]]) -> str:
    """A swatch and a name for each (name, colour)."""
    return block(
        "nbc-keys",
        [
            block("nbc-key", [block("nbc-swatch", [], style=f"background:{colour}"), text_block("", name)])
            for name, colour in keys
        ],
    )


def _head(model: dict[str, Any], moment: str) -> str:
    said = [text_block("nbc-small nbc-muted", moment)] if moment else []
    return block(
        "nbc-row nbc-wrap",
        [text_block("nbc-title nbc-cut", model["name"]), text_block(f"nbc-pill nbc-{model['level']}", model["status"])]
        + said,
    )


def _fold(title: str, content: Sequence[str], fold: dict[str, Any]) -> str:
    """``content`` (markup) folded, with what is said of it meanwhile."""
    said = f'<span class="nbc-fold-said nbc-cut">{escaped(fold["said"])}</span>'
    head = f'<summary class="nbc-fold"><span class="nbc-heading">{title}</span>{said}</summary>'
    return f"<details{' open' if fold['open'] else ''}>{head}{''.join(content)}</details>"


def fact_block(fact: dict[str, str]) -> str:
    """One fact of :func:`.model.panel_model`."""
    return block(
        "nbc-fact",
        [text_block("nbc-fact-label", fact["label"]), text_block("nbc-fact-value", fact["value"])]
        + [text_block("nbc-fact-note", fact["note"])],
    )


def _cell(cell: dict[str, Any]) -> str:
    label = f"Cell {cell['id']} {cell['status']} {cell['time']}"
    return block(
        "nbc-cell nbc-row", [text_block("nbc-muted", label), text_block("nbc-code nbc-cut nbc-grow", cell["source"])]
    )


def _node(node: dict[str, Any]) -> str:
    memory = node["memory"]
    parts = [
        block(
            "nbc-row",
            [
                text_block("nbc-rank", node["rank"], title="rank"),
                text_block("nbc-node-name nbc-cut nbc-grow", node["name"], title=node["about"]),
            ]
            + [text_block(f"nbc-pill nbc-{node['level']}", node["condition"])],
        ),
        text_block("nbc-small nbc-muted nbc-cut", f"{node['device']} on {node['peer']}"),
        *([text_block("nbc-small nbc-muted", node["vitals"])] if node["vitals"] else []),
        block(
            "nbc-meter",
            [_bar("nbc-meter-peak", memory["peak_fraction"]), _bar("nbc-meter-used", memory["fraction"])],
            role="img",
            aria_label=f"{memory['kind']} {memory['used']} of {memory['total']}",
        ),
        block(
            "nbc-memory",
            [text_block("", f"{memory['kind']} {memory['used']} of {memory['total']}")]
            + [text_block("nbc-muted", f"peak {memory['peak']}")],
        ),
        block("nbc-numbers", [_number(label, node[key]) for key, label in _NUMBERS]),
        text_block("nbc-small nbc-muted nbc-cut", node["checkpoint"]),
    ]
    if node["waiting"]:
        parts.append(text_block("nbc-small nbc-muted nbc-cut", f"Waiting: {node['waiting']}"))
    if node["replaying"]:
        parts.append(text_block("nbc-small nbc-muted nbc-cut nbc-replaying", node["replaying"]))
    if node["reason"]:
        parts.append(text_block(f"nbc-reason nbc-{node['level']}", node["reason"]))
    if node["left_out"]:
        parts.append(text_block("nbc-reason nbc-warning", node["left_out"]))
    if node["extra"]:
        parts.append(text_block("nbc-small nbc-muted nbc-wide nbc-foot", node["extra"]))
    if node["log"]:
        parts.append(text_block("nbc-log nbc-code", "\n".join(node["log"])))
    return block("nbc-node", parts, role="listitem", style=f"--nbc-rank:{node['colour']}")


def _class(board: dict[str, Any]) -> str:
    heads = "".join(f'<th scope="col">{text}</th>' for text in ("Machine", "In the class", "Last cell"))
    rows = "".join(_class_row(row) for row in board["rows"])
    table = f'<table class="nbc-table nbc-class"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    line = [text_block("nbc-board-said", board["said"]), text_block("nbc-muted", board["cell"])]
    return block(
        "nbc-class-board", [block("nbc-row nbc-wrap nbc-board-line", line), block("nbc-scroll nbc-class-rows", [table])]
    )


def _class_row(row: dict[str, Any]) -> str:
    standing = text_block(f"nbc-pill nbc-{row['level']}", row["standing"])
    standing += text_block("nbc-small nbc-muted", row["why"]) if row["why"] else ""
    did = text_block(f"nbc-did nbc-{row['cell_level']}", row["cell"])
    return f'<tr><th scope="row">{escaped(row["name"])}</th><td>{standing}</td><td>{did}</td></tr>'


def _bar(classes: str, fraction: float) -> str:
    return block(classes, [], style=f"width:{fraction:.2%}")


def _number(label: str, value: str) -> str:
    return block("", [text_block("nbc-number-label", label), text_block("nbc-number", value)])


def _peer(peer: dict[str, Any]) -> str:
    note = peer["found"] if peer["condition"].endswith("connected") else peer["blocked"]
    note = note or f"{peer['found']} · can be added{' with its code' if peer['needs_code'] else ''}"
    return block(
        "nbc-peer",
        [
            text_block("nbc-node-name nbc-cut", peer["name"]),
            text_block(
                "nbc-small nbc-muted", " · ".join(part for part in (peer["device"], peer["address"], note) if part)
            ),
            text_block(f"nbc-pill nbc-{peer['level']}", peer["condition"]),
        ],
    )


def _wait(wait: dict[str, Any]) -> str:
    bars = [block("", [], title=said, style=f"left:{left}%;width:{width}%") for left, width, said in wait["bars"]]
    lane = block("nbc-lane", bars, style=f"--nbc-rank:{wait['colour']}")
    return block("nbc-wait", [text_block("nbc-cut", wait["name"]), lane, text_block("", wait["said"])])


def event_block(event: dict[str, Any]) -> str:
    """One event of :func:`.model.panel_model`."""
    return block(
        f"nbc-event nbc-{event['level']}",
        [text_block("nbc-muted", event["clock"]), text_block("nbc-event-text", event["text"])],
    )


def charts(curves: Curves, colours: Mapping[str, str], started: float, choice: CurveChoice = AS_MEASURED) -> str:
    """The metric of ``choice`` over steps and over time, and memory, as SVG; empty when there is next to nothing.

    ``colours``: of each node; ``started`` (epoch seconds) is the zero of the time axis.
    """
    over_steps, over_time, memory = [], [], []
    for node in curves.nodes():
        points = curves.get(node, "memory").by_time(started)
        memory.append(Line(node, colours.get(node, NO_PLACE), points))
    losses = curves.losses(choice.metric)
    means = smoothed_points if choice.smooth and are_noise(losses) else list
    for one in losses:
        line = run_line(one, colours.get(one.node, NO_PLACE))
        over_steps.append(line._replace(points=means(one.curve.by_step())))
        over_time.append(line._replace(points=means(one.curve.by_time(started))))
    jobs = curves.models(choice.metric)
    for job in jobs:
        curve, label = curves.of_model(job, choice.metric), global_label(job, jobs)
        over_steps.append(Line(label, GLOBAL, curve.by_step(), dotted=True))
        over_time.append(Line(label, GLOBAL, curve.by_time(started), dotted=True))
    title, (of_memory, memory) = metric_title(choice.metric), memory_lines(memory)
    drawn = ((title, "steps", over_steps), (title, "seconds", over_time), (of_memory, "seconds", memory))
    pictures = [
        svg_chart(title, unit, lines, from_zero=lines is memory, log=choice.log and lines is not memory)
        for title, unit, lines in drawn
        if any(len(line.points) >= _FEW_POINTS for line in lines)
    ]
    notes = ["Dotted: the global model, where it was measured"] if jobs else []
    notes += run_notes(losses, title)
    said = [text_block("nbc-small nbc-muted", text) for text in notes]
    return "".join([block("nbc-charts", pictures), *said]) if any(pictures) else ""
