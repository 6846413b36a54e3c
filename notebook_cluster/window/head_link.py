"""The head as its window speaks to it: one agent, what it says of the head, and the head's answers."""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from notebook_cluster.peering.candidates import Candidate
from notebook_cluster.protocol import decode, encode
from notebook_cluster.protocol import heads as h
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.hand_over import DescribeView, KeptView
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import Identity
from notebook_cluster.window.agents import ANSWER_S, AgentLink, FromHeadHandler
from notebook_cluster.window.journal_copy import send_file
from notebook_cluster.window.owner import Owner
from notebook_cluster.window.settings import WindowSettings
from notebook_cluster.window.views import OWN_VIEW


class HeadRefuses(RequestError):
    """The agent of the head has said why there is none; ``has_led``: the one that the order's token means was there."""

    def __init__(self, error: str, has_led: bool = False) -> None:
        super().__init__(error)
        self.has_led = has_led


class HeadLink:
    """Of one window. ``on_view`` and ``on_condition``: as of :class:`.agents.AgentLink`.

    Attributes:
        state: how the head is, as far as is known.
    """

    def __init__(
        self,
        settings: WindowSettings,
        owner: Owner,
        *,
        on_view: FromHeadHandler,
        on_condition: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._owner = owner
        self._on_view = on_view
        self._on_condition = on_condition
        self.state = h.HeadState(ticket=0)
        self._questions: dict[int, asyncio.Future[v.Reply]] = {}
        self._numbers = itertools.count(time.time_ns())
        """Of questions: no view counts so far."""

    @property
    def link(self) -> AgentLink:
        """To the agent of the head, once :meth:`dial` has returned."""
        assert self._owner.head is not None
        return self._owner.head

    @property
    def reception(self) -> str:
        """HOST:PORT at which agents of other machines reach the head."""
        return f"{self.link.host}:{self.state.reception}"

    async def dial(self, context: "zmq.Context[Any]", identity: Identity) -> Candidate:
        """Find the peer, which is paired where that is needed, and have a link to its agent. RequestError: why not."""
        settings = self._settings
        candidate = await self._owner.find(settings.head, settings.code)
        self._owner.head = AgentLink(
            context, identity, candidate, settings.cluster,
            on_view=self._on_view, on_condition=self._on_condition,
        )  # fmt: skip
        await self._owner.head.ready()
        return candidate

    async def send_moved(self, token: str) -> None:
        """What a coordinator here has written goes to the head, which can begin from it with ``token``.

        Raises:
            RequestError, OSError: it has not got there.
        """
        await send_file(self.link, self._settings.cluster, token, self._settings.runtime / h.MOVED_FILE)

    async def look(
        self,
        *,
        only_look: bool,
        fresh: bool = False,
        peers: list[h.PeerKey] | None = None,
        token: str = "",
        timeout: float = ANSWER_S,
    ) -> h.HeadState:
        """How the head is, which is started unless ``only_look``, with ``token`` from what was handed over.

        Raises:
            HeadRefuses: it is not started; a RequestError.
            RequestError: no answer came.
        """
        settings = self._settings
        state, _ = await self.link.ask(
            lambda ticket: h.StartHead(
                ticket=ticket, cluster=settings.cluster, only_look=only_look, fresh=fresh,
                directory=settings.directory, lease=settings.head_lease, agent_lease=settings.agent_lease,
                peers=peers or [], token=token,
            ),
            h.HeadState,
            timeout,
        )  # fmt: skip
        if state.error:
            raise HeadRefuses(state.error, state.begun)
        return state

    def send(self, number: int, data: bytes | None, opens: bool = True) -> None:
        """``data``, a message of view ``number``, goes to the head; None: that view has left. Nothing where no link is
        there yet. ``opens``: it may be the view's first word."""
        if self._owner.head is not None:
            cluster, epoch = self._settings.cluster, self.state.epoch
            message = h.ToHead(cluster=cluster, view=number, epoch=epoch, opens=opens)
            self._owner.head.send(message, [data] if data is not None else [])

    async def ask(self, body: Any, view: int = OWN_VIEW, *, opens: bool = True) -> Any:
        """What the head answers this window's own view, or in the place of ``view``; ``opens``: it may be its first
        word.

        Raises:
            RequestError: it does not, or cannot do it.
        """
        number = next(self._numbers)
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        self.send(view, encode(v.Request(id=number, body=body)), opens)
        try:
            reply = await asyncio.wait_for(future, 60)
        except TimeoutError:
            raise RequestError(f"the head of cluster {self._settings.cluster!r} has not answered for 60 s") from None
        finally:
            del self._questions[number]
        if reply.error:
            raise RequestError(reply.error)
        return reply.value

    async def ask_view(self, number: int) -> KeptView:
        """What the frozen head knows of view ``number``, to which all of its words have gone when this returns."""
        return msgspec.convert(await self.ask(DescribeView(), number, opens=True), KeptView)

    def gone(self) -> None:
        """Its process has ended: nobody answers what was asked."""
        for future in self._questions.values():
            if not future.done():
                future.set_result(v.Reply(id=0, error=f"the head on {self._settings.head} was ended or started again"))

    def takes(self, data: bytes) -> bool:
        """False: it is no answer to what this window has asked."""
        if not self._questions:
            return False
        message = decode(data, v.Incoming)
        future = self._questions.get(message.id) if isinstance(message, v.Reply) else None
        if future is not None and not future.done():
            future.set_result(message)
        return future is not None
