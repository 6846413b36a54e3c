"""A position of nc.shard is kept and gone on with: the rest comes as it would have come, and nothing twice."""

import json
import random
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_cluster.node.data.ledger import KeptEpoch
from notebook_cluster.node.data.position import LoopPosition, identity_of, read_position
from notebook_cluster.node.namespace.shard import shard
from tests.test_node_shard import Place, place
from tests.test_node_shares import STARTERS, World, key

__all__ = ["place"]


def kept_of(world: World) -> dict[str, KeptEpoch]:
    """Where each node is, through JSON and back."""
    kept = {}
    for name, ledger in world.ledgers.items():
        what = (world.key.count, world.key.seed, world.key.shuffle)
        data = json.dumps(LoopPosition(what, 1, 1, (ledger.keep(),)).data())
        kept[name] = read_position(json.loads(data), what).epochs[0]
    return kept


def run_again(
    world: World, kept: dict[str, KeptEpoch], names: tuple[str, ...], seed: int, *, told: bool = False
) -> World:
    """The next cell, on nodes of these ``names``: those that have a position go on from it, the others ask. ``told``:
    it is known before the loop begins."""
    again = type(world)(seed, msgspec.structs.replace(world.key, cell=2), names)
    again.kept = {name: kept.get(name) for name in names}
    identity = identity_of(again.key)
    for name in set(names) & set(kept) if told else ():
        position = LoopPosition(identity[:3], 1, 1, (kept[name],)).data()
        again.nodes[name].go_on([{"loop": list(identity), "left": False, "position": position}])
        again.kept[name] = again.nodes[name].kept_epoch(again.key)
    return again


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 120), st.integers(0, 60), st.booleans())
def test_with_the_members_of_then_each_goes_on_where_it_was(seed: int, steps: int, more: int, told: bool) -> None:
    world = World(seed, key())
    for name in STARTERS:
        world.take(name, 1)
    for _ in range(steps):
        world.happen()
    kept, before = kept_of(world), {name: list(given) for name, given in world.given.items()}
    again = run_again(world, kept, STARTERS, seed + 1, told=told)
    for _ in range(more):
        again.happen()
    again.finish()
    world.finish()
    assert {name: before[name] + again.given[name] for name in STARTERS} == world.given


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**9), st.integers(0, 120), st.sampled_from(["abc", "ab", "bcd", "abcd", "de", "cbad"]),
    st.booleans(), st.lists(st.sampled_from(["join", "lose"]), max_size=2), st.booleans(),
)  # fmt: skip
def test_with_other_members_nothing_is_given_out_twice(
    seed: int, steps: int, names: str, by_speed: bool, changes: list[str], told: bool
) -> None:
    world = World(seed, key(by_speed=by_speed))
    for _ in range(steps):
        world.happen()
    for number, change in enumerate(changes):
        if change == "join":
            world.join("ef"[number])
        elif may_die := world.may_die():
            world.lose(world.draw.choice(may_die), said_all=True)
        for _ in range(world.draw.randint(0, 25)):
            world.happen()
    kept, before = kept_of(world), world.all_given()
    again = run_again(world, kept, tuple(names), seed + 1, told=told)
    again.finish()
    got = sorted(before + again.all_given())
    assert len(set(again.all_given())) == len(again.all_given())
    if set(world.ledgers) <= set(names):  # whoever took something tells it
        assert got == list(range(60))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 120), st.integers(0, 40))
def test_who_comes_while_others_have_not_begun_gets_only_what_is_left(seed: int, steps: int, more: int) -> None:
    """Their positions are told for them, once more with each change of the members."""
    world = World(seed, key())
    for _ in range(steps):
        world.happen()
    kept, before = kept_of(world), world.all_given()
    again = run_again(world, kept, STARTERS, seed + 1, told=True)
    first = again.draw.choice(STARTERS)
    assert kept.get(first) is None or not again.take(first, 1)  # it has only asked
    while again.happen(takes=False):
        pass
    if set(kept) == set(STARTERS):
        again.take(first, 1)
        assert not again.ledgers[first].pending
    again.kept["d"] = None
    again.join("d")
    for _ in range(more):
        again.happen()
    again.finish()
    assert sorted(before + again.all_given()) == list(range(60))


def test_what_is_over_in_a_cell_that_went_on_is_not_so_in_the_next() -> None:
    """Node b hears of the next cell before it has begun that, in a loop like one that went on in this cell."""
    world = World(1, key(), ("a", "b"))
    identity = identity_of(world.key)
    position = LoopPosition(identity[:3], 1, 1).data()
    world.nodes["b"].go_on([{"loop": list(identity), "left": False, "position": position}])
    world.key = msgspec.structs.replace(world.key, cell=2)
    world.nodes["a"].begin_cell(2, 1)
    while world.take("a", 4):
        world.soon["a"].popleft()()
        world.deliver("a", "b")
    world.nodes["b"].begin_cell(2, 1)
    world.finish()
    assert world.all_given() == list(range(60))


def test_an_epoch_that_is_over_here_is_so_also_for_who_asks_before_the_loop_comes() -> None:
    """Node a has not heard of the last that b took, and goes on first."""
    world = World(1, key(), ("a", "b"))
    for name in "ba":
        while world.take(name, 4):
            pass
    while world.soon["a"]:
        world.soon["a"].popleft()()
    while world.frames["a", "b"]:
        world.deliver("a", "b")
    assert world.ledgers["b"].all_taken()
    kept = {"a": world.ledgers["a"].keep()}
    again = run_again(world, kept, ("a",), 2)
    again.join("b")
    over = {"loop": list(identity_of(again.key)), "left": False, "position": LoopPosition((60, 0, True), 1, 1).data()}
    again.take("a", 4)
    for _ in range(100):
        again.happen(takes=False)
    assert again.ledgers["a"].pending, "b has not said whether it goes on"
    again.nodes["b"].go_on([over])
    again.nodes["b"].look_again()
    for _ in range(100):
        again.happen(takes=False)
    assert not again.take("a", 4)
    assert not again.given["a"]


def test_positions_of_different_moments_lose_nothing_and_repeat_only_what_came_after_each() -> None:
    """As a checkpoint has them: b had told a of more than what is in b's own position."""
    world = World(1, key())
    for name in STARTERS:
        world.take(name, 4)
    kept = kept_of(world)
    late = list(world.given["b"])
    world.take("b", 4)
    while world.happen(takes=False):
        pass
    kept |= {"a": kept_of(world)["a"]}
    again = run_again(world, kept, (*STARTERS, "d"), 2)
    again.finish()
    assert sorted(world.given["a"] + late + world.given["c"] + again.all_given()) == list(range(60))


def test_a_loop_goes_on_in_the_middle_of_an_epoch(place: Place) -> None:
    whole = list(shard(range(50), 4, epochs=3))
    first = shard(range(50), 4, epochs=3)
    loop = iter(first)
    before = [next(loop) for _ in range(17)]
    position = json.loads(json.dumps(first.position()))
    again = json.loads(json.dumps(first.position(in_hand=False)))
    second, third = shard(range(50), 4, epochs=3), shard(range(50), 4, epochs=3)
    second.go_on(position)
    assert second.position() == position
    third.go_on(again)
    assert before + list(second) == before[:-1] + list(third) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_have_fetched_ahead_comes_again(place: Place, workers: int) -> None:
    loader = torch.utils.data.DataLoader(range(40), batch_size=3, num_workers=workers)  # type: ignore[arg-type]
    whole = [batch.tolist() for batch in shard(loader, epochs=2)]
    for number in (1, 5, 13, 14, 16):
        first, second = shard(loader, epochs=2), shard(loader, epochs=2)
        loop = iter(first)
        before = [next(loop).tolist() for _ in range(number)]
        second.go_on(first.position())
        assert before + [batch.tolist() for batch in second] == whole


def test_a_loop_at_its_end_goes_on_with_the_next_epoch(place: Place) -> None:
    first, second = shard(range(9)), shard(range(9))
    list(first)
    second.go_on(first.position())
    assert list(second) == list(first)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: None, "go_on takes what position"),
        (lambda data: {"kind": "other"}, "go_on takes what position"),
        (lambda data: data | {"what": [8, 0, True]}, "of data with count=8, here count=9"),
        (lambda data: data | {"what": [9, 1, True]}, "of data with seed=1, here seed=0"),
        (lambda data: data | {"epochs": [{}]}, "cannot be read"),
        (lambda data: data | {"epochs": [{"epoch": 0, "taken": "AAAA", "cut": None, "at": 0}]}, "cannot be read"),
    ],
)
def test_what_is_no_position_of_this_data_is_said(place: Place, change: Any, text: str) -> None:
    data = shard(range(9))
    with pytest.raises(ValueError, match=text):
        data.go_on(change(data.position()))


def test_a_position_is_small_and_quick(place: Place) -> None:
    world = World(1, key(count=1_000_000))
    draw = random.Random(1)
    world.take("a", 5)
    world.ledgers["a"].taken.mark([draw.randrange(1_000_000) for _ in range(300_000)])
    assert len(json.dumps(LoopPosition((1_000_000, 0, True), 1, 1, (world.ledgers["a"].keep(),)).data())) < 400_000
