"""Machines of unlike speed: rounds by the clock, quorum and grace, settings that change in mid run."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.protocol.rounds import Applied, Commit, Seal
from notebook_cluster.rounds.numerics.outer import bits_float
from notebook_cluster.training.settings.schedule import Schedule, interval
from tests.cluster_in_process import Cluster, Node, stepped  # noqa: F401
from tests.conftest import wait_until
from tests.test_training import assert_equal_models, batch, build, flat, train

pytestmark = pytest.mark.usefixtures("stepped")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# ---- boundaries ------------------------------------------------------------------------------------------------


def test_a_boundary_is_after_every_steps_not_one_more() -> None:
    schedule, due = Schedule(3), []
    for step in range(1, 10):
        schedule.count()
        if schedule.is_due(0):
            due.append(step)
            schedule.boundary()
    assert due == [3, 6, 9]


@pytest.mark.parametrize(("every", "fragments"), [(100, 3), (30, 4), (7, 7), (5, 1)])
def test_boundaries_of_fragments_are_spread_evenly_and_add_up(every: int, fragments: int) -> None:
    steps = [interval(every, fragments, fragment) for fragment in range(fragments)]
    assert sum(steps) == every
    assert max(steps) - min(steps) <= 1


def test_seconds_count_from_the_last_round() -> None:
    clock = Clock()
    schedule = Schedule(nc.Seconds(30), clock=clock)
    clock.now = 29.9
    schedule.count()
    assert not schedule.is_due(0)
    clock.now = 31.0
    assert schedule.is_due(0)
    schedule.boundary()
    clock.now = 45.0  # the round took so long
    schedule.applied()
    clock.now = 74.0
    assert not schedule.is_due(0)
    clock.now = 75.0
    assert schedule.is_due(0)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "30", True])
def test_impossible_seconds_are_named(value: Any) -> None:
    with pytest.raises(ValueError, match=r"use a number of seconds above 0, for example nc\.Seconds\(30\)"):
        nc.Seconds(value)


def test_with_seconds_each_node_brings_the_steps_it_could_take_and_all_end_equal(tmp_path: Path) -> None:
    steps: dict[str, list[int]] = {"fast": [], "slow": []}
    weights: list[float] = []
    slow_down = threading.Event()

    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=nc.Seconds(0.2))
        step = 0
        while sync.round < 3:
            loss = train(model, optimizer, batch(step))
            slow_down.wait(0.05 if node.name == "slow" else 0.005)
            sync.step(loss, samples=8)
            step += 1
        return model

    def watch(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Applied):
            steps[node].append(message.steps)
        elif isinstance(message, Seal) and node == "slow":
            weights.append(bits_float(message.members[1].weight_bits))

    with Cluster(["fast", "slow"], tmp_path) as cluster:
        cluster.watch = watch
        assert_equal_models(cluster.run(cell))
    assert min(steps["slow"][:3]) >= 1
    assert sum(steps["fast"][:3]) > sum(steps["slow"][:3])
    assert sum(weights[:3]) < 1.5


# ---- quorum and grace ------------------------------------------------------------------------------------------


def test_a_slow_node_comes_at_its_next_step_when_a_quorum_waits(tmp_path: Path) -> None:
    """One node is held in the middle of its steps until the others wait for it: it brings the steps it has."""
    first: dict[str, int] = {}
    ready, waiting = threading.Barrier(3), threading.Event()

    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=20, quorum=2, grace=30)
        for step in range(40):
            if step == 1:
                ready.wait(60)  # after its first step a node has joined, and is told that a quorum waits
            if node.name == "slow" and step == 5:
                assert waiting.wait(60)
                wait_until(node.job("model").has_notices, 60, "the word that a quorum waits")
            sync.step(train(model, optimizer, batch(step)))
        return model

    def watch(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Applied) and message.round == 1:
            first[node] = message.steps
        if towards == "to" and node == "slow" and type(message).__name__ == "Close":
            waiting.set()

    with Cluster(["a", "b", "slow"], tmp_path) as cluster:
        cluster.watch = watch
        assert_equal_models(cluster.run(cell))
    assert (first["a"], first["b"]) == (20, 20)
    assert 1 <= first["slow"] < 20


def test_nobody_waits_longer_than_the_grace_and_late_work_is_counted_once(tmp_path: Path) -> None:
    counted: dict[str, int] = {}
    without_it: list[int] = []
    go_on = threading.Event()

    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=4, quorum=2, grace=0.1)
        for step in range(24):
            if node.name == "late" and step == 0:
                assert go_on.wait(60)
            sync.step(train(model, optimizer, batch(step)))
        return model

    def watch(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Applied):
            counted[node] = counted.get(node, 0) + message.steps
        if isinstance(message, Commit) and node == "a" and "late" not in message.members:
            without_it.append(message.round)
            if len(without_it) == 2:
                go_on.set()

    with Cluster(["a", "b", "late"], tmp_path) as cluster:
        cluster.watch = watch
        assert_equal_models(cluster.run(cell))
    assert without_it[:2] == [1, 2]
    assert counted == {"a": 24, "b": 24, "late": 24}


# ---- settings that change --------------------------------------------------------------------------------------


def test_outer_settings_set_in_mid_run_are_used_from_the_next_round_on(tmp_path: Path) -> None:
    used: list[tuple[float, float]] = []
    locals_by_round: list[Any] = []

    def cell(node: Node) -> tuple[Any, nn.Module]:
        model = build(seed=3)
        start = flat(model).copy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = nc.DiLoCo(model, every=2, outer_lr=0.75, outer_momentum=0.5)
        for step in range(4):
            if step == 2:
                sync.outer_lr, sync.outer_momentum = 0.25, 0.0
            loss = train(model, optimizer, batch(step))
            if step % 2:
                locals_by_round.append(flat(model).copy())
            sync.step(loss)
        assert (sync.outer_lr, sync.outer_momentum) == (0.25, 0.0)
        return start, model

    def watch(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Seal):
            used.append((bits_float(message.outer.lr_bits), bits_float(message.outer.momentum_bits)))

    with Cluster(["a"], tmp_path) as cluster:
        cluster.watch = watch
        start, model = cluster.run(cell)["a"]
    assert used[:2] == [(0.75, 0.5), (0.25, 0.0)]
    first = start - locals_by_round[0]
    theta = start - np.float32(0.75) * (first + np.float32(0.5) * first)
    theta = theta - np.float32(0.25) * (theta - locals_by_round[1])
    np.testing.assert_array_equal(flat(model), theta)


def test_impossible_outer_settings_are_named_and_change_nothing(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        sync = nc.DiLoCo(build())
        with pytest.raises(ValueError, match="outer_lr=-1: use a number above 0"):
            sync.outer_lr = -1
        with pytest.raises(ValueError, match="outer_momentum=1: use a number from 0 to below 1"):
            sync.outer_momentum = 1
        assert (sync.outer_lr, sync.outer_momentum) == (None, 0.9)

    with Cluster(["a"], tmp_path) as cluster:
        assert cluster.run(cell)["a"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quorum": 0}, "quorum=0: use a number of nodes from 1, a share such as 0.75, or None to wait for all"),
        ({"quorum": 1.5}, "quorum=1.5: use a number of nodes"),
        ({"quorum": True}, "quorum=True: use a number of nodes"),
        ({"grace": 3}, "grace=3 has no meaning while a round waits for all: set quorum= as well"),
        ({"quorum": 2, "grace": -1}, "grace=-1: use a number of seconds from 0"),
    ],
)
def test_impossible_quorums_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(lambda node: nc.LocalSGD(build(), **arguments))["a"]
    assert isinstance(result, ValueError)
    assert message in str(result)
