"""The process of a cluster on its owner's machine: it leads the cluster or, while a head does, is the window to it.
When the cluster is handed over it goes from one to the other, and its views stay."""

import asyncio
import logging
import secrets
import time
from pathlib import Path
from typing import Any

from notebook_cluster.coordinator.service import Coordinator
from notebook_cluster.coordinator.startup import Settings, StartProgress, read_own_agent
from notebook_cluster.coordinator.view_server import View
from notebook_cluster.journal.moving import BEGUN_FROM, note_moved, read_moved, settle, stage
from notebook_cluster.protocol.hand_over import HERE, HandOver
from notebook_cluster.protocol.heads import MOVED_FILE
from notebook_cluster.protocol.views import Request, RequestError
from notebook_cluster.window.before_sleep import BeforeSleep
from notebook_cluster.window.departures import Departures, HandOverFailed, discard
from notebook_cluster.window.journal_copy import bring_moved, forget_moved
from notebook_cluster.window.moves import FrozenHead
from notebook_cluster.window.service import LeftToOwner, NotBegun, Window
from notebook_cluster.window.settings import HEAD_FILE, WindowSettings

log = logging.getLogger(__name__)

FOLLOW_S = 15.0
"""For agents to follow the coordinator here, before the grant of the head is taken back from the others."""
LOOK_S = 0.1
GOODBYE_S = 5.0
"""When the cluster has ended: for what the last hand over has left to do. Who does not hear of it has its grant end."""

Role = Coordinator | Window
"""What this process is for its views."""


class Seat:
    """Args:
    settings: of the coordinators here.
    window: of the windows here; its ``head`` leads the cluster now, empty: a coordinator here does.
    progress: of the first of them.
    """

    def __init__(self, settings: Settings, window: WindowSettings, progress: StartProgress) -> None:
        self._settings = settings
        self._window_settings = window
        self._progress = progress
        self._departures = Departures(settings, window, progress)
        self._role: Role
        self._moving: asyncio.Task[Any] | None = None
        self._to = ""
        self._asked: tuple[View, Request] | None = None
        """Who has asked for the last one, until it is answered."""
        self._onward: tuple[View, Request] | None = None
        """A hand over from one peer to another, of which the way to this machine is done."""
        self._after: asyncio.Task[None] | None = None
        self._answering: asyncio.Task[None] | None = None
        self._notices: BeforeSleep | None = None

    async def run(self) -> None:
        """Until the cluster has ended, or nobody looks through the window.

        Raises:
            RequestError, ValueError, OSError: it cannot begin, or go on; one line.
        """
        role: Role | None = self._first()
        while role is not None:
            self._role = role
            role.views.on_hand_over = self._wanted
            if self._onward is not None:
                onward, self._onward = self._onward, None
                self._wanted(*onward)
            try:
                await role.run()
            except LeftToOwner:
                assert isinstance(role, Window)
                await self._give_up_moving()
                role = await self._take_back(role)
                continue
            except NotBegun as error:
                assert isinstance(role, Window)
                role = await self._departures.complete(role, str(error))
                continue
            role = await self._next()
        if self._notices is not None:
            self._notices.close()
        if self._after is not None:
            await asyncio.wait({self._after}, timeout=GOODBYE_S)
            self._after.cancel()
            await asyncio.gather(self._after, return_exceptions=True)

    def _first(self) -> Role:
        if self._window_settings.head:
            return Window(self._window_settings, self._progress)
        return Coordinator(self._settings, self._progress)

    async def _next(self) -> Role | None:
        """What this process is after the role that has ended."""
        moving, self._moving = self._moving, None
        if moving is None:
            return None
        if not self._role.views.has_left:
            moving.cancel()  # the cluster has ended before anything was handed over
            await asyncio.gather(moving, return_exceptions=True)
            return None
        after: Role | None = await moving
        return after

    async def _give_up_moving(self) -> None:
        """The head has left while nobody knew it here: what was under way is over, and so is what it has asked."""
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)

    @property
    def _runtime(self) -> Path:
        return self._settings.runtime

    @property
    def _cluster(self) -> str:
        return self._settings.cluster

    # ---- what views ask for

    def _wanted(self, view: View, request: Request) -> None:
        body = request.body
        assert isinstance(body, HandOver)
        role = self._role
        if self._moving is not None:
            role.views.refuse(view, request, f"cluster {self._cluster!r} is being handed over to {self._to} already")
            return
        led = role.settings.head if isinstance(role, Window) else HERE
        if body.to == led and not body.survive:
            where = f"from {led}" if led != HERE else "from this machine"
            role.views.refuse(view, request, f"cluster {self._cluster!r} is led {where} already")
            return
        self._to, self._asked = (body.to if body.to != HERE else "this machine"), (view, request)
        if body.survive:
            self._moving = asyncio.create_task(self._arm(role, view, request, body))
        else:
            self._moving = asyncio.create_task(self._move(role, body, (view, request)))

    async def _move(self, role: Role, body: HandOver, asked: tuple[View, Request] | None) -> Role | None:
        """Returns the role after it, when one has left its views. ``asked``: who gets the answer."""
        log.info("cluster %s is handed over to %s", self._cluster, self._to)
        error, after = "", role
        if self._after is not None:
            await asyncio.gather(self._after, return_exceptions=True)  # what the last one has left to do
        try:
            if isinstance(role, Window):
                after = await self._back(role)
            else:
                after = await self._departures.go(role, body)
        except HandOverFailed as failed:
            error, after = str(failed), failed.after
        except (RequestError, OSError, ValueError) as trouble:
            error = str(trouble)
        except Exception as trouble:
            log.exception("the hand over failed")
            error = f"{type(trouble).__name__}: {trouble}"
        if role.views.has_left and after is role:
            return None
        if not error and isinstance(role, Window) and body.to != HERE:
            self._onward = asked
        elif asked is not None:
            led = after.settings.head if isinstance(after, Window) else ""
            self._asked = None
            self._answering = asyncio.create_task(_answer(after, *asked, error, led))
        elif error:
            log.warning("cluster %s is not handed over to %s: %s", self._cluster, body.to, error)
        if after is role:
            self._moving = None
            return None
        return after

    # ---- when this machine is about to sleep

    async def _arm(self, role: Role, view: View, request: Request, body: HandOver) -> None:
        """From now on the cluster is handed over each time that this machine is about to sleep while it leads."""
        try:
            if self._notices is not None:
                self._notices.close()
                self._notices = None
            if body.to != HERE:
                if isinstance(role, Coordinator):
                    await discard(await self._departures.prepared(role, body))
                notices = BeforeSleep(lambda: self._sleeps(body))
                await notices.start()
                self._notices = notices
        except (RequestError, OSError) as error:
            role.views.refuse(view, request, str(error))
        else:
            role.views.answer(view, request, role.settings.head if isinstance(role, Window) else "")
        finally:
            self._moving = None

    async def _sleeps(self, body: HandOver) -> None:
        if isinstance(self._role, Coordinator) and self._moving is None:
            self._to = body.to
            self._moving = asyncio.create_task(self._move(self._role, body, None))
            await asyncio.wait({self._moving})

    # ---- from a head to here

    async def _back(self, window: Window) -> Role:
        token = secrets.token_hex(8)
        window.views.hold()
        head = FrozenHead(window, token)
        try:
            if busy := await window.views.quiet(5.0):
                raise RequestError(f"cluster {self._cluster!r} cannot move now: {busy} is being done; try it again")
            await head.freeze()
            await head.bring()
            await asyncio.to_thread(stage, self._runtime / MOVED_FILE, self._runtime)
            await head.leave("the machine of its owner")
        except BaseException:
            window.views.go_on()
            raise
        finally:
            head.close()
        return await self._begin_here(window, token)

    async def _take_back(self, window: Window) -> Coordinator:
        """A process before this one has ended in the middle of a hand over, after the head had."""
        token = window.head.state.left
        mark = self._runtime / BEGUN_FROM
        if mark.exists() and mark.read_text() == token:
            await window.close()
            raise RequestError(f"no cluster {self._cluster!r} runs: it was led from this machine, and has ended")
        window.views.hold()
        try:
            await bring_moved(window.head.link, self._cluster, self._runtime)
            await asyncio.to_thread(stage, self._runtime / MOVED_FILE, self._runtime)
        except BaseException:
            await window.close()
            raise
        coordinator = await self._begin_here(window, token)
        asked, self._asked = self._asked, None
        if asked is not None:
            self._answering = asyncio.create_task(_answer(coordinator, *asked, "", ""))
        return coordinator

    async def _begin_here(self, window: Window, token: str) -> Coordinator:
        """From what is staged, with the views of ``window``. RequestError: that has ended meanwhile."""
        if window.ending:
            raise RequestError(f"the window to cluster {self._cluster!r} ends")
        window.views.leave()
        window.end()
        settle(self._runtime)
        moved = read_moved(self._runtime)
        moved.addresses = {row.key: row.address for row in window.owner.places()}
        note_moved(self._runtime, moved)
        (self._runtime / HEAD_FILE).unlink(missing_ok=True)
        (self._runtime / BEGUN_FROM).write_text(token)
        coordinator = self._departures.coordinator(window.views if window.views.started else None)
        self._after = asyncio.create_task(self._let_go(window, coordinator))
        return coordinator

    async def _let_go(self, window: Window, coordinator: Coordinator) -> None:
        """The head, and the agents that follow it no more, when the coordinator here leads."""
        agent = read_own_agent(self._runtime)
        keys = [*window.owner.granted(), *([agent.public_key] if agent is not None else [])]
        try:
            if not await self._followed(keys, coordinator):
                log.warning("not all agents have followed the coordinator here within %g s", FOLLOW_S)
            if agent is not None and not coordinator.ending.closing():  # it ends with the cluster
                await window.follow(agent, "", "")
            await forget_moved(window.head.link, self._cluster)
        except RequestError as error:
            log.warning("%s", error)
        except Exception:
            log.exception("not all is done that the hand over had left to do")
        finally:
            await window.discard([key for key in window.owner.granted() if not coordinator.links.is_waited_for(key)])
            (self._runtime / MOVED_FILE).unlink(missing_ok=True)

    @staticmethod
    async def _followed(keys: list[str], coordinator: Coordinator) -> bool:
        """Whether they all have, when that is known: nobody follows one that ends."""
        deadline = time.monotonic() + FOLLOW_S
        while not coordinator.ending.closing():
            if coordinator.begun.is_set() and not any(coordinator.links.is_waited_for(key) for key in keys):
                return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_S)
        return True


async def _answer(role: Role, view: View, request: Request, error: str, led: str) -> None:
    """Of a coordinator when it leads."""
    if isinstance(role, Coordinator):
        await role.begun.wait()
    if error:
        role.views.refuse(view, request, error)
    else:
        role.views.answer(view, request, led)


def window_of(settings: Settings) -> WindowSettings:
    """For a window in the place of a coordinator with ``settings``; its head is still to be named."""
    return WindowSettings(
        settings.cluster, "", settings.directory, settings.runtime, lease=settings.lease,
        agent_lease=settings.agent_lease, known=settings.known,
    )  # fmt: skip


def coordinator_of(settings: WindowSettings) -> Settings:
    """For a coordinator in the place of a window with ``settings``."""
    return Settings(
        settings.cluster, settings.directory, settings.runtime, lease=settings.lease,
        agent_lease=settings.agent_lease, known=settings.known,
    )  # fmt: skip
