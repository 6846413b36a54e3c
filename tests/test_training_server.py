"""Data-parallel training in which one node steps for all: as on one machine, and the same bits on all nodes."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.protocol.mesh import JobFrame
from tests.cluster_in_process import Cluster, Node
from tests.test_training import _building, assert_close_in_ulps, assert_equal_models, batch, build, flat, loss_of
from tests.test_training_parallel import NODES, alone, parallel_cell

TOLD = "on {!r} makes the steps, in place of {!r}: the optimizer's state was only there, so it starts afresh"


def told(cluster: Cluster, now: str, before: str) -> list[str]:
    """Lines that say who makes the steps from now on."""
    return [text for _, text in cluster.told if TOLD.format(now, before) in text]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Its state shows in every step."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def server_cell(steps: int, make: Any = momentum, kept: dict[str, Any] | None = None, **arguments: Any) -> Any:
    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        optimizer = make(model)
        sync = nc.DataParallel(model, optimizer, mode="server", **arguments)
        if kept is not None:
            kept[node.name] = sync, model, optimizer
        for step in range(steps):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
        return model

    return cell


def plain(steps: list[list[int]], make: Any = momentum, afresh: int = -1) -> Any:
    """One machine that takes each step with the joined batches of these seeds; before step ``afresh`` its optimiser
    forgets its state."""
    model = build(seed=0)
    optimizer = make(model)
    for step, seeds in enumerate(steps):
        if step == afresh:
            optimizer.state.clear()
        batches = [batch(seed) for seed in seeds]
        optimizer.zero_grad()
        loss_of(model, (torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))).backward()
        optimizer.step()
    return flat(model)


def seeds(steps: range, ranks: tuple[int, ...]) -> list[list[int]]:
    return [[10 * step + rank for rank in ranks] for step in steps]


# ---- the numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_one_node_is_plain_training_bit_for_bit(tmp_path: Path, kind: str) -> None:
    with Cluster(["a"], tmp_path) as cluster:
        model = cluster.run(parallel_cell(8, kind, mode="server"))["a"]
    np.testing.assert_array_equal(flat(model), alone(8, kind, 1)[0])


def test_several_nodes_are_one_machine_with_all_their_batches(tmp_path: Path) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(parallel_cell(6, "SGD", mode="server"))
    assert_equal_models(results)
    expected, largest = alone(6, "SGD", 3)
    assert_close_in_ulps(flat(results["a"]), expected, largest + 0.1, ulps=2 * 6)


def test_only_the_lowest_rank_ever_steps_and_all_agree_after_every_step(tmp_path: Path) -> None:
    class Unlike(torch.optim.AdamW):
        def step(self, *arguments: Any) -> Any:
            raise AssertionError("an optimiser that computes otherwise must not step")

    hashes: dict[str, list[str]] = {}
    models: dict[str, list[bytes]] = {}
    state: dict[str, int] = {}

    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        kind = torch.optim.AdamW if node.name == "a" else Unlike
        optimizer = kind(model.parameters(), lr=0.01)
        sync = nc.DataParallel(model, optimizer, mode="server")
        for step in range(6):
            loss_of(model, batch(10 * step + node.rank())).backward()
            done = sync.step(samples=8)
            assert done is not None
            hashes.setdefault(node.name, []).append(done.state_hash)
            models.setdefault(node.name, []).append(flat(model).tobytes())
        state[node.name] = len(optimizer.state)
        return model

    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(cell)
        assert cluster.told == []
    assert_equal_models(results)
    assert hashes["a"] == hashes["b"] == hashes["c"]
    assert len(set(hashes["a"])) == 6
    assert models["a"] == models["b"] == models["c"]
    assert state == {"a": 4, "b": 0, "c": 0}
    np.testing.assert_allclose(flat(results["a"]), alone(6, "AdamW", 3)[0], atol=1e-6)


def test_a_machine_that_rounds_otherwise_holds_the_same_bits(tmp_path: Path) -> None:
    """A step of its own would leave 0 where the others have subnormal numbers."""

    def cell(node: Node) -> nn.Module:
        model = build()
        for tensor in model.parameters():
            nn.init.zeros_(tensor)
        sync = nc.DataParallel(model, torch.optim.SGD(model.parameters(), lr=1e-39), mode="server")
        flushes = node.name == "b" and torch.set_flush_denormal(True)
        try:
            for step in range(3):
                loss_of(model, batch(10 * step + node.rank())).backward()
                sync.step(samples=8)
        finally:
            if flushes:
                torch.set_flush_denormal(False)
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(cell)
        assert cluster.told == []
    assert_equal_models(results)
    assert 0 < np.abs(flat(results["b"])).max() < np.finfo(np.float32).tiny


def test_accumulated_gradients_and_a_rate_by_nodes(tmp_path: Path) -> None:
    def cell(node: Node) -> nn.Module:
        model = build(seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = nc.DataParallel(model, optimizer, mode="server", scale_lr=True, accumulate=2)
        for step in range(8):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
        assert optimizer.param_groups[0]["lr"] == 0.1
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(cell)
    assert_equal_models(results)
    steps = [[20 * step + rank + part for part in (0, 10) for rank in (0, 1)] for step in range(4)]
    expected = plain(steps, lambda model: torch.optim.SGD(model.parameters(), lr=0.2))
    np.testing.assert_allclose(flat(results["a"]), expected, atol=1e-5)


def test_a_scheduler_is_stepped_on_every_node_and_none_of_them_warns(tmp_path: Path) -> None:
    def scheduled(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = momentum(model)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def cell(node: Node) -> nn.Module:
        model = build(seed=0)
        optimizer, scheduler = scheduled(model)
        sync = nc.DataParallel(model, optimizer, mode="server")
        for step in range(6):
            loss_of(model, batch(step)).backward()
            sync.step(samples=8)
            scheduler.step()
        return model

    with warnings.catch_warnings(), Cluster(["a", "b"], tmp_path) as cluster:
        warnings.simplefilter("error")
        results = cluster.run(cell)
    assert_equal_models(results)
    model = build(seed=0)
    optimizer, scheduler = scheduled(model)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(flat(results["a"]), flat(model), atol=1e-6)


def test_lossy_gradients_learn_and_parameters_are_exact(tmp_path: Path) -> None:
    sizes: set[int] = set()

    def measure(sender: str, receiver: str, header: JobFrame) -> bool:
        if header.kind in ("contribution", "mean"):
            sizes.add(header.total if header.kind == "mean" else -header.total)
        return False

    with Cluster(NODES, tmp_path) as cluster:
        cluster.lose = measure
        results = cluster.run(parallel_cell(40, codec="int8", mode="server"))
    assert_equal_models(results)
    data = batch(9_999, 64)
    assert loss_of(results["a"], data).item() < 0.3 * loss_of(build(seed=0), data).item()
    elements = flat(results["a"]).size
    assert max(sizes) == 4 * elements
    assert 0 < -min(sizes) < 1.2 * elements


def test_running_statistics_are_averaged(tmp_path: Path) -> None:
    def norm() -> nn.Module:
        with _building:
            torch.manual_seed(0)
            return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))

    def cell(node: Node) -> Any:
        model = norm()
        sync = nc.DataParallel(model, momentum(model), mode="server")
        loss_of(model, batch(node.rank())).backward()
        sync.step(samples=8)
        return model[0].running_mean.numpy().copy()  # type: ignore[index, union-attr]

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(cell)
    np.testing.assert_array_equal(results["a"], results["b"])
    means = []
    for rank in (0, 1):
        model = norm()
        model(batch(rank)[0])
        means.append(model[0].running_mean.numpy())  # type: ignore[index, union-attr]
    np.testing.assert_allclose(results["a"], np.mean(means, axis=0), atol=1e-6)


def test_a_server_without_data_left_goes_on_stepping_for_the_others(tmp_path: Path) -> None:
    def cell(node: Node) -> nn.Module:
        model = build(seed=0)
        sync = nc.DataParallel(model, momentum(model), mode="server")
        for step in range(2 if node.name == "a" else 6):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
        sync.finish()
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(cell)
        assert cluster.told == []
    assert_equal_models(results)
    expected = plain(seeds(range(2), (0, 1)) + seeds(range(2, 6), (1,)))
    np.testing.assert_allclose(flat(results["a"]), expected, atol=1e-6)


# ---- bad input -------------------------------------------------------------------------------------------------


def test_a_mode_that_is_none_is_named(tmp_path: Path) -> None:
    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(parallel_cell(1, mode="async"))["a"]
    assert isinstance(result, ValueError)
    assert str(result) == "mode='async': use 'allreduce' or 'server'"


def test_nodes_with_different_modes_are_refused(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        model = build()
        nc.DataParallel(model, momentum(model), mode="server" if node.name == "b" else "allreduce")

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(cell)
    assert "'b' has mode=server, 'a' (rank 0) has mode=allreduce: use the same on every node" in str(results["b"])
