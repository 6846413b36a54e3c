"""What this machine has to do before a head can add a node: find the peer, pair, grant; or start its own agent."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from notebook_cluster.coordinator.core import LOCAL, Level
from notebook_cluster.coordinator.peers.pairing import Pairing
from notebook_cluster.peering.candidates import Candidate, Trust
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.heads import HeadState
from notebook_cluster.protocol.state import ClusterView
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.window.local_agent import LocalAgent
from notebook_cluster.window.owner import Owner

HERE = (v.AddNodes, v.Invite, v.RestartNode)
"""Requests that are prepared here before the head answers them."""
ARRIVES_S = 12.0
"""For this machine's agent, which may have taken the place of one that has ended."""
LOOK_S = 0.1


class NodeAdmission:
    """Args:
    head: how the head is, as far as is known.
    ask: what the head answers a request; RequestError.
    tell: a line for the event list; ``spawn`` runs what nobody waits for.
    """

    def __init__(
        self,
        cluster: str,
        *,
        owner: Owner,
        local: LocalAgent,
        pairing: Pairing,
        trust: Trust,
        head: Callable[[], HeadState],
        ask: Callable[[Any], Awaitable[Any]],
        tell: Callable[[Level, str], None],
        spawn: Callable[[Any], object],
    ) -> None:
        self._cluster = cluster
        self._owner = owner
        self._local = local
        self._pairing = pairing
        self._trust = trust
        self._head = head
        self._ask = ask
        self._tell = tell
        self._spawn = spawn
        self._follow = False

    async def prepare(self, body: Any) -> Any:
        """The request that the head shall answer in place of ``body``, one of :data:`HERE`.

        Raises:
            RequestError: it cannot be; one line with the way out.
        """
        assert self._owner.head is not None
        if isinstance(body, v.Invite):
            raise RequestError(
                f"cluster {self._cluster!r} is led from {self._owner.head.candidate.name}, where machines cannot join "
                "by themselves: add each from here with %cluster add NAME --code CODE"
            )
        if isinstance(body, v.RestartNode):
            state = msgspec.convert(await self._ask(v.GetState()), ClusterView)
            if any(node.name == body.node and node.peer == LOCAL for node in state.nodes):
                await self._start_local()
            return body
        if body.peer == LOCAL:
            await self._start_local()
        elif body.peer == "all":
            await self._admit_all(body)
        else:
            found = await self._owner.find(body.peer, body.code)
            await self._owner.grant(found)
            body = msgspec.structs.replace(body, peer=found.name)
        return msgspec.structs.replace(body, code="")

    async def _start_local(self) -> None:
        """This machine's agent runs, and has dialled the head; else the head says why nothing starts on it."""
        assert self._owner.head is not None
        head = self._head()
        row = await self._local.start(f"{self._owner.head.host}:{head.reception}", head.key)
        self._owner.use_local(row)
        deadline = time.monotonic() + ARRIVES_S
        while time.monotonic() < deadline:
            state = msgspec.convert(await self._ask(v.GetState()), ClusterView)
            if any(peer.key == row.key and peer.condition == "connected" for peer in state.peers):
                return
            await asyncio.sleep(LOOK_S)

    async def _admit_all(self, body: v.AddNodes) -> None:
        self._follow = self._follow or body.follow
        if body.code:
            self._pairing.use_for_all(body.code)
        usable, trouble = await self._owner.present(body.code, body.expect)
        results = await asyncio.gather(*(self._owner.grant(row) for row in usable), return_exceptions=True)
        for line in (*trouble, *(str(result) for result in results if isinstance(result, BaseException))):
            self._tell("warning", line)

    def found(self, new: list[Candidate]) -> None:
        """These are there now, or say something else than before: added where all are."""
        for candidate in new:
            usable = self._trust.is_trusted(candidate.key) or self._pairing.wants(candidate)
            if self._follow and usable and not self._owner.has(candidate.key):
                self._spawn(self._add_found(candidate))

    async def _add_found(self, candidate: Candidate) -> None:
        try:
            found = await self._owner.find(candidate.address, self._pairing.code)
            await self._owner.grant(found)
            await self._ask(v.AddNodes(peer=found.name))
        except RequestError as error:
            self._tell("warning", str(error))
