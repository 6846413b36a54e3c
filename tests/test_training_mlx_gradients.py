"""Gradients of MLX models: DataParallel and DeMo, alone and together with torch, given and computed gradients."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

mx = pytest.importorskip("mlx.core")
import mlx.nn as mlx_nn  # noqa: E402
import mlx.optimizers as mlx_optim  # noqa: E402
from mlx.utils import tree_map  # noqa: E402

from notebook_cluster import training as nc  # noqa: E402
from notebook_cluster.training.models.mlx_parameters import MlxParameters  # noqa: E402
from notebook_cluster.training.models.torch_parameters import TorchParameters  # noqa: E402
from tests import demo_oracle  # noqa: E402
from tests.cluster_in_process import Cluster, Node  # noqa: E402
from tests.demo_rounds import Recording, momentum_of  # noqa: E402
from tests.mlx_models import (  # noqa: E402
    COUNT,
    SHAPES,
    Ours,
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

MIXED = ["t0", "m1", "t2"]


# ---- DeMo ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [MIXED, ["m0", "t1"]], ids=["torch first", "mlx first"])
@pytest.mark.parametrize("arguments", [{}, {"accumulate": 2, "weight_decay": 0.5}], ids=["plain", "accumulated"])
def test_demo_holds_the_bits_of_the_paper_on_torch_and_mlx_after_every_round(
    tmp_path: Path, names: list[str], arguments: dict[str, Any]
) -> None:
    rounds, each, lr = 5, arguments.get("accumulate", 1), 0.005
    samples = {name: 8 + rank for rank, name in enumerate(names)}
    states: dict[tuple[str, int], Any] = {}
    sums: dict[tuple[str, int], Any] = {}
    momenta: dict[str, Any] = {}

    def cell(node: Node) -> None:
        adapter = adapted(node, seed=node.rank())
        sync = nc.DeMo(adapter.model, lr=lr, **arguments)
        draw = np.random.default_rng(100 + node.rank())
        for number in range(1, rounds + 1):
            for _ in range(each):
                gradient = draw.standard_normal(COUNT).astype(np.float32)
                sums[node.name, number] = sums.get((node.name, number), np.float32(0)) + gradient
                done = sync.step(samples=samples[node.name], **give(adapter, gradient))
            assert done is not None
            states[node.name, number] = adapter.read()
        momenta[node.name] = momentum_of(sync)

    with Recording(names, tmp_path) as cluster:
        assert cluster.run(on_this_thread(cell)) == dict.fromkeys(names)
    theta, nodes = values(0), {name: demo_oracle.Node(SHAPES) for name in names}
    recorded = cluster.rounds()
    assert [number for number, _ in recorded] == list(range(1, rounds + 1))
    for number, rows in recorded:
        assert list(rows) == names
        sent = [nodes[name].counted(sums[name, number] / np.float32(each), data) for name, data in rows.items()]
        weights = [samples[name] for name in rows]
        theta = demo_oracle.step(theta, sent, weights, lr, True, arguments.get("weight_decay", 0.0))
        for name in names:
            np.testing.assert_array_equal(states[name, number], theta)
    for name in names:
        np.testing.assert_array_equal(momenta[name], nodes[name].momentum)
    assert all(len(found) == 1 for found in cluster.hashes.values())


def test_demo_learns_with_the_loop_of_each_framework(tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {}

    def cell(node: Node) -> Any:
        adapter = adapted(node)
        adapter.load(adapter.read() * np.float32(0.2))
        sync = nc.DeMo(adapter.model, lr=0.003)
        for step in range(80):
            loss, given = loss_and_gradients(adapter.model, batch(10 * step + node.rank()))
            sync.step(loss, samples=8, **given)
            losses.setdefault(node.name, []).append(loss.item())
        return adapter.read()

    with Cluster(["t", "m"], tmp_path) as cluster:
        results = cluster.run(on_this_thread(cell))
    np.testing.assert_array_equal(results["t"], results["m"])
    for name in ("t", "m"):
        assert np.mean(losses[name][-10:]) < 0.3 * np.mean(losses[name][:3])


def test_a_momentum_saved_by_torch_nodes_is_gone_on_with_by_mlx_nodes(tmp_path: Path) -> None:
    given = np.random.default_rng(5).standard_normal((2, 6, COUNT)).astype(np.float32)

    def trained(framework: str, steps: range, **arguments: Any) -> Any:
        def cell(node: Node) -> Any:
            adapter = TorchParameters(torch.nn.Linear(COUNT, 1, bias=False))
            if framework == "mlx":
                adapter = MlxParameters(mlx_nn.Linear(COUNT, 1, bias=False))  # type: ignore[assignment]
            adapter.load(values(0))
            sync = nc.DeMo(adapter.model, lr=0.005, **arguments)
            for step in steps:
                sync.step(samples=8, **give(adapter, given[node.rank(), step]))
            if steps.stop == 3:
                sync.checkpoint("half")
            return adapter.read()

        return on_this_thread(cell)

    names = ["a", "b"]
    with Cluster(names, tmp_path / "at once") as cluster:
        expected = cluster.run(trained("torch", range(6)))["a"]
    with Cluster(names, tmp_path) as cluster:
        cluster.run(trained("torch", range(3)))
    with Cluster(names, tmp_path) as cluster:
        results = cluster.run(trained("mlx", range(3, 6), resume="half"))
    np.testing.assert_array_equal(results["a"], expected)
    np.testing.assert_array_equal(results["b"], expected)


# ---- DataParallel ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["allreduce", "server"])
def test_a_gradient_that_no_node_has_leaves_the_parameter_alone_on_mlx_too(tmp_path: Path, mode: str) -> None:
    """mlx has no None: an mlx node has a gradient of every parameter, if it has work at all."""

    def cell(node: Node) -> Any:
        adapter = adapted(node)
        settings = {"momentum": 0.9, "weight_decay": 0.1}
        optimizer = mlx_optim.SGD(0.01, **settings)
        if not is_mlx(node):
            optimizer = torch.optim.SGD(adapter.model.parameters(), lr=0.01, **settings)
        sync = nc.DataParallel(adapter.model, optimizer, mode=mode, resend=None)
        bits = []
        for step, working in enumerate([True, False, True]):
            given = give(adapter, values(10 * step))
            if is_mlx(node) and not working:
                given = {}
            if not is_mlx(node) and step:
                list(adapter.model.parameters())[-1].grad = None
            before = adapter.read()
            sync.step(samples=8 if working or not is_mlx(node) else 0, **given)
            moved = adapter.layout.tensors(adapter.read() != before)
            bits.append([bool(tensor.any()) for tensor in moved.values()])
        return adapter.read(), bits

    names = ["m", "t"] if mode == "server" else ["t", "m"]
    with Cluster(names, tmp_path) as cluster:
        results = cluster.run(on_this_thread(cell))
    np.testing.assert_allclose(results["t"][0], results["m"][0], rtol=0, atol=1e-6)
    for _, (first, second, third) in results.values():
        assert all(first)
        assert second.count(False) == 1
        assert all(third)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_torch_and_mlx_make_the_same_steps_where_numbers_are_exact(tmp_path: Path, accumulate: int) -> None:
    def cell(node: Node) -> list[Any]:
        adapter = adapted(node, seed=node.rank())
        sgd = mlx_optim.SGD(0.25) if is_mlx(node) else torch.optim.SGD(adapter.model.parameters(), lr=0.25)
        sync = nc.DataParallel(adapter.model, sgd, accumulate=accumulate, resend=None)
        states = []
        for step in range(3 * accumulate):
            done = sync.step(samples=4 + 8 * node.rank(), **give(adapter, values(10 * step + node.rank())))
            assert (done is not None) == ((step + 1) % accumulate == 0)
            if done is not None:
                states.append(adapter.read())
        return states

    with Cluster(["t", "m"], tmp_path) as cluster:
        results = cluster.run(on_this_thread(cell))
    theta = values(0)
    for number in range(3):
        steps = range(number * accumulate, (number + 1) * accumulate)
        means = [sum(values(10 * step + rank) for step in steps) / np.float32(accumulate) for rank in (0, 1)]
        theta = theta - np.float32(0.25) * (np.float32(0.25) * means[0] + np.float32(0.75) * means[1])
        np.testing.assert_array_equal(results["t"][number], theta)
        np.testing.assert_array_equal(results["m"][number], theta)


@pytest.mark.parametrize("codec", ["topk", "randomk-256"])
def test_torch_and_mlx_make_the_same_steps_of_what_some_numbers_say(tmp_path: Path, codec: str) -> None:
    def cell(node: Node) -> list[Any]:
        adapter = adapted(node, seed=node.rank())
        sgd = mlx_optim.SGD(0.25) if is_mlx(node) else torch.optim.SGD(adapter.model.parameters(), lr=0.25)
        sync = nc.DataParallel(adapter.model, sgd, codec=codec, resend=None)
        states = []
        for step in range(6):
            assert sync.step(samples=4 + 8 * node.rank(), **give(adapter, values(10 * step + node.rank()))) is not None
            states.append(adapter.read())
        return states

    with Cluster(["t", "m"], tmp_path) as cluster:
        results = cluster.run(on_this_thread(cell))
    before = values(0)
    for mine, theirs in zip(results["t"], results["m"], strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert 0 < np.count_nonzero(mine - before) <= (256 if codec == "randomk-256" else 2 * 64)
        before = mine


def test_torch_and_mlx_drift_by_last_bits_and_are_equal_after_each_resend(tmp_path: Path) -> None:
    held: dict[str, dict[int, Any]] = {"t": {}, "m": {}}

    def cell(node: Node) -> Any:
        adapter = adapted(node)
        optimizer = mlx_optim.SGD(0.02, momentum=0.9)
        if not is_mlx(node):
            optimizer = torch.optim.SGD(adapter.model.parameters(), lr=0.02, momentum=0.9)
        sync = nc.DataParallel(adapter.model, optimizer, resend=3)
        apply = sync._replica.apply

        def applied(commit: Any) -> None:
            apply(commit)
            held[node.name][commit.round] = adapter.read()

        sync._replica.apply = applied  # type: ignore[method-assign]
        losses = []
        for step in range(30):
            loss, given = loss_and_gradients(adapter.model, batch(10 * step + node.rank()))
            sync.step(loss, samples=8, **given)
            losses.append(loss.item())
        return losses

    with Cluster(["t", "m"], tmp_path) as cluster:
        losses = cluster.run(on_this_thread(cell))
    assert held["t"].keys() == held["m"].keys() == set(range(1, 41))
    for number in held["t"]:
        if number % 4 == 0:
            np.testing.assert_array_equal(held["t"][number], held["m"][number])
        else:
            np.testing.assert_allclose(held["t"][number], held["m"][number], atol=1e-5)
    assert np.mean(losses["m"][-5:]) < 0.3 * losses["m"][0]
    assert not [text for level, text in cluster.told if "optimizers" in text], "they are alike"


def optimizers() -> list[Any]:
    return [
        lambda: mlx_optim.SGD(0.05, momentum=0.9),
        lambda: mlx_optim.AdamW(mlx_optim.cosine_decay(0.01, 6), bias_correction=True),
        lambda: mlx_optim.MultiOptimizer(
            [mlx_optim.Lion(0.001), mlx_optim.Adafactor()], [lambda name, weight: name.endswith("bias")]
        ),
    ]


@pytest.mark.parametrize("make", optimizers(), ids=["SGD", "AdamW on a schedule", "two in one"])
def test_who_is_left_alone_keeps_its_state(make: Any) -> None:
    model, optimizer = Ours(), make()
    adapter = MlxParameters(model)
    tensors = len(adapter.layout.schema)
    for step, alone in enumerate([0, None, 1]):
        there = [index != alone for index in range(tensors)]
        name = None if alone is None else adapter.layout.schema[alone][0]
        kept = {key: value for key, value in state_of(optimizer).items() if name and f"{name}." in f"{key}."}
        before = adapter.read()
        adapter.optimizer_step(optimizer, values(step + 1), 1, there)
        moved = [bool(tensor.any()) for tensor in adapter.layout.tensors(adapter.read() != before).values()]
        assert moved == there
        if name and step:
            assert kept
            assert {key: value for key, value in state_of(optimizer).items() if key in kept} == kept


@pytest.mark.parametrize("make", optimizers(), ids=["SGD", "AdamW on a schedule", "two in one"])
def test_one_node_is_the_plain_mlx_loop_bit_for_bit(tmp_path: Path, make: Any) -> None:
    made: list[Any] = []

    def cell(node: Node) -> Any:
        adapter = adapted(node)
        made.append(make())
        sync = nc.DataParallel(adapter.model, made[0])
        for step in range(6):
            loss, given = loss_and_gradients(adapter.model, batch(10 * step))
            sync.step(loss, samples=8, **given)
        return adapter.read()

    with Cluster(["m"], tmp_path) as cluster:
        result = cluster.run(on_this_thread(cell))["m"]
    optimizer = make()
    np.testing.assert_array_equal(result, MlxParameters(plain_mlx(0, optimizer, range(6))).read())
    assert state_of(made[0]) == state_of(optimizer)


@pytest.mark.parametrize(
    ("make", "rates"),
    [
        (lambda: mlx_optim.SGD(0.25), [0.25, 0.25, 0.25]),
        (lambda: mlx_optim.SGD(lambda step: mx.array(0.5) ** (step + 1)), [0.5, 0.25, 0.125]),
        (
            lambda: mlx_optim.MultiOptimizer(
                [mlx_optim.SGD(lambda step: mx.array(0.5) ** (step + 1)), mlx_optim.SGD(0.25)],
                [lambda name, weight: True],
            ),
            [0.5, 0.25, 0.125],
        ),
    ],
    ids=["a number", "a schedule", "two in one"],
)
def test_the_learning_rate_is_multiplied_for_the_step_only(tmp_path: Path, make: Any, rates: list[float]) -> None:
    def cell(node: Node) -> Any:
        adapter, optimizer, seen = adapted(node), make(), []
        sync = nc.DataParallel(adapter.model, optimizer, scale_lr=True)
        for step in range(3):
            sync.step(samples=8, **give(adapter, values(step)))
            seen.append(optimizer.learning_rate.item())
        return adapter.read(), seen

    with Cluster(["m0", "m1"], tmp_path) as cluster:
        results = cluster.run(on_this_thread(cell))
    theta = values(0)
    for step, rate in enumerate(rates):
        theta = theta - np.float32(2 * rate) * values(step)
    for name in ("m0", "m1"):
        np.testing.assert_array_equal(results[name][0], theta)
        assert results[name][1] == rates


class TiedOurs(mlx_nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = (mlx_nn.Linear(8, 8) for _ in range(3))
        self.second.weight = self.first.weight
        self.frozen.freeze()
        self.norm = mlx_nn.BatchNorm(8)

    def __call__(self, x: Any) -> Any:
        return self.frozen(self.second(self.norm(self.first(x))))


class TiedTheirs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = (torch.nn.Linear(8, 8) for _ in range(3))
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x: Any) -> Any:
        return self.frozen(self.second(self.norm(self.first(x))))


def tied(framework: str) -> MlxParameters | TorchParameters:
    """The same values in either framework."""
    draw = np.random.default_rng(0)
    frozen, start = draw.standard_normal((8, 8)).astype(np.float32), draw.standard_normal(112).astype(np.float32)
    adapter: MlxParameters | TorchParameters
    if framework == "mlx":
        adapter = MlxParameters(TiedOurs())
        adapter.model.frozen.update({"weight": mx.array(frozen), "bias": mx.zeros(8)})
    else:
        adapter = TorchParameters(TiedTheirs())
        adapter.model.frozen.load_state_dict({"weight": torch.from_numpy(frozen), "bias": torch.zeros(8)})  # type: ignore[union-attr]
    assert adapter.layout.size == 8 * 8 + 4 * 8 + 2 * 8
    start[-8:] = 1
    adapter.load(start)
    return adapter


def tied_gradients(adapter: MlxParameters | TorchParameters, x: Any) -> dict[str, Any]:
    if isinstance(adapter, TorchParameters):
        adapter.model(torch.from_numpy(x)).square().mean().backward()
        return {}
    _, grads = mlx_nn.value_and_grad(adapter.model, lambda model, x: mx.square(model(x)).mean())(
        adapter.model, mx.array(x)
    )
    return {"grads": grads}


def test_both_gradients_of_a_tied_array_are_added_up() -> None:
    """Torch makes one gradient of it, mlx one for each name."""
    x = np.random.default_rng(1).standard_normal((16, 8)).astype(np.float32)
    theirs, ours = tied("torch"), tied("mlx")
    for _ in range(2):  # calls accumulate in both
        tied_gradients(theirs, x)
        given = tied_gradients(ours, x)["grads"]
        ours.add_gradients(given, 16)
    assert ours.layout.hash("float32") == theirs.layout.hash("float32")
    assert given["second"]["weight"].tolist() != given["first"]["weight"].tolist()
    np.testing.assert_allclose(ours.read_gradients(), theirs.read_gradients(), atol=1e-5)
    ours.clear_gradients()
    assert not ours.has_gradients()
    assert not ours.read_gradients()[:-16].any()


@pytest.mark.parametrize("strategy", ["DataParallel", "DeMo"])
def test_tied_and_frozen_arrays_stay_so_and_running_statistics_are_averaged(tmp_path: Path, strategy: str) -> None:
    def cell(node: Node) -> Any:
        adapter = tied("mlx" if is_mlx(node) else "torch")
        model, before = adapter.model, adapter.read()
        sgd = mlx_optim.SGD(0.125) if is_mlx(node) else torch.optim.SGD(model.parameters(), lr=0.125)
        sync = nc.DeMo(model, lr=0.01) if strategy == "DeMo" else nc.DataParallel(model, sgd, resend=None)
        for step in range(4):
            x = np.random.default_rng([step, node.rank()]).standard_normal((16, 8)).astype(np.float32)
            sync.step(samples=16, **tied_gradients(adapter, x))
        first, second = model.first.weight.tolist(), model.second.weight.tolist()
        assert first == second
        return before, adapter.read(), np.array(model.frozen.weight.tolist(), np.float32)

    with Cluster(["t", "m"], tmp_path) as cluster:
        results = cluster.run(on_this_thread(cell))
    (before, torchs, _), (_, mlxs, frozen) = results["t"], results["m"]
    np.testing.assert_array_equal(torchs[-16:], mlxs[-16:])
    assert (torchs != before).mean() > 0.8
    np.testing.assert_array_equal(frozen, np.array(tied("mlx").model.frozen.weight))
    if strategy == "DeMo":
        np.testing.assert_array_equal(torchs, mlxs)
    else:
        np.testing.assert_allclose(torchs, mlxs, atol=1e-5)


def test_a_step_of_mlx_beside_that_of_all_nodes_is_an_error_until_they_are_done(tmp_path: Path) -> None:
    optimizer = mlx_optim.SGD(0.5)

    def cell(node: Node) -> Any:
        model = Ours()
        zeros = tree_map(mx.zeros_like, model.trainable_parameters())
        for round in range(2):  # a sync object after the other has the same optimizer
            sync = nc.DataParallel(model, optimizer, resend=None)
            sync.step(samples=16, grads=zeros)
            with pytest.raises(ValueError, match=r"SGD\.update\(\) was called, and sync\.step\(\) of nc"):
                optimizer.update(model, zeros)
            sync.finish()
            optimizer.update(model, zeros)
            assert optimizer.step.item() == 2 * (round + 1)
        return model

    with Cluster(["m"], tmp_path) as cluster:
        assert isinstance(cluster.run(on_this_thread(cell))["m"], Ours)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_of_low_precision_keep_their_dtype_and_gradients_add_up_in_float32(
    tmp_path: Path, dtype: str
) -> None:
    def cell(node: Node) -> Any:
        if is_mlx(node):
            model = Ours()
            model.set_dtype(getattr(mx, dtype))
            adapter: Any = MlxParameters(model)
            optimizer: Any = mlx_optim.SGD(0.5)
        else:
            adapter = TorchParameters(adapted(node).model.to(getattr(torch, dtype)))
            optimizer = torch.optim.SGD(adapter.model.parameters(), lr=0.5)
        adapter.load(values(0))
        sync = nc.DataParallel(adapter.model, optimizer, resend=None)
        for step in range(3):
            given = give_in(dtype, adapter, values(7))
            sync.step(samples=8, **given)
            assert {kind for _, _, kind in adapter.layout.schema} == {dtype}
            adapter.check()
            if step == 0:
                once = adapter.read()
        return once, adapter.read()

    def give_in(dtype: str, adapter: Any, vector: Any) -> dict[str, Any]:
        if isinstance(adapter, MlxParameters):
            grads = give(adapter, vector)["grads"]
            return {"grads": tree_map(lambda gradient: gradient.astype(getattr(mx, dtype)), grads)}
        for name, parameter in adapter.model.named_parameters():
            parameter.grad = torch.from_numpy(adapter.layout.tensors(vector)[name].copy()).to(parameter.dtype)
        return {}

    with Cluster(["t", "m"], tmp_path) as cluster:
        results = cluster.run(on_this_thread(cell))
    np.testing.assert_array_equal(results["t"][0], results["m"][0])
    np.testing.assert_array_equal(results["m"][0], values(0) - np.float32(0.5) * values(7))
    np.testing.assert_array_equal(results["t"][1], results["m"][1])
    ours = MlxParameters(mlx_nn.Linear(1, 1, bias=False))
    for part in (256.0, 1.0, 1.0):  # a sum in bfloat16 would stay at 256
        ours.add_gradients({"weight": mx.array([[part]]).astype(mx.bfloat16)}, 1)
    assert ours.read_gradients().tolist() == [258.0]


def test_steps_left_over_make_a_last_one(tmp_path: Path) -> None:
    def cell(node: Node) -> Any:
        adapter = adapted(node)
        sync = nc.DataParallel(adapter.model, mlx_optim.SGD(0.5), accumulate=2)
        done = [sync.step(samples=8, **give(adapter, values(step))) is not None for step in range(3)]
        sync.finish()
        return done, adapter.read()

    with Cluster(["m"], tmp_path) as cluster:
        done, theta = cluster.run(on_this_thread(cell))["m"]
    assert done == [False, True, False]
    after = values(0) - np.float32(0.5) * ((values(0) + values(1)) / np.float32(2))
    np.testing.assert_array_equal(theta, after - np.float32(0.5) * values(2))


def test_a_gradient_with_nan_is_refused_and_the_optimizer_goes_on(tmp_path: Path, capfd: Any) -> None:
    def cell(node: Node) -> Any:
        adapter, optimizer = adapted(node), mlx_optim.Adam(0.01)
        sync = nc.DataParallel(adapter.model, optimizer)
        for step in range(4):
            gradient = values(step)
            if node.name == "m1" and step == 1:
                gradient[5] = np.nan
            sync.step(samples=8, **give(adapter, gradient))
        assert optimizer.learning_rate.item() == np.float32(0.01)
        return adapter.read()

    with Cluster(["m0", "m1"], tmp_path) as cluster:
        results = cluster.run(on_this_thread(cell))
    assert np.isfinite(results["m0"]).all()
    # m1's optimizer has made every step with the mean of the others, so its state is that of all
    np.testing.assert_array_equal(results["m0"], results["m1"])
    assert "the work of 'm1' for round 2 holds NaN or infinity" in capfd.readouterr().err
