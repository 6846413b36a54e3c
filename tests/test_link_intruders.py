"""Who is not let in: recordings, random bytes, anybody where the handler is absent; and silence told from a close."""

import asyncio
import socket

from notebook_cluster import security
from notebook_cluster.link import Listener
from notebook_cluster.link.frames import (
    SessionRefusal,
)
from notebook_cluster.protocol import PROTOCOL_VERSION
from tests.in_loop import in_loop, until
from tests.link_ends import (
    FAST,
    Agent,
    Coordinator,
    closing,
    dialled_through,
    exchange,
    exchanged,
    hello,
    linked,
    raw_client,
)
from tests.relay import Relay


class Recorder(Relay):
    """Keeps what the first client said, as somebody who listens on the network could."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self.said = bytearray()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        outwards = sink.get_extra_info("peername")[1] == self._target_port
        feed = source.feed_data

        def keep(data: bytes) -> None:
            self.said += data
            feed(data)

        if outwards and self.accepted == 1:
            self.said += bytes(source._buffer)  # type: ignore[attr-defined]
            source.feed_data = keep  # type: ignore[method-assign]
        await super()._pass_on(source, sink)


async def replayed(port: int, said: bytes) -> None:
    """Say the same bytes again; returns when the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    try:
        while await asyncio.wait_for(reader.read(65536), 20):
            pass
    except ConnectionError:
        pass
    writer.close()


@in_loop
async def test_a_recorded_session_said_again_to_the_agent_is_refused() -> None:
    agent = Agent()
    async with Recorder(agent.start()) as relay:
        coordinator = await Coordinator(agent, relay.port).connected()
        async with closing(coordinator, agent):
            exchange(agent, coordinator, range(5))
            await exchanged(agent, coordinator, 5)
            assert len(relay.said) > 500
            frames = agent.listener.dropped.total()
            await replayed(agent.port, bytes(relay.said))
            assert agent.numbers() == list(range(5))
            assert (len(agent.sessions), agent.listener.dropped.total()) == (1, frames)
            assert coordinator.dialer.condition == "connected"


@in_loop
async def test_a_recorded_dial_out_said_again_to_the_reception_is_refused() -> None:
    async with dialled_through(Recorder) as (agent, front, coordinator, relay, _):
        exchange(agent, coordinator, range(5))
        await exchanged(agent, coordinator, 5)
        assert len(relay.said) > 500
        await replayed(front.port, bytes(relay.said))
        assert coordinator.numbers() == list(range(5))
        assert (len(front.arrivals), front.reception.dropped.total()) == (1, 0)
        assert coordinator.dialer.condition == "connected"


@in_loop
async def test_random_bytes_at_the_port_harm_nobody() -> None:
    async with linked() as (agent, coordinator):
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
        for said in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 5000, greeting + b"\x04\xff" * 500):
            _, writer = await asyncio.open_connection("127.0.0.1", agent.port)
            writer.write(said)
            writer.close()
        exchange(agent, coordinator, range(20))
        await exchanged(agent, coordinator, 20)
        assert len(agent.sessions) == 1


@in_loop
async def test_a_listener_whose_handler_is_absent_lets_nobody_in() -> None:
    agent = Agent()
    gate = security.Gate(agent.context)
    agent.listener = Listener(
        agent.context,
        "tcp://127.0.0.1:0",
        agent.identity,
        authorise=lambda key: "anybody",
        on_session=agent.on_session,
        settings=FAST,
        gate=gate,
    )
    agent.port = agent.listener.start()
    gate.close()
    coordinator = Coordinator(agent)
    async with closing(coordinator, agent):
        await until(lambda: coordinator.dialer.condition in ("lost", "refused"), "failure")
        assert agent.sessions == []


@in_loop
async def test_silence_is_told_apart_from_a_connection_that_was_closed() -> None:
    agent = Agent()
    async with Relay(agent.start()) as relay:
        coordinator = await Coordinator(agent, relay.port).connected()
        async with closing(coordinator, agent):
            assert not coordinator.dialer.silent
            relay.hold()
            await until(lambda: coordinator.dialer.condition == "lost", "loss")
            assert coordinator.dialer.silent
            relay.refusing = True
            relay.cut()
            await until(lambda: not coordinator.dialer.silent, "close")
            relay.refusing = False
            relay.resume()
            await coordinator.connected()
            await until(lambda: coordinator.dialer.jitter is not None, "jitter")


@in_loop
async def test_an_agent_that_ended_is_not_silent_and_one_that_never_answers_the_dial_is() -> None:
    agent = Agent()
    agent.start()
    coordinator = await Coordinator(agent).connected()
    await agent.close()
    await until(lambda: coordinator.dialer.condition == "lost", "loss")
    assert not coordinator.dialer.silent
    async with closing(coordinator):
        # A full backlog of a listening socket: SYN is not answered, as by a machine that sleeps.
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first:
            port = full.getsockname()[1]
            first.connect(("127.0.0.1", port))
            other = Coordinator(agent, port)
            async with closing(other):
                await until(lambda: other.dialer.condition == "lost", "loss")
                assert other.dialer.silent


@in_loop
async def test_a_hello_with_another_protocol_leaves_no_session() -> None:
    agent = Agent()
    agent.start()
    async with raw_client(agent) as client:
        await client.send(hello(protocol=PROTOCOL_VERSION + 1))
        await client.receive(SessionRefusal)
        assert agent.listener.sessions == {}
        assert agent.listener.dropped["refused"] == 1
    await agent.close()
