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
import zmq

import notebook_cluster as nc
from notebook_cluster.agent import AgentSettings
from notebook_cluster.agent.devices import Devices
from notebook_cluster.agent.service import Agent
from notebook_cluster.agent.sharing.presence import Battery, Sensors, SleepWatch
from notebook_cluster.coordinator.service import Coordinator
from notebook_cluster.coordinator.startup import PrivateAgent, Settings
from notebook_cluster.link import Dialer
from notebook_cluster.peering.candidates import Candidate
from notebook_cluster.protocol import decode, encode
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.peer import Device, StartNode
from notebook_cluster.rounds.leader.state import RoundsSettings
from notebook_cluster.rounds.member import machine as member_machine
from notebook_cluster.rounds.member.state import MemberSettings
from notebook_cluster.security import Identity, load_identity, new_identity
from notebook_cluster.security.trust import Trusted, trusted_coordinators, trusted_peers
from tests.simulation import sockets
from tests.simulation.checks import Checks
from tests.simulation.disk import Disk
from tests.simulation.faults import Faults
from tests.simulation.left_out import left_out
from tests.simulation.loop import SimulatedLoop
from tests.simulation.network import Network
from tests.simulation.replaced import patches_for
from tests.simulation.schedule import Process, Schedule

CLUSTER = "class"
HEALING = 30.0
"""Seconds within which everything that is alive goes on, when there are no more faults."""
MOST_SECONDS = 600.0
EVENTS = 400


class NoSensors(Sensors):
    """A machine that nobody sits at, on mains."""

    def battery(self) -> Battery | None:
        return None

    def idle_seconds(self) -> float:
        return float("inf")

    def busy_seconds(self) -> tuple[float, float]:
        return 0.0, 0.0


class OneProcessor:
    """A machine without accelerators."""

    def probe(self):
        return [Device(id="cpu", kind="cpu", name="processor", memory_bytes=1 << 33)]

    def sample(self):
        return []

    def environment(self, device):
        return {}

    def process_memory(self):
        return {}


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
        self.sizes = Sizes(random.Random(f"sizes {seed}"))
        self.faults = Faults(self, faults)
        self._starts = 0

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

    async def start_private_agent(self, name, directory, lease):
        """In the place of the coordinator's own."""
        host = self.schedule.process.host
        future = asyncio.get_running_loop().create_future()

        async def main(process):
            settings = AgentSettings(
                name=name, directory=directory / "agent", private=True, bind="127.0.0.1", lease=lease
            )
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
                if process.alive and not process.paused:
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
            self.coordinator = (process, made)
            self.checks.coordinator_began(made)
            await made.run()

        process = self.start_process(self.head, f"coordinator {self._starts}", main)
        process.on_end.append(self._coordinator_ended)
        return process

    def _coordinator_ended(self, process):
        self.say(f"{process} is gone")
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
        if self.coordinator is None and not self.checks.over:
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
        patches = patches_for(self)
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

    def _tidy_up(self):
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
        self._until(self.seconds, lambda: False)
        self.faults.heal()
        self.healed = True
        self.say("healed: no more faults")
        self.checks.heal()
        if not self._until(MOST_SECONDS, lambda: self.checks.finished()):
            raise AssertionError(f"the cell did not end after the last fault: {self.checks.unfinished()}")
        self.checks.at_the_end()

    def _until(self, seconds, done):
        return self.schedule.run(self.schedule.now + seconds, done, self.checks.each_step)

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


class PrivateProcess:
    """As asyncio's of a process that was started."""

    def __init__(self, process):
        self._process = process
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        process.on_end.append(lambda ended: loop.call_soon(self._ended.set))

    async def wait(self):
        await self._ended.wait()
        return self._process.exit_code


class Finder:
    """In the place of the coordinator's PeerFinder: it hears at once of every agent there is."""

    def __init__(self, world, on_found):
        self._world, self._on_found = world, on_found
        self.typed_names = []
        self._heard = {}

    def heard(self, candidate):
        self._heard[candidate.key] = candidate
        self._on_found([candidate])

    async def start(self):
        for host in self._world.agents:
            self.heard(self._world.candidate(host))

    async def follow_typed(self):
        pass

    def candidates(self):
        return list(self._heard.values())

    async def present(self, enough=lambda found: True):
        return self.candidates()

    def find(self, key):
        return self._heard.get(key)

    def silent_views(self):
        return []

    async def resolve(self, text):
        for _ in range(50):
            for candidate in self._heard.values():
                if candidate.name == text:
                    return candidate, []
            await asyncio.sleep(0.2)
        raise v.RequestError(f"no peer {text!r} is found")

    async def close(self):
        pass


class Plan:
    """What the cell does, and with what."""

    def __init__(self, rng, seconds):
        self.strategy = rng.choice(("DiLoCo",) * 5 + ("SparseLoCo", "DataParallel", "server"))
        self.every = rng.choice((2, 4, 7))
        self.pause = rng.choice((0.05, 0.1, 0.2))
        self.steps = int(rng.uniform(0.6, 1.1) * seconds / self.pause)
        self.elements = rng.choice((5, 40, 900))
        self.momentum = rng.choice((0.0, 0.9))
        self.codec = rng.choice(("float32", "float32", "int8", "bf16"))
        self.overlap = rng.choice((0, 0, 0, 1)) if self.every > 2 else 0
        self.fragments = rng.choice((1, 1, 2)) if self.elements > 100 and self.every == 4 else 1
        self.quorum = rng.choice((None, None, None, 0.6))

    @property
    def every_step(self):
        """Each step is a round: what a node has not sent is lost with the step, and COMMITs are synced later."""
        return self.strategy in ("DataParallel", "server")

    def make(self, model):
        """The sync object, and what fills the gradients or changes the model in a step."""
        if self.every_step:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=self.momentum)
            mode = "server" if self.strategy == "server" else "allreduce"
            return nc.DataParallel(model, optimizer, name="model", mode=mode)
        if self.strategy == "SparseLoCo":
            return nc.SparseLoCo(model, every=self.every, name="model", quorum=self.quorum)
        return nc.DiLoCo(
            model, every=self.every, name="model", outer_momentum=self.momentum, codec=self.codec,
            fragments=self.fragments, overlap=self.overlap, quorum=self.quorum,
        )  # fmt: skip

    def described(self):
        return ", ".join(f"{name} {value}" for name, value in vars(self).items())

    def train(self, world, process, runtime):
        """A loop as people write it; each step adds something of its own to the parameters."""
        import time

        model = torch.nn.Linear(self.elements, 1, bias=False)
        rng = random.Random(f"{world.seed} {runtime.name} {runtime.incarnation}")
        with torch.no_grad():
            model.weight.fill_(0.5)
        with world.checks.training(process, runtime) as ledger:
            sync = self.make(model)
            slowness = rng.uniform(0.7, 1.5)
            while ledger.steps < self.steps:
                time.sleep(self.pause * slowness * rng.uniform(0.5, 1.5))
                with torch.no_grad():
                    generator = torch.Generator().manual_seed(rng.getrandbits(40))
                    change = torch.randn(model.weight.shape, generator=generator) * 0.01
                    if world.faults.spoils(runtime.name):
                        change.view(-1)[0] = float("nan")
                    if self.every_step:
                        model.weight.grad = change
                    else:
                        model.weight.add_(change)
                ledger.step()
                sync.step(1.0)
            sync.finish()
            ledger.finish(model, sync.round)


class Sizes:
    """Bounds of the product, at times so small that they matter in a world: what happens after hours or with large
    models happens here within seconds."""

    def __init__(self, rng):
        self.snapshot_rows = rng.choice((5, 40, 10_000))
        self.journal_bytes = rng.choice((20_000, 64 << 20))
        self.chunk_bytes = rng.choice((700, 256 * 1024))
        self.slices = rng.choice((None, RoundsSettings(one_owner_blocks=2, slices_each=2, slice_blocks=1)))

    def of_coordinator(self, made):
        """Of a coordinator that was just made."""
        journal, runner = made._core.journal, made._runner
        journal._snapshot_rows, journal._limit = self.snapshot_rows, self.journal_bytes
        if self.slices is not None:
            runner._state.settings = self.slices

    def of_members(self, patches):
        """Of every node."""
        make, settings = member_machine.new_member, MemberSettings(chunk_bytes=self.chunk_bytes)
        patches.attribute(
            member_machine, "new_member", lambda job, node, incarnation: make(job, node, incarnation, settings)
        )


class Stranger:
    """Somebody on the network who has no trusted key, and asks every agent again and again to run code."""

    def __init__(self, world):
        self.world = world
        self._dialers = {}

    def start(self):
        host = self.world.schedule.host("stranger", "10.0.9.9")
        self.world.network.addresses[host.address] = host
        self.world.start_process(host, "stranger", self._main)

    async def _main(self, process):
        identity, context = new_identity(), sockets.Context()
        while True:
            for host, (_, _, port, key) in list(self.world.agents.items()):
                if self._dialers.get(host, (0, None))[0] != port:
                    dialer = Dialer(
                        context, f"tcp://{host.address}:{port}", key, identity, cluster="evil", epoch=1 << 60,
                        sender="evil", on_message=lambda message, buffers: None, on_condition=self._condition,
                    )  # fmt: skip
                    dialer.start()
                    dialer.send(StartNode(node="evil", incarnation=1, device="cpu"))
                    self._dialers[host] = (port, dialer)
            await asyncio.sleep(0.5)

    def _condition(self, condition, reason):
        if condition == "connected":
            self.world.checks.broken("an agent has a session with somebody whose key it does not know")


class Owner:
    """The owner's notebook: a view that starts nodes, runs the cell and starts nodes again that have died."""

    def __init__(self, world):
        self.world = world
        self.training, self.ended, self.doing = False, None, "starting"
        self._replies = {}
        self._number = 0
        self._connected = None
        self.looks_every = world.rng.choice((0.05, 0.3, 1.0))
        self.cell = None
        self.state = None

    def start(self):
        self.process = self.world.start_process(self.world.head, "notebook", self._main)

    async def _main(self, process):
        wanted = {f"local-{n}" for n in range(self.world.local_nodes)}
        self._context = sockets.Context()
        asyncio.get_running_loop().create_task(self._keep_connected())
        while len(self.world.agents) < len(self.world.peers):  # noqa: ASYNC110 - as a person looks
            await asyncio.sleep(0.1)
        if self.world.local_nodes:
            self.doing = "adding local nodes"
            await self.ask(v.AddNodes(peer="local", count=self.world.local_nodes))
        for host in self.world.peers:
            self.doing = f"adding {host.name}"
            await self.ask(v.AddNodes(peer=host.name))
        del wanted
        self.doing = "running the cell"
        self.cell = await self.ask(v.Execute(source="train", watch=True))
        self.training = True
        self.world.say(f"cell {self.cell} trains: {self.world.plan.described()}")
        while True:
            await asyncio.sleep(self.looks_every)
            self.state = await self.ask(v.GetState(), patience=3.0)
            for node in getattr(self.state, "nodes", ()) or self._rows():
                if node["condition"] == "dead":
                    self.world.say(f"the owner restarts {node['name']}: {node.get('reason', '')}")
                    await self.ask(v.RestartNode(node=node["name"]), patience=8.0)

    def _rows(self):
        return self.state.get("nodes", []) if isinstance(self.state, dict) else []

    def cell_status(self):
        cell = self.state.get("cell") if isinstance(self.state, dict) else None
        return cell["status"] if cell else None

    async def ask(self, body, patience=60.0):
        """The value of the reply; a request without a reply in time is None."""
        self._number += 1
        number = self._number
        future = self._replies[number] = asyncio.get_running_loop().create_future()
        data = encode(v.Request(id=number, body=body))
        try:
            async with asyncio.timeout(patience):
                while not (self._connected and self._connected[0].send([data])):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                return await future
        except (TimeoutError, v.RequestError) as error:
            self.world.say(f"{type(body).__name__}: {error!r}")
            return None
        finally:
            self._replies.pop(number, None)

    async def _keep_connected(self):
        """Dial whatever coordinator there is."""
        dialled = None
        while True:
            there = self.world.coordinator
            if there is not None and there[0] is not dialled and (file := self._file(there)) is not None:
                if self._connected:
                    self._connected[0].close()
                dialled = there[0]
                self._dial(file)
            if self._connected:
                data = encode(v.Request(id=0, body=v.Ping()))
                self._connected[0].send([data])
            await asyncio.sleep(0.3)

    def _file(self, there):
        path = self.world.runtime / "connection.json"
        with contextlib.suppress(OSError):
            file = decode_file(path.read_bytes())
            if file.pid == there[0].pid:
                return file
        return None

    def _dial(self, file):
        from notebook_cluster.security import dial

        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        dial(socket, Identity(file.view_public_key, file.view_secret_key), file.server_key)
        socket.connect(file.address)
        self._connected = (sockets.Pump(socket, self._on_frames), file)

        def attach():
            if not self._connected[0].send([encode(v.Request(id=0, body=v.Attach(kind="magics", live=False)))]):
                asyncio.get_running_loop().call_later(0.05, attach)

        attach()

    def _on_frames(self, frames):
        message = decode(frames[0], v.Reply | v.AnyEvent)
        if isinstance(message, v.Reply):
            future = self._replies.get(message.id)
            if future is not None and not future.done():
                if message.error:
                    future.set_exception(v.RequestError(message.error))
                else:
                    future.set_result(message.value)
        elif isinstance(message, v.CellEnded):
            self.ended = message
            self.world.say(f"cell ended: {message.status} {message.results}")


def decode_file(data):
    import msgspec

    return msgspec.json.decode(data, type=v.ConnectionFile)
