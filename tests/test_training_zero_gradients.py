"""Data-parallel training where gradients are 0, or not there at all: the optimiser does as on one machine.

A gradient of zeros is one: AdamW decays its parameter and moves its moments. None leaves the parameter alone.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import convert, structs, to_builtins
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.protocol.rounds import Commit, OuterSettings, Prepared, Seal
from notebook_cluster.rounds.member.events_effects import Apply
from notebook_cluster.rounds.numerics.bits import any_of, byte_count, packed, unpacked
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.training.loop.encoding import DeviceEncoder, on_host
from notebook_cluster.training.models.torch_parameters import TorchParameters
from notebook_cluster.training.strategies.gradients import GradientReplica
from tests.cluster_in_process import Cluster, Node
from tests.test_training import _building, assert_equal_models, batch, loss_of

NODES = ["a", "b"]
STEPS = 12


class Branches(nn.Module):
    """Two branches: in turns one of them is left out (its gradient is None), or masked (its gradient is 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.skipped, self.masked = (nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)]) for _ in range(2))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.stem(x)))
        masked = sum(float(step % 2 == index) * branch(hidden) for index, branch in enumerate(self.masked))
        return self.skipped[step % 2](hidden) + masked  # type: ignore[no-any-return]


class LowRank(nn.Module):
    """LoRA: the weight is frozen, and B begins as 0, so the first gradient of A is."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))  # type: ignore[no-any-return]


MODELS = [Branches, LowRank]


def made(kind: Any) -> Any:
    with _building:  # the seed is that of all threads
        torch.manual_seed(3)
        model = kind()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return loss_of(lambda x: model(x, step), batch(10 * step + rank))  # type: ignore[arg-type]


def adam_steps(model: nn.Module, optimizer: Any) -> dict[str, int]:
    return {name: int(optimizer.state[p]["step"]) for name, p in model.named_parameters() if p in optimizer.state}


def alone(kind: Any, steps: int = STEPS) -> Any:
    """One process with the mean of the gradients of both."""
    model, optimizer = made(kind)
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([loss(model, step, rank) for rank in range(2)]).mean().backward()
        optimizer.step()
    return model, adam_steps(model, optimizer)


def parallel(kind: Any, **arguments: Any) -> Any:
    def cell(node: Node) -> Any:
        model, optimizer = made(kind)
        sync = nc.DataParallel(model, optimizer, **arguments)
        for step in range(STEPS):
            loss(model, step, node.rank()).backward()
            sync.step(samples=8)
        sync.finish()
        return model, adam_steps(model, optimizer)

    return cell


def trained(model: nn.Module) -> Any:
    return np.concatenate([p.detach().reshape(-1).numpy() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("mode", ["allreduce", "server"])
@pytest.mark.parametrize("kind", MODELS)
def test_zeros_are_a_gradient_and_none_is_none_as_in_one_process(tmp_path: Path, kind: Any, mode: str) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(parallel(kind, mode=mode, resend=5))
    assert_equal_models({name: model for name, (model, _) in results.items()})
    expected, steps = alone(kind)
    model, counted = results["a"]
    np.testing.assert_allclose(trained(model), trained(expected), rtol=0, atol=1e-6)
    if kind is LowRank:
        assert set(steps.values()) == {STEPS}
    else:
        assert {steps["skipped.0.weight"], steps["masked.0.weight"]} == {STEPS // 2, STEPS}

    assert counted == steps


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8", "int4", "e3m0", "topk-8", "randomk-8"])
def test_with_each_codec_the_same_parameters_are_stepped(tmp_path: Path, codec: str) -> None:
    """What a codec left over of a gradient waits until its node has one again."""
    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(parallel(Branches, codec=codec))
    assert_equal_models({name: model for name, (model, _) in results.items()})
    assert [counted for _, counted in results.values()] == [alone(Branches)[1]] * 2


def test_a_gradient_that_one_node_has_is_that_of_all(tmp_path: Path) -> None:
    """The mean of 'a', which has none, and 'b', whose is 0, is 0."""

    def cell(node: Node) -> Any:
        model, optimizer = made(Branches)
        sync = nc.DataParallel(model, optimizer)
        for step in range(4):
            loss(model, step, node.rank()).backward()
            if node.name == "b":
                for parameter in model.parameters():
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
            sync.step(samples=8)
        return model, adam_steps(model, optimizer)

    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(cell)
    assert_equal_models({name: model for name, (model, _) in results.items()})
    assert [set(counted.values()) for _, counted in results.values()] == [{4}, {4}]


def test_who_has_no_samples_has_no_say(tmp_path: Path) -> None:
    def cell(node: Node) -> Any:
        model, optimizer = made(Branches)
        sync = nc.DataParallel(model, optimizer)
        for step in range(4):
            loss(model, step + node.rank(), node.rank()).backward()  # the other branch
            sync.step(samples=8 if node.name == "a" else 0)
        return model, adam_steps(model, optimizer)

    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(cell)
    assert_equal_models({name: model for name, (model, _) in results.items()})
    assert [counted["skipped.0.weight"] for _, counted in results.values()] == [2, 2]


@pytest.mark.parametrize("mode", ["allreduce", "server"])
def test_a_step_that_is_done_again_without_a_node_is_that_of_those_who_are_left(tmp_path: Path, mode: str) -> None:
    """The lost node alone had a gradient of the other branch."""

    def cell(node: Node) -> Any:
        model, optimizer = made(Branches)
        sync = nc.DataParallel(model, optimizer, mode=mode)
        for step in range(6):
            other = node.name == "c" and step == 3
            loss(model, step + other, node.rank()).backward()
            sync.step(samples=8)
        return model, adam_steps(model, optimizer)

    with Cluster(["a", "b", "c"], tmp_path) as cluster:
        results = cluster.run_and_lose("c", "to", Seal, 4, cell)
    assert_equal_models({name: model for name, (model, _) in results.items()})
    counted = results["a"][1]
    assert (counted["skipped.0.weight"], counted["skipped.1.weight"], counted["masked.0.weight"]) == (3, 3, 6)


@pytest.mark.parametrize("direction", ["to", "from"])
def test_a_coordinator_restarted_in_mid_step_knows_who_had_a_gradient(tmp_path: Path, direction: str) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        kind = Seal if direction == "to" else Prepared
        restarted = cluster.once_at(direction, "b", kind, 4, cluster.restart_coordinator)
        results = cluster.run(parallel(Branches))
    assert restarted
    expected, steps = alone(Branches)
    assert_equal_models({name: model for name, (model, _) in results.items()})
    np.testing.assert_allclose(trained(results["a"][0]), trained(expected), rtol=0, atol=1e-6)
    assert results["b"][1] == steps


def test_a_late_node_takes_over_what_a_step_without_its_gradients_made(tmp_path: Path) -> None:
    seen: list[int] = []

    with Cluster(["a", "b", "c"], tmp_path) as cluster:

        def watch(towards: str, node: str, message: Any) -> None:
            if isinstance(message, Commit) and towards == "to" and node == "a":
                seen.append(message.round)

        cluster.watch = watch
        cluster.once_at("to", "c", Seal, 4, lambda: cluster.unlink("c"))
        running = cluster.start(parallel(Branches))
        running.go()
        assert cluster.wait_for(lambda: any(number >= 5 for number in seen))
        cluster.relink("c")
        results = running.wait()
    assert_equal_models({name: model for name, (model, _) in results.items()})
    assert results["a"][1] == results["b"][1] == results["c"][1]


def test_a_node_whose_word_about_its_gradients_has_another_length_is_refused(tmp_path: Path, capfd: Any) -> None:
    def cell(node: Node) -> Any:
        model, optimizer = made(Branches)
        sync = nc.DataParallel(model, optimizer)
        if node.name == "b":
            honest = sync._replica.contribution
            sync._replica.contribution = lambda finishing: structs.replace(  # type: ignore[method-assign]
                honest(finishing), gradients=bytes(125)
            )
        for step in range(3):
            loss(model, step, node.rank()).backward()
            sync.step(samples=8)
        return model, adam_steps(model, optimizer)

    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(cell)
    assert_equal_models({name: model for name, (model, _) in results.items()})
    assert (
        "the work of 'b' for round 1 has bytes for 1000 tensors to say which have a gradient" in capfd.readouterr().err
    )


def test_an_optimiser_of_sparse_gradients_is_refused_when_the_sync_object_is_made(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        model = nn.Embedding(10, 4, sparse=True)
        nc.DataParallel(model, torch.optim.SparseAdam(model.parameters()))

    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(cell)["a"]
    assert isinstance(result, ValueError)
    assert str(result) == (
        "optimizer=SparseAdam takes sparse gradients only, and the mean gradient of all nodes is dense: use "
        "torch.optim.Adam with nc.DataParallel, or nc.DiLoCo, with which each node steps with its own gradients"
    )


def test_stop_in_mid_step_and_the_cell_again_keep_what_is_none(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    def forever(node: Node) -> None:
        model, optimizer = made(Branches)
        kept[node.name] = nc.DataParallel(model, optimizer), model, optimizer
        for step in range(10_000):
            loss(model, step, node.rank()).backward()
            kept[node.name][0].step(samples=8)
            if node.name == "b" and fired:
                raise KeyboardInterrupt

    def again(node: Node) -> Any:
        sync, model, optimizer = kept[node.name]
        before = adam_steps(model, optimizer)
        for step in range(0, 8, 2):
            loss(model, step, node.rank()).backward()
            sync.step(samples=8)
        after = adam_steps(model, optimizer)
        return model, {name: after[name] - before[name] for name in after}

    with Cluster(NODES, tmp_path) as cluster:
        fired = cluster.once_at("from", "a", Prepared, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        stopped = cluster.run(forever, main="a")
        assert all(isinstance(result, KeyboardInterrupt) for result in stopped.values()), stopped
        results = cluster.run(again)
    assert_equal_models({name: model for name, (model, _) in results.items()})
    assert results["a"][1]["skipped.1.weight"] in (0, 1)  # a round that Stop left open may have had it


@pytest.mark.parametrize("codec", ["int8", "int4", "fp16", "topk-8", "randomk-8"])
def test_what_a_codec_left_waits_while_its_tensor_has_no_gradient(codec: str, device: str) -> None:
    """The same on the host and where the model is."""
    sent = []
    for encodes in (False, True):
        model = nn.ModuleDict({"a": nn.Linear(40, 20), "b": nn.Linear(20, 10)}).to(device if encodes else "cpu")
        parameters = TorchParameters(model)
        layout = parameters.layout
        fragments = Fragments(codec, layout.size, gradients=True)
        replica = GradientReplica(
            parameters, fragments, None, scale_lr=False, is_lowest=lambda: True, restore=lambda: None
        )
        replica._encoder = DeviceEncoder(parameters) if encodes else None
        replica.parameters.optimizer_step = lambda *_: None  # type: ignore[method-assign]
        theta = parameters.read()
        replica.start(0, theta, theta, "0")
        draw = torch.Generator().manual_seed(1)
        for round in range(1, 4):
            for name, parameter in model.named_parameters():
                gradient = torch.randn(parameter.shape, generator=draw)
                parameter.grad = None if name.startswith("b") and round == 2 else gradient.to(parameter.device)
            replica.count(8)
            before, boundary = replica._error, replica.contribution(finishing=False)
            sent.append(boundary)
            commit = Apply(round, theta, theta, str(round), ("a",), True, False, 1, 0, "", boundary.gradients)
            replica.apply(commit)
            if round == 2:
                start = layout.starts[[name for name, _, _ in layout.schema].index("b.bias")]
                assert boundary.gradients
                assert not fragments.wires[0].decode(boundary.encoded)[start:].any()
                assert on_host(replica._error)[start:].any()
                np.testing.assert_array_equal(on_host(replica._error)[start:], on_host(before)[start:])
    for host, there in zip(sent[:3], sent[3:], strict=True):
        assert bytes(host.encoded) == bytes(there.encoded)
        assert host.gradients == there.gradients


def test_flags_travel_in_one_bit_each() -> None:
    draw = np.random.default_rng(0)
    for tensors in (1, 7, 8, 9, 300):
        rows = [[bool(flag) for flag in draw.integers(0, 2, tensors)] for _ in range(3)]
        said = [packed(row) for row in rows]
        assert {len(data) for data in said} <= {0, byte_count(tensors)}
        assert [unpacked(data, tensors) for data in said] == rows
        assert unpacked(any_of(said), tensors) == [any(flags) for flags in zip(*rows, strict=True)]
    assert packed([True] * 5) == b""
    assert any_of([b"\0", b""]) == b""


def test_a_round_from_a_log_of_before_is_read() -> None:
    seal = Seal(job="m", round=1, attempt=1, members=[], slices=[], outer=OuterSettings(0, 0), base_hash="")
    logged = to_builtins(structs.replace(seal, gradients=b"\5\0"))
    assert convert(json.loads(json.dumps(logged)), Seal).gradients == b"\5\0"
    del logged["gradients"]
    assert convert(logged, Seal) == seal
