"""The coordinator of one cluster: puts the parts together, answers views, ends when nobody needs it."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

import msgspec
import psutil
import zmq

from notebook_cluster.coordinator.cells.cells import Cells
from notebook_cluster.coordinator.cells.replay import Replay
from notebook_cluster.coordinator.cells.stdin import StdinQuestions
from notebook_cluster.coordinator.cells.streaming import OutputStreaming
from notebook_cluster.coordinator.disk import Disk
from notebook_cluster.coordinator.examination import Examination
from notebook_cluster.coordinator.inbox import AgentInbox
from notebook_cluster.coordinator.kernels.comms import Comms
from notebook_cluster.coordinator.kernels.inspection import Inspections
from notebook_cluster.coordinator.kernels.transfers import Transfers
from notebook_cluster.coordinator.kernels.variables import VariableTable
from notebook_cluster.coordinator.nodes.global_model import GlobalModels
from notebook_cluster.coordinator.nodes.measurements import Measurements
from notebook_cluster.coordinator.nodes.membership import Membership
from notebook_cluster.coordinator.nodes.relay import FrameRelay
from notebook_cluster.coordinator.peers.invitation import InvitationHost
from notebook_cluster.coordinator.peers.links import LOCAL, PeerLinks
from notebook_cluster.coordinator.peers.pairing import Pairing
from notebook_cluster.coordinator.peers.provisioning import NodeProvisioner
from notebook_cluster.coordinator.peers.resolving import PeerResolver
from notebook_cluster.coordinator.persistence import ViewPersistence
from notebook_cluster.coordinator.requests import Requests
from notebook_cluster.coordinator.rounds.deadlocks import Deadlocks
from notebook_cluster.coordinator.rounds.runner import RoundRunner
from notebook_cluster.coordinator.rounds.signs_of_life import SignsOfLife
from notebook_cluster.coordinator.settings import Settings
from notebook_cluster.coordinator.startup import StartProgress
from notebook_cluster.coordinator.view_server import View, ViewServer
from notebook_cluster.journal import events as e
from notebook_cluster.journal.kept_runs import let_old_runs_go, set_aside
from notebook_cluster.journal.log import Journal
from notebook_cluster.journal.old_format import import_old
from notebook_cluster.journal.place import journal_path
from notebook_cluster.journal.reading import recover
from notebook_cluster.journal.records import Record
from notebook_cluster.journal.series import SeriesStore
from notebook_cluster.journal.state import State, apply, cell_view
from notebook_cluster.peering.trusting import Trust
from notebook_cluster.protocol import PROTOCOL_VERSION, VERSION
from notebook_cluster.protocol import peer as p
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.state import ClusterView, EventView
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import Identity, announce, data_directory, load_identity, withdraw, write_private

log = logging.getLogger(__name__)

RECEIVED_PERIOD = 2.0
"""Seconds of messages that agents may send again to a restarted coordinator; all of them are harmless twice."""
AGENT_CONNECTS = 5.0
GOODBYE = 1.0
"""Seconds that the end waits for the disk before agents and views are told all the same."""
START_PATIENCE = 10.0
"""Seconds that the disk may take for the first row."""
STATE_PERIOD = 0.25
"""Seconds between two states sent to views."""


class Coordinator:
    """The process of one cluster: what its parts share, and its life from the first view to the last."""

    def __init__(self, settings: Settings, progress: StartProgress | None = None) -> None:
        """Made inside the running loop. ``progress`` hears how far reading the journal is, and until views can
        dial also of an error.

        Raises:
            ValueError: the journal is damaged; one line.
            OSError: the folder cannot be written.
        """
        self._progress = progress = progress or StartProgress()
        self.settings = settings
        self.recovered_sequences: dict[str, int] = {}
        self.state = State()
        self.series = SeriesStore()
        self.memory = ViewPersistence(self)
        self.events: deque[EventView] = deque(maxlen=100)
        self._dirty = True
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()
        self._agent_started = asyncio.Event()
        self._stop_reason = ""
        self._tick_failed = ""
        self._last_needed = time.monotonic()
        self._received: dict[str, int] = {}
        self._received_time = 0.0
        self._round_records: list[Record] = []

        identity = load_identity(data_directory())
        self._announcement = announce("coordinator", identity.public_key, settings.cluster)
        recovered = None
        if settings.resume:
            import_old(settings.runtime, progress.read, locked=True)
            recovered = recover(journal_path(settings.runtime), progress.read)
        elif set_aside(settings.runtime) is not None:
            let_old_runs_go(settings.runtime.parent)
        self.log = Journal(settings.runtime, recovered)
        self._make_parts(identity)
        if recovered is not None and recovered.state.cluster_id:
            self.state = recovered.state
            self.recovered_sequences = recovered.received
            self._round_records = recovered.rounds
            self.memory.recall()
        else:
            self.streaming.discard_old()
        # An id is a name as well: what is put after a long name must not make it too long.
        cluster_id = self.state.cluster_id or f"{settings.cluster[:40]}-{secrets.token_hex(8)}"
        # Epochs also grow over fresh starts, so an agent never obeys a coordinator that was replaced.
        epoch = max(self.state.epoch + 1, time.time_ns() // 1_000_000)
        self.record(
            e.ClusterStarted(
                cluster=settings.cluster, cluster_id=cluster_id, epoch=epoch, directory=settings.directory,
                time=time.time(),
            )
        )  # fmt: skip
        self.disk = Disk(self)
        error = self.log.flush(START_PATIENCE)
        if error is not None:
            raise OSError(f"cluster {settings.cluster!r} cannot start: {self.disk.trouble(error)}")

    def _make_parts(self, identity: Identity) -> None:
        """Each part gets this hub and finds the others through it."""
        self._context: zmq.Context[Any] = zmq.Context()
        self.requests = Requests(self)
        self.views = ViewServer(self.requests.handle, self._view_left, self.log.settled)
        self.trust = Trust()
        self.peers = PeerLinks(self, self._context, identity)
        self.admission = PeerResolver(self)
        self.door = InvitationHost(self, self._context, identity)
        self.pairing = Pairing(self, self._context, identity, self.trust)
        self.incoming = AgentInbox(self)
        self.members = Membership(self)
        self.adding = NodeProvisioner(self)
        self.measurements = Measurements(self)
        self.global_models = GlobalModels(self)
        self.streaming = OutputStreaming(self, self.settings.runtime / "cells")
        self.comms = Comms(self)
        self.cells = Cells(self)
        self.replay = Replay(self)
        self.rounds = RoundRunner(self)
        self.deadlocks = Deadlocks(self)
        self.signs = SignsOfLife(self)
        self.relaying = FrameRelay(self)
        self.examination = Examination(self)
        self.transfers = Transfers(self)
        self.introspection = Inspections(self)
        self.variables = VariableTable(self)
        self.inputs = StdinQuestions(self)

    # ---- what the parts use

    def record(self, event: e.Event) -> None:
        """Into the journal with ``event``, then change the state: everything that is decided goes through here."""
        self.log.event(event, durable=isinstance(event, e.DURABLE))
        self.state = apply(self.state, event)
        self._dirty = True

    def tell(self, level: Any, text: str) -> None:
        """A line for the event list and the log file."""
        self.events.append(EventView(time=time.time(), level=level, text=text))
        log.log({"info": logging.INFO, "warning": logging.WARNING}.get(level, logging.ERROR), "%s", text)
        self._dirty = True

    def dirty(self) -> None:
        """Something that views show has changed."""
        self._dirty = True

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            self.tell("error", str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}")

    # ---- life

    async def run(self) -> None:
        """Serve until stopped, until the lease is over, or until SIGTERM."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, f"ended by {signal.Signals(number).name}")
        # An error up to here ends this process alone: the agents keep what they have for the next one.
        self._write_connection_file(self.views.start())
        self._progress.close()
        self.log.when_written(self._begin)  # no peer hears of an epoch that is in no journal
        try:
            await self._tick_until_stopped()
        finally:
            await self._close()

    def _begin(self) -> None:
        if self.settings.resume and self.state.nodes:
            self._resume()
        else:
            self.spawn(self._start_agent())
        self.spawn(self.peers.browse())

    async def _start_agent(self) -> None:
        try:
            await self.peers.start_local(self.settings.runtime, self.settings.agent_lease)
        finally:
            self._agent_started.set()

    def _resume(self) -> None:
        for key, sequence in self.streaming.recover().items():
            self.recovered_sequences[key] = max(self.recovered_sequences.get(key, 0), sequence)
        self.tell("warning", f"the coordinator was restarted (epoch {self.state.epoch})")
        self.door.restore()
        self.peers.redial()
        self.members.recover()
        self.cells.recover()
        self.members.restart_unsettled()
        self.rounds.recover(self._round_records)
        self._round_records = []
        self.peers.check_trust()
        local = self.state.peers.get(LOCAL)
        if local is not None and local.pid is not None and psutil.pid_exists(local.pid):
            self._agent_started.set()
        else:
            self.spawn(self._start_agent())

    def _write_connection_file(self, address: str) -> None:
        connection = v.ConnectionFile(
            cluster=self.settings.cluster, address=address, server_key=self.views.server.public_key,
            view_public_key=self.views.view_identity.public_key,
            view_secret_key=self.views.view_identity.secret_key, pid=os.getpid(), epoch=self.state.epoch,
            protocol=PROTOCOL_VERSION, version=VERSION, run_log=str(self.log.path),
        )  # fmt: skip
        try:
            write_private(self.settings.runtime / "connection.json", msgspec.json.encode(connection))
        except OSError as error:
            raise OSError(f"cluster {self.settings.cluster!r} cannot start: {self.disk.trouble(error)}") from error

    async def _tick_until_stopped(self) -> None:
        while not self._stopping.is_set():
            try:
                await asyncio.wait_for(self._stopping.wait(), STATE_PERIOD)
            except TimeoutError:
                self._tick_safely()

    def _tick_safely(self) -> None:
        """Whatever one look stumbles over, the cluster goes on; it is said once."""
        try:
            self._tick()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if text != self._tick_failed:
                log.exception("a look at the cluster failed")
                self.tell("error", f"the coordinator stumbled: {text} (see {self.settings.runtime}/coordinator.log)")
            self._tick_failed = text

    def _tick(self) -> None:
        now = time.monotonic()
        self.log.look()
        self.rounds.tick(self.signs.tick(), self.signs.silent())
        if not self.log.holding:
            self.deadlocks.tick(now)
        received = self.peers.received()
        if received != self._received and now - self._received_time > RECEIVED_PERIOD:
            self._received, self._received_time = received, now
            self.log.received(received)
        self.log.snapshot_if_due(self.state)
        self.views.drop_silent()
        # A Jupyter server with no browser before it looks too, but nobody at it.
        looked_at = any(view.kind != "server" for view in self.views.views.values())
        if looked_at or self.state.running() is not None:
            self._last_needed = now
        elif now - self._last_needed > self.settings.lease:
            self._stop("nobody looked at it for its lease")
        self.global_models.tick(now)
        fresh = self.memory.keep(now)
        if self._dirty and any(view.live for view in self.views.views.values()):
            self._dirty = False
            self.views.send_live(v.StateChanged(state=self.view()))
        if fresh:
            self.views.send_live(v.SeriesAdded(series=fresh))

    def _stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason
        self._stopping.set()

    def stop_soon(self, reason: str) -> None:
        """End the cluster, after what is being answered."""
        asyncio.get_running_loop().call_soon(self._stop, reason)

    def tell_closing(self, view: View) -> None:
        """To a view that came while the cluster ends."""
        if self._stopping.is_set():
            self.views.send(view, v.Closing(reason=self._stop_reason or "ended"))

    def _view_left(self, view: View, clean: bool) -> None:
        others = [other for other in self.views.views.values() if other.kind in ("magics", "client")]
        idle = self.state.running() is None and not self.state.queue()
        if clean and view.kind == "magics" and not others and idle:
            self._stop("the notebook kernel was shut down and nothing ran")

    async def _close(self) -> None:
        """Every kernel of this cluster ends, then this process."""
        self._stopping.set()
        reason = self._stop_reason or "ended"
        log.info("cluster %s ends: %s", self.settings.cluster, reason)
        try:
            self._say_goodbye(reason)
        except Exception:
            log.exception("the end could not be written down")  # the agents are told all the same
        await self.log.written(GOODBYE)
        await self._let_agent_connect()
        links = [link for link in self.peers.links.values() if link.is_open]
        for link in links:
            link.dialer.send(p.Release())
        released = [asyncio.ensure_future(link.released.wait()) for link in links]
        if released:
            _, late = await asyncio.wait(released, timeout=8)
            for task in late:
                task.cancel()
        for task in list(self._tasks):
            task.cancel()
        await self.peers.close()
        await self.door.close()
        self._context.destroy(linger=0)
        (self.settings.runtime / "connection.json").unlink(missing_ok=True)
        self.comms.close()
        self.streaming.close()
        self.rounds.close()
        await self.views.close()
        withdraw(self._announcement)
        if not self.log.close():
            log.error("the end of the run is not in its journal: %s", self.disk.trouble())

    def _say_goodbye(self, reason: str) -> None:
        self.global_models.close()
        # What a view shows last is what stays of the run in the notebook.
        if fresh := self.memory.keep(time.monotonic()):
            self.views.send_live(v.SeriesAdded(series=fresh))
        self.views.send_live(v.StateChanged(state=self.view()))
        running = self.state.running()
        if running is not None:
            self.views.send_watching(running.id, v.CellEnded(cell=running.id, status="interrupted"))
        self.views.send_live(v.Closing(reason=reason))
        self.memory.close(reason)
        self.record(e.Stopped(reason=reason, time=time.time()))

    async def _let_agent_connect(self) -> None:
        """An agent that was just started hears of the end over its link, once that is there."""
        local = self.peers.links.get(LOCAL)
        if local is not None and local.condition == "connecting":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(local.ready.wait(), AGENT_CONNECTS)

    async def wait_for_local(self) -> None:
        """Return when the link to this machine's own agent was dialled.

        Raises:
            RequestError: it did not start; names its log.
        """
        await self._agent_started.wait()
        if LOCAL not in self.peers.links:
            raise RequestError(f"the agent of this machine did not start: see {self.settings.runtime / 'agent.log'}")

    def view(self) -> ClusterView:
        """Everything that a panel shows, except the curves."""
        cells = list(self.state.cells.values())
        current = self.state.running() or (cells[-1] if cells else None)
        return ClusterView(
            name=self.state.cluster, epoch=self.state.epoch, generation=self.state.generation,
            started=self.state.started, now=time.time(), nodes=self.measurements.views(), peers=self.peers.views(),
            jobs=self.rounds.views(), cell=cell_view(current) if current is not None else None,
            queued=len(self.state.queue()), events=list(self.events), directory=self.state.directory,
            run_log=str(self.log.path), invitation=self.door.view(), kernels=dict(self.views.kernels),
        )  # fmt: skip
