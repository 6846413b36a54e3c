"""Trainings of nodes that encode where the model is, and the gradients of one of them: the same as on the host."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.codecs import Vector
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.training.loop import encoding
from notebook_cluster.training.models.torch_parameters import TorchParameters
from notebook_cluster.training.strategies.gradients import GradientReplica
from tests.cluster_in_process import Cluster, Node
from tests.test_codecs_torch import values_of
from tests.test_training import assert_equal_models, flat
from tests.test_training_parallel import with_statistics
from tests.test_training_replica import apply
from tests.test_training_sparse import wide


def learn(model: nn.Module, seed: int) -> None:
    """Gradients and statistics of a batch that ``seed`` stands for, element by element from the model's own: where a
    matrix lies in memory changes what some processors' products of it round to, and nodes keep theirs elsewhere."""
    with torch.no_grad():
        for index, tensor in enumerate(model.parameters()):
            noise = torch.from_numpy(values_of(tensor.numel(), "noise", 100 * seed + index)).view_as(tensor)
            tensor.grad = tensor * 0.1 + noise.to(tensor.device)
        for index, buffer in enumerate(tensor for tensor in model.buffers() if tensor.is_floating_point()):
            buffer.mul_(0.9).add_(abs(values_of(1, "noise", 100 * seed + 50 + index).item()))


def trained(
    where: str, used: dict[str, int], strategy: str, arguments: dict[str, Any], device: str, folder: Path
) -> Vector:
    """The model that two nodes train; ``where`` they encode: here (on the host), there, or one each."""

    def cell(node: Node) -> nn.Module:
        parallel = strategy == "DataParallel"
        model = (with_statistics if parallel else wide)(node.rank()).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DataParallel(model, optimizer, **arguments) if parallel else getattr(nc, strategy)(model, **arguments)
        encoder = sync._replica._encoder
        original = encoder._encoded

        def encoded(*words: Any) -> Any:
            found = original(*words) if where == "there" or (where == "mixed" and node.rank()) else None
            used[where] = used.get(where, 0) + (found is not None)
            return found

        encoder._encoded = encoded
        for step in range(10):
            learn(model, step + 100 * node.rank())
            if not parallel:
                optimizer.step()
            sync.step(samples=8)
        sync.finish()
        return model.cpu()

    with Cluster(["a", "b"], folder / where) as cluster:
        found = cluster.run(cell)
    assert_equal_models(found)
    return flat(found["a"])


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        ("DiLoCo", {"every": 3, "codec": "int8"}),
        ("DiLoCo", {"every": 3, "codec": "int4", "fragments": 2, "overlap": 1}),
        ("SparseLoCo", {"every": 3}),
        ("SparseLoCo", {"every": 3, "overlap": 2}),
        ("DataParallel", {"codec": "int8", "resend": 4}),
        ("DataParallel", {"codec": "int4", "accumulate": 3}),
        ("DataParallel", {"codec": "int8", "mode": "server"}),
        ("DiLoCo", {"every": 3, "codec": "randomk-256", "overlap": 1}),
        ("DataParallel", {"codec": "topk-256"}),
    ],
)
def test_nodes_that_encode_here_and_there_train_one_model(
    strategy: str, arguments: dict[str, Any], device: str, tmp_path: Path
) -> None:
    used: dict[str, int] = {}
    here, there, mixed = (
        trained(where, used, strategy, arguments, device, tmp_path) for where in ("here", "there", "mixed")
    )
    assert used["here"] == 0
    assert used["there"] >= 6
    assert used["mixed"] >= 3
    np.testing.assert_array_equal(there, here)
    np.testing.assert_array_equal(mixed, here)


def test_diverged_gradients_are_told_and_error_feedback_goes_on_where_it_is(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder's place changes between rounds."""
    replicas = []
    for place in ("cpu", device):
        model = with_statistics(0).to(place)
        parameters = TorchParameters(model)
        layout = parameters.layout
        replica = GradientReplica(
            parameters,
            Fragments("int4", layout.size - layout.buffers, layout.buffers, gradients=True),
            torch.optim.SGD(model.parameters(), lr=0.1),
            scale_lr=False,
            is_lowest=lambda: False,
            restore=lambda: None,
        )
        theta = parameters.read()
        replica.start(0, theta, np.zeros_like(theta), "0")
        replicas.append(replica)
    replicas[0]._encoder = None
    for round, kinds in enumerate([("cuda", "cpu"), (), ("cuda", "cpu"), ("cuda", "cpu")], start=1):
        monkeypatch.setattr(encoding, "KINDS", kinds)
        for replica in replicas:
            for index, tensor in enumerate(replica.parameters.model.parameters()):
                values = values_of(tensor.numel(), "noise", 100 * round + index).reshape(tensor.shape)
                tensor.grad = torch.from_numpy(values).to(tensor.device)
                if round == 3 and index == 0:
                    tensor.grad[0, 0] = torch.nan
            replica.count(2.0)
            replica.count(2.0)
        host, there = (replica.contribution(finishing=False) for replica in replicas)
        assert host.finite == there.finite == (round != 3)
        assert bytes(host.encoded) == bytes(there.encoded)
        assert isinstance(replicas[1]._next_error, torch.Tensor if kinds and round != 3 else np.ndarray)
        if round == 3:
            for replica in replicas:
                replica.discard()
            continue
        mean = values_of(replicas[0].theta.size, "noise", round)
        for replica in replicas:
            apply(replica, round, replica.theta, mean, str(round))
        np.testing.assert_array_equal(*(replica.parameters.read() for replica in replicas))
