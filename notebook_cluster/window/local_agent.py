"""The agent of the owner's own machine: it dials in to the head, as the peer ``local``."""

import asyncio
from pathlib import Path

import msgspec
import psutil

from notebook_cluster.coordinator.core import LOCAL
from notebook_cluster.coordinator.startup import PrivateAgent, start_private_agent
from notebook_cluster.protocol.heads import PeerKey
from notebook_cluster.security import owner, write_private

AGENT_FILE = "agent.json"


class LocalAgent:
    """One for the cluster whose folder is ``runtime``; it outlives its window by ``lease`` seconds without the head."""

    def __init__(self, runtime: Path, lease: float) -> None:
        self._runtime = runtime
        self._lease = lease
        self._one_at_a_time = asyncio.Lock()

    async def start(self, reception: str, head_key: str) -> PeerKey:
        """It runs, and dials the head with this key at ``reception`` (HOST:PORT), when this returns.

        Raises:
            RequestError: it did not start; names its log.
        """
        async with self._one_at_a_time:
            if (running := self.find(head_key)) is not None:
                return running
            options = ["--dial", reception, "--head-key", head_key]
            agent, _ = await start_private_agent(LOCAL, self._runtime, self._lease, options)
            write_private(self._runtime / AGENT_FILE, msgspec.json.encode(agent))
            return PeerKey(LOCAL, agent.public_key, owner())

    def find(self, head_key: str) -> PeerKey | None:
        """The one that a window of this cluster has started for that head, if it still runs."""
        try:
            agent = msgspec.json.decode((self._runtime / AGENT_FILE).read_bytes(), type=PrivateAgent)
            command = psutil.Process(agent.pid).cmdline()
        except (OSError, msgspec.DecodeError, psutil.Error):
            return None
        if "notebook_cluster.agent" not in command or head_key not in command:
            return None
        return PeerKey(LOCAL, agent.public_key, owner())
