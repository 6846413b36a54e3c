"""When a node last showed progress, from what its process, its agent and other nodes say; on a clock of the test's."""

from types import SimpleNamespace
from typing import Any

import pytest

from notebook_cluster.coordinator.rounds import signs_of_life
from notebook_cluster.coordinator.rounds.signs_of_life import SignsOfLife
from notebook_cluster.journal.state import Node
from notebook_cluster.protocol.node import NodeHello, NodeSilent
from notebook_cluster.protocol.peer import NodeSample, PeerSample


def node(name: str, incarnation: int = 1) -> Node:
    hello = NodeHello(
        node=name, incarnation=incarnation, pid=1, mesh_key="k", mesh_port=1, mesh_ipc="", master_port=1
    )  # fmt: skip
    return Node(name=name, peer=f"p{name}", device="cpu", order=0, incarnation=incarnation, condition="ok", hello=hello)


class Hub:
    """The nodes ``a`` and ``b`` on peers of their own; ``silence``: of each peer's link, as its dialer measures it."""

    def __init__(self) -> None:
        self.now = 100.0
        nodes = {name: node(name) for name in "ab"}
        self.state = SimpleNamespace(nodes=nodes, peers=["pa", "pb"], roster_nodes=lambda: list(nodes.values()))
        self.links = {peer: SimpleNamespace(dialer=SimpleNamespace(silence=1.0)) for peer in self.state.peers}
        self.peers = SimpleNamespace(links=self.links)
        self.rounds = SimpleNamespace(patience_for=lambda name: 5.0)
        self.sent: list[tuple[str, NodeSilent]] = []
        self.members = SimpleNamespace(send=lambda name, message: self.sent.append((name, message)))
        self.signs = SignsOfLife(self)  # type: ignore[arg-type]

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
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr(signs_of_life, "time", SimpleNamespace(monotonic=lambda: made.now))
    made.signs.tick()
    return made


def both_say(hub: Hub) -> None:
    for name in "ab":
        hub.signs.said(name)


def test_a_word_each_second_is_enough(hub: Hub) -> None:
    hub.wait(30, lambda: both_say(hub))
    assert not hub.signs.silent()


def test_a_stopped_process_is_told_from_a_peer_that_cannot_be_heard(hub: Hub) -> None:
    hub.sample(7.0)
    hub.wait(5, lambda: hub.sample(7.0, stopped=True))
    hub.links["pb"].dialer.silence = 5.0
    assert hub.silent() == {"a": (5, "its process is stopped"), "b": (5, "nothing is heard from pb")}
    assert {(name, message.node, message.reason) for name, message in hub.sent} == {
        ("b", "a", "has made no progress for 4 s (its process is stopped)"),
        ("a", "b", "has made no progress for 4 s (its process gets no processor time)"),
    }
    hub.sent.clear()
    both_say(hub)
    hub.wait(0.25)
    assert sorted((name, message.node, message.reason) for name, message in hub.sent) == [
        ("a", "b", ""),
        ("b", "a", ""),
    ]


def test_processor_time_counts_for_a_minute_without_a_word_and_none_does_not(hub: Hub) -> None:
    cpu = [0.0]

    def works() -> None:
        cpu[0] += 0.9
        hub.sample(cpu[0])
        hub.sample(0.001 * hub.now, node="b")

    works()
    hub.wait(50, works)
    assert hub.silent() == {"b": (50, "its process gets no processor time")}
    hub.wait(16, works)
    assert "a" in hub.silent()


def test_numbers_that_another_node_gets_are_a_sign_for_a_minute(hub: Hub) -> None:
    hub.wait(50, lambda: hub.signs.got_numbers("a"))
    assert list(hub.silent()) == ["b"]
    hub.wait(16, lambda: hub.signs.got_numbers("a"))
    assert list(hub.silent()) == ["a", "b"]


def test_what_is_behind_other_things_on_a_slow_link_is_waited_for(hub: Hub) -> None:
    hub.sample(1.0)
    hub.links["pa"].dialer.silence = hub.links["pb"].dialer.silence = 0.1
    hub.wait(40)  # bytes come all the time, samples do not
    assert not hub.silent()
    hub.wait(30)
    assert list(hub.silent()) == ["a", "b"]


def test_an_agent_that_ends_is_not_taken_for_a_slow_link(hub: Hub) -> None:
    hub.wait(3, lambda: (both_say(hub), hub.sample(hub.now)))
    for count in range(17):
        hub.links["pa"].dialer.silence = 0.25 * count
        hub.now += 0.25
        hub.signs.said("b")
        hub.signs.tick()
    assert hub.silent()["a"][0] == 4


def test_a_judge_that_did_not_run_blames_nobody(hub: Hub) -> None:
    hub.wait(3)
    hub.now += 500.0
    hub.signs.tick()
    assert not hub.silent()
    hub.wait(1)
    assert list(hub.silent()) == ["a", "b"]


def test_the_signs_of_a_new_process_begin_anew(hub: Hub) -> None:
    hub.links["pa"].dialer.silence = hub.links["pb"].dialer.silence = 9.0
    hub.wait(6)
    hub.state.nodes["a"] = node("a", 2)
    hub.wait(0.25)
    assert list(hub.silent()) == ["b"]
