"""The background runtime of a node: one I/O thread for the agent's socket, the mesh, jobs and telemetry.

The main thread runs the cell and calls in; everything that arrives is handled on the I/O thread, so a node answers
others and keeps its rounds going while its cell computes.
"""

import functools
import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from notebook_cluster.collectives import Collectives
from notebook_cluster.mesh import Lending, Mesh
from notebook_cluster.mesh.mesh import free_port
from notebook_cluster.node.data.shares import Shares
from notebook_cluster.node.data.training_loops import TrainingLoops
from notebook_cluster.node.runtime import world
from notebook_cluster.node.runtime.agent_socket import Control
from notebook_cluster.node.runtime.blocked import BlockedWaits
from notebook_cluster.node.runtime.decisions import DecisionClient
from notebook_cluster.node.runtime.jobs import Jobs
from notebook_cluster.node.runtime.output_backpressure import OutputGate
from notebook_cluster.node.runtime.running_cell import RunningCell, deferred_interrupts
from notebook_cluster.node.runtime.telemetry import TelemetryKeeper
from notebook_cluster.node.runtime.world import Rosters
from notebook_cluster.protocol import node as n
from notebook_cluster.protocol.cell_mark import CELL_MARK
from notebook_cluster.protocol.decisions import DECISIONS_JOB
from notebook_cluster.protocol.interaction import FetchVariables
from notebook_cluster.protocol.measuring import MeasurePair
from notebook_cluster.protocol.mesh import SHARD_JOB, CellFrame, JobFrame, MeshHeader
from notebook_cluster.protocol.transfers import ForgetTicket, ReadPart, WritePart
from notebook_cluster.protocol.wire import Message
from notebook_cluster.sockets import IOThread
from notebook_cluster.training.runtime import JobHandler, Payload
from notebook_cluster.values.transfer_store import SHELF

_log = logging.getLogger(__name__)

_HEARTBEAT = 1.0
"""Seconds between two signs of life to the coordinator."""
_LEFT_GRACE = 0.5
"""Seconds that a NodeLost with the cause may take longer than the roster that lacks the node."""


class NodeRuntime:
    """Implements :class:`notebook_cluster.training.runtime.Runtime`.

    Attributes:
        collectives: of the cell that runs.
        decisions: what its nodes decide together.
        roster: the newest one; None until the coordinator has sent it.
        lost: the cluster has ended this incarnation's part (it is in no roster any more).
    """

    def __init__(
        self, name: str, incarnation: int, *, device: str, control: str, sockets: Path | None, directory: Path
    ) -> None:
        """Start the thread, dial the agent at ``control`` and say NodeHello."""
        self._name, self._incarnation, self._directory = name, incarnation, directory
        self._device = world.torch_device(device, os.environ)
        work = os.environ.get("NOTEBOOK_CLUSTER_WORK", "")
        self._work = Path(work) if work else None
        self.roster: n.Roster | None = None
        self.on_fetch_variables: Callable[[FetchVariables], None] = lambda message: None
        """Called on the I/O thread; answers with Variables."""
        self._rosters = Rosters(name)
        self._lost: dict[tuple[str, int], str] = {}
        self.output_backpressure = OutputGate()
        self._running = RunningCell(os.environ.get(CELL_MARK, ""))
        self._loop = IOThread("notebook-cluster-node")
        self._loop.start()
        self._jobs = Jobs(lambda text: self.send_control(n.NodeLog(level="error", text=f"{name}: {text}")))
        self._mesh = Mesh(self._loop, name, incarnation, socket_directory=sockets, on_frame=self._on_frame)
        self._mesh.on_unreachable = self._on_unreachable
        self.lending = Lending(self._mesh)
        self.collectives = Collectives(self._mesh)
        self._control = Control(self._loop, control, f"{name}/{incarnation}", self._on_control)
        self._mesh.send_relay = self.send_control
        self._telemetry = TelemetryKeeper(self._device, self.send_control)
        self.collectives.receiver.on_waiting = self._telemetry.set_waiting
        self.collectives.receiver.on_lost = self._running.broken
        self.decisions = DecisionClient(name, self.send_control, self._telemetry.set_waiting)
        self.collectives.on_operation = self.decisions.enter_collective
        self._jobs.register(DECISIONS_JOB, self.decisions)
        self.blocked = BlockedWaits(
            self.collectives, self.decisions, send=self.send_control, cell=self.cell, end_round=self._jobs.on_control
        )
        self._heard: set[str] = set()
        soon, speed, tell = self._loop.call_soon, self._telemetry.speed, self.send_control
        self.shares = Shares(name, incarnation, send=self.send_mesh, call_soon=soon, speed=speed, tell=tell)
        self.data = TrainingLoops(self.shares)
        self._telemetry.progress = self.data.progress
        self._jobs.register(SHARD_JOB, self.shares)
        self._loop.every(0.1, self._tick)
        self._loop.every(_HEARTBEAT, self._beat)
        self.send_control(n.NodeHello(
            node=name, incarnation=incarnation, pid=os.getpid(), mesh_key=self._mesh.key,
            mesh_port=self._mesh.port, mesh_ipc=self._mesh.ipc, master_port=free_port(),
        ))  # fmt: skip

    # ---- what training and the nc names ask

    @property
    def name(self) -> str:
        return self._name

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def cell(self) -> int:
        return self._running.number

    def cell_info(self) -> world.CellInfo | None:
        """The cell that runs now; None outside cells."""
        return self._running.info

    def replaying(self) -> bool:
        return self._running.replays

    def rank(self) -> int:
        return self._row().rank

    def world_size(self) -> int:
        self._row()
        assert self.roster is not None
        return len(self.roster.nodes)

    def device(self) -> str:
        return self._device

    def share(self) -> tuple[int, int]:
        """(index, count) among the nodes that run this cell: how ``nc.shard`` divides data.

        A cell that runs on all nodes divides by the newest roster, so a node that joins gets its share; a cell that
        runs on some divides by those.
        """
        row = self._row()
        assert self.roster is not None
        among = self.shared_among()
        names = [node.name for node in world.ranked(self.roster) if not among or node.name in among]
        return names.index(row.name), len(names)

    def shared_among(self) -> tuple[str, ...]:
        """The nodes of a cell that runs on some only; empty: data is divided among all that are in."""
        return self._running.divided_among(self._name)

    def checkpoint_directory(self) -> Path:
        return self._directory / "checkpoints"

    def kept_directory(self) -> Path | None:
        return self._work

    def send_control(self, message: Message) -> None:
        self._control.send(message)

    def send_mesh(self, node: str, header: JobFrame, payload: Payload = b"") -> None:
        self.lending.send(node, header, payload)

    def attach_job(self, name: str, handler: JobHandler) -> None:
        self._jobs.register(name, handler)
        self._loop.call_soon(lambda: self._jobs.deliver_held(name, self.roster))

    def job(self, name: str) -> JobHandler | None:
        return self._jobs.get(name)

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon(callback)

    def at_cell_end(self, callback: Callable[[str], None]) -> None:
        self._running.at_end(callback)

    def when_broken(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` on the I/O thread, until the cell ends, when a Stop comes (with ``""``) or a node of the
        cell is lost (with who, and why): for what waits where neither can reach it."""
        self._running.when_broken(callback)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """On the I/O thread, from there."""
        self._loop.call_later(seconds, callback)

    def mesh_ports(self) -> set[int]:
        """TCP ports of the nodes' mesh, this one's too."""
        return {self._mesh.port} | {node.mesh_port for node in (self.roster.nodes if self.roster is not None else ())}

    def deferred_interrupts(self) -> AbstractContextManager[Callable[[], bool]]:
        return deferred_interrupts()

    def report(
        self,
        *,
        step: int | None = None,
        loss: float | None = None,
        samples_per_s: float | None = None,
        waiting: str | None = None,
        of_steps: int | None = None,
        of_run: tuple[str, int] | None = None,
        **scalars: float,
    ) -> None:
        self._telemetry.report(
            step=step, loss=loss, samples_per_s=samples_per_s, waiting=waiting, of_steps=of_steps, run=of_run,
            scalars=scalars,
        )  # fmt: skip

    def set_threads(self, threads: int, chosen: bool) -> None:
        """Tell how many threads libraries take here; see :meth:`.TelemetryKeeper.set_threads`."""
        self._telemetry.set_threads(threads, chosen)

    def in_round(self, job: str, round: int) -> None:
        self.blocked.in_round(job, round)

    def in_finish(self) -> None:
        self.decisions.enter_finish()

    # ---- the cell, on the main thread

    def begin_cell(self, info: world.CellInfo, timeout: float = 5.0) -> None:
        """Wait for the roster of ``info.generation`` and fix the cell's world.

        Raises:
            RuntimeError: it did not come within ``timeout`` seconds.
        """
        # A newer roster may be here already; the cell's world is that of the generation in which it started.
        roster = self._rosters.wait_for(info.generation, timeout, self._loop.call_soon)
        self._running.partial = bool(info.nodes) and any(node.name not in info.nodes for node in roster.nodes)
        self._running.forget_callbacks()
        cell_world = world.cell_world(info, roster, self._name)
        self.collectives.begin_cell(cell_world)
        members = [(row.name, row.incarnation) for row in roster.nodes if row.name in cell_world.nodes]
        self._loop.call_soon(lambda: self._mark_missing(members), wake=False)
        if not info.replay:
            self.data.begin_cell(info.cell, info.generation, info.code, joined=info.joined)
            self.decisions.begin_cell(info.cell, joined=info.joined)
            self._telemetry.begin_cell(info.cell)
        self._running.info = info

    def enter_cell(self) -> bool:
        """The user's code comes next: from now on a Stop interrupts the main thread. False when one came before."""
        return self._running.enter()

    def end_cell(self, status: str) -> None:
        """The cell is over with ``ok``, ``error: ...`` or ``interrupted``: tell those who asked, in order.

        Raises what the first of them raised; those after it are told that the cell has failed.
        """
        failure = self._running.tell_end(status)
        self.collectives.end_cell()
        self.shares.end_cell(0 if self.replaying() else self.cell())
        self.decisions.end_cell()
        self.lending.forget()
        self._running.info = None
        self._telemetry.flush()
        self._loop.call_soon(lambda: self._telemetry.tick(time.monotonic()))
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread and close the sockets."""
        self.lending.close()
        self._mesh.close()
        self._loop.close()

    # ---- on the I/O thread

    def _on_control(self, message: Any) -> None:
        match message:
            case n.Roster():
                self._on_roster(message)
            case n.NodeLost():
                self._lost[message.node, message.incarnation] = f"was lost: {message.reason}"
                self.collectives.receiver.lose(message.node, f"was lost: {message.reason}")
            case n.NodeSilent():
                self.collectives.receiver.silent(message.node, message.incarnation, message.reason)
            case n.InterruptCell():
                self._running.interrupt(message)
                if not message.sent:
                    self.send_control(n.InterruptSeen(cell=message.cell))
            case n.CellDone():
                self.collectives.receiver.on_cell_done(message)
            case n.EndWait():
                self.blocked.end(message)
            case n.RelayFrame():
                self._mesh.relay_frame(message)
            case n.RelayTaken():
                self._mesh.relay_taken(message)
            case n.UseRelay():
                self._mesh.use_relay(message)
            case MeasurePair():
                self._mesh.measure(message, self.send_control)
            case n.HoldOutput():
                self.output_backpressure.on_message(message)
            case n.KeepCheckpoint():
                self._jobs.keep(self.send_control, message.jobs)
            case FetchVariables():
                self.on_fetch_variables(message)
            case ReadPart() | WritePart() | ForgetTicket():
                SHELF.on_control(message, self.send_control)
            case _:
                self._jobs.on_control(message.job, message)

    def _on_roster(self, roster: n.Roster) -> None:
        if self.roster is not None and roster.generation < self.roster.generation:
            return
        before, self.roster = self.roster, roster
        again = before is not None and before.generation == roster.generation
        # A coordinator that was started again, which says a roster once more, has marked nobody.
        self.collectives.receiver.keep_silent({} if again else {node.name: node.incarnation for node in roster.nodes})
        for node in roster.nodes:
            self._lost.pop((node.name, node.incarnation), None)  # its machine was away and came back with it
        self._mesh.set_roster(roster)
        self.lending.on_roster(roster)
        self._jobs.on_roster(roster)
        self._rosters.add(roster)
        if before is not None:
            self._mark_missing([(node.name, node.incarnation) for node in before.nodes])

    def _mark_missing(self, members: list[tuple[str, int]]) -> None:
        """Those of ``members`` (name, incarnation) that are in the roster no more are holes in the running cell."""
        assert self.roster is not None
        cell, present = self.cell(), {(node.name, node.incarnation) for node in self.roster.nodes}
        for member in members:
            if member in self._lost:
                self.collectives.receiver.lose(member[0], self._lost[member])
            elif member not in present:
                self._loop.call_later(_LEFT_GRACE, functools.partial(self._left, cell, member))

    def _left(self, cell: int, member: tuple[str, int]) -> None:
        if cell == self.cell():
            self.collectives.receiver.lose(member[0], self._lost.get(member, "left the cluster"))

    def _on_frame(self, sender: str, header: MeshHeader, payload: memoryview) -> None:
        if isinstance(header, CellFrame):
            self.collectives.receiver.on_frame(sender, header, payload)
        elif isinstance(header, JobFrame):
            self._jobs.on_mesh(sender, header, payload)
        if len(payload):
            self._heard.add(sender)

    def _on_unreachable(self, node: str, incarnation: int, endpoint: str) -> None:
        self.send_control(n.Unreachable(node=node, incarnation=incarnation, endpoint=endpoint))

    def _beat(self, now: float) -> None:
        heard, self._heard = self._heard - {self._name}, set()
        self.send_control(n.Heartbeat(heard=sorted(heard)))

    def _tick(self, now: float) -> None:
        self.collectives.receiver.tick(now)
        self._jobs.tick(now)
        self._telemetry.tick(now)
        self.blocked.tick(now)
        SHELF.tick()

    def _row(self) -> n.NodeAddress:
        return world.own_row(self.roster, self._name)
