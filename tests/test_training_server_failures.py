"""One node's optimiser steps for all, and nodes are lost, join, are late or have gradients that are no use."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import Applied, Arrived, Commit, Seal
from notebook_cluster.protocol.runs import Joined
from tests.cluster_in_process import POINTS, Cluster, Node
from tests.test_training import assert_equal_models, batch, build, flat, loss_of
from tests.test_training_parallel import NODES
from tests.test_training_server import momentum, plain, seeds, server_cell, told


@pytest.mark.parametrize(("direction", "kind"), [*POINTS, ("from", Applied)])
@pytest.mark.parametrize("victim", ["a", "c"])
def test_a_node_killed_at_any_point_of_a_step_leaves_the_others_equal(
    tmp_path: Path, direction: str, kind: type, victim: str
) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run_and_lose(victim, direction, kind, 4, server_cell(8))
        assert_equal_models(results)
        assert len(told(cluster, "b", "a")) == (victim == "a")
        assert len(cluster.told) == (victim == "a")


def test_the_next_rank_goes_on_with_a_fresh_optimizer_when_the_server_is_lost(tmp_path: Path) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        ranks = {name: rank for rank, name in enumerate(NODES)}
        cluster.ranks = lambda: ranks  # type: ignore[method-assign]
        cluster.once_at("from", "a", Arrived, 4, lambda: cluster.kill("a"))
        results = cluster.run(server_cell(8))
        results.pop("a")
        assert "from round 4 of 'model'" in told(cluster, "b", "a")[0]
    assert_equal_models(results)
    expected = plain(seeds(range(3), (0, 1, 2)) + seeds(range(3, 8), (1, 2)), afresh=3)
    np.testing.assert_allclose(flat(results["b"]), expected, atol=1e-6)


def test_a_step_that_loses_a_node_while_it_is_made_counts_once(tmp_path: Path) -> None:
    """The optimiser steps again, from the state before, with the gradients of those that are left."""
    calls: list[int] = []
    box: list[Cluster] = []

    class Losing(torch.optim.SGD):
        def step(self, *arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 4:
                box[0].kill("c")
            return super().step(*arguments)

    with Cluster(NODES, tmp_path) as cluster:
        box.append(cluster)
        results = cluster.run(server_cell(6, lambda model: Losing(model.parameters(), lr=0.1, momentum=0.9)))
        results.pop("c")
        assert cluster.told == []
    assert len(calls) == 7
    assert_equal_models(results)
    expected = plain(seeds(range(3), (0, 1, 2)) + seeds(range(3, 6), (0, 1)))
    np.testing.assert_allclose(flat(results["a"]), expected, atol=1e-6)


def test_an_optimizer_that_fails_ends_the_cell_there_and_the_next_rank_goes_on(tmp_path: Path) -> None:
    class Failing(torch.optim.SGD):
        def step(self, *arguments: Any) -> Any:
            if self.state:
                raise RuntimeError("out of memory")
            return super().step(*arguments)

    def cell(node: Node) -> nn.Module:
        kind = Failing if node.name == "a" else torch.optim.SGD
        return server_cell(5, lambda model: kind(model.parameters(), lr=0.1, momentum=0.9))(node)  # type: ignore[no-any-return]

    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(cell)
        assert str(results.pop("a")) == "out of memory"
        assert "from round 2 of 'model'" in told(cluster, "b", "a")[0]
    assert_equal_models(results)
    expected = plain(seeds(range(1), (0, 1, 2)) + seeds(range(1, 5), (1, 2)), afresh=1)
    np.testing.assert_allclose(flat(results["b"]), expected, atol=1e-6)


def test_a_server_that_comes_back_does_not_use_its_old_optimizer_state(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}
    rounds: list[int] = []
    with Cluster(NODES, tmp_path) as cluster:

        def watch(towards: str, node: str, message: Any) -> None:
            if isinstance(message, Commit) and (towards, node) == ("to", "b"):
                rounds.append(message.round)

        cluster.watch = watch
        cluster.once_at("from", "a", Arrived, 4, lambda: cluster.unlink("a"))
        running = cluster.start(server_cell(12, kept=kept))
        running.go()
        assert cluster.wait_for(lambda: bool(rounds) and rounds[-1] >= 5)
        cluster.relink("a")
        results = running.wait()
        assert len(told(cluster, "b", "a")) == 1
        stale = [
            text for _, text in cluster.told if "'a'" in text and "was computed on the parameters of round 3" in text
        ]
        assert len(stale) == 1
        assert len(cluster.told) == 2
    assert_equal_models(results)
    assert {name: len(optimizer.state) for name, (_, _, optimizer) in kept.items()} == {"a": 0, "b": 4, "c": 0}


def test_a_joiner_gets_parameters_only_and_steps_for_all_when_everybody_before_it_is_lost(tmp_path: Path) -> None:
    here, last, parts = threading.Event(), [], set()
    killed: list[bool] = []
    box: list[Cluster] = []

    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sync = nc.DataParallel(model, optimizer, mode="server")
        step = 0
        while not last or sync.round < last[0]:
            loss_of(model, batch(10 * step)).backward()
            sync.step(samples=8)
            step += 1
            if sync.round >= 4:
                here.set()
            if "late" in sync.members and node.name == "late" and not killed:
                killed.append(True)
                assert not optimizer.state
                last.append(sync.round + 5)
                box[0].kill("a")
        assert node.name != "late" or len(optimizer.state) == 4
        return model

    def size(sender: str, receiver: str, header: JobFrame) -> bool:
        if header.kind == "state" and header.name == "optimizer":
            parts.add(header.total)
        return False

    with Cluster(["a"], tmp_path) as cluster:
        box.append(cluster)
        cluster.lose = size
        results = cluster.run_with_newcomer(cell, here)
        assert isinstance(results["late"], nn.Module), results["late"]
        assert len(told(cluster, "late", "a")) == 1
    assert parts == {0}


def test_a_joiner_whose_source_is_lost_at_once_tells_that_it_has_no_optimizer_state(tmp_path: Path) -> None:
    here = threading.Event()

    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        sync = nc.DataParallel(model, momentum(model), mode="server")
        assert node.name == "a" or sync.round > 0
        for step in range(3 if node.name == "late" else 1_000_000):
            loss_of(model, batch(step)).backward()
            sync.step(samples=8)
            here.set()
        return model

    with Cluster(["a"], tmp_path) as cluster:

        def watch(towards: str, node: str, message: Any) -> None:
            if isinstance(message, Joined) and node == "late" and "a" in cluster.nodes:
                cluster.kill("a")

        cluster.watch = watch
        results = cluster.run_with_newcomer(cell, here)
        assert isinstance(results["late"], nn.Module), results["late"]
        texts = [text for _, text in cluster.told if "afresh" in text]
    assert len(texts) == 1
    assert "on 'late' makes the steps, in place of another node" in texts[0]


def test_a_gradient_of_older_parameters_is_dropped_and_named(tmp_path: Path) -> None:
    rounds: list[Any] = []
    with Cluster(NODES, tmp_path) as cluster:

        def watch(towards: str, node: str, message: Any) -> None:
            if isinstance(message, Commit) and (towards, node) == ("to", "a"):
                rounds.append((message.round, tuple(message.members)))

        cluster.watch = watch
        cluster.once_at("to", "c", Seal, 4, lambda: cluster.unlink("c"))
        running = cluster.start(server_cell(12))
        running.go()
        assert cluster.wait_for(lambda: bool(rounds) and rounds[-1][0] >= 5)
        cluster.relink("c")
        results = running.wait()
        texts = [text for _, text in cluster.told]
    assert_equal_models(results)
    assert (4, ("a", "b")) in rounds
    assert len(texts) == 1
    assert "the gradient of 'c' for round" in texts[0]
    assert "was computed on the parameters of round 3, which are no longer those of all: it is not used" in texts[0]


@pytest.mark.parametrize(("mode", "victim"), [("server", "a"), ("server", "b"), ("allreduce", "b")])
def test_a_gradient_with_nan_is_left_out_and_the_optimizer_keeps_its_state(
    tmp_path: Path, mode: str, victim: str, capfd: Any
) -> None:
    def cell(node: Node) -> nn.Module:
        model = build(seed=0)
        sync = nc.DataParallel(model, momentum(model), mode=mode)
        for step in range(5):
            loss = loss_of(model, batch(10 * step + node.rank()))
            (loss * (float("nan") if node.name == victim and step == 2 else 1.0)).backward()
            sync.step(samples=8)
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(cell)
    assert_equal_models(results)
    other = 1 if victim == "a" else 0
    expected = plain(seeds(range(2), (0, 1)) + [[20 + other]] + seeds(range(3, 5), (0, 1)))
    np.testing.assert_allclose(flat(results["a"]), expected, atol=1e-6)
    said = capfd.readouterr().err
    assert f"the work of {victim!r} for round 3 holds NaN or infinity" in said
    assert "state was cleared" not in said


def test_a_step_to_infinity_is_not_taken(tmp_path: Path, capfd: Any) -> None:
    def cell(node: Node) -> nn.Module:
        model = build(seed=0)
        optimizer = momentum(model)
        sync = nc.DataParallel(model, optimizer, mode="server")
        for step in range(5):
            loss_of(model, batch(10 * step + node.rank())).backward()
            optimizer.param_groups[0]["lr"] = float("inf") if step == 2 else 0.1
            sync.step(samples=8)
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(cell)
    assert_equal_models(results)
    steps = seeds(range(5), (0, 1))
    np.testing.assert_allclose(flat(results["a"]), plain(steps[:2] + steps[3:]), atol=1e-6)
    assert "round 3: the optimizer's step leads to NaN or infinity in the parameters and is not taken" in (
        capfd.readouterr().err
    )
