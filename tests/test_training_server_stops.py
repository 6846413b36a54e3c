"""One node's optimiser steps for all, and the coordinator is restarted or the cell is stopped in mid step."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.protocol.rounds import Commit, Prepared
from tests.cluster_in_process import POINTS, Cluster, Node
from tests.test_training import assert_equal_models, batch, build, flat, loss_of
from tests.test_training_parallel import NODES
from tests.test_training_server import momentum, plain, seeds, server_cell, told


@pytest.mark.parametrize(("direction", "kind"), POINTS)
def test_a_coordinator_restarted_in_mid_step_goes_on_with_it(tmp_path: Path, direction: str, kind: type) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        restarted = cluster.once_at(direction, "a", kind, 4, cluster.restart_coordinator)
        results = cluster.run(server_cell(8))
        assert [text for _, text in cluster.told if "afresh" in text] == []
    assert restarted
    assert_equal_models(results)
    np.testing.assert_allclose(flat(results["a"]), plain(seeds(range(8), (0, 1, 2))), atol=1e-6)


@pytest.mark.parametrize("where", [*POINTS, None])
def test_stop_finds_the_step_made_or_not_made(tmp_path: Path, where: Any) -> None:
    """What the optimiser did for rounds that were committed, done again in order, is where the model is."""
    gradients: dict[int, list[torch.Tensor]] = {}
    kept: dict[str, Any] = {}

    class Recording(torch.optim.SGD):
        def step(self, *arguments: Any) -> Any:
            sync, model, _ = kept["a"]
            gradients[sync.round + 1] = [tensor.grad.clone() for tensor in model.parameters()]
            if where is None and sync.round == 2 and not stopped:
                stopped.append(3)
                os.kill(os.getpid(), signal.SIGINT)
            return super().step(*arguments)

    def forever(node: Node) -> None:
        model = build(seed=0)
        optimizer = Recording(model.parameters(), lr=0.1, momentum=0.9)
        kept[node.name] = sync, model, _ = nc.DataParallel(model, optimizer, mode="server"), model, optimizer
        for step in range(10_000):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)

    def again(node: Node) -> nn.Module:
        sync, model, _ = kept[node.name]
        while sync.round < 7:
            loss_of(model, batch(10 * sync.round)).backward()
            sync.step(samples=8)
        return model  # type: ignore[no-any-return]

    stopped: list[int] = []
    stepped: list[int] = []
    with Cluster(["a"], tmp_path) as cluster:

        def watch(towards: str, node: str, message: Any) -> None:
            if isinstance(message, Commit) and message.members:
                stepped.append(message.round)

        cluster.watch = watch
        if where is not None:
            cluster.once_at(where[0], "a", where[1], 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        results = cluster.run(forever, main="a")
        assert isinstance(results["a"], KeyboardInterrupt)
        assert kept["a"][0].round in (2, 3)
        results = cluster.run(again)
        (said,) = {text for _, text in cluster.told}
        assert said.startswith("training 'model' goes on where it was stopped, after round ")
        assert "afresh" not in said
    assert stepped == sorted(set(stepped))
    assert len(stepped) >= 6
    model = build(seed=0)
    optimizer = momentum(model)
    for number in stepped:
        for tensor, gradient in zip(model.parameters(), gradients[number], strict=True):
            tensor.grad = gradient
        optimizer.step()
    np.testing.assert_array_equal(flat(results["a"]), flat(model))


def test_a_server_that_is_stopped_alone_leaves_the_steps_to_the_next_rank(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    def forever(node: Node) -> None:
        server_cell(0, kept=kept)(node)
        sync, model, _ = kept[node.name]
        for step in range(10_000):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
            if node.name == "b" and sync.members == ("b",):
                raise KeyboardInterrupt

    def again(node: Node) -> nn.Module:
        sync, model, optimizer = kept[node.name]
        for step in range(4):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
        assert len(optimizer.state) == (4 if node.name == "b" else 0)
        return model  # type: ignore[no-any-return]

    with Cluster(["a", "b"], tmp_path) as cluster:
        cluster.once_at("from", "a", Prepared, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        results = cluster.run(forever, main="a")
        assert all(isinstance(result, KeyboardInterrupt) for result in results.values()), results
        assert_equal_models(cluster.run(again))
        assert len(told(cluster, "b", "a")) == 1
