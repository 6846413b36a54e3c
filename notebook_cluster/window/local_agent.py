"""The agent of the owner's own machine: it dials in to the head, as the peer ``local``. A coordinator here may have
started it before the cluster was handed over; then it is told to go there."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from notebook_cluster.coordinator.core import LOCAL
from notebook_cluster.coordinator.startup import AGENT_FILE, PrivateAgent, read_own_agent, start_private_agent
from notebook_cluster.journal.reading import read_state
from notebook_cluster.journal.state import State
from notebook_cluster.journal.store import journal_path
from notebook_cluster.peering.candidates import Candidate
from notebook_cluster.protocol import heads as h
from notebook_cluster.protocol.heads import PeerKey
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import Identity, owner, write_private
from notebook_cluster.window.agents import AgentLink


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
            self.note(agent, head_key, reception)
            return PeerKey(LOCAL, agent.public_key, owner())

    def note(self, agent: PrivateAgent, head_key: str, reception: str) -> None:
        """``agent`` goes to the head with this key at ``reception``; both empty: it is dialled from here."""
        followed = _Followed(agent.name, agent.public_key, agent.port, agent.pid, head_key, reception)
        write_private(self._runtime / AGENT_FILE, msgspec.json.encode(followed))

    async def follow(
        self, context: "zmq.Context[Any]", identity: Identity, cluster: str, agent: PrivateAgent, key: str, address: str
    ) -> None:
        """Have ``agent`` go to the head with ``key`` at ``address``; both empty: it stays, and is dialled.

        Raises:
            RequestError: it does not answer, or does not do it.
            OSError: it cannot be noted.
        """
        place = Candidate(LOCAL, agent.public_key, ("127.0.0.1",), agent.port, "local")
        link = AgentLink(context, identity, place, cluster)
        try:
            await link.ready()
            answer, _ = await link.ask(
                lambda ticket: h.FollowHead(ticket=ticket, key=key, address=address), h.Granted, timeout=5.0
            )
            if answer.error:
                raise RequestError(answer.error)
            self.note(agent, key, address)
        finally:
            await link.close(release=True)

    def known(self, key: str) -> PrivateAgent | None:
        """The agent with this ``key``, if it runs: a window has noted it, or the journal of a coordinator here."""
        noted, journalled = read_own_agent(self._runtime), own_agent(self._runtime)
        agent = next((agent for agent in (noted, journalled) if agent is not None and agent.public_key == key), None)
        return agent if agent is not None and "notebook_cluster.agent" in command_of(agent.pid) else None

    def find(self, head_key: str) -> PeerKey | None:
        """The one that a window of this cluster has started for that head, if it still runs."""
        found = self._running(head_key)
        return PeerKey(LOCAL, found.public_key, owner()) if found is not None else None

    def astray(self, head: h.HeadState) -> PrivateAgent | None:
        """The one that a window has started for ``head``, where it dials another port than that of its reception."""
        return self._running(head.key) if head.reception and not self._dials(head.key, str(head.reception)) else None

    def end(self, head_key: str) -> None:
        """The head is trusted no more: nothing runs for it here any more. Returns at once."""
        if (found := self._running(head_key)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGTERM)

    def _dials(self, head_key: str, port: str) -> bool:
        """It goes to the reception of the run that is on, for each has a port of its own."""
        found = self._running(head_key)
        return found is not None and found.reception.rpartition(":")[2] == port

    def _running(self, head_key: str) -> "_Followed | None":
        try:
            agent = msgspec.json.decode((self._runtime / AGENT_FILE).read_bytes(), type=_Followed)
        except (OSError, msgspec.DecodeError):
            return None
        words = command_of(agent.pid)
        mine = "notebook_cluster.agent" in words and str(self._runtime) in words
        return agent if mine and agent.head_key == head_key else None


def own_agent(runtime: Path) -> PrivateAgent | None:
    """The agent that the last coordinator here has started on this machine."""
    try:
        return agent_of(read_state(journal_path(runtime)))
    except ValueError:
        return None


def agent_of(state: State) -> PrivateAgent | None:
    """The agent that a coordinator with this state has started on its machine."""
    peer = state.peers.get(LOCAL)
    if peer is None or peer.pid is None:
        return None
    return PrivateAgent(LOCAL, peer.key, int(peer.address.rpartition(":")[2]), peer.pid)


def command_of(pid: int) -> list[str]:
    """The words of its command line; none where it is gone."""
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error:
        return []


class _Followed(PrivateAgent):
    """What is kept of it."""

    head_key: str = ""
    reception: str = ""
