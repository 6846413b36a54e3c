"""The peers of a cluster: which are used, the link to each, and what is shown of them and of those that were found."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from notebook_cluster.coordinator.peer_link import PeerLink
from notebook_cluster.coordinator.peers.local_agent import start_private_agent
from notebook_cluster.journal import events as e
from notebook_cluster.link import Dialer
from notebook_cluster.peering.candidates import FoundBy, found_view, known_peers
from notebook_cluster.peering.finding import Finding
from notebook_cluster.protocol.peer import AskInventory, Release
from notebook_cluster.protocol.state import PeerView
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.protocol.wire import Message
from notebook_cluster.security import Identity, fingerprint

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

log = logging.getLogger(__name__)

LOCAL = "local"
"""Name of the notebook machine's own, private agent."""
CONNECT_TIMEOUT = 15.0
TRUST_PERIOD = 0.5
"""Seconds between two looks at the list of trusted peers."""


class PeerLinks:
    def __init__(self, hub: "Coordinator", context: "zmq.Context[Any]", identity: Identity) -> None:
        self._hub = hub
        self._identity = identity
        self._context = context
        self.finding = Finding(
            context, hub.trust, known_peers(hub.settings.known), lambda new: hub.admission.on_found(new)
        )
        self.links: dict[str, PeerLink] = {}

    # ---- finding

    async def browse(self) -> None:
        """Look for peers from now on, and keep away from those that are trusted no more."""
        self._hub.spawn(self._watch_trust())
        self._hub.spawn(self.finding.follow_typed())
        trouble = await self.finding.start()
        if trouble is not None:
            self._hub.tell("warning", trouble)

    def name_of(self, key: str) -> str | None:
        """The name in this cluster of the peer with ``key``."""
        return next((peer.name for peer in self._hub.state.peers.values() if peer.key == key), None)

    async def start_local(self, directory: Path, lease: float) -> None:
        """Start this machine's own agent and dial it."""
        agent, process = await start_private_agent(LOCAL, directory, lease)
        self._hub.spawn(process.wait())  # reaps it
        self.connect(LOCAL, agent.public_key, f"tcp://127.0.0.1:{agent.port}", "local", pid=agent.pid)

    # ---- links

    def connect(self, name: str, key: str, address: str, found_by: FoundBy, *, pid: int | None = None) -> None:
        """Dial a peer. One that is only somewhere else keeps its link, with all that waits for it."""
        received = self._hub.recovered_sequences.get(key, 0)
        link, known = self.links.get(name), self._hub.state.peers.get(name)
        pinned = self._hub.trust.is_pinned(key)
        self._hub.record(e.PeerAdded(name=name, key=key, address=address, found_by=found_by, pid=pid, pinned=pinned))
        if link is not None and known is not None and known.key == key:
            if "dialled" not in (known.found_by, found_by):
                link.dialer.move(address)
                return
            received = link.dialer.received
        self._dial(name, received)

    def redial(self) -> None:
        """After a restart of the coordinator: dial all peers that the log names and that are still trusted."""
        for peer in self._hub.state.peers.values():
            if not peer.dropped and (not peer.pinned or self._hub.trust.is_trusted(peer.key)):
                self._dial(peer.name, self._hub.recovered_sequences.get(peer.key, 0))

    def _dial(self, name: str, received: int) -> None:
        state = self._hub.state
        peer = state.peers[name]
        dialer = Dialer(
            self._context,
            peer.address,
            peer.key,
            self._identity,
            cluster=state.cluster_id,
            cluster_name=state.cluster,
            epoch=state.epoch,
            sender=state.cluster,
            peer=name,
            received=received,
            on_message=lambda message, buffers: self._on_message(dialer, name, message, buffers),
            on_condition=lambda condition, reason: self._hub.log.settled(
                lambda: self._on_condition(dialer, name, condition, reason)
            ),
            gate=self._hub.log.settled,
            reception=self._hub.door.reception if peer.found_by == "dialled" else None,
        )
        link = self.links.get(name)
        if link is None:
            link = self.links[name] = PeerLink(name, dialer)
        else:
            self._hub.spawn(link.dialer.close(flush=0))
            link.dialer = dialer
            link.ready.clear()
            link.become("connecting", "")
        link.portable = peer.portable
        dialer.start()
        dialer.hold(self._hub.log.holding)

    def send(self, name: str, message: Message, buffers: Sequence[bytes] = (), *, decided: bool = True) -> None:
        """To the agent of ``name``, if it is used. What follows from a decision (``decided``) waits until that is in
        the log."""
        if decided:
            self._hub.log.when_written(lambda: self.send(name, message, buffers, decided=False))
            return
        link = self.links.get(name)
        if link is not None:
            link.dialer.send(message, buffers)

    async def ready(self, name: str) -> PeerLink:
        """The link once its agent has described itself; RequestError that says why not."""
        link = self.links[name]
        waits = [asyncio.ensure_future(event.wait()) for event in (link.ready, link.refused)]
        deadline = time.monotonic() + CONNECT_TIMEOUT
        try:
            while not link.dialer.meets_stranger and time.monotonic() < deadline:
                done, _ = await asyncio.wait(waits, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    break
        finally:
            for wait in waits:
                wait.cancel()
        usable = link.ready.is_set() and not link.refused.is_set() and link.condition != "lost"
        if usable and not link.dialer.meets_stranger:
            return link
        reason = link.why or link.dialer.trouble or "it does not answer"
        peer = self._hub.state.peers[name]
        if peer.found_by != "remembered" or name not in self.links:
            raise RequestError(f"peer {name!r} cannot be reached: {reason}")
        self.forget(name, reason)
        last = peer.address.removeprefix("tcp://")
        raise RequestError(
            f"peer {name!r} is not found on this network, and it was last at {last}, where it cannot be reached: "
            f"{reason}"
        )

    def received(self) -> dict[str, int]:
        """The last message of each peer, by key, whose effect is in the log."""
        return {self._hub.state.peers[name].key: link.dialer.received for name, link in self.links.items()}

    def _on_condition(self, dialer: Dialer, name: str, condition: Any, reason: str) -> None:
        link = self.links.get(name)
        if link is None or link.dialer is not dialer:
            return
        given_up = link.condition == "lost"
        link.become(condition, reason)
        self._hub.dirty()
        if condition == "connected" and given_up:
            dialer.send(AskInventory())
        elif condition == "lost" and link.asleep:
            self._hub.members.peer_lost(name, f"{name} fell silent: asleep or out of Wi-Fi", asleep=True)
        elif condition == "lost":
            self._hub.members.peer_lost(name, f"peer {name} is lost: {reason or 'nothing is heard from it'}")
        elif condition == "refused":
            self._hub.tell("error", f"{name} refused this cluster: {reason}")
            self._hub.members.peer_lost(name, f"peer {name} refuses this cluster: {reason}")
        elif condition == "suspect":
            self._hub.tell("warning", f"{name} is suspect: nothing heard from it for a moment")

    def _on_message(self, dialer: Dialer, name: str, message: Message, buffers: list[bytes]) -> None:
        link = self.links.get(name)
        if link is not None and link.dialer is dialer:
            link.heard()
            self._hub.incoming.handle(link, message, buffers)

    # ---- trust

    async def _watch_trust(self) -> None:
        while True:
            self.check_trust()
            await asyncio.sleep(TRUST_PERIOD)

    def check_trust(self) -> None:
        """Drop every peer that is used because it was paired, and is trusted no more."""
        pinned = [peer for peer in self._hub.state.peers.values() if peer.pinned and not peer.dropped]
        trusted = self._hub.trust.keys() if pinned else set()
        for peer in pinned:
            if peer.key not in trusted:
                self._drop(peer.name, peer.key)

    def _drop(self, name: str, key: str) -> None:
        reason = f"trust in {name} was removed"
        self._hub.tell("warning", f"{reason} (key {fingerprint(key)}): it is not used any more")
        self.forget(name, reason)
        self._hub.members.peer_gone(name, reason)
        self._hub.door.revoke(key)

    def forget(self, name: str, reason: str) -> None:
        """Use a peer no more; its agent is told to end what this cluster has there."""
        link = self.links.pop(name, None)
        self._hub.record(e.PeerDropped(name=name, reason=reason))
        if link is not None:
            link.become("lost", reason)
            link.dialer.send(Release())
            self._hub.spawn(link.dialer.close())

    # ---- what views see

    def views(self) -> list[PeerView]:
        """The peers of this cluster, then those that were found."""
        found = {candidate.key: candidate for candidate in self.finding.candidates()}
        rows: list[PeerView] = []
        for peer in self._hub.state.peers.values():
            if peer.dropped:
                continue
            link, candidate = self.links.get(peer.name), found.pop(peer.key, None)
            round_trip, jitter = (link.dialer.round_trip, link.dialer.jitter) if link is not None else (None, None)
            battery, plugged = self._hub.measurements.power(peer.name)
            rows.append(
                PeerView(
                    name=peer.name, key=peer.key, address=peer.address.removeprefix("tcp://"),
                    condition=link.shown if link is not None else "lost",
                    found_by=peer.found_by,  # type: ignore[arg-type]
                    trusted=True,
                    device=", ".join(sorted({name for _, name, _, _ in peer.devices})),
                    reason=link.why if link is not None else "",
                    round_trip_ms=None if round_trip is None else round_trip * 1000,
                    jitter_ms=None if jitter is None else jitter * 1000,
                    pairing=candidate is not None and candidate.pairing_port > 0,
                    slept=link.slept if link is not None else None, battery=battery, plugged=plugged,
                )
            )  # fmt: skip
        trusted = self._hub.trust.keys()
        rows += [found_view(candidate, self._hub.trust, trusted) for candidate in found.values()]
        return rows + self.finding.silent_views()

    async def close(self) -> None:
        await asyncio.gather(*(link.dialer.close() for link in self.links.values()), return_exceptions=True)
        await self.finding.close()
