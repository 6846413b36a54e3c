"""Who took what of an epoch, through any order of messages, losses and joins: nothing twice, nothing left out."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pytest
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_cluster.node.data import pieces as pieces_module
from notebook_cluster.node.data import shares as shares_module
from notebook_cluster.node.data.dealing import deal
from notebook_cluster.node.data.ledger import KeptEpoch, Ledger
from notebook_cluster.node.data.loop_registry import UNLIKE_S
from notebook_cluster.node.data.shares import Shares
from notebook_cluster.node.data.source import order_of
from notebook_cluster.protocol.mesh import JobFrame, ShardKey
from notebook_cluster.protocol.node import NodeAddress, Roster

STARTERS = ("a", "b", "c")


def roster(generation: int, names: list[str]) -> Roster:
    rows = [
        NodeAddress(
            name=name, incarnation=1, rank=rank, local_rank=0, peer=name, machine=name, device="cpu", hosts=[],
            mesh_key="", mesh_port=0, mesh_ipc="", master_port=0,
        )
        for rank, name in enumerate(names)
    ]  # fmt: skip
    return Roster(cluster="test", generation=generation, nodes=rows)


class World:
    """Nodes without sockets: who hears what next is drawn, in order between any two."""

    def __init__(self, seed: int, key: ShardKey, starters: tuple[str, ...] = STARTERS) -> None:
        self.draw = random.Random(seed)
        self.key, self.starters = key, starters
        self.frames: dict[tuple[str, str], deque[tuple[JobFrame, bytes]]] = {}
        self.soon: dict[str, deque[Callable[[], None]]] = {}
        self.rosters: dict[str, deque[Roster]] = {}
        self.nodes: dict[str, Shares] = {}
        self.ledgers: dict[str, Ledger] = {}
        self.given: dict[str, list[int]] = {}
        self.speeds: dict[str, float] = {}
        self.kept: dict[str, KeptEpoch | None] = {}
        """Nodes that go on from a position; None: they ask."""
        self.told: list[Any] = []
        self.generation = 0
        self.now = 0.0
        for name in starters:
            self.add(name)
        self.publish()
        for name in starters:
            self.nodes[name].on_roster(self.rosters[name].popleft())

    def add(self, name: str) -> None:
        def send(to: str, header: JobFrame, payload: bytes) -> None:
            if to in self.nodes:
                self.frames.setdefault((name, to), deque()).append((header, bytes(payload)))

        self.soon[name], self.rosters[name], self.given[name] = deque(), deque(), []
        self.nodes[name] = Shares(
            name,
            1,
            send=send,
            call_soon=self.soon[name].append,
            speed=lambda: self.speeds.get(name, 0.0),
            tell=self.told.append,
        )
        self.nodes[name].begin_cell(self.key.cell, 1, joined=name not in (*STARTERS, *self.starters))

    def publish(self) -> None:
        self.generation += 1
        for name in self.nodes:
            self.rosters[name].append(roster(self.generation, list(self.nodes)))

    def join(self, name: str) -> None:
        self.add(name)
        self.publish()

    def may_die(self) -> list[str]:
        """Nodes after whose death somebody is left who has had a part and so knows what was taken."""
        informed = {name for name, ledger in self.ledgers.items() if ledger.cut is not None}
        return [name for name in self.nodes if informed - {name} or (not informed and len(self.nodes) > 1)]

    def lose(self, name: str, said_all: bool) -> None:
        """``said_all``: what it took before is known to the others; otherwise its last words die with it."""
        if said_all:
            while self.soon[name]:
                self.soon[name].popleft()()
            for (sender, to), frames in list(self.frames.items()):
                while sender == name and to in self.nodes and frames:
                    self.deliver(sender, to)
        del self.nodes[name], self.rosters[name], self.soon[name]
        self.ledgers.pop(name, None)
        self.frames = {pair: frames for pair, frames in self.frames.items() if name not in pair}
        self.publish()

    def deliver(self, sender: str, to: str) -> None:
        header, payload = self.frames[sender, to].popleft()
        self.nodes[to].on_mesh(sender, header, memoryview(payload))

    def take(self, name: str, size: int) -> bool:
        """One batch of the loop on ``name``, which begins if it has not; False when it would wait or has none."""
        if name not in self.ledgers:
            alike = name in STARTERS and not self.key.by_speed
            kept = self.kept.get(name)
            self.ledgers[name] = self.nodes[name].begin(
                self.key, 1 if alike else None, kept=kept, asks=name in self.kept
            )
        ledger = self.ledgers[name]
        if ledger.pending or ledger.cut is None:
            return False
        positions = self.nodes[name].take(ledger, size, full_only=False)
        self.given[name] += [] if positions is None else positions.tolist()
        return positions is not None

    def happen(self, *, takes: bool = True) -> bool:
        """One thing that can happen next; False when nothing can."""
        can: list[Callable[[], Any]] = [
            lambda pair=pair: self.deliver(*pair)
            for pair, frames in self.frames.items()
            if frames and pair[1] in self.nodes
        ]  # type: ignore[misc]
        can += [lambda name=name: self.soon[name].popleft()() for name in self.nodes if self.soon[name]]  # type: ignore[misc]
        can += [
            lambda name=name: self.nodes[name].on_roster(self.rosters[name].popleft())  # type: ignore[misc]
            for name in self.nodes
            if self.rosters[name]
        ]
        if takes:
            can += [lambda name=name: self.take(name, self.draw.randint(1, 5)) for name in self.nodes] * 2  # type: ignore[misc]
        if not can:
            return False
        self.draw.choice(can)()
        return True

    def finish(self) -> None:
        """Everything arrives, everybody reads to the end."""
        for _ in range(100):
            while self.happen(takes=False):
                pass
            self.now += 2
            for name, node in self.nodes.items():
                node.on_tick(self.now)
                while self.take(name, 4):
                    pass
            if not any(self.frames.values()) and all(ledger.read_through() for ledger in self.ledgers.values()):
                return
        pytest.fail("the nodes did not come to an end")

    def all_given(self) -> list[int]:
        return sorted(position for positions in self.given.values() for position in positions)


def key(count: int = 60, **fields: Any) -> ShardKey:
    return ShardKey(
        **{"cell": 1, "loop": 0, "epoch": 0, "count": count, "seed": 0, "shuffle": True, "by_speed": False} | fields
    )


def all_is_given_once(world: World, changes: list[str]) -> None:
    """Nodes of unlike speed come and go as ``changes`` say, and what all 60 are is given out once."""
    world.speeds = {name: world.draw.choice([0.0, 10.0, 35.0]) for name in "abcdefgh"}
    for number, change in enumerate(changes):
        for _ in range(world.draw.randint(0, 25)):
            world.happen()
        if change == "join":
            world.join("defgh"[number])
        elif may_die := world.may_die():
            world.lose(world.draw.choice(may_die), said_all=True)
    world.finish()
    assert world.all_given() == list(range(60))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.lists(st.sampled_from(["join", "lose"]), max_size=4), st.booleans())
def test_each_is_given_out_once_whoever_comes_and_goes(seed: int, changes: list[str], by_speed: bool) -> None:
    all_is_given_once(World(seed, key(by_speed=by_speed)), changes)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 60))
def test_a_death_with_words_unsaid_repeats_only_what_the_dead_node_took(seed: int, steps: int) -> None:
    world = World(seed, key())
    for _ in range(steps):
        world.happen()
    dead = world.draw.choice(STARTERS)
    world.lose(dead, said_all=False)
    world.finish()
    by_the_living = sorted(position for name in world.nodes for position in world.given[name])
    assert len(set(by_the_living)) == len(by_the_living)
    assert set(by_the_living) | set(world.given[dead]) == set(range(60))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9))
def test_states_that_were_lost_on_the_way_are_asked_for(seed: int) -> None:
    world = World(seed, key())
    for _ in range(20):
        world.happen()
    world.join("d")
    for _ in range(15):
        world.happen()
    for frames in world.frames.values():
        frames.clear()
    world.finish()
    assert world.all_given() == list(range(60))


def test_a_roster_that_comes_after_others_began_changes_no_part() -> None:
    world = World(1, key())
    world.publish()
    for name in ("a", "b"):
        world.nodes[name].on_roster(world.rosters[name].popleft())
        world.ledgers[name] = world.nodes[name].begin(world.key, 2)
        world.take(name, 4)
    while world.happen(takes=False):
        pass
    world.ledgers["c"] = world.nodes["c"].begin(world.key, 2)
    world.finish()
    assert [world.given[name] for name in STARTERS] == [list(range(rank, 60, 3)) for rank in range(3)]


def test_a_joiner_gets_an_equal_part_of_the_rest() -> None:
    world = World(1, key(count=400))
    for name in STARTERS:
        assert world.take(name, 40)
    world.join("d")
    world.finish()
    assert [len(world.given[name]) for name in "abcd"] == [110, 110, 110, 70]


def test_parts_in_proportion_to_speed_from_the_start() -> None:
    world = World(1, key(count=400, by_speed=True))
    world.speeds = {"a": 30.0, "b": 10.0, "c": 0.0}
    world.finish()
    assert [len(world.given[name]) for name in STARTERS] == [200, 67, 133]


def test_a_loop_that_ended_gets_nothing_of_a_lost_node() -> None:
    world = World(1, key())
    for name in STARTERS:
        world.take(name, 4)
    while world.take("a", 4):
        pass
    assert world.nodes["a"].close([world.ledgers["a"]])
    before = list(world.given["a"])
    world.lose("c", said_all=True)
    world.finish()
    assert world.given["a"] == before
    assert world.all_given() == list(range(60))


def test_a_loop_at_its_end_waits_for_a_division_that_is_under_way() -> None:
    world = World(1, key())
    for name in STARTERS:
        world.take(name, 4)
    while world.take("a", 4):
        pass
    world.lose("c", said_all=True)
    world.nodes["a"].on_roster(world.rosters["a"].popleft())
    assert not world.nodes["a"].close([world.ledgers["a"]])
    world.finish()
    assert world.all_given() == list(range(60))


def test_a_node_whose_cell_is_over_gets_nothing() -> None:
    world = World(1, key())
    world.take("a", 4)
    world.take("b", 4)
    world.nodes["c"].begin_cell(1, 1)
    world.nodes["c"].end_cell(1)
    world.join("d")
    for _ in range(1000):
        if not world.happen(takes=False):
            break
    for name in "abd":
        while world.take(name, 4):
            pass
    assert world.all_given() == list(range(60))


@pytest.mark.parametrize("first", ["a", "b"])
def test_data_of_unlike_length_is_said_on_each_node_and_a_node_that_is_ahead_is_none(first: str) -> None:
    def begins(world: World, name: str, count: int, loop: int = 0) -> None:
        key = ShardKey(cell=1, loop=loop, epoch=0, count=count, seed=0, shuffle=True, by_speed=False)
        node = world.nodes[name]
        for _ in range(2):
            node.take(node.begin(key, 1), 2, full_only=False)
        while world.happen(takes=False):
            pass

    world = World(0, ShardKey(cell=1, loop=0, epoch=0, count=9, seed=0, shuffle=True, by_speed=False), ("a", "b"))
    counts = {"a": 100, "b": 1200}
    for name in sorted(counts, key=lambda name: name != first):
        begins(world, name, counts[name])
    assert world.told == []
    for name in counts:
        for now in (1.0, 1.0 + UNLIKE_S):
            world.nodes[name].on_tick(now)
    while world.happen(takes=False):
        pass
    assert len(world.told) == 2
    assert {message.text.partition(". ")[0] for message in world.told} == {
        "nc.shard: its data has unlike lengths ('a' 100 and 'b' 1,200)"
    }
    world = World(0, ShardKey(cell=1, loop=0, epoch=0, count=9, seed=0, shuffle=True, by_speed=False), ("a", "b"))
    begins(world, first, 100)
    begins(world, first, 20)
    begins(world, "b" if first == "a" else "a", 100)
    world.nodes[first].end_cell(1)
    assert world.told == []
    world = World(0, ShardKey(cell=1, loop=0, epoch=0, count=9, seed=0, shuffle=True, by_speed=False), ("a", "b"))
    begins(world, "a", 1)
    begins(world, "b", 7)  # of the first one it had no part
    begins(world, "a", 7)
    world.nodes["a"].end_cell(1)
    while world.happen(takes=False):
        pass
    assert world.told == []


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        ({"seed": 1}, "seed=0 on 'a' and seed=1 on 'b': some elements come twice and others never. Give all nodes the "
         "same seed"),
        ({"shuffle": False}, "shuffle=True on 'a' and shuffle=False on 'b': some elements come twice"),
        ({"seed": 3, "by_speed": True}, "seed=0, weights=None on 'a' and seed=3, weights='speed' on 'b': some"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("comes", [False, True])
def test_a_node_with_another_seed_or_order_is_named_unless_it_is_only_ahead(
    theirs: dict[str, Any], text: str, comes: bool
) -> None:
    world = World(0, key(), ("a", "b"))
    keys = {"a": key(), "b": key(**theirs)}
    for name, node in world.nodes.items():
        ledger = node.begin(keys[name], 1)
        while world.happen(takes=False):
            pass
        node.take(ledger, 2, full_only=False)
    while world.happen(takes=False):
        pass
    if comes:
        world.nodes["a"].begin(keys["b"], 1)
    for now in (1.0, 1.0 + UNLIKE_S):
        world.nodes["a"].on_tick(now)
    while world.happen(takes=False):
        pass
    assert [message.text.startswith(f"nc.shard: {text}") for message in world.told] == [True] * (not comes), world.told
    assert all(message.cell and message.level == "warning" for message in world.told)


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_a_node_with_other_data_than_the_lowest_rank_is_named_once(order: str) -> None:
    world = World(0, ShardKey(cell=1, loop=0, epoch=0, count=60, seed=0, shuffle=True, by_speed=False), ("a", "b", "c"))
    for name in order:
        for epoch in range(2):
            key = ShardKey(cell=1, loop=0, epoch=epoch, count=60, seed=0, shuffle=True, by_speed=False)
            ledger = world.nodes[name].begin(key, 1)
            world.nodes[name].seen_of_stream(ledger, -1, order_of(range(60) if name != "c" else range(1, 61)))
            assert world.nodes[name].take(ledger, 2, full_only=False) is not None, "nothing is stopped by it"
            while world.happen(takes=False):
                pass
    assert {message.text.partition(". ")[0] for message in world.told} == {
        "nc.shard: 'c' has other data than 'a', or in another order"
    }
    assert len(world.told) <= 2, "of the two the one, or both, with the same words"


def test_the_order_of_data_is_told_by_what_is_alike_on_all_machines() -> None:
    class Pictures:
        def __init__(self, targets: Any) -> None:
            self.targets = targets

    class Files(Pictures):
        """Of one's own; ``files`` as a disk lists them."""

        def __init__(self, files: list[str]) -> None:
            self.files, self.cache, self.means = files, [None] * len(files), [0.1, 0.2, 0.3]

        def __len__(self) -> int:
            return len(self.files)

    random = np.random.default_rng(0)
    rows, floats = random.integers(0, 255, (50, 28, 28), np.uint8), random.normal(size=(50, 3))
    labels = random.permutation(50)
    subset = torch.utils.data.Subset
    columns = {"text": [f"line {number}" for number in range(50)], "weight": floats[:, 0].tolist()}
    table = datasets.Dataset.from_dict(columns)
    alike: list[tuple[Any, Any]] = [
        (rows, torch.from_numpy(rows)), (labels.astype(np.int32), labels.tolist()),
        ((floats, labels), (floats + 1e-9, labels)),
        (torch.utils.data.TensorDataset(torch.from_numpy(labels)), (torch.from_numpy(labels),)),
        (["/home/ana/1.png", "/home/ana/2.png"], [r"C:\data\1.png", r"C:\data\2.png"]),
        (Files(["/home/ana/1.png", "/home/ana/2.png"]), Files(["/data/1.png", "/data/2.png"])),
        (Pictures(labels.tolist()), Pictures(torch.from_numpy(labels))),
        (subset(Pictures([1, 2, 3]), [2, 0]), subset(Pictures([1, 2, 3]), torch.tensor([2, 0]))),
        ([(floats, 1), (floats, 2)], [(None, 1), (None, 2)]), ([{"a": 1, "b": 0.1}], [{"b": 0.2, "a": 1}]),
        (table, table.with_format("torch")), (table.shuffle(seed=3), table.shuffle(seed=3).flatten_indices()),
    ]  # fmt: skip
    for one, other in alike:
        assert order_of(one) == order_of(other) != ""
    unlike: list[tuple[Any, Any]] = [
        (rows, rows[::-1]), (labels, random.permutation(50)), ((floats, labels), (floats, labels[::-1])),
        (["1.png", "2.png"], ["2.png", "1.png"]), (Pictures([1, 2]), Pictures([2, 1])),
        (Files(["1.png", "2.png"]), Files(["2.png", "1.png"])),
        (table, table.shuffle(seed=3)), (table.shuffle(seed=3), table.shuffle(seed=4)),
        ([{"text": "a"}, {"text": "b"}], [{"text": "b"}, {"text": "a"}]),
        (subset(floats, [2, 0]), subset(floats, [0, 2])), (subset(labels, [0, 1]), subset(labels[::-1], [0, 1])),
    ]  # fmt: skip
    for one, other in unlike:
        assert order_of(one) != order_of(other)
    weights = table.select_columns("weight")
    for nothing in (floats, torch.zeros(3), [1.5, 2.5], [{"a": 1.5}], weights, Pictures(None), object()):
        assert order_of(nothing) == ""


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (list(range(99)), list(range(99)), True),
        (list(range(99)), list(range(1, 100)), False),
        ((np.ones((9, 2)), torch.zeros(9)), (np.ones((9, 2)), torch.zeros(9)), True),
        ((np.ones((9, 2)), torch.zeros(9)), (np.ones((9, 2)), torch.ones(9)), False),
        (np.ones(9), np.ones(8), False),
        (np.array([np.ones(2), np.ones(3)], object), np.array([np.ones(2), np.ones(3)], object), True),
        (np.array([np.ones(2), np.ones(3)], object), np.array([np.ones(3), np.ones(2)], object), False),
        (torch.utils.data.TensorDataset(torch.ones(9)), torch.utils.data.TensorDataset(torch.ones(9)), True),
        (torch.ones(9), torch.ones(9, device="meta"), False),
        ([object()], [object()], False),
    ],
)
def test_a_shard_made_again_goes_on_with_the_next_epoch_of_the_same_data(one: Any, other: Any, alike: bool) -> None:
    shares = World(0, key()).nodes["a"]
    first = shares.counter("here", one)
    assert shares.counter("here", one) == first, "no loop has begun it"
    shares.counter("here", one).after += 2
    assert shares.counter("here", other).next == (2 if alike else 0)
    assert (shares.counter("here", one).next, shares.counter("there", one).next) == (2, 0)
    shares.begin_cell(2, 1)
    assert shares.counter("here", one).next == 0


class Own:
    """A dataset of somebody's own."""


def test_data_of_an_own_class_that_is_made_anew_in_each_turn_is_named(recwarn: pytest.WarningsRecorder) -> None:
    shares, kept, other = World(0, key()).nodes["a"], Own(), Own()
    for _ in range(2):
        for data in (kept, other):
            shares.counter("kept", data).after += 1
        shares.counter("stream", Own(), is_stream=True).after += 1
    assert not recwarn
    shares.counter("new", Own()).after += 1
    with pytest.warns(UserWarning, match="a new Own is made here in each turn, and begins with its first epoch"):
        assert shares.counter("new", Own()).next == 0


def test_states_larger_than_a_frame_arrive_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "PIECE", 7)
    world = World(1, key(count=500))
    for _ in range(30):
        world.happen()
    world.join("d")
    world.finish()
    assert world.all_given() == list(range(500))


def test_who_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "ANSWER_SECONDS", 0.1)
    world = World(1, key())
    world.take("a", 4)
    world.join("d")
    world.nodes["a"].on_roster(world.rosters["a"].popleft())
    with pytest.raises(RuntimeError, match=r"shard: b, c, d did not answer within 0\.1 s"):
        world.nodes["a"].take(world.ledgers["a"], 4, full_only=False)


@settings(deadline=None)
@given(st.integers(0, 300), st.lists(st.floats(0, 1000), min_size=1, max_size=9))
def test_parts_by_speed_are_disjoint_and_in_proportion(count: int, speeds: list[float]) -> None:
    parts = deal(np.arange(count), speeds)
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    known = [speed for speed in speeds if speed > 0]
    weights = [speed or sum(known) / len(known) for speed in speeds] if known else [1.0] * len(speeds)
    for part, weight in zip(parts, weights, strict=True):
        assert abs(len(part) - count * weight / sum(weights)) <= 1
