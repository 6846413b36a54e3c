"""One cluster's nodes on this peer: does what its coordinator asks for over the link's session."""

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from notebook_cluster.agent.control import ControlSocket
from notebook_cluster.agent.devices import Devices
from notebook_cluster.agent.kernel import Kernel
from notebook_cluster.agent.leases import DeviceLeases
from notebook_cluster.agent.sampling import MachineSample
from notebook_cluster.agent.supervisor import KernelOptions, read_tail
from notebook_cluster.agent.watchdog import Watchdog
from notebook_cluster.link import Session
from notebook_cluster.protocol.names import is_name
from notebook_cluster.protocol.peer import (
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
from notebook_cluster.protocol.wire import Message

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""For a kernel to end by itself before SIGKILL: user code may hold it."""
_KEPT_LOGS = 3
_MAX_LOG_LINES = 10_000


class Refusal(Exception):
    """A node cannot be started; the text is the one-line reason."""


@dataclass
class Resources:
    """What all clusters on this peer share."""

    peer: str
    devices: Devices
    devices_known: asyncio.Event
    leases: DeviceLeases
    watchdog: Watchdog
    context: zmq.Context[zmq.Socket[bytes]]
    sockets: Path
    """The agent's 0700 socket folder."""
    directory: Path
    """The agent's data folder: ``work/<cluster>/`` and ``logs/<cluster>/``."""
    leases_changed: Callable[[], None]


class ClusterHost:
    """The nodes of one cluster here.

    Args:
        session: the link's session with the cluster's coordinator.
        number: unique within this agent, keeps socket paths short.
        on_release: called when the coordinator said that the cluster is over.
    """

    def __init__(
        self, session: Session, resources: Resources, number: int, on_release: "Callable[[ClusterHost], None]"
    ) -> None:
        self.session = session
        self.name = session.cluster_name
        self.kernels: dict[str, Kernel] = {}
        self.was_silent = False
        self._closing = False
        self._resources = resources
        self._number = number
        self._started = 0
        self._on_release = on_release
        self._logs: dict[str, Path] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._control = ControlSocket(resources.context, resources.sockets / f"c{number}", self._from_node)
        self._mesh_sockets = resources.sockets / f"m{number}"
        self._mesh_sockets.mkdir(mode=0o700)
        session.on_shortened = self._shortened

    def inventory(self) -> Inventory:
        """The kernels that run now."""
        return Inventory(nodes=[kernel.started() for kernel in self.kernels.values() if kernel.running])

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
        )

    def handle(self, message: Message, buffers: Sequence[bytes]) -> None:
        """One message of the coordinator."""
        if self._closing:
            return
        match message:
            case ToKernel():
                if (kernel := self._find(message.node, message.incarnation)) is not None:
                    kernel.send(message.channel, buffers)
            case ToNode():
                self._control.send(message.node, message.incarnation, message.body)
            case InterruptNode():
                if (kernel := self._find(message.node, message.incarnation)) is not None:
                    kernel.interrupt()
            case StartNode():
                self._start(message)
            case StopNode():
                if (kernel := self._find(message.node, message.incarnation)) is not None:
                    self._spawn(kernel.end("stopped", 0.0 if message.force else GRACE_S))
            case ReadLog():
                self._read_log(message)
            case Release():
                self._on_release(self)
            case _:
                log.warning("cluster %s sent an unexpected %s", self.name, type(message).__name__)

    async def end_kernels(self, reason: str, *, asked: bool, grace: float = GRACE_S) -> None:
        """End all kernels of this cluster and take no more orders; returns when they are gone and that is sent."""
        self._closing = True
        await asyncio.gather(*(kernel.end(reason, grace, asked=asked) for kernel in list(self.kernels.values())))

    def close(self) -> None:
        """Close the control socket and remove the mesh's; call after :meth:`end_kernels`."""
        self._control.close()
        shutil.rmtree(self._mesh_sockets, ignore_errors=True)

    # ---- starting ----------------------------------------------------------------------------------------------

    def _start(self, message: StartNode) -> None:
        present = self.kernels.get(message.node)
        if present is not None and present.incarnation == message.incarnation:
            if present.running:
                self.session.send(present.started())
            return
        reason = ""
        if not is_name(message.node):
            reason = f"node name {message.node!r} is not usable: use letters, digits, '_', '-' or '.'"
        elif present is not None and present.incarnation > message.incarnation:
            reason = f"incarnation {present.incarnation} of {message.node} runs already"
        if reason:
            self.session.send(NodeRefused(node=message.node, incarnation=message.incarnation, reason=reason))
            return
        # Both from now on, so that messages which follow StartNode find the node.
        kernel = self.kernels[message.node] = Kernel(message.node, message.incarnation, self.session)
        self._control.expect(message.node, message.incarnation)
        self._spawn(self._life(kernel, message, present))

    async def _life(self, kernel: Kernel, message: StartNode, previous: Kernel | None) -> None:
        """From StartNode to NodeEnded (or NodeRefused)."""
        if previous is not None:
            await previous.end("stopped", 0.0)
        await self._resources.devices_known.wait()
        try:
            kernel.device = self._lease(message.device)
            options = self._options(message, kernel.device)
            process = await kernel.start(self._resources.context, options)
        except (Refusal, OSError, ValueError) as error:
            self._refuse(kernel, str(error))
            return
        except Exception as error:
            # Whatever it is, the coordinator must hear of it.
            log.exception("node %s of cluster %s could not be started", message.node, self.name)
            self._refuse(kernel, f"it could not be started on {self._resources.peer}: {error!r}")
            return
        self._resources.watchdog.add(process.pid)
        log.info("node %s of cluster %s runs on %s, pid %d", message.node, self.name, kernel.device, process.pid)
        self.session.send(kernel.started())
        if kernel.ending:
            # While it was being started.
            process.kill()
        await kernel.gone.wait()
        self._resources.watchdog.drop(process.pid)
        self._forget(kernel)
        ended = kernel.ended_message()
        log.info("node %s of cluster %s ended: %s", message.node, self.name, ended.reason)
        self.session.send(ended)
        kernel.over.set()

    def _refuse(self, kernel: Kernel, reason: str) -> None:
        self._forget(kernel)
        log.warning("node %s of cluster %s refused: %s", kernel.node, self.name, reason)
        self.session.send(NodeRefused(node=kernel.node, incarnation=kernel.incarnation, reason=reason))
        kernel.over.set()

    def _lease(self, wanted: str) -> str:
        """The device to use, leased for this cluster unless it is the processor."""
        resources = self._resources
        known = [device.id for device in resources.devices.found]
        if wanted and wanted not in known:
            raise Refusal(f"{resources.peer} has no device {wanted!r}: it has {', '.join(known)}")
        if wanted == "cpu":
            return wanted
        for device in [wanted] if wanted else [device.id for device in resources.devices.accelerators()]:
            holder = resources.leases.take(device, self.name)
            if holder is None:
                resources.leases_changed()
                return device
            if wanted:
                raise Refusal(
                    f"{device} of {resources.peer} is used by {holder}: remove that node there, or use device 'cpu'"
                )
        return "cpu"

    def _options(self, message: StartNode, device: str) -> KernelOptions:
        resources = self._resources
        self._started += 1
        if message.directory:
            directory = Path(message.directory).expanduser()
            if not directory.is_dir():
                raise Refusal(f"folder {message.directory!r} does not exist on {resources.peer}: create it there")
        else:
            directory = resources.directory / "work" / self.name
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        environment = {
            "NOTEBOOK_CLUSTER_CONTROL": self._control.endpoint,
            "NOTEBOOK_CLUSTER_NODE": message.node,
            "NOTEBOOK_CLUSTER_INCARNATION": str(message.incarnation),
            "NOTEBOOK_CLUSTER_DEVICE": device,
            "NOTEBOOK_CLUSTER_SOCKETS": str(self._mesh_sockets),
        }
        return KernelOptions(
            sockets=resources.sockets / f"k{self._number}.{self._started}",
            log=self._new_log(message),
            directory=directory,
            environment=message.environment | resources.devices.environment(device) | environment,
        )

    def _new_log(self, message: StartNode) -> Path:
        """A file of this incarnation's own; the oldest of the node are removed."""
        folder = self._resources.directory / "logs" / self.name / message.node
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        present = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        for old in present[: max(0, len(present) - _KEPT_LOGS + 1)]:
            old.unlink(missing_ok=True)
        path = folder / f"{message.incarnation}.log"
        path.unlink(missing_ok=True)
        self._logs[message.node] = path
        return path

    # ---- small parts -------------------------------------------------------------------------------------------

    def _find(self, node: str, incarnation: int) -> Kernel | None:
        kernel = self.kernels.get(node)
        return kernel if kernel is not None and kernel.incarnation == incarnation else None

    def _forget(self, kernel: Kernel) -> None:
        self._control.forget(kernel.node, kernel.incarnation)
        if self.kernels.get(kernel.node) is kernel:
            del self.kernels[kernel.node]
        if kernel.device not in ("", "cpu"):
            self._resources.leases.give_back(kernel.device)
            self._resources.leases_changed()

    def _shortened(self, count: int) -> None:
        for kernel in self.kernels.values():
            kernel.tell_left_out()

    def _from_node(self, node: str, incarnation: int, body: bytes) -> None:
        self.session.send(FromNode(node=node, incarnation=incarnation, body=body))

    def _read_log(self, message: ReadLog) -> None:
        path = self._logs.get(message.node)
        lines = read_tail(path, min(max(message.lines, 0), _MAX_LOG_LINES)) if path is not None else []
        self.session.send(LogLines(node=message.node, lines=lines))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
