"""sync.checkpoint and resume= through the whole training room."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.checkpoints import CheckpointError, load
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import Save
from tests.cluster_in_process import Cluster, Node
from tests.test_training import NAMES, assert_equal_models, batch, build, flat, train

EVERY = 3


def make(node: Node, **arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer, nc.DiLoCo]:
    model = build(seed=node.rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, nc.DiLoCo(model, every=EVERY, optimizer=optimizer, **arguments)


def test_saved_on_three_nodes_resumed_on_two(tmp_path: Path) -> None:
    moments: dict[str, Any] = {}

    def first(node: Node) -> Any:
        model, optimizer, sync = make(node)
        for step in range(2 * EVERY):
            sync.step(train(model, optimizer, batch(step + 100 * node.rank())))
        moments[node.name] = optimizer.state_dict()
        return sync.checkpoint("digits"), flat(model).copy()

    with Cluster(["a", "b", "c"], tmp_path) as cluster:
        results = cluster.run(first)
    paths = {path for path, _ in results.values()}
    assert paths == {tmp_path / "digits" / "round-000002"}
    theta = results["a"][1]

    saved = load(tmp_path / "digits" / "round-000002")
    assert [(node.name, node.rank) for node in saved.manifest.nodes] == [("a", 0), ("b", 1), ("c", 2)]
    assert saved.manifest.settings["every"] == "3 steps"
    named = {name: tensor.detach().numpy() for name, tensor in build().named_parameters()}
    assert {name: value.shape for name, value in saved.parameters.items()} == {
        name: value.shape for name, value in named.items()
    }

    def second(node: Node) -> nn.Module:
        model, optimizer, sync = make(node, resume="digits")
        assert sync.round == 2
        np.testing.assert_array_equal(flat(model), theta)
        before = moments[{"c": "c", "new": "b"}[node.name]]
        torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
        for step in range(EVERY):
            sync.step(train(model, optimizer, batch(step + 100 * node.rank())))
        assert sync.round == 3
        return model

    with Cluster(["c", "new"], tmp_path) as cluster:
        assert_equal_models(cluster.run(second))


def test_what_was_loaded_since_the_last_round_is_said_to_be_in_no_checkpoint(tmp_path: Path, capfd: Any) -> None:
    def trained(node: Node) -> None:
        model, optimizer, sync = make(node)
        for step in range(2 * EVERY):
            sync.step(train(model, optimizer, batch(step + 100 * node.rank())))
            if step + 1 == EVERY:
                best = {name: value.clone() for name, value in model.state_dict().items()}
            sync.checkpoint("each-step")
        sync.finish()
        sync.checkpoint("last")
        model.load_state_dict(best)
        sync.checkpoint("best")

    with Cluster(["a", "b"], tmp_path) as cluster:
        cluster.run(trained)
    said = [line for line in capfd.readouterr().err.splitlines() if "checkpoint" in line]
    assert len(said) == 2
    for line in said:
        assert "checkpoint 'best' has the global parameters of round 2, not what was loaded into the model" in line


def test_only_one_node_has_the_checkpoint_on_its_disk(tmp_path: Path) -> None:
    def first(node: Node) -> Any:
        model, optimizer, sync = make(node)
        for step in range(EVERY):
            sync.step(train(model, optimizer, batch(step + 100 * node.rank())))
        sync.checkpoint("digits")
        return flat(model).copy(), optimizer.state_dict()

    with Cluster(["a", "b"], tmp_path / "one") as cluster:
        saved = cluster.run(first)

    def second(node: Node) -> nn.Module:
        model, optimizer, sync = make(node, resume="digits")
        assert sync.round == 1
        np.testing.assert_array_equal(flat(model), saved["a"][0])
        torch.testing.assert_close(optimizer.state_dict(), saved[node.name][1], rtol=0, atol=0)
        return model

    with Cluster(["a", "b"], tmp_path / "two") as cluster:
        cluster.nodes["b"]._directory = tmp_path / "one"
        assert_equal_models(cluster.run(second))


def test_a_checkpoint_that_nobody_has_is_named(tmp_path: Path) -> None:
    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(lambda node: make(node, resume="digits"))
    for result in results.values():
        assert isinstance(result, nc.TrainingError)
        assert "digits" in str(result)


def test_a_damaged_checkpoint_falls_back_and_with_none_left_is_an_error(tmp_path: Path, capfd: Any) -> None:
    def save_twice(node: Node) -> None:
        model, optimizer, sync = make(node)
        for number in range(2):
            for step in range(EVERY):
                sync.step(train(model, optimizer, batch(step)))
            sync.checkpoint("digits")
            assert sync.round == number + 1

    with Cluster(["a"], tmp_path) as cluster:
        assert cluster.run(save_twice) == {"a": None}
    spoil(tmp_path / "digits" / "round-000002" / "global.safetensors")

    with Cluster(["a"], tmp_path) as cluster:
        assert cluster.run(lambda node: make(node, resume="digits")[2].round)["a"] == 1
    assert "round-000002/global.safetensors does not have the hash" in capfd.readouterr().err

    spoil(tmp_path / "digits" / "round-000001" / "node-0-a.safetensors")
    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(lambda node: make(node, resume="digits"))["a"]
    assert isinstance(result, CheckpointError)
    assert "no whole checkpoint 'digits'" in str(result)
    assert "\n" not in str(result)


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path) -> None:
    def first(node: Node) -> None:
        model, optimizer, sync = make(node)
        sync.step(train(model, optimizer, batch(1)))
        sync.finish()
        sync.checkpoint("digits")

    with Cluster(["a"], tmp_path) as cluster:
        assert cluster.run(first) == {"a": None}
        result = cluster.run(lambda node: nc.DiLoCo(nn.Linear(6, 3), name="other", resume="digits"))["a"]
    assert isinstance(result, CheckpointError)
    assert "build the model it was saved from" in str(result)


def test_a_checkpoint_of_a_model_that_is_frozen_otherwise_says_how_to_load_it(tmp_path: Path) -> None:
    def model(frozen: bool) -> nn.Sequential:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        made[0].requires_grad_(not frozen)
        return made

    def first(node: Node) -> Path | None:
        trained = model(frozen=True)
        sync = nc.DiLoCo(trained, name="head")
        with torch.no_grad():
            trained[1].weight.fill_(7.0)
        sync.step()
        sync.finish()
        return sync.checkpoint("head")

    def second(node: Node) -> tuple[str, float, float]:
        whole = model(frozen=False)
        with pytest.raises(CheckpointError) as refused:
            nc.DiLoCo(whole, name="whole", resume="head")
        nc.load_checkpoint(saved, into=whole)
        sync = nc.DiLoCo(whole, name="whole")
        sync.finish()
        return str(refused.value), whole[1].weight[0, 0].item(), whole[0].weight[0, 0].item()

    with Cluster(["a"], tmp_path) as cluster:
        saved = cluster.run(first)["a"]
        said, trained, frozen = cluster.run(second)["a"]
    assert "nc.load_checkpoint('head', into=model) and no resume=" in said
    assert trained != model(frozen=True)[1].weight[0, 0].item()
    assert frozen == model(frozen=True)[0].weight[0, 0].item()


def test_a_disk_that_refuses_is_an_error_on_every_node_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where the folder should be")

    def cell(node: Node) -> nn.Module:
        model, optimizer, sync = make(node)
        for step in range(2 * EVERY):
            sync.step(train(model, optimizer, batch(step)))
            if step == EVERY:
                with pytest.raises(CheckpointError, match="checkpoint 'digits' not written"):
                    sync.checkpoint("digits")
        return model

    with Cluster(["a", "b"], tmp_path / "blocked") as cluster:
        assert_equal_models(cluster.run(cell))


@pytest.mark.parametrize("when", ["in mid-loop", "in a later cell", "from a view"])
def test_saving_while_the_others_train_or_everybody_rests(tmp_path: Path, when: str) -> None:
    kept: dict[str, Any] = {}

    def training(node: Node) -> Any:
        model, optimizer, sync = make(node)
        kept[node.name] = sync
        path = None
        for step in range(4 * EVERY):
            sync.step(train(model, optimizer, batch(step)))
            if when == "in mid-loop" and node.name == "b" and step == EVERY:
                path = sync.checkpoint("digits")
        return path

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(training)
        if when == "in a later cell":
            results = cluster.run(lambda node: kept[node.name].checkpoint("digits"))
        elif when == "from a view":
            results["b"] = Path(cluster.save("digits").path)
    round = 1 if when == "in mid-loop" else 4
    assert results["b"] == tmp_path / "digits" / f"round-{round:06d}"
    assert len(load(results["b"]).manifest.nodes) == 2


def test_a_member_lost_before_its_part_is_not_waited_for(tmp_path: Path) -> None:
    def cell(node: Node) -> Any:
        model, optimizer, sync = make(node)
        for step in range(EVERY):
            sync.step(train(model, optimizer, batch(step)))
        return sync.checkpoint("digits")

    with Cluster(NAMES[:3], tmp_path) as cluster:
        cluster.lose = lambda sender, receiver, header: (
            isinstance(header, JobFrame) and (header.kind == "part" and sender == "c")
        )
        seen: list[Save] = []

        def watch(direction: str, node: str, message: Any) -> None:
            if isinstance(message, Save) and node == "c" and not seen:
                seen.append(message)
                cluster.kill("c")

        cluster.watch = watch
        results = cluster.run(cell)
    del results["c"]
    saved = load(tmp_path / "digits" / "round-000001")
    assert results == {"a": saved.path, "b": saved.path}
    assert [node.file for node in saved.manifest.nodes] == ["node-0-a.safetensors", "node-1-b.safetensors", ""]


def test_no_optimizer_is_needed(tmp_path: Path) -> None:
    def cell(node: Node) -> Any:
        sync = nc.LocalSGD(build(), every=1)
        sync.step()
        return sync.checkpoint("digits")

    with Cluster(["a"], tmp_path) as cluster:
        path = cluster.run(cell)["a"]
        assert path == tmp_path / "digits" / "round-000001"


def test_resume_in_a_cell_that_is_run_again_takes_the_checkpoint_again(tmp_path: Path) -> None:
    """Also in a second object of one cell; and where there is no such checkpoint, what is held here stays."""

    def first(node: Node) -> Any:
        model, optimizer, sync = make(node)
        for step in range(EVERY):
            sync.step(train(model, optimizer, batch(step + 100 * node.rank())))
        sync.checkpoint("digits")
        return flat(model).copy()

    with Cluster(["a", "b"], tmp_path) as cluster:
        saved = cluster.run(first)["a"]

    def resumed(node: Node) -> nn.Module:
        for _ in range(2):
            model, optimizer, sync = make(node, resume="digits")
            assert sync.round == 1
            np.testing.assert_array_equal(flat(model), saved)
            for step in range(2 * EVERY):
                sync.step(train(model, optimizer, batch(step + 100 * node.rank())))
            sync.finish()
            assert sync.round == 3
        return model

    def mistyped(node: Node) -> int:
        with pytest.raises(nc.TrainingError, match=r"checkpoint 'digit' was not found on a, b: .*; a has 'digits'$"):
            make(node, resume="digit")
        return make(node)[2].round

    with Cluster(["a", "b"], tmp_path) as cluster:
        for _ in range(2):
            assert_equal_models(cluster.run(resumed))
        assert cluster.run(mistyped) == {"a": 3, "b": 3}
