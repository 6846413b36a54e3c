"""Checkpoints of data-parallel training in which one node steps for all: the next to step gets its optimiser back."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.protocol.rounds import Save
from tests.cluster_in_process import Cluster, Node
from tests.test_training import assert_equal_models, batch, build, flat, loss_of
from tests.test_training_server import momentum, server_cell

GOES_ON = (
    "training 'model' goes on at round 5 of checkpoint 'half': parameters and the optimizer's state go on; the "
    "scheduler and the data begin anew"
)
AGAIN = (
    "training 'model' goes on at round {}: parameters go on; the optimizer, the scheduler and the data begin anew "
    "(fresh=True starts over)"
)


def saving(node: Node, mode: str = "server", steps: int = 8) -> nn.Module:
    model = build(seed=node.rank())
    sync = nc.DataParallel(model, momentum(model), mode=mode)
    for step in range(steps):
        loss_of(model, batch(10 * step + node.rank())).backward()
        sync.step(samples=8)
        if step == 4:
            sync.checkpoint("half")
    return model


def resumed(node: Node, mode: str = "server") -> nn.Module:
    model = build(seed=50 + node.rank())
    sync = nc.DataParallel(model, momentum(model), mode=mode, resume="half")
    for step in range(5, 8):
        loss_of(model, batch(10 * step + node.rank())).backward()
        sync.step(samples=8)
    return model


@pytest.mark.parametrize(("before", "after"), [("server", "server"), ("allreduce", "server"), ("server", "allreduce")])
def test_a_checkpoint_gives_the_optimizer_to_whichever_node_steps_then(
    tmp_path: Path, before: str, after: str, capfd: Any
) -> None:
    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(lambda node: saving(node, before))
    with Cluster(["b", "c"], tmp_path) as cluster:  # b, which had none, is the lowest rank
        again = cluster.run(lambda node: resumed(node, after))
        assert {text for _, text in cluster.told} == {GOES_ON}
    assert_equal_models(again)
    np.testing.assert_allclose(flat(again["b"]), flat(results["a"]), atol=1e-6)
    assert "afresh" not in capfd.readouterr().err


def test_a_server_that_has_no_checkpoint_gets_the_optimizer_from_the_node_that_has(tmp_path: Path) -> None:
    with Cluster(["a", "b"], tmp_path / "first") as cluster:
        results = cluster.run(saving)
    with Cluster(["bare", "b"], tmp_path / "first") as cluster:
        cluster.nodes["bare"]._directory = tmp_path / "empty"
        again = cluster.run(resumed)
        assert {text for _, text in cluster.told} == {GOES_ON}
    assert_equal_models({"before": results["a"], **again})


def test_a_checkpoint_that_the_server_did_not_live_to_write_says_so_when_it_is_resumed(
    tmp_path: Path, capfd: Any
) -> None:
    with Cluster(["a", "b"], tmp_path) as cluster:
        killed: list[bool] = []

        def watch(towards: str, node: str, message: Any) -> None:
            if isinstance(message, Save) and not killed:
                killed.append(True)
                cluster.kill("a")

        cluster.watch = watch
        assert isinstance(cluster.run(saving)["b"], nn.Module)
    assert killed
    with Cluster(["b"], tmp_path) as cluster:
        assert isinstance(cluster.run(resumed)["b"], nn.Module)
    assert "the checkpoint has no state of the optimizer" in capfd.readouterr().err


def test_a_checkpoint_asked_for_while_a_step_is_made_has_the_optimizer_of_its_round(tmp_path: Path) -> None:
    box: list[Cluster] = []
    saved: list[Any] = []
    calls: list[int] = []

    class Slow(torch.optim.SGD):
        def step(self, *arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 6:
                view = threading.Thread(target=lambda: saved.append(box[0].save("half")))
                view.start()
                assert box[0].wait_for(lambda: asked == [5])
            return super().step(*arguments)

    asked: list[int] = []
    with Cluster(["a", "b"], tmp_path) as cluster:
        box.append(cluster)
        cluster.watch = lambda towards, node, message: (
            asked.append(message.round) if isinstance(message, Save) and node == "a" else None
        )
        results = cluster.run(server_cell(8, lambda model: Slow(model.parameters(), lr=0.1, momentum=0.9)))
        assert cluster.wait_for(lambda: bool(saved))
        assert saved[0].error == ""

    def later(node: Node) -> nn.Module:
        model = build(seed=50)
        optimizer = Slow(model.parameters(), lr=0.1, momentum=0.9)
        sync = nc.DataParallel(model, optimizer, mode="server", resume="half")
        for step in range(5, 8):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        again = cluster.run(later)
    assert_equal_models({"before": results["a"], **again})


def test_the_mode_may_change_in_a_later_cell(tmp_path: Path) -> None:
    def cell(mode: str) -> Any:
        def run(node: Node) -> nn.Module:
            model = build(seed=node.rank())
            sync = nc.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), mode=mode)
            for step in range(3):
                loss_of(model, batch(10 * (sync.round + step) + node.rank())).backward()
                sync.step(samples=8)
            return model

        return run

    with Cluster(["a", "b"], tmp_path) as cluster:
        for mode in ("allreduce", "server", "allreduce"):
            assert_equal_models(cluster.run(cell(mode)))
        assert {text for _, text in cluster.told} == {AGAIN.format(3), AGAIN.format(6)}
