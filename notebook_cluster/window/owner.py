"""What only the owner can do for a cluster that is led elsewhere: find peers, pair with them, and grant the head."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import zmq

from notebook_cluster.coordinator.peers.pairing import Pairing
from notebook_cluster.discovery.addresses import reach
from notebook_cluster.link.tcp import read_host_port
from notebook_cluster.peering.candidates import Candidate, Trust, how_to_pair
from notebook_cluster.peering.peer_finder import PeerFinder
from notebook_cluster.protocol import heads as h
from notebook_cluster.protocol.state import PeerView
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.protocol.wire import mismatch
from notebook_cluster.security import Identity, owner, read_code
from notebook_cluster.window.agents import AgentLink

log = logging.getLogger(__name__)

GRANT_S = 7 * 86400.0
RENEW_S = 3600.0
"""Seconds between two grants while a window is there."""
WITHDRAW_S = 2.0
MOVES_S = 0.5
"""Seconds between two looks at where agents are announced."""
_AT_ONCE = 8


async def _reached(found: Candidate) -> Candidate:
    """``found`` with the address first that can be reached from here."""
    if len(found.hosts) < 2:
        return found
    place = (await reach({found.name: [(host, found.port) for host in found.hosts]}))[found.name]
    first = place.rpartition(":")[0]
    return dataclasses.replace(found, hosts=tuple(sorted(found.hosts, key=lambda host: host != first)))


class Owner:
    """Of one cluster, made inside the running loop; ends with :meth:`close`. ``on_peers(rows)`` hears which peers the
    head may use, whenever that changes. Agents that are started again are dialled where they are announced then.

    Attributes:
        head: the link to the head's agent, once there is one.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        identity: Identity,
        cluster: str,
        finder: PeerFinder,
        trust: Trust,
        pairing: Pairing,
        on_peers: Callable[[list[h.PeerKey]], None],
    ) -> None:
        self._context = context
        self._identity = identity
        self._cluster = cluster
        self._finder = finder
        self._trust = trust
        self._pairing = pairing
        self._on_peers = on_peers
        self._links: dict[str, AgentLink] = {}
        """Key -> link of the agents that have the grant."""
        self._granting: dict[str, asyncio.Lock] = {}
        self._used: dict[str, h.PeerKey] = {}
        """Key -> those that the head uses since before this window, as it has them."""
        self._local: h.PeerKey | None = None
        self._head_key = ""
        self._renewed = time.monotonic()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self.head: AgentLink | None = None
        self._following = asyncio.ensure_future(self._follow_moves())

    # ---- which peer is meant

    async def find(self, text: str, code: str = "") -> Candidate:
        """The trusted peer that ``text`` (a name or HOST:PORT) means; paired with ``code`` where that is needed.

        Raises:
            RequestError: it is not there, or must not be used; one line with the way out.
        """
        if code:
            try:
                code = read_code(code)
            except ValueError as error:
                raise RequestError(str(error)) from None
        known = next((link.candidate for link in self._links.values() if link.candidate.name == text), None)
        if known is not None:
            return known
        found, _ = await self._finder.resolve(text)
        return await _reached(await self._trusted(found, code))

    async def _trusted(self, found: Candidate, code: str) -> Candidate:
        if (trouble := mismatch(found.name, found.protocol)) is not None:
            raise RequestError(trouble)
        if self._trust.is_trusted(found.key):
            return found
        if changed := self._trust.changed(found.name, found.key):
            raise RequestError(f"peer {changed}")
        if not code:
            raise RequestError(f"peer {found.name!r} cannot be added: {found.instead}{how_to_pair(found)}")
        return await self._pairing.pair(found, code)

    async def present(self, code: str, expect: int) -> tuple[list[Candidate], list[str]]:
        """The peers that are there and may be used, after pairing with those that have ``code`` open; and a line for
        each with which that failed."""
        found = await self._finder.present(lambda rows: sum(self._trust.is_trusted(row.key) for row in rows) >= expect)
        usable = [row for row in found if self._trust.is_trusted(row.key) or (code and row.pairing_port)]

        async def one(row: Candidate) -> Candidate | str:
            async with self._turns:
                try:
                    return await _reached(await self._trusted(row, code))
                except RequestError as error:
                    return str(error)

        results = await asyncio.gather(*(one(row) for row in usable))
        return [row for row in results if not isinstance(row, str)], [row for row in results if isinstance(row, str)]

    # ---- grants

    async def grant(self, candidate: Candidate) -> None:
        """Have the agent of ``candidate`` obey the head, and let the head use it.

        Raises:
            RequestError: it cannot be reached, or refuses the grant.
        """
        # Two links of one window to an agent would take its session from each other.
        async with self._granting.setdefault(candidate.key, asyncio.Lock()):
            await self._grant_to(candidate)

    async def _grant_to(self, candidate: Candidate) -> None:
        link = self._links.get(candidate.key)
        if link is None:
            is_head = self.head is not None and self.head.candidate.key == candidate.key
            link = self.head if is_head and self.head is not None else self._dial(candidate)
        link.move(candidate)
        try:
            await link.ready()
            await self._grant(link)
        except RequestError:
            if candidate.key not in self._links and link is not self.head:
                await link.close(release=True)
            raise
        if candidate.key not in self._links:
            self._links[candidate.key] = link
            self._tell_peers()

    def _dial(self, candidate: Candidate) -> AgentLink:
        return AgentLink(self._context, self._identity, candidate, self._cluster)

    async def _grant(self, link: AgentLink, seconds: float = GRANT_S, timeout: float = 10.0) -> None:
        assert self.head is not None
        head, key = self.head.candidate.name, self._head_key
        serial = time.time_ns() // 1_000  # grows over restarts of this process and of this machine
        granted, _ = await link.ask(
            lambda ticket: h.Grant(
                ticket=ticket, cluster=self._cluster, head=head, key=key, serial=serial, seconds=seconds
            ),
            h.Granted,
            timeout,
        )
        if granted.error:
            raise RequestError(f"{link.candidate.name}: {granted.error}")

    async def lead(self, key: str) -> None:
        """The head has this ``key``: its own agent hears it first. RequestError as :meth:`grant`."""
        assert self.head is not None
        self._head_key = key
        await self.grant(self.head.candidate)

    async def take_up(self, keys: Iterable[str]) -> list[str]:
        """After a start of this window: grant again to those peers of the cluster, by key. Returns a line for each with
        which that failed."""
        rows = [row for key in keys if (row := self._where(key)) is not None and self._trust.is_trusted(key)]
        results = await asyncio.gather(*(self.grant(row) for row in rows), return_exceptions=True)
        return [str(result) for result in results if isinstance(result, BaseException)]

    def use(self, peers: Iterable[PeerView]) -> None:
        """The head has these, and keeps those that are trusted whether they can be reached from here or not."""
        for peer in peers:
            known = self._trust.store.find(peer.key)
            whose = known.owner if known is not None else owner()
            self._used[peer.key] = h.PeerKey(peer.name, peer.key, whose, peer.address)

    def _where(self, key: str) -> Candidate | None:
        """Where it is heard, or where the head reaches it."""
        if (found := self._finder.find(key)) is not None or key not in self._used:
            return found
        row = self._used[key]
        place = read_host_port(row.address)
        return Candidate(row.name, key, (place[0],), place[1], "remembered") if place is not None else None

    async def renew_if_due(self) -> None:
        """Call now and then."""
        if time.monotonic() - self._renewed < RENEW_S:
            return
        self._renewed = time.monotonic()
        there = [link for link in self._links.values() if link.connected]
        await asyncio.gather(*(self._grant(link) for link in there), return_exceptions=True)

    async def drop_untrusted(self) -> bool:
        """Take the grant from peers that this user trusts no more; False when the head is one of them."""
        trusted = self._trust.keys()
        gone = [link for key, link in self._links.items() if key not in trusted]
        for link in gone:
            del self._links[link.candidate.key]
            await self._withdraw([link])
            if link is not self.head:
                await link.close(release=True)
        unknown = [key for key in self._used if key not in trusted]
        for key in unknown:
            del self._used[key]
        if gone or unknown:
            self._tell_peers()
        return self.head is None or self.head.candidate.key in trusted

    async def withdraw(self, keys: Collection[str] | None = None) -> None:
        """Nobody leads the cluster any more, as far as these agents (all of them) are concerned."""
        await self._withdraw([link for key, link in self._links.items() if keys is None or key in keys])

    async def _withdraw(self, links: list[AgentLink]) -> None:
        there = [link for link in links if link.connected]
        await asyncio.gather(
            *(self._grant(link, seconds=0.0, timeout=WITHDRAW_S) for link in there), return_exceptions=True
        )

    async def _follow_moves(self) -> None:
        """Now and then, for an agent that is started again at once is announced while its connection still counts."""
        while True:
            await asyncio.sleep(MOVES_S)
            try:
                self._move_links()
            except Exception:
                log.exception("could not look where agents are announced")

    def _move_links(self) -> None:
        """Dial who is not connected where it is announced now."""
        for link in {*self._links.values(), *([self.head] if self.head is not None else [])}:
            found = None if link.connected else self._finder.find(link.candidate.key)
            if found is not None and found.found_by != "remembered":
                link.move(found)

    def granted(self) -> list[str]:
        """Keys of the agents that have the grant."""
        return list(self._links)

    def out_of_reach(self, keys: Iterable[str]) -> list[str]:
        """Names of those among ``keys`` that have the grant and are not connected to this machine."""
        links = [self._links[key] for key in keys if key in self._links]
        return [link.candidate.name for link in links if not link.connected]

    def places(self) -> list[h.PeerKey]:
        """Those, where they are reached from here."""
        return [h.PeerKey(link.candidate.name, key, "", link.candidate.address) for key, link in self._links.items()]

    def has(self, key: str) -> bool:
        """It has the grant."""
        return key in self._links

    def use_local(self, row: h.PeerKey) -> None:
        """The agent of this machine, for the head."""
        self._local = row
        self._tell_peers()

    def peers(self) -> list[h.PeerKey]:
        """Those that the head may use."""
        me = owner()
        rows = []
        for link in self._links.values():
            candidate = link.candidate
            known = self._trust.store.find(candidate.key)
            address = f"127.0.0.1:{candidate.port}" if link is self.head else candidate.address
            rows.append(h.PeerKey(candidate.name, candidate.key, known.owner if known is not None else me, address))
        rows += [row for key, row in self._used.items() if key not in self._links and key != self._local_key]
        return [*rows, *([self._local] if self._local is not None else [])]

    @property
    def _local_key(self) -> str:
        return self._local.key if self._local is not None else ""

    def _tell_peers(self) -> None:
        self._on_peers(self.peers())

    async def close(self) -> None:
        self._following.cancel()
        links = {*self._links.values(), *([self.head] if self.head is not None else [])}
        await asyncio.gather(*(link.close(release=True) for link in links), return_exceptions=True)
