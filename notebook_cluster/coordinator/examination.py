"""The doctor: asks every connected agent about its machine, measures the ways between them, and says what is wrong.

What it says is made in :mod:`notebook_cluster.doctor`. A peer that does not answer is named, and the others are
examined all the same.
"""

import asyncio
import ipaddress
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from notebook_cluster.coordinator.cluster_view import ClusterViews
from notebook_cluster.coordinator.core import LOCAL, Core
from notebook_cluster.coordinator.delivery import Delivery, PeerLink
from notebook_cluster.coordinator.nodes.bench import WayBench
from notebook_cluster.coordinator.nodes.relay import FrameRelay
from notebook_cluster.discovery.addresses import MAX_TARGETS, NO, networks, reach
from notebook_cluster.doctor import findings as f
from notebook_cluster.doctor import network, versions
from notebook_cluster.doctor.findings import Examined
from notebook_cluster.peering.peer_finder import PeerFinder
from notebook_cluster.protocol.measuring import PairMeasured
from notebook_cluster.protocol.names import distribution_name, is_distribution
from notebook_cluster.protocol.peer import Diagnose, Diagnosis
from notebook_cluster.protocol.state import PeerView
from notebook_cluster.protocol.views import Finding, RequestError
from notebook_cluster.security import fingerprint

log = logging.getLogger(__name__)

PAYLOAD = 1 << 20
"""Bytes sent to measure a bandwidth."""
ANSWER_S = 8.0
"""For a Diagnosis: it tries TCP for 2 s, and looks at the packages that are installed."""
LINKS_S = 15.0
PAIRS_S = 20.0
"""Time for the bandwidths of all links, and of all pairs of nodes; those that are left then are not measured."""
_PINGS = 3
_MAX_HOSTS = 4
_Targets = dict[str, list[tuple[str, int]]]


class Questions:
    """What the doctor asks agents and nodes, and the measuring of the ways between them."""

    def __init__(self, delivery: Delivery, relay: FrameRelay) -> None:
        self._delivery = delivery
        self._relay = relay
        self._tickets = itertools.count(1)
        self._waiting: dict[tuple[str, int], asyncio.Future[tuple[Diagnosis, int]]] = {}

    def answered(self, peer: str, message: Diagnosis, buffers: Sequence[bytes]) -> None:
        """A Diagnosis has come."""
        future = self._waiting.get((peer, message.ticket))
        if future is not None and not future.done():
            future.set_result((message, sum(len(buffer) for buffer in buffers)))

    async def ask(
        self, peer: str, buffers: Sequence[bytes] = (), timeout: float = ANSWER_S, **fields: Any
    ) -> tuple[Diagnosis, int]:
        """The agent's answer to a Diagnose with ``fields``, and how many bytes came back.

        Raises:
            TimeoutError: there is none after ``timeout`` seconds.
        """
        ticket = next(self._tickets)
        future = self._waiting[peer, ticket] = asyncio.get_running_loop().create_future()
        try:
            self._delivery.to_agent(peer, Diagnose(ticket=ticket, **fields), buffers)
            return await asyncio.wait_for(future, timeout)
        finally:
            del self._waiting[peer, ticket]

    async def clock_offset(self, peer: str) -> float:
        """Seconds that its clock is ahead, from the fastest of several answers. TimeoutError as :meth:`ask`."""
        shortest, found = float("inf"), 0.0
        for _ in range(_PINGS):
            sent, start = time.time(), time.monotonic()
            answer, _ = await self.ask(peer, only_bytes=True)
            took = time.monotonic() - start
            if took < shortest:
                shortest, found = took, f.offset(answer.time, sent, sent + took)
        return found

    async def link_rates(self, peers: Sequence[str]) -> dict[str, float]:
        """Peer -> bytes a second over its link, there and back. One after the other: they may share the air."""
        payload, end, rates = secrets.token_bytes(PAYLOAD), time.monotonic() + LINKS_S, {}
        for peer in peers:
            start = time.monotonic()
            if start >= end:
                break
            try:
                _, back = await self.ask(peer, [payload], timeout=end - start, only_bytes=True)
            except TimeoutError:
                continue
            if back == PAYLOAD:
                link = self._delivery.links.get(peer)
                empty = (link.dialer.round_trip if link is not None else None) or 0.0
                took = time.monotonic() - start
                # The mean round trip may be longer than this one.
                rates[peer] = 2 * PAYLOAD / max(took - empty, took / 2)
        return rates

    async def pairs(self, nodes: Sequence[str]) -> tuple[list[tuple[str, PairMeasured]], int]:
        """(from, what it measured) between any two of ``nodes``, and how many pairs there are."""
        # Neighbours in the list first, so that every node is measured when the time is not enough for all pairs.
        pairs = [
            (nodes[index], nodes[index + distance])
            for distance in range(1, len(nodes))
            for index in range(len(nodes) - distance)
        ]
        measured, end = [], time.monotonic() + PAIRS_S
        for source, target in pairs:
            left = end - time.monotonic()
            if left <= 0:
                break
            measured.append((source, await self._measure(source, target, left)))
        return measured, len(pairs)

    async def _measure(self, source: str, target: str, timeout: float) -> PairMeasured:
        try:
            return await asyncio.wait_for(self._relay.measure(source, target, PAYLOAD), timeout)
        except TimeoutError:
            reason = f"no answer within {timeout:.0f} s"
        except RequestError as error:
            reason = str(error)
        return PairMeasured(ticket=0, node=target, error=reason)


class Examination:
    """Examines the cluster, one examination at a time."""

    def __init__(
        self, core: Core, *, delivery: Delivery, relay: FrameRelay, shown: ClusterViews, finding: PeerFinder
    ) -> None:
        self._core = core
        self._delivery = delivery
        self._shown = shown
        self._finding = finding
        self._questions = Questions(delivery, relay)
        self._one = asyncio.Lock()
        self.bench = WayBench(core, relay, self._one)
        self._trouble: list[Finding] = []

    def on_diagnosis(self, peer: str, message: Diagnosis, buffers: Sequence[bytes]) -> None:
        """An agent's answer."""
        self._questions.answered(peer, message, buffers)

    async def run(self, packages: Sequence[str] = ()) -> list[Finding]:
        """Everything there is to say, worst first within its subject. Takes a few seconds; half a minute at most.

        Raises:
            RequestError: one of ``packages`` cannot be the name of a package.
        """
        for name in packages:
            if not is_distribution(name):
                raise RequestError(
                    f"{name!r} is not the name of a package: write it as for pip install, without a version"
                )
        async with self._one:
            self._trouble = []
            return await self._examine(packages)

    async def _examine(self, packages: Sequence[str]) -> list[Finding]:
        wanted = await asyncio.to_thread(self._imported)
        wanted += [name for name in map(distribution_name, packages) if name not in wanted]
        looked, states = await asyncio.gather(
            asyncio.gather(*(self._look(link, wanted, self._targets(link)) for link in self._connected())),
            self._links(),
        )
        peers = [peer for peer in looked if peer is not None]
        rates = await self._questions.link_rates([peer.name for peer in peers if not peer.here])
        peers = [replace(peer, bytes_per_s=rates.get(peer.name)) for peer in peers]
        measured, pairs = await self._questions.pairs([peer.nodes[0] for peer in peers if peer.nodes])
        views = [view for view in self._shown.peers() if view.name != LOCAL]
        relayed = [(source, pair.node) for source, pair in measured if pair.relayed]
        sections: list[Callable[[], list[Finding]]] = [
            lambda: f.interfaces(peers) + f.twin_interfaces(networks()),
            lambda: f.multicast(peers) + f.unheard(self._unheard(peers)),
            lambda: f.same_names((view.name, view.address, fingerprint(view.key)) for view in views if view.key),
            lambda: f.strangers(views),
            lambda: network.links(states) + network.reception(peers, self._core.state.reception),
            lambda: network.paths(peers, self._ways(peers), relayed),
            lambda: f.clocks(peers),
            lambda: f.programs(peers),
            lambda: versions.versions(peers, wanted),
            lambda: network.speeds(peers) + network.between_nodes(measured, pairs),
            lambda: network.rounds(self._shown.jobs(), network.slowest_way(peers, measured)),
            lambda: f.frames(peers),
        ]
        return self._trouble + [finding for section in sections for finding in _guarded(section)]

    def _connected(self) -> list[PeerLink]:
        links = [link for link in self._delivery.links.values() if link.condition == "connected" and link.info]
        return sorted(links, key=lambda link: (link.name != LOCAL, link.name))

    def _imported(self) -> list[str]:
        """The packages that the cells of this cluster import."""
        sources = [cell.source for cell in self._core.state.cells.values()]
        return versions.distributions(versions.imported_modules(sources))

    # ---- one peer

    async def _look(self, link: PeerLink, wanted: Sequence[str], targets: _Targets) -> Examined | None:
        """What the agent of ``link`` says; None when it does not answer."""
        packages = list(dict.fromkeys((*versions.ALWAYS, *wanted)))
        try:
            answers = [
                (await self._questions.ask(link.name, reach=part, packages=packages))[0] for part in _in_parts(targets)
            ]
            offset = await self._questions.clock_offset(link.name)
        except TimeoutError:
            text = f"{link.name} is connected but did not answer within {ANSWER_S:g} s: is it very busy?"
            self._trouble.append(f.say("peers", "warning", text, "try again; then end and share it again there"))
            return None
        except Exception as error:
            log.exception("peer %s could not be examined", link.name)
            text = f"{link.name} could not be examined: {type(error).__name__}: {error}"
            self._trouble.append(f.say("peers", "error", text, "see coordinator.log of the cluster"))
            return None
        reached = {label: answer for one in answers for label, answer in one.reached.items()}
        assert link.info is not None
        nodes = [node.name for node in self._core.state.roster_nodes() if node.peer == link.name]
        return Examined(
            link.name, _bounded(msgspec.structs.replace(answers[0], reached=reached), targets, packages),
            here=link.name == LOCAL, machine=link.info.machine, hosts=_outside(link.info.hosts), nodes=tuple(nodes),
            offset=offset, round_trip=link.dialer.round_trip, jitter=link.dialer.jitter,
            dropped=dict(link.dialer.dropped),
        )  # fmt: skip

    def _targets(self, link: PeerLink) -> _Targets:
        """What the peer of ``link`` shall try to reach: each other peer's link port and the mesh ports of its nodes."""
        assert link.info is not None
        targets: _Targets = {}
        for other in self._connected():
            assert other.info is not None
            if other is link:
                continue
            same = other.info.machine == link.info.machine
            hosts = ["127.0.0.1"] if same else list(_outside(other.info.hosts))
            known = self._core.state.peers[other.name]
            port = known.address.rpartition(":")[2]
            if known.found_by not in ("local", "dialled") and port.isdigit():
                targets[f"link {other.name}"] = [(host, int(port)) for host in hosts]
            for node in self._core.state.roster_nodes():
                if node.peer == other.name and node.hello is not None:
                    targets[f"node {other.name} {node.name}"] = [(host, node.hello.mesh_port) for host in hosts]
        if self._core.state.reception and link.name != LOCAL:
            own = [address for _, address, _ in networks()][:_MAX_HOSTS]
            targets[network.RECEPTION] = [(address, self._core.state.reception) for address in own]
        return {label: pairs for label, pairs in targets.items() if pairs}

    def _ways(self, peers: Sequence[Examined]) -> dict[tuple[str, str], str]:
        """(from, to) -> empty when everything tried there was reached, else the first reason."""
        ways: dict[tuple[str, str], str] = {}
        for peer in peers:
            for label, answer in sorted(peer.diagnosis.reached.items()):
                if label == network.RECEPTION:
                    continue
                target = label.split(" ")[1]
                reason = answer.removeprefix(NO) if answer.startswith(NO) else ""
                ways[peer.name, target] = ways.get((peer.name, target)) or reason
        return ways

    # ---- the ways from here

    async def _links(self) -> list[network.LinkState]:
        """How every peer, of this cluster or only found, is reached from here."""
        views = [view for view in self._shown.peers() if view.name != LOCAL]
        tried = {view.address: self._addresses(view) for view in views if view.condition not in ("connected", "asleep")}
        answers: dict[str, str] = {}
        for part in _in_parts({address: pairs for address, pairs in tried.items() if pairs}):
            answers |= await reach(part)
        joined = {peer.key for peer in self._core.state.peers.values()}
        return [
            network.LinkState(
                view.name,
                view.address,
                view.condition,
                view.reason,
                answers.get(view.address, ""),
                joined=view.key in joined,
                remembered=view.found_by == "remembered",
            )
            for view in views
        ]

    def _addresses(self, view: PeerView) -> list[tuple[str, int]]:
        host, _, port = view.address.rpartition(":")
        if not port.isdigit() or view.found_by == "dialled":
            return []
        known = self._finding.find(view.key)
        hosts = [host, *(known.hosts if known is not None else ())]
        return [(host, int(port)) for host in list(dict.fromkeys(hosts))[:_MAX_HOSTS]]

    def _unheard(self, peers: Sequence[Examined]) -> Iterable[tuple[str, str, bool]]:
        """(peer, address, is in a network of this machine) of peers that mDNS should have shown and did not."""
        heard = {found.key for found in self._finding.candidates() if found.found_by == "mdns"}
        own = [ipaddress.IPv4Network(f"{address}/{mask}", strict=False) for _, address, mask in networks() if mask]
        if any(peer.here and peer.diagnosis.multicast for peer in peers):
            return
        for peer in peers:
            known = self._core.state.peers[peer.name]
            if peer.here or peer.diagnosis.multicast or known.key in heard or known.found_by == "mdns":
                continue
            neighbour = any(ipaddress.IPv4Address(host) in network for host in peer.hosts for network in own)
            if neighbour or known.found_by != "dialled":
                yield peer.name, known.address.removeprefix("tcp://"), neighbour


def _guarded(section: Callable[[], list[Finding]]) -> list[Finding]:
    """What ``section`` says; a peer's odd answer must not hide what the others said."""
    try:
        order = ("error", "warning", "info", "ok")
        return sorted(section(), key=lambda finding: order.index(finding.level))
    except Exception as error:
        log.exception("a part of the examination failed")
        text = f"a part could not be examined: {type(error).__name__}: {error}"
        return [f.say("doctor", "error", text, "see coordinator.log of the cluster")]


def _in_parts(targets: Mapping[str, list[tuple[str, int]]]) -> list[_Targets]:
    """``targets`` in parts of at most MAX_TARGETS addresses; at least one part, even if it is empty."""
    parts: list[_Targets] = [{}]
    count = 0
    for label, pairs in targets.items():
        if count + len(pairs) > MAX_TARGETS:
            parts.append({})
            count = 0
        parts[-1][label] = pairs[:MAX_TARGETS]
        count += len(pairs)
    return parts


def _bounded(said: Diagnosis, targets: Mapping[str, object], packages: Sequence[str]) -> Diagnosis:
    """``said`` without anything that was not asked for, and without texts of absurd length."""
    facts = ("python", "platform", "glibc", "cuda", "rocm", "notebook-cluster")
    return msgspec.structs.replace(
        said,
        interfaces=[(name[:40], address[:40]) for name, address in said.interfaces[:32]],
        multicast=said.multicast[:500],
        reached={label: answer[:300] for label, answer in said.reached.items() if label in targets},
        packages={name: version[:60] for name, version in said.packages.items() if name in packages},
        facts={name: said.facts[name][:100] for name in facts if name in said.facts},
    )


def _outside(hosts: Iterable[str]) -> tuple[str, ...]:
    """The first few addresses that others can reach."""
    return tuple(host for host in hosts if f.is_ipv4(host) and not host.startswith("127."))[:_MAX_HOSTS]
