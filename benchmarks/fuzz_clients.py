"""For ``benchmarks.fuzz``: on each port one client that attacks with keys that are let in, and one that is honest."""

import asyncio
import contextlib
import random
import socket
import typing
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import zmq

from benchmarks.fuzz_servers import ELEMENTS, JOB, NODE
from notebook_cluster.link import frames as f
from notebook_cluster.link.channel import PIECE_BYTES
from notebook_cluster.mesh import Mesh
from notebook_cluster.pairing.guest import ask
from notebook_cluster.protocol import PROTOCOL_VERSION, encode, mesh, pairing, peer
from notebook_cluster.protocol.measuring import MeasurePair, PairMeasured
from notebook_cluster.protocol.node import NodeAddress, Roster
from notebook_cluster.security import Identity, announce, new_identity, withdraw
from notebook_cluster.security.codes import PAIRING_IDENTITY, GuestExchange
from notebook_cluster.sockets import IOThread
from tests.frames_mutator import Frames, Mutator, examples
from tests.raw_link import RawClient, RawLink

EXAMPLES = 150
"""Structs of each type; frames are made of these over and over."""
PATIENCE = 10.0
"""Seconds in which an honest client must be answered."""


FRAMES_OF_ONE_GUEST = 28
"""A pairing host hears out no guest that talks much."""
KEY = new_identity().public_key


class Hang(Exception):
    """An honest client got no answer; the text says which."""


def structs_of(union: Any, start: int, leave_out: Iterable[type] = ()) -> list[msgspec.Struct]:
    kinds = [kind for kind in typing.get_args(union) if kind not in leave_out]
    return examples(kinds, EXAMPLES, start)


class Attack:
    """One port. ``limit``: its largest frame in bytes."""

    name = ""

    def __init__(self, port: int, limit: int, start: int) -> None:
        self.port = port
        self.mutator = Mutator(start, limit)
        self.random = random.Random(start)
        self.sent: list[Frames] = []
        """The last batch."""

    def message(self) -> Frames:
        """A good message, with content that may be absurd."""
        raise NotImplementedError

    def bad_message(self) -> Frames:
        """What is sent."""
        return self.mutator.mutate(self.message())

    def begin(self) -> None:
        """Before each batch."""

    def run(self, count: int) -> None:
        """Send ``count`` bad messages."""
        raise NotImplementedError

    def client(self) -> RawClient:
        """A connection of its own, for a frame that ends it."""
        raise NotImplementedError

    def hear(self, frames: Frames) -> None:
        """What the server says to the attacker."""

    def attack(self, client: RawClient, count: int) -> None:
        """Send ``count`` bad messages on ``client``. Raises Hang when the server takes no more."""
        self.begin()
        self.sent = [self.bad_message() for _ in range(count)]
        try:
            for frames in self.sent:
                if frames:
                    client.send(frames)
                while (answer := client.receive(0)) is not None:
                    self.hear(answer)
        except zmq.Again:
            raise Hang(f"{self.name}: the server reads no more") from None

    def oversized(self) -> None:
        """One frame over the limit, and garbage from a program that speaks no ZeroMQ."""
        with self.client() as client:
            with contextlib.suppress(zmq.Again):
                client.send([self.mutator.oversized()])
            client.event(1.0)
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 2) as connection:
            connection.sendall(self.mutator.garbage())

    def check(self) -> None:
        """Raises Hang unless an honest client is answered."""
        raise NotImplementedError

    def close(self) -> None:
        """End all connections."""


class LinkAttack(Attack):
    """A coordinator whose key is trusted sends nonsense in its session; another one asks for a log."""

    name = "link"

    def __init__(self, port: int, key: str, start: int) -> None:
        super().__init__(port, 1 << 20, start)
        self._endpoint, self._key = f"tcp://127.0.0.1:{port}", key
        self._bad, self._good = new_identity(), new_identity()
        self._trust = [announce("coordinator", one.public_key, "fuzz") for one in (self._bad, self._good)]
        self._link = RawLink(self._endpoint, key, self._bad, cluster="attack")
        self._honest = RawLink(self._endpoint, key, self._good, cluster="honest")
        # Diagnose makes connections elsewhere.
        self._bodies = [_harmless(body) for body in structs_of(peer.FromCoordinator, start, [peer.Diagnose])]
        self._headers = structs_of(f.AnyHeader, start)

    def begin(self) -> None:
        self._link.acknowledge()
        self._link.open(2.0)

    def message(self) -> Frames:
        """Any header, for the most part of the session that is on, so that its numbers are looked at."""
        link, header = self._link, self.random.choice(self._headers)
        if not isinstance(header, f.Hello) and self.random.random() < 0.9:
            header = msgspec.structs.replace(header, cluster=link.cluster, epoch=link.epoch, session=link.session)
        body = [encode(self.random.choice(self._bodies))] if isinstance(header, f.Data) else []
        return [encode(header), *body]

    def bad_message(self) -> Frames:
        """Half of them have a good header with the next number: a message that is missing holds up those after it."""
        if self.random.random() < 0.5:
            return super().bad_message()
        buffers = [self.random.randbytes(self.random.choice((0, 1, 50)))] * self.random.choice((0, 0, 1, 4, 6))
        body = self.mutator.mutate([encode(self.random.choice(self._bodies)), *buffers])
        if not body or sum(len(frame) for frame in body) > PIECE_BYTES:
            body = [b""]
        return [*self._link.header(), *body]

    def client(self) -> RawClient:
        return RawClient(self._endpoint, self._key, self._bad)

    def run(self, count: int) -> None:
        self.attack(self._link, count)

    def check(self) -> None:
        if not isinstance(self._honest.open(PATIENCE), f.Welcome):
            raise Hang("link: no Welcome for an honest coordinator")
        number = self.random.randrange(1 << 30)
        self._honest.send(self._honest.data(peer.ReadLog(node=f"n{number}")))
        for message, _ in self._honest.messages(peer.FromAgent, PATIENCE):
            if isinstance(message, peer.LogLines) and message.node == f"n{number}":
                self._honest.acknowledge()
                return
        raise Hang("link: an honest coordinator's question was not answered")

    def close(self) -> None:
        self._link.close()
        self._honest.close()
        for path in self._trust:
            withdraw(path)


class MeshAttack(Attack):
    """A node of the roster sends nonsense to another one, and a second one measures the way to it."""

    name = "mesh"

    def __init__(self, port: int, key: str, start: int) -> None:
        super().__init__(port, 1 << 20, start)
        self._loop = IOThread("fuzz-mesh")
        self._loop.start()
        self._honest = Mesh(self._loop, "honest", 1, host="127.0.0.1")
        self._other_loop = IOThread("fuzz-evil")
        self._other_loop.start()
        self._evil = Mesh(self._other_loop, "evil", 1, host="127.0.0.1")
        self._endpoint, self._key = f"tcp://127.0.0.1:{port}", key
        self.roster = [
            _row(NODE, 0, key, port),
            _row("honest", 1, self._honest.key, self._honest.port),
            _row("evil", 2, self._evil.key, self._evil.port),
        ]
        roster = Roster(cluster="fuzz", generation=1, nodes=self.roster)
        self._honest.set_roster(roster)
        self._evil.set_roster(roster)
        self._headers = structs_of(mesh.MeshHeader, start)
        self._link: RawClient | None = None
        self.cell = 1

    def begin(self) -> None:
        if self._link is None:
            # The node has the roster by now.
            self._link = self.client()

    def message(self) -> Frames:
        header: Any = self.random.choice(self._headers)
        if isinstance(header, mesh.CellFrame) and self.random.random() < 0.8:
            cell = self.cell + self.random.choice((0, 0, 0, 0, 1, -1))
            total = self.random.choice((header.total, 0, 10, 4096, 1 << 40))
            header = msgspec.structs.replace(header, cell=cell, generation=1, total=total)
        elif isinstance(header, mesh.JobFrame) and self.random.random() < 0.8:
            attempt = self.cell + self.random.choice((0, 0, 0, 1, -1))
            index, total = (
                self.random.choice((0, 1, 2, header.slice)),
                self.random.choice((header.total, ELEMENTS * 4 // 3)),
            )
            header = msgspec.structs.replace(
                header, job=JOB, incarnation=1, round=1, attempt=attempt, slice=index, fragment=0, total=total
            )
        return [encode(header), self.random.randbytes(self.random.choice((0, 0, 1, 10, 100, 4096)))]

    def client(self) -> RawClient:
        identity: Identity = self._evil._identity
        return RawClient(self._endpoint, self._key, identity)

    def run(self, count: int) -> None:
        self.begin()
        assert self._link is not None
        self.attack(self._link, count)

    def fill(self) -> None:
        """What is kept for a job or a cell that may still come is bounded: fill it, so that growth shows what is
        not."""
        self.begin()
        assert self._link is not None
        job = mesh.JobFrame(job="later", incarnation=1, kind="mean")
        cell = mesh.CellFrame(cell=1 << 60, generation=1, operation=1, name="send")
        for header in (encode(job), encode(cell)):
            for size in [256 * 1024] * 300 + [1024] * 300 + [0] * 300:
                self._link.send([header, bytes(size)])

    def check(self) -> None:
        answers: SimpleQueue[PairMeasured] = SimpleQueue()
        order = MeasurePair(ticket=self.random.randrange(1, 1 << 60), node=NODE, payload=1000)
        self._loop.call_soon(lambda: self._honest.measure(order, answers.put))
        try:
            answer = answers.get(timeout=PATIENCE)
        except Empty:
            raise Hang("mesh: an honest node's measurement did not end") from None
        if answer.error:
            raise Hang(f"mesh: {answer.error}")

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._loop.close()
        self._other_loop.close()


class PairingAttack(Attack):
    """Strangers at the pairing port, where everybody may knock; another one asks who is there."""

    name = "pairing"

    def __init__(self, port: int, start: int) -> None:
        super().__init__(port, pairing.MAX_PAIRING_BYTES, start)
        self._structs = structs_of(pairing.FromGuest, start)
        self._elements = [GuestExchange("wrong-code-1", KEY, KEY).message for _ in range(10)]
        self._context = zmq.Context()

    def message(self) -> Frames:
        choice = self.random.random()
        if choice < 0.1:
            return [encode(pairing.Who(protocol=PROTOCOL_VERSION))]
        if choice < 0.3:
            # All but the code is right, or not even a point of the curve.
            element = self.random.choice([*self._elements, b"A" + self.random.randbytes(32)])
            return [encode(pairing.Begin(role="cluster", name="guest", owner="eve@net", key=KEY, message=element))]
        return [encode(self.random.choice(self._structs))]

    def client(self) -> RawClient:
        # From many addresses: one of them would soon be told to wait.
        source = f"127.0.0.{self.random.randrange(2, 250)}"
        return RawClient(f"tcp://{source}:0;127.0.0.1:{self.port}", PAIRING_IDENTITY.public_key, new_identity())

    def run(self, count: int) -> None:
        for _ in range(0, count, FRAMES_OF_ONE_GUEST):
            with self.client() as client:
                self.attack(client, FRAMES_OF_ONE_GUEST)
                # Answered, or the connection is cut: what was sent before has been read.
                with contextlib.suppress(zmq.Again):
                    client.send([encode(pairing.Who(protocol=PROTOCOL_VERSION))])
                    client.receive(0.2)

    def check(self) -> None:
        try:
            here = asyncio.run(ask(self._context, f"127.0.0.1:{self.port}", timeout=PATIENCE))
        except Exception as error:
            raise Hang(f"pairing: {error}") from None
        if here.name != "mini":
            raise Hang(f"pairing: the answer was {here}")

    def close(self) -> None:
        self._context.destroy(linger=0)


def _harmless(body: msgspec.Struct) -> msgspec.Struct:
    """``body``, unless it is a good order to start a kernel."""
    if isinstance(body, peer.StartNode):
        return msgspec.structs.replace(body, device="cuda:99", directory="/nowhere")
    return body


def _row(name: str, rank: int, key: str, port: int) -> NodeAddress:
    return NodeAddress(
        name=name, incarnation=1, rank=rank, local_rank=0, peer=f"peer-{name}", machine="one", device="cpu",
        hosts=["127.0.0.1"], mesh_key=key, mesh_port=port, mesh_ipc="", master_port=0,
    )  # fmt: skip


def save(frames: list[Frames], path: Path) -> None:
    """Keep what was sent last, for whoever looks for the cause."""
    path.write_bytes(msgspec.msgpack.encode(frames))
