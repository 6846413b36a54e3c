"""One model on several nodes of one process: identities, hashes, ends of loops, bad input."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.protocol.rounds import Applied, Commit
from tests.cluster_in_process import Cluster, Node

torch.set_num_threads(1)
_building = threading.Lock()

NAMES = ["a", "b", "c", "d"]


def build(seed: int = 0) -> nn.Module:
    with _building:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(seed: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator)
    return x, (x @ torch.ones(6, 3) * 0.4).tanh()


def loss_of(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(data[0]) - data[1]).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, data)
    loss.backward()
    optimizer.step()
    return loss.item()


def flat(model: nn.Module) -> np.ndarray[Any, np.dtype[np.float32]]:
    parameters = [tensor for _, tensor in sorted(model.named_parameters())]
    return torch.cat([tensor.detach().reshape(-1) for tensor in parameters]).numpy()


def assert_equal_models(results: dict[str, Any]) -> None:
    models = list(results.values())
    for result in models:
        assert isinstance(result, nn.Module), result
        np.testing.assert_array_equal(flat(result), flat(models[0]))


def assert_close_in_ulps(actual: Any, expected: Any, scale: Any, ulps: int) -> None:
    """Within ``ulps`` units in the last place of ``scale``."""
    difference = np.abs(actual - expected)
    assert (difference <= ulps * np.spacing(np.abs(scale).astype(np.float32))).all(), difference.max()


# ---- identities ----------------------------------------------------------------------------------------------


def test_one_node_every_step_without_outer_optimiser_is_plain_training(tmp_path: Path) -> None:
    plain = build()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    largest = np.abs(flat(plain))
    for step in range(10):
        train(plain, plain_optimizer, batch(step))
        largest = np.maximum(largest, np.abs(flat(plain)))

    def cell(node: Node) -> nn.Module:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = nc.LocalSGD(model, every=1)
        for step in range(10):
            done = sync.step(train(model, optimizer, batch(step)))
            assert done is not None
            assert done.round == step + 1
        return model

    with Cluster(["a"], tmp_path) as cluster:
        model = cluster.run(cell)["a"]
    assert_close_in_ulps(flat(model), flat(plain), largest, ulps=10)


def test_every_step_without_outer_optimiser_is_data_parallel(tmp_path: Path) -> None:
    plain = build()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    largest = np.abs(flat(plain))
    rounds = 5
    for step in range(rounds):
        parts = [batch(10 * step + rank) for rank in range(4)]
        train(plain, plain_optimizer, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
        largest = np.maximum(largest, np.abs(flat(plain)))

    def cell(node: Node) -> nn.Module:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = nc.LocalSGD(model, every=1)
        for step in range(rounds):
            sync.step(train(model, optimizer, batch(10 * step + node.rank())), samples=8)
        return model

    with Cluster(NAMES, tmp_path) as cluster:
        results = cluster.run(cell)
    assert_equal_models(results)
    assert_close_in_ulps(flat(results["a"]), flat(plain), largest + 0.1, ulps=2 * rounds)


def oracle(start: Any, locals_by_round: list[list[tuple[Any, float]]], lr: float, mu: float) -> Any:
    """DiLoCo in plain numpy, imports nothing of ours: (theta_m, samples) of every member in rank order, per round."""
    theta, momentum = start.copy(), np.zeros_like(start)
    lr32, mu32 = np.float32(lr), np.float32(mu)
    for members in locals_by_round:
        total = sum(samples for _, samples in members)
        mean = None
        for local, samples in members:
            weighted = (theta - local) * np.float32(samples / total)
            mean = weighted if mean is None else mean + weighted
        momentum = mu32 * momentum + mean
        theta = theta - lr32 * (mean + mu32 * momentum)
    return theta


def test_diloco_is_the_numpy_oracle_bit_for_bit(tmp_path: Path) -> None:
    rounds, every = 4, 3
    local: dict[tuple[int, str], Any] = {}

    def cell(node: Node) -> nn.Module:
        model = build(seed=7 if node.name == "a" else 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sync = nc.DiLoCo(model, every=every, outer_lr=0.7, outer_momentum=0.9)
        for step in range(rounds * every):
            loss = train(model, optimizer, batch(step, 8 + node.rank()))
            local[step // every, node.name] = flat(model).copy()
            sync.step(loss, samples=8 + node.rank())
        return model

    with Cluster(NAMES, tmp_path) as cluster:
        results = cluster.run(cell)
    members = [[(local[r, name], 3.0 * (8 + rank)) for rank, name in enumerate(NAMES)] for r in range(rounds)]
    expected = oracle(flat(build(seed=7)), members, 0.7, 0.9)
    assert_equal_models(results)
    np.testing.assert_array_equal(flat(results["a"]), expected)


@pytest.mark.parametrize("codec", ["float32", "fp16", "bf16", "int8", "int4", "e3m0"])
def test_every_codec_learns_and_all_nodes_end_equal(tmp_path: Path, codec: str) -> None:
    def cell(node: Node) -> nn.Module:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sync = nc.DiLoCo(model, every=10, codec=codec)
        for step in range(60):
            sync.step(train(model, optimizer, batch(100 * step + node.rank())))
        return model

    with Cluster(NAMES[:3], tmp_path) as cluster:
        results = cluster.run(cell)
    assert_equal_models(results)
    assert loss_of(results["a"], batch(5, 256)) < 0.5 * loss_of(build(), batch(5, 256))


# ---- ends of loops -------------------------------------------------------------------------------------------


def applied_steps(cluster: Cluster) -> dict[str, int]:
    counted: dict[str, int] = {}

    def watch(direction: str, node: str, message: Any) -> None:
        if isinstance(message, Applied):
            counted[node] = counted.get(node, 0) + message.steps

    cluster.watch = watch
    return counted


@pytest.mark.parametrize("explicit", [True, False])
def test_leftover_steps_form_a_last_round(tmp_path: Path, explicit: bool) -> None:
    rounds: dict[str, list[int]] = {}

    def cell(node: Node) -> nn.Module:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=100)
        done = [sync.step(train(model, optimizer, batch(step + 1000 * node.rank()))) for step in range(250)]
        rounds[node.name] = [step + 1 for step, round in enumerate(done) if round is not None]
        if explicit:
            sync.finish()
            assert sync.round == 3
            assert sync.members == ("a", "b", "c")
        return model

    with Cluster(NAMES[:3], tmp_path) as cluster:
        counted = applied_steps(cluster)
        assert_equal_models(cluster.run(cell))
        assert rounds == {name: [100, 200] for name in "abc"}
        assert counted == dict.fromkeys("abc", 250)


def test_nodes_with_less_data_take_part_until_all_have_finished(tmp_path: Path) -> None:
    steps = {"a": 35, "b": 12, "c": 0}

    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=10)
        for step in range(steps[node.name]):
            sync.step(train(model, optimizer, batch(step)))
        sync.finish()
        return model

    with Cluster(NAMES[:3], tmp_path) as cluster:
        counted = applied_steps(cluster)
        assert_equal_models(cluster.run(cell))
        assert counted == steps


def test_a_cell_run_again_resumes_and_a_later_cell_goes_on(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    def first(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=5)
        assert len(node.handlers) == 1
        for step in range(10):
            sync.step(train(model, optimizer, batch(step)))
        kept[node.name] = sync, model, optimizer
        return model

    def second(node: Node) -> nn.Module:
        sync, model, optimizer = kept[node.name]
        for step in range(10):
            sync.step(train(model, optimizer, batch(step)))
        sync.finish()
        return model

    with Cluster(NAMES[:2], tmp_path) as cluster:
        ended = cluster.run(first)
        assert_equal_models(ended)
        before = flat(ended["a"]).copy()

        def again(node: Node) -> nn.Module:
            model = build(seed=50 + node.rank())
            sync = nc.DiLoCo(model, every=5)
            assert sync.round == 2
            np.testing.assert_array_equal(flat(model), before)
            sync.finish()
            return first(node)

        assert_equal_models(cluster.run(again))
        results = cluster.run(second)
        assert_equal_models(results)
        assert kept["a"][0].round == 6


def test_fresh_forgets_what_the_cluster_holds(tmp_path: Path) -> None:
    def cell(node: Node) -> nn.Module:
        model = build(seed=3)
        sync = nc.DiLoCo(model, every=1, fresh=node.cell() > 1)
        assert sync.round == 0
        sync.step(train(model, torch.optim.SGD(model.parameters(), lr=0.1), batch(node.rank())))
        return model

    with Cluster(NAMES[:2], tmp_path) as cluster:
        assert_equal_models(cluster.run(cell))
        assert_equal_models(cluster.run(cell))


def test_global_model_swaps_and_swaps_back_bit_for_bit(tmp_path: Path) -> None:
    def cell(node: Node) -> nn.Module:
        model = build().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=4)
        start = flat(model).copy()
        for _ in range(3):
            x, y = batch(1)
            sync.step(train(model, optimizer, (x.double(), y.double())))
        local = flat(model).copy()
        with sync.global_model():
            np.testing.assert_array_equal(flat(model), start)
            with pytest.raises(nc.TrainingError, match="leave the block first"):
                sync.step()
        np.testing.assert_array_equal(flat(model), local)
        return model

    with Cluster(["a"], tmp_path) as cluster:
        assert isinstance(cluster.run(cell)["a"], nn.Module)


def test_views_see_steps_losses_and_what_is_waited_for(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        model = build()
        sync = nc.DiLoCo(model, every=2)
        for loss in (3.0, torch.tensor(2.0, requires_grad=True), np.float32(1.0), None):
            sync.step(loss, samples=5)

    with Cluster(["a"], tmp_path) as cluster:
        node = cluster.nodes["a"]
        assert cluster.run(cell) == {"a": None}
    steps = [(report["step"], report.get("loss")) for report in node.reports if "step" in report]
    assert steps == [(0, None), (1, 3.0), (2, 2.0), (3, 1.0), (4, None)]
    waits = [report["waiting"] for report in node.reports if "waiting" in report]
    assert "round 1" in waits
    assert waits[-1] == ""


# ---- what is in the vector -----------------------------------------------------------------------------------


def test_tied_frozen_and_batch_norm(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6, bias=False)
            self.second = nn.Linear(6, 6, bias=False)
            self.second.weight = self.first.weight
            self.norm = nn.BatchNorm1d(6)
            self.last = nn.Linear(6, 3)
            self.last.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.second(self.first(x))))

    means: dict[tuple[int, str], Any] = {}

    def cell(node: Node) -> Any:
        with _building:
            torch.manual_seed(node.rank())
            model = Model()
        frozen = model.last.weight.clone()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        sync = nc.DiLoCo(model, every=2, codec="int8", outer_lr=0.7, check_frozen=False)
        for step in range(6):
            loss = train(model, optimizer, batch(step + 100 * node.rank()))
            means[step, node.name] = model.norm.running_var.clone()
            sync.step(loss)
            if step % 2:
                assert (model.norm.running_var > 0).all()
        assert torch.equal(model.last.weight, frozen)
        assert model.norm.num_batches_tracked.item() == 6
        assert model.second.weight is model.first.weight
        return model.norm.running_var.clone()

    with Cluster(NAMES[:3], tmp_path) as cluster:
        results = cluster.run(cell)
    expected = sum(means[5, name] for name in "abc") / 3
    for result in results.values():
        assert torch.equal(result, results["a"])
        torch.testing.assert_close(result, expected)


def test_low_precision_models_agree_and_keep_their_dtype(tmp_path: Path) -> None:
    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank()).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=3)
        for step in range(9):
            x, y = batch(step + 100 * node.rank())
            sync.step(train(model, optimizer, (x.bfloat16(), y.bfloat16())))
        return model

    with Cluster(NAMES[:2], tmp_path) as cluster:
        results = cluster.run(cell)
    for (_, one), (_, other) in zip(results["a"].named_parameters(), results["b"].named_parameters(), strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other)


# ---- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every=0: use a whole number"),
        ({"every": 2.5}, r"every=2\.5: use a whole number"),
        ({"every": True}, "every=True: use a whole number"),
        ({"name": "../x"}, r"job name '\.\./x' is not usable"),
        ({"outer_lr": 0}, "outer_lr=0: use a number above 0"),
        ({"outer_lr": float("nan")}, "outer_lr=nan: use a number above 0"),
        ({"outer_momentum": 1.0}, r"outer_momentum=1\.0: use a number from 0 to below 1"),
        ({"nesterov": "yes"}, "nesterov='yes': use True or False"),
        ({"codec": "zip"}, "codec='zip': use one of 'float32', 'fp16', "),
        ({"resume": "a/b"}, "resume='a/b' is not the name of a checkpoint"),
        ({"optimizer": 3}, "optimizer=int: pass a torch.optim optimizer"),
    ],
)
def test_arguments_are_checked_by_name(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(lambda node: nc.DiLoCo(build(), **arguments))["a"]
    assert isinstance(result, ValueError | TypeError)
    with pytest.raises(type(result), match=message):
        raise result


@pytest.mark.parametrize(
    ("model", "way_out"),
    [
        ([1, 2], "torch.nn.ModuleList(models) is one of several"),
        ({"weight": 1}, "the model itself, not what it holds"),
        (iter([1]), "the model itself, not what it holds"),
        ("resnet18", "nc.all_reduce(x, 'mean') averages the arrays of any other model"),
    ],
)
def test_something_that_is_no_model_is_named(tmp_path: Path, model: object, way_out: str) -> None:
    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(lambda node: nc.DiLoCo(model))["a"]
    begins = f"model is a {type(model).__name__}: pass a torch.nn.Module or an mlx.nn.Module; {way_out}"
    assert str(result).startswith(begins)


def test_outside_a_node_the_error_says_on_all() -> None:
    with pytest.raises(RuntimeError, match="%%on_all"):
        nc.DiLoCo(build())


def test_models_that_differ_are_named_on_the_node_that_differs(tmp_path: Path) -> None:
    def cell(node: Node) -> nn.Module:
        model = nn.Linear(6, 3 if node.name != "c" else 4)
        sync = nc.DiLoCo(model, every=1)
        sync.step(train(model, torch.optim.SGD(model.parameters(), lr=0.1), batch(1)))
        return model

    with Cluster(NAMES[:3], tmp_path) as cluster:
        results = cluster.run(cell)
    assert isinstance(results["c"], nc.TrainingError)
    assert "'bias'" in str(results["c"])
    assert "\n" not in str(results["c"])
    del results["c"]
    assert_equal_models(results)


def test_a_contribution_with_nan_is_refused_named_and_the_round_goes_on(tmp_path: Path, capfd: Any) -> None:
    committed: list[list[str]] = []

    def cell(node: Node) -> nn.Module:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sync = nc.DiLoCo(model, every=2, optimizer=optimizer)
        for step in range(6):
            loss = train(model, optimizer, batch(step + 100 * node.rank()))
            if node.name == "b" and step == 2:
                with torch.no_grad():
                    model[0].weight[0, 0] = torch.nan
            sync.step(loss)
        return model

    with Cluster(NAMES[:3], tmp_path) as cluster:
        cluster.watch = lambda direction, node, message: (
            committed.append(list(message.members)) if isinstance(message, Commit) and node == "a" else None
        )
        assert_equal_models(cluster.run(cell))
        told = [text for level, text in cluster.told if level == "warning"]
    assert committed[:3] == [["a", "b", "c"], ["a", "c"], ["a", "b", "c"]]
    assert any("b" in text for text in told), told
    assert "did not use this node's work" in capfd.readouterr().err


def test_a_model_changed_in_mid_run_is_named_at_the_next_boundary(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        model = build()
        sync = nc.DiLoCo(model, every=2)
        sync.step()
        model.add_module("extra", nn.Linear(1, 1))
        sync.step()

    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(cell)["a"]
    assert isinstance(result, ValueError)
    assert "'extra.bias' was added" in str(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": -1}, "samples=-1: pass the number of examples"),
        ({"samples": "x"}, "samples='x': pass the number of examples"),
        ({"loss": torch.zeros(3)}, r"loss has 3 values: .*mean\(\)"),
    ],
)
def test_step_names_bad_values(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(lambda node: nc.DiLoCo(build()).step(**arguments))["a"]
    with pytest.raises(ValueError, match=message):
        raise result


def test_an_older_sync_object_is_not_used_beside_the_newer_one(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        old = nc.DiLoCo(build())
        old.finish()
        nc.DiLoCo(build())
        old.step()

    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(cell)["a"]
    assert "has a newer sync object" in str(result)


def test_a_replayed_cell_neither_registers_nor_waits(tmp_path: Path) -> None:
    def cell(node: Node) -> Any:
        node.is_replaying = True
        model = build()
        sync = nc.DiLoCo(model, every=1)
        done = [sync.step(0.5) for _ in range(3)]
        sync.finish()
        node.is_replaying = False
        return done

    with Cluster(["a"], tmp_path) as cluster:
        assert cluster.run(cell)["a"] == [None, None, None]
        assert not cluster.records
