"""Pairing with peers by a code: one that is typed for one peer, or a class code for all that are found."""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import zmq

from notebook_cluster.coordinator.core import Level
from notebook_cluster.pairing import PairingError, Partner, first_that_answers, pair
from notebook_cluster.peering.candidates import Candidate, Trust
from notebook_cluster.peering.peer_finder import ASK_TIMEOUT
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import Identity, Trusted, owner, read_code

MOST_FAILURES = 20
"""Pairings with one code that may fail. Whoever pretends to be a peer learns with each whether one guess was right."""
MOST_AT_ONCE = 8


class NotReached(RequestError):
    """Nobody answered at ``candidate``: no guess was made, and it may work in a moment. ``reason``: how it failed."""

    def __init__(self, candidate: Candidate, reason: str, *, later: bool = False) -> None:
        said = "has not answered yet, it is tried again" if later else "was not paired"
        super().__init__(f"{candidate.name} {said}: {reason}")
        self.reason = reason


class Attempts:
    """How often one code may still fail. An attempt counts as failed until it has succeeded, so that many at once gain
    nothing."""

    def __init__(self) -> None:
        self.failed = 0
        self._running = 0
        self._changed = asyncio.Condition()

    @property
    def used_up(self) -> bool:
        return self.failed >= MOST_FAILURES

    async def begin(self) -> bool:
        """Wait for a turn; False when the code is used up."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.used_up or self._running < min(MOST_AT_ONCE, MOST_FAILURES - self.failed)
            )
            if self.used_up:
                return False
            self._running += 1
            return True

    async def end(self, failed: bool) -> None:
        async with self._changed:
            self._running -= 1
            self.failed += failed
            self._changed.notify_all()


class Pairing:
    """Makes peers trusted. ``code`` is the class code that is tried with every peer that is found, or empty."""

    def __init__(
        self,
        cluster: str,
        context: "zmq.Context[Any]",
        identity: Identity,
        trust: Trust,
        tell: Callable[[Level, str], None],
    ) -> None:
        """``tell(level, line)`` gets lines for people."""
        self._cluster = cluster
        self._tell = tell
        self._context = context
        self._identity = identity
        self._trust = trust
        self.code = ""
        self._tried: set[tuple[str, int]] = set()
        self._attempts: dict[str, Attempts] = {}

    def use_for_all(self, code: str) -> None:
        """Try ``code`` with every peer that is found from now on, also those where one failed before."""
        self.code = code
        self._tried.clear()

    def wants(self, candidate: Candidate) -> bool:
        """True once for each peer that may have the class code open."""
        place = (candidate.key, candidate.pairing_port)
        if not self.code or not candidate.pairing_port or place in self._tried:
            return False
        if self._attempts_with(self.code).used_up or self._trust.changed(candidate.name, candidate.key):
            return False
        self._tried.add(place)
        return True

    def try_again(self, candidate: Candidate) -> None:
        """It did not fail there, it was not reached."""
        self._tried.discard((candidate.key, candidate.pairing_port))

    def _attempts_with(self, code: str) -> Attempts:
        return self._attempts.setdefault(code, Attempts())

    async def pair(self, candidate: Candidate, code: str) -> Candidate:
        """Pair with ``candidate`` and trust it from now on; returns what it proved to be.

        Raises:
            RequestError: not paired: the code is wrong (with the tries that are left), nothing answers, or the peer's
                key is not the one that is known for its name.
        """
        changed = self._trust.changed(candidate.name, candidate.key)
        if changed:
            raise RequestError(f"peer {changed}")
        try:
            code = read_code(code)
        except ValueError as error:
            raise RequestError(str(error)) from None
        candidate = await self._where_it_answers(candidate)
        attempts = self._attempts_with(code)
        if not await attempts.begin():
            raise RequestError(_used_up(candidate.name))
        failed = True
        try:
            partner = await pair(
                self._context, f"{candidate.hosts[0]}:{candidate.pairing_port}", code,
                identity_key=self._identity.public_key, role="cluster", name=self._cluster, owner=owner(),
                expect_key=candidate.key,
            )  # fmt: skip
            failed = False
        except PairingError as error:
            raise RequestError(f"{candidate.name} was not paired: {error}") from None
        finally:
            await attempts.end(failed)
            if failed and attempts.used_up:
                self._tell("warning", _used_up(candidate.name))
        return self._pinned(candidate, partner)

    def _pinned(self, candidate: Candidate, partner: Partner) -> Candidate:
        if partner.role != "peer":
            raise RequestError(f"{candidate.address} is cluster {partner.name!r}, not a peer")
        paired = dataclasses.replace(candidate, name=partner.name, key=partner.key, port=partner.port)
        try:
            self._trust.store.add(Trusted(paired.name, paired.key, partner.owner, paired.address, time.time()))
        except ValueError as error:
            raise RequestError(f"peer {paired.name!r} is not used: {error}") from None
        self._tell("info", f"paired with {paired.name} of {partner.owner} at {paired.address}")
        return paired

    async def _where_it_answers(self, candidate: Candidate) -> Candidate:
        """``candidate`` with the address first at which its pairing socket answers: who is not there has not failed."""
        if not candidate.pairing_port:
            raise RequestError(
                f"peer {candidate.name!r} has no code open: run `notebook-cluster share` on that machine again and use "
                "the code that it shows"
            )
        try:
            host = await first_that_answers(
                self._context, candidate.hosts, candidate.pairing_port, candidate.key, timeout=ASK_TIMEOUT
            )
        except PairingError as error:
            raise NotReached(candidate, str(error)) from None
        others = tuple(other for other in candidate.hosts if other != host)
        return dataclasses.replace(candidate, hosts=(host, *others))


def _used_up(name: str) -> str:
    return (
        f"{MOST_FAILURES} pairings with this code have failed: it is tried no more, also not with {name}, because "
        "somebody may be pretending to be peers to guess it. Share with another code"
    )
