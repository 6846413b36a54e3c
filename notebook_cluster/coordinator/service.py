"""The coordinator of one cluster: puts the parts together, keeps them going, ends when nobody needs it."""

import asyncio
import logging
import signal
import time
from typing import Any

import zmq

from notebook_cluster.coordinator import startup
from notebook_cluster.coordinator.cells.cells import Cells
from notebook_cluster.coordinator.cells.executions import Executions
from notebook_cluster.coordinator.cells.notices import Notices
from notebook_cluster.coordinator.cells.questions import StdinQuestions
from notebook_cluster.coordinator.cells.replay import Replay
from notebook_cluster.coordinator.cells.streaming import Collected, OutputStreaming
from notebook_cluster.coordinator.cluster_view import ClusterViews, ViewPersistence
from notebook_cluster.coordinator.core import CellWatchers, Core, Disk
from notebook_cluster.coordinator.decisions.host import Decisions
from notebook_cluster.coordinator.delivery import Delivery
from notebook_cluster.coordinator.ending import Ending
from notebook_cluster.coordinator.examination import Examination
from notebook_cluster.coordinator.inbox import AgentInbox
from notebook_cluster.coordinator.kernels.comms import Comms
from notebook_cluster.coordinator.kernels.inspection import Inspections, VariableTable
from notebook_cluster.coordinator.kernels.transfers import Transfers
from notebook_cluster.coordinator.moves import HeadMoves
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
from notebook_cluster.journal.curves import SeriesStore
from notebook_cluster.journal.reading import RecoveredRun
from notebook_cluster.memory import give_back
from notebook_cluster.peering.candidates import Trust, known_peers
from notebook_cluster.peering.peer_finder import PeerFinder
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.hand_over import Moved
from notebook_cluster.security import Identity

log = logging.getLogger(__name__)

STATE_PERIOD = 0.25
"""Seconds between two states sent to views."""


class Coordinator:
    """One cluster's parts, and its life from the first view to the last. For a seat: ``core``, ``links`` and ``views``,
    ``ending``, and ``begun``, which is set when the cluster goes on."""

    def __init__(
        self,
        settings: startup.Settings,
        progress: startup.StartProgress | None = None,
        before: ViewServer | None = None,
    ) -> None:
        """Made inside the running loop. ``progress`` hears how far reading the journal is, and until views can
        dial also of an error. ``before``: has the socket and the views of what this process was before.

        Raises:
            ValueError: the journal is damaged; one line.
            OSError: the folder cannot be written.
        """
        self._progress, self._settings = progress or startup.StartProgress(), settings
        self._stopping = asyncio.Event()
        self._stop_reason, self._keeps = "", False
        self._last_needed = time.monotonic()

        identity, self._announcement = startup.identify(settings)
        self._key = identity.public_key
        journal, recovered = startup.open_journal(settings, self._progress)
        recovered_run = recovered or RecoveredRun()
        self._round_records = recovered_run.rounds
        self._moved = startup.read_moved_here(settings) if recovered is not None else None
        self.core = Core(journal, recovered_run.state)
        self._make_parts(identity, recovered_run.received, before)
        if recovered is not None:
            self._persistence.recall()
        else:
            self._streaming.discard_old()
        self.core.record(startup.cluster_started(settings, self.core.state))
        for event in startup.at_home(self.core.state, self._trust, settings, self._moved):
            self.core.record(event)
        if (error := journal.flush(startup.START_PATIENCE)) is not None:
            raise startup.cannot_start(settings, self._disk.trouble(error))

    # ---- the parts, each with what it needs; a lambda stands for one that is made later

    def _make_parts(self, identity: Identity, received: dict[str, int], before: ViewServer | None) -> None:
        core = self.core
        self._context: zmq.Context[Any] = zmq.Context()
        self.views = ViewServer(
            lambda view, body: self._requests.handle(view, body), self._view_left, core.journal.settled
        )
        self.views.adopt(before)
        self._series = SeriesStore()
        self._delivery = Delivery(core)
        self._make_nodes_and_rounds()
        self._make_cells()
        self._make_peers(identity, received)
        self._comms = Comms(core, delivery=self._delivery, views=self.views, is_busy=self._executions.is_busy)
        self._inspections = Inspections(core, self._delivery)
        self._variables = VariableTable(core, self._delivery, replaying=self._replay.names)
        self._transfers = Transfers(core, self._delivery)
        # Of a coming they are told in this order, of a going in the reverse one.
        for watcher in (self._runner, self._cells, self._comms, self._replay, self._measurements):
            self._membership.watch(watcher)
        self._disk = Disk(core, hold_links=self.links.hold, tell_running_cell=self._notices.tell_running)
        self._shown = ClusterViews(
            core=core, delivery=self._delivery, views=self.views, measurements=self._measurements,
            global_models=self._global_models, runner=self._runner, signs=self._signs, replay=self._replay,
            finding=self._finding, trust=self._trust, invitation=self._invitation, launches=self._launches,
            head=self._settings.head,
        )  # fmt: skip
        self._persistence = ViewPersistence(self._settings.runtime, self._series, self._shown)
        self._make_ends()

    def _make_nodes_and_rounds(self) -> None:
        core, delivery = self.core, self._delivery
        self._membership = Membership(
            core, delivery, replaying=lambda: self._replay.names(), replay_died=lambda node: self._replay.died(node)
        )
        self._relay = FrameRelay(core, delivery, said_nothing_for=lambda node: self._signs.said_nothing_for(node))
        self._notices = Notices(
            core, self.views, replaying=lambda: self._replay.names(),
            was_interrupted=lambda cell: self._executions.was_interrupted(cell),
        )  # fmt: skip
        self._runner = RoundRunner(core, delivery, stalled=self._relay.stalled, in_cell=self._notices.tell_running)
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
            on_waiting=self._notices.on_waiting,
        )  # fmt: skip

    def _make_cells(self) -> None:
        core, delivery, views = self.core, self._delivery, self.views
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
            watcher=self._cell_watchers, trains=self._runner.trains,
        )  # fmt: skip

    def _make_peers(self, identity: Identity, received: dict[str, int]) -> None:
        core, context, membership = self.core, self._context, self._membership
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
        links = self.links = PeerLinks(
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
        """Where messages and requests come in, and how it ends."""
        self.ending = Ending(
            runtime=self._settings.runtime, context=self._context, announcement=self._announcement, core=self.core,
            disk=self._disk, views=self.views, shown=self._shown, persistence=self._persistence,
            global_models=self._global_models, streaming=self._streaming, stdin=self._stdin,
            executions=self._executions, cells=self._cells, comms=self._comms, runner=self._runner,
            replaying=self._replay.names, closing=self._closing, links=self.links, launches=self._launches,
            finding=self._finding, invitation=self._invitation,
        )  # fmt: skip
        self._moves = HeadMoves(
            self.core, is_head=bool(self._settings.head), calm=self.ending.calm,
            freeze=self.ending.freeze, leave=self.ending.leave, runtime=self._settings.runtime,
        )  # fmt: skip
        self.begun = self._moves.begun
        examination = Examination(
            self.core, delivery=self._delivery, relay=self._relay, shown=self._shown, finding=self._finding
        )
        self._inbox = AgentInbox(
            self.core, delivery=self._delivery, links=self.links, membership=self._membership,
            measurements=self._measurements, relay=self._relay, signs=self._signs, deadlocks=self._deadlocks,
            decisions=self._decisions, runner=self._runner, executions=self._executions, stdin=self._stdin,
            streaming=self._streaming, notices=self._notices, comms=self._comms, inspections=self._inspections,
            variables=self._variables, transfers=self._transfers, examination=examination,
            taking_over=self._taking_over,
        )  # fmt: skip
        self._requests = Requests(
            core=self.core, disk=self._disk, views=self.views, shown=self._shown, series=self._series,
            cells=self._cells, stdin=self._stdin, streaming=self._streaming, replay=self._replay, comms=self._comms,
            inspections=self._inspections, variables=self._variables, transfers=self._transfers, runner=self._runner,
            membership=self._membership, provisioner=self._provisioner, invitation=self._invitation,
            launches=self._launches, taking_over=self._taking_over, examination=examination, closing=self._closing,
            stop=self._stop_soon, moving=self._moves,
        )  # fmt: skip

    # ---- life

    async def run(self) -> None:
        """Serve until stopped, until the lease is over, until SIGTERM, or until frozen."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, f"ended by {number.name}", True)
        # An error up to here ends this process alone: the agents keep what they have for the next one.
        address = self.views.start()
        try:
            port = self._invitation.listen() if self._settings.head else 0
            startup.write_connection_file(self._settings, self.core, self.views, address, self._key, port)
        except OSError as error:
            raise startup.cannot_start(self._settings, self._disk.trouble(error)) from error
        self._progress.close()
        self.core.journal.when_written(lambda: self.core.spawn(self._begin()))  # before that no peer hears of it
        try:
            await self._tick_until_stopped()
        finally:
            if not self.core.journal.frozen:
                self._stopping.set()
                await self.ending.close(self._stop_reason or "ended", keep=self._keeps)

    async def freeze(self, token: str) -> Moved:
        """:meth:`run` returns, and :attr:`ending` does the rest; RequestError before that: all is as it was."""
        await self.ending.calm()
        self.views.hold()
        try:
            return await self.ending.freeze(token)
        finally:
            if self.core.journal.frozen:
                self.views.leave()
                self._stopping.set()
            else:
                self.views.go_on()

    async def _begin(self) -> None:
        if self._moved is not None and self._settings.head:
            await self._moves.views_are_here()
        if self._settings.resume and self.core.state.nodes:
            self._resume()
        if self._moved is not None:
            self.ending.restore(self._moved)
            startup.forget_moved(self._settings)
        self.begun.set()
        self._invitation.begin()
        self.views.go_on()
        self.core.spawn(self._own_agent.keep())
        self.core.spawn(self._resolver.browse())

    def _resume(self) -> None:
        received = self._streaming.recover()
        where = self._settings.head or "the machine of its owner"
        said = "the coordinator was restarted" if self._moved is None else f"the cluster is led from {where} now"
        self.core.tell("warning" if self._moved is None else "info", f"{said} (epoch {self.core.state.epoch})")
        self._invitation.restore()
        self._launches.recover()
        self.links.redial(received)
        self._membership.recover()
        self._cells.recover()
        self._decisions.recover()
        self._membership.restart_unsettled()
        self._runner.recover(self._round_records)
        self._round_records = ()
        give_back()  # what reading a long journal took
        self.links.check_trust()

    async def _tick_until_stopped(self) -> None:
        while not self._stopping.is_set():
            try:
                await asyncio.wait_for(self._stopping.wait(), STATE_PERIOD)
            except TimeoutError:
                if self.begun.is_set() and not self.core.journal.frozen:
                    self.core.safely(self._tick, self._settings.runtime / "coordinator.log")

    def _tick(self) -> None:
        now = time.monotonic()
        self.core.journal.look()
        self._runner.tick(self._signs.tick(), self._signs.silent())
        if not self.core.journal.holding:
            self._deadlocks.tick(now)
        self._decisions.tick(now)
        self.links.note_received(now)
        self.core.journal.snapshot_if_due(self.core.state)
        self.views.drop_silent()
        if self.views.looked_at or self.core.state.running() is not None:
            self._last_needed = now
        elif now - self._last_needed > self._settings.lease:
            self._stop("nobody looked at it for its lease", True)
        self._global_models.tick(now)
        fresh = self._persistence.keep(now)
        if self.views.wants_state(self.core.is_dirty):
            self.core.shown()
            self.views.send_live(v.StateChanged(state=self._shown.cluster()))
        if fresh:
            self.views.send_live(v.SeriesAdded(series=fresh))

    def _stop(self, reason: str, keep: bool = False) -> None:
        if not self._stop_reason:  # keep: nobody asked for this end, and what is trained is saved
            self._stop_reason, self._keeps = reason, keep
        self._stopping.set()

    def _stop_soon(self, reason: str) -> None:
        """End the cluster, after what is being answered."""
        asyncio.get_running_loop().call_soon(self._stop, reason)

    def _closing(self) -> str:
        return (self._stop_reason or "ended") if self._stopping.is_set() else ""

    def _view_left(self, view: View, clean: bool) -> None:
        others = [other for other in self.views.views.values() if other.kind in ("magics", "client")]
        idle = self.core.state.running() is None and not self.core.state.queue()
        if clean and view.kind == "magics" and not others and idle and not self._settings.head:
            self._stop("the notebook kernel was shut down and nothing ran", True)
