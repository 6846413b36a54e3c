"""Which of the peers that were found, typed or that came by themselves are used, and under which name."""

import asyncio
import dataclasses

from notebook_cluster.coordinator.core import LOCAL, Core
from notebook_cluster.coordinator.delivery import Delivery
from notebook_cluster.coordinator.peers.links import PeerLinks
from notebook_cluster.coordinator.peers.pairing import Pairing
from notebook_cluster.discovery.addresses import reach
from notebook_cluster.peering.candidates import Candidate, Trust, how_to_pair
from notebook_cluster.peering.peer_finder import PeerFinder
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.protocol.wire import mismatch

RESERVED = (LOCAL, "all")
"""Words of ``%cluster add`` that mean something else than a peer of that name."""

MOVED_PERIOD = 1.0
"""Seconds between two looks whether a peer that is not connected is announced somewhere else."""
MOST_SAID = 1000
"""(key, address) pairs of which is remembered that they were said."""


class PeerResolver:
    """Finds the peer that is meant, pairs with it where that is needed, and dials it."""

    def __init__(
        self,
        core: Core,
        *,
        delivery: Delivery,
        links: PeerLinks,
        finding: PeerFinder,
        pairing: Pairing,
        trust: Trust,
    ) -> None:
        self._core = core
        self._delivery = delivery
        self._links = links
        self._finding = finding
        self._pairing = pairing
        self._trust = trust
        self._said: set[tuple[str, str]] = set()

    # ---- those that are found

    async def browse(self) -> None:
        """Look for peers from now on, and keep away from those that are trusted no more."""
        self._core.spawn(self._links.watch_trust())
        self._core.spawn(self._finding.follow_typed())
        self._core.spawn(self._follow_moves())
        trouble = await self._finding.start()
        if trouble is not None:
            self._core.tell("warning", trouble)

    def note_found(self, found: Candidate) -> None:
        """``found`` is there now, or says something else than before."""
        self._say(found)
        self._moved(found)

    def usable(self, candidate: Candidate) -> bool:
        """It is trusted, or may have the class code open (asked once for each such peer)."""
        return self._trust.is_trusted(candidate.key) or self._pairing.wants(candidate)

    def may_join(self, candidate: Candidate) -> bool:
        """It is trusted, or there is a class code and it has one open."""
        with_code = self._pairing.code and candidate.pairing_port
        return bool(self._trust.is_trusted(candidate.key) or with_code)

    def _say(self, found: Candidate) -> None:
        if (found.key, found.address) in self._said:
            return
        if len(self._said) >= MOST_SAID:
            self._said.clear()
        self._said.add((found.key, found.address))
        changed = self._trust.changed(found.name, found.key)
        if changed:
            self._core.tell("error", f"peer {changed} (it is at {found.address})")
        else:
            how = "over mDNS at" if found.found_by == "mdns" else "at the typed address"
            self._core.tell("info", f"found {found.name} ({found.device}) {how} {found.address}")

    def _moved(self, found: Candidate) -> None:
        """An agent that was restarted, or has another address now: dial it there."""
        name = self._links.name_of(found.key)
        link = self._delivery.links.get(name) if name is not None else None
        if name is None or link is None:
            return
        known = self._core.state.peers[name]
        here = {f"tcp://{host}:{found.port}" for host in found.hosts}
        if known.found_by != "dialled" and known.address not in here and link.condition != "connected":
            self._links.connect(name, found.key, f"tcp://{found.address}", found.found_by)

    async def _follow_moves(self) -> None:
        """An agent that was restarted at once is announced at its new address while its link still counts as connected,
        and only once: so look again when that is over."""
        while True:
            await asyncio.sleep(MOVED_PERIOD)
            for name, link in list(self._delivery.links.items()):
                if link.condition != "connected":
                    found = self._finding.find(self._core.state.peers[name].key)
                    if found is not None and found.found_by != "remembered":
                        self._moved(found)

    def _free_name(self, wanted: str) -> str:
        """``wanted``, or with a number when another peer of this cluster has it."""
        peers = self._core.state.peers
        name, number = wanted, 2
        while name in RESERVED or (name in peers and not peers[name].dropped):
            name, number = f"{wanted[:58]}-{number}", number + 1
        return name

    # ---- the one that is meant

    async def resolve(self, text: str, code: str = "") -> str:
        """The name in this cluster of the peer that ``text`` (a name or HOST:PORT) means; it is paired (with ``code``)
        and dialled when it is new.

        Raises:
            RequestError: it is not there, or must not be used; one line with the way out.
        """
        if text in self._delivery.links:
            used = self._finding.find(self._core.state.peers[text].key)
            return await self.admit(used, code) if code and used is not None else text
        found, others = await self._finding.resolve(text)
        name = await self.admit(found, code)
        for other in others:
            self._core.tell(
                "warning",
                f"another machine uses the name {text!r}: {other.described()}; used is {found.described()}",
            )
        return name

    async def resolve_typed(self, name: str) -> Candidate:
        """The peer that was typed as ``name``. RequestError as :meth:`resolve`."""
        found, _ = await self._finding.resolve(name)
        return found

    async def admit(self, found: Candidate, code: str = "") -> str:
        """Dial ``found`` if it is not dialled yet, after pairing with it where that is needed and ``code`` is given;
        its name in this cluster. RequestError as :meth:`resolve`."""
        trouble = mismatch(found.name, found.protocol)
        if trouble is not None:
            raise RequestError(trouble)
        if not self._trust.is_trusted(found.key):
            changed = self._trust.changed(found.name, found.key)
            if changed:
                raise RequestError(f"peer {changed}")
            if not code:
                raise RequestError(f"peer {found.name!r} cannot be added: {found.instead}{how_to_pair(found)}")
            return await self._admit_paired(await self._pairing.pair(found, code))
        if not self._links.is_used(found.key):
            await self._dial_found(found)
        name = self._links.name_of(found.key)
        assert name is not None
        if code and found.pairing_port and await self._refuses(name):
            # Its owner removed the trust in this user, and now gave a code again.
            return await self._admit_paired(await self._pairing.pair(found, code))
        return name

    async def _admit_paired(self, found: Candidate) -> str:
        name = await self._dial_found(found)
        self._delivery.links[name].paired()
        return name

    async def _dial_found(self, found: Candidate) -> str:
        if len(found.hosts) > 1:
            place = (await reach({found.name: [(host, found.port) for host in found.hosts]}))[found.name]
            first = place.rpartition(":")[0]
            found = dataclasses.replace(found, hosts=tuple(sorted(found.hosts, key=lambda host: host != first)))
        name = self._links.name_of(found.key) or self._free_name(found.name)
        self._links.connect(name, found.key, f"tcp://{found.address}", found.found_by)
        return name

    async def _refuses(self, name: str) -> bool:
        link = self._delivery.links[name]  # it may be forgotten meanwhile
        try:
            await self._links.ready(name)
        except RequestError:
            return link.refused.is_set()
        return False

    def dial_arrived(self, key: str, address: str) -> Candidate | None:
        """A trusted peer has dialled this cluster from ``address``; returns it when it was not connected already."""
        entry = self._trust.store.find(key)
        called = entry.name if entry is not None else self._trust.launched(key)
        if called is None:
            return None
        name = self._links.name_of(key) or (LOCAL if called == LOCAL else self._free_name(called))
        link, peer = self._delivery.links.get(name), self._core.state.peers.get(name)
        is_another = name == LOCAL and peer is not None and peer.key != key  # its process, with a key of its own, ended
        if link is not None and peer is not None and not is_another and (peer.found_by == "dialled" or link.is_open):
            return None
        host, _, port = address.rpartition(":")
        self._links.connect(name, key, f"tcp://{address}", "dialled")
        whose = f"{name} of {entry.owner}" if entry is not None else name
        self._core.tell("info", f"{whose} dialled this cluster from {address}")
        return Candidate(called, key, (host,), int(port or 0), "dialled")
