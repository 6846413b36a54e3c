"""Which peers are there, without a cluster."""

import asyncio
import concurrent.futures
import os
import time

from notebook_cluster.client.start import PEERS_VARIABLE
from notebook_cluster.protocol.state import PeerView


def find_peers(seconds: float = 1.0) -> list[PeerView]:
    """Peers that are heard over mDNS within ``seconds``, that NOTEBOOK_CLUSTER_PEERS names, or that were paired once;
    each with why it cannot be added."""
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
        return watch.views()
    finally:
        await watch.close()


class PeerWatch:
    """Listens for peers from :meth:`start` to :meth:`close`, both on one event loop."""

    def __init__(self) -> None:
        import zmq

        from notebook_cluster.coordinator.finding import Finding
        from notebook_cluster.coordinator.settings import known_peers
        from notebook_cluster.coordinator.trusting import Trust

        self._trust = Trust()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        known = known_peers(os.environ.get(PEERS_VARIABLE, ""))
        self._finding = Finding(self._context, self._trust, known, lambda new: None)

    async def start(self) -> str | None:
        """Listen on mDNS; returns why that does not work, if so."""
        return await self._finding.start()

    async def ask_typed(self) -> None:
        """Ask at the addresses that NOTEBOOK_CLUSTER_PEERS names, where nobody was found yet."""
        await self._finding.ask_typed()

    def views(self) -> list[PeerView]:
        """Every peer that is known of; reads the files of trusted keys, so call it beside the loop."""
        from notebook_cluster.coordinator.candidates import found_view

        trusted = self._trust.keys()
        found = [found_view(candidate, self._trust, trusted) for candidate in self._finding.candidates()]
        return found + self._finding.silent_views()

    async def close(self) -> None:
        """Listen no more."""
        await self._finding.close()
        self._context.destroy(linger=0)
