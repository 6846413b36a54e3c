"""What one node knows of who has taken what of one epoch, and how all agree on new parts when membership changes.

The bits of ``taken`` only ever go from 0 to 1. With each roster every member freezes its part and sends all others what
it knows (:class:`ShardState`). Who has the states of all members takes their union, and deals what is left out to the
members whose loops go on. All have the same states, so all deal alike, and nobody decides. A member lost meanwhile
means one more roster, and one more exchange. No threads and no sockets here: :class:`.shares.Shares` brings the
messages and holds the lock.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from notebook_cluster.protocol.mesh import ShardKey, ShardState
from notebook_cluster.protocol.node import Roster

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Positions = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Cut:
    """What was taken before one generation, and who gets parts of the rest: name, samples per second (0: unknown)."""

    taken: bytes
    receivers: tuple[tuple[str, float], ...]


@dataclass(eq=False)
class ShardPart:
    """This node's positions of one cut; those before ``at`` are given out. ``done``: no further batch can come."""

    cut: Cut
    positions: "Positions"
    at: int = 0
    done: bool = False


@dataclass(eq=False)
class Ledger:
    """One epoch on one node.

    Attributes:
        taken: one bit for each position that some node is known to have given to its loop.
        generation: of the newest roster whose exchange has begun here; -1: none.
        alike: generation in which nodes began with equal parts and without an exchange; -1: none did.
        pending: no cut is in force: nothing may be taken.
        open: the loop of this node goes on, or will come to this epoch.
    """

    key: ShardKey
    name: str
    taken: bytearray
    generation: int = -1
    alike: int = -1
    pending: bool = False
    open: bool = True
    cut: Cut | None = None
    part: ShardPart | None = None
    members: tuple[str, ...] = ()
    told: ShardState | None = None
    heard: dict[str, ShardState] = field(default_factory=dict)
    untold: list[bytes] = field(default_factory=list)

    @classmethod
    def empty(cls, key: ShardKey, name: str) -> "Ledger":
        return cls(key, name, bytearray(-(-key.count // 8)))

    def start_alike(self, generation: int, members: Sequence[str]) -> None:
        """The cut of a cell's first roster: nothing is taken, all get equal parts. It needs no message."""
        self.alike, self.members = generation, tuple(members)
        self.cut = Cut(bytes(len(self.taken)), tuple((name, 0.0) for name in members))

    def freeze(self, generation: int, members: Sequence[str], speed: float) -> ShardState:
        """Take no more until all ``members`` of ``generation`` have told theirs; returns what to tell them."""
        self.generation, self.members, self.pending = generation, tuple(members), True
        self.heard = {name: state for name, state in self.heard.items() if state.generation >= generation}
        self.told = ShardState(
            key=self.key, generation=generation, taken=zlib.compress(bytes(self.taken), 1), open=self.open, speed=speed
        )
        self.heard[self.name] = self.told
        return self.told

    def hear(self, sender: str, state: ShardState) -> None:
        """Keep what another member told, also when this node's own roster is older than that."""
        if state.generation >= self.generation:
            before = self.heard.get(sender)
            if before is None or before.generation <= state.generation:
                self.heard[sender] = state

    def missing(self) -> list[str]:
        """Members whose state of this generation has not come."""
        return [
            name for name in self.members if name not in self.heard or self.heard[name].generation != self.generation
        ]

    def deal_anew(self) -> bool:
        """Make the new cut when all states are there; False when one is missing."""
        if not self.pending or self.generation < 0 or self.missing():
            return False
        states = [self.heard[name] for name in self.members]
        known = 0
        for state in states:
            known |= int.from_bytes(unpacked(state.taken, len(self.taken)), "little")
        union = known.to_bytes(len(self.taken), "little")
        self.cut = Cut(
            union,
            tuple((name, state.speed) for name, state in zip(self.members, states, strict=True) if state.open),
        )
        self.mark_bits(union)
        self.pending = False
        return True

    def mark_bits(self, bits: bytes) -> None:
        known = int.from_bytes(self.taken, "little") | int.from_bytes(bits, "little")
        self.taken[:] = known.to_bytes(len(self.taken), "little")

    def mark(self, positions: Sequence[int]) -> None:
        """These are taken; those out of range are ignored."""
        for position in positions:
            if 0 <= position < self.key.count:
                self.taken[position >> 3] |= 1 << (position & 7)

    def all_taken(self) -> bool:
        return int.from_bytes(self.taken, "little").bit_count() >= self.key.count

    def read_through(self) -> bool:
        """This node has given out its whole part of the cut in force."""
        part = self.part
        return not self.pending and part is not None and part.cut is self.cut and part.done


def unpacked(compressed: bytes, size: int) -> bytes:
    """The bits of a ShardState.

    Raises:
        ValueError: they are not ``size`` bytes.
    """
    try:
        data = zlib.decompressobj().decompress(compressed, size + 1)
    except zlib.error as error:
        raise ValueError(f"the bits of a shard cannot be read: {error}") from None
    if len(data) != size:
        raise ValueError(f"the bits of a shard are {len(data)} bytes instead of {size}")
    return data


def members_of(key: ShardKey, roster: Roster) -> list[str]:
    """Names of the nodes among which the data is divided, in rank order."""
    names = [node.name for node in sorted(roster.nodes, key=lambda node: node.rank)]
    return [name for name in names if name in key.among] if key.among else names


def part_of(cut: Cut, key: ShardKey, name: str) -> "Positions":
    """The positions of ``name`` in ``cut``: int64, ascending. Empty when it got none."""
    import numpy

    bits = numpy.unpackbits(numpy.frombuffer(cut.taken, numpy.uint8), count=key.count, bitorder="little")
    left = numpy.flatnonzero(bits == 0)
    names = [receiver for receiver, _ in cut.receivers]
    if name not in names:
        return left[:0]
    speeds = [speed for _, speed in cut.receivers] if key.by_speed else [0.0] * len(names)
    return deal(left, speeds)[names.index(name)]


def deal(positions: "Positions", speeds: Sequence[float]) -> "list[Positions]":
    """``positions`` in parts of sizes in proportion to ``speeds``, each spread evenly over the whole.

    A speed of 0 is unknown and counts as the mean of the others; all unknown or equal: every n-th. Sizes are rounded so
    that they add up (largest remainder, the lower index first).
    """
    import numpy

    known = [speed for speed in speeds if speed > 0]
    if not known or all(speed == known[0] for speed in known):
        return [positions[index :: len(speeds)] for index in range(len(speeds))]
    mean = sum(known) / len(known)
    weights = [speed if speed > 0 else mean for speed in speeds]
    exact = [len(positions) * weight / sum(weights) for weight in weights]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda index: (sizes[index] - exact[index], index))
    for index in by_remainder[: len(positions) - sum(sizes)]:
        sizes[index] += 1
    places = numpy.concatenate([(numpy.arange(size) + 0.5) / max(size, 1) for size in sizes])
    owners = numpy.repeat(numpy.arange(len(sizes)), sizes)[numpy.argsort(places, kind="stable")]
    return [positions[owners == index] for index in range(len(sizes))]
