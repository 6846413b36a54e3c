"""The links to the agents of the peers that are used: which there are, how each is, and what ends one."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import zmq

from notebook_cluster.coordinator.core import LOCAL, Core
from notebook_cluster.coordinator.delivery import Delivery, PeerLink
from notebook_cluster.coordinator.nodes.membership import Membership
from notebook_cluster.coordinator.peers.kept_choice import MOST_FOLDER, kept_line
from notebook_cluster.doctor.findings import is_ipv4
from notebook_cluster.journal import events as e
from notebook_cluster.link import Dialer, InboundListener
from notebook_cluster.peering.candidates import FoundBy, Trust
from notebook_cluster.protocol import peer as p
from notebook_cluster.protocol.clock import dated, roughly
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.protocol.wire import Message
from notebook_cluster.security import Identity, fingerprint

CONNECT_TIMEOUT = 15.0
AGENT_CONNECTS = 5.0
RELEASE_TIMEOUT = 8.0
KEEP_TIMEOUT = RELEASE_TIMEOUT + 20.0
"""Agents give their nodes 20 s to save what they train."""
"""Seconds at the end in which an agent that was just started may connect, and in which agents end their kernels."""
RECEIVED_PERIOD = 2.0
"""Seconds of messages that agents may send again to a restarted coordinator; all of them are harmless twice."""
TRUST_PERIOD = 0.5
"""Seconds between two looks at the list of trusted peers."""
MOST_HOSTS = 16
MOST_DEVICES = 64
MOST_KEPT = 16
MOST_KEPT_TOLD = 1000
MOST_TEXT = 200
"""Characters of what an agent says about its machine and devices."""


class PeerLinks:
    """Opens and ends the links, which :class:`Delivery` sends over."""

    def __init__(
        self,
        core: Core,
        *,
        delivery: Delivery,
        membership: Membership,
        trust: Trust,
        context: "zmq.Context[Any]",
        identity: Identity,
        received: dict[str, int],
        on_message: Callable[[Dialer, str, Message, list[bytes]], None],
        reception: Callable[[], InboundListener | None],
        revoke: Callable[[str], None],
        on_left: Callable[[str, str], None],
        stop: Callable[[str], None],
    ) -> None:
        """``received``: the last message of each peer, by key, that the coordinator before this one has handled.

        ``on_message(dialer, peer, message, buffers)`` gets what agents say; ``reception()`` is where peers dial in, and
        ``revoke(key)`` cuts off who has. ``on_left(name, reason)``: the agent of that peer has ended.
        ``stop(reason)`` ends this coordinator.
        """
        self._core = core
        self._delivery = delivery
        self._membership = membership
        self._trust = trust
        self._context = context
        self._identity = identity
        self._received = received
        self._on_message = on_message
        self._reception = reception
        self._revoke = revoke
        self._on_left = on_left
        self._stop = stop
        self._led_elsewhere = False
        self._noted: dict[str, int] = {}
        self._noted_at = 0.0
        self._kept_told: set[tuple[str, str]] = set()
        """(peer, folder) of kept checkpoints that were told."""

    def name_of(self, key: str) -> str | None:
        """The name in this cluster of the peer with ``key``."""
        return next((peer.name for peer in self._core.state.peers.values() if peer.key == key), None)

    def is_used(self, key: str) -> bool:
        """The peer with ``key`` has a link."""
        return self.name_of(key) in self._delivery.links

    def is_waited_for(self, key: str) -> bool:
        """The agent with ``key`` is used, and does not answer now."""
        name = self.name_of(key)
        return self.is_used(key) and name is not None and not self._delivery.is_connected(name)

    # ---- links

    def has(self, name: str) -> bool:
        """There is a link to this peer, whatever its condition."""
        return name in self._delivery.links

    def connect(self, name: str, key: str, address: str, found_by: FoundBy, *, pid: int | None = None) -> None:
        """Dial a peer. One that is only somewhere else keeps its link, with all that waits for it."""
        received = self._received.get(key, 0)
        link, known = self._delivery.links.get(name), self._core.state.peers.get(name)
        pinned = self._trust.is_pinned(key)
        self._core.record(e.PeerAdded(name=name, key=key, address=address, found_by=found_by, pid=pid, pinned=pinned))
        if link is not None and known is not None and known.key == key:
            if "dialled" not in (known.found_by, found_by):
                link.dialer.move(address)
                return
            received = link.dialer.received
        self._dial(name, received)

    def redial(self, received: dict[str, int]) -> None:
        """After a restart of the coordinator: dial all peers that the log names and that are still trusted. Of each
        (by key) that last message in ``received`` was handled, too."""
        for key, sequence in received.items():
            self._received[key] = max(self._received.get(key, 0), sequence)
        for peer in self._core.state.peers.values():
            if not peer.dropped and (not peer.pinned or self._trust.is_trusted(peer.key)):
                self._dial(peer.name, self._received.get(peer.key, 0))

    def _dial(self, name: str, received: int) -> None:
        state, journal = self._core.state, self._core.journal
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
            on_condition=lambda condition, reason: journal.settled(
                lambda: self._on_condition(dialer, name, condition, reason)
            ),
            gate=journal.settled,
            reception=self._reception() if peer.found_by == "dialled" else None,
        )
        link = self._delivery.links.get(name)
        if link is None:
            link = self._delivery.links[name] = PeerLink(name, dialer)
        else:
            self._core.spawn(link.dialer.close(flush=0))
            link.dialer = dialer
            link.ready.clear()
            link.become("connecting", "")
        link.portable = peer.portable
        dialer.start()
        dialer.hold(journal.holding)

    async def ready(self, name: str) -> PeerLink:
        """The link once its agent has described itself; RequestError that says why not."""
        link = self._delivery.links[name]
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
        peer = self._core.state.peers[name]
        if peer.found_by != "remembered" or name not in self._delivery.links:
            raise RequestError(f"peer {name!r} cannot be reached: {reason}")
        self.forget(name, reason)
        last = peer.address.removeprefix("tcp://")
        raise RequestError(
            f"peer {name!r} is not found on this network, and it was last at {last}, where it cannot be reached: "
            f"{reason}"
        )

    def note_received(self, now: float) -> None:
        """Into the journal with the last message of each peer, by key, whose effect is in it; call it a few times a
        second."""
        received = self.received()
        if received != self._noted and now - self._noted_at > RECEIVED_PERIOD:
            self._noted, self._noted_at = received, now
            self._core.journal.received(received)

    def freeze(self) -> None:
        """Nothing that agents say from now on is heard here."""
        for link in self._delivery.links.values():
            link.dialer.freeze()

    def received(self) -> dict[str, int]:
        """The last message of each peer, by key, whose effect is in the journal."""
        peers = self._core.state.peers
        return {peers[name].key: link.dialer.received for name, link in self._delivery.links.items()}

    def hold(self, holding: bool) -> None:
        """While ``holding`` nothing that agents say is acknowledged."""
        for link in self._delivery.links.values():
            link.dialer.hold(holding)

    async def release(self, how: p.Release) -> None:
        """Have every agent end what this cluster has there, and wait for that for a moment."""
        local = self._delivery.links.get(LOCAL)
        if local is not None and local.condition == "connecting":
            # An agent that was just started hears of the end over its link, once that is there.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(local.ready.wait(), AGENT_CONNECTS)
        links = [link for link in self._delivery.links.values() if link.is_open]
        if self._led_elsewhere:  # what is on other machines may be the other coordinator's
            links = [link for link in links if link.name == LOCAL]
        for link in links:
            link.dialer.send(how)
        released = [asyncio.ensure_future(link.released.wait()) for link in links]
        if released:
            _, late = await asyncio.wait(released, timeout=KEEP_TIMEOUT if how.keep else RELEASE_TIMEOUT)
            for task in late:
                task.cancel()

    async def close(self) -> None:
        links = self._delivery.links.values()
        await asyncio.gather(*(link.dialer.close() for link in links), return_exceptions=True)

    # ---- what becomes of a link, and what agents say of themselves

    def _on_condition(self, dialer: Dialer, name: str, condition: Any, reason: str) -> None:
        link = self._delivery.links.get(name)
        if link is None or link.dialer is not dialer:
            return
        given_up = link.condition == "lost"
        link.become(condition, reason)
        self._core.dirty()
        if condition == "connected" and given_up:
            dialer.send(p.AskInventory())
        elif condition == "lost" and link.asleep:
            self._membership.peer_lost(name, f"{name} fell silent: asleep or out of Wi-Fi", asleep=True)
        elif condition == "lost":
            self._membership.peer_lost(name, f"peer {name} is lost: {reason or 'nothing is heard from it'}")
        elif condition == "refused":
            self._core.tell("error", f"{name} refused this cluster: {reason}")
            self._membership.peer_lost(name, f"peer {name} refuses this cluster: {reason}")
        elif condition == "suspect" and not link.ended:
            self._core.tell("warning", f"{name} is suspect: nothing heard from it for a moment")
        self._end_for_another()

    def _end_for_another(self) -> None:
        """While this one slept or was cut off, its owner has begun another, which most machines follow; one alone may
        say anything."""
        others = [link for link in self._delivery.links.values() if link.name != LOCAL]
        following = [link for link in others if link.dialer.newer > self._core.state.epoch]
        if len(following) <= sum(link.is_open for link in others):
            return
        self._led_elsewhere = True
        cluster, since = self._core.state.cluster, dated(max(link.dialer.newer for link in following) / 1000)
        names = " and ".join(link.name for link in following)
        self._stop(
            f"{names} follow{'s' if len(following) == 1 else ''} another coordinator of cluster {cluster!r}, which its "
            f"owner started on {since}: this one has ended. %cluster attach {cluster} on the machine where that one "
            "runs goes on with it"
        )

    def on_described(self, link: PeerLink, info: p.PeerInfo) -> None:
        """An agent says what its machine is: the peer can be used from now on."""
        if link.ended:  # it is shared again, before its silence was noticed
            link.become("connected", "")
            link.dialer.send(p.AskInventory())
        link.info = info
        link.portable = info.portable
        link.released.clear()
        devices = [
            (d.id[:MOST_TEXT], d.name[:MOST_TEXT], d.memory_bytes, d.unified) for d in info.devices[:MOST_DEVICES]
        ]
        hosts = [host for host in info.hosts[:MOST_HOSTS] if is_ipv4(host)]
        self._core.record(
            e.PeerDescribed(
                name=link.name, machine=info.machine[:MOST_TEXT], hosts=hosts, devices=devices, portable=info.portable
            )
        )
        peer = self._core.state.peers[link.name]
        if peer.pinned and peer.found_by != "dialled":
            try:
                self._trust.store.set_address(peer.key, peer.address.removeprefix("tcp://"))
            except (ValueError, OSError) as error:
                self._core.tell("warning", f"the address of {link.name} cannot be remembered: {error}")
        link.ready.set()

    def on_kept(self, link: PeerLink, message: p.KeptCheckpoints) -> None:
        """What a peer has kept of trainings: told once each time that one is made."""
        fresh, told = [], self._kept_told
        for kept in message.checkpoints[:MOST_KEPT]:
            line, place = kept_line(link.name, kept), (link.name, kept.folder[:MOST_FOLDER])
            if line and place not in told and len(told) < MOST_KEPT_TOLD:
                told.add(place)
                fresh.append(line)
                self._core.tell("info", line)
        link.kept = [*fresh, *link.kept][:MOST_KEPT]

    def on_slept(self, link: PeerLink, message: p.Slept) -> None:
        """A machine was asleep and is back."""
        link.slept = message.seconds
        self._core.tell("info", f"{link.name} slept for {roughly(message.seconds)} and is back")

    def on_farewell(self, link: PeerLink, message: p.Farewell) -> None:
        """An agent ends; its kernels have."""
        reason = message.reason[:MOST_TEXT]
        link.ended = f"it is not shared any more, {reason}: run notebook-cluster share there again"
        link.become("lost", link.ended)
        link.released.set()  # a Stop need not wait for it
        self._membership.peer_gone(link.name, f"agent of {link.name} ended: {reason}")
        self._core.dirty()
        self._on_left(link.name, reason)

    # ---- trust

    async def watch_trust(self) -> None:
        """Keep away from peers that are trusted no more."""
        while True:
            self.check_trust()
            await asyncio.sleep(TRUST_PERIOD)

    def check_trust(self) -> None:
        """Drop every peer that is used because it was paired, and is trusted no more."""
        pinned = [peer for peer in self._core.state.peers.values() if peer.pinned and not peer.dropped]
        trusted = self._trust.keys() if pinned else set()
        for peer in pinned:
            if peer.key not in trusted:
                self._drop(peer.name, peer.key)

    def _drop(self, name: str, key: str) -> None:
        reason = f"trust in {name} was removed"
        self._core.tell("warning", f"{reason} (key {fingerprint(key)}): it is not used any more")
        self.forget(name, reason)
        self._membership.peer_gone(name, reason)
        self._revoke(key)

    def forget(self, name: str, reason: str) -> None:
        """Use a peer no more; its agent is told to end what this cluster has there."""
        link = self._delivery.links.pop(name, None)
        self._core.record(e.PeerDropped(name=name, reason=reason))
        if link is not None:
            link.become("lost", reason)
            link.dialer.send(p.Release())
            self._core.spawn(link.dialer.close())
