"""From a coordinator on its owner's machine to a head: each step in its order, and the way back from each."""

import logging
import secrets

import msgspec

from notebook_cluster.coordinator.service import Coordinator
from notebook_cluster.coordinator.startup import Settings, StartProgress
from notebook_cluster.coordinator.view_server import ViewServer
from notebook_cluster.journal.moving import note_moved, size_of
from notebook_cluster.journal.reading import read_state
from notebook_cluster.journal.store import journal_path
from notebook_cluster.protocol.hand_over import HandOver, Moved
from notebook_cluster.protocol.heads import MOVED_FILE
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.window.local_agent import agent_of
from notebook_cluster.window.moves import Unreached, admit, begin, cannot_move, places_of, prepare
from notebook_cluster.window.service import Window
from notebook_cluster.window.settings import HEAD_FILE, WindowSettings, write_note

log = logging.getLogger(__name__)


class HandOverFailed(RequestError):
    """A hand over was given up after the coordinator had ended: ``after`` goes on in its place."""

    def __init__(self, error: str, after: Coordinator) -> None:
        super().__init__(error)
        self.after = after


class Departures:
    """Of one seat: ``settings`` of its coordinators, ``window`` of its windows."""

    def __init__(self, settings: Settings, window: WindowSettings, progress: StartProgress) -> None:
        self._settings = settings
        self._window_settings = window
        self._progress = progress

    async def prepared(self, role: Coordinator, body: HandOver) -> Window:
        """A window to a head that can lead; RequestError: it cannot."""
        if why := cannot_move(role.core.state):
            raise RequestError(f"cluster {self._settings.cluster!r} cannot be handed over: {why}")
        settings = self._window_settings
        window = Window(msgspec.structs.replace(settings, head=body.to, code=body.code), StartProgress())
        try:
            await prepare(window, places_of(role.core.state), size_of(self._settings.runtime))
        except BaseException:
            await discard(window)
            raise
        return window

    async def go(self, role: Coordinator, body: HandOver) -> Window:
        """The window to the head that leads now.

        Raises:
            RequestError: ``role`` goes on.
            HandOverFailed: it is over, and its ``after`` is to go on.
            Unreached: nobody here may lead, for the head may; views have been told.
        """
        window = await self.prepared(role, body)
        token = secrets.token_hex(8)
        try:
            moved = await role.freeze(token)
        except Exception as error:
            await discard(window)
            if not role.views.has_left:
                raise
            raise HandOverFailed(str(error), self._again(role, Moved(token=token))) from None
        try:
            await window.head.send_moved(token)
            head = window.head.link.candidate
            write_note(self._settings.runtime, head, token)
            self._leave(role, head.name, token)
            await begin(window, token, role.views, agent_of(role.core.state))
        except Unreached as error:
            # The head has the word. A window that is opened later finds out what has become of it.
            role.views.say_last(str(error))
            await window.discard([])
            raise
        except Exception as error:
            expected = isinstance(error, RequestError | OSError)
            level = logging.WARNING if expected else logging.ERROR
            log.log(level, "the hand over is taken back: %s", error, exc_info=not expected)
            (self._settings.runtime / HEAD_FILE).unlink(missing_ok=True)
            await discard(window)
            raise HandOverFailed(str(error), self._again(role, moved)) from None
        role.ending.gone()
        (self._settings.runtime / MOVED_FILE).unlink(missing_ok=True)
        window.show(window.views.start())
        window.views.go_on()
        return window

    async def complete(self, window: Window, token: str) -> Coordinator | Window:
        """A process before this one has ended in the middle of a hand over, perhaps after its coordinator had."""
        state = read_state(journal_path(self._settings.runtime))
        if state.left != token:
            await window.discard([])
            (self._settings.runtime / HEAD_FILE).unlink(missing_ok=True)
            return self.coordinator(None)
        try:
            size = size_of(self._settings.runtime)
            for trouble in await admit(window, places_of(state), size, all_of_them=False):
                log.warning("%s", trouble)
            await window.head.send_moved(token)
            await begin(window, token, None, agent_of(state))
        except Unreached:
            await window.close()
            raise
        except (RequestError, OSError) as error:
            # Its agent has said that it has not begun.
            log.warning("cluster %s is led from here again: %s", self._settings.cluster, error)
            await discard(window)
            (self._settings.runtime / HEAD_FILE).unlink(missing_ok=True)
            return self.coordinator(None)
        (self._settings.runtime / MOVED_FILE).unlink(missing_ok=True)
        window.show(window.views.start())
        return window

    def _leave(self, role: Coordinator, to: str, token: str) -> None:
        """RequestError: it is not in the journal, and never will be."""
        try:
            role.ending.leave(to, token)
        except RequestError:
            role.ending.gone()
            if read_state(journal_path(self._settings.runtime)).left != token:
                raise

    def _again(self, role: Coordinator, moved: Moved) -> Coordinator:
        """Lead from here as before, in a higher epoch."""
        role.ending.gone()
        moved.same_machine = True
        note_moved(self._settings.runtime, moved)
        return self.coordinator(role.views)

    def coordinator(self, before: ViewServer | None) -> Coordinator:
        """Goes on from the journal here, with the views of ``before``."""
        settings = msgspec.structs.replace(self._settings, resume=True)
        return Coordinator(settings, self._progress, before)


async def discard(window: Window) -> None:
    """Nothing comes of it: nobody obeys the head."""
    await window.discard(window.owner.granted())
