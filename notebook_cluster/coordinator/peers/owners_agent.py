"""The agent of the owner's machine where the coordinator is a head: the owner's window starts it, and it dials in here.

It has the place of a coordinator's own agent, and its name.
"""

import asyncio

from notebook_cluster.coordinator.core import LOCAL
from notebook_cluster.coordinator.nodes.membership import Membership
from notebook_cluster.coordinator.peers.links import PeerLinks
from notebook_cluster.protocol.views import RequestError

ARRIVES_S = 15.0
"""For the agent that a window has just started."""


class OwnersAgent:
    """What :class:`.provisioning.OwnAgent` is to a coordinator on its owner's machine."""

    def __init__(self, links: PeerLinks, membership: Membership) -> None:
        self._links = links
        self._membership = membership
        self._there = asyncio.Event()

    async def wait(self) -> None:
        """Return when it has dialled in.

        Raises:
            RequestError: it does not.
        """
        try:
            await asyncio.wait_for(self._there.wait(), ARRIVES_S)
        except TimeoutError:
            raise RequestError(
                "this machine's agent has not reached the head: the ports of the head's machine may be blocked from "
                "here (%cluster doctor)"
            ) from None

    async def keep(self) -> None:
        """Nothing to keep going: its window does that."""

    def arrived(self) -> None:
        """It has dialled in, for the first time or as another process than before."""
        self._there.set()
        if self._links.has(LOCAL):
            self._membership.order_again(LOCAL)
