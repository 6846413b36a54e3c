"""The cells of a cluster: one runs at a time, the others queue."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from notebook_cluster.coordinator.cells.executions import Executions
from notebook_cluster.coordinator.cells.notices import Notices, ended_event, what_happened
from notebook_cluster.coordinator.cells.replay import Replay
from notebook_cluster.coordinator.cells.starting import Canaries, Starting
from notebook_cluster.coordinator.cells.streaming import Collected, OutputStreaming
from notebook_cluster.coordinator.core import CellWatcher, Core, Departure, MembershipWatcher
from notebook_cluster.coordinator.delivery import Delivery
from notebook_cluster.coordinator.nodes.membership import Membership
from notebook_cluster.coordinator.view_server import View, ViewServer
from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import Cell, cell_view
from notebook_cluster.protocol.hand_over import Timeout
from notebook_cluster.protocol.node import CellDone
from notebook_cluster.protocol.state import CellView
from notebook_cluster.protocol.views import CellChanged, CellEnded, Execute, RequestError

FAILED = {"error", "lost", "cancelled"}
STUBBORN_AFTER = 3.0
"""Seconds after a time-out until the nodes that do not stop are named."""
GATHER_SECONDS = 0.05
"""Nodes that end together are told together to those that go on; of most cells all nodes end within this time, and then
nobody need be told."""


class Cells(MembershipWatcher):
    """Cells that wait and run, one at a time: which nodes run it, who ends it, and what each view is told of it."""

    def __init__(
        self,
        core: Core,
        *,
        delivery: Delivery,
        views: ViewServer,
        membership: Membership,
        executions: Executions,
        replay: Replay,
        notices: Notices,
        streaming: OutputStreaming,
        collected: Collected,
        watcher: CellWatcher,
        trains: Callable[[int], bool],
    ) -> None:
        """``trains(cell)``: a sync object of it has registered."""
        self._core = core
        self._delivery = delivery
        self._views = views
        self._membership = membership
        self._executions = executions
        self._replay = replay
        self._notices = notices
        self._streaming = streaming
        self._collected = collected
        self._watcher, self._trains = watcher, trains
        self._starting = Starting(core, notices, replay, self.look)
        self._canaries = Canaries(core, executions=executions, notices=notices, replay=replay, watcher=watcher)
        self._left: list[e.CellNodeEnded] = []
        """Ends of nodes of which the others and the views were not told yet."""
        self._timers: dict[int, tuple[float, asyncio.TimerHandle]] = {}
        """Cell -> its ``--timeout`` in seconds, and when that is over."""
        self._reasons: dict[int, str] = {}
        """Why cells were interrupted that nobody stopped."""

    # ---- requests of views

    def submit(self, view: View, request: Execute) -> int:
        """Queue a cell and start it when nothing runs; returns its number."""
        self._check(request)
        number = max(self._core.state.cells, default=0) + 1
        self._core.record(
            e.CellSubmitted(
                cell=number, source=request.source, targets=request.targets, replay=request.replay,
                user_expressions=request.user_expressions, notebook_names=request.notebook_names, canary=request.canary,
            )
        )  # fmt: skip
        self._streaming.open(number)
        if request.watch:
            view.watch(number, request.background)
        if request.widgets:
            self._executions.with_widgets.add(number)
        loop = asyncio.get_running_loop()
        if request.timeout is not None:
            self._end_after(number, request.timeout, request.timeout)
        # After this call returns the reply is sent first, then the cell's events.
        loop.call_soon(self.look)
        loop.call_soon(self._tell_waiting, number)
        return number

    def _end_after(self, number: int, seconds: float, left: float) -> None:
        timer = asyncio.get_running_loop().call_later(left, self._timed_out, number, seconds)
        self._timers[number] = seconds, timer

    def moved(self) -> tuple[dict[int, Timeout], dict[int, str]]:
        """For the next coordinator: the time-outs of cells, and why cells were interrupted that nobody stopped."""
        now = asyncio.get_running_loop().time()
        timers = {number: Timeout(seconds, timer.when() - now) for number, (seconds, timer) in self._timers.items()}
        return timers, dict(self._reasons)

    def close(self) -> None:
        """Another coordinator looks after the time-outs."""
        for _, timer in self._timers.values():
            timer.cancel()

    def restore(self, timeouts: dict[int, Timeout], reasons: dict[int, str]) -> None:
        """What the coordinator before this one had of :meth:`moved`."""
        self._reasons |= reasons
        for number, timeout in timeouts.items():
            if number in self._core.state.unfinished:
                self._end_after(number, timeout.seconds, max(0.0, timeout.left))

    def _tell_waiting(self, number: int) -> None:
        """A cell that cannot start yet says what it waits for."""
        running = self._core.state.running()
        if self._core.state.cells[number].status == "queued" and running is not None:
            behind = any(running.id in view.background for view in self._views.views.values())
            how = " with --async" if behind else ""
            self._notices.changed(number, f"waiting for cell {running.id}, which runs{how}")

    def _check(self, request: Execute) -> None:
        state = self._core.state
        for name in request.targets:
            node = self._core.known_node(name)
            if not node.is_in and node.condition != "starting":
                raise RequestError(f"node {name!r} is {node.condition} ({node.reason}): %cluster restart {name}")
        if not state.roster_nodes() and not request.targets:
            way_out = "%cluster add PEER" + (" or %cluster restart all" if state.nodes else "")
            if any(launch.ended is None for launch in state.launches.values()):
                way_out = "%cluster status says how the machines stand that engines were asked for"
            raise RequestError(f"cluster {state.cluster!r} has no running node: {way_out}")
        if request.timeout is not None and not request.timeout > 0:
            raise RequestError(f"--timeout {request.timeout:g} is not a positive number of seconds")
        self._canaries.check(request)

    def watch(self, view: View, number: int, background: bool = False) -> CellView:
        """Everything so far to ``view``, then live."""
        cell = self._core.state.cells.get(number)
        if cell is None:
            raise RequestError(f"no cell {number} in cluster {self._core.state.cluster!r}")

        def catch_up() -> None:
            self._streaming.flush()  # what is kept and waits to be sent would come twice
            self._streaming.catch_up(view, number)
            self._collected.catch_up(view, number)
            current = self._core.state.cells[number]
            self._views.send(view, CellChanged(cell=number, nodes=dict(current.nodes)))
            if current.status in ("queued", "running"):
                view.watch(number, background)
                self._streaming.begin_anew(view, number)
            else:
                self._views.send(view, self._ended(number))

        asyncio.get_running_loop().call_soon(catch_up)
        return cell_view(cell)

    def unwatch(self, view: View, number: int) -> None:
        """Nothing more of cell ``number`` to ``view``."""
        view.watching.discard(number)
        self._streaming.begin_anew(view, number)

    def detach(self) -> None:
        """Free every view that waits; the cells go on."""
        for view in self._views.views.values():
            for number in view.watching - view.background:
                self._views.send(view, CellEnded(cell=number, status="detached"))
            view.watching &= view.background

    def interrupt(self, force: bool, number: int = 0) -> list[str]:
        """Cancel what has not started, SIGINT to all that run. Returns the nodes that were busy.

        With ``number`` only that cell: the one that runs when it waits in the queue goes on.
        """
        for cell in self._core.state.queue():
            if number in (0, cell.id):
                self._finish(cell, "interrupted")
        running = self._core.state.running()
        if running is None or number not in (0, running.id):
            return []
        self._executions.interrupted.add(running.id)
        self._watcher.cell_stopping(running.id)
        busy = [run.node for run in self._executions.of_cell(running.id)]
        if force:
            for name in busy:
                try:
                    self._membership.restart(name, "killed by a second Stop")
                except RequestError as error:
                    self._core.tell("error", str(error))
        else:
            self._executions.interrupt_all()
        if not busy:
            self._maybe_end(running)
        return busy

    # ---- start and end

    def look(self) -> None:
        """Start the next cell when nothing runs, end the running one when nobody runs it any more."""
        state = self._core.state
        running = state.running()
        if running is not None:
            self._maybe_end(running)
            return
        if not state.queue():
            return
        cell = state.queue()[0]
        if self._starting.waits(cell):
            return
        replaying = self._replay.names()
        ready = [node.name for node in state.roster_nodes() if cell.may_run(node.name) and node.name not in replaying]
        if not ready:
            if not any(cell.may_run(name) for name in replaying):
                self._starting.leave_out(cell)
                self._finish(cell, "error")
            return  # else it starts when a replay ends
        self._core.record(e.CellStarted(cell=cell.id, nodes=ready, generation=state.generation, time=time.time()))
        self._watcher.cell_started(cell.id, ready)
        metadata: dict[str, Any] = {"cell": cell.id, "generation": state.generation, "nodes": ready}
        for name in ready:
            self._executions.start(cell, name, metadata)
        self._starting.leave_out(cell)
        self._replay.say_left_out(cell.id, ready)
        if any(cell.id in view.background for view in self._views.views.values()):
            self._notices.changed(cell.id)  # nobody waits, but somebody shows where it runs

    def _tell_done(self, event: e.CellNodeEnded, waiting: list[str]) -> None:
        """Nodes that still run the cell need not wait for this one in a collective."""
        reason = what_happened(event) if event.status in ("error", "lost") else ""
        status = "interrupted" if event.status == "cancelled" else event.status
        done = CellDone(cell=event.cell, node=event.node, status=status, reason=reason)  # type: ignore[arg-type]
        for name in waiting:
            self._delivery.to_node(name, done)

    def node_ended(self, event: e.CellNodeEnded) -> None:
        """A run that is no replay has ended."""
        cell = self._core.state.cells.get(event.cell)
        if cell is None or cell.status != "running":
            return
        if event.status == "error" and (lacks := self._replay.lacks(event.node)):
            event = msgspec.structs.replace(event, reason=lacks)
        self._core.record(event)
        self._notices.node_ended(event)
        self._watcher.node_left(event.cell, event.node, event.status)
        cell = self._core.state.cells[event.cell]
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
            cell = self._core.state.cells[number]
            waiting = [name for name, status in cell.nodes.items() if status == "running"]
            if cell.status == "running" and waiting:
                for event in left:
                    if event.cell == number and event.node not in waiting:  # else it is back already
                        self._tell_done(event, waiting)
                self._notices.changed(number)

    def _maybe_end(self, cell: Cell) -> None:
        """End ``cell`` unless a node still runs it or a restarted one is about to."""
        if "running" in cell.nodes.values():
            return
        if not self._executions.was_interrupted(cell.id):
            coming = set(self._replay.names())
            coming |= {name for name, node in self._core.state.nodes.items() if node.condition == "starting"}
            if any(cell.wants(name) and name in cell.nodes for name in coming):
                return
        if self._canaries.widen(cell):
            return
        cell = self._core.state.cells[cell.id]
        statuses = set(cell.nodes.values())
        if self._executions.was_interrupted(cell.id) or "interrupted" in statuses:
            self._finish(cell, "interrupted")
        else:
            self._finish(cell, "error" if statuses & FAILED else "ok")

    def _finish(self, cell: Cell, status: e.CellStatus) -> None:
        self._core.record(e.CellFinished(cell=cell.id, status=status, time=time.time()))
        self._streaming.finish(cell.id)
        self._executions.forget(cell.id)
        _, timer = self._timers.pop(cell.id, (0.0, None))
        if timer is not None:
            timer.cancel()
        self._views.send_watching(cell.id, self._ended(cell.id))
        for view in self._views.views.values():
            view.watching.discard(cell.id)
        asyncio.get_running_loop().call_soon(self.look)

    def _ended(self, number: int) -> CellEnded:
        return ended_event(self._core.state.cells[number], self._reasons.get(number, ""), self._trains(number))

    def _timed_out(self, number: int, seconds: float) -> None:
        cell = self._core.state.cells[number]
        late = [name for name, status in cell.nodes.items() if status == "running"]
        reason = f"ran longer than --timeout {seconds:g} s; still busy: {', '.join(late)}"
        if cell.status == "queued":
            running = self._core.state.running()
            busy = f": cell {running.id} runs" if running is not None else ""
            reason = f"did not start within --timeout {seconds:g} s{busy}"
        self._reasons[number] = reason
        self._core.tell("warning", f"cell {number} {reason}")
        self._notices.changed(number, f"cell {number} {reason}")
        self.interrupt(force=False, number=number)
        asyncio.get_running_loop().call_later(STUBBORN_AFTER, self._tell_stubborn, number)

    def _tell_stubborn(self, number: int) -> None:
        """After a time-out nobody may be there who looks at who does not obey."""
        busy = [run.node for run in self._executions.of_cell(number)]
        if busy:
            self._notices.changed(number, f"still busy: {', '.join(busy)}. Stop twice kills and restarts them")

    # ---- membership

    def node_down(self, departure: Departure) -> None:
        self._executions.node_lost(departure.node, departure.incarnation, departure.reason, departure.log_tail)

    def node_returned(self, name: str) -> None:
        """Its peer is back; if its kernel still runs the cell, we wait for it again."""
        cell = self._core.state.running()
        if cell is not None and cell.nodes.get(name) == "lost":
            self._executions.resume(cell.id, name)
            self._core.record(e.CellNodeReturned(cell=cell.id, node=name))
            self._watcher.node_joined(cell.id, name)
            self._notices.changed(cell.id)

    def recover(self) -> None:
        """After a restart of the coordinator: wait for the runs that go on. What was sent for them is sent again (an
        agent drops an execute that it has seen): the coordinator may have died between its log and its socket."""
        running = self._core.state.running()
        if running is not None:
            waiting = [name for name, status in running.nodes.items() if status == "running"]
            for name in waiting:
                partners = running.partners(name)
                metadata = {"cell": running.id, "generation": running.generation, "nodes": partners}
                if name in self._core.state.nodes:
                    self._executions.start(running, name, metadata)
            for name, result in running.results.items():
                if name not in waiting:
                    self._tell_done(result, waiting)
        asyncio.get_running_loop().call_soon(self.look)
