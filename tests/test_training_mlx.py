"""The mlx adapter: same vector as torch's for the same model, written in the way that mlx needs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

mx = pytest.importorskip("mlx.core")
import mlx.nn as mlx_nn  # noqa: E402

from notebook_cluster import training as nc  # noqa: E402
from notebook_cluster.training.models.mlx_parameters import MlxParameters  # noqa: E402
from notebook_cluster.training.models.torch_parameters import TorchParameters  # noqa: E402
from tests.cluster_in_process import Cluster, Node  # noqa: E402
from tests.test_training_parameters import held_as_it_is_read  # noqa: E402


def test_load_changes_the_model_and_its_output() -> None:
    model = mlx_nn.Linear(2, 3)
    adapter = MlxParameters(model)
    adapter.load(np.full(9, 2, np.float32))
    assert model(mx.ones((1, 2))).tolist() == [[6.0, 6.0, 6.0]]
    np.testing.assert_array_equal(adapter.read(), np.full(9, 2, np.float32))


def test_the_vector_is_that_of_the_same_torch_model() -> None:
    theirs = torch.nn.Linear(2, 3)
    ours = mlx_nn.Linear(2, 3)
    ours.update({"weight": mx.array(theirs.weight.detach().numpy()), "bias": mx.array(theirs.bias.detach().numpy())})
    np.testing.assert_array_equal(MlxParameters(ours).read(), TorchParameters(theirs).read())
    assert MlxParameters(ours).layout.hash("int8") == TorchParameters(theirs).layout.hash("int8")


def test_frozen_arrays_stay_and_running_statistics_come_last() -> None:
    model = mlx_nn.Sequential(mlx_nn.Linear(2, 3), mlx_nn.BatchNorm(3))
    model.layers[0].freeze()
    frozen = np.array(model.layers[0].weight)
    adapter = MlxParameters(model)
    assert [name for name, _, _ in adapter.layout.schema] == [
        "layers.1.bias",
        "layers.1.weight",
        "layers.1.running_mean",
        "layers.1.running_var",
    ]
    assert adapter.layout.buffers == 6
    adapter.load(np.arange(12, dtype=np.float32))
    assert model.layers[1].running_var.tolist() == [9.0, 10.0, 11.0]
    np.testing.assert_array_equal(np.array(model.layers[0].weight), frozen)


def test_a_shared_array_counts_once_and_stays_shared() -> None:
    model = mlx_nn.Sequential(mlx_nn.Linear(3, 3, bias=False), mlx_nn.Linear(3, 3, bias=False))
    model.layers[1].weight = model.layers[0].weight
    adapter = MlxParameters(model)
    assert adapter.layout.size == 9
    adapter.load(np.arange(9, dtype=np.float32))
    assert model.layers[1].weight.tolist() == model.layers[0].weight.tolist()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_dtypes_stay(dtype: object) -> None:
    model = mlx_nn.Linear(2, 3)
    model.set_dtype(dtype)
    adapter = MlxParameters(model)
    before = adapter.snapshot()
    adapter.load(np.full(9, 1.001, np.float32))
    assert model.weight.dtype == dtype
    assert not adapter.exact
    adapter.restore(before)
    assert model.weight.tolist() == before["weight"].tolist()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_what_a_model_holds_of_a_vector_is_known_without_loading_it(dtype: object) -> None:
    model = mlx_nn.Sequential(mlx_nn.Linear(30, 30), mlx_nn.Linear(30, 20), mlx_nn.Linear(20, 2))
    model.layers[1].set_dtype(dtype)
    held_as_it_is_read(MlxParameters(model), [(5, 30), (900, 960)])


def test_a_changed_model_is_named() -> None:
    model = mlx_nn.Linear(2, 3)
    adapter = MlxParameters(model)
    model.freeze(keys="bias")
    with pytest.raises(ValueError, match=r"'bias' was removed \(or frozen\)"):
        adapter.check()


def test_the_same_rounds_on_torch_and_on_mlx(tmp_path: Path) -> None:
    """Given the same local parameters, a node with an mlx model and one with torch hold the same bits."""
    changes = np.random.default_rng(3).standard_normal((2, 10, 9)).astype(np.float32) * np.float32(0.1)

    def cell(node: Node) -> np.ndarray[Any, Any]:
        model = mlx_nn.Linear(2, 3) if node.name == "b" else torch.nn.Linear(2, 3)
        adapter = MlxParameters(model) if node.name == "b" else TorchParameters(model)
        sync = nc.DiLoCo(model, every=2, outer_lr=0.7)
        for change in changes[node.rank()]:
            adapter.load(adapter.read() + change)
            sync.step(samples=4 + node.rank())
        assert sync.round == 5
        return adapter.read()

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(cell)
    np.testing.assert_array_equal(results["a"], results["b"])


@pytest.mark.parametrize(
    "make",
    [
        lambda model: nc.DiLoCo(model, every=4, fragments=2, overlap=1),
        lambda model: nc.DiLoCo(model, every=2, overlap=2, codec="int8"),
        lambda model: nc.SparseLoCo(model, every=2, outer_lr=0.5),
        lambda model: nc.DiLoCo(model, every=2, codec="topk-256"),
        lambda model: nc.DiLoCo(model, every=2, overlap=1, codec="randomk-256"),
    ],
    ids=["fragments", "overlap", "sparse", "topk", "randomk"],
)
def test_torch_and_mlx_train_one_model_with_every_strategy(tmp_path: Path, make: Any) -> None:
    hashes: dict[str, set[str]] = {}

    def cell(node: Node) -> np.ndarray[Any, Any]:
        model = mlx_nn.Linear(90, 50) if node.name == "b" else torch.nn.Linear(90, 50)
        adapter = MlxParameters(model) if node.name == "b" else TorchParameters(model)
        draw = np.random.default_rng(node.rank())
        sync = make(model)
        for _ in range(11):
            adapter.load(
                adapter.read() + draw.standard_normal(adapter.layout.size).astype(np.float32) * np.float32(0.1)
            )
            if done := sync.step(samples=4 + node.rank()):
                hashes.setdefault(node.name, set()).add(done.state_hash)
        sync.finish()
        return adapter.read()

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(cell)
    np.testing.assert_array_equal(results["a"], results["b"])
    assert hashes["a"] == hashes["b"]
    assert len(hashes["a"]) >= 4
