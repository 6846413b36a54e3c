"""Both ends of a link for the tests: what they were told, and clients that say whatever a test wants."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import zmq

from notebook_cluster import security
from notebook_cluster.link import Condition, Dialer, DialOut, InboundListener, LinkSettings, Listener, Session
from notebook_cluster.link.frames import Hello
from notebook_cluster.protocol import PROTOCOL_VERSION, Message, encode
from notebook_cluster.protocol.peer import LogLines, ReadLog
from tests.in_loop import until
from tests.relay import Relay

FAST = LinkSettings(heartbeat=0.1, suspect=0.4, lost=1.0, outbox_bytes=200_000, retry=0.3)


class Agent:
    """A Listener and what its sessions received."""

    def __init__(self, identity: security.Identity | None = None, settings: LinkSettings = FAST) -> None:
        self.identity = identity or security.new_identity()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.trusted: dict[str, str] = {}
        self.received: list[tuple[Message, list[bytes]]] = []
        self.conditions: list[Condition] = []
        self.reasons: list[str] = []
        self.dialling: list[tuple[str, str]] = []
        self.restarts = 0
        self.sessions: list[Session] = []
        self.greet = False
        self.settings = settings

    def start(self, port: str = "0") -> int:
        self.listener = Listener(
            self.context,
            f"tcp://127.0.0.1:{port}",
            self.identity,
            authorise=self.trusted.get,
            on_session=self.on_session,
            settings=self.settings,
        )
        self.port = self.listener.start()
        return self.port

    def on_session(self, session: Session) -> None:
        self.sessions.append(session)
        session.on_message = lambda message, buffers: self.received.append((message, buffers))
        session.on_condition = self.on_condition
        session.on_restart = self.on_restart
        if self.greet:
            session.send(LogLines(node="greeting", lines=[]))

    def on_condition(self, condition: Condition, reason: str) -> None:
        self.conditions.append(condition)
        self.reasons.append(reason)

    def on_dial_out(self, condition: str, reason: str) -> None:
        self.dialling.append((condition, reason))

    def on_restart(self) -> None:
        self.restarts += 1
        self.sessions[-1].send(LogLines(node="restarted", lines=[]))

    def numbers(self) -> list[int]:
        return [message.lines for message, _ in self.received if isinstance(message, ReadLog)]

    async def close(self) -> None:
        await self.listener.close(flush=0)
        self.context.term()


class Coordinator:
    """A Dialer and what it received."""

    def __init__(
        self,
        agent: Agent,
        port: int | None = None,
        *,
        identity: security.Identity | None = None,
        trusted: bool = True,
        epoch: int = 1,
        received: int = 0,
        cluster: str = "class",
        cluster_name: str = "",
        settings: LinkSettings = FAST,
        front: "Front | None" = None,
    ) -> None:
        """With ``front`` the agent dials in there, and this side waits."""
        self.identity = front.identity if front else identity or security.new_identity()
        if trusted:
            agent.trusted[self.identity.public_key] = "teacher"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.received: list[tuple[Message, list[bytes]]] = []
        self.conditions: list[Condition] = []
        self.reasons: list[str] = []
        self.dialer = Dialer(
            self.context,
            f"tcp://127.0.0.1:{port or agent.port}",
            agent.identity.public_key,
            self.identity,
            cluster=cluster,
            cluster_name=cluster_name,
            epoch=epoch,
            sender="desk",
            on_message=lambda message, buffers: self.received.append((message, buffers)),
            on_condition=self.on_condition,
            received=received,
            settings=settings,
            peer="mini",
            reception=front.reception if front else None,
        )
        self.dialer.start()

    def on_condition(self, condition: Condition, reason: str) -> None:
        self.conditions.append(condition)
        self.reasons.append(reason)

    def numbers(self) -> list[int]:
        return [int(message.node) for message, _ in self.received if isinstance(message, LogLines)]

    async def connected(self) -> "Coordinator":
        await until(lambda: self.dialer.condition == "connected", "connection")
        return self

    async def close(self) -> None:
        await self.dialer.close(flush=0)
        self.context.term()


class Front:
    """An InboundListener and who came."""

    def __init__(self, agent: Agent, *, trusted: bool = True, port: str = "0") -> None:
        self.identity = security.new_identity()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.trusted: dict[str, str] = {}
        if trusted:
            self.trusted[agent.identity.public_key] = "mini"
        agent.trusted[self.identity.public_key] = "teacher"
        self.arrivals: list[tuple[str, str]] = []
        self.reception = InboundListener(
            self.context,
            f"tcp://127.0.0.1:{port}",
            self.identity,
            authorise=self.trusted.get,
            on_arrival=lambda key, address: self.arrivals.append((key, address)),
        )
        self.port = self.reception.start()

    def called_by(self, agent: Agent, port: int | None = None) -> DialOut:
        """``agent`` dials in."""
        return agent.listener.dial_out(f"127.0.0.1:{port or self.port}", self.identity.public_key, agent.on_dial_out)

    async def close(self) -> None:
        self.reception.close()
        self.context.term()


Passing = TypeVar("Passing", bound=Relay)


class DialledThrough(NamedTuple, Generic[Passing]):
    """What :func:`dialled_through` made."""

    agent: Agent
    front: Front
    coordinator: Coordinator
    relay: Passing
    dialled: DialOut


@contextlib.asynccontextmanager
async def closing(*things: Agent | Coordinator | Front) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for thing in things:
            await thing.close()


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[tuple[Agent, Coordinator]]:
    """An agent and a coordinator that is connected to it."""
    agent = Agent()
    agent.start()
    coordinator = await Coordinator(agent).connected()
    async with closing(coordinator, agent):
        yield agent, coordinator


@contextlib.asynccontextmanager
async def agent_and_front(trusted: bool = True) -> AsyncIterator[tuple[Agent, Front]]:
    """An agent and a reception at which it may dial in; ``trusted``: the reception knows it."""
    agent = Agent()
    agent.start()
    front = Front(agent, trusted=trusted)
    async with closing(agent, front):
        yield agent, front


@contextlib.asynccontextmanager
async def waiting_for_agent() -> AsyncIterator[tuple[Agent, Front, Coordinator]]:
    """An agent, the reception at which it may dial in, and the coordinator that waits for that."""
    async with agent_and_front() as (agent, front):
        coordinator = Coordinator(agent, front=front)
        async with closing(coordinator):
            yield agent, front, coordinator


@contextlib.asynccontextmanager
async def dialled_through(
    relay: type[Passing], settings: LinkSettings = FAST
) -> AsyncIterator[DialledThrough[Passing]]:
    """A coordinator and the agent that has dialled in to it over a ``relay``."""
    agent = Agent(settings=settings)
    agent.start()
    front = Front(agent)
    async with relay(front.port) as between:
        coordinator = Coordinator(agent, front=front, settings=settings)
        async with closing(coordinator, agent, front):
            dialled = front.called_by(agent, between.port)
            await coordinator.connected()
            yield DialledThrough(agent, front, coordinator, between, dialled)


def exchange(agent: Agent, coordinator: Coordinator, numbers: range) -> None:
    """Both sides send these numbers."""
    for number in numbers:
        coordinator.dialer.send(ReadLog(node="n", lines=number), [b"x" * (number % 7)])
        agent.sessions[-1].send(LogLines(node=str(number), lines=[]), [b"y" * (number % 5)])


async def exchanged(agent: Agent, coordinator: Coordinator, count: int) -> None:
    await until(lambda: len(agent.received) >= count and len(coordinator.received) >= count, f"{count} messages")
    assert agent.numbers() == list(range(count))
    assert coordinator.numbers() == list(range(count))
    assert [len(buffers[0]) for _, buffers in agent.received] == [number % 7 for number in range(count)]


class RawClient:
    """A trusted CURVE client that says whatever a test wants."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self.socket = socket

    async def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    async def receive(self, kind: type) -> Any:
        await until(lambda: self.socket.poll(0), "answer")
        return zmq_decode(self.socket.recv_multipart()[0], kind)


def zmq_decode(data: bytes, kind: type) -> Any:
    return msgspec.msgpack.decode(data, type=kind)


def hello(*, protocol: int = PROTOCOL_VERSION, sender: str = "desk", cluster: str = "class", session: int = 1) -> bytes:
    return encode(Hello(cluster, 1, session, protocol, sender, cluster, 0, 0, 1))


@contextlib.asynccontextmanager
async def raw_client(agent: Agent) -> AsyncIterator[RawClient]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    identity = security.new_identity()
    agent.trusted[identity.public_key] = "raw"
    dealer = context.socket(zmq.DEALER)
    security.dial(dealer, identity, agent.identity.public_key)
    dealer.connect(f"tcp://127.0.0.1:{agent.port}")
    try:
        yield RawClient(dealer)
    finally:
        context.destroy(linger=0)
