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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from notebook_cluster.node.data.dealing import Cut, EndlessPart, part_of
from notebook_cluster.node.data.taken import Taken, unpacked
from notebook_cluster.protocol.mesh import ShardKey, ShardState
from notebook_cluster.protocol.node import Roster
from notebook_cluster.protocol.wire import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Positions = NDArray[Any]


@dataclass(frozen=True, eq=False)
class KeptEpoch:
    """Where a node was in one epoch: it had given out ``at`` positions of its part of ``cut``, and knew ``taken``."""

    epoch: int
    taken: Taken
    cut: Cut | None
    at: int


@dataclass(eq=False)
class ShardPart:
    """This node's positions of one cut; those before ``at`` are given out. ``done``: no further batch can come."""

    cut: Cut
    positions: "Positions | EndlessPart"
    at: int = 0
    done: bool = False


@dataclass(eq=False)
class Ledger:
    """One epoch on one node.

    Attributes:
        taken: positions that some node is known to have given to its loop.
        generation: of the newest roster whose exchange has begun here; -1: none.
        alike: generation in which nodes began with equal parts and without an exchange; -1: none did.
        pending: no cut is in force: nothing may be taken.
        open: the loop of this node goes on, or will come to this epoch.
        begun: the loop of this node has come to this epoch.
        asks: it goes on from a kept position, or wants to know what those have taken that do.
        kept: that position, until the first cut.
        end: how many items the stream turned out to have; -1: not known, or data with a count.
        first: the first item's hash; empty: not read yet.
        said: what other nodes have seen of the stream: its end and its first item, as here.
        differing: why this stream cannot be the same as another member's.
    """

    key: ShardKey
    name: str
    taken: Taken
    generation: int = -1
    alike: int = -1
    pending: bool = False
    open: bool = True
    begun: bool = False
    asks: bool = False
    kept: KeptEpoch | None = None
    cut: Cut | None = None
    part: ShardPart | None = None
    end: int = -1
    first: str = ""
    said: dict[str, tuple[int, str]] = field(default_factory=dict)
    differing: str = ""
    members: tuple[str, ...] = ()
    told: ShardState | None = None
    heard: dict[str, ShardState] = field(default_factory=dict)
    untold: list[list[int]] = field(default_factory=list)

    @classmethod
    def empty(cls, key: ShardKey, name: str) -> "Ledger":
        return cls(key, name, Taken(key.count))

    def start_alike(self, generation: int, members: Sequence[str]) -> None:
        """The cut of a cell's first roster: nothing is taken, all get equal parts. It needs no message."""
        self.alike, self.members = generation, tuple(members)
        self.cut = Cut(Taken(self.key.count), tuple((name, 0.0) for name in members))

    def freeze(self, generation: int, members: Sequence[str], speed: float, since: int) -> ShardState:
        """Take no more until all ``members`` of ``generation`` have told theirs; returns what to tell them. ``since``:
        generation with which the cell began here."""
        self.generation, self.members, self.pending = generation, tuple(members), True
        self.heard = {name: state for name, state in self.heard.items() if state.generation >= generation}
        self.told = ShardState(
            key=self.key, generation=generation, taken=self._known().packed(), open=self.open, speed=speed,
            goes_on=self.asks, since=since, end=self.end, first=self.first, **self._told_of_kept(),
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
        union = Taken(self.key.count)
        for state in states:
            union.join(unpacked(state.own if exact and state.own else state.taken, self.key.count))
        self.taken.join(union)
        if exact and kept is not None and receivers == self.members:
            assert self.kept is not None
            self.cut = kept
            self.part = ShardPart(kept, part_of(kept, self.key, self.name), self.kept.at)
        else:
            self.cut = Cut(
                union.settled(),
                tuple((name, state.speed) for name, state in zip(self.members, states, strict=True) if state.open),
            )
        self.kept = None
        self.pending = False
        return True

    def _told_of_kept(self) -> dict[str, Any]:
        """What this node has given out itself. The others may know of more, that came after its position was kept."""
        if self.kept is None or self.kept.cut is None:
            return {}
        cut = self.kept.cut
        told = {"cut": cut.hash(), "receivers": tuple(name for name, _ in cut.receivers)}
        if 2 * len(cut.taken.bits) > MAX_MESSAGE_BYTES - (1 << 20):
            return told  # both do not fit into a message
        own = cut.taken.copy()
        own.mark(part_of(cut, self.key, self.name)[: self.kept.at].tolist())
        return told | {"own": own.packed()}

    def _known(self) -> Taken:
        known = self.taken.copy()
        if self.kept is not None:
            known.join(self.kept.taken)
        return known

    def go_on(self, kept: KeptEpoch | None) -> None:
        """Begin where ``kept`` was, with an exchange; None: at what those have left that have such a position."""
        self.asks, self.kept = True, kept

    def join_alike(self, members: Sequence[str]) -> None:
        """Others go on in this epoch, of which this node has had nothing: had it come to it before, its part would have
        been that of the first roster."""
        if self.others_go_on() and self.kept is None and self.cut is None and not self.key.by_speed:
            cut = Cut(Taken(self.key.count), tuple((name, 0.0) for name in members))
            self.kept = KeptEpoch(self.key.epoch, Taken(self.key.count), cut, 0)

    def keep(self) -> KeptEpoch:
        """Where this node is; what :meth:`go_on` takes."""
        if self.kept is not None:
            return replace(self.kept, taken=self._known())
        at = self.part.at if self.part is not None and self.part.cut is self.cut else 0
        return KeptEpoch(self.key.epoch, self.taken.copy(), self.cut, at)

    def others_go_on(self) -> bool:
        """From kept positions."""
        return any(state.goes_on for state in self.heard.values())

    def next_of(self, part: ShardPart, size: int) -> "tuple[Positions, int]":
        """The next ``size`` positions of ``part``, without those that are taken all the same (by a joiner that came
        before this node had told its kept position); and where the part goes on then."""
        import numpy

        found, at = part.positions[:0], part.at
        while len(found) < size and at < len(part.positions):
            more = part.positions[at : at + size - len(found)]
            if self.end >= 0:
                more = more[more < self.end]
                if not len(more):
                    break
            at += len(more)
            free = more[[position not in self.taken for position in more.tolist()]]
            found = numpy.concatenate([found, free]) if len(found) else free
        return found, at

    def all_taken(self) -> bool:
        return (self.key.count or self.end) >= 0 and self.taken.all_below(self.key.count or self.end)

    def mark_over(self) -> None:
        """All of this epoch is taken."""
        if self.key.count:
            self.taken.mark_all()
        else:
            self.end = 0

    def hear_of_stream(self, sender: str, end: int, first: str) -> None:
        """What another node has seen of the stream, which must be the same here, also where it comes to it later."""
        self.said[sender] = end, first or self.said.get(sender, (-1, ""))[1]
        if first and self.first and first != self.first:
            what = "its files have other names or another order" if self.key.count else "its first item is another one"
            self.differing = f"{what} on {sender!r} than here"
        elif end > 0 and self.end > 0 and end != self.end:
            self.differing = f"it has {end} items on {sender!r}, and {self.end} here"
        elif end >= 0 and self.end < 0:
            self.end = end

    def read_through(self) -> bool:
        """This node has given out its whole part of the cut in force."""
        part = self.part
        return not self.pending and part is not None and part.cut is self.cut and part.done


def members_of(key: ShardKey, roster: Roster) -> list[str]:
    """Names of the nodes among which the data is divided, in rank order."""
    names = [node.name for node in sorted(roster.nodes, key=lambda node: node.rank)]
    return [name for name in names if name in key.among] if key.among else names
