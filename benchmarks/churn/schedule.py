"""Which fault comes when: drawn from a seed. What is drawn does not depend on the machine; when a fault comes does,
because the next one waits until a round was committed since the last one began, so that a gap between two rounds has
one cause.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.churn.faults import DESK, KINDS, Course, Fault, Stuck, World, restarted
from benchmarks.churn.hosts import Hosts

TICK = 0.05
MOST_AT_ONCE = 2
SPACING = 1.0, 4.0
"""Seconds between the commit after a fault and the next fault."""


class Schedule:
    """Plays faults, a few at a time, as long as it is told to."""

    def __init__(self, world: World, draw: random.Random, kinds: Sequence[str] = tuple(KINDS)) -> None:
        self.world, self._draw, self._kinds = world, draw, kinds
        self.faults: list[Fault] = []
        self.troubles: list[str] = []
        """What did not go on again."""
        self._active: list[tuple[Fault, Course]] = []
        self._not_before = 0.0
        self._round = 0
        """The last one that was committed when the newest fault began."""
        self._bag: list[str] = []
        self._mourned: set[tuple[str, int]] = set()
        """Nodes and incarnations that have ended by themselves."""

    @property
    def busy(self) -> bool:
        """Some fault is not over."""
        return bool(self._active)

    def tick(self, *, begin: bool) -> None:
        """Go on with what is under way, and ``begin`` another fault if it is time."""
        self._look_after_the_dead()
        for fault, course in list(self._active):
            try:
                next(course)
            except StopIteration:
                self._over(fault, course)
            except Stuck as error:
                self.troubles.append(f"{fault.kind} {fault.victim}: {error}")
                self._over(fault, course)
        if begin and self._may_begin():
            self._begin()

    def _over(self, fault: Fault, course: Course) -> None:
        fault.over = time.monotonic()
        fault.healed = fault.healed or fault.over
        self._active.remove((fault, course))

    def _look_after_the_dead(self) -> None:
        """A kernel that nobody has ended: it is told with its last words, and started again."""
        taken = {fault.victim for fault, _ in self._active}
        for node, (condition, incarnation, reason, last_words) in self.world.state.get("nodes", {}).items():
            here, key = self.world.kernel(node), (node, incarnation)
            known = here.incarnation in (0, incarnation) and here.pid not in self.world.ended  # else the state is old
            if condition == "dead" and known and node not in taken and key not in self._mourned:
                self._mourned.add(key)
                self.world.ended.add(here.pid)
                self.troubles.append(f"{node} ended by itself: {reason}; {' / '.join(last_words[-5:])}")
                fault = Fault("ended by itself", node, time.monotonic())
                self._active.append((fault, restarted(self.world, fault)))

    def _may_begin(self) -> bool:
        now = time.monotonic()
        if len(self._active) >= MOST_AT_ONCE or not self.world.state:
            return False
        round = self.world.last_round()
        self._round = self._round if round >= self._round else 0  # of another leg
        if self.faults and round <= self._round:
            return False
        if not self._not_before:
            self._not_before = now + self._draw.uniform(*SPACING)
        return now >= self._not_before

    def _begin(self) -> None:
        kind, victim = self._next()
        if not kind:
            return
        self._not_before, self._round = 0.0, self.world.last_round()
        fault = Fault(kind, victim, time.monotonic())
        self.faults.append(fault)
        self._active.append((fault, KINDS[kind].course(self.world, fault)))
        self.tick(begin=False)

    def _next(self) -> tuple[str, str]:
        """The next kind in the bag that somebody can be befallen by now. Each kind comes as often as its weight says
        before the bag is filled again."""
        if not self._bag:
            self._bag = [name for name in self._kinds for _ in range(KINDS[name].weight)]
            self._draw.shuffle(self._bag)
        for name in self._bag:
            victims = self._victims(name)
            if victims:
                self._bag.remove(name)
                return name, self._draw.choice(victims)
        return "", ""

    def _victims(self, name: str) -> list[str]:
        """Those who are well; not the last two nodes that are, for somebody has to hold the state."""
        kind, hosts = KINDS[name], self.world.hosts
        taken = {fault.victim for fault, _ in self._active}
        if kind.victims == DESK:
            return [] if any(fault.victim == DESK for fault, _ in self._active) else [DESK]
        leads = any(fault.kind == "hand over" for fault, _ in self._active)
        if name == "peer leaves" and leads:
            return []  # with the sharing of the peer that leads the cluster would end
        well = [node for node in hosts.nodes if node not in taken and self._is_well(hosts, node)]
        if kind.disturbs and len(well) <= 2:
            return []
        return [node for node in well if kind.victims == "nodes" or node in hosts.peers]

    def _is_well(self, hosts: Hosts, node: str) -> bool:
        """In a round a moment ago."""
        return self.world.last_commit() - hosts.progress(node).counted_at < 5.0


class StateWatch:
    """Keeps ``world.state`` up to date; the answers come when they come."""

    def __init__(self, world: World, on_events: Callable[[list[str]], None]) -> None:
        self._world, self._on_events = world, on_events
        self._asked: Any = None
        self._next = 0.0
        self._told: set[tuple[float, str]] = set()

    def tick(self) -> None:
        """Take an answer, ask again."""
        if self._asked is not None and self._asked.done():
            asked, self._asked = self._asked, None
            if asked.exception() is None:
                self._world.state = asked.result()
                self._tell()
            else:
                self._on_events([f"no state: {asked.exception()}"])
        if self._asked is None and time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.3
            self._asked = self._world.hosts.desk.ask("state")

    def _tell(self) -> None:
        new = [(when, text) for when, text in self._world.state["events"] if (when, text) not in self._told]
        self._told = {(when, text) for when, text in self._world.state["events"]}
        self._on_events([text for _, text in new])
