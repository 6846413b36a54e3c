"""The state of an mlx optimizer: kept in checkpoints, taken over by nodes that join or were late, cleared."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

mx = pytest.importorskip("mlx.core")
import mlx.nn as mlx_nn  # noqa: E402
import mlx.optimizers as mlx_optim  # noqa: E402

from notebook_cluster import training as nc  # noqa: E402
from notebook_cluster.protocol.rounds import Commit, Seal  # noqa: E402
from notebook_cluster.training.checkpointing.optimizer_bytes import OptimizerBytesError, pack, unpack  # noqa: E402
from notebook_cluster.training.models import mlx_optimizer  # noqa: E402
from notebook_cluster.training.models.mlx_parameters import MlxParameters  # noqa: E402
from notebook_cluster.training.models.optimizer_settings import settings_of  # noqa: E402
from tests.cluster_in_process import Cluster, Node  # noqa: E402
from tests.mlx_models import adapted, batch, is_mlx, loss_and_gradients, on_this_thread, state_of  # noqa: E402


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_the_same_optimizer_steps_with_the_same_in_torch_and_mlx(name: str) -> None:
    more = {"momentum": 0.9, "weight_decay": 0.1} if name == "SGD" else {}
    of_torch = getattr(torch.optim, name)([torch.ones(2)], lr=0.01, **more)
    assert settings_of(of_torch) == settings_of(getattr(mlx_optim, name)(0.01, **more))
    schedule = torch.optim.lr_scheduler.StepLR(of_torch, 1, 0.5)
    on_schedule = getattr(mlx_optim, name)(mlx_optim.step_decay(0.01, 0.5, 1), **more)
    model = mlx_nn.Linear(2, 2)
    for _ in range(3):
        of_torch.step()
        schedule.step()
        on_schedule.update(model, model.trainable_parameters())
        assert settings_of(of_torch) == settings_of(on_schedule)


def test_each_part_of_a_multi_optimizer_is_told() -> None:
    assert settings_of(two_in_one()) == "MultiOptimizer(lr=0.01/None, betas=0.9 0.99)"


def two_in_one(rate: Any = 0.01) -> Any:
    return mlx_optim.MultiOptimizer([mlx_optim.Lion(rate), mlx_optim.Adafactor()], [lambda name, _: "bias" in name])


def trained(make: Any, dtype: Any) -> tuple[Any, Any]:
    """A model with a list of layers, some of them without parameters, and its optimizer after three steps."""
    mx.random.seed(0)
    model = mlx_nn.Sequential(mlx_nn.Linear(3, 4), mlx_nn.Tanh(), mlx_nn.Linear(4, 2), mlx_nn.ReLU())
    model.set_dtype(dtype)
    optimizer = make()
    for step in range(3):
        _, grads = mlx_nn.value_and_grad(model, lambda model, x: model(x).sum())(model, mx.ones((2, 3), dtype) * step)
        optimizer.update(model, grads)
        mx.eval(model.parameters())
    return model, optimizer


# ---- as bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: mlx_optim.AdamW(mlx_optim.exponential_decay(0.1, 0.9)),
        lambda: mlx_optim.SGD(0.1, momentum=0.9),
        two_in_one,
    ],
    ids=["AdamW", "SGD", "two in one"],
)
def test_the_state_survives_with_its_dtypes_and_goes_on_the_same(make: Any, dtype: Any) -> None:
    model, optimizer = trained(make, dtype)
    data = pack({"steps": 3}, optimizer)
    again = make()
    held = again.state if not hasattr(again, "optimizers") else again.optimizers[0].state
    assert unpack(data, again) == {"steps": 3}
    assert state_of(again) == state_of(optimizer)
    assert any(str(dtype) == name for name, _ in state_of(again).values())
    # a function compiled for the state before it was put there sees the new one
    assert held is (again.state if not hasattr(again, "optimizers") else again.optimizers[0].state)
    grads = mlx_nn.value_and_grad(model, lambda model: model(mx.ones((2, 3), dtype)).sum())(model)[1]
    parameters = model.trainable_parameters()
    expected = optimizer.apply_gradients(grads, parameters)
    mx.eval(expected, optimizer.state)
    np.testing.assert_array_equal(
        MlxParameters(_with(expected)).read(), MlxParameters(_with(again.apply_gradients(grads, parameters))).read()
    )
    assert state_of(again) == state_of(optimizer)


def _with(parameters: Any) -> Any:
    model = mlx_nn.Sequential(mlx_nn.Linear(3, 4), mlx_nn.Tanh(), mlx_nn.Linear(4, 2), mlx_nn.ReLU())
    return model.update(parameters)


def test_another_threads_part_is_made_of_what_was_computed_and_else_says_so() -> None:
    _, optimizer = trained(lambda: mlx_optim.SGD(0.1, momentum=0.9), mx.bfloat16)
    results: list[Any] = []

    def elsewhere() -> None:
        try:
            results.append(pack({}, optimizer))
        except OptimizerBytesError as error:
            results.append(str(error))

    def run() -> Any:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(60)
        return results.pop()

    mlx_optimizer.evaluate(optimizer)
    again = mlx_optim.SGD(0.5)
    unpack(run(), again)
    assert state_of(again) == state_of(optimizer)
    optimizer.state["step"] = optimizer.state["step"] + 1
    if not isinstance(said := run(), bytes):  # older mlx computes on any thread
        assert said.startswith("the state of SGD was never computed (")
        assert said.endswith("): call mx.eval(optimizer.state) where it is changed")


def test_the_state_of_another_optimizer_or_framework_is_refused_and_nothing_changed() -> None:
    of_torch = pack({}, torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]))
    _, here = trained(lambda: mlx_optim.AdamW(0.1), mx.float32)
    before = state_of(here)
    with pytest.raises(
        OptimizerBytesError, match=r"^the checkpoint's optimizer is AdamW, this one mlx AdamW: it starts afresh$"
    ):
        unpack(of_torch, here)
    with pytest.raises(OptimizerBytesError, match=r"is mlx AdamW, this one AdamW"):
        unpack(pack({}, here), torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]))
    with pytest.raises(OptimizerBytesError, match=r"is mlx Lion, this one mlx AdamW"):
        unpack(pack({}, mlx_optim.Lion(0.1)), here)
    relative = mlx_optim.Adafactor()
    with pytest.raises(OptimizerBytesError, match=r"it has learning_rate, step of Adafactor, this one step"):
        unpack(pack({}, mlx_optim.Adafactor(0.1, relative_step=False)), relative)
    _, without = trained(mlx_optim.Adafactor, mx.float32)
    message = (
        r"of 'layers\.0\.weight' it has exp_avg_sq_col, exp_avg_sq_row, Adafactor here keeps exp_avg, exp_avg_sq of"
    )
    with pytest.raises(OptimizerBytesError, match=message):
        unpack(pack({}, without), mlx_optim.Adafactor(beta_1=0.9))
    one = mlx_optim.MultiOptimizer([mlx_optim.Lion(0.1)])
    with pytest.raises(OptimizerBytesError, match=r"2 optimizers in one, this one has 1"):
        unpack(pack({}, two_in_one()), one)
    assert state_of(here) == before


def test_cleared_state_keeps_step_and_rate_and_the_next_step_works() -> None:
    model, optimizer = trained(two_in_one, mx.float32)
    mlx_optimizer.clear_state(optimizer)
    assert sorted(state_of(optimizer)) == ["states.0.learning_rate", "states.0.step", "states.1.step"]
    assert state_of(optimizer)["states.1.step"] == ("mlx.core.uint64", "3")
    grads = mlx_nn.value_and_grad(model, lambda model: model(mx.ones((2, 3))).sum())(model)[1]
    optimizer.update(model, grads)
    mx.eval(model.parameters())
    assert np.isfinite(MlxParameters(model).read()).all()


# ---- in a cluster ----------------------------------------------------------------------------------------------


def adam() -> Any:
    return mlx_optim.AdamW(mlx_optim.step_decay(0.01, 0.5, 3), bias_correction=True)


def go_on(sync: Any, adapter: Any, node: Node, steps: range) -> None:
    for step in steps:
        loss, given = loss_and_gradients(adapter.model, batch(10 * step + node.rank()))
        sync.step(loss, samples=8, **given)


def test_a_checkpoint_has_parameters_and_optimizer_of_the_same_step(tmp_path: Path) -> None:
    def first(node: Node) -> Any:
        adapter, optimizer = adapted(node, node.rank()), adam()
        sync = nc.DataParallel(adapter.model, optimizer)
        go_on(sync, adapter, node, range(5))
        sync.checkpoint("half")
        go_on(sync, adapter, node, range(5, 8))
        return adapter.read(), state_of(optimizer)

    def resumed(node: Node) -> Any:
        adapter, optimizer = adapted(node, 50 + node.rank()), adam()
        sync = nc.DataParallel(adapter.model, optimizer, resume="half")
        go_on(sync, adapter, node, range(5, 8))
        return adapter.read(), state_of(optimizer)

    with Cluster(["m0", "m1"], tmp_path) as cluster:
        results = cluster.run(on_this_thread(first))
    with Cluster(["m0", "m2"], tmp_path) as cluster:
        again = cluster.run(on_this_thread(resumed))
    theta, state = results["m0"]
    for other, state_there in (results["m1"], again["m0"], again["m2"]):
        np.testing.assert_array_equal(other, theta)
        assert state_there == state


@pytest.mark.parametrize("at", ["in the loop", "after the cell"])
def test_diloco_keeps_each_nodes_mlx_optimizer(tmp_path: Path, at: str) -> None:
    kept: dict[str, Any] = {}

    def train(adapter: Any, optimizer: Any, sync: Any, node: Node, steps: range) -> None:
        for step in steps:  # nothing but the model is evaluated
            loss, given = loss_and_gradients(adapter.model, batch(10 * step + node.rank()))
            optimizer.update(adapter.model, given["grads"])
            mx.eval(adapter.model.parameters())
            sync.step(loss, samples=8)

    def first(node: Node) -> None:
        adapter, optimizer = adapted(node), mlx_optim.SGD(0.01 * (1 + node.rank()), momentum=0.9)
        sync = nc.DiLoCo(adapter.model, every=2, optimizer=optimizer)
        train(adapter, optimizer, sync, node, range(6))
        if at == "in the loop":
            sync.checkpoint("half")
        kept[node.name] = optimizer

    def resumed(node: Node) -> Any:
        adapter, optimizer = adapted(node, 5), mlx_optim.SGD(0.5, momentum=0.9)
        nc.DiLoCo(adapter.model, every=2, optimizer=optimizer, resume="half")
        return state_of(optimizer)

    with Cluster(["m0", "m1"], tmp_path) as cluster:
        cluster.run(on_this_thread(first))
        if at == "after the cell":  # asked for by a view, while no main thread is in the loop
            assert not cluster.save("half").error
    with Cluster(["m0", "m1"], tmp_path) as cluster:
        states = cluster.run(on_this_thread(resumed))
    for name in ("m0", "m1"):
        assert states[name] == state_of(kept[name])
        assert states[name]["step"] == ("mlx.core.uint64", "6")


def test_a_joiner_takes_parameters_and_optimizer(tmp_path: Path) -> None:
    here = threading.Event()
    last: list[int] = []
    states: dict[str, Any] = {}

    def cell(node: Node) -> Any:
        adapter, optimizer = adapted(node, node.rank()), mlx_optim.Adam(0.01, bias_correction=True)
        sync = nc.DataParallel(adapter.model, optimizer)
        step = 0
        while not last or sync.round < last[0]:
            go_on(sync, adapter, node, range(step, step + 1))
            step += 1
            if sync.round >= 5:
                here.set()
            if "mlate" in sync.members and not last:
                last.append(sync.round + 4)
        states[node.name] = state_of(optimizer)
        return adapter.read()

    with Cluster(["m0", "m1"], tmp_path) as cluster:
        results = cluster.run_with_newcomer(on_this_thread(cell), here, "mlate")
    assert set(results) == {"m0", "m1", "mlate"}
    for name in ("m1", "mlate"):
        np.testing.assert_array_equal(results[name], results["m0"])
        assert states[name] == states["m0"]


def test_a_node_that_missed_a_step_takes_over_and_its_stale_gradient_is_not_used(tmp_path: Path) -> None:
    seen: list[Any] = []

    def cell(node: Node) -> Any:
        adapter = adapted(node, node.rank())
        sync = nc.DataParallel(adapter.model, mlx_optim.Adam(0.01))
        go_on(sync, adapter, node, range(12))
        sync.finish()
        return adapter.read()

    def watch(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Commit) and towards == "to":
            seen.append((node, message.round, tuple(message.members)))

    with Cluster(["m0", "m1", "m2"], tmp_path) as cluster:
        cluster.watch = watch
        cluster.once_at("to", "m2", Seal, 4, lambda: cluster.unlink("m2"))
        running = cluster.start(on_this_thread(cell))
        running.go()
        assert cluster.wait_for(lambda: any(number >= 5 for _, number, _ in seen))
        cluster.relink("m2")
        results = running.wait()
    assert ("m0", 4, ("m0", "m1")) in seen
    for name in ("m1", "m2"):
        np.testing.assert_array_equal(results[name], results["m0"])


def test_a_joiner_of_the_other_framework_is_told_that_its_optimizer_starts_afresh(tmp_path: Path, capfd: Any) -> None:
    here = threading.Event()
    last: list[int] = []
    said: list[str] = []

    def cell(node: Node) -> int:
        adapter = adapted(node, node.rank())
        optimizer: Any = mlx_optim.SGD(0.01, momentum=0.9)
        if not is_mlx(node):
            optimizer = torch.optim.SGD(adapter.model.parameters(), lr=0.01, momentum=0.9)
        sync = nc.DataParallel(adapter.model, optimizer)
        step = 0
        while not last or sync.round < last[0]:
            go_on(sync, adapter, node, range(step, step + 1))
            step += 1
            if sync.round == 3 and node.name == "t0":
                said.append(capfd.readouterr().err)
                here.set()
            if "mlate" in sync.members and not last:
                last.append(sync.round + 2)
        return sync.round

    with Cluster(["t0", "m1"], tmp_path) as cluster:
        results = cluster.run_with_newcomer(on_this_thread(cell), here, "mlate")
    assert set(results.values()) == {last[0]}
    said.append(capfd.readouterr().err)
    # at the beginning there was no state to be missed
    assert "optimizer" not in said[0]
    assert "the checkpoint's optimizer is SGD, this one mlx SGD: it starts afresh" in said[1]


def test_a_checkpoint_of_the_other_framework_gives_the_parameters(tmp_path: Path, capfd: Any) -> None:
    def first(node: Node) -> Any:
        adapter = adapted(node)
        sync = nc.DataParallel(adapter.model, torch.optim.AdamW(adapter.model.parameters(), lr=0.01))
        go_on(sync, adapter, node, range(3))
        sync.checkpoint("half")
        return adapter.read()

    def resumed(node: Node) -> Any:
        adapter, optimizer = adapted(node, 5), mlx_optim.AdamW(0.01)
        sync = nc.DataParallel(adapter.model, optimizer, resume="half")
        theta = adapter.read()
        go_on(sync, adapter, node, range(3, 5))
        return theta, optimizer.state["step"].item()

    with Cluster(["t"], tmp_path) as cluster:
        saved = cluster.run(first)["t"]
    with Cluster(["m"], tmp_path) as cluster:
        theta, steps = cluster.run(on_this_thread(resumed))["m"]
    np.testing.assert_array_equal(theta, saved)
    assert steps == 2
    assert "the checkpoint's optimizer is AdamW, this one mlx AdamW: it starts afresh" in capfd.readouterr().err
