"""What one node knows of who has taken what of one epoch, and how all agree on new parts when membership changes.

The bits of ``taken`` only ever go from 0 to 1. With each roster every member freezes its part and sends all others what
it knows (:class:`ShardState`). Who has the states of all members takes their union, and deals what is left out to the
members whose loops go on. All have the same states, so all deal alike, and nobody decides. A member lost meanwhile
means one more roster, and one more exchange.

A loop that goes on from a kept position begins with an exchange as well. When all members have a position in the same
cut, and are those of that cut, it comes into force again and each goes on where it was; otherwise what none of them is
known to have taken is dealt anew. No threads and no sockets here: :class:`.shares.Shares` brings the
messages and holds the lock.
"""

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from notebook_cluster.protocol.mesh import ShardKey, ShardState
from notebook_cluster.protocol.node import Roster
from notebook_cluster.protocol.wire import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Positions = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Cut:
    """What was taken before one generation, and who gets parts of the rest: name, samples per second (0: unknown)."""

    taken: bytes
    receivers: tuple[tuple[str, float], ...]

    def hash(self) -> str:
        """Equal on two nodes that hold the same cut."""
        return hashlib.blake2b(repr((self.taken, self.receivers)).encode(), digest_size=12).hexdigest()


@dataclass(frozen=True, eq=False)
class KeptEpoch:
    """Where a node was in one epoch: it had given out ``at`` positions of its part of ``cut``, and knew ``taken``."""

    epoch: int
    taken: bytes
    cut: Cut | None
    at: int


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
        begun: the loop of this node has come to this epoch.
        asks: it goes on from a kept position, or wants to know what those have taken that do.
        kept: that position, until the first cut.
    """

    key: ShardKey
    name: str
    taken: bytearray
    generation: int = -1
    alike: int = -1
    pending: bool = False
    open: bool = True
    begun: bool = False
    asks: bool = False
    kept: KeptEpoch | None = None
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
        known = bytes(self.taken) if self.kept is None else _either(self.taken, self.kept.taken)
        self.told = ShardState(
            key=self.key, generation=generation, taken=zlib.compress(known, 1), open=self.open, speed=speed,
            goes_on=self.asks, **self._told_of_kept(),
        )  # fmt: skip
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
        kept = self.kept.cut if self.kept is not None else None
        together = {(state.cut, state.receivers) for state in states if state.cut}
        hash, receivers = next(iter(together)) if len(together) == 1 else ("", ())
        exact = bool(hash) and set(receivers) <= {name for name in self.members if self.heard[name].cut}
        known = 0
        for state in states:
            bits = state.own if exact and state.own else state.taken
            known |= int.from_bytes(unpacked(bits, len(self.taken)), "little")
        union = known.to_bytes(len(self.taken), "little")
        if exact and kept is not None and receivers == self.members:
            assert self.kept is not None
            self.cut = kept
            self.part = ShardPart(kept, part_of(kept, self.key, self.name), self.kept.at)
        else:
            self.cut = Cut(
                union,
                tuple((name, state.speed) for name, state in zip(self.members, states, strict=True) if state.open),
            )
        self.mark_bits(union)
        self.kept = None
        self.pending = False
        return True

    def _told_of_kept(self) -> dict[str, Any]:
        """What this node has given out itself. The others may know of more, that came after its position was kept."""
        if self.kept is None or self.kept.cut is None:
            return {}
        cut = self.kept.cut
        told = {"cut": cut.hash(), "receivers": tuple(name for name, _ in cut.receivers)}
        if 2 * len(cut.taken) > MAX_MESSAGE_BYTES - (1 << 20):
            return told  # both do not fit into a message
        own = bytearray(cut.taken)
        for position in part_of(cut, self.key, self.name)[: self.kept.at].tolist():
            own[position >> 3] |= 1 << (position & 7)
        return told | {"own": zlib.compress(bytes(own), 1)}

    def go_on(self, kept: KeptEpoch | None) -> None:
        """Begin where ``kept`` was, with an exchange; None: at what those have left that have such a position."""
        self.asks, self.kept = True, kept

    def keep(self) -> KeptEpoch:
        """Where this node is; what :meth:`go_on` takes."""
        if self.kept is not None:
            return replace(self.kept, taken=_either(self.taken, self.kept.taken))
        at = self.part.at if self.part is not None and self.part.cut is self.cut else 0
        return KeptEpoch(self.key.epoch, bytes(self.taken), self.cut, at)

    def waits_for_loop(self) -> bool:
        """Others go on from kept positions, and this node's loop, which may have one too, has not come to it."""
        return not self.begun and any(state.goes_on for state in self.heard.values())

    def mark_bits(self, bits: bytes) -> None:
        self.taken[:] = _either(self.taken, bits)

    def mark(self, positions: Sequence[int]) -> None:
        """These are taken; those out of range are ignored."""
        for position in positions:
            if 0 <= position < self.key.count:
                self.taken[position >> 3] |= 1 << (position & 7)

    def mark_all(self) -> None:
        self.taken[:] = ((1 << self.key.count) - 1).to_bytes(len(self.taken), "little")

    def next_of(self, part: ShardPart, size: int) -> "tuple[Positions, int]":
        """The next ``size`` positions of ``part``, without those that are taken all the same (by a joiner that came
        before this node had told its kept position); and where the part goes on then."""
        import numpy

        found, at = part.positions[:0], part.at
        while len(found) < size and at < len(part.positions):
            more = part.positions[at : at + size - len(found)]
            at += len(more)
            free = more[[not self.is_taken(position) for position in more.tolist()]]
            found = numpy.concatenate([found, free]) if len(found) else free
        return found, at

    def is_taken(self, position: int) -> bool:
        return bool(self.taken[position >> 3] >> (position & 7) & 1)

    def all_taken(self) -> bool:
        return int.from_bytes(self.taken, "little").bit_count() >= self.key.count

    def read_through(self) -> bool:
        """This node has given out its whole part of the cut in force."""
        part = self.part
        return not self.pending and part is not None and part.cut is self.cut and part.done


def _either(bits: bytes | bytearray, others: bytes | bytearray) -> bytes:
    known = int.from_bytes(bits, "little") | int.from_bytes(others, "little")
    return known.to_bytes(len(bits), "little")


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
