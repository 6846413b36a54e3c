"""``DataParallel(mode="server")`` with MLX models: one node's mlx optimizer steps for all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

mx = pytest.importorskip("mlx.core")
import mlx.optimizers as mlx_optim  # noqa: E402

from notebook_cluster import training as nc  # noqa: E402
from notebook_cluster.protocol.rounds import Applied, Arrived  # noqa: E402
from tests.cluster_in_process import POINTS, Cluster, Node  # noqa: E402
from tests.mlx_models import (  # noqa: E402
    adapted,
    batch,
    give,
    is_mlx,
    loss_and_gradients,
    on_this_thread,
    plain_mlx,
    state_of,
    values,
)
from tests.test_training_server import told  # noqa: E402

NODES = ["ma", "mb", "mc"]


def falling(step: Any) -> Any:
    """A learning rate that another count of steps would show."""
    return 0.05 / (1 + step)


def momentum() -> Any:
    return mlx_optim.SGD(0.05, momentum=0.9)


def equal(results: dict[str, Any]) -> Any:
    """What all of them hold, bit for bit."""
    first, *others = results.values()
    for other in others:
        np.testing.assert_array_equal(first, other)
    return first


def server_cell(steps: range, make: Any = momentum, kept: dict[str, Any] | None = None, **arguments: Any) -> Any:
    def cell(node: Node) -> Any:
        adapter, optimizer = adapted(node), make()
        sync = nc.DataParallel(adapter.model, optimizer, mode="server", **arguments)
        for step in steps:
            loss, given = loss_and_gradients(adapter.model, batch(10 * step + node.rank()))
            sync.step(loss, samples=8, **given)
        if kept is not None:
            kept[node.name] = optimizer
        return adapter.read()

    return on_this_thread(cell)


@pytest.mark.parametrize("make", [momentum, lambda: mlx_optim.AdamW(falling)], ids=["SGD", "AdamW on a schedule"])
def test_one_node_is_plain_training_bit_for_bit(tmp_path: Path, make: Any) -> None:
    with Cluster(["ma"], tmp_path) as cluster:
        found = cluster.run(server_cell(range(6), make))["ma"]
    np.testing.assert_array_equal(found, _read(plain_mlx(0, make(), range(6))))


def test_several_nodes_are_one_machine_and_one_of_them_has_the_moments(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}
    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(server_cell(range(6), lambda: mlx_optim.Adam(0.01), kept))
        assert cluster.told == []
    expected = _read(plain_mlx(0, mlx_optim.Adam(0.01), range(6), parts=3))
    np.testing.assert_allclose(equal(results), expected, atol=1e-5)
    gathered = {name: [key for key in state_of(optimizer) if "." in key] for name, optimizer in kept.items()}
    assert len(gathered.pop("ma")) == 8
    assert gathered == {"mb": [], "mc": []}
    assert [int(optimizer.step) for optimizer in kept.values()] == [6, 6, 6]


@pytest.mark.parametrize("names", [["t0", "m1", "t2"], ["m0", "t1"]], ids=["torch serves", "mlx serves"])
@pytest.mark.parametrize("codec", ["float32", "topk", "randomk-256"])
def test_torch_and_mlx_hold_the_same_bits_after_every_step(tmp_path: Path, names: list[str], codec: str) -> None:
    states: dict[str, list[bytes]] = {}

    def cell(node: Node) -> None:
        adapter = adapted(node, seed=node.rank())
        adam = mlx_optim.Adam(0.01) if is_mlx(node) else torch.optim.Adam(adapter.model.parameters(), lr=0.01)
        sync = nc.DataParallel(adapter.model, adam, mode="server", codec=codec)
        for step in range(5):
            gradient = np.random.default_rng([step, node.rank()]).standard_normal(adapter.layout.size)
            sync.step(samples=8 + node.rank(), **give(adapter, gradient.astype(np.float32)))
            states.setdefault(node.name, []).append(adapter.read().tobytes())

    with Cluster(names, tmp_path) as cluster:
        assert cluster.run(on_this_thread(cell)) == dict.fromkeys(names)
        assert cluster.told == []
    assert len(set(states[names[0]])) == 5
    assert all(found == states[names[0]] for found in states.values())


@pytest.mark.parametrize(("direction", "kind"), [*POINTS, ("from", Applied)])
@pytest.mark.parametrize("victim", ["ma", "mc"])
def test_a_node_killed_at_any_point_of_a_step_leaves_the_others_equal(
    tmp_path: Path, direction: str, kind: type, victim: str
) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run_and_lose(victim, direction, kind, 4, server_cell(range(8)))
        assert len(told(cluster, "mb", "ma")) == (victim == "ma")
    equal(results)


def test_a_step_that_loses_a_node_while_it_is_made_counts_once(tmp_path: Path) -> None:
    """The optimizer steps again, from the state before, with the gradients of those that are left."""
    calls: list[int] = []
    box: list[Cluster] = []
    kept: dict[str, Any] = {}

    class Losing(mlx_optim.SGD):
        def update(self, *arguments: Any) -> None:
            calls.append(1)
            if len(calls) == 4:
                box[0].kill("mc")
            super().update(*arguments)

    with Cluster(NODES, tmp_path) as cluster:
        box.append(cluster)
        results = cluster.run(server_cell(range(6), lambda: Losing(falling, momentum=0.9), kept))
        results.pop("mc")
        assert cluster.told == []
    assert len(calls) == 7
    assert int(kept["ma"].step) == 6
    lost = plain_mlx(0, optimizer := mlx_optim.SGD(falling, momentum=0.9), range(3), parts=3)
    expected = plain_mlx(0, optimizer, range(3, 6), parts=2, model=lost)
    np.testing.assert_allclose(equal(results), _read(expected), atol=1e-6)


def test_who_goes_on_for_a_lost_server_begins_afresh_at_its_place_on_the_schedule(tmp_path: Path) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        ranks = {name: rank for rank, name in enumerate(NODES)}
        cluster.ranks = lambda: ranks  # type: ignore[method-assign]
        make = lambda: mlx_optim.SGD(falling, momentum=0.9)  # noqa: E731
        results = cluster.run_and_lose("ma", "from", Arrived, 4, server_cell(range(8), make))
        assert "from round 4 of 'model'" in told(cluster, "mb", "ma")[0]
    model = plain_mlx(0, mlx_optim.SGD(falling, momentum=0.9), range(3), parts=3)
    fresh = mlx_optim.SGD(falling, momentum=0.9)
    fresh.state["step"] = mx.array(3, mx.uint64)
    expected = plain_mlx(0, fresh, range(3, 8), parts=range(1, 3), model=model)
    np.testing.assert_allclose(equal(results), _read(expected), atol=1e-6)


def test_a_failing_optimizer_ends_the_cell_there_with_model_and_state_as_before(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Failing(mlx_optim.SGD):
        def update(self, model: Any, gradients: Any) -> None:
            super().update(model, gradients)
            if int(self.step) == 3:
                raise RuntimeError("out of memory")

    def cell(node: Node) -> Any:
        adapter = adapted(node)
        optimizer = (Failing if node.name == "ma" else mlx_optim.SGD)(0.05, momentum=0.9)
        sync = nc.DataParallel(adapter.model, optimizer, mode="server")
        for step in range(5):
            loss, given = loss_and_gradients(adapter.model, batch(10 * step + node.rank()))
            seen[node.name] = adapter.read(), state_of(optimizer)
            try:
                sync.step(loss, samples=8, **given)
            except RuntimeError:
                np.testing.assert_array_equal(adapter.read(), seen[node.name][0])
                assert state_of(optimizer) == seen[node.name][1]
                assert int(optimizer.step) == 2
                raise
        return adapter.read()

    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(on_this_thread(cell))
        assert str(results.pop("ma")) == "out of memory"
        assert "from round 3 of 'model'" in told(cluster, "mb", "ma")[0]
    equal(results)


def test_a_step_to_infinity_is_not_taken_and_said(tmp_path: Path, capfd: Any) -> None:
    def cell(node: Node) -> Any:
        adapter = adapted(node)
        sync = nc.DataParallel(adapter.model, mlx_optim.SGD(3e38), mode="server")
        sync.step(samples=8, **give(adapter, values(5) * 8))
        return adapter.read()

    with Cluster(["ma", "mb"], tmp_path) as cluster:
        results = cluster.run(on_this_thread(cell))
    np.testing.assert_array_equal(equal(results), values(0))
    assert "leads to NaN or infinity in the parameters and is not taken" in capfd.readouterr().err


def test_a_checkpoint_has_the_moments_of_the_node_that_steps(tmp_path: Path) -> None:
    make = lambda: mlx_optim.AdamW(falling)  # noqa: E731

    def saving(node: Node) -> Any:
        adapter = adapted(node)
        sync = nc.DataParallel(adapter.model, make(), mode="server")
        for step in range(8):
            loss, given = loss_and_gradients(adapter.model, batch(10 * step + node.rank()))
            sync.step(loss, samples=8, **given)
            if step == 4:
                sync.checkpoint("half")
        return adapter.read()

    with Cluster(NODES[:2], tmp_path) as cluster:
        before = equal(cluster.run(on_this_thread(saving)))
    with Cluster(NODES[:2], tmp_path) as cluster:
        after = equal(cluster.run(server_cell(range(5, 8), make, resume="half")))
    np.testing.assert_array_equal(before, after)


def _read(model: Any) -> Any:
    from notebook_cluster.training.models.mlx_parameters import MlxParameters

    return MlxParameters(model).read()
