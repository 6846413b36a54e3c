"""When a node last showed progress, from what its process, its agent and other nodes say; on a clock of the test's."""

from types import SimpleNamespace
from typing import Any

import pytest

from notebook_cluster.coordinator.rounds import progress
from notebook_cluster.coordinator.rounds.progress import SignsOfLife
from notebook_cluster.journal.state import Node
from notebook_cluster.protocol.node import Heartbeat, NodeHello, NodeSilent
from notebook_cluster.protocol.peer import NodeSample, PeerSample


def node(name: str, incarnation: int = 1) -> Node:
    hello = NodeHello(
        node=name, incarnation=incarnation, pid=1, mesh_key="k", mesh_port=1, mesh_ipc="", master_port=1
    )  # fmt: skip
    return Node(name=name, peer=f"p{name}", device="cpu", order=0, incarnation=incarnation, condition="ok", hello=hello)


class FakeCoordinator:
    """The nodes ``a`` and ``b`` on peers of their own; ``silence``: of each peer's link, as its dialer measures it."""

    def __init__(self) -> None:
        self.now = 100.0
        nodes = {name: node(name) for name in "ab"}
        self.state = SimpleNamespace(nodes=nodes, peers=["pa", "pb"], roster_nodes=lambda: list(nodes.values()))
        self.links = {peer: SimpleNamespace(dialer=SimpleNamespace(silence=1.0)) for peer in self.state.peers}
        self.sent: list[tuple[str, NodeSilent]] = []
        delivery: Any = SimpleNamespace(
            links=self.links, to_node=lambda name, message: self.sent.append((name, message))
        )
        core: Any = SimpleNamespace(state=self.state)
        self.signs = SignsOfLife(core, delivery, patience_for=lambda name: 5.0)

    def wait(self, seconds: float, each: Any = lambda: None) -> None:
        """Look four times a second, and do ``each`` once a second."""
        for count in range(int(seconds * 4)):
            self.now += 0.25
            if count % 4 == 3:
                each()
            self.signs.tick()

    def sample(self, cpu: float, *, node: str = "a", stopped: bool = False) -> None:
        row = NodeSample(node=node, rss=1, rss_peak=1, cpu_seconds=cpu, stopped=stopped)
        sample = PeerSample(time=0.0, cpu=0.0, ram_used=1, ram_total=2, devices=[], nodes=[row])
        self.signs.on_sample(f"p{node}", sample)

    def silent(self) -> dict[str, tuple[int, str]]:
        """Of nodes that others wait for no longer."""
        return {name: (round(seconds), why) for name, (seconds, why) in self.signs.silent().items() if seconds >= 4}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCoordinator:
    made = FakeCoordinator()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: made.now))
    made.signs.tick()
    return made


def both_say(fake: FakeCoordinator) -> None:
    for name in "ab":
        fake.signs.said(name)


def test_what_a_node_said_long_ago_of_another_one_does_not_count_as_said_now(fake: FakeCoordinator) -> None:
    def beat(*heard: str) -> None:
        fake.signs.said("b")
        fake.signs.on_heartbeat("b", Heartbeat(heard=list(heard)))

    fake.wait(5, lambda: (fake.signs.said("a"), beat("a")))
    fake.wait(6)  # the agent of b stands still, and a is cut off after two seconds of it
    for heard in (["a"], ["a"], [], [], [], []):
        beat(*heard)
    assert set(fake.signs.silent()) == {"a"}
    assert fake.signs.silence("a") > 4
    fake.wait(2, lambda: beat("a"))
    assert not fake.signs.silent()


def test_a_word_each_second_is_enough(fake: FakeCoordinator) -> None:
    fake.wait(30, lambda: both_say(fake))
    assert not fake.signs.silent()


def test_a_stopped_process_is_told_from_a_peer_that_cannot_be_heard(fake: FakeCoordinator) -> None:
    fake.sample(7.0)
    fake.wait(5, lambda: fake.sample(7.0, stopped=True))
    fake.links["pb"].dialer.silence = 5.0
    assert fake.silent() == {"a": (5, "its process is stopped"), "b": (5, "nothing is heard from pb")}
    assert {(name, message.node, message.reason) for name, message in fake.sent} == {
        ("b", "a", "has made no progress for 4 s (its process is stopped)"),
        ("a", "b", "has made no progress for 4 s (its process gets no processor time)"),
    }
    fake.sent.clear()
    both_say(fake)
    fake.wait(0.25)
    assert sorted((name, message.node, message.reason) for name, message in fake.sent) == [
        ("a", "b", ""),
        ("b", "a", ""),
    ]


def test_processor_time_counts_for_a_minute_without_a_word_and_none_does_not(fake: FakeCoordinator) -> None:
    cpu = [0.0]

    def works() -> None:
        cpu[0] += 0.9
        fake.sample(cpu[0])
        fake.sample(0.001 * fake.now, node="b")

    works()
    fake.wait(50, works)
    assert fake.silent() == {"b": (50, "its process gets no processor time")}
    fake.wait(16, works)
    assert "a" in fake.silent()


def test_numbers_that_another_node_gets_are_a_sign_for_a_minute(fake: FakeCoordinator) -> None:
    fake.wait(50, lambda: fake.signs.got_numbers("a"))
    assert list(fake.silent()) == ["b"]
    fake.wait(16, lambda: fake.signs.got_numbers("a"))
    assert list(fake.silent()) == ["a", "b"]


def test_what_is_behind_other_things_on_a_slow_link_is_waited_for(fake: FakeCoordinator) -> None:
    fake.sample(1.0)
    fake.links["pa"].dialer.silence = fake.links["pb"].dialer.silence = 0.1
    fake.wait(40)  # bytes come all the time, samples do not
    assert not fake.silent()
    fake.wait(30)
    assert list(fake.silent()) == ["a", "b"]


def test_an_agent_that_ends_is_not_taken_for_a_slow_link(fake: FakeCoordinator) -> None:
    fake.wait(3, lambda: (both_say(fake), fake.sample(fake.now)))
    for count in range(17):
        fake.links["pa"].dialer.silence = 0.25 * count
        fake.now += 0.25
        fake.signs.said("b")
        fake.signs.tick()
    assert fake.silent()["a"][0] == 4


def test_a_judge_that_did_not_run_blames_nobody(fake: FakeCoordinator) -> None:
    fake.wait(3)
    fake.now += 500.0
    fake.signs.tick()
    assert not fake.silent()
    fake.wait(1)
    assert list(fake.silent()) == ["a", "b"]


def test_the_signs_of_a_new_process_begin_anew(fake: FakeCoordinator) -> None:
    fake.links["pa"].dialer.silence = fake.links["pb"].dialer.silence = 9.0
    fake.wait(6)
    fake.state.nodes["a"] = node("a", 2)
    fake.wait(0.25)
    assert list(fake.silent()) == ["b"]
