"""A Stop of the cell: rounds that are sealed end, and from the first node on that has left no further one is sealed."""

import pytest

from notebook_cluster.protocol import rounds as p
from notebook_cluster.protocol import runs
from notebook_cluster.rounds.leader import machine as rounds
from notebook_cluster.rounds.member import events_effects as m
from tests.rounds_helpers import Cluster, register, sent
from tests.test_member import Node, messages, of, prepared_node, seal


def stopped(names: str = "ab") -> Cluster:
    cluster = Cluster(names).train(names)
    cluster.feed(rounds.CellStopping(1))
    return cluster


@pytest.mark.parametrize("leaves_first", [True, False])
def test_who_waits_for_a_node_that_has_left_keeps_its_work(leaves_first: bool) -> None:
    cluster = stopped()
    effects = cluster.feed(rounds.CellLeft(1, "b", "interrupted")) if leaves_first else []
    effects += cluster.arrive("a")
    if not leaves_first:
        assert not sent(effects, p.Hold)
        effects += cluster.feed(rounds.CellLeft(1, "b", "interrupted"))
    assert sent(effects, p.Hold) == {"a": p.Hold(job="model", round=1, contribution=1)}
    assert not sent(cluster.effects, p.Seal)


def test_without_a_stop_the_others_go_on_when_one_leaves() -> None:
    cluster = Cluster("ab").train("ab")
    cluster.arrive("a")
    assert sent(cluster.feed(rounds.CellLeft(1, "b", "error")), p.Seal, "a")


def test_a_round_that_all_come_to_is_sealed_after_the_stop() -> None:
    cluster = stopped()
    assert set(sent(cluster.arrive("ab"), p.Seal)) == {"a", "b"}


def test_a_round_that_is_sealed_ends_after_the_stop() -> None:
    cluster = Cluster("ab").train("ab")
    cluster.arrive("ab")
    cluster.feed(rounds.CellStopping(1))
    assert set(sent(cluster.prepare("ab"), p.Commit)) == {"a", "b"}


def test_a_round_that_a_node_has_left_ends_where_somebody_has_all_of_it() -> None:
    cluster = Cluster("ab").train("ab")
    cluster.arrive("ab")
    cluster.prepare("b")
    cluster.feed(rounds.CellStopping(1))
    cluster.feed(rounds.CellLeft(1, "b", "interrupted"))
    assert sent(cluster.prepare("a"), p.Commit, "a")


def test_a_round_that_a_node_has_left_too_early_is_held_and_not_done_without_its_work() -> None:
    cluster = Cluster("ab").train("ab")
    cluster.arrive("ab")
    cluster.feed(rounds.CellStopping(1))
    effects = cluster.feed(rounds.CellLeft(1, "b", "interrupted"))
    assert sent(effects, p.Hold) == {"a": p.Hold(job="model", round=1, contribution=1)}
    assert not sent(effects, p.Seal)
    assert not sent(cluster.prepare("a"), p.Commit)


def test_a_node_that_is_lost_has_not_left() -> None:
    cluster = stopped("abc")
    cluster.lose("c")
    assert set(sent(cluster.arrive("ab"), p.Seal)) == {"a", "b"}


def test_the_next_cell_begins_rounds_again() -> None:
    cluster = stopped()
    for name in "ab":
        cluster.feed(rounds.CellLeft(1, name, "interrupted"))
    cluster.feed(rounds.CellBegan(2, ("a", "b")))
    answers = []
    for name in "ab":
        answers += sent(cluster.say(name, register("h0", cell=2, holds_state=True)), runs.Registered, name)
    assert set(sent(cluster.arrive("ab", contribution=2), p.Seal)) == {"a", "b"}


def test_a_stop_of_another_cell_holds_nothing() -> None:
    cluster = Cluster("ab").train("ab")
    cluster.feed(rounds.CellStopping(7))
    cluster.feed(rounds.CellLeft(1, "b", "error"))
    assert sent(cluster.arrive("a"), p.Seal, "a")


def test_what_is_held_stays_with_the_node_and_counts_later() -> None:
    node = Node().ready()
    node.arrive()
    assert of(node.control(p.Hold(job="model", round=1, contribution=node.state.serial)), m.Held)
    assert node.state.contribution is None
    node.arrive()
    assert messages(node.effects, p.Arrived)[-1].contribution == 2


@pytest.mark.parametrize(("round", "serial"), [(1, 7), (2, 1)])
def test_a_word_about_another_contribution_is_not_obeyed(round: int, serial: int) -> None:
    node = Node().ready()
    node.arrive()
    assert node.control(p.Hold(job="model", round=round, contribution=serial)) == []
    assert node.state.contribution is not None


@pytest.mark.parametrize("prepared", [False, True])
def test_what_is_held_of_a_sealed_round_is_not_applied(prepared: bool) -> None:
    node = prepared_node() if prepared else Node().ready()
    if not prepared:
        node.arrive()
        node.control(seal())
    assert of(node.control(p.Hold(job="model", round=1, contribution=node.state.serial)), m.Held)
    assert node.state.exchange is None
    assert node.state.round == 0
