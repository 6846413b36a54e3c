"""The process of a cluster on its owner's machine: it leads the cluster or, while a head does, is the window to it.
When the cluster is handed over it goes from one to the other, and its views stay."""

import asyncio
import logging
import secrets
from pathlib import Path

import msgspec

from notebook_cluster.coordinator.service import Coordinator
from notebook_cluster.coordinator.startup import Settings, StartProgress, read_own_agent
from notebook_cluster.coordinator.view_server import View, ViewServer
from notebook_cluster.journal.moving import note_moved, read_moved, settle, size_of, stage
from notebook_cluster.journal.reading import read_state
from notebook_cluster.journal.store import journal_path
from notebook_cluster.protocol.hand_over import HERE, HandOver, Moved
from notebook_cluster.protocol.heads import MOVED_FILE
from notebook_cluster.protocol.views import Request, RequestError
from notebook_cluster.window.journal_copy import bring_moved, forget_moved
from notebook_cluster.window.local_agent import own_agent
from notebook_cluster.window.moves import (
    FrozenHead,
    Unreached,
    admit,
    begin,
    cannot_move,
    places_of,
    prepare,
)
from notebook_cluster.window.service import LeftToOwner, NotBegun, Window
from notebook_cluster.window.settings import HEAD_FILE, WindowSettings, write_note

log = logging.getLogger(__name__)

FOLLOW_S = 15.0
"""For agents to follow the coordinator here, before the grant of the head is taken back from the others."""
LOOK_S = 0.1
BEGUN_FROM = "begun-from"
"""In the cluster's folder: the token of the hand over after which it was led from here."""


class _Failed(RequestError):
    """A hand over was given up after the coordinator had ended: ``after`` goes on in its place."""

    def __init__(self, error: str, after: Coordinator) -> None:
        super().__init__(error)
        self.after = after


Role = Coordinator | Window
"""What this process is for its views."""


class Seat:
    """Args:
    settings: of a coordinator here; what a window needs is made of it.
    head: the peer that leads now; see :class:`.settings.WindowSettings`.
    """

    def __init__(self, settings: Settings, window: WindowSettings, progress: StartProgress) -> None:
        self._settings = settings
        self._window_settings = window
        self._progress = progress
        self._role: Role
        self._moving: asyncio.Task[Role | None] | None = None
        self._to = ""
        self._onward: tuple[View, Request] | None = None
        """A hand over from one peer to another, of which the way to this machine is done."""
        self._after: asyncio.Task[None] | None = None
        self._answering: asyncio.Task[None] | None = None

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
                role = await self._take_back(role)
                continue
            except NotBegun as error:
                assert isinstance(role, Window)
                role = await self._complete(role, str(error))
                continue
            role = await self._next()
        if self._after is not None:
            await self._after

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
        return await moving

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
        self._to = body.to if body.to != HERE else "this machine"
        led = role.settings.head if isinstance(role, Window) else HERE
        if body.to == led:
            where = f"from {led}" if led != HERE else "from this machine"
            role.views.refuse(view, request, f"cluster {self._cluster!r} is led {where} already")
            return
        self._moving = asyncio.create_task(self._move(role, view, request, body))

    async def _move(self, role: Role, view: View, request: Request, body: HandOver) -> Role | None:
        """Returns the role after it, when one has left its views."""
        log.info("cluster %s is handed over to %s", self._cluster, self._to)
        error, after = "", role
        try:
            if isinstance(role, Window):
                after = await self._back(role)
            else:
                after = await self._away(role, body)
        except _Failed as failed:
            error, after = str(failed), failed.after
        except (RequestError, OSError, ValueError) as trouble:
            error = str(trouble)
        except Exception as trouble:
            log.exception("the hand over failed")
            error = f"{type(trouble).__name__}: {trouble}"
        if role.views.has_left and after is role:
            return None
        if not error and isinstance(role, Window) and body.to != HERE:
            self._onward = view, request
        else:
            led = after.settings.head if isinstance(after, Window) else ""
            self._answering = asyncio.create_task(_answer(after, view, request, error, led))
        if after is role:
            self._moving = None
            return None
        return after

    # ---- from here to a head

    async def _away(self, role: Coordinator, body: HandOver) -> Role:
        if why := cannot_move(role.core.state):
            raise RequestError(f"cluster {self._cluster!r} cannot be handed over: {why}")
        settings = self._window_settings
        window = Window(msgspec.structs.replace(settings, head=body.to, code=body.code), StartProgress())
        try:
            await prepare(window, places_of(role.core.state), size_of(self._runtime))
        except BaseException:
            await window.discard(window.owner.granted())
            raise
        token = secrets.token_hex(8)
        try:
            moved = await role.freeze(token)
        except RequestError as error:
            await window.discard(window.owner.granted())
            if not role.views.has_left:
                raise
            raise _Failed(str(error), self._again(role, Moved(token=token))) from None
        try:
            await window.head.send_moved(token)
            assert window.owner.head is not None
            agent = own_agent(self._runtime)
            write_note(self._runtime, window.owner.head.candidate, token)
            self._leave(role, window.owner.head.candidate.name, token)
            await begin(window, token, role.views, agent)
        except Unreached as error:
            # The head has the word. A window that is opened later finds out what has become of it.
            role.views.say_last(str(error))
            await window.discard([])
            raise
        except (RequestError, OSError) as error:
            (self._runtime / HEAD_FILE).unlink(missing_ok=True)
            await window.discard(window.owner.granted())
            raise _Failed(str(error), self._again(role, moved)) from None
        role.ending.gone()
        (self._runtime / MOVED_FILE).unlink(missing_ok=True)
        window.show(window.views.start())
        return window

    async def _complete(self, window: Window, token: str) -> Role:
        """A process before this one has ended in the middle of a hand over, perhaps after its coordinator had."""
        state = read_state(journal_path(self._runtime))
        if state.left != token:
            await window.discard([])
            (self._runtime / HEAD_FILE).unlink(missing_ok=True)
            return self._coordinator(None)
        try:
            for trouble in await admit(window, places_of(state), size_of(self._runtime)):
                log.warning("%s", trouble)
            await window.head.send_moved(token)
            await begin(window, token, None, own_agent(self._runtime))
        except BaseException:
            await window.close()
            raise
        (self._runtime / MOVED_FILE).unlink(missing_ok=True)
        window.show(window.views.start())
        return window

    def _leave(self, role: Coordinator, to: str, token: str) -> None:
        """RequestError: it is not in the journal, and never will be."""
        try:
            role.ending.leave(to, token)
        except RequestError:
            role.ending.gone()
            if read_state(journal_path(self._runtime)).left != token:
                raise

    def _again(self, role: Coordinator, moved: Moved) -> Coordinator:
        """Lead from here as before, in a higher epoch."""
        role.ending.gone()
        moved.same_machine = True
        note_moved(self._runtime, moved)
        return self._coordinator(role.views)

    def _coordinator(self, before: ViewServer | None) -> Coordinator:
        settings = msgspec.structs.replace(self._settings, resume=True)
        return Coordinator(settings, self._progress, before)

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
            stage(self._runtime / MOVED_FILE, self._runtime)
            await head.leave("the machine of its owner")
        except BaseException:
            window.views.go_on()
            raise
        finally:
            head.close()
        return await self._begin_here(window, token)

    async def _take_back(self, window: Window) -> Coordinator:
        """A process before this one has ended in the middle of a hand over, after the head had."""
        head = window.owner.head
        assert head is not None
        token = window.head.state.left
        mark = self._runtime / BEGUN_FROM
        if mark.exists() and mark.read_text() == token:
            await window.close()
            raise RequestError(f"no cluster {self._cluster!r} runs: it was led from this machine, and has ended")
        await bring_moved(head, self._cluster, self._runtime)
        stage(self._runtime / MOVED_FILE, self._runtime)
        return await self._begin_here(window, token)

    async def _begin_here(self, window: Window, token: str) -> Coordinator:
        """From what is staged, with the views of ``window``."""
        window.views.leave()
        window.end()
        settle(self._runtime)
        moved = read_moved(self._runtime)
        moved.addresses = {row.key: row.address for row in window.owner.places()}
        note_moved(self._runtime, moved)
        (self._runtime / BEGUN_FROM).write_text(token)
        (self._runtime / HEAD_FILE).unlink(missing_ok=True)
        coordinator = self._coordinator(window.views if window.views.started else None)
        self._after = asyncio.create_task(self._let_go(window, coordinator))
        return coordinator

    async def _let_go(self, window: Window, coordinator: Coordinator) -> None:
        """The head, and the agents that follow it no more, when the coordinator here leads."""
        head = window.owner.head
        assert head is not None
        agent = read_own_agent(self._runtime)
        keys = [*window.owner.granted(), *([agent.public_key] if agent is not None else [])]
        try:
            await asyncio.wait_for(self._followed(keys, coordinator), FOLLOW_S)
        except TimeoutError:
            log.warning("not all agents have followed the coordinator here within %g s", FOLLOW_S)
        if agent is not None:
            await window.follow(agent, "", "")
        try:
            await forget_moved(head, self._cluster)
        except RequestError as error:
            log.warning("%s", error)
        await window.discard([key for key in window.owner.granted() if not coordinator.links.is_waited_for(key)])
        (self._runtime / MOVED_FILE).unlink(missing_ok=True)

    @staticmethod
    async def _followed(keys: list[str], coordinator: Coordinator) -> None:
        await coordinator.begun.wait()
        while any(coordinator.links.is_waited_for(key) for key in keys):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


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
