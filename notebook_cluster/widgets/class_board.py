"""What a class's page shows of a ClusterView: how to come in, who is in, who hangs and why, everybody's last cell.

Pure, as :mod:`.model`, whose panel has it on top. Every text that came from another machine is cleaned here.
"""

from collections import Counter
from typing import Any

from notebook_cluster.protocol.clock import clock, duration
from notebook_cluster.protocol.state import CellView, ClusterView, NodeView, PeerView
from notebook_cluster.widgets.formatting import plain, plural
from notebook_cluster.widgets.model import invitation_of

_NODES = {
    "ok": ("in", "good"), "starting": ("comes in", "info"), "replaying": ("catches up", "info"),
    "rejoining": ("catches up", "info"), "stopping": ("leaves", "muted"), "suspect": ("answers late", "warning"),
    "asleep": ("asleep", "asleep"), "lost": ("not heard", "bad"), "dead": ("ended", "bad"),
    "refused": ("refused", "bad"),
}  # fmt: skip
_WAYS_OUT = {
    "asleep": "open its lid: it comes back by itself",
    "lost": "its Wi-Fi, or its terminal was closed: it comes back by itself, or shares again",
    "dead": "Restart begins its kernel anew, with the cells so far",
}
_CELLS = {
    "ok": ("done", "good"), "running": ("running", "info"), "queued": ("waits for its turn", "info"),
    "replaying": ("catches up", "info"), "interrupted": ("stopped", "warning"), "error": ("failed", "bad"),
    "lost": ("lost", "bad"), "cancelled": ("not begun", "muted"),
}  # fmt: skip
_ORDER = ("bad", "warning", "asleep", "info", "muted", "good")
_HANGS = ("bad", "warning", "asleep")
_ATTEMPT = "invitation: "
_ATTEMPTS_SECONDS, _MOST_ATTEMPTS = 300.0, 3


def class_board(state: ClusterView, ended: str = "") -> dict[str, Any]:
    """``state`` as ``invited`` (or None), ``said``, ``cell`` (texts), ``heard`` (failed attempts of the last minutes to
    come in) and ``rows``, the worst first, then by name.

    A row has ``key``, ``name``, ``standing``, ``level``, ``why``, ``cell``, ``cell_level``, ``target`` (a node's or a
    peer's name) and ``can``: of ``add``, ``restart``, ``remove`` what makes sense.
    """
    with_node = {node.peer for node in state.nodes}
    rows = [_of_node(node, state.cell) for node in state.nodes]
    rows += [row for peer in state.peers if peer.name not in with_node and (row := _of_peer(peer)) is not None]
    rows.sort(key=lambda row: (min(_ORDER.index(row["level"]), _ORDER.index(row["cell_level"])), row["name"]))
    if ended:
        rows = [row | {"can": []} for row in rows]
    code = None if ended else invitation_of(state.invitation)
    return {
        "invited": code, "said": _said(rows), "cell": _cell_said(state.cell, state.now), "rows": rows,
        "heard": [] if ended else _heard(state),
    }  # fmt: skip


def _of_node(node: NodeView, cell: CellView | None) -> dict[str, Any]:
    standing, level = _NODES[node.condition]
    why = node.reason or (node.replaying if node.condition in ("replaying", "rejoining") else node.left_out)
    way_out = _WAYS_OUT.get(node.condition, "")
    can = ["restart", "remove"] if node.condition not in ("starting", "stopping") else []
    did, cell_level = _did(node, cell)
    return {
        "key": f"node {node.name}", "name": plain(node.name, 64), "standing": standing, "level": level,
        "why": ". ".join(part for part in (plain(why, 200), way_out) if part), "cell": did, "cell_level": cell_level,
        "target": node.name, "can": can,
    }  # fmt: skip


def _did(node: NodeView, cell: CellView | None) -> tuple[str, str]:
    """What became of the newest cell on ``node``, and how bad that is."""
    if cell is None:
        return "", "good"
    status = cell.nodes.get(node.name)
    if status is None:
        return ("not yet run here", "muted") if node.condition != "ok" else ("not for this machine", "muted")
    text, level = _CELLS.get(status, (status, "muted"))
    if said := cell.errors.get(node.name, ""):
        return plain(said if status == "error" else f"{text}: {said}", 160), level
    if status == "running" and node.condition in _WAYS_OUT:
        return "was running", "muted"
    if status == "running" and node.waiting:
        return plain(f"running, waits: {node.waiting}", 120), level
    ended = sum(of not in ("running", "queued", "replaying") for of in cell.nodes.values())
    if status == "running" and 2 * ended > len(cell.nodes):
        return "still running: most others are done", "warning"
    return text, level


def _of_peer(peer: PeerView) -> dict[str, Any] | None:
    """A machine without a node; None: nobody of the class."""
    add: list[str] = []
    match peer.condition:
        case "untrusted" if peer.pairing:
            standing, level, why = "not in", "warning", "it shares with another code than this one: share again with it"
        case "found" | "connected":
            standing, level, why, add = "here, not in", "info", "Add gives it a node", ["add"]
        case "connecting":
            standing, level, why = "comes in", "info", ""
        case "refused":
            standing, level, why = "refused", "bad", ""
        case "lost" | "suspect" | "asleep":
            standing, level = _NODES[peer.condition]
            why = _WAYS_OUT.get(peer.condition, "")
        case _:
            return None
    if peer.name == "local":
        return None
    return {
        "key": f"peer {peer.key}", "name": plain(peer.name, 64), "standing": standing, "level": level,
        "why": ". ".join(part for part in (plain(peer.reason, 200), why) if part), "cell": "", "cell_level": "good",
        "target": peer.name, "can": add,
    }  # fmt: skip


def _said(rows: list[dict[str, Any]]) -> str:
    """``28 are in · 2 hang · 1 is not in yet``."""
    inside = sum(row["standing"] in ("in", "catches up", "answers late") for row in rows)
    hang = sum(row["level"] in _HANGS for row in rows)
    coming = sum(row["level"] == "info" and row["standing"] != "catches up" for row in rows)
    parts = [f"{inside} {'is' if inside == 1 else 'are'} in"]
    parts += [f"{hang} {'hangs' if hang == 1 else 'hang'}"] if hang else []
    parts += [f"{coming} {'is' if coming == 1 else 'are'} not in yet"] if coming else []
    return " · ".join(parts)


def _cell_said(cell: CellView | None, now: float) -> str:
    """``cell 7, 12 s: 25 done · 2 failed · 1 running``."""
    if cell is None:
        return ""
    counts = Counter(_CELLS.get(status, (status, ""))[0] for status in cell.nodes.values())
    seconds = (cell.ended if cell.ended is not None else now) - cell.started
    took = f", {duration(seconds)}" if cell.started else ""
    many = " · ".join(f"{count} {word}" for word, count in counts.most_common()) or plural(0, "machine")
    return f"cell {cell.id}{took}: {many}"


def _heard(state: ClusterView) -> list[str]:
    fresh = [event for event in state.events if state.now - event.time < _ATTEMPTS_SECONDS]
    tried = [event for event in fresh if event.text.startswith(_ATTEMPT) and "right code" not in event.text]
    return [
        f"{clock(event.time, state.now)} {plain(event.text.removeprefix(_ATTEMPT), 200)}"
        for event in tried[-_MOST_ATTEMPTS:]
    ]
