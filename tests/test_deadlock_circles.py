"""Which waits are a circle: pure, from what nodes say and what rounds lack."""

from types import SimpleNamespace
from typing import Any

import pytest

from notebook_cluster.coordinator.rounds.deadlocks import Deadlocks, circles, text_of
from notebook_cluster.protocol.node import Blocked
from notebook_cluster.rounds.leader import machine as rounds
from notebook_cluster.rounds.leader.arrivals import Gathering, gatherings
from tests.rounds_helpers import Cluster, register


def collective(number: int, *missing: str, place: str = "cell 7, line 3: nc.barrier()") -> Blocked:
    return Blocked(
        cell=7, serial=1, operations=number, operation=number, name="barrier", missing=list(missing), place=place
    )  # fmt: skip


def in_round(job: str = "m", number: int = 3, operations: int = 0, **fields: object) -> Blocked:
    return Blocked(cell=7, serial=1, operations=operations, job=job, round=number, place="cell 7, line 2", **fields)  # type: ignore[arg-type]


def lacks(*missing: str, here: str = "abc", number: int = 3, quorum: bool = False) -> Gathering:
    return Gathering(number, frozenset(here) - set(missing), frozenset(missing), quorum)


def test_names_that_mean_nobody_are_not_looked_through_again_and_again() -> None:
    core: Any = SimpleNamespace(state=SimpleNamespace(nodes={"a": None, "b": None}))
    delivery: Any = None
    deadlocks = Deadlocks(core, delivery, gatherings=dict, was_interrupted=lambda cell: False)
    deadlocks.on_blocked("a", 1, collective(2, *["b"] * 1000, *map(str, range(1000))))
    ((_, _, kept),) = deadlocks._waits.values()
    assert kept == collective(2, "b")


def test_a_collective_against_a_round_is_one() -> None:
    waits = {"a": collective(2, "b"), "b": in_round(operations=1)}
    assert circles(waits, {"m": lacks("a", here="ab")}) == [["a", "b"]]


def test_work_that_missed_its_round_waits_for_the_next_one() -> None:
    waits = {"a": collective(2, "b"), "b": in_round(number=2, operations=1), "c": collective(2, "b")}
    assert circles(waits, {"m": lacks("a", "c", quorum=True)}) == [["a", "b", "c"]]


def test_two_rounds_in_opposite_order_are_one() -> None:
    waits = {"a": in_round("m"), "b": in_round("n")}
    assert circles(waits, {"m": lacks("b", here="ab"), "n": lacks("a", here="ab")}) == [["a", "b"]]


def test_of_three_who_wait_for_each_other_in_turn_all_are_in_it() -> None:
    waits = {"a": in_round("m"), "b": in_round("n"), "c": collective(5, "a")}
    rounds_lack = {"m": lacks("b", here="ab"), "n": lacks("c", here="bc")}
    assert circles(waits, rounds_lack) == [["a", "b", "c"]]


def test_who_only_waits_for_the_circle_is_not_in_it() -> None:
    """Its call ends when the others have left the cell."""
    waits = {"a": collective(2, "b"), "b": in_round(operations=1), "c": in_round("n")}
    assert circles(waits, {"m": lacks("a", here="ab"), "n": lacks("a", here="ac")}) == [["a", "b"]]


@pytest.mark.parametrize(
    ("waits", "rounds_lack"),
    [
        # b computes, sleeps, or is lost: it says nothing
        ({"a": collective(2, "b")}, {}),
        ({"a": in_round()}, {"m": lacks("b", here="ab")}),
        ({"a": in_round(), "c": in_round()}, {"m": lacks("b")}),
        # frames of the same collective are on their way, or b is in a later one and has given what a needs
        ({"a": collective(2, "b"), "b": collective(2, "a")}, {}),
        ({"a": collective(2, "b"), "b": collective(3, "a")}, {}),
        ({"a": collective(2, "b"), "b": in_round(operations=2)}, {"m": lacks("a", here="ab")}),
        # the round is under way, has another number, or needs somebody else
        ({"a": collective(2, "b"), "b": in_round(operations=1)}, {}),
        ({"a": collective(2, "b"), "b": in_round(number=4, operations=1)}, {"m": lacks("a", here="ab")}),
        ({"a": collective(2, "b"), "b": in_round(operations=1)}, {"m": lacks("c", here="abc")}),
        # b arrives, or fetches the state: it waits in the same round
        ({"a": in_round(), "b": in_round()}, {"m": lacks("b", here="ab")}),
        # a quorum can be reached with c
        ({"a": collective(2, "b"), "b": in_round(operations=1)}, {"m": lacks("a", "c", quorum=True)}),
        # other names on other nodes
        ({"a": in_round("m"), "b": in_round("n")}, {"m": lacks("c", here="ac"), "n": lacks("c", here="bc")}),
    ],
)
def test_these_are_none(waits: dict[str, Blocked], rounds_lack: dict[str, Gathering]) -> None:
    assert circles(waits, rounds_lack) == []


def test_the_line_names_everybody_and_bounds_what_a_node_says() -> None:
    waits = {
        "local": collective(2, "local-2", place="cell 7, line 12: nc.barrier()"),
        "local-2": in_round(operations=1),
    }
    assert text_of(waits) == (
        "local waits in barrier #2 (cell 7, line 12: nc.barrier()), local-2 waits for round 3 of 'm' (cell 7, line 2): "
        "neither can go on: make the same calls on every node, as often and in the same order"
    )
    waits |= {f"n{index}": collective(2, "local-2", place="\x1b[2J" + "x" * 10_000) for index in range(9)}
    text = text_of(waits)
    assert "and 3 more wait in barrier #2" in text
    assert text.isprintable()
    assert len(text) < 1000


def test_a_round_lacks_who_has_not_arrived_until_something_else_decides() -> None:
    cluster = Cluster().train()
    assert gatherings(cluster.state) == {}
    cluster.arrive("a")
    assert gatherings(cluster.state) == {"model": Gathering(1, frozenset("a"), frozenset("bc"), False)}
    cluster.arrive("b")
    cluster.lose("c")
    assert gatherings(cluster.state) == {}  # it is sealed
    cluster.restart("ab")
    assert gatherings(cluster.state) == {}  # nobody has said where it is


def test_a_quorum_whose_grace_runs_lacks_nobody() -> None:
    cluster = Cluster()
    for name in "abc":
        cluster.say(name, register("h0", quorum=2, grace=5.0))
    cluster.arrive("a")
    assert gatherings(cluster.state)["model"].any_will_do
    cluster.arrive("b")
    assert gatherings(cluster.state) == {}
    cluster.feed(rounds.Tick(110.0))
    assert gatherings(cluster.state) == {}
