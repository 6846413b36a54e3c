"""Which of the peers that were found, typed or that came by themselves are used, and under which name."""

import dataclasses
from typing import TYPE_CHECKING

from notebook_cluster.coordinator.peers.links import LOCAL
from notebook_cluster.discovery.reaching import reach
from notebook_cluster.peering.candidates import Candidate, how_to_pair
from notebook_cluster.protocol.version import mismatch
from notebook_cluster.protocol.views import RequestError

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

RESERVED = (LOCAL, "all")
"""Words of ``%cluster add`` that mean something else than a peer of that name."""

MOST_SAID = 1000
"""(key, address) pairs of which is remembered that they were said."""


class PeerResolver:
    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self._said: set[tuple[str, str]] = set()

    def on_found(self, new: list[Candidate]) -> None:
        """These are there now, or say something else than before."""
        for candidate in new:
            self._say(candidate)
            self._moved(candidate)
            if self._hub.adding.follow and not self.is_used(candidate.key) and self._hub.adding.usable(candidate):
                self._hub.spawn(self._hub.adding.add_quietly(candidate))
        self._hub.dirty()

    def _say(self, found: Candidate) -> None:
        if (found.key, found.address) in self._said:
            return
        if len(self._said) >= MOST_SAID:
            self._said.clear()
        self._said.add((found.key, found.address))
        changed = self._hub.trust.changed(found.name, found.key)
        if changed:
            self._hub.tell("error", f"peer {changed} (it is at {found.address})")
        else:
            how = "over mDNS at" if found.found_by == "mdns" else "at the typed address"
            self._hub.tell("info", f"found {found.name} ({found.device}) {how} {found.address}")

    def _moved(self, found: Candidate) -> None:
        """An agent that was restarted, or has another address now: dial it there."""
        name = self._hub.peers.name_of(found.key)
        link = self._hub.peers.links.get(name) if name is not None else None
        if name is None or link is None:
            return
        known = self._hub.state.peers[name]
        here = {f"tcp://{host}:{found.port}" for host in found.hosts}
        if known.found_by != "dialled" and known.address not in here and link.condition != "connected":
            self._hub.peers.connect(name, found.key, f"tcp://{found.address}", found.found_by)

    def is_used(self, key: str) -> bool:
        return self._hub.peers.name_of(key) in self._hub.peers.links

    def _free_name(self, wanted: str) -> str:
        """``wanted``, or with a number when another peer of this cluster has it."""
        peers = self._hub.state.peers
        name, number = wanted, 2
        while name in RESERVED or (name in peers and not peers[name].dropped):
            name, number = f"{wanted[:58]}-{number}", number + 1
        return name

    async def resolve(self, text: str, code: str = "") -> str:
        """The name in this cluster of the peer that ``text`` (a name or HOST:PORT) means; it is paired (with ``code``)
        and dialled when it is new.

        Raises:
            RequestError: it is not there, or must not be used; one line with the way out.
        """
        if text in self._hub.peers.links:
            used = self._hub.peers.finding.find(self._hub.state.peers[text].key)
            return await self.admit(used, code) if code and used is not None else text
        found, others = await self._hub.peers.finding.resolve(text)
        name = await self.admit(found, code)
        for other in others:
            self._hub.tell(
                "warning",
                f"another machine uses the name {text!r}: {other.described()}; used is {found.described()}",
            )
        return name

    async def admit(self, found: Candidate, code: str = "") -> str:
        """Dial ``found`` if it is not dialled yet, after pairing with it where that is needed and ``code`` is given;
        its name in this cluster. RequestError as :meth:`resolve`."""
        trouble = mismatch(found.name, found.protocol)
        if trouble is not None:
            raise RequestError(trouble)
        if not self._hub.trust.is_trusted(found.key):
            changed = self._hub.trust.changed(found.name, found.key)
            if changed:
                raise RequestError(f"peer {changed}")
            if not code:
                raise RequestError(f"peer {found.name!r} cannot be added: {found.instead}{how_to_pair(found)}")
            return await self._admit_paired(await self._hub.pairing.pair(found, code))
        if not self.is_used(found.key):
            await self._dial_found(found)
        name = self._hub.peers.name_of(found.key)
        assert name is not None
        if code and found.pairing_port and await self._refuses(name):
            # Its owner removed the trust in this user, and now gave a code again.
            return await self._admit_paired(await self._hub.pairing.pair(found, code))
        return name

    async def _admit_paired(self, found: Candidate) -> str:
        name = await self._dial_found(found)
        self._hub.peers.links[name].paired()
        return name

    async def _dial_found(self, found: Candidate) -> str:
        if len(found.hosts) > 1:
            place = (await reach({found.name: [(host, found.port) for host in found.hosts]}))[found.name]
            first = place.rpartition(":")[0]
            found = dataclasses.replace(found, hosts=tuple(sorted(found.hosts, key=lambda host: host != first)))
        name = self._hub.peers.name_of(found.key) or self._free_name(found.name)
        self._hub.peers.connect(name, found.key, f"tcp://{found.address}", found.found_by)
        return name

    async def _refuses(self, name: str) -> bool:
        link = self._hub.peers.links[name]  # it may be forgotten meanwhile
        try:
            await self._hub.peers.ready(name)
        except RequestError:
            return link.refused.is_set()
        return False

    def arrived(self, key: str, address: str) -> None:
        """A trusted peer has dialled this cluster. It was asked to join there, so it gets nodes."""
        entry = self._hub.trust.store.find(key)
        if entry is None:
            return
        name = self._hub.peers.name_of(key) or self._free_name(entry.name)
        link, peer = self._hub.peers.links.get(name), self._hub.state.peers.get(name)
        if link is not None and peer is not None and (peer.found_by == "dialled" or link.is_open):
            return
        host, _, port = address.rpartition(":")
        self._hub.peers.connect(name, key, f"tcp://{address}", "dialled")
        self._hub.tell("info", f"{name} of {entry.owner} dialled this cluster from {address}")
        candidate = Candidate(entry.name, key, (host,), int(port or 0), "dialled")
        self._hub.spawn(self._hub.adding.add_quietly(candidate))
