"""The ``nc.shard`` loops of the cell that runs: where each is, and where the cell before it was when it was stopped."""

import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from msgspec.structs import replace

from notebook_cluster.node.data.ledger import KeptEpoch
from notebook_cluster.node.data.position import LoopIdentity, LoopPosition, ShardProgress, identity_of, read_position
from notebook_cluster.node.data.source import few_of, is_array, is_torch, spread
from notebook_cluster.protocol.mesh import ShardKey
from notebook_cluster.protocol.node import NodeLog

_BEGIN_S = 2.0
"""Within which a node begins a cell after another, if it is one of its nodes."""
_MOST_MADE = 64
"""Data of one place in the code whose epochs are counted: the newest."""
UNLIKE_S = 3.0
"""Until unlike lengths or settings are told of: who had no part in the first loop is heard in a later one first, to
which this node comes too."""


@dataclass
class EpochCounter:
    """Of one Shard, whose iterations go on with the ``next`` epoch each.

    Attributes:
        after: the epoch that follows on its newest iteration. It is the same on all nodes, wherever they leave that.
    """

    next: int = 0
    after: int = 0


class _Same:
    """An object that is alike only to itself; it is not kept for that, where it can be referred to weakly."""

    def __init__(self, data: Any) -> None:
        self._type = type(data)
        try:
            self._refer: Callable[[], Any] = weakref.ref(data)
        except TypeError:
            self._refer = lambda: data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._refer() is not None and self._refer() is other._refer()

    __hash__ = None  # type: ignore[assignment]

    def is_made_anew(self, before: Any) -> bool:
        """``before`` was of one of this class that is gone."""
        return isinstance(before, _Same) and before._refer() is None and before._type is self._type


def _sketch(data: Any) -> Any:
    """Equal for one object and for those made alike: arrays, sequences and what torch makes of them are, when some of
    their elements are. It holds these few elements, not the data."""
    if is_torch(data, "Subset"):
        return "Subset", _sketch(data.indices), _sketch(data.dataset)
    if is_torch(data, "TensorDataset"):
        return "TensorDataset", _sketch(data.tensors)
    if is_array(data):
        rows = [data[index] for index in spread(len(data))]
        whole = str(data.dtype) == "object" or not hasattr(rows[0] if rows else data, "tolist")
        some = tuple(map(_sketch, rows)) if whole else repr([row.tolist() for row in map(_some_of, rows)])
        return type(data), str(data.shape), str(data.dtype), str(getattr(data, "device", "")), some
    if isinstance(data, list | tuple):
        return type(data), len(data), tuple(_sketch(data[index]) for index in spread(len(data)))
    return (type(data), data) if isinstance(data, str | int | float | range | PurePath) else _Same(data)


def _some_of(row: Any) -> Any:
    return few_of(row.reshape(-1))


class FirstLoops:
    """The first loop that each node has taken something in, in the running cell: it is over the same data on all."""

    def __init__(self, name: str, tell: Callable[[NodeLog], None]) -> None:
        self._name, self._tell = name, tell
        self._keys: dict[str, ShardKey | None] = {}
        self._own: set[ShardKey] = set()
        self._firsts: dict[str, tuple[float, ShardKey, ShardKey]] = {}
        """Nodes that seem to have data of another length, or settings: when that is told, the loop here and that
        there."""
        self._unlike: set[str] = set()
        """Nodes with other data that were told of in this cell."""
        self._stream_told = False

    def begin_cell(self, cell: int) -> None:
        self._keys = {name: key for name, key in self._keys.items() if key is not None and key.cell >= cell}
        for told in (self._own, self._firsts, self._unlike):
            told.clear()
        self._stream_told = False

    def compare(self, first: str, name: str, mine: str, theirs: str) -> None:
        """What ``name`` has said of its data's order, beside this node's. ``first``: the lowest rank, by which all are
        measured."""
        other = name if first == self._name else self._name
        if mine and theirs and mine != theirs and first in (name, self._name) and other not in self._unlike:
            self._unlike.add(other)
            text = (
                f"nc.shard: {other!r} has other data than {first!r}, or in another order. Parts are dealt by "
                "position, so some elements come twice and others never. Sort what is listed, and seed what splits or "
                "shuffles: random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0)), "
                "dataset.train_test_split(0.2, seed=0)"
            )
            self._tell(NodeLog(level="warning", text=text, cell=True))

    def differs(self, how: str) -> str:
        """What to say of a stream that cannot be the same everywhere; it is said once in a cell."""
        self._stream_told = True
        return (
            f"the stream is not the same on every node: {how}. Each reads all of it and keeps its own items, so it "
            "must come in the same order everywhere: seed what shuffles it"
        )

    def tell_stream(self, how: str) -> None:
        """Of a stream that turned out so when this node had read its part; ``how`` is empty where nothing did."""
        if how and not self._stream_told:
            text = f"nc.shard: {self.differs(how)}. Some items came twice and others never"
            self._tell(NodeLog(level="warning", text=text, cell=True))

    def see(self, name: str, key: ShardKey | None) -> None:
        """``name`` is in this loop; of this node None: not one that it began with the others."""
        if name in self._keys:
            return
        self._keys[name], mine = key, key if name == self._name else self._keys.get(self._name)
        for other, theirs in self._keys.items() if name == self._name else [(name, key)]:
            if not (mine and theirs and mine.count and theirs.count) or replace(theirs, epoch=mine.epoch) == mine:
                continue
            alike = replace(theirs, seed=mine.seed, shuffle=mine.shuffle, by_speed=mine.by_speed, epoch=mine.epoch)
            if alike == mine or replace(theirs, count=mine.count, epoch=mine.epoch) == mine:
                self._firsts[other] = 0.0, mine, theirs

    def began(self, key: ShardKey) -> None:
        """This node has come to this loop."""
        self._own.add(replace(key, epoch=0))

    def tell_unlike(self, now: float | None) -> None:
        """Of unlike lengths and settings, when nothing else is known of them for a while; ``now`` None: the cell
        ends."""
        for other, (due, mine, theirs) in list(self._firsts.items()):
            if now is not None and not due:
                self._firsts[other] = now + UNLIKE_S, mine, theirs
                continue
            if now is not None and now < due:
                continue
            del self._firsts[other]
            if replace(theirs, epoch=0) in self._own:
                continue
            text = _unlike(sorted([(self._name, mine), (other, theirs)]))
            self._tell(NodeLog(level="warning", text=text, cell=True))


def _unlike(loops: list[tuple[str, ShardKey]]) -> str:
    (_, mine), (_, theirs) = loops
    if mine.count != theirs.count:
        has = " and ".join(f"{name!r} {key.count:,}" for name, key in loops)
        return (
            f"nc.shard: its data has unlike lengths ({has}). It divides what all nodes have alike, and each takes a "
            "part of its own, so elements are left out. Data that each node has for itself needs no nc.shard"
        )
    said = [
        (name, {"seed": key.seed, "shuffle": key.shuffle, "weights": "speed" if key.by_speed else None})
        for name, key in loops
    ]
    differ = [setting for setting in said[0][1] if said[0][1][setting] != said[1][1][setting]]
    has = " and ".join(
        f"{', '.join(f'{one}={settings[one]!r}' for one in differ)} on {name!r}" for name, settings in said
    )
    return f"nc.shard: {has}: some elements come twice and others never. Give all nodes the same {' and '.join(differ)}"


class LoopRegistry:
    """Loops are matched by :class:`.position.LoopIdentity`. Called on the main thread.

    Attributes:
        cell: the one that runs, or ran last. What is known of its loops is not true of those of another, which nodes
            that are ahead have begun.
        loops: of that cell, in the order in which they began. loops_before: of the one before it.
        before_batch: called before the next batch is fetched; None: nothing is.
        activity: counts what they have taken: a loop that is left before another goes on was left by the cell's code.
        joined: the cell that was running as this node came, which so has no position of it; 0: not known, or none.
    """

    def __init__(self) -> None:
        self.cell = 0
        self.loops: list[ShardProgress] = []
        self.loops_before: list[ShardProgress] = []
        self.activity = 0
        self.joined = 0
        self._ahead = 0, 0.0
        """Cell that others have begun and this node has not, and when that was heard."""
        self._generations = -1, -1
        """Of the first roster that this node got, and of that with which the running cell began here."""
        self.before_batch: Callable[[], None] | None = None
        self._loops: Counter[Any] = Counter()
        self._kept: dict[LoopIdentity, tuple[LoopPosition, bool]] | None = {}
        """Positions that loops of the running cell go on from; None: this node has none, others may."""
        self._going: dict[LoopIdentity, LoopPosition] = {}
        """Where loops of the running cell go on, also those that have come."""
        self._said = False
        """Whether it was said which loops go on in that cell."""
        self._made: dict[Hashable, list[tuple[Any, EpochCounter]]] = {}
        """Sketches of what was divided at each place of the cell's code, and the counter of its newest shard."""

    def forget_loops(self, cell: int, generation: int, joined: bool) -> None:
        """This cell begins: see :meth:`.shares.Shares.begin_cell`."""
        self._loops.clear()
        self._made.clear()
        self.loops_before, self.loops, self.before_batch = self.loops, [], None
        self._kept, self._going, self._said = {}, {}, False
        self._generations = self._generations[0], generation
        self.cell = cell
        if joined:
            self.joined = cell

    def since(self, cell: int) -> int:
        """Generation with which this node began or joined ``cell``; -1: it has done neither. On any thread."""
        return self._generations[1] if cell == self.cell else -1

    def hear_of_roster(self, generation: int) -> None:
        """On the I/O thread."""
        if self._generations[0] < 0:
            self._generations = generation, self._generations[1]

    def hear_of_begin(self, cell: int, generation: int) -> None:
        """Another node began or joined ``cell`` with this roster; -1: neither. On the I/O thread."""
        if cell > self.cell and 0 <= generation < self._generations[0]:
            self.joined = cell

    def counter(self, place: Hashable, data: Any, is_stream: bool = False) -> EpochCounter:
        """Of a Shard that is made at ``place``: it goes on after the one that was made there over the same data, if a
        loop has begun that. A stream's order is its own in any epoch."""
        made = self._made.setdefault(place, [])
        try:
            sketch = _sketch(data)
        except Exception:  # of what people's own arrays do nothing is known, and only an epoch's number hangs on it
            sketch = _Same(data)
        number = next((number for number, (before, _) in enumerate(made) if before == sketch), None)
        after = 0 if number is None else made.pop(number)[1].after
        is_own = isinstance(sketch, _Same) and not is_stream
        if is_own and any(sketch.is_made_anew(before) and its.after for before, its in made):
            text = (
                f"shard: a new {type(data).__name__} is made here in each turn, and begins with its first epoch each "
                "time: make it before the loop over epochs, else the same elements come in the same order"
            )
            warnings.warn(text, stacklevel=4)
        counter = EpochCounter(after, after)
        made.append((sketch, counter))
        del made[:-_MOST_MADE]
        return counter

    def next_loop(
        self, loop: ShardProgress | None, count: int, seed: int, shuffle: bool, by_speed: bool
    ) -> LoopIdentity:
        """Which loop this is of those over such data in this cell. ``loop`` is listed, see :attr:`loops`."""
        what = count, seed, shuffle, by_speed
        self._loops[what] += 1
        self.activity += 1
        if loop is not None:
            self.loops.append(loop)
        return LoopIdentity(*what, self._loops[what] - 1)

    def positions(self, before: bool = False) -> list[dict[str, Any]]:
        """Where the loops of this cell are, also after its end until the next begins: plain data for :meth:`go_on`.

        The later it is called after a Stop, the more it knows of what the others took last, which matters where one of
        them does not come back.

        Args:
            before: those of the cell before.
        """
        loops = self.loops_before if before else self.loops
        return [{"loop": list(loop.identity), "left": loop.left, "position": loop.position().data()} for loop in loops]

    def go_on(self, positions: Sequence[Mapping[str, Any]] | None) -> None:
        """The loops of the running cell go on where those of another were, each where the one with its identity was.

        Call it on all nodes of the cell before any of its loops begins.

        Args:
            positions: of :meth:`positions`. None on a node that has none, while others go on from theirs.

        Raises:
            ValueError: this is no such list.
        """
        if positions is None:
            self._kept, self._going, self._said = None, {}, True
            return
        kept = {}
        for one in positions:
            identity = LoopIdentity(*one["loop"])
            kept[identity] = read_position(one["position"], identity[:3]), bool(one["left"])
        self._going = {identity: position for identity, (position, _) in kept.items()}
        self._kept, self._said = kept, True

    def may_go_on(self, key: ShardKey) -> bool:
        """Whether this node may have a position in that epoch to go on from. On any thread."""
        if key.cell == self.joined:
            return False
        return key.cell > self.cell or (key.cell == self.cell and not self._said) or self.goes_on_in(key)

    def is_about_to_begin(self, cell: int) -> bool:
        """On the I/O thread: others have begun that cell just now, and this node may be one that runs it."""
        if cell > max(self.cell, self._ahead[0]):
            self._ahead = cell, time.monotonic()
        return cell > self.cell and time.monotonic() - self._ahead[1] < _BEGIN_S

    def goes_on_in(self, key: ShardKey) -> bool:
        """Whether this node has a position in that epoch to go on from. On any thread."""
        position = self._position_of(key)
        return position is not None and position.kept(key.epoch) is not None

    def has_not_begun(self, key: ShardKey) -> bool:
        """Whether this node goes on with that loop, and will come to that epoch, of which it has had nothing. On any
        thread."""
        position = self._position_of(key)
        return position is not None and key.epoch >= position.epoch

    def kept_epoch(self, key: ShardKey) -> KeptEpoch | None:
        """Where this node was in that epoch, of a loop that goes on and has not come yet; None: it is not known, or the
        loop was left there and will take nothing. On any thread."""
        position, left = (self._kept or {}).get(identity_of(key), (None, False))
        return None if key.cell != self.cell or position is None or left else position.kept(key.epoch)

    def is_over(self, key: ShardKey) -> bool:
        """On any thread: whether this node's loop comes to this epoch no more."""
        position = self._position_of(key)
        return position is not None and key.epoch < position.epoch and position.kept(key.epoch) is None

    def _position_of(self, key: ShardKey) -> LoopPosition | None:
        return self._going.get(identity_of(key)) if key.cell == self.cell else None

    def begin_anew(self) -> None:
        """No loop of this cell goes on."""
        self._kept, self._going, self._said = {}, {}, True

    def unclaimed(self) -> list[LoopIdentity]:
        """Loops that were to go on, and have not come."""
        return [identity for identity, (_, left) in (self._kept or {}).items() if not left]

    def kept(self, identity: LoopIdentity) -> tuple[LoopPosition | None, bool, bool]:
        """What :meth:`go_on` said of this loop: its position, whether it was left there, and whether others may have
        one."""
        if self._kept is None:
            return None, False, True
        position, left = self._kept.pop(identity, (None, False))
        return position, left, position is None and bool(self._going)

    def goes_on(self, identity: LoopIdentity, position: LoopPosition) -> None:
        """This loop goes on there: a node that comes to an earlier epoch than those of ``position`` gets nothing."""
        self._going[identity] = position
