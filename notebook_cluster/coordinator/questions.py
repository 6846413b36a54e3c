"""What the doctor asks agents and nodes, and the measuring of the ways between them."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from notebook_cluster.doctor.findings import offset
from notebook_cluster.protocol.node import PairMeasured
from notebook_cluster.protocol.peer import Diagnose, Diagnosis
from notebook_cluster.protocol.views import RequestError

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

PAYLOAD = 1 << 20
"""Bytes sent to measure a bandwidth."""
ANSWER_S = 8.0
"""For a Diagnosis: it tries TCP for 2 s, and looks at the packages that are installed."""
LINKS_S = 15.0
PAIRS_S = 20.0
"""Time for the bandwidths of all links, and of all pairs of nodes; those that are left then are not measured."""
_PINGS = 3


class Questions:
    """Sends Diagnose to agents and waits for their answers."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
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
            self._hub.peers.send(peer, Diagnose(ticket=ticket, **fields), buffers)
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
                shortest, found = took, offset(answer.time, sent, sent + took)
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
                link = self._hub.peers.links.get(peer)
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
            return await asyncio.wait_for(self._hub.relaying.measure(source, target, PAYLOAD), timeout)
        except TimeoutError:
            reason = f"no answer within {timeout:.0f} s"
        except RequestError as error:
            reason = str(error)
        return PairMeasured(ticket=0, node=target, error=reason)
