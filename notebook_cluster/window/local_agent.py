"""The agent of the owner's own machine: it dials in to the head, as the peer ``local``."""

import asyncio
import contextlib
import os
import signal
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
            port = reception.rpartition(":")[2]
            if (running := self.find(head_key)) is not None and self._dials(head_key, port):
                return running
            self.end(head_key)  # of an earlier run there, whose end it has not heard
            # In one word each: a key may begin with a minus sign.
            options = [f"--dial={reception}", f"--head-key={head_key}"]
            agent, _ = await start_private_agent(LOCAL, self._runtime, self._lease, options)
            write_private(self._runtime / AGENT_FILE, msgspec.json.encode(agent))
            return PeerKey(LOCAL, agent.public_key, owner())

    def find(self, head_key: str) -> PeerKey | None:
        """The one that a window of this cluster has started for that head, if it still runs."""
        found = self._running(head_key)
        return PeerKey(LOCAL, found[0].public_key, owner()) if found is not None else None

    def end(self, head_key: str) -> None:
        """The head is trusted no more: nothing runs for it here any more. Returns at once."""
        if (found := self._running(head_key)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found[0].pid, signal.SIGTERM)

    def _dials(self, head_key: str, port: str) -> bool:
        """It goes to the reception of the run that is on, for each has a port of its own."""
        found = self._running(head_key)
        return found is not None and any(word.startswith("--dial=") and word.endswith(f":{port}") for word in found[1])

    def _running(self, head_key: str) -> tuple[PrivateAgent, list[str]] | None:
        """It, and its command line."""
        try:
            agent = msgspec.json.decode((self._runtime / AGENT_FILE).read_bytes(), type=PrivateAgent)
            command = psutil.Process(agent.pid).cmdline()
        except (OSError, msgspec.DecodeError, psutil.Error):
            return None
        if "notebook_cluster.agent" not in command or f"--head-key={head_key}" not in command:
            return None
        return agent, command
