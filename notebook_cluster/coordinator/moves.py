"""A head whose cluster moves: what its owner's window says to it before it ends, and before it begins."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.view_server import View
from notebook_cluster.protocol import hand_over as o
from notebook_cluster.protocol.hand_over import Moved
from notebook_cluster.protocol.views import RequestError

log = logging.getLogger(__name__)

BEGINS_S = 5.0
"""Seconds that a coordinator waits for the views of the one before it."""
SAID_S = 0.2
"""For the last reply to be sent."""


class HeadMoves:
    """Args:
    is_head: this process is one; else it moves without a word over this socket.
    calm, freeze, leave: as of :class:`.ending.Ending`.

    Attributes:
        begun: set when the cluster goes on.
    """

    def __init__(
        self,
        core: Core,
        *,
        is_head: bool,
        calm: Callable[[int], Awaitable[None]],
        freeze: Callable[[str], Awaitable[Moved]],
        leave: Callable[[str, str], None],
        runtime: Path,
    ) -> None:
        self._core = core
        self._is_head = is_head
        self._calm = calm
        self._freeze = freeze
        self._leave = leave
        self._runtime = runtime
        self._begins = asyncio.Event()
        self.begun = asyncio.Event()
        self._freezing: asyncio.Task[None] | None = None
        self._given_up: asyncio.TimerHandle | None = None
        self._late = False
        self._over = ""
        """The token of the hand over that has failed last."""

    async def views_are_here(self) -> None:
        """Return when the window has said which views there are, or says nothing."""
        try:
            await asyncio.wait_for(self._begins.wait(), BEGINS_S)
        except TimeoutError:
            self._late = True
            self._core.tell("warning", "no word of who looks: views have to attach again")

    async def handle(self, view: View, body: Any) -> Any:
        """Do what the window asks for. RequestError: why not."""
        if isinstance(body, o.HandOver) or not self._is_head:
            raise RequestError(f"this coordinator does not take {type(body).__name__}")
        match body:
            case o.Freeze():
                await self._frozen(body)
            case o.DescribeView():
                return view.kept()
            case o.Leave():
                self._depart(body)
            case o.TakeView():
                if self._late:
                    raise RequestError("the coordinator has begun without its views")
                view.take(body.view)
            case o.GoOn():
                self._begins.set()
                await self.begun.wait()
        return None

    async def _frozen(self, body: o.Freeze) -> None:
        if body.epoch != self._core.state.epoch:
            raise RequestError("the coordinator that was to move was started again")
        if body.token == self._over:
            raise RequestError("this hand over has been given up")
        if self._freezing is None:
            self._freezing = asyncio.ensure_future(self._calm_and_freeze(body))
        if self._given_up is not None:
            self._given_up.cancel()
        self._given_up = asyncio.get_running_loop().call_later(o.FROZEN_S, self._nobody_goes_on)
        try:
            await asyncio.shield(self._freezing)
        except Exception:
            self._given_up.cancel()
            if self._core.journal.frozen:
                asyncio.get_running_loop().call_later(SAID_S, self._end)
            self._freezing, self._over = None, body.token
            raise

    async def _calm_and_freeze(self, body: o.Freeze) -> None:
        await self._calm(body.room)
        await self._freeze(body.token)  # in the same step of the loop

    def _nobody_goes_on(self) -> None:
        """The window is gone: before the freezing all is as it was."""
        if self._core.journal.frozen:
            self._end()
        elif self._freezing is not None:
            self._freezing.cancel()
            self._freezing = None

    def _depart(self, body: o.Leave) -> None:
        if self._freezing is None or not self._freezing.done() or not self._core.journal.frozen:
            raise RequestError("the coordinator goes on: it is not frozen")
        if self._given_up is not None:
            self._given_up.cancel()
        try:
            self._leave(body.to, body.token)
        finally:
            asyncio.get_running_loop().call_later(SAID_S, self._end)

    def _end(self) -> None:
        """This process: its agent starts it again, unless its journal says that it leads no more."""
        log.info("the process of this head ends")
        (self._runtime / "connection.json").unlink(missing_ok=True)
        end_process()


def end_process() -> None:
    """At once: what is open is of no use to the next one."""
    logging.shutdown()
    os._exit(0)
