"""Data-parallel training: one step as if one machine had all batches, whoever is lost, joins or is late."""

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.protocol.rounds import Applied, Arrived, Commit, Prepared, Seal
from notebook_cluster.training.models.optimizer_settings import settings_of
from tests.cluster_in_process import POINTS, Cluster, Node
from tests.test_training import _building, assert_close_in_ulps, assert_equal_models, batch, build, flat, loss_of

NODES = ["a", "b", "c"]


def made(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "LBFGS":
        return torch.optim.LBFGS(model.parameters())
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def parallel_cell(steps: int, kind: str = "AdamW", **arguments: Any) -> Any:
    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        sync = nc.DataParallel(model, made(kind, model), **arguments)
        for step in range(steps):
            loss = loss_of(model, batch(10 * step + node.rank()))
            loss.backward()
            sync.step(loss, samples=8)
        return model

    return cell


def alone(steps: int, kind: str, parts: int, lr: float = 1.0) -> tuple[Any, Any]:
    """The same on one machine with all batches; and the largest magnitude that each parameter had."""
    model = build(seed=0)
    optimizer = made(kind, model)
    optimizer.param_groups[0]["lr"] *= lr
    largest = np.abs(flat(model))
    for step in range(steps):
        batches = [batch(10 * step + rank) for rank in range(parts)]
        optimizer.zero_grad()
        loss_of(model, (torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))).backward()
        optimizer.step()
        largest = np.maximum(largest, np.abs(flat(model)))
    return flat(model), largest


# ---- the numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_one_node_is_plain_training_bit_for_bit(tmp_path: Path, kind: str) -> None:
    with Cluster(["a"], tmp_path) as cluster:
        model = cluster.run(parallel_cell(8, kind))["a"]
    np.testing.assert_array_equal(flat(model), alone(8, kind, 1)[0])


def test_several_nodes_are_one_machine_with_all_their_batches(tmp_path: Path) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(parallel_cell(6, "SGD", resend=4))
    assert_equal_models(results)
    expected, largest = alone(6, "SGD", 3)
    assert_close_in_ulps(flat(results["a"]), expected, largest + 0.1, ulps=2 * 6)


def test_gradients_weigh_by_samples(tmp_path: Path) -> None:
    def cell(node: Node) -> nn.Module:
        model = build(seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = nc.DataParallel(model, optimizer)
        size = (8, 4, 20)[node.rank()]
        loss = loss_of(model, batch(node.rank(), size))
        loss.backward()
        sync.step(loss, samples=size)
        return model

    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(cell)
    assert_equal_models(results)
    model = build(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [batch(rank, size) for rank, size in enumerate((8, 4, 20))]
    loss_of(model, (torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))).backward()
    optimizer.step()
    np.testing.assert_allclose(flat(results["a"]), flat(model), atol=1e-6)


def test_accumulated_gradients_make_one_step_and_what_is_left_a_last_one(tmp_path: Path) -> None:
    returned: list[bool] = []

    def cell(node: Node) -> nn.Module:
        model = build(seed=0)
        sync = nc.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=3)
        for step in range(4):
            loss_of(model, batch(step)).backward()
            returned.append(sync.step(samples=8) is not None)
        return model

    with Cluster(["a"], tmp_path) as cluster:
        model = cluster.run(cell)["a"]
    assert returned == [False, False, True, False]
    plain = build(seed=0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for steps in ((0, 1, 2), (3,)):
        optimizer.zero_grad()
        (sum(loss_of(plain, batch(step)) for step in steps) / len(steps)).backward()  # type: ignore[union-attr]
        optimizer.step()
    np.testing.assert_allclose(flat(model), flat(plain), atol=1e-6)


def test_the_learning_rate_is_scaled_by_the_nodes_for_the_step_only(tmp_path: Path) -> None:
    rates: list[float] = []

    def cell(node: Node) -> nn.Module:
        model = build(seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = nc.DataParallel(model, optimizer, scale_lr=True)
        for step in range(3):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
            rates.append(optimizer.param_groups[0]["lr"])
        return model

    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(cell)
    assert set(rates) == {0.1}
    np.testing.assert_allclose(flat(results["a"]), alone(3, "SGD", 3, lr=3.0)[0], atol=1e-5)


def test_running_statistics_are_averaged_and_unused_parameters_left_alone(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.used, self.unused = nn.BatchNorm1d(6), nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(self.norm(x))  # type: ignore[no-any-return]

    def cell(node: Node) -> Any:
        with _building:  # the seed is that of all threads
            torch.manual_seed(0)
            model = Model()
        before = model.unused.weight.detach().clone()
        sync = nc.DataParallel(model, torch.optim.AdamW(model.parameters(), lr=0.01), codec="int8")
        for step in range(3):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
        assert torch.equal(model.unused.weight, before)
        return model.norm.running_var.numpy().copy()  # type: ignore[union-attr]

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(cell)
    np.testing.assert_array_equal(results["a"], results["b"])
    assert (results["a"] > 0).all()
    assert not (results["a"] == 1).any()


def test_tied_parameters_count_once_frozen_ones_stay_and_dtypes_too(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.second.weight = self.first.weight
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.frozen(self.second(self.first(x)))  # type: ignore[no-any-return]

    sent: list[int] = []

    def cell(node: Node) -> Any:
        with _building:
            torch.manual_seed(0)
            model = Model().to(torch.bfloat16)
        before = model.frozen.weight.detach().clone()
        sync = nc.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            x, y = batch(10 * step + node.rank())
            (model(x.bfloat16()) - y.bfloat16()).square().mean().backward()
            sync.step(samples=8)
        assert torch.equal(model.frozen.weight, before)
        assert model.second.weight is model.first.weight
        assert model.first.weight.dtype == torch.bfloat16
        sent.append(sync._replica.fragments.size)
        return model.first.weight.detach().float().numpy()

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(cell)
    np.testing.assert_array_equal(results["a"], results["b"])
    assert sent == [36 + 6 + 6] * 2


@pytest.mark.parametrize("codec", ["int8", "fp16", "topk", "randomk"])
def test_lossy_gradients_learn_and_parameters_stay_equal(tmp_path: Path, codec: str) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(parallel_cell(40, codec=codec, resend=7))
    assert_equal_models(results)
    data = batch(9_999, 64)
    assert loss_of(results["a"], data).item() < 0.3 * loss_of(build(seed=0), data).item()


def test_parameters_that_drifted_apart_are_sent_again(tmp_path: Path) -> None:
    def cell(node: Node) -> nn.Module:
        model = build(seed=0)
        sync = nc.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), resend=5)
        for step in range(6):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
            if step == 2 and node.name == "b":  # as an optimiser of another machine might
                with torch.no_grad():
                    model[0].weight += 1e-6
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        assert_equal_models(cluster.run(cell))


@pytest.mark.parametrize("mode", ["allreduce", "server"])
def test_optimizers_that_differ_are_named_once_where_each_node_makes_the_step(tmp_path: Path, mode: str) -> None:
    def cell(node: Node) -> nn.Module:
        model = build(seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sync = nc.DataParallel(model, optimizer, resend=3, mode=mode)
        for step in range(6):
            if step == 2 and node.name != "a":  # a schedule that only some of them have
                optimizer.param_groups[0]["lr"] = 0.05
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
        return model

    with Cluster(NODES, tmp_path) as cluster:
        cluster.run(cell)
    warnings = [text for level, text in cluster.told if level == "warning"]
    if mode == "server":  # the others' settings are not used
        assert not warnings
        return
    (warning,) = warnings
    told = "'a' SGD(lr=0.1, momentum=0.9), 'b' SGD(lr=0.05, momentum=0.9), 'c' SGD(lr=0.05, momentum=0.9)"
    assert warning.startswith(f"optimizers of 'model' differ in round 3 ({told}): every node makes the step itself")


def test_what_an_optimizer_steps_with_is_told_in_one_line() -> None:
    model = build(seed=0)
    groups = [{"params": [one], "lr": torch.tensor(0.1 / (1 + rank))} for rank, one in enumerate(model.parameters())]
    assert settings_of(torch.optim.SGD(groups[:2], lr=1, weight_decay=0.01)) == "SGD(lr=0.1/0.05, weight_decay=0.01)"
    assert settings_of(made("AdamW", model)) == "AdamW(lr=0.01, betas=0.9 0.999, weight_decay=0.01)"
    many = [{"params": [torch.ones(1)], "lr": 1 / (3 + rank)} for rank in range(40)]
    one, other = settings_of(torch.optim.SGD(many)), settings_of(torch.optim.SGD([*many[:39], {**many[39], "lr": 1}]))
    assert one != other, "what is not shown counts as well"
    assert max(len(one), len(other)) < 200


def test_nodes_with_less_data_go_along(tmp_path: Path) -> None:
    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        sync = nc.DataParallel(model, torch.optim.AdamW(model.parameters(), lr=0.01), resend=3)
        for step in range(4 + 3 * node.rank()):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
        sync.finish()
        return model

    with Cluster(NODES, tmp_path) as cluster:
        assert_equal_models(cluster.run(cell))


# ---- losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("direction", "kind"), [*POINTS, ("from", Applied)])
@pytest.mark.parametrize("victim", ["a", "c"])
def test_a_node_killed_at_any_point_of_a_step_leaves_the_others_equal(
    tmp_path: Path, direction: str, kind: type, victim: str
) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run_and_lose(victim, direction, kind, 4, parallel_cell(9, resend=3))
        assert_equal_models(results)


@pytest.mark.parametrize(("direction", "kind"), POINTS)
def test_a_coordinator_restarted_in_mid_step_goes_on_with_it(tmp_path: Path, direction: str, kind: type) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        restarted = cluster.once_at(direction, "b", kind, 4, cluster.restart_coordinator)
        results = cluster.run(parallel_cell(8, "SGD"))
    assert restarted
    assert_equal_models(results)
    np.testing.assert_allclose(flat(results["a"]), alone(8, "SGD", 3)[0], atol=1e-6)


@pytest.mark.parametrize(("direction", "kind"), [*POINTS, ("from", Applied)])
def test_a_coordinator_that_lost_the_power_and_its_last_commits_goes_on_from_what_the_nodes_have(
    tmp_path: Path, direction: str, kind: type
) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        lose_power = partial(cluster.restart_coordinator, power_lost=True)
        restarted = cluster.once_at(direction, "b", kind, 5, lose_power)
        results = cluster.run(parallel_cell(8, "SGD"))
        commits = [record["commit"]["round"] for record in cluster.records if record["kind"] == "commit"]
    assert restarted
    assert commits == list(range(1, len(commits) + 1))
    assert_equal_models(results)
    np.testing.assert_allclose(flat(results["a"]), alone(8, "SGD", 3)[0], atol=1e-6)


def test_a_joiner_takes_parameters_and_optimizer_and_the_others_wait_for_it(tmp_path: Path) -> None:
    here = threading.Event()
    last: list[int] = []

    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        sync = nc.DataParallel(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        step = 0
        while not last or sync.round < last[0]:
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
            step += 1
            if sync.round >= 5:
                here.set()
            if "late" in sync.members and not last:
                last.append(sync.round + 8)  # equal optimisers from here on, or the parameters would differ
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        assert_equal_models(cluster.run_with_newcomer(cell, here))
    assert last


def with_statistics(seed: int) -> nn.Module:
    """Each forward pass changes running statistics."""
    with _building:  # the seed is that of all threads
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 70), nn.Tanh(), nn.Linear(70, 3)
        )


def test_a_state_is_fetched_from_a_node_whose_running_statistics_have_moved_on(tmp_path: Path) -> None:
    """The hash of the first state is that of its running statistics too."""
    arrived = threading.Event()

    def cell(node: Node) -> tuple[nn.Module, list[tuple[str, ...]]]:
        model, members = with_statistics(node.rank()), []
        sync = nc.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)
        for step in range(6):
            loss_of(model, batch(10 * step + node.rank())).backward()
            if (round := sync.step(samples=8)) is not None:
                members.append(round.members)
        return model, members

    def watch(direction: str, name: str, message: Any) -> None:
        if (direction, name) == ("from", "a") and isinstance(message, Arrived):
            arrived.set()

    with Cluster(["a", "b"], tmp_path) as cluster:
        cluster.watch = watch
        cluster.lose = lambda sender, receiver, header: header.kind == "state_request" and not arrived.is_set()
        results = cluster.run(cell)
        assert not [text for level, text in cluster.told if level == "warning"]
    assert [members for _, members in results.values()] == [[("a", "b")] * 3] * 2
    assert_equal_models({name: model for name, (model, _) in results.items()})


def test_a_newcomer_gets_the_state_of_a_cell_that_ended_before_its_first_step(tmp_path: Path) -> None:
    syncs: dict[str, Any] = {}
    members: list[tuple[str, ...]] = []

    def stopped(node: Node) -> None:
        model = with_statistics(node.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        syncs[node.name] = model, nc.DataParallel(model, optimizer, accumulate=3)
        for step in range(2):
            loss_of(model, batch(step + 10 * node.rank())).backward()
            syncs[node.name][1].step(samples=8)
        syncs[node.name][1].checkpoint("early")
        raise KeyboardInterrupt

    def cell(node: Node) -> nn.Module:
        if node.name not in syncs:
            model = with_statistics(node.rank())
            syncs[node.name] = model, nc.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=3)
        model, sync = syncs[node.name]
        for step in range(6):
            loss_of(model, batch(step + 10 * node.rank())).backward()
            if (round := sync.step(samples=8)) is not None:
                members.append(round.members)
        sync.finish()
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        assert all(isinstance(result, KeyboardInterrupt) for result in cluster.run(stopped).values())
        cluster.add("late")
        results = cluster.run(cell)
        assert not [text for level, text in cluster.told if level == "warning"]
    assert set(members) == {("a", "b", "late")}
    assert_equal_models(results)


def test_a_node_that_missed_a_step_takes_over_the_state_and_its_stale_gradient_is_not_used(tmp_path: Path) -> None:
    seen: list[Any] = []

    with Cluster(NODES, tmp_path) as cluster:

        def watch(towards: str, node: str, message: Any) -> None:
            if isinstance(message, Commit) and towards == "to":
                seen.append((node, message.round, tuple(message.members)))

        cluster.watch = watch
        cluster.once_at("to", "c", Seal, 4, lambda: cluster.unlink("c"))
        running = cluster.start(parallel_cell(12))
        running.go()
        assert cluster.wait_for(lambda: any(number >= 5 for _, number, _ in seen))
        cluster.relink("c")
        results = running.wait()
    assert_equal_models(results)
    assert ("a", 4, ("a", "b")) in seen
    back = [members for node, number, members in seen if node == "c" and number > 4]
    assert back
    assert "c" not in back[0]


def test_a_gradient_with_nan_is_refused_and_the_step_is_that_of_the_others(tmp_path: Path, capfd: Any) -> None:
    def cell(node: Node) -> nn.Module:
        model = build(seed=0)
        sync = nc.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            loss = loss_of(model, batch(10 * step + node.rank()))
            (loss * (float("nan") if node.name == "b" and step == 1 else 1.0)).backward()
            sync.step(samples=8)
        return model

    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(cell)
    assert_equal_models(results)
    assert np.isfinite(flat(results["a"])).all()
    assert "the work of 'b' for round 2 holds NaN or infinity" in capfd.readouterr().err


def test_stop_and_the_cell_again_goes_on_from_one_state(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    def forever(node: Node) -> None:
        model = build(seed=node.rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        kept[node.name] = sync, model, optimizer = nc.DataParallel(model, optimizer), model, optimizer
        for step in range(10_000):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
            if node.name == "b" and fired:
                raise KeyboardInterrupt

    def again(node: Node) -> nn.Module:
        sync, model, _ = kept[node.name]
        for step in range(4):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
        return model  # type: ignore[no-any-return]

    with Cluster(["a", "b"], tmp_path) as cluster:
        fired = cluster.once_at("from", "a", Prepared, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        results = cluster.run(forever, main="a")
        assert all(isinstance(result, KeyboardInterrupt) for result in results.values()), results
        assert_equal_models(cluster.run(again))
        assert_equal_models(cluster.run(parallel_cell(3)))


# ---- checkpoints -----------------------------------------------------------------------------------------------


def test_a_checkpoint_has_parameters_and_optimizer_of_the_same_step(tmp_path: Path) -> None:
    def first(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        sync = nc.DataParallel(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in range(8):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
            if step == 4:
                sync.checkpoint("half")
        return model

    def resumed(node: Node) -> nn.Module:
        model = build(seed=50 + node.rank())
        sync = nc.DataParallel(model, torch.optim.AdamW(model.parameters(), lr=0.01), resume="half")
        for step in range(5, 8):
            loss_of(model, batch(10 * step + node.rank())).backward()
            sync.step(samples=8)
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(first)
    with Cluster(["a", "other"], tmp_path) as cluster:
        again = cluster.run(resumed)
    assert_equal_models({**results, **{f"again {name}": model for name, model in again.items()}})


def test_a_checkpoint_of_gradients_is_resumed_where_contributions_are_averaged_and_the_other_way(
    tmp_path: Path,
) -> None:
    """Its momentum is a mean of gradients, which is no outer momentum."""

    def first(node: Node) -> None:
        model = build(seed=0)
        sync = nc.DataParallel(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in range(3):
            loss_of(model, batch(step)).backward()
            sync.step(samples=8)
        sync.checkpoint("kept")
        sync.finish()

    def averaged(node: Node) -> tuple[bool, nn.Module]:
        model = build(seed=1)
        sync = nc.DiLoCo(model, every=1, resume="kept", outer_lr=1.0)
        began = bool(sync.outer_momentum_by_name()["0.weight"].any())
        sync.step(samples=8)
        sync.checkpoint("kept")
        return began, model

    def parallel(node: Node) -> nn.Module:
        model = build(seed=2)
        sync = nc.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.0), resume="kept")
        loss_of(model, batch(0)).backward()
        sync.step(samples=8)
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        cluster.run(first)
    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(averaged)
    assert [began for began, _ in results.values()] == [False, False]
    with Cluster(["a", "b"], tmp_path) as cluster:
        again = cluster.run(parallel)
    assert_equal_models({**{f"averaged {name}": model for name, (_, model) in results.items()}, **again})


# ---- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"accumulate": 0}, "accumulate=0: use a whole number of steps from 1"),
        ({"resend": 0.5}, "resend=0.5: use a whole number of steps from 1"),
        ({"scale_lr": 2}, "scale_lr=2: use True or False"),
        ({"codec": "sparse"}, "codec='sparse': use one of"),
        ({"optimizer": None}, "optimizer=None: pass the torch.optim optimizer"),
        ({"optimizer": 3}, "optimizer=int: pass a torch.optim optimizer"),
        ({"kind": "LBFGS"}, "optimizer=LBFGS computes the loss several times for a step"),
    ],
)
def test_impossible_arguments_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    def cell(node: Node) -> None:
        model = build()
        optimizer = made(arguments.pop("kind", "SGD"), model)
        nc.DataParallel(model, **({"optimizer": optimizer} | arguments))

    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(cell)["a"]
    assert isinstance(result, ValueError | TypeError)
    assert message in str(result)


def test_nodes_that_scale_or_resend_otherwise_are_refused(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        model = build()
        nc.DataParallel(model, made("SGD", model), scale_lr=node.name == "b")

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(cell)
    assert "every=1 steps, parameters every 100, lr by nodes" in str(results["b"])


def test_a_step_without_any_gradient_is_an_error_and_no_step_of_zeros(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        model = build()
        nc.DataParallel(model, made("SGD", model)).step(1.0, samples=8)

    with Cluster(["a"], tmp_path) as cluster:
        error = cluster.run(cell)["a"]
    assert isinstance(error, ValueError)
    assert str(error).startswith("no parameter has a gradient: call loss.backward() before sync.step()")


STRATEGIES: dict[str, Any] = {
    "allreduce": lambda model, optimizer: nc.DataParallel(model, optimizer),
    "server": lambda model, optimizer: nc.DataParallel(model, optimizer, mode="server"),
    "accumulate": lambda model, optimizer: nc.DataParallel(model, optimizer, accumulate=2),
    "at the end": lambda model, optimizer: nc.DataParallel(model, optimizer, accumulate=100),
    "DeMo": lambda model, optimizer: nc.DeMo(model, lr=0.003),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_a_scaler_multiplied_are_refused_until_they_are_divided_again(
    tmp_path: Path, strategy: str
) -> None:
    """With one node, for a scaler is known to its process."""

    def cell(node: Node, scale: float, divides: bool) -> nn.Module:
        model = build(seed=0)
        optimizer = made("SGD", model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        sync = STRATEGIES[strategy](model, optimizer)
        for step in range(4):
            loss = loss_of(model, batch(10 * step + node.rank()))
            scaler.scale(loss).backward()
            if divides and (strategy != "accumulate" or step % 2):
                scaler.unscale_(optimizer)
            sync.step(loss, samples=8)
            if divides and (strategy != "accumulate" or step % 2):
                scaler.update()
        sync.finish()
        return model

    with Cluster(["a"], tmp_path) as cluster:
        error = cluster.run(partial(cell, scale=1024.0, divides=False))["a"]
    assert isinstance(error, ValueError)
    assert str(error).startswith("the gradients are 1024 times too large, for GradScaler has multiplied the loss")
    if strategy == "at the end":  # nothing to divide them in between
        return
    models = []
    for scale, divides in ((1024.0, True), (1.0, False)):
        with Cluster(["a"], tmp_path / f"{scale}") as cluster:
            models += cluster.run(partial(cell, scale=scale, divides=divides)).values()
    assert_equal_models(dict(enumerate(models)))


def test_a_scaler_of_an_earlier_cell_is_not_held_against_a_loop_without_one(tmp_path: Path) -> None:
    scalers = [torch.amp.GradScaler("cpu") for _ in range(2)]

    def cell(node: Node) -> nn.Module:
        model, other = build(seed=0), build(seed=1)
        sync = nc.DataParallel(model, made("SGD", model))
        optimizer = made("SGD", other)
        for step in range(2):  # beside a model with a scaler, that each node trains alone
            scalers[0].scale(loss_of(other, batch(step))).backward()
            scalers[0].step(optimizer)
            scalers[0].update()
            loss_of(model, batch(step)).backward()
            sync.step(samples=8)
        return model

    with Cluster(["a"], tmp_path) as cluster:
        scalers[1].scale(torch.ones(1))  # and was interrupted
        assert isinstance(cluster.run(cell)["a"], nn.Module)


@pytest.mark.parametrize("strategy", ["allreduce", "server", "DeMo"])
def test_an_overflow_that_a_scaler_looks_for_is_no_advice_to_lower_the_learning_rate(
    tmp_path: Path, capfd: Any, strategy: str
) -> None:
    scales = []

    def cell(node: Node) -> nn.Module:
        model = build(seed=0)
        optimizer = made("SGD", model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        sync = STRATEGIES[strategy](model, optimizer)
        for step in range(4):
            scaled = scaler.scale(loss_of(model, batch(step)))
            (scaled * (torch.inf if step == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            sync.step(samples=8)
            scaler.update()
        sync.finish()
        scales.append(scaler.get_scale())
        return model

    with Cluster(["a"], tmp_path) as cluster:
        model = cluster.run(cell)["a"]
    assert np.isfinite(flat(model)).all()
    assert scales == [2.0**13]
    said = capfd.readouterr().err
    assert "round 2 holds NaN or infinity and is left out, as a GradScaler leaves a step out now and then" in said
    assert "infinity: lower its learning rate" not in said
