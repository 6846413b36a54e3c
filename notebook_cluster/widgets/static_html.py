"""A ClusterView as self-contained HTML without script: saved notebooks, nbconvert, viewers without widgets."""

import html
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from notebook_cluster.protocol.state import ClusterView, PeerView, Series
from notebook_cluster.widgets.curves import Curves
from notebook_cluster.widgets.model import panel_model, peer_row
from notebook_cluster.widgets.palette import rank_colour
from notebook_cluster.widgets.picture import Line, svg_chart

_FEW_POINTS = 3
"""A cluster that has just started has so few: two dots on large axes say nothing."""
_NUMBERS = (("step", "Step"), ("loss", "Loss"), ("round", "Round"), ("wait", "Wait"))


def render_html(state: ClusterView, series: Sequence[Series] = (), *, ended: str = "") -> str:
    """``state`` as one ``<div>`` with its style, the node cards and, from ``series``, loss and memory curves as SVG.

    ``ended`` says why the cluster is no more, where that is so. Every text is escaped; there is no script and nothing
    is loaded from elsewhere.
    """
    model = panel_model(state, ended)
    body = [_head(model), _block("nbc-facts", [_fact(fact) for fact in model["facts"]])]
    if model["cell"]:
        body.append(_cell(model["cell"]))
    nodes = [_node(node) for node in model["nodes"]]
    body.append(_block("nbc-nodes", nodes, role="list") if nodes else _text("nbc-empty", "No nodes yet."))
    body.append(_charts(state, Curves(series)))
    if model["peers"]:
        body += [_text("nbc-heading", "Peers"), *(_peer(peer) for peer in model["peers"])]
    if model["events"]:
        body += [_text("nbc-heading", "Events"), _block("nbc-events", [_event(e) for e in reversed(model["events"])])]
    return _page(body, f"cluster {model['name']}")


def render_peers_html(peers: Sequence[PeerView]) -> str:
    """``peers`` as one ``<div>``: name, device, address, condition and why one cannot be added."""
    rows = [_peer(peer_row(peer)) for peer in peers]
    nothing = "No peer found: run “notebook-cluster share” on a machine of this network."
    return _page(rows or [_text("nbc-empty", nothing)], "peers")


@cache
def style() -> str:
    """The style sheet shared with the live panel."""
    return Path(__file__).with_name("panel.css").read_text("utf-8")


def _page(body: Sequence[str], label: str) -> str:
    return f"<div><style>{style()}</style>{_block('nbc-panel', body, role='region', aria_label=label)}</div>"


def _block(classes: str, children: Sequence[str], **attributes: str) -> str:
    """A ``<div>`` around markup that is escaped already."""
    written = "".join(
        f' {name.replace("_", "-")}="{html.escape(value, quote=True)}"' for name, value in attributes.items()
    )
    return f'<div class="{classes}"{written}>{"".join(children)}</div>'


def _text(classes: str, text: str, **attributes: str) -> str:
    """A ``<div>`` around ``text``, which is escaped here."""
    return _block(classes, [html.escape(text, quote=True)], **attributes)


def _head(model: dict[str, Any]) -> str:
    return _block(
        "nbc-row nbc-wrap",
        [_text("nbc-title nbc-cut", model["name"]), _text(f"nbc-pill nbc-{model['level']}", model["status"])],
    )


def _fact(fact: dict[str, str]) -> str:
    return _block(
        "nbc-fact",
        [_text("nbc-fact-label", fact["label"]), _text("nbc-fact-value", fact["value"])]
        + [_text("nbc-fact-note", fact["note"])],
    )


def _cell(cell: dict[str, Any]) -> str:
    label = f"Cell {cell['id']} {cell['status']} {cell['time']}"
    return _block("nbc-cell nbc-row", [_text("nbc-muted", label), _text("nbc-code nbc-cut nbc-grow", cell["source"])])


def _node(node: dict[str, Any]) -> str:
    memory = node["memory"]
    parts = [
        _block(
            "nbc-row",
            [_text("nbc-rank", node["rank"], title="rank"), _text("nbc-node-name nbc-cut nbc-grow", node["name"])]
            + [_text(f"nbc-pill nbc-{node['level']}", node["condition"])],
        ),
        _text("nbc-small nbc-muted nbc-cut", f"{node['device']} on {node['peer']}"),
        _block(
            "nbc-meter",
            [_bar("nbc-meter-peak", memory["peak_fraction"]), _bar("nbc-meter-used", memory["fraction"])],
            role="img",
            aria_label=f"{memory['kind']} {memory['used']} of {memory['total']}",
        ),
        _block(
            "nbc-memory",
            [_text("", f"{memory['kind']} {memory['used']} of {memory['total']}")]
            + [_text("nbc-muted", f"peak {memory['peak']}")],
        ),
        _block("nbc-numbers", [_number(label, node[key]) for key, label in _NUMBERS]),
        _text("nbc-small nbc-muted nbc-cut", node["checkpoint"]),
    ]
    if node["waiting"]:
        parts.append(_text("nbc-small nbc-muted nbc-cut", f"Waiting: {node['waiting']}"))
    if node["reason"]:
        parts.append(_text(f"nbc-reason nbc-{node['level']}", node["reason"]))
    if node["extra"]:
        parts.append(_text("nbc-small nbc-muted nbc-cut nbc-foot", node["extra"]))
    if node["log"]:
        parts.append(_text("nbc-log nbc-code", "\n".join(node["log"])))
    return _block("nbc-node", parts, role="listitem", style=f"--nbc-rank:{node['colour']}")


def _bar(classes: str, fraction: float) -> str:
    return _block(classes, [], style=f"width:{fraction:.2%}")


def _number(label: str, value: str) -> str:
    return _block("", [_text("nbc-number-label", label), _text("nbc-number", value)])


def _peer(peer: dict[str, Any]) -> str:
    note = peer["blocked"] if peer["condition"] != "connected" else peer["found"]
    note = note or f"{peer['found']} · can be added"
    return _block(
        "nbc-peer",
        [
            _text("nbc-node-name nbc-cut", peer["name"]),
            _text("nbc-small nbc-muted", " · ".join(part for part in (peer["device"], peer["address"], note) if part)),
            _text(f"nbc-pill nbc-{peer['level']}", peer["condition"]),
        ],
    )


def _event(event: dict[str, Any]) -> str:
    return _block(
        f"nbc-event nbc-{event['level']}",
        [_text("nbc-muted", event["clock"]), _text("nbc-event-text", event["text"])],
    )


def _charts(state: ClusterView, curves: Curves) -> str:
    ranks = {node.name: node.rank for node in state.nodes}
    loss, memory = [], []
    for node in curves.nodes():
        colour = rank_colour(ranks.get(node))
        loss.append(Line(node, colour, curves.get(node, "loss").by_step()))
        points = curves.get(node, "memory").by_time(state.started)
        memory.append(Line(node, colour, [(seconds, value / 1e9) for seconds, value in points]))
    loss, memory = ([] if all(len(line.points) < _FEW_POINTS for line in lines) else lines for lines in (loss, memory))
    charts = [svg_chart("Loss", "steps", loss), svg_chart("Memory (GB)", "seconds", memory, from_zero=True)]
    return _block("nbc-charts", charts) if any(charts) else ""
