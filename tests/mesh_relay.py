"""Nodes whose way to each other can be closed, and the coordinator's relaying between them, in one process."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec

from notebook_cluster.coordinator.nodes.relay import FrameRelay
from notebook_cluster.journal.state import Node
from notebook_cluster.protocol import decode, encode
from notebook_cluster.protocol.measuring import PairMeasured
from notebook_cluster.protocol.node import (
    FromNodeBody,
    NodeHello,
    RelayFrame,
    RelayTaken,
    Roster,
    ToNodeBody,
    Unreachable,
    UseRelay,
)
from tests.mesh_nodes import MeshNode, mesh_nodes
from tests.ports import free_port
from tests.relay import Relay


class FakeCoordinator:
    """The coordinator's part: real relaying, and the links replaced by queues that a test can hold.

    Attributes:
        said: all Unreachable messages, as (node that said it, message).
        on_the_way: most bytes ever under way from one node to another.
    """

    def __init__(self, nodes: list[MeshNode]) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.told: list[str] = []
        self.said: list[tuple[str, Unreachable]] = []
        self.frames = 0
        self.on_the_way = 0
        self.held: deque[tuple[str, Any]] | None = None
        self._lock = threading.RLock()
        rows = {
            node.name: Node(
                name=node.name, peer=f"peer-{node.name}", device="cpu", order=order, incarnation=node.incarnation,
                condition="ok", hello=_hello(node),
            )
            for order, node in enumerate(nodes)
        }  # fmt: skip
        self.state = SimpleNamespace(nodes=rows, generation=1, roster_nodes=lambda: list(self.state.nodes.values()))
        core: Any = SimpleNamespace(
            state=self.state, spawn=self.spawn, tell=self.tell, known_node=lambda name: self.state.nodes[name]
        )
        self.delivery: Any = SimpleNamespace(to_node=self.send)
        self.said_nothing_for: Callable[[str], float] = lambda name: 0.0
        self.relaying = FrameRelay(core, self.delivery, said_nothing_for=lambda name: self.said_nothing_for(name))
        for node in nodes:
            node.mesh.send_relay = lambda message, name=node.name: self.hear(name, message)
            node.mesh.on_unreachable = lambda other, incarnation, endpoint, name=node.name: self.hear(
                name, Unreachable(node=other, incarnation=incarnation, endpoint=endpoint)
            )

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        threading.Thread(target=asyncio.run, args=(work,), daemon=True).start()

    def tell(self, level: str, text: str) -> None:
        self.told.append(f"{level}: {text}")

    def hear(self, name: str, message: Any) -> None:
        """From a node, as it comes off the link."""
        with self._lock:
            if isinstance(message, Unreachable):
                self.said.append((name, message))
            self.frames += isinstance(message, RelayFrame)
            node, body = self.state.nodes[name], decode(encode(message), FromNodeBody)
            take: dict[Any, Any] = {
                Unreachable: self.relaying.on_unreachable, RelayFrame: self.relaying.on_frame,
                RelayTaken: self.relaying.on_taken, PairMeasured: self.relaying.on_measured,
            }  # fmt: skip
            take[type(body)](node, body)
            self.on_the_way = max([self.on_the_way, *(way.size for way in self.relaying._ways.values())])

    def send(self, name: str, message: Any, *, decided: bool = True) -> None:
        """To a node."""
        with self._lock:
            if self.held is not None and isinstance(message, RelayFrame | RelayTaken):
                self.held.append((name, message))
                return
            node, body = self.nodes[name], decode(encode(message), ToNodeBody)
            take = {RelayFrame: node.mesh.relay_frame, RelayTaken: node.mesh.relay_taken, UseRelay: node.mesh.use_relay}
            handler: Any = take.get(type(body))
            if handler is not None:
                node.loop.call_soon(lambda: handler(body))
            else:
                node.loop.call_soon(lambda: node.mesh.measure(body, lambda result: self.hear(name, result)))

    def hold(self) -> None:
        """The links stand still."""
        self.held = deque()

    def lose_held(self) -> None:
        """The coordinator ended with what it had not passed on."""
        with self._lock:
            self.held = None

    def release(self) -> None:
        with self._lock:
            held, self.held = self.held or deque(), None
            for name, message in held:
                self.send(name, message)


def _hello(node: MeshNode) -> NodeHello:
    return NodeHello(
        node=node.name, incarnation=node.incarnation, pid=1, mesh_key=node.mesh.key, mesh_port=node.mesh.port,
        mesh_ipc="", master_port=0,
    )  # fmt: skip


def far_roster(nodes: list[MeshNode], ports: dict[str, int] | None = None, generation: int = 1) -> Roster:
    """Nodes on machines of their own; ``ports``: where the others dial a node instead of its real port."""
    rows = [
        msgspec.structs.replace(
            node.address(rank, node.name, machine=f"machine-{node.name}"),
            mesh_port=(ports or {}).get(node.name, node.mesh.port),
        )
        for rank, node in enumerate(nodes)
    ]
    return Roster(cluster="test", generation=generation, nodes=rows)


@contextmanager
def cluster_with_closed(*names: str, closed: str) -> Iterator[tuple[list[MeshNode], FakeCoordinator]]:
    """Nodes that know each other, on machines of their own; nobody can dial node ``closed``, which can dial others."""
    with mesh_nodes(*names, peers=list(names)) as nodes:
        fake = FakeCoordinator(nodes)
        roster = far_roster(nodes, {closed: free_port()}, generation=2)
        for node in nodes:
            node.mesh.set_roster(roster)
        yield nodes, fake


@contextmanager
def wire_to(port: int) -> "Iterator[Wire]":
    """A TCP port that leads to ``port`` and can be held."""
    wire = Wire(port)
    try:
        yield wire
    finally:
        wire.close()


class Wire:
    """:class:`tests.relay.Relay` with a loop and a thread of its own."""

    def __init__(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._relay = Relay(port)
        self._run(self._relay.__aenter__())
        self.port = self._relay.port

    @property
    def accepted(self) -> int:
        """Connections so far."""
        return self._relay.accepted

    def do(self, what: str) -> None:
        """``hold``, ``resume`` or ``cut``."""
        self._run(self._call(what))

    def refuse(self, refusing: bool) -> None:
        self._relay.refusing = refusing

    def slow_down(self, rate: float, cut_after: int | None = None) -> None:
        """See ``rate`` and ``cut_after`` of :class:`tests.relay.Relay`."""
        self._relay.rate, self._relay.cut_after = rate, cut_after

    async def _call(self, what: str) -> None:
        getattr(self._relay, what)()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def close(self) -> None:
        self._run(self._relay.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
