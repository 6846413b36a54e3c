"""DeMo: its squares, every step recomputed from gradients and the bytes on the mesh, what it learns, bad input."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.codecs import WireFormat
from notebook_cluster.codecs.dct import Dct
from notebook_cluster.rounds.numerics.fragments import Tiles
from notebook_cluster.rounds.numerics.weighted_mean import gathered, mean_of_gathered
from tests import demo_oracle as oracle
from tests.cluster_in_process import Cluster, Node
from tests.demo_rounds import LR, NODES, SHAPES, Recording, gradient, momentum_of, samples_of
from tests.test_training import assert_equal_models, batch, flat, loss_of
from tests.test_training_sparse import wide

# ---- squares ---------------------------------------------------------------------------------------------------

matrices = st.lists(st.integers(1, 150), max_size=2)
kernels = st.tuples(st.integers(1, 80), st.integers(1, 12), st.integers(1, 6)).map(list)
shapes = st.lists(st.one_of(matrices, kernels), min_size=1, max_size=5)


@given(shapes, st.integers(0, 20))
@settings(max_examples=80, deadline=None)
def test_squares_hold_every_element_once_and_are_never_larger_than_the_model(model: list[list[int]], more: int) -> None:
    tiles = Tiles(model)
    where, length = oracle.places(model)
    assert (tiles.elements, tiles.size) == (where.size, length)
    vector = np.arange(1, where.size + more + 1, dtype=np.float32)
    packed = tiles.pack(vector)
    np.testing.assert_array_equal(packed[where], vector[: where.size])
    np.testing.assert_array_equal(packed[length:], vector[where.size :])
    assert np.count_nonzero(packed) == vector.size
    np.testing.assert_array_equal(tiles.unpack(packed), vector)
    for k in (8, 32, 128):
        assert Dct("dct", k).size(tiles.size) <= 4 * tiles.elements


# ---- the numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"weight_decay": 0.5},
        {"sign": False, "k": 16, "decay": 0.9},
        {"accumulate": 2},
    ],
)
def test_every_step_is_the_papers_bit_for_bit(tmp_path: Path, arguments: dict[str, Any]) -> None:
    steps, each = 6, arguments.get("accumulate", 1)
    gradients: dict[tuple[str, int], Any] = {}
    momenta: dict[str, Any] = {}

    def cell(node: Node) -> nn.Module:
        model = wide(node.rank())
        sync = nc.DeMo(model, lr=LR, **arguments)
        for step in range(steps * each):
            loss = loss_of(model, batch(step + 100 * node.rank()))
            loss.backward()
            gradients[node.name, step // each] = gradient(model) / np.float32(each)
            done = sync.step(loss, samples=samples_of(node.name))
            assert (done is not None) == ((step + 1) % each == 0)
        momenta[node.name] = momentum_of(sync)
        return model

    with Recording(NODES, tmp_path) as cluster:
        results = cluster.run(cell)
    assert_equal_models(results)
    assert all(len(found) == 1 for found in cluster.hashes.values())
    theta = flat(wide(0)).copy()
    k, decay = arguments.get("k", 32), arguments.get("decay", 0.999)
    nodes = {name: oracle.Node(SHAPES, k, decay) for name in NODES}
    rounds = cluster.rounds()
    assert [number for number, _ in rounds] == [1, 2, 3, 4, 5, 6]
    for number, rows in rounds:
        assert list(rows) == NODES
        sent = [nodes[name].counted(gradients[name, number - 1], data) for name, data in rows.items()]
        samples = [samples_of(name) for name in rows]
        theta = oracle.step(theta, sent, samples, LR, arguments.get("sign", True), arguments.get("weight_decay", 0.0))
    np.testing.assert_array_equal(flat(results["a"]), theta)
    for name in NODES:
        np.testing.assert_array_equal(momenta[name], nodes[name].momentum)


def test_the_mean_is_over_all_also_where_a_node_had_nothing_to_send() -> None:
    wire = WireFormat("dct", 2 * 4096)
    first, second = np.random.default_rng(0).standard_normal((2, wire.count), np.float32)
    second[:4096] = 0
    encoded = [wire.encode(first), wire.encode(second)]
    data = gathered([(encoded[0], 0.25), (encoded[1], 0.75)])
    decoded = [wire.decode(part) for part in encoded]
    mean = mean_of_gathered(wire, data, 2, 0, wire.blocks, over_all=True)
    np.testing.assert_array_equal(mean, np.float32(0.25) * decoded[0] + np.float32(0.75) * decoded[1])
    np.testing.assert_array_equal(mean[:4096], np.float32(0.25) * decoded[0][:4096])


def test_the_learning_rate_may_change_at_every_step(tmp_path: Path) -> None:
    rates = [0.004, 0.002, 0.001]

    def cell(node: Node) -> list[Any]:
        model = wide(0)
        sync = nc.DeMo(model, lr=1.0)
        states = [flat(model).copy()]
        for step, rate in enumerate(rates):
            sync.lr = rate
            assert sync.lr == rate
            loss_of(model, batch(step)).backward()
            sync.step()
            states.append(flat(model).copy())
        with pytest.raises(ValueError, match=r"lr=0: use a number above 0"):
            sync.lr = 0
        return states

    with Cluster(["a", "b"], tmp_path) as cluster:
        states = cluster.run(cell)["a"]
    for before, after, rate in zip(states[:-1], states[1:], rates, strict=True):
        size = np.abs(after - before)
        np.testing.assert_allclose(size[size > 0], rate, rtol=1e-3)
        assert np.count_nonzero(size) > 0.9 * size.size


# ---- learning --------------------------------------------------------------------------------------------------


def digits_cell(steps: int) -> Any:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)

    def built() -> nn.Module:
        generator = torch.Generator().manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
        with torch.no_grad():
            for layer in (model[0], model[3]):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * 0.1)  # type: ignore[union-attr]
                layer.bias.zero_()  # type: ignore[union-attr]
        return model

    def cell(node: Node) -> tuple[nn.Module, float, float]:
        model = built()
        sync = nc.DeMo(model, lr=0.003)
        generator = torch.Generator().manual_seed(node.rank())
        for _ in range(steps):
            part = torch.randint(0, 1500, (32,), generator=generator)
            loss = nn.functional.cross_entropy(model(x[part]), y[part])
            loss.backward()
            sync.step(loss, samples=len(part))
        sync.finish()
        model.eval()
        with torch.no_grad():
            right = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
            after = nn.functional.cross_entropy(model(x[:1500]), y[:1500]).item()
        return model, after, right

    return cell


def test_it_learns_the_digits_and_sends_a_fraction_of_the_model(tmp_path: Path) -> None:
    with Recording(NODES, tmp_path) as cluster:
        results = cluster.run(digits_cell(80), timeout=200)
    models = {name: result[0] for name, result in results.items()}
    assert_equal_models(models)
    for model in models.values():  # running statistics were averaged, and have left what they were made with
        for of_this, of_first in zip(model.buffers(), models["a"].buffers(), strict=True):
            if of_this.is_floating_point():
                assert torch.equal(of_this, of_first)
                assert not torch.equal(of_this, torch.zeros_like(of_this))
    _, loss, right = results["a"]
    assert loss < 0.3  # of 2.3 with equal probabilities
    assert right > 0.85
    assert len(cluster.hashes) >= 80
    assert all(len(found) == 1 for found in cluster.hashes.values())
    # 8192 elements in two squares, 1280 in a third and all others in a last one, 69 bytes each, and running statistics
    own, buffers = 4 * 69, 4 * 2 * 128
    assert {len(data) for _, rows in cluster.rounds() for data in rows.values()} == {own + buffers}
    assert own < 4 * flat(models["a"]).size / 100


def test_steps_too_small_for_bfloat16_add_up(tmp_path: Path) -> None:
    """The parameters that all hold are float32, whatever the model is."""

    def values(model: nn.Module) -> torch.Tensor:
        return torch.cat([tensor.detach().float().reshape(-1) for tensor in model.parameters()])

    def cell(node: Node) -> tuple[str, float]:
        model = wide(0).bfloat16()
        sync = nc.DeMo(model, lr=0.0002)
        before = values(model)
        for step in range(40):
            x, y = batch(step + 100 * node.rank())
            (model(x.bfloat16()).float() - y).square().mean().backward()
            done = sync.step(samples=8)
            assert done is not None
        return done.state_hash, float((values(model) - before).abs().max())

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(cell)
    assert results["a"] == results["b"]
    assert 0.004 < results["a"][1] < 40 * 0.0002 + 2**-8  # and the model's own rounding


# ---- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0}, "lr=0: use a number above 0, for example lr=4e-4"),
        ({"lr": math.nan}, "lr=nan: use a number above 0"),
        ({"decay": 1.0}, "decay=1.0: use a number from 0 to below 1, of the momentum (DeMo: 0.999)"),
        ({"k": 12}, "k=12: use a multiple of 8 from 8 to 128, the coefficients sent of 4096 (DeMo: 32)"),
        ({"k": 136}, "k=136: use a multiple of 8 from 8 to 128"),
        ({"sign": 1}, "sign=1: use True for steps of equal size, or False for the mean momentum itself"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: with lr=0.0004 use a number from 0 to below 2500"),
        ({"weight_decay": 20.0, "lr": 0.1}, "weight_decay=20.0: with lr=0.1 use a number from 0 to below 10"),
        ({"accumulate": 0}, "accumulate=0: use a whole number of steps from 1"),
        ({"quorum": 0}, "quorum=0: use a number of nodes from 1"),
    ],
)
def test_impossible_arguments_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(lambda node: nc.DeMo(wide(), **arguments))["a"]
    assert isinstance(result, ValueError)
    assert message in str(result)


def test_a_step_without_a_gradient_and_unlike_settings_are_named(tmp_path: Path) -> None:
    def without(node: Node) -> None:
        model = wide()
        sync = nc.DeMo(model, name="without")
        with pytest.raises(ValueError, match=r"call loss\.backward\(\) before sync\.step\(\)"):
            sync.step(samples=8)
        assert sync.step(samples=0) is not None or sync.round == 0

    def unlike(node: Node) -> nn.Module:
        model = wide()
        nc.DeMo(model, name="unlike", weight_decay=0.1 if node.name == "b" else 0.0)
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        assert cluster.run(without) == {"a": None, "b": None}
        result = cluster.run(unlike)["b"]
    assert isinstance(result, nc.TrainingError)
    assert "'b' has every=1 steps, decay 0.999, weight decay 0.1" in str(result)
