"""What becomes of a node's optimiser when its work was refused: it is in the rounds again at once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.protocol.rounds import Refused
from notebook_cluster.training.models import torch_optimizer
from tests.cluster_in_process import Cluster, Node
from tests.test_training import _building, batch

NODES = ["a", "b", "c"]
EVERY, NAN_IN, ROUNDS = 5, 60, 75


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """A linear model fits it exactly, so steps become ever smaller."""
    x = batch(0, 64)[0]
    return x, x @ torch.ones(6, 3) * 0.4


class Watched(Cluster):
    """Notes which rounds refused the work of 'b'."""

    def __init__(self, directory: Path) -> None:
        super().__init__(NODES, directory)
        self.refused: list[tuple[int, str]] = []
        self.watch = self._look

    def _look(self, direction: str, name: str, message: Any) -> None:
        if isinstance(message, Refused):
            assert name == "b"
            self.refused.append((message.round, message.reason))


ADAM = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0),
    "AMSGrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, alpha=0.999, momentum=0.9, centered=True),
}


@pytest.mark.parametrize("kind", ["AdamW", "AMSGrad"])
def test_one_nan_near_the_end_of_training_costs_two_rounds(tmp_path: Path, kind: str, capfd: Any) -> None:
    """Adam that begins anew steps by its learning rate, thousands of times as far as the others by then."""

    def cell(node: Node) -> list[bool]:
        with _building:
            torch.manual_seed(0)
            model = nn.Linear(6, 3)
        optimizer = ADAM[kind](model.parameters())
        sync = nc.DiLoCo(model, every=EVERY, optimizer=optimizer, outer_lr=1.0, outer_momentum=0.0)
        counted = []
        for step in range(EVERY * ROUNDS):
            optimizer.zero_grad()
            x, y = data()
            loss = (model(x) - y).square().mean()
            if node.name == "b" and step == EVERY * (NAN_IN - 1) + 2:
                loss = loss * float("nan")
            loss.backward()
            optimizer.step()
            if (done := sync.step(loss, samples=8)) is not None:
                counted.append(done.counted)
        return counted

    with Watched(tmp_path) as cluster:
        results = cluster.run(cell)
    rounds = [round for round, _ in cluster.refused]
    assert rounds[0] == NAN_IN
    assert len(rounds) <= 3, cluster.refused
    assert [number for number, counted in enumerate(results["b"], 1) if not counted] == rounds
    assert "holds NaN or infinity" in cluster.refused[0][1]
    assert "is out of scale" in cluster.refused[1][1]
    said = capfd.readouterr().err
    assert said.count("; the optimizer's state was cleared") == 1
    assert "is out of scale" in said
    assert "; the optimizer's momentum was cleared" in said


def test_a_node_that_is_really_broken_is_refused_in_every_round(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        with _building:
            torch.manual_seed(0)
            model = nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sync = nc.DiLoCo(model, every=2, optimizer=optimizer)
        draw = torch.Generator().manual_seed(1)
        for _ in range(2 * 12):
            optimizer.zero_grad()
            x, y = data()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            if node.name == "b":
                with torch.no_grad():
                    model.weight += 1000 * torch.randn(3, 6, generator=draw)
            sync.step(samples=8)
        assert float(model.weight.detach().abs().max()) < 10

    with Watched(tmp_path) as cluster:
        assert cluster.run(cell) == dict.fromkeys(NODES)
    assert [round for round, _ in cluster.refused] == list(range(1, 13))


def test_a_momentum_that_a_gradient_has_spoilt_is_forgotten_whole(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        with _building:
            torch.manual_seed(0)
            model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        sync = nc.DiLoCo(model, every=2, optimizer=optimizer)
        for step in range(2 * 12):
            optimizer.zero_grad()
            x, y = data()
            (model(x) - y).square().mean().backward()
            if node.name == "b" and step in (7, 9):  # and once more, in the first round of a new state
                model.weight.grad *= 1e15
            optimizer.step()
            sync.step(samples=8)

    with Watched(tmp_path) as cluster:
        assert cluster.run(cell) == dict.fromkeys(NODES)
    assert [round for round, _ in cluster.refused] == [4, 5]


@pytest.mark.parametrize("kind", ADAM)
def test_what_steps_are_divided_by_is_kept_and_their_direction_is_not(kind: str) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = ADAM[kind]([parameter])
    for _ in range(3):
        (parameter.square().sum()).backward()
        optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[parameter].items()}
    assert torch_optimizer.forget_direction(optimizer)
    after = optimizer.state[parameter]
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert torch.equal(
            value, torch.zeros(3) if name in ("exp_avg", "momentum_buffer", "grad_avg") else before[name]
        )
    optimizer.step()
    after[next(name for name in after if name.endswith(("exp_avg_sq", "square_avg")))][1] = float("inf")
    assert not torch_optimizer.forget_direction(optimizer)


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.Adamax])
def test_other_optimizers_that_divide_go_on(make: Any) -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = make([parameter], lr=0.1)
    for _ in range(2):
        parameter.square().sum().backward()
        optimizer.step()
        assert torch_optimizer.forget_direction(optimizer)
    assert bool(torch.isfinite(parameter).all())


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adamax", "RMSprop", "Adagrad", "AdaDelta", "Adafactor"])
def test_optimizers_of_mlx_do_the_same(name: str) -> None:
    mx = pytest.importorskip("mlx.core")
    import mlx.nn as mlx_nn
    import mlx.optimizers as mlx_optim

    from notebook_cluster.training.models import mlx_optimizer

    model, optimizer = mlx_nn.Linear(6, 3), getattr(mlx_optim, name)(learning_rate=0.01)
    grads = {"weight": mx.ones((3, 6)), "bias": mx.ones((3,))}
    assert not mlx_optimizer.forget_direction(optimizer)
    for _ in range(2):
        optimizer.update(model, grads)
    before = {key: np.array(value) for key, value in optimizer.state["weight"].items()}
    assert mlx_optimizer.forget_direction(optimizer)
    for key, value in optimizer.state["weight"].items():
        np.testing.assert_array_equal(np.array(value), 0 * before[key] if key == "m" else before[key])
    optimizer.update(model, grads)
    key = next(key for key in before if key != "m")
    optimizer.state["weight"][key] = mx.full(before[key].shape, float("nan"))
    assert not mlx_optimizer.forget_direction(optimizer)


@pytest.mark.parametrize("name", ["SGD", "Lion", "Muon"])
def test_optimizers_of_mlx_that_keep_only_a_direction_forget_it_whole(name: str) -> None:
    mx = pytest.importorskip("mlx.core")
    import mlx.nn as mlx_nn
    import mlx.optimizers as mlx_optim

    from notebook_cluster.training.models import mlx_optimizer

    arguments = {"momentum": 0.9} if name == "SGD" else {}
    model, optimizer = mlx_nn.Linear(6, 3), getattr(mlx_optim, name)(learning_rate=0.01, **arguments)
    optimizer.update(model, {"weight": mx.ones((3, 6)), "bias": mx.ones((3,))})
    assert not mlx_optimizer.forget_direction(optimizer)
