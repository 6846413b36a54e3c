"""What the doctor says about connections: ports that answer, pairs that cannot reach each other, how fast it all is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from notebook_cluster.discovery.addresses import NO
from notebook_cluster.doctor.findings import Examined, Level, allow_tcp, listed, on, say
from notebook_cluster.protocol.clock import duration
from notebook_cluster.protocol.measuring import PairMeasured
from notebook_cluster.protocol.state import JobView
from notebook_cluster.protocol.views import Finding

SLOW_BYTES_PER_S = 1e6
SLOW_ROUND_TRIP_S = 0.15
RECEPTION = "reception"
"""Label in Diagnose.reach for the port of this cluster at which peers dial in."""
DIAL = "# or let it dial: %cluster invite in the notebook, then what that prints on it"


@dataclass(frozen=True)
class LinkState:
    """The way from this machine to a peer's link port."""

    name: str
    address: str
    """``HOST:PORT``."""
    condition: str
    reason: str
    answer: str
    """``host:port`` that answered over TCP, or ``no: `` and why none did; empty when it was not tried."""
    joined: bool = False
    """It is a peer of this cluster, not only one that was found."""
    remembered: bool = False
    """Nothing was heard of it: this is where it was the last time."""


def links(states: Sequence[LinkState]) -> list[Finding]:
    """Peers whose link port does not answer, or that answer and are not connected all the same."""
    findings = []
    for state in states:
        if state.condition == "connected":
            continue
        if state.condition == "asleep":
            findings.append(say("port", "info", f"{state.name} is asleep: its nodes come back when it wakes"))
        elif state.answer.startswith(NO):
            findings.append(_gone(state) if state.remembered and not state.joined else _closed(state))
        elif state.joined:
            open_port = f" although {state.answer} answers over TCP" if state.answer else ""
            text = f"{state.name} is {state.condition}{open_port}: {state.reason or 'nothing is heard from it'}"
            findings.append(say("port", "error", text, f"%cluster add {state.name}"))
        elif state.condition == "lost":
            findings.append(say("port", "warning", f"{state.name}: {state.reason}"))
    fine = [state.name for state in states if state.condition == "connected"]
    found = [state for state in states if not state.joined and state.condition in ("found", "untrusted")]
    fine += [state.name for state in found if state.answer and not state.answer.startswith(NO)]
    if fine:
        findings.append(say("port", "ok", f"this machine reaches {listed(fine)}"))
    return findings


def _gone(state: LinkState) -> Finding:
    text = f"{state.name}, paired earlier, is not at {state.address} now: {state.answer.removeprefix(NO)}"
    return say("port", "info", text, on(state.name, f"notebook-cluster share --name {state.name}"))


def _closed(state: LinkState) -> Finding:
    reason = state.answer.removeprefix(NO)
    port = state.address.rpartition(":")[2]
    level: Level = "error" if state.joined else "warning"
    text = f"this machine cannot reach {state.name}: {reason}"
    if "refused" in reason:
        fix = on(state.name, f"notebook-cluster share --name {state.name}")
        return say("port", level, f"{text}; nothing listens there any more", fix)
    fix = f"{on(state.name, allow_tcp('Linux', int(port) if port.isdigit() else None))}\n{DIAL}"
    return say("port", level, f"{text}; a firewall on {state.name}, or client isolation of the network", fix)


def reception(peers: Sequence[Examined], port: int) -> list[Finding]:
    """Whether peers reach ``port``, at which this cluster takes those that dial."""
    answers = {peer.name: peer.diagnosis.reached[RECEPTION] for peer in peers if RECEPTION in peer.diagnosis.reached}
    shut = {name: answer.removeprefix(NO) for name, answer in answers.items() if answer.startswith(NO)}
    if not answers:
        return []
    if not shut:
        return [say("port", "ok", f"{listed(list(answers))} can dial in to this cluster")]
    text = f"{listed(list(shut))} cannot dial in to this cluster: {next(iter(shut.values()))}"
    own = next((peer.system for peer in peers if peer.here), "")
    return [say("port", "warning", text, on("this machine", allow_tcp(own, port)))]


def paths(
    peers: Sequence[Examined], ways: Mapping[tuple[str, str], str], relayed: Sequence[tuple[str, str]]
) -> list[Finding]:
    """``ways``: (from, to) -> empty when a node there is reached, else why not. ``relayed``: pairs whose numbers go
    through this machine now."""
    known = {peer.name: peer for peer in peers}
    isolated = sorted((a, b) for a, b in ways if a < b and ways[a, b] and ways.get((b, a)))
    shut: dict[str, list[str]] = {}
    for (source, target), reason in sorted(ways.items()):
        if reason and (min(source, target), max(source, target)) not in isolated:
            shut.setdefault(target, []).append(source)
    findings = [_isolation(isolated, ways)] if isolated else []
    for target, sources in shut.items():
        addresses = [host for source in sources for host in known[source].hosts]
        text = f"{target} takes no connections of {listed(sources)}: {ways[sources[0], target]}"
        fix = on(target, allow_tcp(known[target].system, None, addresses))
        findings.append(say("port", "warning", text, fix))
    if relayed:
        pairs = ", ".join(f"{a} and {b}" for a, b in sorted(relayed))
        text = f"relayed through this machine, so slower: {pairs}"
        findings.append(
            say("relay", "warning", text, "put them into one network that lets its clients reach each other")
        )
    if ways and not findings:
        findings.append(say("port", "ok", f"{listed(sorted(known))} reach each other"))
    return findings


def _isolation(pairs: Sequence[tuple[str, str]], ways: Mapping[tuple[str, str], str]) -> Finding:
    """Pairs where neither reaches the other, while this machine has a link to both."""
    text = "; ".join(f"{a} and {b} cannot reach each other" for a, b in pairs[:3])
    text += f"; and {len(pairs) - 3} pairs more" if len(pairs) > 3 else ""
    text += ", though both are connected to this machine: the network keeps its clients apart (client isolation, guest "
    text += "Wi-Fi), or both have a firewall. Their numbers are relayed through this machine, which is slower"
    rows = [[a, b, ways[a, b]] for a, b in pairs] + [[b, a, ways[b, a]] for a, b in pairs]
    fix = "switch off client isolation (AP isolation) in the access point, or use another network or a phone's hotspot"
    return say("isolation", "warning", text, fix, [["from", "to", "why not"], *rows])


def speeds(peers: Sequence[Examined]) -> list[Finding]:
    """Round trip, jitter and bandwidth of each link."""
    measured = [peer for peer in peers if not peer.here and peer.round_trip is not None]
    if not measured:
        return []
    rows = [["peer", "round trip", "jitter", "bandwidth"]]
    rows += [[peer.name, _time(peer.round_trip), _time(peer.jitter), _rate(peer.bytes_per_s)] for peer in measured]
    slow = [peer for peer in measured if _is_slow(peer)]
    if not slow:
        return [say("bandwidth", "ok", "the links to this machine", table=rows)]
    worst = min(slow, key=lambda peer: peer.bytes_per_s or math.inf)
    text = f"the link to {worst.name} is slow: {_rate(worst.bytes_per_s)}, round trip {_time(worst.round_trip)}"
    fix = f"give {worst.name} a cable, or bring it nearer to the access point (5 GHz Wi-Fi)"
    return [say("bandwidth", "warning", text, fix, rows)]


def _is_slow(peer: Examined) -> bool:
    rate_is_low = peer.bytes_per_s is not None and peer.bytes_per_s < SLOW_BYTES_PER_S
    return rate_is_low or (peer.round_trip or 0.0) > SLOW_ROUND_TRIP_S


def between_nodes(measured: Sequence[tuple[str, PairMeasured]], wanted: int) -> list[Finding]:
    """``measured``: (from, what it measured) between nodes of different peers, of ``wanted`` pairs in all."""
    if not measured:
        return []
    rows = [["from", "to", "round trip", "bandwidth", "way"]]
    for source, pair in measured:
        way = pair.error or ("relayed" if pair.relayed else "direct")
        known = not pair.error
        rows.append(
            [
                source,
                pair.node,
                _time(pair.round_trip if known else None),
                _rate(pair.bytes_per_s if known else None),
                way,
            ]
        )
    failed = [f"{source} and {pair.node}" for source, pair in measured if pair.error]
    text = "between the nodes" + (f" ({len(measured)} of {wanted} pairs)" if len(measured) < wanted else "")
    if failed:
        fix = "see the lines about ports; a node that is busy with a long step answers late"
        return [say("bandwidth", "warning", f"{text}: no answer between {listed(failed)}", fix, rows)]
    return [say("bandwidth", "ok", text, table=rows)]


def rounds(jobs: Sequence[JobView], slowest: tuple[str, float] | None) -> list[Finding]:
    """What the slowest way means for a training job: ``slowest`` is (who, bytes per second)."""
    findings = []
    for job in jobs:
        if slowest is None or not job.parameters or not job.members:
            continue
        who, rate = slowest
        # Sent and received by each node; before the first round, float32 is taken.
        counted = job.bytes_sent / (job.round * len(job.members)) if job.round and job.bytes_sent else 0.0
        size = 2 * (counted or 4.0 * job.parameters)
        text = (
            f"the slowest way ({who}) gives {_rate(rate)}: a round of {job.name!r} moves {size / 1e6:.3g} MB per node "
            f"and takes about {duration(size / rate)}"
        )
        findings.append(say("bandwidth", "info", text, "exchange less often (every=...), or use a smaller codec"))
    return findings


def slowest_way(peers: Sequence[Examined], measured: Sequence[tuple[str, PairMeasured]]) -> tuple[str, float] | None:
    """Who and how many bytes a second, of the ways between nodes where they were measured, else of the links."""
    rates = [(f"{source} to {pair.node}", pair.bytes_per_s) for source, pair in measured if pair.bytes_per_s > 0]
    if not rates:
        rates = [(peer.name, peer.bytes_per_s) for peer in peers if not peer.here and peer.bytes_per_s]
    return min(rates, key=lambda entry: entry[1]) if rates else None


def _time(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "?"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else duration(seconds)


def _rate(bytes_per_s: float | None) -> str:
    if bytes_per_s is None or not math.isfinite(bytes_per_s):
        return "?"
    return f"{bytes_per_s / 1e6:.3g} MB/s"
