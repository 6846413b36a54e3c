"""Which peers are there, and which one a name or an address means."""

import asyncio
import contextlib
import dataclasses
import ipaddress
import socket
from collections.abc import Callable, Sequence

import zmq

from notebook_cluster.discovery import Browser, FoundPeer, local_addresses, reachable_addresses
from notebook_cluster.pairing import PairingError, ask
from notebook_cluster.peering.candidates import Candidate, Trust, answered, collect, heard, split_address
from notebook_cluster.protocol.names import is_name
from notebook_cluster.protocol.state import PeerView
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import fingerprint

BROWSE_AT_LEAST = 1.5
"""Seconds of listening after which a peer that was not heard counts as not there."""
JUST_SHARED = 3.0
"""Seconds to wait for a name that nobody has, or for more peers when more are expected: who has just begun to share is
announced a moment later."""
ASK_TIMEOUT = 3.0
TYPED_AGAIN = 15.0
"""Seconds after which a typed address that did not answer is asked again."""
_MOST_OUTSIDE = 1000
"""Announcements of which the addresses are remembered, twice as many as are listened to at once."""


class PeerFinder:
    """Listens on mDNS and asks at typed addresses; ``on_found(new)`` is called on the loop with the peers that were not
    there before."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        trust: Trust,
        typed: Sequence[str],
        on_found: Callable[[list[Candidate]], None],
    ) -> None:
        """``typed``: names or HOST:PORT that the notebook's environment names (NOTEBOOK_CLUSTER_PEERS)."""
        self._context = context
        self._trust = trust
        self._on_found = on_found
        self._browser: Browser | None = None
        self._heard = asyncio.Event()
        self._news = asyncio.Event()
        self._records: dict[str, FoundPeer] = {}
        self._outside: dict[str, tuple[str, ...]] = {}
        """Where others reached who announced itself under that instance last, also when it was gone in between."""
        self._typed: dict[str, Candidate | None] = {entry: None for entry in typed if ":" in entry}
        self._silent: dict[str, str] = {}
        """Typed address -> why nothing is known about it."""
        self.typed_names = [entry for entry in typed if ":" not in entry]

    async def start(self) -> str | None:
        """Listen from now on (zeroconf has a thread of its own); returns why it does not work, if so."""
        loop = asyncio.get_running_loop()

        def changed(found: dict[str, FoundPeer]) -> None:
            loop.call_soon_threadsafe(self._changed, dict(found))

        def start() -> Browser:
            browser = Browser(changed)
            browser.start()
            return browser

        try:
            # Its import alone costs more than everything else at start-up.
            self._browser = await loop.run_in_executor(None, start)
        except OSError as error:
            return f"mDNS does not work on this machine ({error}): other machines cannot be found"
        finally:
            loop.call_later(BROWSE_AT_LEAST, self._heard.set)
        return None

    def _changed(self, found: dict[str, FoundPeer]) -> None:
        for instance, peer in found.items():
            if not _is_near(peer.hosts):
                self._outside[instance] = peer.hosts
            elif instance in self._outside and not _is_near(reachable_addresses()):
                # Its cable was pulled, and is in again: what it says until it has looked at its own addresses holds
                # only for who is on no network either.
                found[instance] = dataclasses.replace(peer, hosts=self._outside[instance])
        while len(self._outside) > _MOST_OUTSIDE:
            self._outside.pop(next(iter(self._outside)))
        new = [peer for instance, peer in found.items() if self._records.get(instance) != peer]
        self._records = found
        self._news.set()
        self._on_found([heard(peer) for peer in new])

    async def follow_typed(self) -> None:
        """Ask at the typed addresses until each has said who is there; never returns while one has not."""
        while any(candidate is None for candidate in self._typed.values()):
            await self.ask_typed()
            await asyncio.sleep(TYPED_AGAIN)

    async def ask_typed(self) -> None:
        """Ask once at every typed address where nobody was found yet."""

        async def look(entry: str) -> None:
            try:
                found = self._typed[entry] = await self._at_address(entry)
            except RequestError as error:
                self._silent[entry] = str(error)
            else:
                self._silent.pop(entry, None)
                self._on_found([found])

        await asyncio.gather(*(look(entry) for entry, known in self._typed.items() if known is None))

    # ---- what is there

    def candidates(self) -> list[Candidate]:
        """Every peer that is known of, each key once."""
        typed = [candidate for candidate in self._typed.values() if candidate is not None]
        return collect([*map(heard, self._records.values()), *typed], self._trust)

    async def present(self, enough: Callable[[list[Candidate]], bool] = lambda found: True) -> list[Candidate]:
        """The peers that are there, after listening and asking long enough, and up to 3 s longer while they are not
        ``enough``; not those that are only remembered."""
        await asyncio.gather(self._heard.wait(), self.ask_typed())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_until(lambda: enough(self._present())), JUST_SHARED)
        return self._present()

    def _present(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates() if candidate.found_by != "remembered"]

    def find(self, key: str) -> Candidate | None:
        """The peer with ``key``, if anything is known about it."""
        return next((candidate for candidate in self.candidates() if candidate.key == key), None)

    def silent_views(self) -> list[PeerView]:
        """Rows for typed addresses at which nobody was found."""
        return [
            PeerView(
                name=entry, key="", address=entry, condition="lost", found_by="typed", trusted=False, reason=reason
            )
            for entry, reason in self._silent.items()
        ]

    # ---- which one is meant

    async def resolve(self, text: str) -> tuple[Candidate, list[Candidate]]:
        """The peer with this name or HOST:PORT, trusted or not, and others that use its name.

        Raises:
            RequestError: it is not there, it may be one of several, or its key has changed; one line with the way out.
        """
        if ":" in text:
            return await self._at_address(text), []
        keys = self._trust.keys()
        if not any(candidate.key in keys and candidate.found_by != "remembered" for candidate in self._named(text)):
            await asyncio.gather(self._heard.wait(), self.ask_typed())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_until(lambda: self._is_clear(text)), JUST_SHARED)
        return self._by_name(text)

    def _is_clear(self, name: str) -> bool:
        """It is known, and not only from somebody else while the one that was paired may yet be heard."""
        return bool(self._named(name)) and self._instead(name) is None

    def _named(self, name: str) -> list[Candidate]:
        return [candidate for candidate in self.candidates() if candidate.name == name]

    def _instead(self, name: str) -> Candidate | None:
        """Who is heard under ``name`` where the one that was paired is not."""
        keys = self._trust.keys()
        there = [candidate for candidate in self._named(name) if candidate.found_by != "remembered"]
        if any(candidate.key in keys for candidate in there):
            return None
        return next((candidate for candidate in there if self._trust.changed(name, candidate.key)), None)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    def _by_name(self, name: str) -> tuple[Candidate, list[Candidate]]:
        named = self._named(name)
        if not named:
            unheard = f"peer {name!r} cannot be found: mDNS does not work on this machine"
            raise RequestError(self._browser.why_not(name) if self._browser is not None else unheard)
        keys = self._trust.keys()
        trusted = [candidate for candidate in named if candidate.key in keys]
        instead = self._instead(name)
        if instead is not None:
            raise RequestError(f"peer {self._trust.changed(name, instead.key)}")
        meant = trusted or named
        if len(meant) > 1:
            rows = ", ".join(candidate.described() for candidate in meant)
            raise RequestError(f"{len(meant)} peers are called {name!r}: add one by its address: {rows}")
        return meant[0], [candidate for candidate in named if candidate is not meant[0]]

    async def _at_address(self, text: str) -> Candidate:
        host, port = split_address(text)
        addresses = await _resolve_host(host)
        keys = self._trust.keys()
        # Of several that are only remembered there the one that was paired last.
        matches = sorted(
            (candidate for candidate in reversed(self.candidates()) if _is_at(candidate, addresses, port)),
            key=lambda candidate: (candidate.key not in keys, candidate.found_by == "remembered"),
        )
        if matches and matches[0].found_by == "remembered":
            return await self._where_remembered(_reached_at(matches[0], addresses), port)
        if matches:
            return _reached_at(matches[0], addresses)
        try:
            here = await ask(self._context, f"{addresses[0]}:{port}", timeout=ASK_TIMEOUT)
        except PairingError as error:
            raise RequestError(
                f"no agent was heard at {text}: {error}; `notebook-cluster share` shows its address beside the code"
            ) from None
        if here.role != "peer" or not is_name(here.name):
            what = f"cluster {here.name!r}" if is_name(here.name) else "something with an unusable name"
            raise RequestError(f"{text} is {what}, not a peer")
        return answered(here, addresses[0], port)

    async def _where_remembered(self, known: Candidate, port: int) -> Candidate:
        """Who is where ``known`` was last, as far as a code is open there: its address may be another machine's now.
        Nothing that is said there makes a key trusted."""
        host = known.hosts[0]
        looks = [
            asyncio.ensure_future(self._with_code(host, place)) for place in {port, known.port + 1} if place < 65536
        ]
        try:
            for look in asyncio.as_completed(looks):
                found = await look
                if found is None:
                    continue
                if found.key != known.key:
                    before = f"{known.name!r} (key {fingerprint(known.key)}) was there before"
                    found = dataclasses.replace(found, instead=f"at {found.described()} {before}; ")
                return found
        finally:
            for task in looks:
                task.cancel()
        return known

    async def _with_code(self, host: str, port: int) -> Candidate | None:
        try:
            here = await ask(self._context, f"{host}:{port}", timeout=ASK_TIMEOUT)
        except PairingError:
            return None
        return answered(here, host, port) if here.role == "peer" and is_name(here.name) else None

    async def close(self) -> None:
        if self._browser is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._browser.close)


async def _resolve_host(host: str) -> list[str]:
    """Its IPv4 addresses; for this machine itself also those by which others know it."""
    try:
        rows = await asyncio.get_running_loop().getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RequestError(f"{host!r} is not known as the name of a machine ({error.strerror or error})") from None
    addresses = list(dict.fromkeys(str(row[4][0]) for row in rows))
    if any(ipaddress.ip_address(address).is_loopback for address in addresses):
        addresses += [address for address in local_addresses() if address not in addresses]
    return addresses


def _is_near(hosts: Sequence[str]) -> bool:
    """They reach this machine alone."""
    return all(ipaddress.ip_address(host).is_loopback for host in hosts)


def _is_at(candidate: Candidate, addresses: Sequence[str], port: int) -> bool:
    ports = {candidate.port, candidate.pairing_port}
    if candidate.found_by == "remembered":
        # Where its link has a fixed port, its code was accepted at the next one.
        ports.add(candidate.port + 1)
    return port in ports and not set(addresses).isdisjoint(candidate.hosts)


def _reached_at(candidate: Candidate, addresses: Sequence[str]) -> Candidate:
    """``candidate`` with the typed address first: it may be the only one of several that works from here."""
    typed = [host for host in candidate.hosts if host in addresses]
    others = [host for host in candidate.hosts if host not in addresses]
    return dataclasses.replace(candidate, hosts=(*typed, *others))
