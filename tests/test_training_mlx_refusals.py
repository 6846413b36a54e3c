"""What people may pass wrongly with an MLX model: each error names it, and nothing is counted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

mx = pytest.importorskip("mlx.core")
import mlx.nn as mlx_nn  # noqa: E402
import mlx.optimizers as mlx_optim  # noqa: E402

from notebook_cluster import training as nc  # noqa: E402
from tests.cluster_in_process import Cluster, Node  # noqa: E402
from tests.mlx_models import adapted, give, is_mlx, on_this_thread, values  # noqa: E402

HOW = "pass the second of what nn.value_and_grad(model, loss_function)(model, x, y) returns"


@pytest.mark.parametrize("strategy", ["DataParallel", "DeMo"])
@pytest.mark.parametrize(
    ("node", "change", "error", "message"),
    [
        ("m", lambda grads: None, TypeError, "grads= is missing: an mlx.nn.Module does not keep its gradients, so"),
        ("m", lambda grads: (1.0, grads), TypeError, f"grads is a tuple, not a dict: {HOW}"),
        ("m", lambda grads: grads | {"more": mx.zeros(1)}, ValueError, "grads has 'more', which is no trainable"),
        ("m", lambda grads: {"first": grads["first"]}, ValueError, "grads lacks 'second.bias' of this model: "),
        (
            "m",
            lambda grads: grads | {"first": grads["first"] | {"bias": mx.zeros(3)}},
            ValueError,
            "the gradient of 'first.bias' is 3, the parameter 64: ",
        ),
        (
            "m",
            lambda grads: grads | {"first": grads["first"] | {"bias": mx.zeros(64, mx.int32)}},
            ValueError,
            "the gradient of 'first.bias' is int32, not real floating point: ",
        ),
        ("t", lambda grads: {"first": 1}, TypeError, "grads= is for an mlx.nn.Module: a torch.nn.Module has its"),
    ],
)
def test_gradients_that_are_not_the_models_are_named_and_nothing_is_counted(
    tmp_path: Path, strategy: str, node: str, change: Any, error: type[Exception], message: str
) -> None:
    def cell(node: Node) -> None:
        adapter = adapted(node)
        sgd = mlx_optim.SGD(0.5) if is_mlx(node) else torch.optim.SGD(adapter.model.parameters(), lr=0.5)
        sync = nc.DeMo(adapter.model) if strategy == "DeMo" else nc.DataParallel(adapter.model, sgd)
        good = give(adapter, values(1))
        with pytest.raises(error) as raised:
            sync.step(samples=8, grads=change(good.get("grads")))
        assert message in str(raised.value)
        assert sync.round == 0
        if is_mlx(node):
            assert sync.step(samples=0) is not None or sync.round == 0  # an empty batch has none
            with pytest.raises(ValueError, match="samples='many'"):
                sync.step(samples="many", **good)  # type: ignore[arg-type]
        sync.step(samples=8, **good)
        if strategy == "DataParallel":
            np.testing.assert_array_equal(adapter.read(), values(0) - np.float32(0.5) * values(1))

    with Cluster([node], tmp_path) as cluster:
        assert cluster.run(on_this_thread(cell)) == {node: None}


def test_optimizers_of_the_other_framework_or_without_a_rate_are_named(tmp_path: Path) -> None:
    def refused(node: Node, optimizer: Any, **arguments: Any) -> str:
        adapter = adapted(node)
        with pytest.raises((TypeError, ValueError)) as raised:
            nc.DataParallel(adapter.model, optimizer, **arguments)
        return str(raised.value)

    def cell(node: Node) -> list[str]:
        of_torch = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        if not is_mlx(node):
            return [refused(node, mlx_optim.SGD(0.1))]
        return [
            refused(node, of_torch),
            refused(node, mlx_optim.Adafactor(), scale_lr=True),
        ]

    with Cluster(["t"], tmp_path) as cluster:
        of_torch = cluster.run(on_this_thread(cell))["t"]
    with Cluster(["m"], tmp_path) as cluster:
        of_mlx = cluster.run(on_this_thread(cell))["m"]
    assert of_torch == ["optimizer=SGD is no torch optimizer: pass a torch.optim optimizer of this torch.nn.Module"]
    assert of_mlx == [
        "optimizer=SGD is no mlx optimizer: pass one of mlx.optimizers for this mlx.nn.Module",
        "scale_lr=True: this Adafactor chooses its learning rate itself: give it learning_rate= (and "
        "relative_step=False), or leave scale_lr out",
    ]


@pytest.mark.parametrize("strategy", ["DataParallel", "DeMo"])
def test_layouts_that_differ_are_refused_with_the_name(tmp_path: Path, strategy: str) -> None:
    """MLX keeps the channels of a convolution last."""

    def cell(node: Node) -> None:
        model: Any = mlx_nn.Conv2d(3, 4, 2) if is_mlx(node) else torch.nn.Conv2d(3, 4, 2)
        sgd = mlx_optim.SGD(0.5) if is_mlx(node) else torch.optim.SGD(model.parameters(), lr=0.5)
        nc.DeMo(model) if strategy == "DeMo" else nc.DataParallel(model, sgd)

    with Cluster(["t", "m"], tmp_path) as cluster:
        result = cluster.run(on_this_thread(cell))["m"]
    assert isinstance(result, nc.TrainingError)
    assert "'weight'" in str(result)
    assert "4x2x2x3" in str(result)
    assert "4x3x2x2" in str(result)


@pytest.mark.parametrize("framework", ["m", "t"])
def test_two_sync_objects_over_one_part_are_refused(tmp_path: Path, framework: str) -> None:
    def cell(node: Node) -> None:
        whole = adapted(node).model
        nc.DiLoCo(whole, every=2, name="whole")
        part = mlx_nn.Sequential(whole.first) if is_mlx(node) else torch.nn.Sequential(whole.first)
        nc.LocalSGD(part, every=2, name="part")

    with Cluster([framework], tmp_path) as cluster:
        (error,) = cluster.run(on_this_thread(cell)).values()
        assert isinstance(error, nc.TrainingError)
        assert "of 'part' is a parameter of 'whole' too, which is not finished" in str(error)


def test_an_array_of_whole_numbers_is_named_with_how_to_keep_it(tmp_path: Path) -> None:
    class Masked(mlx_nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlx_nn.Linear(2, 1)
            self.inner.mask = mx.array([1, 0])

    def cell(node: Node) -> list[str]:
        model = Masked()
        with pytest.raises(ValueError, match=r"'inner\.mask' is int32: .*model\.freeze\(keys='mask'\) leaves it"):
            nc.DiLoCo(model)
        model.freeze(keys="mask")
        nc.DiLoCo(model).finish()
        return list(model["inner"])

    with Cluster(["m"], tmp_path) as cluster:
        assert "mask" in cluster.run(on_this_thread(cell))["m"]
