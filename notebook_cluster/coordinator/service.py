"""The coordinator of one cluster: puts the parts together, keeps them going, ends when nobody needs it."""

import asyncio
import logging
import signal
import time
from typing import Any

import zmq

from notebook_cluster.coordinator import startup
from notebook_cluster.coordinator.cells.cells import Cells
from notebook_cluster.coordinator.cells.executions import Executions, StdinQuestions
from notebook_cluster.coordinator.cells.notices import Notices
from notebook_cluster.coordinator.cells.replay import Replay
from notebook_cluster.coordinator.cells.streaming import Collected, OutputStreaming
from notebook_cluster.coordinator.cluster_view import ClusterViews, ViewPersistence
from notebook_cluster.coordinator.core import CellWatchers, Core, Disk
from notebook_cluster.coordinator.decisions.host import Decisions
from notebook_cluster.coordinator.delivery import Delivery
from notebook_cluster.coordinator.examination import Examination
from notebook_cluster.coordinator.inbox import AgentInbox
from notebook_cluster.coordinator.kernels.comms import Comms
from notebook_cluster.coordinator.kernels.inspection import Inspections, VariableTable
from notebook_cluster.coordinator.kernels.transfers import Transfers
from notebook_cluster.coordinator.nodes.measurements import GlobalModels, Measurements
from notebook_cluster.coordinator.nodes.membership import Membership
from notebook_cluster.coordinator.nodes.relay import FrameRelay
from notebook_cluster.coordinator.peers.invitation import InvitationHost
from notebook_cluster.coordinator.peers.launches import Launches
from notebook_cluster.coordinator.peers.links import PeerLinks
from notebook_cluster.coordinator.peers.owners_agent import OwnersAgent
from notebook_cluster.coordinator.peers.pairing import Pairing
from notebook_cluster.coordinator.peers.provisioning import NodeProvisioner, OwnAgent, OwnMachinesAgent
from notebook_cluster.coordinator.peers.resolving import PeerResolver
from notebook_cluster.coordinator.peers.taking_over import StateTakeOver
from notebook_cluster.coordinator.requests import Requests
from notebook_cluster.coordinator.rounds.deadlocks import Deadlocks
from notebook_cluster.coordinator.rounds.progress import SignsOfLife
from notebook_cluster.coordinator.rounds.runner import RoundRunner
from notebook_cluster.coordinator.view_server import View, ViewServer
from notebook_cluster.journal import events as e
from notebook_cluster.journal.curves import SeriesStore
from notebook_cluster.journal.reading import RecoveredRun
from notebook_cluster.memory import give_back
from notebook_cluster.peering.candidates import Trust, known_peers
from notebook_cluster.peering.peer_finder import PeerFinder
from notebook_cluster.protocol import views as v
from notebook_cluster.security import Identity, withdraw

log = logging.getLogger(__name__)

GOODBYE = 1.0
"""Seconds that the end waits for the disk before agents and views are told all the same."""
STATE_PERIOD = 0.25
"""Seconds between two states sent to views."""


class Coordinator:
    """The process of one cluster: its parts, and its life from the first view to the last."""

    def __init__(self, settings: startup.Settings, progress: startup.StartProgress | None = None) -> None:
        """Made inside the running loop. ``progress`` hears how far reading the journal is, and until views can
        dial also of an error.

        Raises:
            ValueError: the journal is damaged; one line.
            OSError: the folder cannot be written.
        """
        self._progress = progress = progress or startup.StartProgress()
        self._settings = settings
        self._stopping = asyncio.Event()
        self._stop_reason = self._tick_failed = ""
        self._last_needed = time.monotonic()

        identity, self._announcement = startup.identify(settings)
        self._key = identity.public_key
        journal, recovered = startup.open_journal(settings, progress)
        before = recovered or RecoveredRun()
        self._round_records = before.rounds
        self._core = Core(journal, before.state)
        self._make_parts(identity, before.received)
        if recovered is not None:
            self._persistence.recall()
        else:
            self._streaming.discard_old()
        self._core.record(startup.cluster_started(settings, self._core.state))
        if (error := journal.flush(startup.START_PATIENCE)) is not None:
            raise startup.cannot_start(settings, self._disk.trouble(error))

    # ---- the parts, each with what it needs; a lambda stands for one that is made later

    def _make_parts(self, identity: Identity, received: dict[str, int]) -> None:
        core = self._core
        self._context: zmq.Context[Any] = zmq.Context()
        self._views = ViewServer(
            lambda view, body: self._requests.handle(view, body), self._view_left, core.journal.settled
        )
        self._series = SeriesStore()
        self._delivery = Delivery(core)
        self._make_nodes_and_rounds()
        self._make_cells()
        self._make_peers(identity, received)
        self._comms = Comms(core, delivery=self._delivery, views=self._views, is_busy=self._executions.is_busy)
        self._inspections = Inspections(core, self._delivery)
        self._variables = VariableTable(core, self._delivery, replaying=self._replay.names)
        self._transfers = Transfers(core, self._delivery)
        # Of a coming they are told in this order, of a going in the reverse one.
        for watcher in (self._runner, self._cells, self._comms, self._replay, self._measurements):
            self._membership.watch(watcher)
        self._disk = Disk(core, hold_links=self._links.hold, tell_running_cell=self._notices.tell_running)
        self._shown = ClusterViews(
            core=core, delivery=self._delivery, views=self._views, measurements=self._measurements,
            global_models=self._global_models, runner=self._runner, signs=self._signs, replay=self._replay,
            finding=self._finding, trust=self._trust, invitation=self._invitation, launches=self._launches,
            head=self._settings.head,
        )  # fmt: skip
        self._persistence = ViewPersistence(self._settings.runtime, self._series, self._shown)
        self._make_ends()

    def _make_nodes_and_rounds(self) -> None:
        core, delivery = self._core, self._delivery
        self._membership = Membership(
            core, delivery, replaying=lambda: self._replay.names(), replay_died=lambda node: self._replay.died(node)
        )
        self._relay = FrameRelay(core, delivery, said_nothing_for=lambda node: self._signs.said_nothing_for(node))
        self._runner = RoundRunner(core, delivery, stalled=self._relay.stalled)
        self._signs = SignsOfLife(core, delivery, patience_for=self._runner.patience_for)
        self._deadlocks = Deadlocks(
            core, delivery, gatherings=self._runner.gatherings,
            was_interrupted=lambda cell: self._executions.was_interrupted(cell),
            undecided=lambda node: self._decisions.missing(node),
        )  # fmt: skip
        self._decisions = Decisions(
            core, delivery, is_silent=lambda node: bool(self._signs.trouble(node)), in_rounds=self._deadlocks.in_rounds
        )
        self._cell_watchers = CellWatchers(self._runner, self._decisions)
        self._global_models = GlobalModels(core, self._series, committed=self._runner.committed)
        self._measurements = Measurements(
            core, self._series, self._global_models, committed=self._runner.committed,
            on_waiting=lambda node, text: self._notices.on_waiting(node, text),
        )  # fmt: skip

    def _make_cells(self) -> None:
        core, delivery, views = self._core, self._delivery, self._views
        self._notices = Notices(
            core, views, replaying=lambda: self._replay.names(),
            was_interrupted=lambda cell: self._executions.was_interrupted(cell),
        )  # fmt: skip
        self._streaming = OutputStreaming(
            core, views, self._settings.runtime / "cells", widget_view=lambda node: self._comms.view_of(node)
        )
        self._stdin = StdinQuestions(core, delivery, views, self._notices.changed)
        collected = Collected(core, views)
        self._executions = Executions(
            core, delivery, stdin=self._stdin, collected=collected, on_ended=lambda end: self._cells.node_ended(end)
        )
        self._replay = Replay(
            core, membership=self._membership, executions=self._executions, notices=self._notices,
            watcher=self._cell_watchers, on_ended=lambda: self._cells.look(),
        )  # fmt: skip
        self._cells = Cells(
            core, delivery=delivery, views=views, membership=self._membership, executions=self._executions,
            replay=self._replay, notices=self._notices, streaming=self._streaming, collected=collected,
            watcher=self._cell_watchers,
        )  # fmt: skip

    def _make_peers(self, identity: Identity, received: dict[str, int]) -> None:
        core, context, membership = self._core, self._context, self._membership
        lease, runtime, head = self._settings.agent_lease, self._settings.runtime, self._settings.head
        pinned = startup.trusted_by_head(self._settings)
        self._trust = trust = Trust(lambda key: self._launches.hosts.name_of(key), pinned)
        finding = self._finding = PeerFinder(
            context, trust, known_peers(self._settings.known), lambda new: self._provisioner.on_found(new)
        )
        self._invitation = InvitationHost(
            core, context, identity, trust, on_arrival=lambda key, address: self._provisioner.on_arrival(key, address),
            enlisting=lambda: self._launches.hosts,
        )  # fmt: skip
        links = self._links = PeerLinks(
            core, delivery=self._delivery, membership=membership, trust=trust, context=context, stop=self._stop,
            identity=identity, received=received, reception=lambda: self._invitation.reception,
            on_message=lambda dialer, peer, message, buffers: self._inbox.receive(dialer, peer, message, buffers),
            revoke=self._invitation.revoke, on_left=lambda peer, reason: self._launches.hosts.on_left(peer, reason),
        )  # fmt: skip
        self._launches = Launches(
            core, links=links, membership=membership, invitation=self._invitation, identity=identity, lease=lease
        )
        own = OwnAgent(core, links=links, membership=membership, directory=runtime, lease=lease, closing=self._closing)
        self._own_agent: OwnMachinesAgent = OwnersAgent(links, membership) if head else own
        pairing = Pairing(self._settings.cluster, context, identity, trust, core.tell)
        self._resolver = resolver = PeerResolver(
            core, delivery=self._delivery, links=links, finding=finding, pairing=pairing, trust=trust
        )
        self._provisioner = NodeProvisioner(
            core, links=links, resolver=resolver, pairing=pairing, finding=finding, membership=membership,
            own_agent=self._own_agent, nodes_per_host=self._launches.hosts.nodes_per_host,
        )  # fmt: skip
        self._taking_over = StateTakeOver(
            core, links=links, resolver=resolver, finding=finding, own_agent=self._own_agent, membership=membership
        )

    def _make_ends(self) -> None:
        """Where messages and requests come in."""
        examination = Examination(
            self._core, delivery=self._delivery, relay=self._relay, shown=self._shown, finding=self._finding
        )
        self._inbox = AgentInbox(
            self._core, delivery=self._delivery, links=self._links, membership=self._membership,
            measurements=self._measurements, relay=self._relay, signs=self._signs, deadlocks=self._deadlocks,
            decisions=self._decisions, runner=self._runner, executions=self._executions, stdin=self._stdin,
            streaming=self._streaming, notices=self._notices, comms=self._comms, inspections=self._inspections,
            variables=self._variables, transfers=self._transfers, examination=examination,
            taking_over=self._taking_over,
        )  # fmt: skip
        self._requests = Requests(
            core=self._core, disk=self._disk, views=self._views, shown=self._shown, series=self._series,
            cells=self._cells, stdin=self._stdin, streaming=self._streaming, replay=self._replay, comms=self._comms,
            inspections=self._inspections, variables=self._variables, transfers=self._transfers, runner=self._runner,
            membership=self._membership, provisioner=self._provisioner, invitation=self._invitation,
            launches=self._launches, taking_over=self._taking_over, examination=examination, closing=self._closing,
            stop=self._stop_soon,
        )  # fmt: skip

    # ---- life

    async def run(self) -> None:
        """Serve until stopped, until the lease is over, or until SIGTERM."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, f"ended by {number.name}")
        # An error up to here ends this process alone: the agents keep what they have for the next one.
        address = self._views.start()
        try:
            port = self._invitation.listen() if self._settings.head else 0
            startup.write_connection_file(self._settings, self._core, self._views, address, self._key, port)
        except OSError as error:
            raise startup.cannot_start(self._settings, self._disk.trouble(error)) from error
        self._progress.close()
        self._core.journal.when_written(self._begin)  # no peer hears of an epoch that is in no journal
        try:
            await self._tick_until_stopped()
        finally:
            await self._close()

    def _begin(self) -> None:
        if self._settings.resume and self._core.state.nodes:
            self._resume()
        self._core.spawn(self._own_agent.keep())
        self._core.spawn(self._resolver.browse())

    def _resume(self) -> None:
        received = self._streaming.recover()
        self._core.tell("warning", f"the coordinator was restarted (epoch {self._core.state.epoch})")
        self._invitation.restore()
        self._launches.recover()
        self._links.redial(received)
        self._membership.recover()
        self._cells.recover()
        self._decisions.recover()
        self._membership.restart_unsettled()
        self._runner.recover(self._round_records)
        self._round_records = ()
        give_back()  # what reading a long journal took
        self._links.check_trust()

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
                log_file = self._settings.runtime / "coordinator.log"
                self._core.tell("error", f"the coordinator stumbled: {text} (see {log_file})")
            self._tick_failed = text

    def _tick(self) -> None:
        now = time.monotonic()
        self._core.journal.look()
        self._runner.tick(self._signs.tick(), self._signs.silent())
        if not self._core.journal.holding:
            self._deadlocks.tick(now)
        self._decisions.tick(now)
        self._links.note_received(now)
        self._core.journal.snapshot_if_due(self._core.state)
        self._views.drop_silent()
        if self._views.looked_at or self._core.state.running() is not None:
            self._last_needed = now
        elif now - self._last_needed > self._settings.lease:
            self._stop("nobody looked at it for its lease")
        self._global_models.tick(now)
        fresh = self._persistence.keep(now)
        if self._core.is_dirty and any(view.live for view in self._views.views.values()):
            self._core.shown()
            self._views.send_live(v.StateChanged(state=self._shown.cluster()))
        if fresh:
            self._views.send_live(v.SeriesAdded(series=fresh))

    def _stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason
        self._stopping.set()

    def _stop_soon(self, reason: str) -> None:
        """End the cluster, after what is being answered."""
        asyncio.get_running_loop().call_soon(self._stop, reason)

    def _closing(self) -> str:
        return (self._stop_reason or "ended") if self._stopping.is_set() else ""

    def _view_left(self, view: View, clean: bool) -> None:
        others = [other for other in self._views.views.values() if other.kind in ("magics", "client")]
        idle = self._core.state.running() is None and not self._core.state.queue()
        if clean and view.kind == "magics" and not others and idle and not self._settings.head:
            self._stop("the notebook kernel was shut down and nothing ran")

    async def _close(self) -> None:
        """Every kernel of this cluster ends, then this process."""
        self._stopping.set()
        reason = self._stop_reason or "ended"
        log.info("cluster %s ends: %s", self._settings.cluster, reason)
        try:
            self._say_goodbye(reason)
        except Exception:
            log.exception("the end could not be written down")  # the agents are told all the same
        await self._core.journal.written(GOODBYE)
        await self._links.release()
        await self._launches.close()
        self._core.cancel_tasks()
        await self._links.close()
        await self._finding.close()
        await self._invitation.close()
        self._context.destroy(linger=0)
        (self._settings.runtime / "connection.json").unlink(missing_ok=True)
        self._comms.close()
        self._streaming.close()
        self._runner.close()
        await self._views.close()
        withdraw(self._announcement)
        if not self._core.journal.close():
            log.error("the end of the run is not in its journal: %s", self._disk.trouble())

    def _say_goodbye(self, reason: str) -> None:
        self._global_models.close()
        # What a view shows last is what stays of the run in the notebook.
        if fresh := self._persistence.keep(time.monotonic()):
            self._views.send_live(v.SeriesAdded(series=fresh))
        self._views.send_live(v.StateChanged(state=self._shown.cluster()))
        if (running := self._core.state.running()) is not None:
            self._views.send_watching(running.id, v.CellEnded(cell=running.id, status="interrupted"))
        self._views.send_live(v.Closing(reason=reason))
        self._persistence.close(reason)
        self._core.record(e.Stopped(reason=reason, time=time.time()))
