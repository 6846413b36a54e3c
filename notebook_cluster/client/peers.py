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
    import zmq

    from notebook_cluster.coordinator.candidates import found_view
    from notebook_cluster.coordinator.finding import Finding
    from notebook_cluster.coordinator.settings import known_peers
    from notebook_cluster.coordinator.trusting import Trust

    trust = Trust()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    finding = Finding(context, trust, known_peers(os.environ.get(PEERS_VARIABLE, "")), lambda new: None)
    begin = time.monotonic()
    await finding.start()
    try:
        await finding.ask_typed()
        await asyncio.sleep(max(seconds - (time.monotonic() - begin), 0.0))
        trusted = trust.keys()
        return [found_view(candidate, trust, trusted) for candidate in finding.candidates()] + finding.silent_views()
    finally:
        await finding.close()
        context.destroy(linger=0)
