"""Which peers are there, before there is a cluster; and what to do where none is."""

import asyncio
import concurrent.futures
import os
import time
from collections.abc import Sequence

from notebook_cluster.client.start import PEERS_VARIABLE
from notebook_cluster.protocol.state import PeerView

_MOST_NAMED = 3
"""Peers of which one line says why they are not used."""


def find_peers(seconds: float = 1.0) -> list[PeerView]:
    """Peers that are heard over mDNS within ``seconds``, that NOTEBOOK_CLUSTER_PEERS names, or that were paired once;
    each with why it cannot be added. While nobody is heard it listens on, three times as long in all: a busy machine
    answers late."""
    # An event loop of its own: in a notebook the main thread has one that runs.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(_look(seconds))).result()


async def _look(seconds: float) -> list[PeerView]:
    watch = PeerWatch()
    begin = time.monotonic()
    await watch.start()
    try:
        await watch.ask_typed()
        await asyncio.sleep(max(seconds - (time.monotonic() - begin), 0.0))
        while time.monotonic() - begin < 3 * seconds and not any(peer.found_by == "mdns" for peer in watch.views()):  # noqa: ASYNC110 - nobody tells of what is heard
            await asyncio.sleep(0.05)
        return watch.views()
    finally:
        await watch.close()


def nobody_came(peers: Sequence[PeerView], code: bool) -> str:
    """A line for a start that found no peer to use: what is so, and what to do next.

    Args:
        peers: all that the cluster knows of; the private agent of this machine is none that was found.
        code: a code was given, with which peers are paired.
    """
    found = [peer for peer in peers if peer.found_by != "local"]
    if not found:
        begin = "no other machine shares itself on this network yet: run `notebook-cluster share` there"
        if code:
            return f"{begin} with this code, and it joins as soon as it is found"
        return f"{begin}, then %cluster add NAME --code CODE with the name and the code that it shows"
    named = [f"{peer.name}: {peer.reason or peer.condition}" for peer in found[:_MOST_NAMED]]
    more = f"; and {len(found) - _MOST_NAMED} more (%cluster peers)" if len(found) > _MOST_NAMED else ""
    return f"peers that were found may not be used yet: {'; '.join(named)}{more}"


class PeerWatch:
    """Listens for peers from :meth:`start` to :meth:`close`, both on one event loop."""

    def __init__(self) -> None:
        import zmq

        from notebook_cluster.peering.candidates import Trust, known_peers
        from notebook_cluster.peering.peer_finder import PeerFinder

        self._trust = Trust()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        known = known_peers(os.environ.get(PEERS_VARIABLE, ""))
        self._finding = PeerFinder(self._context, self._trust, known, lambda new: None)

    async def start(self) -> str | None:
        """Listen on mDNS; returns why that does not work, if so."""
        return await self._finding.start()

    async def ask_typed(self) -> None:
        """Ask at the addresses that NOTEBOOK_CLUSTER_PEERS names, where nobody was found yet."""
        await self._finding.ask_typed()

    def views(self) -> list[PeerView]:
        """Every peer that is known of; reads the files of trusted keys, so call it beside the loop."""
        from notebook_cluster.peering.candidates import found_view

        trusted = self._trust.keys()
        found = [found_view(candidate, self._trust, trusted) for candidate in self._finding.candidates()]
        return found + self._finding.silent_views()

    async def close(self) -> None:
        """Listen no more."""
        await self._finding.close()
        self._context.destroy(linger=0)
