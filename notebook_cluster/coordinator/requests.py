"""What a view asks for, and which part of the coordinator does it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from notebook_cluster.coordinator.cells.cells import Cells
from notebook_cluster.coordinator.cells.questions import StdinQuestions
from notebook_cluster.coordinator.cells.replay import Replay
from notebook_cluster.coordinator.cells.streaming import OutputStreaming
from notebook_cluster.coordinator.cluster_view import ClusterViews
from notebook_cluster.coordinator.core import Core, Disk
from notebook_cluster.coordinator.examination import Examination
from notebook_cluster.coordinator.kernels.comms import Comms
from notebook_cluster.coordinator.kernels.inspection import Inspections, VariableTable
from notebook_cluster.coordinator.kernels.transfers import Transfers
from notebook_cluster.coordinator.moves import HeadMoves
from notebook_cluster.coordinator.nodes.membership import Membership
from notebook_cluster.coordinator.peers.invitation import InvitationHost
from notebook_cluster.coordinator.peers.launches import Launches
from notebook_cluster.coordinator.peers.provisioning import NodeProvisioner
from notebook_cluster.coordinator.peers.taking_over import StateTakeOver
from notebook_cluster.coordinator.rounds.runner import RoundRunner
from notebook_cluster.coordinator.view_server import View, ViewServer
from notebook_cluster.journal.curves import SeriesStore
from notebook_cluster.protocol import interaction as c
from notebook_cluster.protocol import transfers as t
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.hand_over import AnyHandingOver
from notebook_cluster.protocol.interaction import AnswerInput
from notebook_cluster.protocol.kept import FindKept, TakeOver
from notebook_cluster.protocol.launches import ShrinkLaunches, StartLaunch
from notebook_cluster.protocol.measuring import MeasureWay
from notebook_cluster.protocol.state import GetHistory
from notebook_cluster.protocol.views import RequestError

MOST_NOTE = 1000
"""Characters of a line that a view adds."""
DECISIONS = (
    v.Execute, v.AddNodes, v.RemoveNode, v.RestartNode, v.SaveCheckpoint, v.Invite, StartLaunch, ShrinkLaunches,
    TakeOver,
)  # fmt: skip
"""What must be in the journal before it is done."""


@dataclass(kw_only=True)
class Requests:
    """Answers views; what :meth:`handle` returns is the value of the reply.

    ``closing()``: why the cluster ends, empty while it goes on; ``stop(reason)`` ends it, after what is being answered.
    """

    core: Core
    disk: Disk
    views: ViewServer
    shown: ClusterViews
    series: SeriesStore
    cells: Cells
    stdin: StdinQuestions
    streaming: OutputStreaming
    replay: Replay
    comms: Comms
    inspections: Inspections
    variables: VariableTable
    transfers: Transfers
    membership: Membership
    provisioner: NodeProvisioner
    invitation: InvitationHost
    launches: Launches
    taking_over: StateTakeOver
    examination: Examination
    runner: RoundRunner
    moving: HeadMoves
    closing: Callable[[], str]
    stop: Callable[[str], None]

    async def handle(self, view: View, body: Any) -> Any:
        """Do what ``body`` asks for. RequestError: one line that says why not."""
        if isinstance(body, AnyHandingOver):
            return await self.moving.handle(view, body)
        if self.core.journal.frozen and not isinstance(body, v.Ping):
            raise RequestError(f"cluster {self.core.state.cluster!r} is being handed over: try it again in a moment")
        if isinstance(body, DECISIONS):
            await self.disk.ready()
        match body:
            case v.Attach() | v.GetState():
                if isinstance(body, v.Attach) and self.views.note_kernel(body.kernel):
                    self.core.dirty()
                if reason := self.closing():
                    self.views.send(view, v.Closing(reason=reason))
                return self.shown.cluster()
            case v.Ping():
                return None
            case c.NoteEvent():
                self.core.tell(body.level, body.text[:MOST_NOTE])
            case v.GetSeries():
                return self.series.all()
            case GetHistory():
                return self.shown.history()
            case v.SaveCheckpoint():
                return await self.runner.save(body.name, body.job)
            case v.Stop():
                self.stop("stopped")
            case c.WatchWidgets():
                self.comms.watch(view)
            case c.CommToNode():
                self.comms.send(body)
            case c.Complete():
                return await self.inspections.complete(body)
            case c.Inspect():
                return await self.inspections.inspect(body)
            case c.ListVariables():
                return await self.variables.columns(body)
            case AnswerInput():
                self.stdin.answer(view, body)
            case t.ReadValue() | t.WriteValue() | t.ForgetValue():
                return await self.transfers.handle(body)
            case t.FindFolder() | t.OfferFiles() | t.WriteFile() | t.EndFiles() | t.FindFiles() | t.ReadFile():
                return await self.transfers.handle(body)
            case v.Execute() | v.Watch() | v.Unwatch() | v.OutputTaken() | v.Interrupt() | v.Detach():
                return self._about_cells(view, body)
            case _:
                return await self._about_members(body)
        return None

    def _about_cells(self, view: View, body: Any) -> Any:
        match body:
            case v.Execute():
                number = self.cells.submit(view, body)
                if body.stdin:
                    self.stdin.offer(view, number, submits=True)
                return number
            case v.Watch():
                watched = self.cells.watch(view, body.cell, body.background)
                if body.stdin:
                    self.stdin.offer(view, body.cell)
                return watched
            case v.Unwatch():
                self.cells.unwatch(view, body.cell)
            case v.OutputTaken():
                self.streaming.taken(view, body.cell, body.position)
            case v.Interrupt():
                return self.cells.interrupt(body.force, body.cell)
            case v.Detach():
                self.cells.detach()
        return None

    async def _about_members(self, body: Any) -> Any:
        match body:
            case v.AddNodes():
                if body.count < 0:
                    raise RequestError(f"cannot add {body.count} nodes: the number is 0 (one per accelerator) or more")
                return await self.provisioner.add(
                    body.peer, body.count, body.code, follow=body.follow, expect=body.expect
                )
            case v.Examine():
                return await self.examination.run(body.packages)
            case MeasureWay():
                return await self.examination.bench.measure(body)
            case v.Invite():
                return await self.invitation.invite(body)
            case StartLaunch():
                if self.shown.head:
                    # What an engine is asked for is no node: the limits of that machine's owner do not cover it.
                    raise RequestError(
                        f"a cluster led from {self.shown.head} asks no engine for hosts: start it without --head"
                    )
                return await self.launches.start(body)
            case ShrinkLaunches():
                return await self.launches.shrink(body)
            case FindKept():
                return await self.taking_over.find(body)
            case TakeOver():
                return self.taking_over.take()
            case v.RemoveNode():
                self.membership.remove(body.node)
            case v.RestartNode():
                await self.membership.restart_and_wait(body.node, body.replay, body.all_cells)
            case v.SkipReplay():
                return await self.replay.skip(body.node)
            case v.ReadNodeLog():
                return await self.transfers.read_log(body.node, body.lines)
            case _:
                raise RequestError(f"unknown request {type(body).__name__}")
        return None
