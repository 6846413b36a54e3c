"""Loops over nc.shard through several cells: begun at any moment, stopped, gone on with, joined; each element once an
epoch, whatever is heard first."""

import itertools
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from greenlet import greenlet
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_cluster.node.data import loop_registry
from notebook_cluster.node.data.loop_registry import EpochCounter
from notebook_cluster.node.data.samplers import epoch_order
from notebook_cluster.node.data.shares import Shares
from notebook_cluster.node.data.source import batch_maker, loader_reads
from notebook_cluster.node.data.stream_readers import StrideReader
from notebook_cluster.node.data.streams import stream_source
from notebook_cluster.node.namespace.shard_loops import FollowedLoop, LoopOptions
from notebook_cluster.node.namespace.shard_loops import Place as Where
from notebook_cluster.node.namespace.stream_loops import StrideLoop
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.node import Roster
from notebook_cluster.training.runtime import set_runtime
from tests.test_node_shard import Place
from tests.test_node_shares import roster

Positions = list[dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[None]:
    set_runtime(Place())  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_registry, "_BEGIN_S", float("inf"))  # here every node begins the cell, however late
        yield
    set_runtime(None)


@dataclass(frozen=True)
class Loop:
    """One ``for batch in nc.shard(...)`` of the cell.

    ``leaves``: after so many batches; 0: at its end. ``stream``: over a function that returns an iterator.
    """

    count: int
    epochs: int
    size: int
    by_speed: bool = False
    leaves: int = 0
    stream: bool = False


class Stopped(Exception):
    pass


class Waiting:
    """In place of a node's condition variable: no two threads of this world run at once, and who waits lets others go
    on."""

    def __init__(self, pause: Callable[[], None]) -> None:
        self._pause = pause

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self, seconds: float) -> None:
        self._pause()

    def notify_all(self) -> None:
        pass


class Node:
    """What is on its way to it, what its main thread does, and the elements that its loops have got, in each of
    ``loops``."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.rosters: deque[Roster] = deque()
        self.soon: deque[Callable[[], None]] = deque()
        self.heard = 0
        self.begin_anew()
        self.main: greenlet | None = None
        self.is_stopped = False
        self.shares = Shares(
            name, 1, send=self._send, call_soon=self.soon.append, speed=lambda: self.world.speeds[name]
        )
        self.shares.changed = Waiting(self._pause)  # type: ignore[assignment]

    def begin_anew(self) -> None:
        self.got = [Counter[int]() for _ in self.world.loops]
        self.positions: Positions = []

    def _send(self, to: str, header: JobFrame, payload: bytes) -> None:
        if to in self.world.nodes:
            self.world.frames.setdefault((self.name, to), deque()).append((header, bytes(payload)))

    def _pause(self) -> None:
        """Anything else may happen here; a Stop comes here only."""
        self.world.scheduler.switch()
        if self.is_stopped:
            raise Stopped

    def start(self, cell: int, generation: int, joined: bool, goes_on: bool) -> None:
        self.main = greenlet(self._run)
        self.main.switch(cell, generation, joined, goes_on)

    def _run(self, cell: int, generation: int, joined: bool, goes_on: bool) -> None:
        try:
            self.world.scheduler.switch()
            while self.heard < generation:
                self.world.scheduler.switch()
            self.shares.begin_cell(cell, generation, joined=joined)
            if not joined:
                self._go_on(goes_on)
            self.shares.look_again()
            place = Where(cell, generation, joined)
            for loop, got in zip(self.world.loops, self.got, strict=True):
                self._pause()
                for number, batch in enumerate(self._batches(loop, place), start=1):
                    got.update(batch if loop.stream else batch.tolist())
                    self._pause()
                    if number == loop.leaves:
                        break
        except Stopped:
            self.is_stopped = False
        self.shares.end_cell(cell)
        self.positions = self._newest(self.shares.positions())
        self.main = None

    def _go_on(self, goes_on: bool) -> None:
        """At once where the same cell is run again; a sync object that reads a checkpoint comes to it later."""
        if not self.world.may_join and self.world.draw.random() < 0.5:
            self._pause()
        if goes_on:
            if self.world.draw.random() < 0.5:  # the later they are asked for, the more is known
                self.positions = self._newest(self.shares.positions(before=True))
            self.shares.go_on(self.positions or None)
        elif self.world.draw.random() < 0.5:
            self.shares.begin_anew()

    def _newest(self, positions: Positions) -> Positions:
        """Of a loop that the last cell did not come to it is the one before, which is still true."""
        newest = {tuple(one["loop"]): one for one in self.positions + json.loads(json.dumps(positions))}
        return list(newest.values())

    def _batches(self, loop: Loop, place: Where) -> Iterator[Any]:
        def order(epoch: int) -> Any:
            return epoch_order(loop.count, 0, epoch)

        what = (0, 0, False) if loop.stream else (loop.count, 0, True)
        options = LoopOptions(
            what, None if loop.stream else order, loop.by_speed, loop.size, full_only=False, epochs=loop.epochs
        )
        if not loop.stream:
            followed = FollowedLoop(options, EpochCounter(), self.shares, lambda: place)
            return followed.hand_out(followed.begin(None))
        source = stream_source(lambda: iter(range(loop.count)), "stride")
        assert source is not None
        stride = StrideLoop(options, EpochCounter(), self.shares, lambda: place, listed=True)
        reader = StrideReader(source, batch_maker(source, None, loop.size))
        return stride.hand_out(stride.read(None, loader_reads(None, reader)))


class World:
    """Nodes without sockets: what happens next is drawn, in order between any two."""

    def __init__(self, seed: int, names: str, loops: list[Loop], may_join: bool) -> None:
        self.draw = random.Random(seed)
        self.loops, self.may_join = loops, may_join
        self.speeds = {name: self.draw.choice([0.0, 10.0, 35.0]) for name in "abcdef"}
        self.frames: dict[tuple[str, str], deque[tuple[JobFrame, bytes]]] = {}
        self.scheduler = greenlet.getcurrent()
        self.cell = self.generation = 0
        self.goes_on = False
        self.now = 0.0
        self.lost: list[Node] = []
        self.nodes = {name: Node(self, name) for name in names}
        self.publish()

    def publish(self) -> None:
        self.generation += 1
        for node in self.nodes.values():
            node.rosters.append(roster(self.generation, list(self.nodes)))

    def join(self, name: str) -> None:
        """In the cell that runs."""
        self.nodes[name] = Node(self, name)
        self.publish()
        self.nodes[name].start(self.cell, self.generation, True, self.goes_on)

    def lose(self, name: str) -> None:
        """What it took in this cell is known to the others."""
        node = self.nodes[name]
        while node.soon:
            node.soon.popleft()()
        for (sender, to), frames in list(self.frames.items()):
            while sender == name and frames:
                self._deliver(sender, to)
        self.frames = {pair: frames for pair, frames in self.frames.items() if name not in pair}
        del self.nodes[name]
        self.lost.append(node)
        self.publish()

    def begin_cell(self, goes_on: bool) -> None:
        self.cell, self.goes_on = self.cell + 1, goes_on
        for node in self.nodes.values():
            if not goes_on:
                node.begin_anew()
            node.start(self.cell, self.generation, False, goes_on)

    def stop(self) -> None:
        """All are told at once, and each notices it when its turn comes; what had ended by then has ended."""
        for node in self.nodes.values():
            node.is_stopped = node.main is not None

    def runs(self) -> bool:
        return any(node.main is not None for node in self.nodes.values())

    def happen(self, *, runs: bool = True) -> bool:
        """One thing that can happen next; False when nothing can."""
        can: list[Callable[[], Any]] = [partial(self._deliver, *pair) for pair, frames in self.frames.items() if frames]
        for node in self.nodes.values():
            can += [lambda node=node: node.soon.popleft()()] if node.soon else []  # type: ignore[misc]
            can += [partial(self._hear, node)] if node.rosters else []
            can += [node.main.switch] * 2 if runs and node.main is not None else []
        if can:
            self.draw.choice(can)()
        return bool(can)

    def _deliver(self, sender: str, to: str) -> None:
        header, payload = self.frames[sender, to].popleft()
        self.nodes[to].shares.on_mesh(sender, header, memoryview(payload))

    def _hear(self, node: Node) -> None:
        news = node.rosters.popleft()
        node.heard = news.generation
        node.shares.on_roster(news)

    def settle(self) -> None:
        """Everything that was said arrives."""
        while self.happen(runs=False):
            pass

    def finish(self) -> None:
        """The cell runs to its end on all nodes."""
        for _ in range(300):
            for _ in range(200):
                if not self.runs():
                    return
                self.happen()
            self.now += 2
            for node in self.nodes.values():
                node.shares.on_tick(self.now)
        pytest.fail("the cell did not come to an end")

    def got(self) -> list[Counter[int]]:
        """Of each loop, what all nodes have got."""
        nodes = [*self.nodes.values(), *self.lost]
        return [sum((node.got[number] for node in nodes), Counter()) for number in range(len(self.loops))]

    def everything(self) -> list[Counter[int]]:
        return [Counter(dict.fromkeys(range(loop.count), loop.epochs)) for loop in self.loops]


LOOPS = st.lists(
    st.builds(
        Loop, st.sampled_from([1, 5, 24, 40]), st.integers(1, 3), st.integers(1, 5), st.booleans(),
        st.sampled_from([0, 0, 0, 1, 3]), st.booleans(),
    ),
    min_size=1, max_size=3,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**9), st.sampled_from(["ab", "abc", "a"]), LOOPS, st.lists(st.integers(0, 150), max_size=3),
    st.lists(st.tuples(st.integers(0, 80), st.sampled_from(["d", "e", "a", "lose"])), max_size=3),
)  # fmt: skip
def test_cells_that_are_stopped_and_gone_on_with_give_each_element_once(
    seed: int, names: str, loops: list[Loop], stops: list[int], changes: list[tuple[int, str]]
) -> None:
    """In the last of them nodes come, are lost, and come again without a position."""
    world = World(seed, names, loops, bool(changes))
    for number, steps in enumerate(stops):
        world.begin_cell(goes_on=number > 0 and world.draw.random() < 0.8)
        for _ in range(steps):
            world.happen()
        world.stop()
        world.finish()
    world.begin_cell(goes_on=bool(stops))
    started = set(world.nodes.values())
    for steps, change in changes:
        for _ in range(steps):
            world.happen()
        if change == "lose":
            # What only it knew dies with it: where it was in the cell before, and what nobody who is left heard.
            if not stops and len(started & set(world.nodes.values())) > 1:
                world.lose(world.draw.choice(list(world.nodes)))
        elif world.runs() and change not in world.nodes:
            world.join(change)
    world.finish()
    for loop, got, everything in zip(loops, world.got(), world.everything(), strict=True):
        if not world.lost and not loop.leaves:
            assert got == everything
        assert got <= everything  # what was left of a lost node's part comes where a loop goes on


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), LOOPS)
def test_parts_are_those_of_the_first_members_however_late_one_begins(seed: int, loops: list[Loop]) -> None:
    world = World(seed, "abc", [replace(loop, by_speed=False, leaves=0, stream=False) for loop in loops], False)
    world.begin_cell(goes_on=False)
    world.finish()
    for number, loop in enumerate(world.loops):
        for rank, node in enumerate(world.nodes.values()):
            orders = [epoch_order(loop.count, 0, epoch).tolist()[rank::3] for epoch in range(loop.epochs)]
            assert node.got[number] == Counter(itertools.chain(*orders))


@pytest.mark.parametrize("seed", range(20))
def test_who_joins_a_cell_that_goes_on_keeps_nobody_waiting_before_it_comes_to_that_cell(seed: int) -> None:
    """It runs earlier cells first, and those may take long."""
    world = World(seed, "ab", [Loop(40, 1, 2)], True)
    world.begin_cell(goes_on=False)
    while not all(node.got[0] for node in world.nodes.values()):
        world.happen()
    world.stop()
    world.finish()
    world.begin_cell(goes_on=True)
    while not all(node.shares.loops for node in world.nodes.values()):
        world.happen()
    world.join("d")
    joiner = world.nodes["d"]
    main, joiner.main = joiner.main, None
    world.finish()
    joiner.main = main
    world.finish()
    assert world.got() == world.everything()
    assert joiner.got[0]


@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_have_all_joined_wait_for_none_that_comes_after_them(seed: int) -> None:
    world = World(seed, "ab", [Loop(40, 1, 2)], True)
    world.begin_cell(goes_on=False)
    for name in "ab":
        while not all(node.got[0] for node in world.nodes.values()):
            world.happen()
        world.lose(name)
        world.settle()
        world.join(name)
    main, world.nodes["b"].main = world.nodes["b"].main, None
    world.finish()
    world.nodes["b"].main = main
    world.finish()
    for got, everything in zip(world.got(), world.everything(), strict=True):
        assert got <= everything
