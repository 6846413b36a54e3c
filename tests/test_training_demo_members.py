"""DeMo: the momentum that each node keeps, through lost, late and new nodes, refusals, checkpoints and Stop."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.checkpoints import load
from notebook_cluster.protocol.rounds import Arrived, Commit, Prepared, Seal
from notebook_cluster.rounds.member.events_effects import Apply
from notebook_cluster.rounds.numerics.fragments import Fragments, tiles_of
from notebook_cluster.rounds.numerics.momentum import FLOAT32
from notebook_cluster.training.models.torch_parameters import TorchParameters
from notebook_cluster.training.settings.arguments import check_descent
from notebook_cluster.training.strategies import demo
from notebook_cluster.training.strategies.demo import LocalMomentum, MomentumReplica
from tests import demo_oracle as oracle
from tests.cluster_in_process import Cluster, Node
from tests.demo_rounds import LR, NODES, SHAPES, Recording, gradient, momentum_of, samples_of
from tests.test_training import assert_equal_models, batch, flat, loss_of
from tests.test_training_sparse import wide

# ---- lost and refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("direction", "kind"), [("from", Arrived), ("to", Seal), ("from", Prepared), ("to", Commit)])
def test_a_step_that_loses_a_node_leaves_the_others_momenta_right(tmp_path: Path, direction: str, kind: type) -> None:
    """A round done again sends the same bytes, and they are taken out of the momentum once."""
    gradients: dict[tuple[str, int], Any] = {}
    momenta: dict[str, Any] = {}

    def cell(node: Node) -> nn.Module:
        model = wide(0)
        sync = nc.DeMo(model, lr=LR)
        for step in range(6):
            loss_of(model, batch(step + 100 * NODES.index(node.name))).backward()
            gradients[node.name, step + 1] = gradient(model)
            sync.step(samples=samples_of(node.name))
        momenta[node.name] = momentum_of(sync)
        return model

    with Recording(NODES, tmp_path) as cluster:
        results = cluster.run_and_lose("c", direction, kind, 3, cell)
    assert_equal_models(results)
    theta, nodes = flat(wide(0)).copy(), {name: oracle.Node(SHAPES) for name in NODES}
    for number, rows in cluster.rounds():
        sent = [nodes[name].counted(gradients[name, number], data) for name, data in rows.items()]
        theta = oracle.step(theta, sent, [samples_of(name) for name in rows], LR)
    np.testing.assert_array_equal(flat(results["a"]), theta)
    for name in ("a", "b"):
        np.testing.assert_array_equal(momenta[name], nodes[name].momentum)


LOWER = "holds NaN or infinity: lower its learning rate"
OVERFLOW = (
    "holds NaN or infinity and is left out, as a GradScaler leaves a step out now and then; in every round: lower its "
    "learning rate"
)


@pytest.mark.parametrize(("scaled", "why"), [(False, LOWER), (True, OVERFLOW)])
def test_a_refused_gradient_leaves_no_trace_but_a_momentum_of_zero_unless_a_scaler_looks_for_it(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch, scaled: bool, why: str
) -> None:
    monkeypatch.setattr(demo, "check_unscaled", lambda: scaled)
    gradients: dict[tuple[str, int], Any] = {}
    momenta: dict[str, Any] = {}

    def cell(node: Node) -> nn.Module:
        model = wide(0)
        sync = nc.DeMo(model, lr=LR)
        for step in range(5):
            loss_of(model, batch(step + 100 * node.rank())).backward()
            if (node.name, step) == ("b", 2):
                next(model.parameters()).grad.view(-1)[7] = np.nan
            gradients[node.name, step + 1] = gradient(model)
            sync.step(samples=samples_of(node.name))
        momenta[node.name] = momentum_of(sync)
        return model

    with Recording(NODES, tmp_path) as cluster:
        results = cluster.run(cell)
    assert_equal_models(results)
    reason = f"the work of 'b' for round 3 {why}"
    assert [text for level, text in cluster.told if level in ("warning", "info") and "NaN" in text] == [reason]
    assert f"round 3 did not use this node's work: {reason}" in capfd.readouterr().err
    theta, nodes = flat(wide(0)).copy(), {name: oracle.Node(SHAPES) for name in NODES}
    for number, rows in cluster.rounds():
        assert list(rows) == (["a", "c"] if number == 3 else NODES)
        if number == 3 and not scaled:
            nodes["b"].momentum[:] = 0
        sent = [nodes[name].counted(gradients[name, number], data) for name, data in rows.items()]
        theta = oracle.step(theta, sent, [samples_of(name) for name in rows], LR)
    np.testing.assert_array_equal(flat(results["a"]), theta)
    for name in NODES:
        np.testing.assert_array_equal(momenta[name], nodes[name].momentum)


# ---- late, new, and again --------------------------------------------------------------------------------------


def test_what_was_sent_leaves_the_momentum_at_commit_only() -> None:
    """One replica without a cluster: late, released, counted and taken over."""
    parameters = TorchParameters(wide())
    local, size = LocalMomentum(), parameters.layout.size
    local.begin(size, "schema", None)
    descent = check_descent(LR, 0.999, True, 0.0)
    fragments = Fragments("dct", size, tiles=tiles_of(parameters.layout), descent=descent)
    replica = MomentumReplica(parameters, fragments, local, 0.999)
    theta = parameters.read()
    replica.start(0, theta, theta, "zero")

    def one_step(seed: int) -> None:
        loss_of(parameters.model, batch(seed)).backward()
        replica.count(8)

    def bytes_now() -> bytes:
        return bytes(replica.contribution(finishing=False).encoded)

    one_step(0)
    first = bytes_now()
    assert replica.outstanding
    replica.rebase(1, theta, theta, "one")  # a round went on without it
    replica.release()
    assert bytes_now() == first  # nothing was lost of it, and nothing is sent twice
    replica.apply(Apply(2, theta, theta, "two", ("a",), True, False, 1, 0))
    left = local.state["momentum"].copy()
    assert np.linalg.norm(left) > 0
    assert not replica.outstanding
    assert not parameters.has_gradients()
    one_step(1)
    second = bytes_now()
    replica.start(2, theta, theta, "two")  # a new cell on the same state: nobody counted it
    np.testing.assert_array_equal(local.state["momentum"], left)
    assert bytes_now() == second
    replica.start(9, theta, theta, "nine")  # on another state, which may contain it: it is not sent again
    assert not replica.samples
    assert not np.array_equal(local.state["momentum"], left)
    next_object = LocalMomentum()
    next_object.begin(size, "schema", local)
    np.testing.assert_array_equal(next_object.state["momentum"], local.state["momentum"])
    next_object.begin(size, "another schema", local)
    other = LocalMomentum()
    other.begin(size, "another schema", local)
    assert not other.state


def trained(sync: nc.DeMo, model: nn.Module, node: Node, steps: range) -> None:
    for step in steps:
        loss_of(model, batch(step + 100 * node.rank())).backward()
        sync.step(samples=samples_of(node.name))


def test_checkpoint_and_resume_and_the_cell_run_again_give_the_same_numbers(tmp_path: Path) -> None:
    def at_once(node: Node) -> nn.Module:
        model = wide(0)
        trained(nc.DeMo(model, lr=LR), model, node, range(6))
        return model

    def first_half(node: Node) -> nn.Module:
        model = wide(0)
        sync = nc.DeMo(model, lr=LR)
        trained(sync, model, node, range(3))
        assert sync.checkpoint("digits") == tmp_path / "digits" / "round-000003"
        return model

    def second_half(node: Node) -> nn.Module:
        model = wide(5)
        sync = nc.DeMo(model, lr=LR, resume="digits" if not node.handlers else None)
        assert sync.round == 3
        assert np.linalg.norm(momentum_of(sync)) > 0
        trained(sync, model, node, range(3, 6))
        return model

    with Cluster(NODES, tmp_path / "at once") as cluster:
        expected = flat(cluster.run(at_once)["a"])
    with Cluster(NODES, tmp_path) as cluster:
        cluster.run(first_half)
        again = cluster.run(second_half)  # in the same kernels, with a new model and sync object
    assert_equal_models(again)
    np.testing.assert_array_equal(flat(again["a"]), expected)
    with Cluster(NODES, tmp_path) as cluster:
        resumed = cluster.run(second_half)
    assert_equal_models(resumed)
    np.testing.assert_array_equal(flat(resumed["a"]), expected)


def test_a_checkpoint_of_another_strategy_gives_the_parameters_and_says_that_there_is_no_momentum(
    tmp_path: Path, capfd: Any
) -> None:
    class Sgd(LocalMomentum):
        """Another optimizer's state."""

    def first(node: Node) -> Any:
        model = wide(0)
        sync = nc.LocalSGD(model, every=1, optimizer=Sgd())
        with torch.no_grad():
            next(model.parameters()).add_(1)
        sync.step()
        sync.checkpoint("digits")
        return flat(model).copy()

    def second(node: Node) -> Any:
        model = wide(1)
        sync = nc.DeMo(model, lr=LR, resume="digits")
        assert not sync._momentum.state
        return flat(model).copy()

    with Cluster(["a"], tmp_path) as cluster:
        saved = cluster.run(first)["a"]
    with Cluster(["a"], tmp_path) as cluster:
        np.testing.assert_array_equal(cluster.run(second)["a"], saved)
    assert "the checkpoint's optimizer is Sgd, this one LocalMomentum: it starts afresh" in capfd.readouterr().err


def test_the_last_step_in_a_checkpoint_from_before_protocol_21_is_no_outer_momentum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(node: Node) -> Any:
        model = wide(0)
        sync = nc.DeMo(model, lr=LR)
        trained(sync, model, node, range(2))
        sync.checkpoint("digits")
        return [values.detach().clone() for values in model.parameters()]

    def second(node: Node) -> Any:
        model = wide(1)
        sync = nc.DiLoCo(model, every=1, resume="digits")
        assert not sync._replica.momentum.any()
        with torch.no_grad():
            next(model.parameters()).add_(1)
        sync.step()
        return model

    with Cluster(["a"], tmp_path) as cluster:
        monkeypatch.setattr(demo, "NOT_KEPT", FLOAT32)
        saved = cluster.run(first)["a"]
    (path,) = (tmp_path / "digits").iterdir()
    assert all(np.abs(step).max() == 1 for step in load(path).momentum.values())
    with Cluster(["a"], tmp_path) as cluster:
        trained_on = list(cluster.run(second)["a"].parameters())
    assert (trained_on[0] > saved[0]).all()
    torch.testing.assert_close(trained_on[1:], saved[1:], rtol=0, atol=0)


def test_a_node_that_joins_takes_the_state_and_part_in_every_step(tmp_path: Path) -> None:
    joined, told = threading.Event(), threading.Event()
    counts: dict[str, int] = {}

    def cell(node: Node) -> nn.Module:
        model = wide(node.rank())
        sync = nc.DeMo(model, lr=LR)
        for step in range(12 if node.name != "new" else 4):
            if step == 4 and node.name != "new":
                told.set()
                assert joined.wait(60)
            loss_of(model, batch(step)).backward()
            done = sync.step(samples=8)
            assert done is not None
            counts[node.name] = counts.get(node.name, 0) + ("new" in done.members)
        sync.finish()
        return model

    def seen(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Arrived) and node == "new" and message.samples:
            joined.set()

    with Recording(["a", "b"], tmp_path) as cluster:
        cluster.seen = seen
        running = cluster.start(cell)
        running.go()
        assert told.wait(60)
        cluster.add("new")
        running.join("new")
        assert_equal_models(running.wait())
    assert counts["a"] == counts["b"] == counts["new"] == 4
    assert all(len(found) == 1 for found in cluster.hashes.values())


def test_a_quorum_goes_on_without_a_slow_node_whose_work_is_counted_once_later(tmp_path: Path) -> None:
    ahead, back = threading.Event(), threading.Event()
    gradients: dict[str, list[Any]] = {name: [] for name in NODES}
    momenta: dict[str, Any] = {}

    def cell(node: Node) -> nn.Module:
        model = wide(0)
        sync = nc.DeMo(model, lr=LR, quorum=2, grace=0.0)
        for step in range(1 if node.name == "c" else 6):
            loss_of(model, batch(step + 100 * node.rank())).backward()
            gradients[node.name].append(gradient(model))
            if node.name == "c":
                assert ahead.wait(60)
            elif step == 3:
                assert back.wait(60)
            sync.step(samples=samples_of(node.name))
        sync.finish()
        momenta[node.name] = momentum_of(sync)
        return model

    def seen(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Commit) and message.round == 2:
            ahead.set()
        if isinstance(message, Arrived) and node == "c":
            back.set()

    with Recording(NODES, tmp_path) as cluster:
        cluster.seen = seen
        assert_equal_models(results := cluster.run(cell))
    theta, nodes, used = flat(wide(0)).copy(), {name: oracle.Node(SHAPES) for name in NODES}, []
    left = {name: list(found) for name, found in gradients.items()}
    for _, rows in cluster.rounds():
        used += list(rows)
        sent = [nodes[name].counted(left[name].pop(0), data) for name, data in rows.items()]
        theta = oracle.step(theta, sent, [samples_of(name) for name in rows], LR)
    assert [used.count(name) for name in NODES] == [6, 6, 1]
    np.testing.assert_array_equal(flat(results["a"]), theta)
    for name in NODES:
        np.testing.assert_array_equal(momenta[name], nodes[name].momentum)


def test_stop_leaves_one_state_and_the_next_cell_goes_on_from_it(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    def forever(node: Node) -> None:
        model = wide(node.rank())
        kept[node.name] = sync, model = nc.DeMo(model, lr=LR), model
        for step in range(10_000):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
            if node.name == "b" and fired:
                raise KeyboardInterrupt

    def again(node: Node) -> nn.Module:
        sync, model = kept[node.name]
        trained(sync, model, node, range(4))
        return model  # type: ignore[no-any-return]

    def anew(node: Node) -> nn.Module:
        model = wide(9)
        sync = nc.DeMo(model, lr=LR)
        assert sync.round >= 4
        trained(sync, model, node, range(4))
        return model

    with Recording(["a", "b"], tmp_path) as cluster:
        fired = cluster.once_at("from", "a", Prepared, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        results = cluster.run(forever, main="a")
        assert all(isinstance(result, KeyboardInterrupt) for result in results.values()), results
        assert_equal_models(cluster.run(again))
        assert_equal_models(cluster.run(anew))
    assert all(len(found) == 1 for found in cluster.hashes.values())
