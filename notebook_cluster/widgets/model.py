"""What a panel shows of a ClusterView: plain JSON with ready texts, so that every renderer says the same.

Pure. Every text that came from another machine is cleaned here; renderers still escape it.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from notebook_cluster.protocol.clock import ABSENT, ago, clock, duration
from notebook_cluster.protocol.state import (
    GONE,
    CellView,
    ClusterView,
    EventView,
    JobView,
    NodeView,
    PeerView,
    RoundWait,
    at_work,
    by_rank,
)
from notebook_cluster.widgets.formatting import (
    byte_count,
    integer,
    node_colour,
    number,
    percent,
    plain,
    plural,
    round_trip,
)
from notebook_cluster.widgets.timeline import wait_lanes

EVENTS_SHOWN = 40
FEW_NODES = 6
"""Of more each has a row in place of a card."""
_MOST = 1e12
"""A rate above it is not one."""
_UP = ("ok", "suspect", "refused")
"""Conditions of nodes that are there and work, or could."""
_NODE_LEVELS = {
    "ok": "good", "starting": "info", "replaying": "info", "rejoining": "info", "stopping": "info",
    "suspect": "warning", "asleep": "asleep", "refused": "warning",
}  # fmt: skip
_PEER_LEVELS = {
    "connected": "good", "found": "info", "connecting": "info", "suspect": "warning", "untrusted": "muted",
    "asleep": "asleep",
}  # fmt: skip
_FOUND = {
    "mdns": "found on the network", "typed": "address typed", "local": "this machine",
    "remembered": "address remembered", "dialled": "dials in",
}  # fmt: skip


def panel_model(state: ClusterView, ended: str = "") -> dict[str, Any]:
    """``state`` as nested dicts, lists, strings, numbers and None: what panel.js and the static renderers draw.

    ``ended`` is why the cluster is no more, empty while it runs.
    """
    status, level = (plain(ended), "muted") if ended else _status(state)
    peers = [_row_among(peer, state, bool(ended)) for peer in state.peers]
    events = [_event(event, state.now) for event in state.events[-EVENTS_SHOWN:]]
    waits = wait_lanes(state.jobs[0].waits, state.nodes) if state.jobs else []
    waited = state.jobs[0].waits[-1] if waits else None
    return {
        "name": plain(state.name, 64),
        "status": status,
        "level": level,
        "facts": _facts(state),
        "cell": _cell(state.cell, state.now, bool(ended)),
        "invitation": None if ended else invitation_of(state.invitation),
        "launches": [] if ended else _standing(state),
        "nodes": [_node(node, state, bool(ended)) for node in by_rank(state.nodes)],
        "compact": len(state.nodes) > FEW_NODES,
        "peers": peers,
        "events": events,
        "waits": waits,
        "folds": _folds(peers, events, waited),
        "can_interrupt": state.cell is not None and state.cell.status == "running",
        "can_checkpoint": bool(state.jobs),
        "checkpoint_name": f"{state.jobs[0].name}-round-{state.jobs[0].round}" if state.jobs else "",
    }


def peer_row(peer: PeerView) -> dict[str, Any]:
    """One peer: its texts, and ``blocked``, which says why it cannot be added (empty when it can, ``needs_code``: with
    the code that is shown there)."""
    blocked = _blocked(peer)
    needs_code = not peer.trusted and peer.pairing and peer.condition == "untrusted"
    found = [_FOUND[peer.found_by]]
    if peer.round_trip_ms is not None:
        found.append(round_trip(peer.round_trip_ms, peer.jitter_ms))
    if peer.slept:
        found.append(f"slept {duration(peer.slept)}")
    return {
        "name": plain(peer.name, 64),
        "key": plain(peer.key, 64),
        "address": plain(peer.address, 80),
        "device": plain(peer.device, 80),
        "condition": peer.condition,
        "level": _PEER_LEVELS.get(peer.condition, "bad"),
        "found": " · ".join(found),
        "reason": plain(peer.reason),
        "blocked": "" if needs_code else blocked,
        "needs_code": needs_code,
    }


def _folds(
    peers: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], waited: RoundWait | None
) -> dict[str, dict[str, Any]]:
    """What is said of lists that are folded, and whether they begin open: peers do where one can be added."""
    free = sum(not peer["blocked"] for peer in peers)
    can = f"{plural(free, 'peer')} can be added" if free else "none to be added"
    last = f"{events[-1]['clock']} {events[-1]['text']}" if events else ""
    latest = f"round {integer(waited.round)}: {plain(waited.node, 64)}, {duration(waited.seconds)}" if waited else ""
    return {
        "waits": {"said": latest, "open": False},
        "peers": {"said": f"{len(peers)}, {can}", "open": free > 0},
        "events": {"said": last, "open": False},
    }


def _row_among(peer: PeerView, state: ClusterView, over: bool) -> dict[str, Any]:
    """The row with ``target``, by which it is added: its name, or its address where others have that name too; and
    whether the cluster ``can_move`` there. When it is ``over`` none is connected to it, and none can be added."""
    namesakes = sum(other.name == peer.name for other in state.peers)
    leads = peer.name == (state.head or "local")
    row = peer_row(peer) | {
        "target": peer.name if namesakes == 1 else peer.address,
        "can_move": peer.trusted and not leads and not over and peer.condition in ("connected", "found"),
    }
    if over:
        row |= {"blocked": "the cluster has ended", "needs_code": False}
        if row["level"] in ("good", "info"):
            was = f"was {peer.condition}" if peer.condition in ("connected", "connecting") else peer.condition
            row |= {"condition": was, "level": "muted"}
    return row


def _blocked(peer: PeerView) -> str:
    if peer.condition == "connected":
        return "already in the cluster"
    if peer.condition == "connecting":
        return "connecting"
    if peer.condition == "asleep":
        return "asleep: its nodes come back when it wakes"
    if peer.condition == "lost":
        return plain(peer.reason) or "nothing is heard from it"
    if not peer.trusted:
        return plain(peer.reason) or "not trusted: run notebook-cluster share there, it shows a code"
    if peer.condition == "refused":
        return plain(peer.reason) or "it refused this cluster"
    return ""


def _standing(state: ClusterView) -> list[str]:
    """Lines about where it is led from and what engines have started."""
    led = [f"led from {plain(state.head, 64)}: it goes on without this machine"] if state.head else []
    return led + [plain(row.text, 400) for row in state.launches if row.condition != "ended"]


def invitation_of(text: str) -> dict[str, str] | None:
    """``HOST:PORT CODE`` as what is typed at a peer, and that as a QR code (an SVG in a data URI)."""
    address, _, code = plain(text, 120).rpartition(" ")
    if not address or not code:
        return None
    command = f"notebook-cluster share --dial {address} --code {code}"
    return {"address": address, "code": code, "command": command, "qr": _qr(command)}


@cache
def _qr(text: str) -> str:
    import segno  # only where somebody is invited

    drawn: str = segno.make(text, error="m", micro=False).svg_data_uri(border=2, dark="#000", light="#fff", scale=4)
    return drawn


def _status(state: ClusterView) -> tuple[str, str]:
    broken = [node.name for node in state.nodes if node.condition in ("lost", "dead")]
    if broken:
        return plain(f"{', '.join(broken)} {'is' if len(broken) == 1 else 'are'} down"), "bad"
    asleep = [node.name for node in state.nodes if node.condition == "asleep"]
    if state.cell is not None and state.cell.status == "running":
        phase = plain(state.jobs[0].phase, 40) if _trains(state) else ""
        return ("training" if phase == "training" else f"training · {phase}" if phase else "running a cell"), "info"
    if any(node.condition == "starting" for node in state.nodes):
        return "starting", "info"
    if asleep:
        return plain(f"{', '.join(asleep)} {'is' if len(asleep) == 1 else 'are'} asleep"), "asleep"
    return ("ready", "good") if state.nodes else ("no nodes yet", "muted")


def _facts(state: ClusterView) -> list[dict[str, str]]:
    there = [node for node in state.nodes if node.condition in _UP]
    count = str(len(there)) if len(there) == len(state.nodes) else f"{len(there)} of {len(state.nodes)}"
    facts = [{"label": "Nodes", "value": count, "note": f"generation {state.generation}"}]
    for job in state.jobs[:1]:
        facts.append({"label": "Round", "value": integer(job.round), "note": _job_note(job)})
        facts.append({"label": "Sent", "value": byte_count(job.bytes_sent), "note": "by all nodes"})
        saved = job.bytes_data_parallel - job.bytes_sent
        if job.bytes_sent > 0 and saved > 0:
            note = f"{job.bytes_data_parallel / job.bytes_sent:,.0f}\u00d7 less than data parallel"
            facts.append({"label": "Saved", "value": byte_count(saved), "note": note})
        if job.loss is not None:
            note = f"measured at round {integer(job.loss_round)}"
            facts.append({"label": "Global loss", "value": number(job.loss), "note": note})
        if job.hash_mismatches:
            facts.append({"label": "Hash mismatches", "value": integer(job.hash_mismatches), "note": "see events"})
    working = at_work(there, state.cell.nodes if state.cell is not None else {})
    rates = [node.samples_per_s for node in working if node.samples_per_s is not None and _is_rate(node.samples_per_s)]
    runs = state.cell is not None and state.cell.status == "running"
    if rates and (_trains(state) or (runs and not state.jobs)):
        facts.append({"label": "Samples/s", "value": f"{sum(rates):,.0f}", "note": f"of {plural(len(rates), 'node')}"})
    facts.append({"label": "Up", "value": duration(state.now - state.started), "note": ""})
    return facts


def _trains(state: ClusterView) -> bool:
    """The running cell trains the first job: one that an earlier cell trained is only remembered."""
    cell = state.cell
    return cell is not None and cell.status == "running" and bool(state.jobs) and state.jobs[0].cell == cell.id


def _job_note(job: JobView) -> str:
    if job.waiting_for:
        return plain("waiting for " + ", ".join(job.waiting_for), 60)
    return plain(f"{job.strategy} · {plural(job.parameters, 'parameter')}", 60)


def _cell(cell: CellView | None, now: float, over: bool) -> dict[str, Any] | None:
    if cell is None:
        return None
    status: str = "ended with the cluster" if over and cell.status in ("running", "queued") else cell.status
    seconds = (cell.ended if cell.ended is not None else now) - cell.started
    first_line = next((line for line in cell.source.splitlines() if line.strip()), "")
    return {
        "id": cell.id,
        "source": plain(first_line, 80),
        "status": status,
        "time": duration(seconds) if cell.started else "",
    }


def _node(node: NodeView, state: ClusterView, ended: bool) -> dict[str, Any]:
    is_gone = node.condition in GONE
    is_old = is_gone and not ended  # its last numbers are not those of this moment
    total, used = max(node.memory_total, 1), 0 if is_gone else node.memory_used
    did = state.cell.nodes.get(node.name, "") if state.cell is not None else ""
    failed = node.failed if node.condition == "ok" else ""
    busy = node.busy or (did == "running" and state.cell is not None and state.cell.status == "running")
    condition: str = "busy" if node.condition == "ok" and busy else node.condition
    level = "info" if condition == "busy" else _NODE_LEVELS.get(node.condition, "bad")
    if failed:
        condition, level = "failed", "bad"
    if ended and level in ("good", "info"):
        condition, level = "ended", "muted"
    device = node.device if node.device_name in ("", node.device) else f"{node.device} · {node.device_name}"
    checkpoint = f"Saved {plain(node.checkpoint, 60)}" if node.checkpoint else "No checkpoint yet"
    if node.checkpoint and node.checkpoint_time is not None:
        checkpoint += f", {ago(state.now - node.checkpoint_time)}"
    vitals = "" if ended or is_gone else " · ".join(_vitals(node, state.peers))
    return {
        "name": plain(node.name, 64),
        "rank": ABSENT if node.rank is None else str(node.rank),
        "colour": node_colour(node),
        "peer": plain(node.peer, 64),
        "device": plain(device, 60),
        "vitals": vitals,
        "about": "\n".join(
            part for part in (f"{plain(device, 60)} on {plain(node.peer, 64)}", vitals, checkpoint) if part
        ),
        "condition": condition,
        "level": level,
        "reason": plain(node.reason) or plain(failed, 200),
        "log": [plain(line, 160) for line in node.log_tail[-3:]],
        "waiting": plain(node.waiting, 80) if busy and not ended else "",
        "replaying": "" if ended else plain(node.replaying, 80),
        "left_out": "" if ended else plain(node.left_out),
        "memory": {
            "kind": "memory" if node.memory_kind == "unified" else node.memory_kind,
            "used": byte_count(used) if used else ABSENT,
            "peak": byte_count(max(node.memory_peak, node.memory_used)) if node.memory_used else ABSENT,
            "total": byte_count(node.memory_total) if node.memory_total else "?",
            "fraction": round(min(max(used / total, 0.0), 1.0), 4) if node.memory_total else 0.0,
            "peak_fraction": round(min(max(node.memory_peak / total, 0.0), 1.0), 4) if node.memory_total else 0.0,
        },
        "step": integer(node.step),
        "loss": ABSENT if is_old else number(node.loss),
        "round": integer(node.last_round),
        "wait": ABSENT if node.round_wait is None else duration(node.round_wait),
        "checkpoint": checkpoint,
        "extra": "" if is_old else " · ".join(_extra(node, works=busy and not ended)),
    }


def _vitals(node: NodeView, peers: Sequence[PeerView]) -> list[str]:
    """Load and temperature of its device, processors that it keeps busy, threads that it may take, power of its
    machine, and the link to it."""
    kind = "machine's CPU" if node.device == "cpu" else "GPU"
    facts = [] if node.load is None else [f"{kind} {percent(node.load)}"]
    if node.temperature is not None and abs(node.temperature) < 1000:
        facts.append(f"{node.temperature:.0f} °C")
    if 0.05 <= node.cpu < _MOST:
        facts.append(f"this node {node.cpu:.1f} CPU cores")
    if 0 < node.threads < _MOST:
        facts.append(plural(node.threads, "thread") + (" (its own setting)" if node.threads_chosen else ""))
    peer = next((peer for peer in peers if peer.name == node.peer), None)
    if peer is not None and peer.battery is not None:
        facts.append(f"{'mains' if peer.plugged else 'battery'} {percent(peer.battery / 100)}")
    if peer is not None and peer.round_trip_ms is not None and peer.found_by != "local":
        facts.append(f"link {round_trip(peer.round_trip_ms, peer.jitter_ms)}")
    return facts


def _is_rate(rate: float | None) -> bool:
    """False for what is not known, not a number, or cannot be."""
    return rate is not None and 0 <= rate < _MOST


def _extra(node: NodeView, *, works: bool) -> list[str]:
    """Its rate while it ``works``, which is kept when its cell has ended, and what it reported."""
    rate = [f"{node.samples_per_s:,.0f} samples/s"] if works and _is_rate(node.samples_per_s) else []
    return rate + [f"{plain(name, 30)} {number(value)}" for name, value in sorted(node.scalars.items())[:4]]


def _event(event: EventView, now: float) -> dict[str, Any]:
    return {
        "time": event.time, "clock": clock(event.time, now), "level": event.level, "text": plain(event.text, 300),
    }  # fmt: skip
