"""An agent that dials out to the coordinator's reception: the same link in the other direction."""

import asyncio
import socket

import pytest
import zmq

from notebook_cluster import security
from notebook_cluster.link import InboundListener, LinkSettings
from notebook_cluster.link.frames import Arrival, Data
from notebook_cluster.protocol import PROTOCOL_VERSION, Message, encode
from notebook_cluster.protocol.peer import LogLines, ReadLog, Released
from tests.in_loop import in_loop, until
from tests.link_ends import (
    FAST,
    Agent,
    Coordinator,
    Front,
    RawClient,
    agent_and_front,
    closing,
    dialled_through,
    exchange,
    exchanged,
    waiting_for_agent,
)
from tests.relay import Relay

SLOWER = LinkSettings(heartbeat=0.2, suspect=1.0, lost=2.0, retry=0.3)
"""Wide enough apart that a busy machine makes no silence of its own."""


@in_loop
async def test_messages_go_both_ways_over_the_connection_that_the_agent_made() -> None:
    async with waiting_for_agent() as (agent, front, coordinator):
        dialled = front.called_by(agent)
        await coordinator.connected()
        exchange(agent, coordinator, range(100))
        await exchanged(agent, coordinator, 100)
        assert agent.sessions[0].key == front.identity.public_key
        assert front.reception.is_here(agent.identity.public_key)
        [(key, address)] = front.arrivals
        assert key == agent.identity.public_key
        assert address.startswith("127.0.0.1:")
        assert (dialled.condition, agent.dialling) == ("connected", [("connected", "")])


@in_loop
async def test_a_large_message_arrives_whole_over_a_dial_out() -> None:
    async with waiting_for_agent() as (agent, front, coordinator):
        front.called_by(agent)
        big = bytes(range(256)) * 20_000
        coordinator.dialer.send(ReadLog(node="n", lines=1), [big])
        await coordinator.connected()
        agent.sessions[0].send(LogLines(node="1", lines=[]), [big, b""])
        await until(lambda: coordinator.received and agent.received, "large messages")
        assert (coordinator.received[0][1], agent.received[0][1]) == ([big, b""], [big])


@in_loop
async def test_an_agent_that_arrived_before_its_dialer_is_used_when_that_starts() -> None:
    async with agent_and_front() as (agent, front):
        front.called_by(agent)
        await until(lambda: front.arrivals, "arrival")
        async with closing(await Coordinator(agent, front=front).connected()):
            pass


@in_loop
async def test_while_the_agent_has_not_dialled_the_reason_says_what_to_look_at() -> None:
    async with waiting_for_agent() as (agent, front, coordinator):
        reason = "mini has not dialled in: is `notebook-cluster share --dial` running on mini?"
        assert (coordinator.dialer.condition, coordinator.dialer.reason) == ("connecting", reason)
        await until(lambda: coordinator.dialer.condition == "lost", "loss")
        assert coordinator.dialer.reason == reason
        front.called_by(agent)
        await coordinator.connected()


@in_loop
async def test_a_cut_dial_out_loses_and_doubles_nothing() -> None:
    async with dialled_through(Relay) as (agent, front, coordinator, relay, _):
        for start in range(0, 500, 100):
            exchange(agent, coordinator, range(start, start + 50))
            await asyncio.sleep(0)
            arrivals = len(front.arrivals)
            relay.cut()
            exchange(agent, coordinator, range(start + 50, start + 100))
            await until(lambda before=arrivals: len(front.arrivals) > before, "new arrival")
            await coordinator.connected()
        await exchanged(agent, coordinator, 500)
        assert len(agent.sessions) == 1


@in_loop
async def test_silence_of_an_agent_that_dialled_is_told_apart_from_a_close() -> None:
    async with dialled_through(Relay, SLOWER) as (agent, front, coordinator, relay, _):
        assert not coordinator.dialer.silent
        relay.hold()
        await until(lambda: coordinator.dialer.condition == "lost", "loss")
        assert coordinator.dialer.silent
        relay.resume()
        await coordinator.connected()
        relay.refusing = True
        relay.cut()
        await until(lambda: coordinator.dialer.condition == "lost", "second loss")
        assert not coordinator.dialer.silent
        assert "mini closed its connection and has not dialled in again" in coordinator.dialer.reason
        assert not front.reception.is_here(agent.identity.public_key)


@in_loop
async def test_a_restarted_agent_dials_in_and_goes_on() -> None:
    agent = Agent()
    agent.start()
    front = Front(agent)
    coordinator = Coordinator(agent, front=front)
    front.called_by(agent)
    await coordinator.connected()
    agent.sessions[0].send(LogLines(node="0", lines=[]))
    await until(lambda: coordinator.received, "first message")
    await agent.close()
    coordinator.dialer.send(ReadLog(node="n", lines=5))
    successor = Agent(agent.identity)
    successor.trusted = agent.trusted
    successor.greet = True
    successor.start()
    async with closing(coordinator, successor, front):
        front.called_by(successor)
        await until(lambda: successor.numbers() == [5] and len(coordinator.received) == 2, "messages after it")


@in_loop
async def test_a_restarted_reception_is_dialled_again() -> None:
    agent = Agent()
    agent.start()
    front = Front(agent)
    dialled = front.called_by(agent)
    await until(lambda: front.arrivals, "arrival")
    await front.close()
    await until(lambda: dialled.condition == "lost", "loss")
    assert f"127.0.0.1:{front.port}" in dialled.reason
    second = InboundListener(
        context := zmq.Context(),
        f"tcp://127.0.0.1:{front.port}",
        front.identity,
        authorise=front.trusted.get,
        on_arrival=lambda key, address: front.arrivals.append((key, address)),
    )
    second.start()
    await until(lambda: len(front.arrivals) == 2 and dialled.condition == "connected", "second arrival")
    second.close()
    await agent.close()
    context.term()


@in_loop
async def test_a_second_connection_of_an_agent_replaces_the_first() -> None:
    async with dialled_through(Relay) as (agent, front, coordinator, relay, first):
        relay.refusing = True
        front.called_by(agent)
        await until(lambda: first.condition == "lost", "end of the first")
        exchange(agent, coordinator, range(20))
        await exchanged(agent, coordinator, 20)
        assert len(front.arrivals) == 2


# ---- trust -------------------------------------------------------------------------------------------------------


@in_loop
async def test_an_agent_that_the_coordinator_does_not_know_is_refused_and_comes_in_once_it_does() -> None:
    async with agent_and_front(trusted=False) as (agent, front):
        dialled = front.called_by(agent)
        await until(lambda: dialled.condition == "refused", "refusal")
        assert "does not trust this machine: pair again" in dialled.reason
        assert front.arrivals == []
        front.trusted[agent.identity.public_key] = "mini"
        await until(lambda: dialled.condition == "connected" and front.arrivals, "arrival")


@in_loop
async def test_a_removed_agent_is_cut_off_and_refused() -> None:
    async with waiting_for_agent() as (agent, front, coordinator):
        dialled = front.called_by(agent)
        await coordinator.connected()
        del front.trusted[agent.identity.public_key]
        front.reception.revoke(agent.identity.public_key)
        assert not front.reception.is_here(agent.identity.public_key)
        await until(lambda: dialled.condition == "refused", "refusal")
        await until(lambda: coordinator.dialer.condition == "lost", "loss")
        assert "was removed" in coordinator.dialer.reason
        assert not coordinator.dialer.silent
        assert len(front.arrivals) == 1


@in_loop
async def test_a_removed_coordinator_is_not_dialled_any_more() -> None:
    async with waiting_for_agent() as (agent, front, coordinator):
        front.called_by(agent)
        await coordinator.connected()
        del agent.trusted[front.identity.public_key]
        agent.listener.revoke(front.identity.public_key)
        assert agent.sessions[0].condition == "refused"
        await until(lambda: not front.reception.is_here(agent.identity.public_key), "end of the connection")
        coordinator.dialer.send(ReadLog(node="n", lines=1))
        await until(lambda: coordinator.dialer.condition == "lost", "loss")
        assert (agent.received, len(front.arrivals)) == ([], 1)


@in_loop
async def test_a_coordinator_that_the_agent_does_not_trust_gets_no_session_over_a_dial_out() -> None:
    agent = Agent()
    agent.start()
    front = Front(agent)
    coordinator = Coordinator(agent, front=front)
    del agent.trusted[front.identity.public_key]
    async with closing(coordinator, agent, front):
        front.called_by(agent)
        await until(lambda: coordinator.dialer.condition == "refused", "refusal")
        assert "is not trusted" in coordinator.dialer.reason
        assert agent.sessions == []


@in_loop
async def test_another_key_at_the_reception_is_never_talked_to() -> None:
    agent = Agent()
    agent.start()
    front, impostor = Front(agent), Front(agent)
    async with closing(agent, front, impostor):
        dialled = agent.listener.dial_out(f"127.0.0.1:{impostor.port}", front.identity.public_key)
        await until(lambda: dialled.condition == "lost", "loss")
        assert impostor.arrivals == []


# ---- odd cases ---------------------------------------------------------------------------------------------------


@in_loop
async def test_an_address_where_nothing_listens_is_lost_with_the_way_out_and_tried_again() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        agent = Agent()
        agent.start()
        dialled = agent.listener.dial_out(f"127.0.0.1:{port}", security.new_identity().public_key)
        await until(lambda: dialled.condition == "lost", "loss")
        assert f"nothing answers at 127.0.0.1:{port}" in dialled.reason
        await agent.close()


@pytest.mark.parametrize("address", ["", "host", ":9", "host:0", "host:70000", "host:x", "tcp://"])
@in_loop
async def test_what_is_no_address_is_named(address: str) -> None:
    agent = Agent()
    agent.start()
    with pytest.raises(ValueError, match="is no address to dial: give HOST:PORT"):
        agent.listener.dial_out(address, security.new_identity().public_key)
    await agent.close()


@in_loop
async def test_a_closed_dial_out_hangs_up() -> None:
    async with agent_and_front() as (agent, front):
        dialled = front.called_by(agent)
        await until(lambda: front.arrivals, "arrival")
        dialled.close()
        dialled.close()
        await until(lambda: not front.reception.is_here(agent.identity.public_key), "end")


@in_loop
async def test_frames_of_an_agent_that_no_dialer_wants_are_counted() -> None:
    agent = Agent()
    agent.start()
    front = Front(agent)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    security.dial(dealer, agent.identity, front.identity.public_key)
    dealer.connect(f"tcp://127.0.0.1:{front.port}")
    client = RawClient(dealer)
    async with closing(agent, front):
        await client.send(b"too early")
        await until(lambda: front.reception.dropped["garbage"], "count of garbage")
        await client.send(encode(Arrival(PROTOCOL_VERSION)))
        await client.send(encode(Data("class", 1, 1, 1, 0)), b"x")
        await until(lambda: front.reception.dropped["unwanted"], "count of unwanted")
        assert front.arrivals[0][0] == agent.identity.public_key
    context.destroy(linger=0)


@in_loop
async def test_the_session_may_end_over_a_dial_out_and_begin_again() -> None:
    async with waiting_for_agent() as (agent, front, coordinator):
        front.called_by(agent)
        await coordinator.connected()

        def release(message: Message, buffers: list[bytes]) -> None:
            agent.sessions[0].send(Released())
            agent.sessions[0].close()

        agent.sessions[0].on_message = release
        coordinator.dialer.send(ReadLog(node="n"))
        await until(lambda: coordinator.received == [(Released(), [])], "farewell")
        coordinator.dialer.send(ReadLog(node="n", lines=2))
        await until(lambda: agent.numbers() == [2], "message in a new session")


@in_loop
async def test_a_reception_whose_handler_is_absent_lets_nobody_in() -> None:
    agent = Agent(settings=FAST)
    agent.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = security.Gate(context)
    identity = security.new_identity()
    arrivals: list[str] = []
    reception = InboundListener(
        context,
        "tcp://127.0.0.1:0",
        identity,
        authorise=lambda key: "anybody",
        on_arrival=lambda key, address: arrivals.append(key),
        gate=gate,
    )
    port = reception.start()
    gate.close()
    dialled = agent.listener.dial_out(f"127.0.0.1:{port}", identity.public_key, agent.on_dial_out)
    await until(lambda: agent.dialling, "failure")
    assert dialled.condition != "connected"
    assert arrivals == []
    await agent.close()
    reception.close()
    context.term()
