"""A ClusterView as plain text: terminals, saved notebooks, screen readers."""

import math
import unicodedata
from collections.abc import Sequence
from typing import Any

from notebook_cluster.protocol.clock import ABSENT
from notebook_cluster.protocol.state import ClusterView, PeerView, Series
from notebook_cluster.widgets.class_board import class_board
from notebook_cluster.widgets.curves import Curves
from notebook_cluster.widgets.formatting import global_label, integer, number
from notebook_cluster.widgets.model import panel_model, peer_row
from notebook_cluster.widgets.pictures import thin

_BARS = "▁▂▃▄▅▆▇█"
EVENTS_IN_TEXT = 8


def render_text(
    state: ClusterView, series: Curves | Sequence[Series] = (), *, ended: str = "", as_class: bool = False
) -> str:
    """``state`` as aligned lines of text, with a small loss curve per node from ``series`` (``as_class``: how the class
    is doing). No final newline.

    ``ended`` says why the cluster is no more, where that is so.
    """
    model = panel_model(state, ended)
    lines = [f"cluster {model['name']} · {model['status']}"]
    lines.append(" · ".join(_fact(fact) for fact in model["facts"]))
    if model["invitation"]:
        lines.append(f"peers may join, on each: {model['invitation']['command']}")
    lines += model["launches"]
    if model["cell"]:
        lines.append(_cell(model["cell"]))
    curves = Curves.of(series)
    lines += [
        "",
        *(_class(class_board(state, ended)) if as_class else _nodes(model["nodes"], curves)),
        *_models(curves),
    ]
    if model["waits"]:
        head, *lanes = model["waits"]
        rows = [[lane["name"], lane["said"]] for lane in lanes]
        lines += ["", f"who was waited for, last {head['name']}", *(f"  {line}" for line in aligned(rows))]
    if model["peers"]:
        lines += ["", *_peers(model["peers"])]
    if model["events"]:
        lines += ["", "events"]
        lines += [
            f"  {event['clock']}  {_mark(event['level'])}{event['text']}" for event in model["events"][-EVENTS_IN_TEXT:]
        ]
    return "\n".join(lines)


def render_peers_text(peers: Sequence[PeerView]) -> str:
    """``peers`` as a table with the reason why one cannot be added, or a line that says that none was found."""
    if not peers:
        return "no peer found: run 'notebook-cluster share' on a machine of this network"
    return "\n".join(_peers([peer_row(peer) for peer in peers]))


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """``values`` as a line of block characters of at most ``width``; values that are not finite are left out."""
    finite = [(float(index), value) for index, value in enumerate(values) if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    shown = [value for _, value in thin(finite, width)]
    low, high = min(shown), max(shown)
    return "".join(_BARS[round((value - low) / ((high - low) or 1) * (len(_BARS) - 1))] for value in shown)


def _fact(fact: dict[str, str]) -> str:
    return f"{fact['label'].lower()} {fact['value']}" + (f" ({fact['note']})" if fact["note"] else "")


def _cell(cell: dict[str, Any]) -> str:
    return f"cell {cell['id']} {cell['status']} {cell['time']}: {cell['source']}"


def _class(board: dict[str, Any]) -> list[str]:
    rows = [["machine", "", "last cell", ""]]
    rows += [[row["name"], row["standing"], row["cell"], row["why"]] for row in board["rows"]]
    return [" · ".join(part for part in (board["said"], board["cell"]) if part), *aligned(rows)]


def _nodes(nodes: list[dict[str, Any]], curves: Curves) -> list[str]:
    if not nodes:
        return ["no nodes yet: %cluster add PEER, or %cluster start --local 1"]
    rows = [["rank", "node", "device", "memory", "peak", "step", "loss", "round", "state", ""]]
    for node in nodes:
        memory = node["memory"]
        state = node["replaying"] or node["condition"] + (f": {node['reason']}" if node["reason"] else "")
        rows.append(
            [node["rank"], node["name"], node["device"], f"{memory['used']} of {memory['total']}", memory["peak"]]
            + [node["step"], node["loss"], node["round"], state, sparkline(curves.get(node["name"], "loss").value)]
        )
    details = [
        f"  {node['name']}: {' · '.join(parts)}"
        for node in nodes
        if (parts := [part for part in (node["vitals"], _wait(node), node["extra"], _saved(node)) if part])
    ]
    details += [f"  {node['name']} runs {node['left_out']}" for node in nodes if node["left_out"]]
    return [*aligned(rows, right={0, 3, 4, 5, 6, 7}), *details]


def _wait(node: dict[str, Any]) -> str:
    return f"waited {node['wait']}" if node["wait"] != ABSENT else ""


def _saved(node: dict[str, Any]) -> str:
    checkpoint: str = node["checkpoint"]
    return checkpoint[:1].lower() + checkpoint[1:] if checkpoint.startswith("Saved") else ""


def _models(curves: Curves) -> list[str]:
    rows = []
    jobs = curves.models()
    for job in jobs:
        curve = curves.of_model(job, "loss")
        shown = sparkline(curve.value)
        rows.append(
            [
                f"loss of the {global_label(job, jobs)}",
                number(curve.value[-1]),
                f"step {integer(curve.step[-1])}",
                shown,
            ]
        )
    return aligned(rows, right={1})


def _peers(peers: list[dict[str, Any]]) -> list[str]:
    rows = [["peer", "device", "address", "state", "can be added"]]
    for peer in peers:
        rows.append(
            [peer["name"], peer["device"], peer["address"], f"{peer['condition']}, {peer['found']}"]
            + [f"no: {peer['blocked']}" if peer["blocked"] else "with its --code" if peer["needs_code"] else "yes"]
        )
    return aligned(rows)


def aligned(rows: list[list[str]], right: frozenset[int] | set[int] = frozenset()) -> list[str]:
    """``rows``, all of one length, as lines with aligned columns; the columns ``right`` end at their right edge."""
    if not rows:
        return []
    widths = [max(_width(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            _pad(cell, width, column in right) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _pad(cell: str, width: int, right: bool) -> str:
    space = " " * (width - _width(cell))
    return space + cell if right else cell + space


def _width(text: str) -> int:
    """Columns that ``text`` takes in a terminal: wide East Asian characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def _mark(level: str) -> str:
    return "" if level == "info" else f"{level}: "
