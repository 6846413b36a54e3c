"""Whose answers make one call, when it is decided, and what comes of it. No clock, no sockets, no threads.

One process decides, so a call has one result. A call is decided when every node that takes part either waits in it, or
is known to make no such call any more:

- it waits further on in the code (in a collective, in a finish, in a later call), so it has left the loop;
- it has ended the cell, is lost, or makes no progress;
- it waits in a round that needs one of those who ask. It will make the call later, so a vote counts it as a no, and a
  stop that is decided meanwhile is the answer of its next call there.

Calls of two nodes are one call when both were made at the same line of code, or the same call at the same place: a node
may be in its second epoch while another is in its first. Of different calls the one that comes first in the code is
decided first. Where that cannot be said nodes that were together until then made different calls, which is an error;
of a node that joined, or was left out before, the steps have other numbers, and the call that comes more seldom is
decided first, without those who are in the other one.

A node that joins the running cell is waited for from its first call with the others on. Where they passed before it
came, outside of loops, it decides alone. A stop that was decided before it came holds for it too.

A coordinator that was started again first hears all nodes. What one of them was told is told to the others of that
call; nothing else of before can matter.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from notebook_cluster.coordinator.decisions.results import difference, mean_of, signature, vote
from notebook_cluster.protocol.decisions import SHOULD_STOP, Ask, Decided, DecidedStop, DecisionState

Send = tuple[str, Decided]
"""A node, and what it is told."""

_MOST_KEPT = 256
"""Stops and sites of a cell that are kept."""


@dataclass
class DecidingNode:
    """What is known of one process of a node."""

    incarnation: int
    taking_part: bool
    """The others wait for it."""
    shifted: bool
    """It was not in all calls that the others made."""
    present: bool = True
    path: list[int] = field(default_factory=lambda: [0])
    fence: list[int] = field(default_factory=list)
    """The furthest place at which it waited in a call of all nodes; empty: nowhere."""
    asked: Ask | None = None
    answer: tuple[int, Decided] | None = None
    """The last call that was answered, and how: a call may come twice."""
    told: set[int] = field(default_factory=set)
    """Numbers of the stops that it knows."""
    conflict: str = ""
    """Why its next call cannot be answered."""

    def is_past(self, ask: Ask) -> bool:
        """Whether it will make the call ``ask`` no more."""
        return self.fence > ask.path or (self.asked is not None and self.asked.path > ask.path)


class DecisionMachine:
    """The decisions of one cell. What returns a list returns what is to be sent.

    Args:
        cell: its number.
        members: names and incarnations, in rank order.
        restarted: another coordinator led this cell before: every member has to say first what it knows.
        numbers_from: larger than any number that a coordinator before this one gave.
    """

    def __init__(
        self, cell: int, members: Iterable[tuple[str, int]], *, restarted: bool = False, numbers_from: int = 0
    ) -> None:
        self.cell = cell
        self._members = {name: DecidingNode(incarnation, True, restarted) for name, incarnation in members}
        self._unheard = set(self._members) if restarted else set()
        self._from = self._number = numbers_from
        self._adopted = 0
        """The highest number of a former coordinator that was heard of in time."""
        self._reported: dict[int, Decided] = {}
        self._stops: dict[int, DecidedStop] = {}
        self._made: Counter[str] = Counter()
        """How often calls of a site were decided."""

    # ---- who is there

    def add(self, node: str, incarnation: int) -> None:
        """``node`` begins the cell with those that are here."""
        self._members[node] = DecidingNode(incarnation, True, False)

    def joined(self, node: str, incarnation: int) -> list[Send]:
        """``node`` runs the cell that others have begun: a new process, or one that was lost and is back."""
        member = self._members.get(node)
        if member is None or member.incarnation != incarnation:
            self._members[node] = DecidingNode(incarnation, False, True)
        else:
            member.present = member.shifted = True
        return self._settle()

    def left(self, node: str) -> list[Send]:
        """``node`` has ended the cell, or is lost: what it answered to an open call is not counted."""
        member = self._members.get(node)
        if member is not None:
            member.present, member.asked = False, None
        self._unheard.discard(node)
        return self._settle()

    # ---- what nodes say

    def on_ask(self, node: str, ask: Ask) -> list[Send]:
        member = self._member(node, ask.cell)
        if member is None:
            return []
        member.asked = ask
        member.path = max(member.path, ask.path)
        return self._settle()

    def on_withdrawn(self, node: str, cell: int, serial: int) -> None:
        member = self._member(node, cell)
        if member is not None and member.asked is not None and member.asked.serial == serial:
            member.asked = None

    def on_place(self, node: str, cell: int, path: list[int], fence: bool) -> list[Send]:
        member = self._member(node, cell)
        if member is None:
            return []
        member.path = max(member.path, path)
        if fence:
            member.fence = max(member.fence, path)
        return self._settle()

    def on_state(self, node: str, state: DecisionState) -> list[Send]:
        """What a node knows; of another cell: it has not begun this one, or has ended it."""
        member = self._member(node, state.cell)
        if member is not None:
            member.path, member.fence = max(member.path, state.path), max(member.fence, state.fence)
            member.taking_part = member.taking_part and state.taking_part
            for stop in state.stops:
                self._stops.setdefault(stop.number, stop)
                member.told.add(stop.number)
            self._hear(node, member, state.known)
            member.asked = state.asked
        self._unheard.discard(node)
        return self._settle()

    def _hear(self, node: str, member: DecidingNode, known: list[Decided]) -> None:
        """Results that a former coordinator gave. Who was away while this one began to decide may know one that nobody
        told of in time."""
        for decided in known:
            if decided.number > self._from:
                continue
            if self._unheard:
                self._adopted = max(self._adopted, decided.number)
                self._reported[decided.number] = decided
            elif decided.number > self._adopted and len(decided.serials) > 1:
                member.conflict = (
                    f"the coordinator was restarted while {node!r} was away, and the others decided again, without "
                    "knowing of it, what this node had been told: run the cell again"
                )

    # ---- what is asked of it

    def look(self, silent: frozenset[str], in_rounds: Mapping[str, frozenset[str]]) -> list[Send]:
        """Decide without those that make no progress, and those that wait in a round for one who asks.

        Args:
            silent: nodes that make no progress.
            in_rounds: nodes that wait in a round, and for whom.
        """
        return self._settle(silent, in_rounds)

    def missing(self, node: str) -> list[str]:
        """The nodes whose answer the call of ``node`` waits for."""
        member = self._members.get(node)
        ask = member.asked if member is not None else None
        return [] if ask is None else [name for name in self._needed(ask) if name != node]

    def asking(self) -> dict[str, Ask]:
        """The calls that are open, by node."""
        return {name: row.asked for name, row in self._members.items() if row.present and row.asked is not None}

    # ---- inside

    def _member(self, node: str, cell: int) -> DecidingNode | None:
        member = self._members.get(node)
        return member if member is not None and member.present and cell == self.cell else None

    def _settle(
        self, silent: frozenset[str] = frozenset(), in_rounds: Mapping[str, frozenset[str]] | None = None
    ) -> list[Send]:
        """Decide what can be."""
        sends: list[Send] = []
        while not self._unheard:
            more = self._next(silent, in_rounds or {})
            if not more:
                break
            sends += more
        return sends

    def _next(self, silent: frozenset[str], in_rounds: Mapping[str, frozenset[str]]) -> list[Send]:
        asking = self.asking()
        for node, ask in asking.items():
            answer = self._known_answer(node, ask)
            if answer is not None:
                return [self._tell(node, answer)]
        for node, ask in asking.items():
            if self._catches_up(node, ask):
                return self._decide({node: ask}, 0, alone=True)
        if not asking:
            return []
        first = min(asking.values(), key=lambda ask: ask.path)
        others, error = self._different(first, asking)
        if others and not error:
            first = min(others.values(), key=lambda ask: self._made[ask.site])
        group = {node: ask for node, ask in asking.items() if _is_one_call(ask, first)}
        needed = set(self._needed(first))
        later = {name for name in needed if in_rounds.get(name, frozenset()) & group.keys()} | (needed & others.keys())
        if needed - silent - later:
            return []
        if error:
            decided = self._decided(others, error=error)
            return [self._tell(node, decided) for node in others]
        for node in (needed & silent) | later:
            self._members[node].shifted = True
        for node in group:
            self._members[node].taking_part = True
        return self._decide(group, len(later))

    def _different(self, first: Ask, asking: Mapping[str, Ask]) -> tuple[dict[str, Ask], str]:
        """The calls at the place of ``first``, if they are not all the same; and the error, if they had to be."""
        here = {node: ask for node, ask in asking.items() if ask.path == first.path}
        if len({signature(ask) for ask in here.values()}) < 2:
            return {}, ""
        return here, difference({node: ask for node, ask in here.items() if not self._members[node].shifted})

    def _known_answer(self, node: str, ask: Ask) -> Decided | None:
        """What the node is to be told at once: what was decided with it, or a stop that was decided without it."""
        member = self._members[node]
        if member.conflict:
            return Decided(cell=self.cell, number=0, serials={}, serial=ask.serial, error=member.conflict)
        if member.answer is not None and member.answer[0] == ask.serial:
            return member.answer[1]
        for decided in self._reported.values():
            if decided.serials.get(node) == ask.serial:
                return decided
        if ask.name == SHOULD_STOP:
            for stop in self._stops.values():
                if stop.number not in member.told and stop.site == ask.site and ask.path <= stop.path:
                    return Decided(
                        cell=self.cell, number=stop.number, serials={}, serial=ask.serial, stop=True, site=stop.site,
                        path=stop.path,
                    )  # fmt: skip
        return None

    def _catches_up(self, node: str, ask: Ask) -> bool:
        """Whether a node that joined is where all others have passed, outside of loops."""
        others = [other for other in self._members.values() if other.present and other.taking_part]
        new = not self._members[node].taking_part and len(ask.path) == 1
        return new and bool(others) and all(other.path > ask.path for other in others)

    def _needed(self, ask: Ask) -> list[str]:
        """The nodes that have to answer ``ask``, or be past it, and have done neither."""
        return [
            name
            for name, member in self._members.items()
            if member.present
            and member.taking_part
            and not member.is_past(ask)
            and not (member.asked is not None and _is_one_call(member.asked, ask))
        ]

    def _decide(self, group: dict[str, Ask], later: int, alone: bool = False) -> list[Send]:
        one = next(iter(group.values()))
        self._made[one.site] += 1
        if len(self._made) > _MOST_KEPT:
            del self._made[next(iter(self._made))]
        if error := difference(group):
            decided = self._decided(group, error=error)
        elif one.name == SHOULD_STOP:
            stop = vote(one.by, [ask.flag for ask in group.values()], later)
            decided = self._decided(group, stop=stop, site=one.site if stop else "", path=_furthest(group, stop))
            if stop and not alone:
                self._keep_stop(decided)
        else:
            means, weight, trouble = mean_of(group)
            decided = self._decided(group, means=means, weight=weight, trouble=trouble)
        return [self._tell(node, decided) for node in group]

    def _decided(self, group: Mapping[str, Ask], **result: object) -> Decided:
        self._number += 1
        serials = {node: ask.serial for node, ask in group.items()}
        return replace(Decided(cell=self.cell, number=self._number, serials=serials), **result)

    def _keep_stop(self, decided: Decided) -> None:
        self._stops[decided.number] = DecidedStop(number=decided.number, site=decided.site, path=decided.path)
        if len(self._stops) > _MOST_KEPT:
            del self._stops[next(iter(self._stops))]

    def _tell(self, node: str, decided: Decided) -> Send:
        member = self._members[node]
        if member.asked is not None:
            member.answer = member.asked.serial, decided
        member.asked = None
        if decided.stop:
            member.told.add(decided.number)
        return node, decided


def _is_one_call(ask: Ask, other: Ask) -> bool:
    return ask.site == other.site or (ask.path == other.path and signature(ask) == signature(other))


def _furthest(group: Mapping[str, Ask], stop: bool) -> list[int]:
    return max(ask.path for ask in group.values()) if stop else []
