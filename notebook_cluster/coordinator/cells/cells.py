"""The cells of a cluster: one runs at a time, the others queue."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from notebook_cluster.coordinator.cells import canary
from notebook_cluster.coordinator.cells.collected import Collected
from notebook_cluster.coordinator.cells.executions import Executions
from notebook_cluster.coordinator.cells.notices import Notices, what_happened
from notebook_cluster.coordinator.cells.starting import Starting
from notebook_cluster.coordinator.view_server import View
from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import Cell, cell_view
from notebook_cluster.protocol.node import CellDone
from notebook_cluster.protocol.state import CellView
from notebook_cluster.protocol.views import CellChanged, CellEnded, Execute, NodeResult, RequestError

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

FAILED = {"error", "lost", "cancelled"}
STUBBORN_AFTER = 3.0
"""Seconds after a time-out until the nodes that do not stop are named."""
GATHER_SECONDS = 0.05
"""Nodes that end together are told together to those that go on; of most cells all nodes end within this time, and then
nobody need be told."""


class Cells:
    """Cells that wait and run, one at a time: which nodes run it, who ends it, and what each view is told of it."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self.collected = Collected(hub)
        self.runs = Executions(hub, self._node_ended)
        self.notices = Notices(hub)
        self._starting = Starting(hub)
        self._with_widgets: set[int] = set()
        """Cells that were submitted by a view which shows widgets of nodes."""
        self._interrupted: set[int] = set()
        self._left: list[e.CellNodeEnded] = []
        """Ends of nodes of which the others and the views were not told yet."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._reasons: dict[int, str] = {}
        """Why cells were interrupted that nobody stopped."""

    # ---- requests of views

    def submit(self, view: View, request: Execute) -> int:
        """Queue a cell and start it when nothing runs; returns its number."""
        self._check(request)
        number = max(self._hub.state.cells, default=0) + 1
        self._hub.record(
            e.CellSubmitted(
                cell=number,
                source=request.source,
                targets=request.targets,
                replay=request.replay,
                user_expressions=request.user_expressions,
                notebook_names=request.notebook_names,
                canary=request.canary,
            )
        )
        self._hub.streaming.open(number)
        if request.watch:
            view.watch(number, request.background)
        if request.widgets:
            self._with_widgets.add(number)
        loop = asyncio.get_running_loop()
        if request.timeout is not None:
            self._timers[number] = loop.call_later(request.timeout, self._timed_out, number, request.timeout)
        # After this call returns the reply is sent first, then the cell's events.
        loop.call_soon(self.look)
        loop.call_soon(self._tell_waiting, number)
        return number

    def _tell_waiting(self, number: int) -> None:
        """A cell that cannot start yet says what it waits for."""
        running = self._hub.state.running()
        if self._hub.state.cells[number].status == "queued" and running is not None:
            behind = any(running.id in view.background for view in self._hub.views.views.values())
            how = " with --async" if behind else ""
            self.changed(number, f"waiting for cell {running.id}, which runs{how}")

    def _check(self, request: Execute) -> None:
        state = self._hub.state
        for name in request.targets:
            node = self._hub.members.known(name)
            if not node.is_in and node.condition != "starting":
                raise RequestError(f"node {name!r} is {node.condition} ({node.reason}): %cluster restart {name}")
        if not state.roster_nodes() and not request.targets:
            raise RequestError(
                f"cluster {state.cluster!r} has no running node: %cluster add PEER or %cluster restart NODE"
            )
        if request.timeout is not None and not request.timeout > 0:
            raise RequestError(f"--timeout {request.timeout:g} is not a positive number of seconds")
        canary.check(self._hub, request)

    def watch(self, view: View, number: int, background: bool = False) -> CellView:
        """Everything so far to ``view``, then live."""
        cell = self._hub.state.cells.get(number)
        if cell is None:
            raise RequestError(f"no cell {number} in cluster {self._hub.state.cluster!r}")
        self._hub.streaming.flush()

        def catch_up() -> None:
            self._hub.streaming.catch_up(view, number)
            self.collected.catch_up(view, number)
            current = self._hub.state.cells[number]
            self._hub.views.send(view, CellChanged(cell=number, nodes=dict(current.nodes)))
            if current.status in ("queued", "running"):
                view.watch(number, background)
            else:
                self._hub.views.send(view, ended_event(current, self._reasons.get(number, "")))

        asyncio.get_running_loop().call_soon(catch_up)
        return cell_view(cell)

    def detach(self) -> None:
        """Free every view that waits; the cells go on."""
        for view in self._hub.views.views.values():
            for number in view.watching - view.background:
                self._hub.views.send(view, CellEnded(cell=number, status="detached"))
            view.watching &= view.background

    def interrupt(self, force: bool, number: int = 0) -> list[str]:
        """Cancel what has not started, SIGINT to all that run. Returns the nodes that were busy.

        With ``number`` only that cell: the one that runs when it waits in the queue goes on.
        """
        for cell in self._hub.state.queue():
            if number in (0, cell.id):
                self._finish(cell, "interrupted")
        running = self._hub.state.running()
        if running is None or number not in (0, running.id):
            return []
        self._interrupted.add(running.id)
        busy = [run.node for run in self.runs.of_cell(running.id)]
        if force:
            for name in busy:
                try:
                    self._hub.members.restart(name, "killed by a second Stop")
                except RequestError as error:
                    self._hub.tell("error", str(error))
        else:
            self.runs.interrupt_all()
        if not busy:
            self._maybe_end(running)
        return busy

    def shows_widgets(self, cell: int) -> bool:
        """Whether progress bars in ``cell`` may be widgets."""
        return cell in self._with_widgets

    def was_interrupted(self, cell: int) -> bool:
        return cell in self._interrupted

    # ---- start and end

    def look(self) -> None:
        """Start the next cell when nothing runs, end the running one when nobody runs it any more."""
        state = self._hub.state
        running = state.running()
        if running is not None:
            self._maybe_end(running)
            return
        if not state.queue():
            return
        cell = state.queue()[0]
        if self._starting.waits(cell):
            return
        replaying = self._hub.replay.names()
        ready = [node.name for node in state.roster_nodes() if cell.may_run(node.name) and node.name not in replaying]
        if not ready:
            if not any(cell.may_run(name) for name in replaying):
                self._starting.leave_out(cell)
                self._finish(cell, "error")
            return  # else it starts when a replay ends
        self._hub.record(e.CellStarted(cell=cell.id, nodes=ready, generation=state.generation, time=time.time()))
        self._hub.rounds.cell_started(cell.id, ready)
        metadata: dict[str, Any] = {"cell": cell.id, "generation": state.generation, "nodes": ready}
        for name in ready:
            self.runs.start(cell, name, metadata)
        self._starting.leave_out(cell)
        self._hub.replay.say_left_out(cell.id, ready)
        if any(cell.id in view.background for view in self._hub.views.views.values()):
            self.changed(cell.id)  # nobody waits, but somebody shows where it runs

    def _tell_done(self, event: e.CellNodeEnded, waiting: list[str]) -> None:
        """Nodes that still run the cell need not wait for this one in a collective."""
        reason = what_happened(event) if event.status in ("error", "lost") else ""
        status = "interrupted" if event.status == "cancelled" else event.status
        done = CellDone(cell=event.cell, node=event.node, status=status, reason=reason)  # type: ignore[arg-type]
        for name in waiting:
            self._hub.members.send(name, done)

    def _node_ended(self, event: e.CellNodeEnded) -> None:
        cell = self._hub.state.cells.get(event.cell)
        if cell is None or cell.status != "running":
            return
        if event.status == "error" and (lacks := self._hub.replay.lacks(event.node)):
            event = msgspec.structs.replace(event, reason=lacks)
        self._hub.record(event)
        self.notices.node_ended(event)
        self._hub.rounds.cell_left(event.cell, event.node, event.status)
        cell = self._hub.state.cells[event.cell]
        waiting = [name for name, status in cell.nodes.items() if status == "running"]
        if not waiting:
            self._maybe_end(cell)
            return
        if not self._left:
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self._tell_left)
        self._left.append(event)

    def _tell_left(self) -> None:
        """Tell of the nodes that left a cell which still runs."""
        left, self._left = self._left, []
        for number in {event.cell for event in left}:
            cell = self._hub.state.cells[number]
            waiting = [name for name, status in cell.nodes.items() if status == "running"]
            if cell.status == "running" and waiting:
                for event in left:
                    if event.cell == number and event.node not in waiting:  # else it is back already
                        self._tell_done(event, waiting)
                self.changed(number)

    def _maybe_end(self, cell: Cell) -> None:
        """End ``cell`` unless a node still runs it or a restarted one is about to."""
        if "running" in cell.nodes.values():
            return
        if cell.id not in self._interrupted:
            coming = set(self._hub.replay.names())
            coming |= {name for name, node in self._hub.state.nodes.items() if node.condition == "starting"}
            if any(cell.wants(name) and name in cell.nodes for name in coming):
                return
        if canary.go_on(self._hub, cell):
            return
        cell = self._hub.state.cells[cell.id]
        statuses = set(cell.nodes.values())
        if cell.id in self._interrupted or "interrupted" in statuses:
            self._finish(cell, "interrupted")
        else:
            self._finish(cell, "error" if statuses & FAILED else "ok")

    def _finish(self, cell: Cell, status: e.CellStatus) -> None:
        self._hub.record(e.CellFinished(cell=cell.id, status=status, time=time.time()))
        self._hub.streaming.finish(cell.id)
        self._with_widgets.discard(cell.id)
        timer = self._timers.pop(cell.id, None)
        if timer is not None:
            timer.cancel()
        self._interrupted.discard(cell.id)
        ended = ended_event(self._hub.state.cells[cell.id], self._reasons.get(cell.id, ""))
        self._hub.views.send_watching(cell.id, ended)
        for view in self._hub.views.views.values():
            view.watching.discard(cell.id)
        asyncio.get_running_loop().call_soon(self.look)

    def changed(self, number: int, note: str = "") -> None:
        """Tell who watches how each node is doing."""
        nodes = {**self._hub.state.cells[number].nodes, **dict.fromkeys(self._hub.replay.names(), "replaying")}
        self._hub.views.send_watching(number, CellChanged(cell=number, nodes=nodes, note=note))

    def _timed_out(self, number: int, seconds: float) -> None:
        cell = self._hub.state.cells[number]
        late = [name for name, status in cell.nodes.items() if status == "running"]
        reason = f"ran longer than --timeout {seconds:g} s; still busy: {', '.join(late)}"
        if cell.status == "queued":
            running = self._hub.state.running()
            busy = f": cell {running.id} runs" if running is not None else ""
            reason = f"did not start within --timeout {seconds:g} s{busy}"
        self._reasons[number] = reason
        self._hub.tell("warning", f"cell {number} {reason}")
        self.changed(number, f"cell {number} {reason}")
        self.interrupt(force=False, number=number)
        asyncio.get_running_loop().call_later(STUBBORN_AFTER, self._tell_stubborn, number)

    def _tell_stubborn(self, number: int) -> None:
        """After a time-out nobody may be there who looks at who does not obey."""
        busy = [run.node for run in self.runs.of_cell(number)]
        if busy:
            self.changed(number, f"still busy: {', '.join(busy)}. Stop twice kills and restarts them")

    # ---- membership

    def node_returned(self, name: str) -> None:
        """Its peer is back; if its kernel still runs the cell, we wait for it again."""
        cell = self._hub.state.running()
        if cell is not None and cell.nodes.get(name) == "lost":
            self.runs.resume(cell.id, name)
            self._hub.record(e.CellNodeReturned(cell=cell.id, node=name))
            self._hub.rounds.node_joined_cell(cell.id, name)
            self.changed(cell.id)

    def recover(self) -> None:
        """After a restart of the coordinator: wait for the runs that go on. What was sent for them is sent again (an
        agent drops an execute that it has seen): the coordinator may have died between its log and its socket."""
        running = self._hub.state.running()
        if running is not None:
            waiting = [name for name, status in running.nodes.items() if status == "running"]
            for name in waiting:
                partners = running.partners(name)
                metadata = {"cell": running.id, "generation": running.generation, "nodes": partners}
                if name in self._hub.state.nodes:
                    self.runs.start(running, name, metadata)
            for name, result in running.results.items():
                if name not in waiting:
                    self._tell_done(result, waiting)
        asyncio.get_running_loop().call_soon(self.look)


def ended_event(cell: Cell, reason: str = "") -> CellEnded:
    """The last event of a cell for the views that watch it."""
    known = ("ok", "error", "interrupted", "lost")
    results = {
        name: NodeResult(
            status=result.status if result.status in known else "cancelled",  # type: ignore[arg-type]
            error_name=result.error_name,
            error_value=result.error_value,
            reason=result.reason,
            log_tail=result.log_tail,
            user_expressions=result.user_expressions,
        )
        for name, result in cell.results.items()
    }
    return CellEnded(cell=cell.id, status=cell.status, results=results, reason=reason)  # type: ignore[arg-type]
