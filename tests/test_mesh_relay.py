"""Nodes that cannot reach each other: who says so, what goes over the links, and how it comes back."""

import asyncio
import os
from collections import deque

import msgspec
import pytest

from notebook_cluster.mesh import connection, measuring, relay
from notebook_cluster.protocol import encode
from notebook_cluster.protocol.measuring import MeasurePair, PairMeasured
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.node import RelayFrame, RelayTaken, UseRelay
from tests.conftest import wait_until
from tests.mesh_nodes import MeshNode, mesh_nodes
from tests.mesh_relay import FakeCoordinator, cluster_with_closed, far_roster, wire_to
from tests.ports import free_port


def frame(number: int) -> JobFrame:
    return JobFrame(job="model", incarnation=1, kind="mean", round=number)


def send_many(source: MeshNode, target: MeshNode, count: int, size: int = 200_000) -> list[bytes]:
    payloads = [os.urandom(16) * (size // 16) for _ in range(count)]
    for number, payload in enumerate(payloads):
        source.mesh.send(target.name, frame(number), payload)
    return payloads


def measure(node: MeshNode, order: MeasurePair) -> PairMeasured:
    results: list[PairMeasured] = []
    node.loop.call_soon(lambda: node.mesh.measure(order, results.append))
    wait_until(lambda: results)
    return results[0]


def test_a_node_of_another_machine_that_cannot_be_dialled_is_said_before_anything_is_sent() -> None:
    with cluster_with_closed("mini", "desk", "book", closed="desk") as (_, fake):
        wait_until(lambda: len(fake.said) == 2)
        assert {(name, message.node) for name, message in fake.said} == {("mini", "desk"), ("book", "desk")}
        assert fake.said[0][1].endpoint.startswith("tcp://127.0.0.1:")
        wait_until(lambda: len(fake.told) == 2)  # said when both are known to live
        assert sorted(fake.told)[1].startswith("warning: mini cannot reach desk at tcp://127.0.0.1:")
        assert "relayed over the links, which is slower; %cluster doctor" in fake.told[0]


def test_that_a_node_which_says_nothing_itself_cannot_be_reached_is_not_put_down_to_the_network() -> None:
    with cluster_with_closed("mini", "desk", "book", closed="desk") as (_, fake):
        fake.said_nothing_for = lambda name: 5.0 if name == "desk" else 0.0
        wait_until(lambda: len(fake.said) == 2)
        wait_until(lambda: not fake.relaying._told)
        assert not fake.told


def test_it_is_said_once_in_a_generation_until_the_relay_is_allowed() -> None:
    with mesh_nodes("mini", "desk", peers=["mini", "desk"]) as nodes:
        mini, said = nodes[0], []
        mini.mesh.on_unreachable = lambda node, incarnation, endpoint: said.append((node, incarnation))
        ports = {"desk": free_port()}
        mini.mesh.set_roster(far_roster(nodes, ports, 2))
        wait_until(lambda: said == [("desk", 1)])
        mini.loop.call(lambda: [mini.mesh._tick(0.0) for _ in range(5)])
        assert said == [("desk", 1)]
        mini.mesh.set_roster(far_roster(nodes, ports, 3))
        wait_until(lambda: said == [("desk", 1)] * 2)
        mini.loop.call(lambda: mini.mesh.use_relay(UseRelay(node="desk", incarnation=1)))
        mini.mesh.set_roster(far_roster(nodes, ports, 4))
        wait_until(lambda: mini.mesh.relayed("desk"))
        mini.loop.call(lambda: [mini.mesh._tick(0.0) for _ in range(5)])
        assert said == [("desk", 1)] * 2


def test_frames_arrive_over_the_links_in_order_with_their_sender() -> None:
    with cluster_with_closed("mini", "desk", closed="desk") as ((mini, desk), fake):
        payloads = send_many(mini, desk, 60)
        wait_until(lambda: len(desk.frames) == 60)
        assert desk.frames == [("mini", frame(number), payload) for number, payload in enumerate(payloads)]
        assert mini.mesh.relayed("desk")
        assert fake.relaying.dropped == desk.mesh.dropped == 0
        assert fake.on_the_way <= relay.MOST_BYTES + 256 * 1024
        wait_until(lambda: mini.mesh.waiting("desk") == 0)
        desk.mesh.send("mini", frame(7), b"the other way is open")
        wait_until(lambda: mini.frames == [("desk", frame(7), b"the other way is open")])
        assert not desk.mesh.relayed("mini")


def test_no_more_than_the_window_is_on_its_way_and_nothing_is_lost_when_the_links_stand_still() -> None:
    with cluster_with_closed("mini", "desk", closed="desk") as ((mini, desk), fake):
        wait_until(lambda: mini.mesh.relayed("desk"))
        fake.hold()
        payloads = send_many(mini, desk, 60)
        wait_until(lambda: fake.frames)
        mini.loop.call(lambda: None)
        assert sum(len(message.payload) for _, message in fake.held or ()) <= relay.FIRST_BYTES + 256 * 1024
        assert not desk.frames
        fake.release()
        wait_until(lambda: len(desk.frames) == 60)
        assert [payload for _, _, payload in desk.frames] == payloads


def test_frames_that_a_coordinator_took_with_it_do_not_block_those_that_follow() -> None:
    with cluster_with_closed("mini", "desk", closed="desk") as (nodes, fake):
        mini, desk = nodes
        wait_until(lambda: mini.mesh.relayed("desk"))
        fake.hold()
        send_many(mini, desk, 60)
        wait_until(lambda: fake.frames)
        lost = mini.loop.call(lambda: fake.frames)
        fake.lose_held()
        again = far_roster(nodes, {"desk": mini.mesh._nodes["desk"].mesh_port}, 2)
        mini.mesh.set_roster(again)
        wait_until(lambda: len(desk.frames) == 60 - lost)
        assert desk.frames[-1][1] == frame(59)


def test_a_way_that_opens_is_used_again() -> None:
    with mesh_nodes("mini", "desk", peers=["mini", "desk"]) as nodes:
        mini, desk = nodes
        with wire_to(desk.mesh.port) as wire:
            fake = FakeCoordinator(nodes)
            wire.refuse(True)
            for node in nodes:
                node.mesh.set_roster(far_roster(nodes, {"desk": wire.port}, 2))
            wait_until(lambda: mini.mesh.relayed("desk"))
            wire.refuse(False)
            wait_until(lambda: not mini.mesh.relayed("desk"))
            before = fake.frames
            mini.mesh.send("desk", frame(1), b"directly")
            wait_until(lambda: desk.frames == [("mini", frame(1), b"directly")])
            assert fake.frames == before
            wire.refuse(True)
            wire.do("cut")
            wait_until(lambda: mini.mesh.relayed("desk"))  # without asking again
            assert len(fake.said) == 1


def test_another_address_of_the_machine_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with mesh_nodes("mini", "desk", peers=["mini", "desk"]) as nodes:
        # The meshes listen on 127.0.0.1 only.
        monkeypatch.setattr(connection, "tcp_hosts", lambda own, other: ["127.0.0.9", "127.0.0.1"])
        mini, desk = nodes
        fake = FakeCoordinator(nodes)
        for node in nodes:
            node.mesh.set_roster(far_roster(nodes, generation=2))
        wait_until(lambda: fake.said)
        mini.mesh.send("desk", frame(1), b"found")
        wait_until(lambda: desk.frames == [("mini", frame(1), b"found")])
        wait_until(lambda: not mini.mesh.relayed("desk"))


def test_a_restarted_node_is_dialled_and_not_relayed_to() -> None:
    with cluster_with_closed("mini", "desk", closed="desk") as (nodes, _):
        mini, desk = nodes
        wait_until(lambda: mini.mesh.relayed("desk"))
        desk.close()
        again = MeshNode("desk", mini.mesh_directory, incarnation=2)
        try:
            for node in (mini, again):
                node.mesh.set_roster(far_roster([mini, again], generation=3))
            mini.mesh.send("desk", frame(1), b"new")
            wait_until(lambda: again.frames == [("mini", frame(1), b"new")])
            assert not mini.mesh.relayed("desk")
        finally:
            again.close()


def test_a_connection_that_works_is_not_given_up_because_training_stood_still() -> None:
    with mesh_nodes("mini", "desk", peers=["mini", "desk"]) as nodes:
        mini, desk = nodes
        fake = FakeCoordinator(nodes)
        for node in nodes:
            node.mesh.set_roster(far_roster(nodes, generation=2))
        mini.mesh.send("desk", frame(1))
        wait_until(lambda: desk.frames)
        fake.relaying.stalled("desk", "mini")
        mini.loop.call(lambda: None)
        mini.mesh.send("desk", frame(2))
        wait_until(lambda: len(desk.frames) == 2)
        wait_until(lambda: not mini.mesh.relayed("desk") and not desk.mesh.relayed("mini"))
        assert not fake.told


def test_a_connection_through_which_nothing_comes_is_relayed_when_training_stands_still() -> None:
    with mesh_nodes("mini", "desk", peers=["mini", "desk"]) as nodes:
        mini, desk = nodes
        with wire_to(desk.mesh.port) as wire:
            fake = FakeCoordinator(nodes)
            for node in nodes:
                node.mesh.set_roster(far_roster(nodes, {"desk": wire.port}, 2))
            mini.mesh.send("desk", frame(1))
            wait_until(lambda: desk.frames)
            wire.do("hold")
            fake.relaying.stalled("desk", "mini")
            wait_until(lambda: mini.mesh.relayed("desk"))
            mini.mesh.send("desk", frame(2), b"over the links")
            wait_until(lambda: len(desk.frames) == 2)
            wait_until(lambda: "mini" in [name for name, _ in fake.said], what=lambda: f"mini to say so: {fake.said}")
            assert mini.mesh.relayed("desk")
            wire.do("resume")
            wait_until(lambda: not mini.mesh.relayed("desk"))


# ---- who may relay what --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"node": "stranger"},
        {"incarnation": 2},
        {"header": b"\xff no header"},
        {"header": bytes(64 * 1024 + 1)},
        {"payload": bytes(256 * 1024 + 1)},
    ],
    ids=["stranger", "incarnation", "garbage", "long header", "long payload"],
)
def test_a_relayed_frame_is_checked_as_on_a_socket(changes: dict[str, object]) -> None:
    with cluster_with_closed("mini", "desk", closed="desk") as ((_, desk), _):
        good = {"node": "mini", "incarnation": 1, "header": b"", "payload": b"", "position": 1}
        message = RelayFrame(**{**good, **changes})  # type: ignore[arg-type]
        desk.loop.call(lambda: desk.mesh.relay_frame(message))
        assert desk.mesh.dropped == 1
        assert not desk.frames


@pytest.mark.parametrize(("size", "taken"), [(256 * 1024, True), (1 << 20, True), ((1 << 20) + 1, False)])
def test_a_node_of_this_machine_may_relay_frames_as_long_as_those_that_it_sends(size: int, taken: bool) -> None:
    with mesh_nodes("mini", "desk", peers=["mini", "desk"]) as (mini, desk):
        assert mini.mesh.chunk_bytes("desk") == 1 << 20
        message = RelayFrame(node="mini", incarnation=1, header=encode(frame(1)), payload=bytes(size), position=1)
        desk.loop.call(lambda: desk.mesh.relay_frame(message))
        assert len(desk.frames) == taken
        assert desk.mesh.dropped == (not taken)


@pytest.mark.parametrize(
    ("sender", "changes"),
    [
        ("mini", {"node": "stranger"}),
        ("mini", {"node": "mini"}),
        ("mini", {"incarnation": 2}),
        ("mini", {"header": bytes(64 * 1024 + 1)}),
        ("mini", {"payload": bytes((1 << 20) + 1)}),
        ("mini", {"position": -1}),
        ("lost", {}),
    ],
)
def test_the_coordinator_passes_frames_on_between_nodes_of_its_roster_only(
    sender: str, changes: dict[str, object]
) -> None:
    with cluster_with_closed("mini", "desk", "lost", closed="desk") as (_, fake):
        fake.state.nodes["lost"] = msgspec.structs.replace(fake.state.nodes["lost"], condition="lost")
        sent: list[object] = []
        fake.delivery.to_node = lambda name, message, decided=True: sent.append(message)
        good = {"node": "desk", "incarnation": 1, "header": b"h", "payload": b"p", "position": 2}
        fake.relaying.on_frame(fake.state.nodes[sender], RelayFrame(**{**good, **changes}))  # type: ignore[arg-type]
        assert fake.relaying.dropped == 1
        assert not any(isinstance(message, RelayFrame) for message in sent)


def test_the_coordinator_names_the_sender_as_it_knows_it() -> None:
    with cluster_with_closed("mini", "desk", closed="desk") as (_, fake):
        sent: list[tuple[str, object]] = []
        fake.delivery.to_node = lambda name, message, decided=True: sent.append((name, message))
        message = RelayFrame(node="desk", incarnation=1, header=b"h", payload=b"p", position=2)
        fake.relaying.on_frame(fake.state.nodes["mini"], message)
        assert sent == [("desk", RelayFrame(node="mini", incarnation=1, header=b"h", payload=b"p", position=2))]


def test_a_node_that_ignores_the_window_cannot_fill_the_coordinator() -> None:
    with cluster_with_closed("mini", "desk", closed="desk") as (_, fake):
        passed: list[object] = []
        fake.delivery.to_node = lambda name, message, decided=True: passed.append(message)
        payload = bytes(1 << 20)
        for number in range(20):
            fake.relaying.on_frame(
                fake.state.nodes["mini"],
                RelayFrame(node="desk", incarnation=1, header=b"", payload=payload, position=(number + 1) << 20),
            )
        assert (len(passed), fake.relaying.dropped) == (8, 12)
        fake.relaying.on_taken(fake.state.nodes["desk"], RelayTaken(node="mini", incarnation=1, total=8 << 20))
        fake.relaying.on_frame(
            fake.state.nodes["mini"],
            RelayFrame(node="desk", incarnation=1, header=b"", payload=payload, position=21 << 20),
        )
        assert isinstance(passed[-1], RelayFrame)


# ---- the window ----------------------------------------------------------------------------------------------


def test_the_window_shrinks_on_a_slow_link_and_grows_on_a_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(relay.time, "monotonic", lambda: clock[0])
    credit = relay.Credit()
    positions: deque[int] = deque()

    def turn(seconds: float) -> None:
        while credit.is_open:
            positions.append(credit.give(256 * 1024))
        clock[0] += seconds
        while positions:
            credit.take(positions.popleft())

    for _ in range(4):
        turn(0.01)
    assert credit.window == relay.MOST_BYTES
    turn(3.0)
    assert credit.window == relay.LEAST_BYTES
    assert credit.is_open


def test_credit_of_an_earlier_way_opens_the_window_and_does_no_harm() -> None:
    credit = relay.Credit()
    credit.give(1000)
    credit.take(10**18)
    credit.take(-5)
    assert (credit.frames, credit.is_open) == (0, True)
    assert credit.give(10) == 1010


# ---- how fast a way is ---------------------------------------------------------------------------------------


def test_a_way_is_measured_directly_and_over_the_links() -> None:
    with cluster_with_closed("mini", "desk", closed="desk") as ((mini, desk), fake):
        wait_until(lambda: mini.mesh.relayed("desk"))
        over_links = measure(mini, MeasurePair(ticket=3, node="desk", payload=3_000_000))
        directly = measure(desk, MeasurePair(ticket=3, node="mini", payload=3_000_000))
        assert (over_links.ticket, over_links.node, over_links.error) == (3, "desk", "")
        assert (over_links.relayed, directly.relayed) == (True, False)
        for result in (over_links, directly):
            assert 0 < result.round_trip < 5
            assert result.bytes_per_s > 100_000
        assert fake.relaying.dropped == 0


def test_a_way_without_an_answer_says_where_it_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "TIMEOUT_SECONDS", 0.5)
    with mesh_nodes("mini", "desk", peers=["mini", "desk"]) as nodes:
        port = free_port()
        nodes[0].mesh.set_roster(far_roster(nodes, {"desk": port}, 2))
        result = measure(nodes[0], MeasurePair(ticket=1, node="desk"))
        assert result.error == f"mini got no answer from desk at tcp://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("node", "payload", "error"),
    [
        ("mini", 10, "'mini' is not another node of this cluster"),
        ("stranger", 10, "'stranger' is not another node of this cluster"),
        ("desk", 1 << 60, f"{1 << 60} bytes are not measured: use 0 to {64 << 20}"),
        ("desk", -1, f"-1 bytes are not measured: use 0 to {64 << 20}"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(node: str, payload: int, error: str) -> None:
    with mesh_nodes("mini", "desk") as (mini, _):
        wait_until(lambda: mini.mesh._nodes)
        assert measure(mini, MeasurePair(ticket=1, node=node, payload=payload)).error == error


def test_the_round_trip_alone_is_measured_without_a_payload() -> None:
    with mesh_nodes("mini", "desk") as (mini, _):
        wait_until(lambda: mini.mesh._nodes)
        result = measure(mini, MeasurePair(ticket=1, node="desk", payload=0))
        assert result.round_trip > 0
        assert (result.bytes_per_s, result.error) == (0.0, "")


@pytest.mark.parametrize("round_trips", [0, -1, 101])
def test_a_number_of_round_trips_that_makes_no_sense_is_refused(round_trips: int) -> None:
    with mesh_nodes("mini", "desk") as (mini, _):
        wait_until(lambda: mini.mesh._nodes)
        result = measure(mini, MeasurePair(ticket=1, node="desk", round_trips=round_trips))
        assert result.error == f"{round_trips} round trips are not measured: use 1 to 100"


def test_the_way_is_named_and_all_bytes_are_counted() -> None:
    with mesh_nodes("mini", "desk") as (mini, _):
        wait_until(lambda: mini.mesh._nodes)
        result = measure(mini, MeasurePair(ticket=1, node="desk", payload=20_000_000, round_trips=21))
        assert (result.sent, result.error) == (20_000_000, "")
        assert result.way == ("ipc" if mini.mesh.ipc_path("desk") else "tcp+curve")
        assert 0 < result.round_trip <= result.median_round_trip


def test_the_coordinator_asks_a_node_to_measure() -> None:
    async def ask(fake: FakeCoordinator) -> PairMeasured:
        loop, hear = asyncio.get_running_loop(), fake.hear
        fake.hear = lambda name, message: loop.call_soon_threadsafe(hear, name, message)  # type: ignore[method-assign, assignment]
        return await fake.relaying.measure("mini", "desk", 100_000)

    with mesh_nodes("mini", "desk", peers=["mini", "desk"]) as nodes:
        fake = FakeCoordinator(nodes)
        for node in nodes:
            node.mesh.set_roster(far_roster(nodes, generation=2))
        result = asyncio.run(ask(fake))
        assert (result.node, result.error) == ("desk", "")
        assert result.bytes_per_s > 0
