"""Puts the stand-ins of a world in the place of the real things, in every module that has them, while it runs."""

import asyncio
import concurrent.futures.thread
import contextlib
import functools
import importlib
import os
import pkgutil
import queue
import random
import secrets
import sys
import threading
import time
import types
import uuid
import weakref
from unittest import mock

import psutil
import torch
import zmq
from zmq.utils import z85

import notebook_cluster.agent.service as agent_service
import notebook_cluster.coordinator.service as coordinator_service
import notebook_cluster.journal.log as journal_log
import notebook_cluster.journal.writer as journal_writer
import notebook_cluster.node.runtime.running_cell as running_cell
from notebook_cluster import sockets as real_sockets
from notebook_cluster.agent import limits, machine
from notebook_cluster.agent.kernels import kernel as agent_kernel
from notebook_cluster.agent.kernels import supervisor
from notebook_cluster.agent.resources import Resources
from notebook_cluster.agent.settings import lock_data_folder
from notebook_cluster.coordinator.peers import provisioning
from notebook_cluster.coordinator.startup import start_private_agent
from notebook_cluster.link import tcp
from notebook_cluster.protocol.peer import NodeSample
from notebook_cluster.security import Gate, data_directory, identity, private_socket_directory, runtime_directory
from notebook_cluster.training import runtime as training_runtime
from notebook_cluster.training.loop import step_stops
from tests.simulation import pump, sockets
from tests.simulation.disk import DiskConnection, SimulatedWriter
from tests.simulation.kernel import SimulatedKernelProcess
from tests.simulation.threads import Primitives, SimulatedIOThread

WALL = 1_800_000_000.0
"""The time of day at which a world begins, less its virtual seconds."""


class KernelSampler:
    """Memory and load of a kernel that has neither."""

    def __init__(self, pid):
        self.peak = 0

    def sample(self, node, device_memory):
        return NodeSample(node=node, rss=1 << 20, rss_peak=1 << 20)


class MachineSample:
    def __init__(self, devices):
        self.time = time.time()
        self.cpu, self.ram_used, self.ram_total = 0.1, 1 << 30, 1 << 33
        self.devices, self.process_memory, self.battery = [], {}, None


class NodeCount:
    """Nobody counts cores here."""

    place = ""

    def add(self, kernel):
        pass

    def drop(self, kernel):
        pass

    def close(self):
        pass


class Programs:
    """Kernels of a world start no programs."""

    def own(self, pid):
        pass

    def sweep(self):
        pass

    def end_orphans(self):
        pass


class Watchdog:
    pid = 0

    def __init__(self, sockets):
        pass

    def add(self, pid):
        pass

    def drop(self, pid):
        pass

    def close(self):
        pass


class Sharing:
    """The sharing of an agent that is found and trusted already: no mDNS, no codes."""

    def __init__(self, settings, identity, context, **options):
        self.announcer = types.SimpleNamespace(start=lambda: None, check=lambda: None)
        self.codes = types.SimpleNamespace(port=0, code="")

    async def start(self):
        pass

    async def close(self):
        pass

    def forget(self, key):
        pass


class Patches:
    """Collects what is replaced; :meth:`applied` is a context manager."""

    def __init__(self):
        self._patches = []

    def attribute(self, owner, name, value):
        self._patches.append(mock.patch.object(owner, name, value))

    def everywhere(self, original, stand_in):
        """In every module of the package that has ``original`` under whatever name."""
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("notebook_cluster"):
                for name, value in list(vars(module).items()):
                    if value is original:
                        self.attribute(module, name, stand_in)

    @contextlib.contextmanager
    def applied(self):
        with contextlib.ExitStack() as stack:
            for patch in self._patches:
                stack.enter_context(patch)
            yield


_ROOMS = (
    "agent", "checkpoints", "codecs", "collectives", "coordinator", "journal", "link", "mesh", "node", "peering",
    "rounds", "security", "training", "values",
)  # fmt: skip


@functools.cache
def import_all():
    """A module that is imported while a world runs would keep the stand-ins of that world."""
    for room in _ROOMS:
        package = importlib.import_module(f"notebook_cluster.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                with contextlib.suppress(ImportError):  # a framework that is not installed
                    importlib.import_module(found.name)
    importlib.import_module("jupyter_client.channels")
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports much of torch


def patches_for(world):
    """All that a world needs."""
    import_all()
    patches = Patches()
    _clocks(patches, world.schedule)
    _randomness(patches, world)
    _threads(patches, world)
    _sockets(patches)
    _machine(patches, world)
    _parts(patches, world)
    return patches


def _clocks(patches, schedule):
    def host():
        return schedule.process.host if schedule.process is not None else None

    def monotonic():
        there = host()
        return schedule.now - there.slept if there is not None else schedule.now

    def wall():
        there = host()
        return WALL + schedule.now + (there.wall if there is not None else 0.0)

    def sleep(seconds):
        if schedule.current is not None:
            schedule.current.park(seconds)

    patches.attribute(time, "monotonic", monotonic)
    patches.attribute(time, "time", wall)
    patches.attribute(time, "time_ns", lambda: int(wall() * 1e9))
    patches.attribute(time, "sleep", sleep)


def _randomness(patches, world):
    rng = random.Random(f"bytes {world.seed}")

    def keypair():
        secret = z85.encode(rng.randbytes(32))
        return zmq.curve_public(secret), secret

    patches.attribute(zmq, "curve_keypair", keypair)
    patches.attribute(secrets, "token_bytes", lambda count=32: rng.randbytes(count))
    patches.attribute(secrets, "token_hex", lambda count=32: rng.randbytes(count).hex())
    patches.attribute(uuid, "uuid4", lambda: uuid.UUID(bytes=rng.randbytes(16), version=4))


def _threads(patches, world):
    primitives = Primitives(world.schedule)
    for owner, name, stand_in in (
        (threading, "Event", primitives.event),
        (threading, "Condition", primitives.condition),
        (threading, "Thread", primitives.thread),
        (queue, "SimpleQueue", primitives.simple_queue),
    ):
        patches.everywhere(getattr(owner, name), stand_in)
        patches.attribute(owner, name, stand_in)

    async def to_thread(function, /, *arguments, **options):
        call = functools.partial(function, *arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(None, call)

    patches.attribute(asyncio, "to_thread", to_thread)
    patches.attribute(concurrent.futures.thread, "_threads_queues", weakref.WeakKeyDictionary())
    patches.attribute(SimulatedIOThread, "schedule", world.schedule)
    patches.everywhere(real_sockets.IOThread, SimulatedIOThread)
    schedule = world.schedule

    @contextlib.contextmanager
    def deferred_interrupts():
        thread = schedule.current
        if thread is None or thread is not thread.process.main:
            yield lambda: False
            return
        before, thread.deferring = thread.deferring, True
        try:
            yield lambda: bool(thread.interrupts)
        finally:
            thread.deferring = before
        thread.raise_interrupt()

    patches.everywhere(running_cell.deferred_interrupts, deferred_interrupts)
    patches.attribute(step_stops.StepStops, "install", lambda self, at_cell_end: None)
    patches.attribute(running_cell, "interrupt_main_thread", lambda: schedule.process.main.interrupt())


def _sockets(patches):
    patches.attribute(zmq, "Context", sockets.Context)
    patches.everywhere(real_sockets.Pump, pump.Pump)
    patches.everywhere(Gate, pump.Gate)
    patches.everywhere(tcp.UndeliveredBytes, pump.NoBacklog)
    patches.everywhere(tcp.remote_end, pump.remote_end)
    patches.everywhere(tcp.cut, pump.cut)


def _machine(patches, world):
    schedule = world.schedule
    pid, exists = os.getpid, psutil.pid_exists

    def folder(name):
        def of_host():
            made = world.folder / schedule.process.host.name / name
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
            return made

        return of_host

    def socket_folder():
        made = world.folder / schedule.process.host.name / f"s{schedule.process.pid}"
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        return made

    patches.everywhere(data_directory, folder("data"))
    patches.everywhere(runtime_directory, folder("runtime"))
    patches.everywhere(private_socket_directory, socket_folder)
    patches.attribute(os, "getpid", lambda: schedule.process.pid if schedule.process is not None else pid())
    patches.attribute(
        psutil,
        "pid_exists",
        lambda number: schedule.processes[number].alive if number in schedule.processes else exists(number),
    )
    patches.attribute(provisioning, "_runs", lambda number: schedule.processes[number].alive)
    patches.attribute(identity, "_is_alive", lambda record: schedule.processes[record["pid"]].alive)
    patches.everywhere(machine.host_addresses, lambda: [schedule.process.host.address, "127.0.0.1"])
    patches.everywhere(machine.machine_id, lambda: f"machine-{schedule.process.host.name}")
    patches.everywhere(machine.package_versions, lambda names=(): {})
    patches.everywhere(machine.MachineSample, MachineSample)
    patches.everywhere(machine.KernelSampler, KernelSampler)
    patches.attribute(limits, "memory_of_trees", lambda roots: {})
    patches.attribute(supervisor, "count_nodes", lambda place: 1)
    patches.everywhere(lock_data_folder, lambda settings: open(os.devnull, "ab"))  # noqa: SIM115 - closed by the agent


def _parts(patches, world):
    def resources(**fields):
        return Resources(**fields, programs=Programs(), node_count=NodeCount(), context=sockets.Context())

    patches.attribute(agent_service, "Resources", resources)
    patches.attribute(agent_service, "Watchdog", Watchdog)
    patches.attribute(agent_service, "SharingService", Sharing)
    patches.attribute(agent_kernel, "KernelProcess", SimulatedKernelProcess)
    patches.attribute(SimulatedKernelProcess, "world", world)
    patches.attribute(coordinator_service, "PeerFinder", world.finder)
    patches.everywhere(start_private_agent, world.start_private_agent)
    patches.attribute(SimulatedWriter, "schedule", world.schedule)
    patches.attribute(journal_log, "Writer", SimulatedWriter)

    def open_to_write(path, *arguments, **options):
        process = world.schedule.process
        return DiskConnection(world.disks[process.host], process, path, *arguments, **options)

    patches.attribute(journal_writer, "open_to_write", open_to_write)
    patches.everywhere(training_runtime.current_runtime, lambda: world.schedule.process.runtime)
