"""Nodes die, come later, are interrupted, frames get lost: one state, no work counted twice, nobody stuck."""

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
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import Applied, Arrived, LeftRounds
from notebook_cluster.protocol.runs import Joined
from tests.cluster_in_process import POINTS, Cluster, Killed, Node, stepped  # noqa: F401
from tests.test_training import NAMES, assert_equal_models, batch, build, flat, loss_of, train

pytestmark = pytest.mark.usefixtures("stepped")


class Until:
    """Ends loops on all nodes two rounds after the first that ``node`` was in."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.last: int | None = None

    def goes_on(self, sync: nc.DiLoCo) -> bool:
        if self.last is None and self.node in sync.members:
            self.last = sync.round + 2
        return self.last is None or sync.round < self.last


ALL_POINTS = [*POINTS, ("from", Applied)]


def training_cell(rounds: int, every: int = 3, codec: str = "float32") -> Any:
    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=every, codec=codec)
        for step in range(rounds * every):
            sync.step(train(model, optimizer, batch(step + 100 * node.rank())))
        sync.finish()
        return model

    return cell


@pytest.mark.parametrize(("direction", "kind"), ALL_POINTS)
@pytest.mark.parametrize("victim", ["a", "c"])
def test_a_node_killed_at_any_point_of_a_round_leaves_the_others_equal(
    tmp_path: Path, direction: str, kind: type, victim: str
) -> None:
    with Cluster(NAMES[:3], tmp_path) as cluster:
        cluster.once_at(direction, victim, kind, 2, lambda: cluster.kill(victim))
        results = cluster.run(training_cell(rounds=4))
        assert isinstance(results.pop(victim), Killed)
        assert len(results) == 2
        assert_equal_models(results)


def test_frames_lost_on_the_mesh_are_asked_for_again(tmp_path: Path) -> None:
    lost: list[str] = []

    def lose(sender: str, receiver: str, header: JobFrame) -> bool:
        if header.kind in ("contribution", "mean") and sender != receiver and len(lost) < 3:
            lost.append(header.kind)
            return True
        return False

    with Cluster(NAMES[:3], tmp_path) as cluster:
        cluster.lose = lose
        assert_equal_models(cluster.run(training_cell(rounds=3)))
        assert len(lost) == 3


def test_a_node_that_comes_later_takes_the_state_and_is_in_the_next_round(tmp_path: Path) -> None:
    members: list[list[str]] = []
    here, until = threading.Event(), Until("late")

    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=2)
        if node.name == "late":
            assert sync.round >= 2
        while until.goes_on(sync):
            round = sync.step(train(model, optimizer, batch(sync.round)))
            if round is not None:
                members.append(list(round.members))
                if round.round == 2 and node.name == "a":
                    here.set()
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run_with_newcomer(cell, here)
    assert set(results) == {"a", "b", "late"}
    assert_equal_models(results)
    assert ["a", "b"] in members


def test_a_state_transfer_survives_lost_frames_and_the_death_of_its_source(tmp_path: Path) -> None:
    here, until = threading.Event(), Until("late")
    lost: list[str] = []
    cluster_box: list[Cluster] = []

    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=2)
        while until.goes_on(sync):
            round = sync.step(train(model, optimizer, batch(sync.round)))
            if round is not None and round.round == 1 and node.name == "b":
                here.set()
        return model

    def lose(sender: str, receiver: str, header: JobFrame) -> bool:
        if header.kind == "state" and receiver == "late" and not lost:
            lost.append(sender)
            cluster_box[0].kill(sender)
            return True
        return False

    with Cluster(NAMES[:3], tmp_path) as cluster:
        cluster_box.append(cluster)
        cluster.lose = lose
        results = cluster.run_with_newcomer(cell, here)
    assert isinstance(results.pop(lost[0]), Killed)
    assert "late" in results
    assert len(results) == 3
    assert_equal_models(results)


def test_a_killed_node_comes_back_with_its_name_and_joins(tmp_path: Path) -> None:
    back, until = threading.Event(), Until("b")
    until.last = 10**6

    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=2)
        if node.incarnation == 2:
            until.last = None
        while until.goes_on(sync):
            round = sync.step(train(model, optimizer, batch(sync.round)))
            if round is not None and round.round == 2 and node.name == "b":
                back.set()
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        running = cluster.start(cell)
        running.go()
        assert back.wait(60)
        cluster.kill("b")
        cluster.add("b")
        running.join("b")
        results = running.wait()
        assert set(results) == {"a", "b"}
        assert_equal_models(results)


@pytest.mark.parametrize(("direction", "kind"), ALL_POINTS)
def test_stop_leaves_the_state_before_the_round_or_after_it(tmp_path: Path, direction: str, kind: type) -> None:
    left: list[str] = []
    kept: dict[str, Any] = {}
    local: dict[str, Any] = {}
    after_first: dict[str, Any] = {}

    def interrupted(node: Node) -> nn.Module:
        model = build(seed=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=2)
        kept[node.name] = sync, model
        for step in range(6):
            loss = train(model, optimizer, batch(step))
            local[node.name] = flat(model).copy()
            if sync.step(loss) is not None:
                after_first.setdefault(node.name, flat(model).copy())
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:

        def watch(towards: str, node: str, message: Any) -> None:
            if isinstance(message, LeftRounds):
                left.append(message.reason)

        cluster.watch = watch
        cluster.once_at(direction, "a", kind, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        results = cluster.run(interrupted, main="a")
        assert isinstance(results["a"], KeyboardInterrupt)
        assert cluster.wait_for(lambda: bool(left))  # its own thread says it: the cell may have ended before
        assert left[0] == "interrupted"
        sync, model = kept["a"]
        assert sync.round in (1, 2)
        if sync.round == 2:
            np.testing.assert_array_equal(flat(model), sync._replica.theta)
        else:
            np.testing.assert_array_equal(flat(model), local["a"])
            np.testing.assert_array_equal(after_first["a"], sync._replica.theta)

        def go_on(node: Node) -> nn.Module:
            model = build(seed=9)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            sync = nc.DiLoCo(model, every=2)
            for step in range(4):
                sync.step(train(model, optimizer, batch(step)))
            sync.finish()
            return model

        assert_equal_models(cluster.run(go_on))


def test_a_cell_that_catches_stop_goes_on_and_counts_its_steps_once(tmp_path: Path) -> None:
    steps: dict[str, int] = {}

    def cell(node: Node) -> nn.Module:
        model = build(seed=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=2)
        for step in range(8):
            try:
                sync.step(train(model, optimizer, batch(step + 50 * node.rank())))
            except KeyboardInterrupt:
                interrupts.append(step)
        sync.finish()
        return model

    interrupts: list[int] = []
    with Cluster(["a", "b"], tmp_path) as cluster:

        def watch(towards: str, node: str, message: Any) -> None:
            if isinstance(message, Applied):
                steps[node] = steps.get(node, 0) + message.steps

        cluster.watch = watch
        cluster.once_at("from", "a", Arrived, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert_equal_models(cluster.run(cell, main="a"))
    assert len(interrupts) == 1
    assert steps == {"a": 8, "b": 8}


def test_a_node_whose_cell_raises_leaves_and_the_others_finish(tmp_path: Path) -> None:
    def cell(node: Node) -> nn.Module:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=2)
        for step in range(8):
            sync.step(train(model, optimizer, batch(step)))
            if node.name == "b" and step == 4:
                raise RuntimeError("broken data")
        return model

    with Cluster(NAMES[:3], tmp_path) as cluster:
        results = cluster.run(cell)
        assert str(results.pop("b")) == "broken data"
        assert_equal_models(results)


def test_training_without_a_told_step_is_an_error_and_the_model_keeps_it(tmp_path: Path) -> None:
    """With ``finish()`` and at the cell's end, on the node that forgot; the others end with their own."""
    kept: dict[str, list[Any]] = {"finish": [], "end": []}

    def cell(node: Node, end: str) -> nn.Module:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=2, fresh=True)
        before = flat(model)
        for step in range(4):
            loss = train(model, optimizer, batch(step))
            if node.name != "b":
                sync.step(loss)
        if node.name == "b":
            assert not np.array_equal(flat(model), before)
            kept[end] += [model, flat(model)]
        if end == "finish":
            sync.finish()
        return model

    with Cluster(NAMES[:3], tmp_path) as cluster:
        for end in kept:
            results = cluster.run(lambda node, end=end: cell(node, end))
            error = results.pop("b")
            assert isinstance(error, nc.TrainingError), error
            assert "the model of job 'model' was changed here, but no sync.step() was called" in str(error)
            assert_equal_models(results)
            model, values = kept[end]
            np.testing.assert_array_equal(flat(model), values)


def test_a_cell_without_training_and_one_that_only_looks_end_as_before(tmp_path: Path) -> None:
    def cell(node: Node) -> nn.Module:
        model = build()
        sync = nc.DiLoCo(model, every=2, fresh=True)
        with sync.global_model():
            model(torch.randn(4, 6))
        sync.finish()
        with torch.no_grad():
            model[0].weight += 1  # after the end the model is its owner's
        return model

    with Cluster(NAMES[:2], tmp_path) as cluster:
        results = cluster.run(cell)
        assert all(isinstance(one, nn.Module) for one in results.values()), results


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    def cell(node: Node, kind: str) -> None:
        optimizer = torch.optim.Adam(build().parameters())
        model = build()
        if kind == "DataParallel":
            nc.DataParallel(model, optimizer)
        else:
            nc.DiLoCo(model, optimizer=[optimizer] if kind == "several" else optimizer)

    with Cluster(NAMES[:1], tmp_path) as cluster:
        for kind in ("DiLoCo", "several", "DataParallel"):
            (error,) = cluster.run(lambda node, kind=kind: cell(node, kind)).values()
            assert isinstance(error, ValueError)
            assert "optimizer=Adam steps no parameter of this Sequential" in str(error)


def test_an_optimizer_that_steps_more_than_the_model_is_refused_where_its_steps_are_those_of_all(
    tmp_path: Path,
) -> None:
    def cell(node: Node) -> nn.Module:
        model, temperature = build(), nn.Parameter(torch.ones(()))
        optimizer = torch.optim.Adam([*model.parameters(), temperature])
        nc.DiLoCo(model, name="alone", optimizer=optimizer)  # the other may have a sync object of its own
        nc.DataParallel(model, optimizer)
        return model

    with Cluster(NAMES[:1], tmp_path) as cluster:
        (error,) = cluster.run(cell).values()
        assert isinstance(error, ValueError)
        assert str(error).startswith("optimizer=Adam: one of its parameters is not in this Sequential (shape ()) and")


def test_parameters_that_the_optimizer_of_local_steps_has_and_no_sync_object_are_named_once(
    tmp_path: Path, capfd: Any
) -> None:
    def cell(node: Node, with_another: bool) -> None:
        model, other = build(), build()
        temperature = nn.Parameter(torch.ones(()))
        frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        more = [*other.parameters()] if with_another else [temperature]
        optimizer = torch.optim.Adam([*model.parameters(), *more, frozen])
        syncs = [nc.DiLoCo(model, every=2, name="one", optimizer=optimizer)]
        if with_another:
            syncs.append(nc.DiLoCo(other, every=2, name="two", optimizer=optimizer))
        for _ in range(4):
            for sync in syncs:
                sync.step()
        for sync in syncs:
            sync.finish()

    with Cluster(NAMES[:1], tmp_path) as cluster:
        for with_another in (True, False):
            cluster.run(lambda node, another=with_another: cell(node, another))
            said = capfd.readouterr().err
            line = "[one] optimizer=Adam: one of its parameters is not in this Sequential (shape ()) and would differ"
            assert said.count("would differ between the nodes") == said.count(line) == (not with_another), said
    assert "or make a sync object with name= for each model" in said


def test_two_sync_objects_over_one_parameter_are_refused_while_both_are_in_use(tmp_path: Path) -> None:
    def cell(node: Node) -> list[str]:
        trunk = nn.Linear(6, 4)
        actor, critic = nn.Sequential(trunk, nn.Linear(4, 3)), nn.Sequential(trunk, nn.Linear(4, 1))
        apart = nc.DiLoCo(build(), every=2, name="apart")
        first = nc.DiLoCo(actor, every=2, name="actor")
        said = []
        for make in (nc.DiLoCo, nc.SparseLoCo, nc.LocalSGD):
            try:
                make(critic, every=2, name="critic")
            except nc.TrainingError as error:
                said.append(str(error))
        first.step()
        first.finish()
        nc.DiLoCo(critic, every=2, name="critic").finish()
        nc.LocalSGD(nn.ModuleList([actor, critic]), every=2, name="both").finish()
        trunk.requires_grad_(False)  # a frozen trunk is in no round
        nc.DiLoCo(actor, every=2, name="actor")
        nc.DiLoCo(critic, every=2, name="critic")
        apart.finish()
        return said

    with Cluster(NAMES[:2], tmp_path) as cluster:
        every = [*cluster.run(cell).values(), *cluster.run(cell).values()]  # of an earlier cell none is in use
        assert [len(said) for said in every] == [3] * 4, every
        for said in every:
            assert len(set(said)) == 1
            assert said[0].startswith(
                "'0.weight' of 'critic' is a parameter of 'actor' too, which is not finished: two"
            )


def test_two_objects_that_send_gradients_may_share_parameters(tmp_path: Path) -> None:
    def cell(node: Node) -> nn.Module:
        torch.manual_seed(0)
        trunk = nn.Linear(6, 4)
        models = [nn.Sequential(trunk, nn.Linear(4, 3)), nn.Sequential(trunk, nn.Linear(4, 3))]
        syncs = [
            nc.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.05), name=name)
            for name, model in zip("xy", models, strict=True)
        ]
        for step in range(4):
            for sync, model in zip(syncs, models, strict=True):
                loss_of(model, batch(step + 100 * node.rank())).backward()
                sync.step(samples=8)
        return nn.ModuleList(models)

    with Cluster(NAMES[:2], tmp_path) as cluster:
        results = cluster.run(cell)
        assert len(results) == 2
        assert_equal_models(results)


def test_layers_that_are_unfrozen_in_mid_training_are_named(tmp_path: Path) -> None:
    def cell(node: Node) -> nn.Module:
        model = build()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DataParallel(model, optimizer)
        for step in range(4):
            if step == 2:
                model[0].requires_grad_(True)
            loss_of(model, batch(step)).backward()
            sync.step(samples=8)
        return model

    with Cluster(NAMES[:1], tmp_path) as cluster:
        (error,) = cluster.run(cell).values()
        assert isinstance(error, ValueError)
        assert "'0.bias'" in str(error)


@pytest.mark.parametrize("mode", ["allreduce", "server"])
def test_a_second_step_of_the_optimizer_is_refused_until_the_training_is_over(tmp_path: Path, mode: str) -> None:
    def cell(node: Node) -> tuple[str, bool]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DataParallel(model, optimizer, mode=mode)
        nn.functional.mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
        before, said = flat(model), ""
        try:
            optimizer.step()
        except ValueError as error:
            said = str(error)
        kept = np.array_equal(flat(model), before)
        sync.step()
        sync.finish()
        nn.functional.mse_loss(model(batch(1)[0]), batch(1)[1]).backward()
        optimizer.step()  # on its own again
        return said, kept

    with Cluster(NAMES[:2], tmp_path) as cluster:
        for said, kept in cluster.run(cell).values():
            assert "SGD.step() was called, and sync.step() of nc.DataParallel makes the step" in said
            assert kept


def test_joining_says_so_only_with_the_right_hash(tmp_path: Path) -> None:
    """A source that sends other bytes than it announces is not believed: the state comes from somebody else."""
    spoiled: list[int] = []
    joined: list[str] = []
    here, until = threading.Event(), Until("late")

    class Spoiling(Cluster):
        def carry(self, sender: Node, receiver: str, header: JobFrame, payload: bytes) -> None:
            if header.kind == "state" and header.name == "theta" and receiver == "late" and not spoiled:
                spoiled.append(header.round)
                payload = bytes(len(payload))
            super().carry(sender, receiver, header, payload)

    def cell(node: Node) -> nn.Module:
        model = build(seed=node.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=2)
        while until.goes_on(sync):
            round = sync.step(train(model, optimizer, batch(sync.round)))
            if round is not None and round.round == 1:
                here.set()
        return model

    with Spoiling(["a", "b"], tmp_path) as cluster:
        cluster.watch = lambda direction, node, message: (
            joined.append(message.state_hash) if isinstance(message, Joined) and node == "late" else None
        )
        assert_equal_models(cluster.run_with_newcomer(cell, here))
    assert spoiled
    assert joined


@pytest.mark.parametrize(("direction", "kind"), ALL_POINTS)
def test_a_coordinator_restarted_in_mid_round_goes_on_with_it(tmp_path: Path, direction: str, kind: type) -> None:
    counted: dict[str, int] = {}

    with Cluster(NAMES[:3], tmp_path) as cluster:

        def watch(towards: str, node: str, message: Any) -> None:
            if isinstance(message, Applied):
                counted[node] = counted.get(node, 0) + message.steps

        cluster.watch = watch
        restarted = cluster.once_at(direction, "b", kind, 2, cluster.restart_coordinator)
        assert_equal_models(cluster.run(training_cell(rounds=4)))
    assert restarted
    assert counted == dict.fromkeys("abc", 12)
