"""Who waits for each other in vain."""

import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.delivery import Delivery
from notebook_cluster.protocol.node import Blocked, EndWait
from notebook_cluster.rounds.leader.arrivals import Gathering

STANDS_FOR = 2.0
"""Seconds that a circle of the same waits must last."""
HEARD_WITHIN = 3.0
"""Seconds: a wait is told every second; of a node that says nothing for longer nothing is known."""
_MOST_PLACE = 160
_MOST_NAMES = 6
_WAY_OUT = (
    " (a node that has left its loop over nc.shard, or is in sync.finish(), need not be asked: nc.should_stop and "
    "nc.mean_metrics go on without it)"
)


class Deadlocks:
    """Nodes that wait for each other in different calls: found here, where all waits are known, and ended.

    ``if sync.step(): nc.all_reduce(metric)`` with unequal batches leaves one node in a collective, for the other, and
    that one in a round, for the first. Only such a circle is an error. Whoever computes, sleeps, is lost or coming back
    says no wait, so nobody who waits for it is in a circle. Every circle has a round in it, for collectives are counted
    and a node waits only for those that have begun fewer, or a decision, of which, as of what a round lacks, this
    process knows at first hand. So a circle does not go away by itself, however old what the nodes said is; it must
    stand for a while all the same.
    """

    def __init__(
        self,
        core: Core,
        delivery: Delivery,
        *,
        gatherings: Callable[[], dict[str, Gathering]],
        was_interrupted: Callable[[int], bool],
        undecided: Callable[[str], list[str]] = lambda node: [],
    ) -> None:
        """``gatherings()``: the jobs whose next round waits for somebody; ``was_interrupted(cell)``: it was stopped;
        ``undecided(node)``: for whom its ``should_stop`` or ``mean_metrics`` waits."""
        self._core = core
        self._delivery = delivery
        self._gatherings = gatherings
        self._was_interrupted = was_interrupted
        self._undecided = undecided
        self._waits: dict[str, tuple[float, int, Blocked]] = {}
        """Node -> when it said so last, its incarnation, what it said."""
        self._since: dict[frozenset[tuple[str, int]], float] = {}
        """Circle, as nodes and the numbers of their waits -> since when it stands; infinite: it was ended."""

    def on_blocked(self, node: str, incarnation: int, message: Blocked) -> None:
        if message.serial:
            # Looked through at every tick: names that mean nobody, or the same one, are not kept.
            missing = [name for name in dict.fromkeys(message.missing) if name in self._core.state.nodes]
            self._waits[node] = (time.monotonic(), incarnation, replace(message, missing=missing))
        else:
            self._waits.pop(node, None)

    def tick(self, now: float) -> None:
        """A few times a second."""
        if len(self._waits) < 2:
            self._since.clear()
            return
        waits = self._current(now)
        undecided = {name: self._undecided(name) for name, wait in waits.items() if wait.decision}
        found = circles(waits, self._gatherings(), undecided) if len(waits) > 1 else []
        keys = {frozenset((name, waits[name].serial) for name in names): names for names in found}
        self._since = {key: self._since.get(key, now) for key in keys}
        for key, names in keys.items():
            if now - self._since[key] >= STANDS_FOR:
                self._since[key] = float("inf")
                self._end({name: waits[name] for name in names})

    def in_rounds(self) -> dict[str, frozenset[str]]:
        """Nodes that have waited in a round for a moment, and for whom."""
        found, lacking = {}, self._gatherings()
        for name, wait in self._current(time.monotonic()).items():
            gathering = lacking.get(wait.job) if wait.job else None
            if gathering is not None and gathering.round >= wait.round and name in gathering.here:
                found[name] = gathering.missing
        return found

    def _current(self, now: float) -> dict[str, Blocked]:
        """The waits of nodes that are in the running cell and were heard a moment ago."""
        cell, nodes = self._core.state.running(), self._core.state.nodes
        if cell is None or self._was_interrupted(cell.id):
            return {}
        for name, (said, incarnation, message) in list(self._waits.items()):
            node = nodes.get(name)
            known = node is not None and node.is_in and node.incarnation == incarnation
            if not known or now - said > HEARD_WITHIN or cell.nodes.get(name) != "running" or message.cell != cell.id:
                del self._waits[name]
        return {name: message for name, (_, _, message) in self._waits.items()}

    def _end(self, waits: dict[str, Blocked]) -> None:
        reason = text_of(waits)
        self._core.tell("error", reason)
        # Who is in the finish of a sync object made no call too many: it ends when the others have left the cell.
        in_code = [name for name, wait in waits.items() if not wait.at_end] or list(waits)
        for name in in_code:
            wait = waits[name]
            self._delivery.to_node(name, EndWait(cell=wait.cell, serial=wait.serial, reason=reason))


def circles(
    waits: Mapping[str, Blocked],
    rounds: Mapping[str, Gathering],
    undecided: Mapping[str, Collection[str]] | None = None,
) -> list[list[str]]:
    """Groups of nodes in which each waits, by one way or another, for every other one, in order of their names."""
    needs = {name: _needs(name, waits, rounds, undecided or {}) for name in waits}
    reach = {name: _reached(name, needs) for name in waits}
    groups = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in waits if name in reach[name]
    }
    return sorted(sorted(group) for group in groups)


def _needs(
    name: str,
    waits: Mapping[str, Blocked],
    rounds: Mapping[str, Gathering],
    undecided: Mapping[str, Collection[str]],
) -> set[str]:
    """Of those that are blocked themselves, whom the wait of ``name`` needs for something that they give only in
    another call than the one they are in."""
    wait = waits[name]
    if wait.decision:
        return {other for other in undecided.get(name, ()) if other in waits}
    if not wait.job:
        return {
            other
            for other in wait.missing
            if other != name and other in waits and waits[other].operations < wait.operation
        }
    gathering = rounds.get(wait.job)
    # With a quorum its work may have missed the round that it began to wait for, and be there for the next one.
    if gathering is None or gathering.round < wait.round or name not in gathering.here:
        return set()
    needed = {other for other in gathering.missing if other in waits and waits[other].job != wait.job}
    return set() if gathering.any_will_do and needed != gathering.missing else needed


def _reached(name: str, needs: Mapping[str, Collection[str]]) -> set[str]:
    """Everybody on whom it depends; itself only in a circle."""
    found: set[str] = set()
    new = list(needs[name])
    while new:
        other = new.pop()
        if other not in found:
            found.add(other)
            new.extend(needs[other])
    return found


class _Group(NamedTuple):
    names: list[str]
    wait: Blocked


def text_of(waits: Mapping[str, Blocked]) -> str:
    """One line that says where each node waits, and what to do."""
    groups: dict[tuple[str, str], _Group] = {}
    for name in sorted(waits):
        wait = waits[name]
        groups.setdefault((_what(wait), wait.place), _Group([], wait)).names.append(name)
    parts = []
    for (what, place), group in groups.items():
        names = ", ".join(group.names[:_MOST_NAMES])
        more = f" and {len(group.names) - _MOST_NAMES} more" if len(group.names) > _MOST_NAMES else ""
        verb = "waits" if len(group.names) == 1 else "wait"
        shown = "".join(letter for letter in place[:_MOST_PLACE] if letter.isprintable())
        parts.append(f"{names}{more} {verb} {what} ({shown})")
    nobody = "neither" if len(waits) == 2 else "none of them"
    text = f"{', '.join(parts)}: {nobody} can go on: make the same calls on every node, as often and in the same order"
    return text + (_WAY_OUT if any(wait.decision for wait in waits.values()) else "")


def _what(wait: Blocked) -> str:
    if wait.job:
        return f"for round {wait.round} of {wait.job!r}"
    name = "".join(letter for letter in wait.name[:40] if letter.isprintable())
    return f"in {name} #{wait.decision or wait.operation}"
