"""What a link does with trusted peers that misbehave: everything is dropped and counted, nothing grows."""

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_cluster import security
from notebook_cluster.link import tcp
from notebook_cluster.link.frames import (
    Ack,
    AnyHeader,
    Arrival,
    Beat,
    Data,
    Hello,
    Resend,
    SessionRefusal,
    Welcome,
)
from notebook_cluster.protocol import decode, encode
from notebook_cluster.protocol.peer import LogLines, ReadLog
from tests.in_loop import in_loop, until
from tests.link_ends import Agent, Coordinator, Front, RawClient, closing, exchange, hello, raw_client
from tests.relay import Relay

HUGE = (1 << 62) - 1
numbers = st.sampled_from([0, 1, 2, 3, 5, 64, 1 << 20, 1 << 40, HUGE, 1 << 62]) | st.integers(0, 8)
any_numbers = numbers | st.sampled_from([-1, -(1 << 62), (1 << 62) + 1, (1 << 64) - 1])
times = st.sampled_from([0.0, -1.0, 1e308, math.inf, math.nan])
payloads = st.sampled_from(
    [b"", b"x", bytes(5000), encode(ReadLog(node="n", lines=7)), b"\xff" * 9, b"\xdd\xff\xff\xff\xff"]
)


def headers(cluster: str, epoch: int, session: int) -> st.SearchStrategy[bytes]:
    """Headers of an open session, with any numbers, and sometimes with bytes changed, cut off or added."""
    base = (st.sampled_from([cluster, "other"]), st.just(epoch), st.sampled_from([session, session, session, 0, HUGE]))
    sizes = st.lists(any_numbers, max_size=5).map(tuple)
    whole = st.one_of(
        st.builds(Data, *base, any_numbers, numbers, sizes, any_numbers, st.booleans()),
        st.builds(Ack, *base, any_numbers),
        st.builds(Resend, *base, any_numbers, any_numbers),
        st.builds(Beat, *base, any_numbers, numbers, times, times),
        st.builds(Hello, *base, numbers, st.just("x" * 300), st.just("a"), any_numbers, any_numbers, any_numbers),
        st.builds(Welcome, *base, any_numbers, any_numbers, any_numbers, st.booleans()),
        st.builds(Arrival, numbers),
    ).map(encode)
    return st.builds(damaged, whole, st.sampled_from(["no", "no", "flip", "cut", "add"]), st.integers(0, 255))


def damaged(data: bytes, how: str, number: int) -> bytes:
    place = number % len(data)
    if how == "flip":
        return data[:place] + bytes([data[place] ^ (1 + number % 255)]) + data[place + 1 :]
    return {"no": data, "cut": data[:place], "add": data + bytes([number])}[how]


def messages(cluster: str, epoch: int, session: int) -> st.SearchStrategy[list[list[bytes]]]:
    rest = st.lists(payloads, max_size=3)
    return st.lists(st.builds(lambda first, more: [first, *more], headers(cluster, epoch, session), rest), max_size=25)


def hammer(
    runner: asyncio.Runner,
    strategy: st.SearchStrategy[Any],
    examples: int,
    one: Callable[[Any], Coroutine[Any, Any, None]],
) -> None:
    """Run ``one`` for many examples in the event loop which the caller's sockets belong to."""

    @settings(max_examples=examples, deadline=None)
    @given(strategy)
    def try_it(example: Any) -> None:
        runner.run(asyncio.wait_for(one(example), 20))

    try_it()


def no_errors(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was met by a handler that did not expect it."""
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_no_frame_of_a_trusted_coordinator_breaks_the_listener(caplog: pytest.LogCaptureFixture) -> None:
    with asyncio.Runner() as runner:
        agent = Agent()
        contexts: list[zmq.Context[Any]] = []

        async def begin() -> tuple[Coordinator, RawClient]:
            agent.start()
            identity = security.new_identity()
            agent.trusted[identity.public_key] = "raw"
            contexts.append(zmq.Context())
            dealer = contexts[0].socket(zmq.DEALER)
            security.dial(dealer, identity, agent.identity.public_key)
            dealer.connect(f"tcp://127.0.0.1:{agent.port}")
            return await Coordinator(agent, cluster="honest").connected(), RawClient(dealer)

        coordinator, client = runner.run(begin())

        async def one(attack: list[list[bytes]]) -> None:
            before = len(agent.received)
            await client.send(hello(session=1))
            for frames in attack:
                await client.send(*frames)
            coordinator.dialer.send(ReadLog(node="honest", lines=before))
            await until(lambda: ReadLog(node="honest", lines=before) in [m for m, _ in agent.received], "message")
            agent.received.clear()
            assert len(agent.listener.sessions) <= 33

        hammer(runner, messages("class", 1, 1), 60, one)
        runner.run(coordinator.close())
        runner.run(agent.close())
        contexts[0].destroy(linger=0)
    no_errors(caplog)


class HostileAgent:
    """A CURVE server that answers a Dialer's Hello and then says whatever a test wants."""

    def __init__(self) -> None:
        self.identity = security.new_identity()
        self.trusted: dict[str, str] = {}
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.gate = security.Gate(self.context)
        self.gate.allow("hostile", lambda key: key)
        self.router = self.context.socket(zmq.ROUTER)
        security.serve(self.router, self.identity, "hostile")
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")

    async def welcome(self) -> Hello:
        """Open the session that is asked for."""
        said: Any = None
        while not isinstance(said, Hello):
            await until(lambda: self.router.poll(0), "hello")
            self.peer, frame, *_ = self.router.recv_multipart()
            said = decode(frame, AnyHeader)
        self.send([encode(Welcome(said.cluster, said.epoch, said.session, 0, 0, 1, True))])
        return said

    def send(self, frames: list[bytes]) -> None:
        self.router.send_multipart([self.peer, *frames])

    async def close(self) -> None:
        self.gate.close()
        self.context.destroy(linger=0)


def test_no_frame_of_a_trusted_agent_breaks_the_dialer(caplog: pytest.LogCaptureFixture) -> None:
    with asyncio.Runner() as runner:

        async def begin() -> tuple[HostileAgent, Coordinator, Hello]:
            agent = HostileAgent()
            coordinator = Coordinator(agent)
            coordinator.dialer.send(ReadLog(node="n"))
            said = await agent.welcome()
            await coordinator.connected()
            return agent, coordinator, said

        agent, coordinator, said = runner.run(begin())
        dialer = coordinator.dialer

        async def one(attack: list[list[bytes]]) -> None:
            for frames in attack:
                agent.send(frames)
            # The next after the attack is handled: a header of an unknown kind is counted.
            before = dialer.dropped["garbage"]
            agent.send([b"end"])
            await until(lambda: dialer.dropped["garbage"] > before, "end of the attack")
            assert dialer.round_trip is not None
            assert 0 <= dialer.round_trip < 20
            while agent.router.poll(0):
                agent.router.recv_multipart()

        hammer(runner, messages("class", 1, said.session), 60, one)
        runner.run(coordinator.close())
        runner.run(agent.close())
    no_errors(caplog)


def test_no_frame_of_a_trusted_agent_breaks_the_reception(caplog: pytest.LogCaptureFixture) -> None:
    with asyncio.Runner() as runner:
        agent, attacker = Agent(), Agent()
        contexts: list[zmq.Context[Any]] = []

        async def begin() -> tuple[Front, Coordinator, RawClient]:
            agent.start()
            front = Front(agent)
            front.trusted[attacker.identity.public_key] = "attacker"
            front.called_by(agent)
            contexts.append(zmq.Context())
            dealer = contexts[0].socket(zmq.DEALER)
            security.dial(dealer, attacker.identity, front.identity.public_key)
            dealer.connect(f"tcp://127.0.0.1:{front.port}")
            return front, await Coordinator(agent, front=front).connected(), RawClient(dealer)

        front, coordinator, client = runner.run(begin())

        async def one(attack: list[list[bytes]]) -> None:
            for frames in attack:
                await client.send(*frames)
            agent.sessions[0].send(LogLines(node="1", lines=[]))
            await until(lambda: coordinator.received, "message")
            coordinator.received.clear()

        hammer(runner, messages("class", 1, 1), 40, one)
        assert front.reception.dropped["garbage"] + front.reception.dropped["unwanted"] > 0
        runner.run(coordinator.close())
        runner.run(agent.close())
        runner.run(front.close())
        contexts[0].destroy(linger=0)
    no_errors(caplog)


@in_loop
async def test_a_welcome_that_was_not_asked_for_does_not_bring_old_messages_back() -> None:
    agent = HostileAgent()
    coordinator = Coordinator(agent)
    async with closing(coordinator):
        said = await agent.welcome()
        await coordinator.connected()
        message = encode(LogLines(node="1", lines=[]))
        agent.send([encode(Data("class", 1, said.session, 1, 0)), message])
        await until(lambda: coordinator.received, "message")
        agent.send([encode(Welcome("class", 1, said.session, 0, 0, 1, True))])
        agent.send([encode(Data("class", 1, said.session, 1, 0)), message])
        agent.send([encode(Data("class", 1, said.session, 2, 0)), encode(LogLines(node="2", lines=[]))])
        await until(lambda: coordinator.numbers()[-1] == 2, "next message")
        assert coordinator.numbers() == [1, 2]
    await agent.close()


@in_loop
async def test_a_flood_of_clusters_is_refused_with_the_way_out() -> None:
    agent = Agent()
    agent.start()
    async with raw_client(agent) as client:
        for number in range(50):
            await client.send(hello(cluster=f"c{number}", session=1))
        refusals = 0
        while refusals < 18:
            await until(lambda: client.socket.poll(0), "answer")
            answer = decode(client.socket.recv_multipart()[0], AnyHeader)
            if isinstance(answer, SessionRefusal):
                refusals += 1
                assert "32 clusters of key" in answer.reason
                assert "stop one of them first" in answer.reason
        assert len(agent.listener.sessions) == len(agent.sessions) == 32
        # Another key is not concerned, and a cluster that is there may come back.
        await client.send(hello(cluster="c0", session=2))
        other = await Coordinator(agent).connected()
        await other.close()
    await agent.close()


@in_loop
async def test_asking_again_and_again_is_not_answered_every_time() -> None:
    agent = Agent()
    agent.start()
    async with raw_client(agent) as client:
        await client.send(hello())
        await until(lambda: agent.sessions, "session")
        agent.sessions[0].send(LogLines(node="0", lines=[]))
        for _ in range(200):
            await client.send(encode(Resend("class", 1, 1, 0, HUGE)))
        await until(lambda: agent.listener.dropped["resends"] > 100, "count")
    await agent.close()


@in_loop
async def test_an_acknowledgement_of_what_was_never_sent_is_garbage() -> None:
    agent = Agent()
    agent.start()
    async with raw_client(agent) as client:
        await client.send(hello())
        await client.send(encode(Ack("class", 1, 1, HUGE)))
        await until(lambda: agent.listener.dropped["garbage"] == 1, "count")
    await agent.close()


@in_loop
async def test_an_old_session_that_is_said_again_is_dropped() -> None:
    agent = Agent()
    agent.start()
    async with raw_client(agent) as client:
        message = encode(ReadLog(node="n", lines=1))
        await client.send(hello(session=1))
        await client.send(encode(Data("class", 1, 1, 1, 0)), message)
        await client.send(hello(session=2))
        await until(lambda: agent.numbers() == [1], "message")
        await client.send(hello(session=1))
        await client.send(encode(Data("class", 1, 1, 2, 0)), message)
        await until(lambda: agent.listener.dropped["stale"] == 2, "count")
        assert agent.numbers() == [1]
        assert agent.sessions[0].number == 2
    await agent.close()


@in_loop
async def test_what_a_connection_does_not_take_waits_and_arrives_once_and_in_order() -> None:
    agent = Agent()
    async with Relay(agent.start()) as relay:
        coordinator = await Coordinator(agent, relay.port).connected()
        async with closing(coordinator, agent):
            relay.hold()
            body = bytes(20_000)
            for number in range(3000):
                agent.sessions[0].send(LogLines(node=str(number), lines=[]), [body])
            assert agent.sessions[0].conversation._waiting is not None
            relay.resume()
            await until(lambda: len(coordinator.received) == 3000, "all messages")
            assert coordinator.numbers() == list(range(3000))


@in_loop
async def test_a_frame_over_the_limit_ends_the_connection_before_it_is_read() -> None:
    agent = Agent()
    agent.start()
    coordinator = await Coordinator(agent).connected()
    async with closing(coordinator, agent), raw_client(agent) as client:
        monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        await client.send(hello(cluster="other"))
        await until(lambda: len(agent.sessions) == 2, "session")
        await client.send(encode(Data("other", 1, 1, 1, 0)), bytes(2 << 20))
        await until(lambda: monitor.poll(0), "end of the connection")
        exchange(agent, coordinator, range(0))
        coordinator.dialer.send(ReadLog(node="n", lines=0))
        await until(lambda: agent.numbers() == [0], "message of the honest one")
        client.socket.disable_monitor()


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux says how much came over a connection")
@in_loop
async def test_a_message_of_endless_parts_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_UNDELIVERED", 4 << 20)
    monkeypatch.setattr(tcp, "LOOK_EVERY", 0.01)
    agent = Agent()
    async with Relay(agent.start()) as relay:
        coordinator = await Coordinator(agent).connected()
        agent.port = relay.port
        async with closing(coordinator, agent), raw_client(agent) as client:
            # Through a relay, which needs this loop: the message takes longer than a look.
            await client.send(encode(Data("other", 1, 1, 1, 0)), *[bytes(100_000)] * 300)
            await until(lambda: agent.listener.dropped["endless"], "count")
            coordinator.dialer.send(ReadLog(node="n", lines=0))
            await until(lambda: agent.numbers() == [0], "message of the honest one")


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux says how much came over a connection")
@in_loop
async def test_many_messages_that_are_taken_are_no_endless_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_UNDELIVERED", 10 << 20)
    monkeypatch.setattr(tcp, "LOOK_EVERY", 0.01)
    agent = Agent()
    async with Relay(agent.start()) as relay:
        coordinator = await Coordinator(agent, relay.port).connected()
        async with closing(coordinator, agent):
            for turn in range(1, 6):
                for _ in range(100):
                    coordinator.dialer.send(ReadLog(node="n"), [bytes(50_000)])
                    agent.sessions[0].send(LogLines(node="1", lines=[]), [bytes(50_000)])
                await until(
                    lambda count=100 * turn: len(agent.received) == len(coordinator.received) == count, "messages"
                )
            assert agent.listener.dropped["endless"] == coordinator.dialer.dropped["endless"] == 0
            assert relay.accepted == 1
