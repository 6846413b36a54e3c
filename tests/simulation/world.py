"""A cluster of a few machines, its owner with a cell that trains, and what happens to it; all from one seed."""

import asyncio
import contextlib
import io
import logging
import random
import shutil
import tempfile
from pathlib import Path

import torch

from notebook_cluster.agent import AgentSettings
from notebook_cluster.agent.devices import Devices
from notebook_cluster.agent.service import Agent
from notebook_cluster.agent.sharing.presence import SleepWatch
from notebook_cluster.coordinator.service import Coordinator
from notebook_cluster.coordinator.startup import PrivateAgent, Settings
from notebook_cluster.peering.candidates import Candidate
from notebook_cluster.security import load_identity
from notebook_cluster.security.trust import Trusted, trusted_coordinators, trusted_peers
from tests.simulation import sockets
from tests.simulation.checks import Checks
from tests.simulation.disk import Disk
from tests.simulation.faults import Faults
from tests.simulation.left_out import left_out
from tests.simulation.loop import SimulatedLoop
from tests.simulation.machines import Finder, NoSensors, OneProcessor, PrivateProcess
from tests.simulation.network import Network
from tests.simulation.people import Owner, Stranger
from tests.simulation.plan import Plan, Sizes
from tests.simulation.replaced import patches_for
from tests.simulation.schedule import Process, Schedule

CLUSTER = "class"
HEALING = 30.0
"""Seconds within which everything that is alive goes on, when there are no more faults."""
MOST_SECONDS = 600.0
EVENTS = 400


class World:
    """Make it, :meth:`run` it once. What breaks a promise raises AssertionError.

    Args:
        seed: of everything.
        faults: the faults in order (see :mod:`.faults`); None: as the seed says.
        without: what the product leaves out (see :mod:`.left_out`); None: nothing.
    """

    def __init__(self, seed, *, faults=None, seconds=25.0, verbose=False, without=None):
        self.seed, self.verbose, self.without = seed, verbose, without
        self.rng = random.Random(f"world {seed}")
        self.schedule = Schedule(f"schedule {seed}")
        self.network = Network(self.schedule)
        self.folder = Path(tempfile.mkdtemp(prefix="nbs", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.runtime = self.folder / "head" / "runtime" / "clusters" / CLUSTER
        self.head = self._machine("head", "10.0.0.1")
        self.peers = [
            self._machine(f"peer{number}", f"10.0.0.{number + 1}")
            for number in range(1, self.rng.choice((2, 2, 3)) + 1)
        ]
        self.local_nodes = self.rng.choice((0, 1, 1, 2))
        self.disks = {host: Disk(self.schedule) for host in self.schedule.hosts}
        self.checks = Checks(self)
        self.agents = {}
        """Host -> (process, agent, port, key) of those that are shared."""
        self.coordinator = None
        """(process, object), while it lives."""
        self.view = None
        self.kernels = []
        self.log = []
        self.healed = False
        self.seconds = seconds
        self.plan = Plan(self.rng, seconds)
        self.sizes = Sizes(seed)
        self.faults = Faults(self, faults)
        self._starts = 0
        self._starting = None
        """A coordinator that was started and has not begun: two in one folder are kept apart by its lock."""

    # ---- machines and what runs on them

    def _machine(self, name, address):
        host = self.schedule.host(name, address)
        self.network.addresses[address] = host
        return host

    def path(self, text):
        return Path(text)

    def say(self, text):
        self.log.append(f"{self.schedule.now - 1000:9.4f} {text}")
        del self.log[:-EVENTS]
        if self.verbose:
            print(self.log[-1], flush=True)

    def start_process(self, host, name, main):
        """A process whose loop runs the coroutine ``main(process)``."""
        process = Process(self.schedule, host, name)
        loop = SimulatedLoop(process, self.loop_error)

        def begin():
            task = loop.create_task(main(process))
            task.add_done_callback(lambda done: self._main_ended(process, done))

        loop.call_soon(begin)
        return process

    def _main_ended(self, process, task):
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OSError):
            self.schedule.failures.append((process.main, error))
        self.say(f"{process} ended {error!r}")
        process.end(1 if error else 0)

    def loop_error(self, process, context):
        error = context.get("exception")
        if "never retrieved" in context.get("message", "") or "was destroyed" in context.get("message", ""):
            return
        self.schedule.failures.append((process.main, error or AssertionError(context.get("message"))))

    # agents

    def start_agent(self, host):
        """The person there shares the machine (again)."""
        data = self.folder / host.name / "data" / "agents" / host.name

        async def main(process):
            settings = AgentSettings(name=host.name, directory=data, lease=3600.0)
            agent = Agent(
                settings, devices=Devices([OneProcessor()]), sensors=NoSensors(), sleep=self._sleep_watch(host)
            )

            def ready(said):
                self.agents[host] = (process, agent, said.port, said.public_key)
                self.say(f"agent of {host.name} is ready")
                self._found(host)

            await agent.run(ready)

        return self.start_process(host, f"agent {host.name}", main)

    def _sleep_watch(self, host):
        return SleepWatch(lambda: self.schedule.now, lambda: self.schedule.now - host.slept)

    async def start_private_agent(self, name, directory, lease, options=()):
        """In the place of the coordinator's own, or the window's."""
        host = self.schedule.process.host
        future = asyncio.get_running_loop().create_future()
        values = dict(word.removeprefix("--").split("=", 1) for word in options)

        async def main(process):
            settings = AgentSettings(
                name=name, directory=directory / "agent", private=True, bind="127.0.0.1", lease=lease,
                dial=values.get("dial", ""), head_key=values.get("head-key", ""),
            )  # fmt: skip
            agent = Agent(
                settings, devices=Devices([OneProcessor()]), sensors=NoSensors(), sleep=self._sleep_watch(host)
            )

            def ready(said):
                if not future.done():
                    future.get_loop().call_soon(
                        future.set_result, PrivateAgent(name, said.public_key, said.port, process.pid)
                    )

            await agent.run(ready)

        process = self.start_process(host, "private agent", main)
        return await future, PrivateProcess(process)

    def _found(self, host):
        """mDNS tells the coordinator."""
        if self.coordinator is not None:
            process, made = self.coordinator
            candidate = self.candidate(host)

            def tell():
                if process.paused:  # its socket keeps what is announced meanwhile
                    process.deferred.append(tell)
                elif process.alive:
                    with sockets.Acting(self.schedule, process):
                        process.main.loop.call_soon(lambda: made._finding.heard(candidate))

            self.schedule.later(self.rng.uniform(0.1, 1.5), tell)

    def candidate(self, host):
        _, _, port, key = self.agents[host]
        return Candidate(host.name, key, (host.address,), port, "mdns")

    def finder(self, context, trust, typed, on_found):
        return Finder(self, on_found)

    # the coordinator

    def start_coordinator(self, resume):
        self._starts += 1
        runtime = self.runtime
        runtime.mkdir(mode=0o700, parents=True, exist_ok=True)

        async def main(process):
            settings = Settings(
                cluster=CLUSTER,
                directory=str(self.folder / "head"),
                runtime=runtime,
                resume=resume,
                lease=3600.0,
                agent_lease=3600.0,
            )
            made = Coordinator(settings)
            self.sizes.of_coordinator(made)
            self.coordinator, self._starting = (process, made), None
            self.checks.coordinator_began(made)
            await made.run()

        process = self._starting = self.start_process(self.head, f"coordinator {self._starts}", main)
        process.on_end.append(self._coordinator_ended)
        return process

    def _coordinator_ended(self, process):
        self.say(f"{process} is gone")
        self._starting = None if self._starting is process else self._starting
        if self.coordinator is not None and self.coordinator[0] is not process:
            return
        self.coordinator = None
        self.disks[self.head].crash(process, power_lost=process.exit_code == "power")
        if not self.checks.over:
            self.schedule.later(self.rng.uniform(0.3, 2.0), self.restart_coordinator)

    def copy_runtime(self):
        """The next coordinator goes on from a copy of the cluster's folder; the one before keeps its own."""
        before = self.runtime
        self.runtime = before.parent / f"{CLUSTER}-{self._starts}"
        shutil.copytree(before, self.runtime, ignore=shutil.ignore_patterns("*-shm", "connection.json"))

    def restart_coordinator(self):
        if self.coordinator is None and self._starting is None and not self.checks.over:
            self.say("the owner's notebook starts the coordinator again")
            self.start_coordinator(resume=True)

    # kernels

    def kernel_began(self, process, options):
        self.kernels.append(process)
        process.runtime = None

    def kernel_ended(self, process):
        self.say(f"{process} is gone ({process.exit_code})")
        self.kernels.remove(process)
        self.checks.kernel_ended(process)

    def runtime_began(self, process, runtime):
        self.say(f"{runtime.name}/{runtime.incarnation} is up")

    # ---- the cell

    def run_program(self, source, process, runtime, info):
        if source not in ("train", "") or (info is not None and info.cell != self.view.cell and self.view.cell):
            self.checks.broken(f"{process} runs {source!r} of cell {info and info.cell}, which nobody asked for")
        if source == "train" and not (info is not None and info.replay):
            self.plan.train(self, process, runtime)

    def program_failed(self, process, error):
        self.checks.cell_failed(process, error)

    # ---- all of it

    def run(self):
        """Raises AssertionError with what was broken."""
        handler = Swallowed(self)
        logging.getLogger("notebook_cluster").addHandler(handler)
        torch.set_num_threads(1)
        patches = self.patches()
        self.sizes.of_members(patches)
        sockets.WORLD.append(self.network)
        random.seed(self.seed)
        try:
            with (
                patches.applied(),
                left_out(self.without, self),
                self.checks.watching(),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                self._run()
        finally:
            self.schedule.closed = True
            sockets.WORLD.pop()
            logging.getLogger("notebook_cluster").removeHandler(handler)
            self._tidy_up()

    def patches(self):
        """All that takes the place of the real things."""
        return patches_for(self)

    def plan_hand_overs(self, start, end):
        """Of a world in which there are some."""

    def dialled(self):
        """(process, anything) that views dial, while it lives."""
        return self.coordinator

    def _tidy_up(self):
        self.sizes.tidy_up()
        for disk in self.disks.values():
            for held in list(disk.connections):
                with contextlib.suppress(Exception):
                    held.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self):
        self._pair()
        for host in self.peers:
            self.start_agent(host)
        self.start_coordinator(resume=False)
        self.view = Owner(self)
        self.view.start()
        Stranger(self).start()
        schedule = self.schedule
        if not self._until(60.0, lambda: self.view.training):
            raise AssertionError(f"the cell did not begin: {self.view.doing}")
        self.faults.plan(schedule.now, schedule.now + self.seconds)
        self.plan_hand_overs(schedule.now, schedule.now + self.seconds)
        self._until(self.seconds, lambda: False)
        self.faults.heal()
        self.healed = True
        self.say("healed: no more faults")
        self.checks.heal()
        if not self._until(MOST_SECONDS, lambda: self.checks.finished()):
            raise AssertionError(f"the cell did not end after the last fault: {self.checks.unfinished()}")
        self.checks.at_the_end()

    def _until(self, seconds, done):
        return self.schedule.run(self.schedule.now + seconds, done)

    def _pair(self):
        """The owner has paired with every peer before."""
        with sockets.Acting(self.schedule, Stand(self.head)):
            own = load_identity(self.folder / "head" / "data")
            store = trusted_peers()
        for host in self.peers:
            folder = self.folder / host.name / "data" / "agents" / host.name
            identity = load_identity(folder)
            store.add(Trusted(name=host.name, key=identity.public_key, owner=f"friend@{host.name}"))
            trusted_coordinators(folder).add(Trusted(name="teacher", key=own.public_key, owner="teacher@head"))


class Swallowed(logging.Handler):
    """An exception that the product caught and logged is a fault of it all the same."""

    def __init__(self, world):
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record):
        if record.exc_info and record.exc_info[1] is not None:
            schedule = self._world.schedule
            schedule.failures.append((schedule.current, record.exc_info[1]))


class Stand:
    """Somebody at a machine, for a moment."""

    def __init__(self, host):
        self.host, self.pid = host, 1
        self.main = self
        self.process, self.loop = self, None
