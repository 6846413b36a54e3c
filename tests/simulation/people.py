"""The owner at the notebook, and a stranger on the network."""

import asyncio
import contextlib

import zmq

from notebook_cluster.link import Dialer
from notebook_cluster.protocol import decode, encode
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.peer import StartNode
from notebook_cluster.security import Identity, new_identity
from tests.simulation import pump, sockets


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
            there = self.world.dialled()
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
        self._connected = (pump.Pump(socket, self._on_frames), file)

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
