"""Links to agents with the owner's key: questions that have one answer."""

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import zmq

from notebook_cluster.link import Dialer
from notebook_cluster.peering.candidates import Candidate
from notebook_cluster.protocol import Message
from notebook_cluster.protocol import heads as h
from notebook_cluster.protocol.peer import Release
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import Identity

CONNECT_S = 15.0
ANSWER_S = 40.0
"""An agent may be starting a coordinator."""
Answer = TypeVar("Answer")
FromHeadHandler = Callable[[int, list[bytes]], None]


def _session(cluster: str, identity: Identity, agent: str) -> str:
    """The same for each window of this owner's cluster, so that a new one takes the place of the one before. Nobody
    else knows it: who did could open a session of that id first, and keep the owner from taking a grant back."""
    text = f"{cluster} {agent}".encode()
    return f"{cluster[:40]}-{hashlib.blake2b(text, digest_size=8, key=identity.secret_key.encode()).hexdigest()}"


class AgentLink:
    """To one agent.

    Args:
        on_view: called with (view, frames) for what the head on that machine says to a view.
        on_condition: called with (condition, reason) of the link.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        identity: Identity,
        candidate: Candidate,
        cluster: str,
        *,
        on_view: FromHeadHandler = lambda view, frames: None,
        on_condition: Callable[[str, str], None] = lambda condition, reason: None,
    ) -> None:
        self.candidate = candidate
        self._on_view = on_view
        self._on_condition = on_condition
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Any, list[bytes]]]] = {}
        self._changed = asyncio.Event()
        self._dialer = Dialer(
            context, f"tcp://{candidate.address}", candidate.key, identity,
            cluster=_session(cluster, identity, candidate.key), cluster_name=cluster,
            epoch=time.time_ns() // 1_000_000, sender=cluster, peer=candidate.name,
            on_message=self._received, on_condition=self._condition,
        )  # fmt: skip
        self._dialer.start()

    @property
    def connected(self) -> bool:
        """Messages go to and fro now."""
        return self._dialer.condition == "connected"

    @property
    def host(self) -> str:
        """Where it is reached."""
        return self.candidate.hosts[0]

    async def ready(self) -> None:
        """Return when it answers.

        Raises:
            RequestError: it does not, or refuses this owner; names it.
        """
        deadline = time.monotonic() + CONNECT_S
        while not self.connected:
            self._changed.clear()
            left = deadline - time.monotonic()
            if self._dialer.condition == "refused" or self._dialer.meets_stranger or left <= 0:
                reason = self._dialer.reason or self._dialer.trouble or "it does not answer"
                raise RequestError(f"peer {self.candidate.name!r} cannot be reached: {reason}")
            try:
                await asyncio.wait_for(self._changed.wait(), min(left, 0.5))
            except TimeoutError:
                continue

    async def ask(
        self,
        question: Callable[[int], Message],
        kind: type[Answer],
        timeout: float = ANSWER_S,
        buffers: Sequence[bytes] = (),
    ) -> tuple[Answer, list[bytes]]:
        """The answer (of type ``kind``) to ``question(ticket)``, which has ``buffers``; and the answer's buffers.

        Raises:
            RequestError: none came in time.
        """
        ticket = next(self._tickets)
        future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._dialer.send(question(ticket), buffers)
        try:
            answer, beside = await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise RequestError(f"{self.candidate.name} has not answered for {timeout:g} s") from None
        finally:
            del self._waiting[ticket]
        if not isinstance(answer, kind):
            raise RequestError(f"{self.candidate.name} answered with a {type(answer).__name__}")
        return answer, beside

    def send(self, message: Message, buffers: Sequence[bytes] = ()) -> None:
        """Now, or when the agent can be reached again."""
        self._dialer.send(message, buffers)

    def move(self, candidate: Candidate) -> None:
        """It is somewhere else now."""
        if candidate.address != self.candidate.address:
            self.candidate = candidate
            self._dialer.move(f"tcp://{candidate.address}")

    async def close(self, *, release: bool) -> None:
        """``release``: the agent forgets this window."""
        if release:
            self._dialer.send(Release())
        await self._dialer.close()

    def _received(self, message: Message, buffers: list[bytes]) -> None:
        match message:
            case h.FromHead():
                self._on_view(message.view, buffers)
            case h.HeadState() | h.Granted() | h.HeadFile() | h.HeadReady() | h.HeadFileTaken():
                future = self._waiting.get(message.ticket)
                if future is not None and not future.done():
                    future.set_result((message, buffers))
            case _:
                pass  # what it tells every coordinator of its machine

    def _condition(self, condition: str, reason: str) -> None:
        self._changed.set()
        self._on_condition(condition, reason)
