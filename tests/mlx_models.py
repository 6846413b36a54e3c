"""What the tests of MLX beside torch share: one model in both frameworks, and gradients that are given instead of
computed. A node whose name begins with ``m`` has the MLX model."""

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as mlx_nn
import numpy as np
import torch
from mlx.utils import tree_flatten, tree_unflatten
from torch import nn

from notebook_cluster.training.models.mlx_parameters import MlxParameters
from notebook_cluster.training.models.torch_parameters import TorchParameters
from tests.cluster_in_process import Node

SIZES = (40, 64, 3)
SHAPES = [[64], [64, 40], [3], [3, 64]]
"""Of the parameters, sorted by their names."""
COUNT = 64 + 64 * 40 + 3 + 3 * 64

Adapter = MlxParameters | TorchParameters
_computing = threading.Lock()
"""Threads stand for processes in these tests."""


class Theirs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(*SIZES[:2]), nn.Linear(*SIZES[1:])

    def forward(self, x: Any) -> Any:
        return self.second(torch.tanh(self.first(x)))


class Ours(mlx_nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlx_nn.Linear(*SIZES[:2]), mlx_nn.Linear(*SIZES[1:])

    def __call__(self, x: Any) -> Any:
        return self.second(mx.tanh(self.first(x)))


def is_mlx(node: Node) -> bool:
    return node.name.startswith("m")


def values(seed: int) -> Any:
    """Multiples of 1/64 from -1 to 1: sums and products with powers of two are exact in any order."""
    return np.random.default_rng(seed).integers(-64, 65, COUNT).astype(np.float32) / np.float32(64)


def adapted(node: Node, seed: int = 0) -> Adapter:
    """The model of the node's framework with ``values(seed)``, in its adapter."""
    adapter = MlxParameters(Ours()) if is_mlx(node) else TorchParameters(Theirs())
    adapter.load(values(seed))
    return adapter


def give(adapter: Adapter, vector: Any) -> dict[str, Any]:
    """The model has this gradient more; returns what ``sync.step`` needs beside."""
    tensors = adapter.layout.tensors(vector)
    if isinstance(adapter, MlxParameters):
        return {"grads": tree_unflatten([(name, mx.array(tensor)) for name, tensor in tensors.items()])}
    for name, parameter in adapter.model.named_parameters():
        gradient = torch.from_numpy(tensors[name].copy())
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return {}


def batch(seed: int, size: int = 8) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((size, SIZES[0])).astype(np.float32)
    return x, np.tanh(x[:, : SIZES[2]] * 2)


def loss_and_gradients(model: Any, data: tuple[Any, Any]) -> tuple[Any, dict[str, Any]]:
    """Of one batch, as people compute them in either framework; the second is what ``sync.step`` needs beside."""
    x, y = data
    if isinstance(model, nn.Module):
        loss = (model(torch.from_numpy(x)) - torch.from_numpy(y)).square().mean()
        loss.backward()
        return loss, {}
    with _computing:
        loss, grads = mlx_nn.value_and_grad(model, mlx_loss)(model, mx.array(x), mx.array(y))
        mx.eval(loss, grads)
    return loss, {"grads": grads}


def mlx_loss(model: Any, x: Any, y: Any) -> Any:
    return mx.square(model(x) - y).mean()


def plain_mlx(seed: int, optimizer: Any, steps: range, parts: int | range = 1, model: Ours | None = None) -> Ours:
    """The loop as people write it without a cluster, with the batches of so many nodes, or of these ranks; goes on with
    ``model``, if given."""
    if model is None:
        model = Ours()
        MlxParameters(model).load(values(seed))
    ranks = range(parts) if isinstance(parts, int) else parts
    for step in steps:
        batches = [batch(10 * step + rank) for rank in ranks]
        x, y = (np.concatenate([part[index] for part in batches]) for index in (0, 1))
        _, given = loss_and_gradients(model, (x, y))
        optimizer.update(model, given["grads"])
        mx.eval(model.parameters(), optimizer.state)
    return model


def state_of(optimizer: Any) -> dict[str, tuple[str, str]]:
    """Every array of its state: dtype and values, with all their digits."""
    return {name: (str(array.dtype), str(array.tolist())) for name, array in tree_flatten(optimizer.state)}


def on_this_thread(cell: Callable[[Node], Any]) -> Callable[[Node], Any]:
    """``cell`` for threads that end before the process does: mlx 0.30 and newer keep streams for each of them, and a
    process that ends with such streams may abort."""

    def run(node: Node) -> Any:
        try:
            result = cell(node)
            node.end_cell("ok")
            return result
        finally:
            getattr(mx, "clear_streams", lambda: None)()

    return run
