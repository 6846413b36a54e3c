"""One cluster's nodes on this peer: does what its coordinator asks for over the link's session."""

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from notebook_cluster.agent.events import EventKind, SharingEvent
from notebook_cluster.agent.keeping import CheckpointKeeper, KeptNews
from notebook_cluster.agent.kernels.control_socket import ControlSocket, OutputHolder
from notebook_cluster.agent.kernels.kernel import Kernel
from notebook_cluster.agent.kernels.supervisor import KernelEnvironment
from notebook_cluster.agent.machine import MachineSample
from notebook_cluster.agent.resources import Resources
from notebook_cluster.agent.sharing.admission import Applicant, StartRefused
from notebook_cluster.agent.transfers import FileTransfers
from notebook_cluster.link import Session
from notebook_cluster.protocol import encode
from notebook_cluster.protocol.cell_mark import CELL_MARK, CellMark
from notebook_cluster.protocol.kept import AskKept
from notebook_cluster.protocol.names import is_name
from notebook_cluster.protocol.node import InterruptCell, InterruptSeen
from notebook_cluster.protocol.peer import (
    AskInventory,
    Diagnose,
    FromNode,
    InterruptNode,
    Inventory,
    LogLines,
    NodeRefused,
    PeerSample,
    ReadLog,
    Release,
    StartNode,
    StopNode,
    ToKernel,
    ToNode,
)
from notebook_cluster.protocol.transfers import FilesRequest
from notebook_cluster.protocol.wire import Message

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""For a kernel to end by itself before SIGKILL: user code may hold it."""
_DIAGNOSES_AT_ONCE = 2


class ClusterHost:
    """The nodes of one cluster here.

    Args:
        session: the link's session with the cluster's coordinator.
        number: unique within this agent, keeps socket paths short.
        owner: whose cluster it is, for people.
        owner_id: the same for all clusters of that owner, see :meth:`.sharing.coordinators.Coordinators.owner_id`.
        folder: name of its folders for work and logs.
        on_release: called when the coordinator said that the cluster is over.
        on_ask_kept: called when it asks what is kept of its cluster here.
    """

    def __init__(
        self,
        session: Session,
        resources: Resources,
        number: int,
        *,
        owner: str,
        owner_id: str,
        folder: str,
        on_release: "Callable[[ClusterHost, Release], None]",
        on_ask_kept: "Callable[[ClusterHost, AskKept], None]",
    ) -> None:
        self.session = session
        self.name = session.cluster_name
        self.owner = owner
        self.owner_id = owner_id
        self.folder = folder
        self.kernels: dict[str, Kernel] = {}
        self._over: dict[str, int] = {}
        """Node -> the last incarnation that came to its end here: an order that is repeated does not start it again."""
        self.was_silent = False
        self.is_window = False
        """It has no nodes: its owner looks through it at a cluster that is led elsewhere."""
        self._closing = False
        self._resources = resources
        self._on_release = on_release
        self._on_ask_kept = on_ask_kept
        self._keeping = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._diagnoses = asyncio.Semaphore(_DIAGNOSES_AT_ONCE)
        self._control = ControlSocket(resources.context, resources.sockets / f"c{number}", self._from_node)
        self._keeper = CheckpointKeeper(self._control)
        self._holder = OutputHolder(session, self._control)
        self._environment = KernelEnvironment(
            resources.peer,
            resources.directory,
            folder,
            resources.sockets / f"k{number}",
            resources.sockets / f"m{number}",
        )
        self._environment.mesh_sockets.mkdir(mode=0o700)
        self.kept = KeptNews(session, resources.directory / "work")
        self._files = FileTransfers(resources.admission.limits, self._environment.folder_of, session.send)
        session.on_shortened = self._shortened

    def inventory(self, ended: str = "") -> Inventory:
        """The kernels that run now. ``ended``: why those that its coordinator knows of ended without it."""
        return Inventory(nodes=[kernel.started() for kernel in self.kernels.values() if kernel.running], ended=ended)

    def sample(self, machine: MachineSample) -> PeerSample:
        """One PeerSample: the machine, and this cluster's kernels."""
        nodes = []
        for kernel in self.kernels.values():
            if kernel.running and kernel.sampler is not None:
                sample = kernel.sampler.sample(kernel.node, machine.process_memory)
                if sample is not None:
                    nodes.append(sample)
        return PeerSample(
            time=machine.time,
            cpu=machine.cpu,
            ram_used=machine.ram_used,
            ram_total=machine.ram_total,
            devices=machine.devices,
            nodes=nodes,
            battery=machine.battery.percent if machine.battery is not None else None,
            plugged=machine.battery is None or machine.battery.plugged,
        )

    def handle(self, message: Message, buffers: Sequence[bytes]) -> None:
        """One message of the coordinator."""
        if self._closing:
            return
        match message:
            case ToKernel():
                if (kernel := self._find(message.node, message.incarnation)) is not None:
                    kernel.send(message.channel, buffers, subshell=message.subshell)
            case ToNode():
                self._control.send(message.node, message.incarnation, message.body)
            case InterruptNode():
                if (kernel := self._find(message.node, message.incarnation)) is not None:
                    self._interrupt(kernel, message.cell)
            case StartNode():
                self._start(message)
            case StopNode():
                if (kernel := self._find(message.node, message.incarnation)) is not None:
                    self._resources.node_count.drop(kernel)  # the others' next cell need not wait for its end
                    self._spawn(kernel.end("stopped", 0.0 if message.force else GRACE_S))
            case ReadLog():
                self.session.send(
                    LogLines(node=message.node, lines=self._environment.log_lines(message.node, message.lines))
                )
            case AskInventory():
                self.session.send(self.inventory())
            case FilesRequest():
                self._files.handle(message, buffers)
            case Diagnose():
                self._spawn(self._diagnose(message, buffers))
            case AskKept():
                self._on_ask_kept(self, message)
            case Release():
                self._on_release(self, message)
            case _:
                log.warning("cluster %s sent an unexpected %s", self.name, type(message).__name__)

    async def end_kernels(self, reason: str, *, asked: bool, grace: float = GRACE_S) -> None:
        """End all kernels of this cluster and take no more orders; returns when they are gone and that is sent."""
        self._closing = True
        await self.end_nodes(reason, asked=asked, grace=grace)

    async def end_nodes(self, reason: str, *, asked: bool = False, grace: float = GRACE_S) -> None:
        """End the kernels that are there now; the cluster may start others."""
        await asyncio.gather(*(kernel.end(reason, grace, asked=asked) for kernel in list(self.kernels.values())))

    async def keep_checkpoints(
        self, reason: str, errors: list[str] | None = None, jobs: Sequence[str] = ()
    ) -> list[str]:
        """Let every node save its training, or these ``jobs``, see :class:`.CheckpointKeeper`, after who does so
        already; returns the folders written. To ``errors`` a line is added for each node that could not."""
        folders: dict[str, None] = {}
        async with self._keeping:
            nodes = [(kernel.node, kernel.incarnation) for kernel in self.kernels.values() if kernel.running]
            answers = await self._keeper.keep(nodes, reason, jobs)
        for node, kept in answers.items():
            folders |= dict.fromkeys(kept.folders)
            if kept.error:
                line = f"node {node} of cluster {self.name} kept no checkpoint: {kept.error}"
                self._tell("warning", line)
                errors = [] if errors is None else errors
                errors.append(line)
        if folders:
            self._tell("kept", f"checkpoint of cluster {self.name} kept in {', '.join(folders)}")
        return list(folders)

    def close(self) -> None:
        """Close the control socket and remove the mesh's; call after :meth:`end_kernels`."""
        self._files.close()
        self._control.close()
        shutil.rmtree(self._environment.mesh_sockets, ignore_errors=True)

    def _interrupt(self, kernel: Kernel, cell: int) -> None:
        if not cell:
            kernel.interrupt()
        elif kernel.interrupt_inside(cell):
            seen = encode(InterruptSeen(cell=cell))
            self.session.send(FromNode(node=kernel.node, incarnation=kernel.incarnation, body=seen))
            # Python's own handler runs when the main thread does: not while that waits inside torch.
            self._control.send(kernel.node, kernel.incarnation, encode(InterruptCell(cell=cell, sent=True)))
        else:
            self._control.send(kernel.node, kernel.incarnation, encode(InterruptCell(cell=cell)))
            kernel.wake()

    # ---- starting ----------------------------------------------------------------------------------------------

    def _start(self, message: StartNode) -> None:
        present = self.kernels.get(message.node)
        if present is not None and present.incarnation == message.incarnation:
            if present.running:
                self.session.send(present.started())
            return
        if message.incarnation <= self._over.get(message.node, 0):
            return
        reason = ""
        if not is_name(message.node):
            reason = f"node name {message.node[:80]!r} is not usable: use letters, digits, '_', '-' or '.'"
        elif present is not None and present.incarnation > message.incarnation:
            reason = f"incarnation {present.incarnation} of {message.node} runs already"
        if reason:
            self.session.send(NodeRefused(node=message.node, incarnation=message.incarnation, reason=reason))
            return
        # Both from now on, so that messages which follow StartNode find the node.
        kernel = self.kernels[message.node] = Kernel(
            message.node, message.incarnation, self.session, self._holder.printed
        )
        self._control.expect(message.node, message.incarnation)
        self._spawn(self._life(kernel, message, present))

    async def _life(self, kernel: Kernel, message: StartNode, previous: Kernel | None) -> None:
        """From StartNode to NodeEnded (or NodeRefused)."""
        if previous is not None:
            await previous.end("stopped", 0.0)
        await self._resources.devices_known.wait()
        try:
            await self._resources.admission.admit(
                kernel, Applicant(message.node, self.name, self.owner, kernel.unwanted, self.owner_id)
            )
            kernel.device = self._resources.choose_device(message.device, self.name)
            self._count(kernel)
            options = self._environment.options(
                message, kernel.device, self._resources.devices, self._control.endpoint, self._resources.node_count
            )
            kernel.mark = CellMark(Path(options.environment[CELL_MARK]))
            process = await kernel.start(self._resources.context, options, self._resources.programs)
        except (StartRefused, OSError, ValueError) as error:
            self._refuse(kernel, str(error))
            return
        except Exception as error:
            # Whatever it is, the coordinator must hear of it.
            log.exception("node %s of cluster %s could not be started", message.node, self.name)
            self._refuse(kernel, f"it could not be started on {self._resources.peer}: {error!r}")
            return
        self._resources.watchdog.add(process.pid)
        log.info("node %s of cluster %s has pid %d", message.node, self.name, process.pid)
        self._tell(
            "node-started",
            f"{self.owner} started node {message.node} of cluster {self.name} on {kernel.device}",
            message.node,
        )
        self.session.send(kernel.started())
        if message.directory:
            self._spawn(self.kept.tell(options.directory))
        if kernel.unwanted.is_set():
            # While it was being started.
            process.kill()
        await kernel.gone.wait()
        self._resources.watchdog.drop(process.pid)
        self._forget(kernel)
        ended = kernel.ended_message()
        self._tell(
            "node-ended",
            f"node {message.node} of cluster {self.name} of {self.owner} ended: {ended.reason}",
            message.node,
        )
        self.session.send(ended)
        kernel.over.set()

    def _refuse(self, kernel: Kernel, reason: str) -> None:
        self._forget(kernel)
        self._tell(
            "node-refused", f"node {kernel.node} of cluster {self.name} of {self.owner} refused: {reason}", kernel.node
        )
        self.session.send(NodeRefused(node=kernel.node, incarnation=kernel.incarnation, reason=reason))
        kernel.over.set()

    # ---- small parts -------------------------------------------------------------------------------------------

    def _find(self, node: str, incarnation: int) -> Kernel | None:
        kernel = self.kernels.get(node)
        return kernel if kernel is not None and kernel.incarnation == incarnation else None

    def _forget(self, kernel: Kernel) -> None:
        self._control.forget(kernel.node, kernel.incarnation)
        if kernel.mark is not None:
            kernel.mark.close()
        self._resources.admission.leave(kernel)
        self._resources.node_count.drop(kernel)
        self._keeper.gone(kernel.node, kernel.incarnation)
        self._over[kernel.node] = max(kernel.incarnation, self._over.get(kernel.node, 0))
        if self.kernels.get(kernel.node) is kernel:
            del self.kernels[kernel.node]
        if kernel.device not in ("", "cpu"):
            self._resources.leases.give_back(kernel.device)
            self._resources.leases_changed()

    def _count(self, kernel: Kernel) -> None:
        """For all agents of this user: their nodes share the cores of this machine."""
        try:
            self._resources.node_count.add(kernel)
        except OSError as error:
            self._tell("warning", f"nodes here may take more threads than there are cores for: {error}")

    def _shortened(self, count: int) -> None:
        for kernel in self.kernels.values():
            kernel.tell_left_out()

    def _from_node(self, node: str, incarnation: int, body: bytes) -> None:
        if not self._keeper.take(node, incarnation, body):
            self.session.send(FromNode(node=node, incarnation=incarnation, body=body))

    async def _diagnose(self, message: Diagnose, buffers: Sequence[bytes]) -> None:
        from notebook_cluster.agent.diagnosis import diagnose

        async with self._diagnoses:
            self.session.send(await diagnose(message), buffers)

    def _tell(self, kind: EventKind, text: str, node: str = "") -> None:
        self._resources.tell(SharingEvent(kind, text, owner=self.owner, cluster=self.name, node=node))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
