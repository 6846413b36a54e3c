"""What a view asks for, and which part of the coordinator does it."""

from typing import TYPE_CHECKING, Any

from notebook_cluster.coordinator.view_server import View
from notebook_cluster.protocol import comms as c
from notebook_cluster.protocol import introspection as i
from notebook_cluster.protocol import transfers as t
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.asking import AnswerInput
from notebook_cluster.protocol.history import GetHistory
from notebook_cluster.protocol.views import RequestError

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator


DECISIONS = (v.Execute, v.AddNodes, v.RemoveNode, v.RestartNode, v.SaveCheckpoint, v.Invite)
"""What must be in the journal before it is done."""


class Requests:
    """Answers views; what :meth:`handle` returns is the value of the reply."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub

    async def handle(self, view: View, body: Any) -> Any:
        """Do what ``body`` asks for. RequestError: one line that says why not."""
        hub = self._hub
        if isinstance(body, DECISIONS) and hub.log.holding:
            raise RequestError(hub.disk.trouble())
        match body:
            case v.Attach() | v.GetState():
                if isinstance(body, v.Attach) and hub.views.note_kernel(body.kernel):
                    hub.dirty()
                hub.tell_closing(view)
                return hub.view()
            case v.Ping():
                return None
            case v.GetSeries():
                return hub.series.all()
            case GetHistory():
                return hub.rounds.history.view()
            case v.SaveCheckpoint():
                return await hub.rounds.save(body.name, body.job)
            case v.Stop():
                hub.stop_soon("stopped")
            case c.WatchWidgets():
                hub.comms.watch(view)
            case c.CommToNode():
                hub.comms.send(body)
            case i.Complete():
                return await hub.introspection.complete(body)
            case i.Inspect():
                return await hub.introspection.inspect(body)
            case i.ListVariables():
                return await hub.variables.columns(body)
            case AnswerInput():
                hub.inputs.answer(view, body)
            case t.ReadValue() | t.WriteValue() | t.ForgetValue():
                return await hub.transfers.handle(body)
            case t.FindFolder() | t.OfferFiles() | t.WriteFile() | t.EndFiles():
                return await hub.transfers.handle(body)
            case v.Execute() | v.Watch() | v.Unwatch() | v.Taken() | v.Interrupt() | v.Detach():
                return self._cells(view, body)
            case _:
                return await self._membership(body)
        return None

    def _cells(self, view: View, body: Any) -> Any:
        hub = self._hub
        match body:
            case v.Execute():
                number = hub.cells.submit(view, body)
                if body.stdin:
                    hub.inputs.offer(view, number, submits=True)
                return number
            case v.Watch():
                watched = hub.cells.watch(view, body.cell, body.background)
                if body.stdin:
                    hub.inputs.offer(view, body.cell)
                return watched
            case v.Unwatch():
                view.watching.discard(body.cell)
                view.flows.pop(body.cell, None)
            case v.Taken():
                hub.streaming.taken(view, body.cell, body.position)
            case v.Interrupt():
                return hub.cells.interrupt(body.force, body.cell)
            case v.Detach():
                hub.cells.detach()
        return None

    async def _membership(self, body: Any) -> Any:
        hub = self._hub
        match body:
            case v.AddNodes():
                if body.count < 0:
                    raise RequestError(f"cannot add {body.count} nodes: the number is 0 (one per accelerator) or more")
                return await hub.adding.add(body.peer, body.count, body.code, follow=body.follow, expect=body.expect)
            case v.Examine():
                return await hub.examination.run(body.packages)
            case v.Invite():
                return await hub.door.invite(body)
            case v.RemoveNode():
                hub.members.remove(body.node)
            case v.RestartNode():
                await hub.members.restart_and_wait(body.node, body.replay, body.all_cells)
            case v.SkipReplay():
                return await hub.replay.skip(body.node)
            case v.ReadNodeLog():
                node = hub.members.known(body.node)
                return await hub.incoming.read_log(node.peer, node.name, body.lines)
            case _:
                raise RequestError(f"unknown request {type(body).__name__}")
        return None
