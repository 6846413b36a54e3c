"""Random schedules of kills, stops, cuts, lost frames and coordinator crashes: one state per round, nobody stuck.

``EXPLORER_SCHEDULES=100000`` plays more of them.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.explorer import ATTEMPT_BITS, Broken, World

SCHEDULES = int(os.environ.get("EXPLORER_SCHEDULES", "1500"))
PER_TASK = 250
PATIENCE = max(300, SCHEDULES // 25)
"""Seconds: a slow machine plays more than forty schedules in one."""


def explore(first):
    """Run a stretch of seeds. (what failed, committed rounds, schedules with a second attempt, with VOID, contributions
    that missed their fragment's turn, nodes that were left out because they stood still, records that were lost with a
    machine's power, contributions that a Stop held back)"""
    failures, commits, retried, voided, released, left_out, lost, held = [], 0, 0, 0, 0, 0, 0, 0
    for seed in range(first, first + PER_TASK):
        try:
            world = World(seed).run()
            world.check_end()
        except Exception as error:
            failures.append(f"World({seed}).run(): {type(error).__name__}: {error}")
            continue
        kinds = [record["kind"] for record in world.log]
        commits += kinds.count("commit")
        numbers = [record["seal"]["attempt"] % (1 << ATTEMPT_BITS) for record in world.log if record["kind"] == "seal"]
        retried += any(number > 1 for number in numbers)
        voided += "void" in kinds
        released += world.released
        left_out += world.left_out
        lost += world.lost_records
        held += world.held_back
    return failures, commits, retried, voided, released, left_out, lost, held


@pytest.mark.timeout(PATIENCE)
def test_every_schedule_ends_with_one_state_per_round_and_nobody_stuck():
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        results = list(pool.map(explore, range(0, SCHEDULES, PER_TASK)))
    failures = [failure for result in results for failure in result[0]]
    assert not failures, f"{len(failures)} of {SCHEDULES} schedules, first: " + "; ".join(failures[:3])
    # the schedules are worth something: they do reach the paths that are rare
    sums = (sum(result[i] for result in results) for i in range(1, 8))
    commits, retried, voided, released, left_out, lost, held = sums
    assert commits > 2 * SCHEDULES
    assert retried > SCHEDULES // 20
    assert voided > SCHEDULES // 500
    assert released > SCHEDULES // 500
    assert left_out > SCHEDULES // 20
    assert lost > SCHEDULES // 100
    assert held > SCHEDULES // 200


@pytest.mark.parametrize("seed", [19361, 39046, 75523, 79146])
def test_schedules_of_a_hundred_thousand_that_ended_otherwise_once(seed):
    World(seed).run().check_end()


def test_schedules_in_which_one_node_steps_for_all():
    for seed in range(4000, 4250):
        world = World(seed, gradients=True, served=True).run()
        world.check_end()
        assert all(len(record["commit"]["members"]) == 0 or len(record["slices"]) == 1 for record in commits_of(world))


@pytest.mark.parametrize("share", [0.3, 1.0], ids=["now and then", "always"])
def test_a_state_that_one_node_computes_wrongly_is_never_committed(share):
    """Alone in a round it would be believed, so nothing else goes wrong and nobody is left behind."""
    stopped = 0
    for seed in range(150):
        world = World(seed, nodes=2 + seed % 4, faults=(), gradients=False)
        world.quorum, world.nan, world.again, world.calm = None, 0.0, False, False
        world.unequal = False
        for node in world.nodes.values():
            node.turns = world.turns
        world.wrong = (f"n{seed % 3 % len(world.nodes)}", share)
        world.run()
        ends = {node.state.state_hash for node in world.nodes.values()}
        assert ends <= {record["commit"]["state_hash"] for record in commits_of(world)} | {world.chain[0]}
        stops = [record for record in world.log if record["kind"] == "stop"]
        assert not stops or len(world.nodes) == 2, seed
        stopped += len(stops)
    assert stopped > (30 if share == 1.0 else 0)


def commits_of(world):
    return [record for record in world.log if record["kind"] == "commit"]


def test_without_commit_some_schedules_end_with_two_states_of_one_round():
    """The explorer can see what COMMIT is for: members that apply as soon as they are PREPARED drift apart."""
    apart = 0
    for seed in range(120):
        try:
            World(seed, with_commit=False, faults=("kill", "kill")).run()
        except Broken as broken:
            apart += "two states of round" in str(broken)
    assert apart > 10
