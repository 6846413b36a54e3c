"""The life of a window: reaches the head or has it started, passes on what views say, ends when nobody looks."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Collection
from typing import Any

import msgspec
import zmq

from notebook_cluster.coordinator.core import LOCAL, Level
from notebook_cluster.coordinator.peers.pairing import Pairing
from notebook_cluster.coordinator.startup import PrivateAgent, StartProgress
from notebook_cluster.journal.kept_runs import set_aside
from notebook_cluster.journal.store import JOURNAL_FILE
from notebook_cluster.peering.candidates import Trust, known_peers
from notebook_cluster.peering.peer_finder import PeerFinder
from notebook_cluster.protocol import encode
from notebook_cluster.protocol import heads as h
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.interaction import NoteEvent
from notebook_cluster.protocol.state import ClusterView
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import announce, data_directory, load_identity, owner, withdraw
from notebook_cluster.window.admission import HERE, NodeAdmission
from notebook_cluster.window.head_link import HeadLink
from notebook_cluster.window.journal_copy import bring_files
from notebook_cluster.window.local_agent import LocalAgent
from notebook_cluster.window.owner import Owner
from notebook_cluster.window.settings import HEAD_FILE, WindowSettings, read_note, write_files
from notebook_cluster.window.views import OWN_VIEW, WindowViews

log = logging.getLogger(__name__)

TICK = 0.25
TRUST_PERIOD = 0.5
PATIENCE_S = 60.0
"""Seconds of awake time that views wait for a head which cannot be reached."""
CHECK_S = 2.0
"""Seconds between two looks, while the head does not answer, at whether it runs."""
SAY_AGAIN_S = 1.0
"""Seconds between two words about how far the start is: one that says nothing for long is ended by who started it."""


class LeftToOwner(RequestError):
    """The head has handed the cluster over to this machine, where nobody has begun it yet."""


class NotBegun(RequestError):
    """A hand over to the head was broken off when this machine led no more; the text is its token."""


class Window:
    """Made inside the running loop; ends with :meth:`run`."""

    def __init__(self, settings: WindowSettings, progress: StartProgress) -> None:
        self.settings = settings
        self._progress = progress
        self._doing = f"to be led from {settings.head}: looking for it"
        self.context: zmq.Context[Any] = zmq.Context()
        self.identity = identity = load_identity(data_directory())
        self._announcement = announce("coordinator", identity.public_key, settings.cluster)
        self.trust = Trust()
        self.finder = PeerFinder(
            self.context, self.trust, known_peers(settings.known), lambda new: self._admission.found(new)
        )
        self._pairing = Pairing(settings.cluster, self.context, identity, self.trust, self._tell)
        self.owner = Owner(
            self.context, identity, settings.cluster, self.finder, self.trust, self._pairing, self._tell_peers
        )
        self.head = HeadLink(settings, self.owner, on_view=self._from_head, on_condition=self._condition)
        self.local = LocalAgent(settings.runtime, settings.agent_lease)
        self._admission = NodeAdmission(
            settings.cluster, owner=self.owner, local=self.local, pairing=self._pairing, trust=self.trust,
            head=lambda: self.head.state, ask=self.head.ask, tell=self._tell, spawn=self._spawn,
        )  # fmt: skip
        self.views = WindowViews(self._admission.prepare, HERE, self.head.send, self._trouble)
        self._away, self._away_since = "", 0.0
        """Why the head cannot be reached now, and since when (monotonic: a sleep of this machine does not count)."""
        self.handed_over = self.ending = False
        self._stopping = asyncio.Event()
        self._ended = ""
        self._looking: asyncio.Task[None] | None = None
        self._to_look = False  # something was heard of a head before this one was known to run
        self._tasks: set[asyncio.Task[Any]] = set()
        self._needed = time.monotonic()

    # ---- life

    async def run(self) -> None:
        """Serve until nobody looks for the lease, until the cluster has ended or has been handed over, or until
        SIGTERM.

        Raises:
            RequestError: the head cannot be reached, or does not start.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stopping.set)
        saying = asyncio.create_task(self._say_again())
        try:
            if not self.head.state.running:
                await self._reach()
                self.show(self.views.start())
            saying.cancel()
            self._progress.close()
            if self._to_look:
                self._look_at_head()
            await self._serve()
            if self.head.state.left and not self.head.state.running and not self.handed_over:
                raise LeftToOwner("the cluster has been handed over to this machine")
        except (LeftToOwner, NotBegun):
            raise
        except BaseException:
            await self.close()
            raise
        else:
            if not self.handed_over:
                await self.close()
        finally:
            saying.cancel()

    def show(self, address: str) -> None:
        """Views find this window at ``address`` from now on. OSError: its files cannot be written."""
        write_files(self.settings, self.views, address, self.head.link.candidate, self.head.state)

    def end(self) -> None:
        """The cluster has been handed over to this machine: :meth:`run` returns, views stay."""
        self.handed_over = True
        self._stopping.set()

    async def _say_again(self) -> None:
        """What it waits for, as long as it starts."""
        while True:
            self._progress.say(self._doing)
            await asyncio.sleep(SAY_AGAIN_S)

    async def _reach(self) -> None:
        """From the name of a peer to a head that runs and may be obeyed."""
        settings = self.settings
        if (trouble := await self.finder.start()) is not None:
            self._tell("warning", trouble)
        candidate = await self.head.dial(self.context, self.identity)
        self._doing = f"being led from {candidate.name}: waiting for its coordinator there"
        # Its own agent is the first that it may use.
        me = self.trust.store.find(candidate.key)
        row = h.PeerKey(
            candidate.name, candidate.key, me.owner if me is not None else owner(), f"127.0.0.1:{candidate.port}"
        )
        note = read_note(settings.runtime)
        token = note.token if note is not None and not settings.fresh else ""
        self.head.state = await self.head.look(
            only_look=settings.only_look or bool(token), fresh=settings.fresh, peers=[row], token=token
        )
        if token and not self.head.state.running and not self.head.state.begun:
            raise NotBegun(token)
        if not self.head.state.running:
            if self.head.state.left:
                raise LeftToOwner(f"cluster {settings.cluster!r} is led from this machine now")
            self._doing = f"not led from {candidate.name} any more: bringing the journal of its last run"
            await self._bring_files()
            ended = self.head.state.ended or "none has run there"
            raise RequestError(f"no cluster {settings.cluster!r} runs on {candidate.name}: {ended}")
        used = await self._look_around() if self.head.state.found or token else None
        await self.owner.lead(self.head.state.key)
        if not self.head.state.found or not (settings.runtime / HEAD_FILE).exists():
            await asyncio.to_thread(set_aside, settings.runtime)  # what ran under this name before
        if used is not None:
            await self._take_up(used)

    async def _look_around(self) -> ClusterView:
        """It ran already: the peers that it uses stay its own, and this machine's agent is the one that it had."""
        state = msgspec.convert(await self.head.ask(v.GetState()), ClusterView)
        head, local = self.head.link.candidate.key, self.local.find(self.head.state.key)
        others = [peer for peer in state.peers if peer.key not in ("", head) and peer.name != LOCAL]
        self.owner.use(peer for peer in others if peer.condition not in ("found", "untrusted"))
        keys = [peer.key for peer in state.peers if peer.name == LOCAL]
        if local is not None:
            self.owner.use_local(local)
            await self._guide_local()
        elif (agent := next(map(self.local.known, keys), None)) is not None:  # not told where the cluster is led now
            self.owner.use_local(h.PeerKey(LOCAL, agent.public_key, owner()))
            await self.follow(agent, self.head.state.key, self.head.reception)
        return state

    async def _guide_local(self) -> None:
        """This machine's agent goes to where the head is now: it has another port when its journal was not begun."""
        if (agent := self.local.astray(self.head.state)) is not None:
            await self.follow(agent, self.head.state.key, self.head.reception)

    async def follow(self, agent: PrivateAgent, key: str, address: str) -> None:
        """As of :class:`.local_agent.LocalAgent`; why not becomes a line."""
        try:
            await self.local.follow(self.context, self.identity, self.settings.cluster, agent, key, address)
        except (RequestError, OSError) as error:
            self._tell("warning", f"the agent of this machine: {error}")

    async def _take_up(self, state: ClusterView) -> None:
        """Its peers are granted again."""
        used = {node.peer for node in state.nodes}
        keys = [peer.key for peer in state.peers if peer.name in used and peer.key]
        for line in await self.owner.take_up(key for key in keys if not self.owner.has(key)):
            self._tell("warning", line)

    async def _serve(self) -> None:
        checked = 0.0
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), TICK)
            now = time.monotonic()
            self.views.drop_silent()
            if self.views.looked_at:
                self._needed = now
            elif now - self._needed > self.settings.lease:
                log.info("nobody looked for %g s: the window ends, the cluster goes on", self.settings.lease)
                return
            if self._away and now - self._away_since > PATIENCE_S:
                self.views.close_all(self._away_line(), away=True)
            if now - checked > TRUST_PERIOD:
                checked = now
                if not await self.owner.drop_untrusted():
                    await self._give_up("its head is trusted no more")
                await self.owner.renew_if_due()

    async def _give_up(self, reason: str) -> None:
        """Withdraw the head: all agents end what it has there."""
        self._ended = reason
        self.local.end(self.head.state.key)  # it obeys the head by its key, without a grant
        await self.owner.withdraw()
        self._stopping.set()

    async def discard(self, withdraw_from: Collection[str]) -> None:
        """It is not the window to a head any more, or never was: the grant is taken back from the agents with these
        keys."""
        for task in list(self._tasks):
            task.cancel()
        await self.owner.withdraw(withdraw_from)
        await self.owner.close()
        await self.finder.close()
        self.context.destroy(linger=0)

    async def close(self) -> None:
        self.ending = True
        for task in list(self._tasks):
            task.cancel()
        settings = self.settings
        (settings.runtime / "connection.json").unlink(missing_ok=True)
        if self._ended:
            (settings.runtime / HEAD_FILE).unlink(missing_ok=True)
            self.views.close_all(self._ended, away=False)
        else:
            self.views.close_all(self._left_line(), away=True)
        with contextlib.suppress(Exception):
            await self.views.close()
        await self.owner.close()
        await self.finder.close()
        self.context.destroy(linger=0)
        withdraw(self._announcement)

    # ---- the link to the head

    def _from_head(self, number: int, frames: list[bytes]) -> None:
        if not frames and number == 0:
            self.head.gone()
            self._look_at_head()
        elif not frames:
            name = self.settings.cluster
            self.views.close_one(number, f"{self._where} was away from here for long: %cluster attach {name}")
        elif not self.head.takes(frames[0]) and number != OWN_VIEW:
            self.views.from_head(number, frames[0])

    def _condition(self, condition: str, reason: str) -> None:
        if condition in ("lost", "refused") and not self._away:
            # Views stay: what is for them waits there, and comes when the head can be reached again.
            self._away, self._away_since = reason or condition, time.monotonic()
            if condition == "refused":
                self.views.close_all(self._away_line(), away=True)
        elif condition == "connected" and self._away:
            self._away = ""
            # It may have ended, or been started again, meanwhile.
            self._look_at_head()

    def _trouble(self) -> str:
        return self._away_line() if self._away else ""

    @property
    def _where(self) -> str:
        return self.owner.head.candidate.name if self.owner.head is not None else self.settings.head

    def _away_line(self) -> str:
        name, where = self.settings.cluster, self._where
        trouble = f"{where}, from where cluster {name!r} is led, cannot be reached ({self._away})"
        return f"{trouble}: it goes on there, %cluster attach {name} when {where} can be reached again"

    def _left_line(self) -> str:
        name = self.settings.cluster
        return f"the window to cluster {name!r} on {self._where} has ended, the cluster goes on: %cluster attach {name}"

    def _look_at_head(self) -> None:
        """Its process has ended, or nobody knows. Before it runs, what is heard may be of one that ran there before."""
        self._to_look = not self.head.state.running
        if not self._to_look and (self._looking is None or self._looking.done()):
            self._looking = self._spawn(self._see_how_head_is())

    async def _see_how_head_is(self) -> None:
        name, before = self.settings.cluster, self.head.state
        while not self._stopping.is_set():
            try:
                self.head.state = await self.head.look(only_look=True)
                break
            except RequestError as error:
                log.warning("%s", error)
                if self._away:
                    return
                await asyncio.sleep(CHECK_S)
        if self._stopping.is_set():
            return
        if not self.head.state.running:
            if self.head.state.left:
                self._stopping.set()
                return
            await self._bring_files()
            await self.owner.withdraw()
            self._ended = self.head.state.ended or "ended"
            self._stopping.set()
        elif self.head.state.epoch != before.epoch:
            await self._guide_local()
            line = f"the head of cluster {name!r} on {self._where} was started again: %cluster attach {name}"
            self.views.close_all(line, away=True)

    async def _bring_files(self) -> None:
        """A copy of what the run has left, for reports; not over what a run that was led from here has left."""
        folder = self.settings.runtime
        if not (folder / HEAD_FILE).exists() and (folder / JOURNAL_FILE).exists():
            return
        try:
            await bring_files(self.head.link, self.settings.cluster, self.settings.runtime)
        except (RequestError, ValueError, OSError) as error:
            log.warning("no copy of the journal was brought: %s", error)
        (folder / HEAD_FILE).unlink(missing_ok=True)

    # ---- small parts

    def _tell_peers(self, peers: list[h.PeerKey]) -> None:
        if self.owner.head is not None:
            self.owner.head.send(h.HeadPeers(cluster=self.settings.cluster, peers=peers))

    def _tell(self, level: Level, text: str) -> None:
        """A line for the event list."""
        log.log(logging.INFO if level == "info" else logging.WARNING, "%s", text)
        if self.head.state.running:
            self.head.send(OWN_VIEW, encode(v.Request(id=0, body=NoteEvent(level=level, text=text))))

    def _spawn(self, coroutine: Any) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
