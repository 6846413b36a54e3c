"""Decisions of all nodes without kernels: whose answers make one call, and random schedules of the real node's half and
the real coordinator's half, with deaths, nodes that are away, joiners and restarts of the coordinator."""

import math
import random
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from notebook_cluster.coordinator.decisions.machine import DecisionMachine
from notebook_cluster.coordinator.decisions.results import mean_of, vote
from notebook_cluster.node.runtime.decisions import DecisionClient, LoopPlace
from notebook_cluster.protocol import decode, encode
from notebook_cluster.protocol.decisions import Ask, Decided, DecisionQuery, DecisionState, PlaceReached, Withdrawn
from notebook_cluster.protocol.node import FromNodeBody, ToNodeBody
from notebook_cluster.protocol.wire import Message

CELL = 7
Step = tuple[str, Any]


def ask(serial: int, *path: int, site: str = "a", name: str = "should_stop", **more: Any) -> Ask:
    more.setdefault("by", "any" if name == "should_stop" else "")
    return Ask(cell=CELL, serial=serial, path=list(path), site=site, name=name, **more)


def machine(*names: str) -> DecisionMachine:
    return DecisionMachine(CELL, [(name, 1) for name in names])


def told(sends: list[tuple[str, Decided]]) -> dict[str, bool]:
    return {node: decided.stop for node, decided in sends}


# ---- one call at a time


def test_a_call_is_decided_when_all_have_answered_and_the_same_for_all() -> None:
    leader = machine("a", "b", "c")
    assert not leader.on_ask("a", ask(1, 0))
    assert not leader.on_ask("c", ask(1, 0, flag=True))
    assert leader.missing("a") == ["b"]
    sends = leader.on_ask("b", ask(1, 0))
    assert told(sends) == {"a": True, "b": True, "c": True}
    assert len({encode(decided) for _, decided in sends}) == 1


def test_who_waits_further_on_in_the_code_is_left_out_until_the_others_are_there() -> None:
    leader = machine("a", "b")
    leader.on_ask("a", ask(1, 0, 0))
    assert told(leader.on_ask("b", ask(1, 1, site="after"))) == {"a": False}
    assert told(leader.on_ask("a", ask(2, 0, 0, flag=True))) == {"a": True}
    assert told(leader.on_ask("a", ask(3, 1, site="after"))) == {"a": False, "b": False}


def test_a_fence_further_on_counts_for_good_and_one_behind_does_not() -> None:
    leader = machine("a", "b")
    leader.on_ask("a", ask(1, 0))
    assert told(leader.on_place("b", CELL, [1], fence=True)) == {"a": False}  # b is in finish()
    leader.on_place("a", CELL, [1], fence=True)
    assert not leader.on_ask("a", ask(2, 1)), "b has come to the same finish, and may call this as well"
    assert told(leader.on_ask("b", ask(1, 1, flag=True))) == {"a": True, "b": True}


def test_calls_of_one_line_meet_in_different_epochs() -> None:
    leader = machine("a", "b")
    leader.on_ask("a", ask(1, 0, 0))
    assert told(leader.on_ask("b", ask(1, 1, 0, flag=True))) == {"a": True, "b": True}


def test_different_calls_at_one_place_are_an_error_that_names_both() -> None:
    leader = machine("a", "b")
    leader.on_ask("a", ask(1, 0, site="cell 7, line 2"))
    sends = leader.on_ask("b", ask(1, 0, site="cell 7, line 3", name="mean_metrics", metrics={"loss": 1.0}))
    assert {node for node, _ in sends} == {"a", "b"}
    assert "a calls should_stop(by='any') (cell 7, line 2), b calls mean_metrics(loss=) (cell 7, line 3)" in (
        sends[0][1].error
    )


def test_of_a_joiner_in_another_step_the_rarer_call_is_decided_without_the_others() -> None:
    leader = machine("a", "b")
    for serial in (1, 2):
        leader.on_ask("a", ask(serial, 0, 0))
        leader.on_ask("b", ask(serial, 0, 0))
    leader.joined("c", 1)
    rare: dict[str, Any] = {"site": "every tenth", "name": "mean_metrics", "metrics": {"loss": 1.0}}
    for node in "ab":
        leader.on_ask(node, ask(3, 0, 0))
    leader.on_ask("c", ask(1, 0, 0))
    leader.on_ask("a", ask(4, 0, 0, **rare))
    leader.on_ask("c", ask(2, 0, 0))
    sends = leader.on_ask("b", ask(4, 0, 0, **rare))
    assert {node for node, _ in sends} == {"a", "b"}
    assert not sends[0][1].error
    leader.on_ask("a", ask(5, 0, 0))
    assert set(told(leader.on_ask("b", ask(5, 0, 0)))) == {"a", "b", "c"}


def test_a_joiner_is_waited_for_from_its_first_call_and_decides_alone_what_the_others_passed() -> None:
    leader = machine("a", "b")
    for node in "ab":
        leader.on_place(node, CELL, [1, 0], fence=False)
    leader.joined("c", 1)
    leader.on_ask("a", ask(1, 1, 0))
    assert set(told(leader.on_ask("b", ask(1, 1, 0)))) == {"a", "b"}, "c has not called yet"
    assert told(leader.on_ask("c", ask(1, 1, site="after", flag=True))) == {"c": True}
    leader.on_ask("c", ask(2, 1, 0))
    leader.on_ask("a", ask(2, 1, 0))
    assert set(told(leader.on_ask("b", ask(2, 1, 0)))) == {"a", "b", "c"}
    leader.on_ask("a", ask(3, 1, 0))
    assert not leader.on_ask("b", ask(3, 1, 0)), "c takes part from now on"


def test_a_stop_holds_for_those_that_come_to_it_later() -> None:
    leader = machine("a", "b")
    leader.on_ask("a", ask(1, 0, 0, flag=True))
    assert told(leader.look(frozenset(), {"b": frozenset("a")})) == {"a": True}, "b waits in a round for a"
    leader.joined("c", 1)
    assert told(leader.on_ask("c", ask(1, 0, 0))) == {"c": True}
    assert told(leader.on_ask("b", ask(1, 0, 0))) == {"b": True}
    assert not leader.on_ask("b", ask(2, 0, 0)), "once"


def test_a_vote_counts_who_waits_in_a_round_as_a_no() -> None:
    for by, wanted in (("any", True), ("majority", False), ("all", False)):
        leader = machine("a", "b")
        leader.on_ask("a", ask(1, 0, flag=True, by=by))
        assert told(leader.look(frozenset(), {"b": frozenset("a")})) == {"a": wanted}
    assert not machine("a", "b").look(frozenset("b"), {})


def test_an_answer_of_a_node_that_is_lost_before_the_end_is_not_counted() -> None:
    leader = machine("a", "b", "c")
    leader.on_ask("a", ask(1, 0, flag=True))
    leader.on_ask("b", ask(1, 0))
    leader.left("a")
    assert told(leader.on_ask("c", ask(1, 0))) == {"b": False, "c": False}


def test_a_coordinator_that_was_restarted_decides_nothing_before_it_has_heard_all() -> None:
    leader = machine("a", "b")
    leader.on_ask("a", ask(1, 0, 0, flag=True))
    (_, decided), _ = leader.on_ask("b", ask(1, 0, 0))
    again = DecisionMachine(CELL, [("a", 1), ("b", 1)], restarted=True, numbers_from=1 << 32)
    assert not again.on_state("b", DecisionState(ticket=1, cell=CELL, path=[0, 0], asked=ask(1, 0, 0)))
    assert not again.on_ask("a", ask(2, 1)), "it is past b's call, but may know its result"
    sends = again.on_state("a", DecisionState(ticket=1, cell=CELL, path=[1], asked=ask(2, 1), known=[decided]))
    assert sends == [("b", decided)]


def test_who_was_away_while_the_coordinator_was_restarted_and_knows_better_gets_an_error() -> None:
    leader = machine("a", "b")
    leader.on_ask("a", ask(1, 0, flag=True))
    (_, decided), _ = leader.on_ask("b", ask(1, 0))
    again = DecisionMachine(CELL, [("a", 1), ("b", 1)], restarted=True, numbers_from=1 << 32)
    again.left("a")  # it knows the result, b does not
    sends = again.on_state("b", DecisionState(ticket=1, cell=CELL, path=[0], asked=ask(1, 0)))
    assert told(sends) == {"b": False}
    again.joined("a", 1)
    again.on_state("a", DecisionState(ticket=1, cell=CELL, path=[0], known=[decided]))
    ((node, answer),) = again.on_ask("a", ask(2, 0))
    assert node == "a"
    assert "the others decided again" in answer.error


def test_means_are_those_over_all_samples_and_say_what_is_wrong() -> None:
    def answers(*rows: tuple[float, float]) -> dict[str, Ask]:
        return {
            f"n{index}": ask(1, 0, name="mean_metrics", metrics={"loss": value}, weight=weight)
            for index, (value, weight) in enumerate(rows)
        }

    means, weight, trouble = mean_of(answers((1.0, 3), (2.0, 1)))
    assert (means, weight, trouble) == ({"loss": 1.25}, 4.0, [])
    means, weight, trouble = mean_of(answers((math.nan, 0), (2.0, 1)))
    assert (means, trouble) == ({"loss": 2.0}, [])
    means, _, trouble = mean_of(answers((math.nan, 1), (2.0, 1), (math.inf, 1)))
    assert math.isnan(means["loss"])
    assert trouble == ["loss is nan on n0", "loss is inf on n2"]
    means, weight, trouble = mean_of(answers((1.0, 0), (2.0, 0)))
    assert math.isnan(means["loss"])
    assert not weight
    assert "n0, n1 are 0" in trouble[0]
    means, _, _ = mean_of(answers((1e308, 10), (1e308, 10)))
    assert means["loss"] == math.inf or means["loss"] == 1e308
    rows = [(random.Random(index).random(), index + 1.0) for index in range(20)]
    there, back = mean_of(answers(*rows))[0], mean_of(answers(*rows[::-1]))[0]
    assert there == back
    assert [vote("majority", flags, 0) for flags in ([True, False], [True, True, False])] == [False, True]


# ---- random schedules


class Process:
    """One process of a node: the real client, and a program that says what its main thread does next."""

    def __init__(self, name: str, program: Iterator[Step], up: "deque[Message]", *, joined: bool = False) -> None:
        self.name, self.program, self.up = name, program, up
        self.client = DecisionClient(name, lambda message: up.append(decode(encode(message), FromNodeBody)), str)
        self.client.begin_cell(CELL, joined=joined)
        self.places: list[LoopPlace] = []
        self.down: deque[Message] = deque()
        self.outcome: SimpleQueue[Decided | Exception] | None = None
        self.finishes = 0
        self.in_finish = self.ended = False
        self.serial = 0
        self.results: dict[int, Decided] = {}
        self.failed = ""


class World:
    """The coordinator's machine, some processes, and queues between them in which messages wait."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts = {name: [self.random.randint(0, 4) for _ in range(3)] for name in "abcd"}
        self.stopping = self.random.random() < 0.5
        self.live: dict[str, Process] = {}
        self.away: set[str] = set()
        self.starts = 0
        self.incarnations = dict.fromkeys("abcd", 1)
        self.machine = DecisionMachine(CELL, [(name, 1) for name in "abc"])
        for name in "abc":
            self.live[name] = Process(name, self.program(name), deque())

    def program(self, name: str, passed: int = 0) -> Iterator[Step]:
        """Three epochs of a loop over nc.shard with unequal batches, each with a metric behind it, a finish, and a last
        vote. In a loop that others had passed before it joined a node finds no data."""
        own = random.Random(f"{name}{self.counts}")
        for epoch in range(3):
            yield "enter", None
            for _ in range(0 if epoch < passed else self.counts[name][epoch]):
                flag = self.stopping and own.random() < 0.1
                stop = yield "ask", {"name": "should_stop", "site": "in the loop", "by": "any", "flag": flag}
                if stop:
                    break
            yield "leave", None
            yield "ask", {"name": "mean_metrics", "site": "behind it", "metrics": {"loss": own.random()}, "weight": 2.0}
        yield "finish", None
        yield "ask", {"name": "should_stop", "site": "at the end", "by": "all", "flag": True}

    # ---- what may happen

    def happen(self, faults: bool) -> bool:
        moves = [(self.run, name) for name, row in self.live.items() if self.can_run(row)]
        moves += [(self.deliver_up, name) for name, row in self.live.items() if row.up and name not in self.away]
        moves += [(self.deliver_down, name) for name, row in self.live.items() if row.down and name not in self.away]
        if self.away and not faults:
            self.come_back(self.random.choice(sorted(self.away)))
            return True
        if faults and self.random.random() < 0.03:
            self.fault()
            return True
        if not moves:
            return False
        move, name = self.random.choice(moves)
        move(name)
        return True

    def can_run(self, row: Process) -> bool:
        if row.ended:
            return False
        if row.in_finish:
            here = [other for name, other in self.live.items() if name not in self.away or other is row]
            return all(other.ended or other.finishes >= row.finishes for other in here)
        return row.outcome is None or not row.outcome.empty()

    def run(self, name: str) -> None:
        row = self.live[name]
        answer = None
        if row.outcome is not None:
            result = row.outcome.get_nowait()
            row.outcome = None
            assert isinstance(result, Decided)
            if result.error:
                row.failed = result.error
                self.end(row)
                return
            self.check(row, result)
            answer = result.stop
        row.in_finish = False
        try:
            kind, call = row.program.send(answer)  # type: ignore[attr-defined]
        except StopIteration:
            self.end(row)
            return
        if kind == "enter":
            row.places.append(row.client.enter_loop())
        elif kind == "leave":
            row.places.pop().leave()
        elif kind == "finish":
            row.client.enter_finish()
            row.finishes += 1
            row.in_finish = True
        else:
            row.outcome, row.serial = SimpleQueue(), row.serial + 1
            row.client.post(row.outcome, **call)

    def end(self, row: Process) -> None:
        row.ended = True
        row.client.end_cell()
        if row.name not in self.away:
            self.tell(self.machine.left(row.name))

    def check(self, row: Process, result: Decided) -> None:
        """Whoever took part in a call and lives has the same result."""
        row.results[row.serial] = result
        if not result.serials:
            assert result.stop
            return
        for name, serial in result.serials.items():
            other = self.live.get(name)
            known = other.results.get(serial) if other is not None else None
            assert known is None or known == result, (row.name, row.serial, result, known)

    def deliver_up(self, name: str) -> None:
        message = self.live[name].up.popleft()
        match message:
            case Ask():
                self.tell(self.machine.on_ask(name, message))
            case PlaceReached():
                self.tell(self.machine.on_place(name, message.cell, message.path, message.fence))
            case Withdrawn():
                self.machine.on_withdrawn(name, message.cell, message.serial)
            case DecisionState() if message.ticket == self.starts:
                self.tell(self.machine.on_state(name, message))

    def tell(self, sends: list[tuple[str, Decided]]) -> None:
        for node, decided in sends:
            self.live[node].down.append(decode(encode(decided), ToNodeBody))

    def deliver_down(self, name: str) -> None:
        row = self.live[name]
        row.client.on_control(row.down.popleft())

    def fault(self) -> None:
        what = self.random.choice(["kill", "away", "back", "restart", "join"])
        here = [name for name, row in self.live.items() if name not in self.away and not row.ended]
        if what == "kill" and len(here) > 1:
            name = self.random.choice(here)
            del self.live[name]
            self.tell(self.machine.left(name))
        elif what == "away" and len(here) > 1 and not self.machine._unheard:  # else see the test above
            name = self.random.choice(here)
            self.away.add(name)
            self.tell(self.machine.left(name))
        elif what == "back" and self.away:
            self.come_back(self.random.choice(sorted(self.away)))
        elif what == "restart" and not self.away:
            self.restart()
        elif what == "join" and "d" not in self.live and here:
            passed = min(len([1 for serial, got in self.live[name].results.items() if got.means]) for name in here)
            self.live["d"] = Process("d", self.program("d", passed), deque(), joined=True)
            self.incarnations["d"] += 1
            self.tell(self.machine.joined("d", self.incarnations["d"]))

    def come_back(self, name: str) -> None:
        self.away.discard(name)
        if self.live[name].ended:
            return
        self.tell(self.machine.joined(name, self.incarnations[name]))
        self.live[name].down.append(DecisionQuery(ticket=self.starts))

    def restart(self) -> None:
        """What the coordinator had not sent is gone, and it knows nothing but who runs the cell."""
        self.starts += 1
        running = [name for name, row in self.live.items() if not row.ended]
        self.machine = DecisionMachine(
            CELL, [(name, self.incarnations[name]) for name in running], restarted=True,
            numbers_from=self.starts << 32,
        )  # fmt: skip
        for name in running:
            down = self.live[name].down
            while down and self.random.random() < 0.5:
                down.pop()
            down.append(DecisionQuery(ticket=self.starts))


def play(seed: int) -> World:
    world = World(seed)
    for _ in range(world.random.randint(20, 200)):
        world.happen(faults=True)
    while world.happen(faults=False):
        pass
    return world


@pytest.mark.parametrize("first", range(0, 1500, 500))
def test_no_schedule_gives_two_results_for_one_call_or_stands_still(first: int) -> None:
    for seed in range(first, first + 500):
        world = play(seed)
        for row in world.live.values():
            assert (row.ended, row.failed) == (True, ""), (seed, row.name, row.in_finish, world.machine.asking())


def test_stops_of_all_nodes_come_in_the_same_call() -> None:
    """Without faults: who stops in a loop that others are in as well stops with them."""
    stopped = 0
    for seed in range(300):
        world = World(seed)
        while world.happen(faults=False):
            pass
        for row in world.live.values():
            for result in row.results.values():
                if result.stop and result.site == "in the loop":
                    stopped += 1
                    for name, serial in result.serials.items():
                        assert world.live[name].results[serial] == result
    assert stopped > 50
