"""Dialer and Listener over real sockets: breaks, restarts, refusals, garbage, limits."""

import asyncio
import socket

import pytest
import zmq

from notebook_cluster import security
from notebook_cluster.link import LinkSettings
from notebook_cluster.link.frames import Data, Hello, SessionRefusal
from notebook_cluster.protocol import PROTOCOL_VERSION, Message, encode
from notebook_cluster.protocol.peer import LogLines, ReadLog, Released
from tests.in_loop import in_loop, until
from tests.link_ends import Agent, Coordinator, closing, exchange, exchanged, hello, linked, raw_client, zmq_decode
from tests.relay import Relay

# ---- the ordinary case ---------------------------------------------------------------------------------------


@in_loop
async def test_messages_go_both_ways_with_their_buffers() -> None:
    agent = Agent()
    agent.start()
    coordinator = Coordinator(agent)
    async with closing(coordinator, agent):
        await coordinator.connected()
        assert (agent.sessions[0].cluster, agent.sessions[0].cluster_name) == ("class", "class")
        assert agent.sessions[0].key == coordinator.identity.public_key
        exchange(agent, coordinator, range(100))
        await exchanged(agent, coordinator, 100)
        assert coordinator.dialer.received == 100
        await until(lambda: coordinator.dialer.round_trip, "round trip")


@in_loop
async def test_a_message_larger_than_a_frame_arrives_whole() -> None:
    async with linked() as (agent, coordinator):
        big = bytes(range(256)) * 20_000
        agent.sessions[0].send(LogLines(node="1", lines=[]), [b"head", big, b""])
        await until(lambda: coordinator.received, "large message")
        assert coordinator.received[0][1] == [b"head", big, b""]


@in_loop
async def test_what_is_sent_before_the_connection_and_in_on_session_arrives() -> None:
    agent = Agent()
    agent.greet = True
    agent.start()
    coordinator = Coordinator(agent)
    async with closing(coordinator, agent):
        coordinator.dialer.send(ReadLog(node="n", lines=7))
        await until(lambda: agent.received and coordinator.received, "first messages")
        assert agent.numbers() == [7]
        assert coordinator.received == [(LogLines(node="greeting", lines=[]), [])]


@in_loop
async def test_everything_is_acknowledged_when_both_are_silent() -> None:
    async with linked() as (agent, coordinator):
        exchange(agent, coordinator, range(10))
        assert await agent.sessions[0].flushed(10)
        await coordinator.dialer.close(flush=10)
        assert agent.numbers() == list(range(10))


@in_loop
async def test_the_message_in_which_a_session_ends_is_acknowledged() -> None:
    async with linked() as (agent, coordinator):

        def release(message: Message, buffers: list[bytes]) -> None:
            agent.sessions[0].send(Released())
            agent.sessions[0].close()

        agent.sessions[0].on_message = release
        coordinator.dialer.send(ReadLog(node="n"))
        assert await coordinator.dialer._conversation.flushed(10)
        assert coordinator.received == [(Released(), [])]
        assert agent.listener.sessions == {}


@in_loop
async def test_inside_on_message_received_is_the_number_of_the_message_at_hand() -> None:
    async with linked() as (agent, coordinator):
        numbers: list[int] = []
        coordinator.dialer._on_message = lambda message, buffers: numbers.append(coordinator.dialer.received)
        for _ in range(3):
            agent.sessions[0].send(Released())
        await until(lambda: numbers == [1, 2, 3], "numbers")
        assert coordinator.dialer.received == 3


@in_loop
async def test_two_clusters_have_a_session_each() -> None:
    agent = Agent()
    agent.start()
    first = await Coordinator(agent, cluster="first").connected()
    second = await Coordinator(agent, cluster="second", identity=first.identity).connected()
    async with closing(first, second, agent):
        first.dialer.send(ReadLog(node="n", lines=1))
        second.dialer.send(ReadLog(node="n", lines=2))
        await until(lambda: sorted(agent.numbers()) == [1, 2], "messages of both")
        assert sorted(agent.listener.sessions) == ["first", "second"]


# ---- breaks --------------------------------------------------------------------------------------------------


@in_loop
async def test_a_cut_connection_loses_and_doubles_nothing() -> None:
    agent = Agent()
    async with Relay(agent.start()) as relay:
        coordinator = await Coordinator(agent, relay.port).connected()
        async with closing(coordinator, agent):
            for start in range(0, 500, 100):
                exchange(agent, coordinator, range(start, start + 50))
                await asyncio.sleep(0)
                relay.cut()
                exchange(agent, coordinator, range(start + 50, start + 100))
                await until(lambda: coordinator.dialer.condition == "connected", "return")
            await exchanged(agent, coordinator, 500)
            assert relay.accepted >= 2


@in_loop
async def test_silence_is_suspect_then_lost_and_everything_arrives_afterwards() -> None:
    # Wide enough apart that a busy machine makes no silence of its own.
    slower = LinkSettings(heartbeat=0.2, suspect=1.0, lost=2.0)
    agent = Agent(settings=slower)
    async with Relay(agent.start()) as relay:
        coordinator = await Coordinator(agent, relay.port, settings=slower).connected()
        async with closing(coordinator, agent):
            exchange(agent, coordinator, range(10))
            relay.hold()
            exchange(agent, coordinator, range(10, 20))
            await until(lambda: coordinator.dialer.condition == "lost", "loss at the coordinator")
            await until(lambda: agent.sessions[0].condition == "lost", "loss at the agent")
            exchange(agent, coordinator, range(20, 30))
            relay.resume()
            await until(lambda: coordinator.dialer.condition == "connected", "return")
            await exchanged(agent, coordinator, 30)
            await until(lambda: agent.sessions[0].condition == "connected", "return at the agent")
        assert coordinator.conditions == ["connected", "suspect", "lost", "connected"]
        assert agent.conditions == ["connected", "suspect", "lost", "connected"]
        assert len(agent.sessions) == 1
        assert "has been silent for" in coordinator.reasons[1]


@in_loop
async def test_a_break_in_the_middle_of_a_large_message_does_not_lose_it() -> None:
    agent = Agent(settings=LinkSettings(heartbeat=0.1, suspect=0.4, lost=1.0))
    async with Relay(agent.start()) as relay:
        coordinator = await Coordinator(agent, relay.port).connected()
        async with closing(coordinator, agent):
            big = bytes(range(256)) * 60_000
            agent.sessions[0].send(LogLines(node="0", lines=[]), [big])
            await until(lambda: coordinator.dialer._channel.inbox.held > 3, "first pieces")
            relay.cut()
            await until(lambda: coordinator.received, "large message")
            assert coordinator.received[0][1] == [big]
            assert coordinator.dialer.received == agent.sessions[0].last_sent


@in_loop
async def test_an_agent_that_was_restarted_is_used_again() -> None:
    agent = Agent()
    port = agent.start()
    coordinator = await Coordinator(agent).connected()
    agent.sessions[0].send(LogLines(node="0", lines=[]))
    await until(lambda: coordinator.received, "first message")
    await agent.close()
    await until(lambda: coordinator.dialer.condition == "lost", "loss")
    assert str(port) in coordinator.reasons[-1]
    coordinator.dialer.send(ReadLog(node="n", lines=5))

    successor = Agent(agent.identity)
    successor.trusted = agent.trusted
    successor.greet = True
    successor.start(str(port))
    async with closing(coordinator, successor):
        await until(lambda: successor.numbers() == [5] and len(coordinator.received) == 2, "messages after it")
        assert coordinator.received[1] == (LogLines(node="greeting", lines=[]), [])
        assert coordinator.dialer.received == 2


@in_loop
async def test_a_coordinator_that_was_restarted_takes_over_and_misses_nothing() -> None:
    agent = Agent()
    agent.start()
    first = await Coordinator(agent, epoch=1).connected()
    exchange(agent, first, range(3))
    await exchanged(agent, first, 3)
    # It dies: no goodbye, and what the agent says meanwhile is not heard.
    await first.close()
    agent.sessions[0].send(LogLines(node="3", lines=[]))

    second = Coordinator(agent, epoch=2, received=first.dialer.received, identity=first.identity)
    async with closing(second, agent):
        second.dialer.send(ReadLog(node="n", lines=3))
        await until(lambda: len(second.received) == 2 and len(agent.received) == 4, "messages after the restart")
        assert [message.node for message, _ in second.received if isinstance(message, LogLines)] == [
            "3",
            "restarted",
        ]
        assert agent.numbers() == [0, 1, 2, 3]
        assert (len(agent.sessions), agent.restarts, agent.sessions[0].epoch) == (1, 1, 2)


@in_loop
async def test_a_new_dialer_of_the_same_coordinator_takes_over() -> None:
    agent = Agent()
    agent.start()
    first = await Coordinator(agent).connected()
    exchange(agent, first, range(3))
    await exchanged(agent, first, 3)
    await first.close()
    second = Coordinator(agent, received=first.dialer.received, identity=first.identity)
    async with closing(second, agent):
        second.dialer.send(ReadLog(node="n", lines=3))
        await until(lambda: agent.numbers() == [0, 1, 2, 3], "message of the second dialer")


@in_loop
async def test_an_agent_that_closed_the_session_gets_a_new_one() -> None:
    async with linked() as (agent, coordinator):
        agent.sessions[0].close()
        coordinator.dialer.send(ReadLog(node="n", lines=9))
        await until(lambda: agent.numbers() == [9], "message in a new session")
        assert len(agent.sessions) == 2


# ---- refusals ------------------------------------------------------------------------------------------------


@in_loop
async def test_a_key_that_is_not_trusted_is_refused_with_the_reason_and_comes_in_once_it_is() -> None:
    agent = Agent()
    agent.start()
    coordinator = Coordinator(agent, trusted=False)
    async with closing(coordinator, agent):
        await until(lambda: coordinator.dialer.condition == "refused", "refusal")
        assert "does not trust this machine" in coordinator.dialer.reason
        assert agent.sessions == []
        agent.trusted[coordinator.identity.public_key] = "teacher"
        await coordinator.connected()
        assert coordinator.conditions == ["refused", "connected"]


@in_loop
async def test_a_lower_epoch_is_refused_and_the_newer_coordinator_goes_on() -> None:
    agent = Agent()
    agent.start()
    newer = await Coordinator(agent, epoch=4).connected()
    older = Coordinator(agent, epoch=3, identity=newer.identity)
    async with closing(newer, older, agent):
        await until(lambda: older.dialer.condition == "refused", "refusal")
        assert "start 4 of the coordinator of class is running, this is start 3" in older.dialer.reason
        newer.dialer.send(ReadLog(node="n", lines=1))
        await until(lambda: agent.numbers() == [1], "message of the newer one")


@in_loop
async def test_a_cluster_of_another_key_is_refused() -> None:
    agent = Agent()
    agent.start()
    owner = await Coordinator(agent).connected()
    thief = Coordinator(agent, epoch=9)
    async with closing(owner, thief, agent):
        await until(lambda: thief.dialer.condition == "refused", "refusal")
        assert "cluster class belongs to another key" in thief.dialer.reason
        assert agent.sessions[0].epoch == 1


@in_loop
async def test_an_agent_that_is_elsewhere_gets_what_waited_for_it_once() -> None:
    agent = Agent()
    port = agent.start()
    async with Relay(port) as relay:
        coordinator = await Coordinator(agent, relay.port).connected()
        async with closing(coordinator, agent):
            exchange(agent, coordinator, range(10))
            relay.refusing = True
            relay.cut()
            exchange(agent, coordinator, range(10, 20))
            coordinator.dialer.move(f"tcp://127.0.0.1:{port}")
            await exchanged(agent, coordinator, 20)
            assert agent.restarts == 0


@in_loop
async def test_a_removed_key_is_cut_off() -> None:
    agent = Agent()
    agent.start()
    coordinator = await Coordinator(agent).connected()
    other = await Coordinator(agent, cluster="other").connected()
    async with closing(coordinator, other, agent):
        del agent.trusted[coordinator.identity.public_key]
        agent.listener.revoke(coordinator.identity.public_key)
        assert agent.sessions[0].condition == "refused"
        await until(lambda: coordinator.dialer.condition == "refused", "refusal")
        assert "does not trust" in coordinator.dialer.reason
        assert other.dialer.condition != "refused"
        assert list(agent.listener.sessions) == ["other"]


@in_loop
async def test_another_protocol_version_is_refused_with_both_versions() -> None:
    agent = Agent()
    agent.start()
    async with raw_client(agent) as client:
        await client.send(hello(protocol=99, sender="attic"))
        refusal = await client.receive(SessionRefusal)
        assert refusal.protocol == PROTOCOL_VERSION
        assert f"peer 'attic' speaks protocol 99, this machine {PROTOCOL_VERSION}" in refusal.reason
    await agent.close()


@in_loop
async def test_the_dialer_names_both_versions_when_the_agent_speaks_another_protocol() -> None:
    agent = Agent()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = security.Gate(context)
    gate.allow("old", lambda key: key)
    router = context.socket(zmq.ROUTER)
    security.serve(router, agent.identity, "old")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    coordinator = Coordinator(agent, port)
    async with closing(coordinator):
        await until(lambda: router.poll(0), "hello")
        routing_id, frame = router.recv_multipart()
        said = zmq_decode(frame, Hello)
        refusal = SessionRefusal(said.cluster, said.epoch, said.session, PROTOCOL_VERSION + 1, "no")
        router.send_multipart([routing_id, encode(refusal)])
        await until(lambda: coordinator.dialer.condition == "refused", "refusal")
        assert f"speaks protocol {PROTOCOL_VERSION + 1}, this machine {PROTOCOL_VERSION}" in coordinator.dialer.reason
        assert "upgrade notebook-cluster on this machine" in coordinator.dialer.reason
    gate.close()
    context.destroy(linger=0)


@in_loop
async def test_another_key_at_the_address_is_never_connected_to() -> None:
    agent, impostor = Agent(), Agent()
    agent.start()
    impostor.start()
    coordinator = Coordinator(agent, impostor.port)
    impostor.trusted = agent.trusted
    async with closing(coordinator, agent, impostor):
        await until(lambda: coordinator.dialer.condition == "lost", "loss")
        assert impostor.sessions == []


@in_loop
async def test_an_address_where_nothing_listens_is_lost_with_the_way_out() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        coordinator = Coordinator(Agent(), port)
        async with closing(coordinator):
            await until(lambda: coordinator.dialer.condition == "lost", "loss")
            assert f"nothing answers at 127.0.0.1:{port}" in coordinator.dialer.reason


@in_loop
async def test_a_taken_port_is_named_with_the_way_out() -> None:
    first, second = Agent(), Agent()
    port = first.start()
    with pytest.raises(OSError, match=f"port {port} is taken by another program: choose another one with --port"):
        second.start(str(port))
    second.context.term()
    await first.close()


# ---- limits and garbage --------------------------------------------------------------------------------------


@in_loop
async def test_a_full_outbox_drops_only_stream_output_and_says_how_much() -> None:
    agent = Agent()
    async with Relay(agent.start()) as relay:
        coordinator = await Coordinator(agent, relay.port).connected()
        async with closing(coordinator, agent):
            session = agent.sessions[0]
            markers: list[int] = []
            session.on_shortened = markers.append
            relay.hold()
            taken = [session.send(LogLines(node=str(n), lines=[]), [bytes(5000)], droppable=True) for n in range(100)]
            assert taken.count(True) == 39
            assert taken == sorted(taken, reverse=True)
            session.send(LogLines(node="1000", lines=[]), [bytes(50_000)])
            assert markers == [61]
            assert session.left_out == 61
            relay.resume()
            await until(lambda: len(coordinator.received) == 40, "all that was taken")
            assert coordinator.numbers() == [*range(39), 1000]


@pytest.mark.parametrize(
    ("frames", "cause"),
    [
        ([b""], "garbage"),
        ([b"\xff" * 100], "garbage"),
        ([encode(ReadLog(node="n"))], "garbage"),
        ([encode(Data("class", 1, 1, 1, 99)), b"x"], "stale"),
    ],
)
@in_loop
async def test_garbage_is_dropped_and_counted_and_does_no_harm(frames: list[bytes], cause: str) -> None:
    agent = Agent()
    agent.start()
    coordinator = await Coordinator(agent).connected()
    async with closing(coordinator, agent), raw_client(agent) as client:
        await client.send(*frames)
        await until(lambda: agent.listener.dropped[cause], f"count of {cause}")
        coordinator.dialer.send(ReadLog(node="n", lines=1))
        await until(lambda: agent.numbers() == [1], "message of the coordinator")


@in_loop
async def test_a_frame_in_the_session_of_another_key_is_dropped() -> None:
    agent = Agent()
    agent.start()
    coordinator = await Coordinator(agent).connected()
    async with closing(coordinator, agent), raw_client(agent) as client:
        forged = Data("class", 1, agent.sessions[0].number, 1, 0)
        await client.send(encode(forged), encode(ReadLog(node="forged")))
        await until(lambda: agent.listener.dropped["foreign"], "count")
        assert agent.received == []


@in_loop
async def test_a_message_that_cannot_be_decoded_is_counted_and_the_next_arrives() -> None:
    agent = Agent()
    agent.start()
    async with raw_client(agent) as client:
        await client.send(hello())
        await client.send(encode(Data("class", 1, 1, 1, 0)), b"not a message")
        await client.send(encode(Data("class", 1, 1, 2, 0)), encode(ReadLog(node="n", lines=2)))
        await until(lambda: agent.numbers() == [2], "next message")
        assert agent.listener.dropped["undecodable"] == 1
    await agent.close()


@pytest.mark.parametrize("cluster", ["../x", "", "a" * 64])
@in_loop
async def test_a_cluster_name_that_is_no_name_is_refused(cluster: str) -> None:
    agent = Agent()
    agent.start()
    async with raw_client(agent) as client:
        await client.send(hello(cluster=cluster))
        assert "not a usable cluster name" in (await client.receive(SessionRefusal)).reason
    await agent.close()


@in_loop
async def test_a_gap_is_asked_for_and_filled() -> None:
    async with linked() as (agent, coordinator):
        # The wire swallows one message of the agent, as a reconnect inside libzmq can.
        session = agent.sessions[0]
        session.conversation.pause()
        session.send(LogLines(node="0", lines=[]))
        session.conversation.open(session.cluster, session.epoch, session.number)
        session.send(LogLines(node="1", lines=[]))
        await until(lambda: len(coordinator.received) == 2, "both messages")
        assert coordinator.numbers() == [0, 1]
        assert coordinator.dialer.dropped["gaps"] == 1


@in_loop
async def test_a_lost_last_message_is_found_by_the_heartbeat() -> None:
    async with linked() as (agent, coordinator):
        session = agent.sessions[0]
        session.conversation.pause()
        session.send(LogLines(node="0", lines=[]))
        session.conversation.open(session.cluster, session.epoch, session.number)
        await until(lambda: coordinator.numbers() == [0], "message")


def test_settings_in_the_wrong_order_are_named() -> None:
    with pytest.raises(ValueError, match=r"suspect 2\.5, lost 1\.0"):
        LinkSettings(lost=1.0)
