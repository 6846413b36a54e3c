"""Checkpoints of a real cluster: saved in one, resumed in another, damaged on the way."""

import json
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster, ClusterError
from tests.cluster import Watcher, run, running_cluster, text_of
from tests.conftest import wait_until
from tests.training_cells import SETUP, commits, job

pytestmark = pytest.mark.usefixtures("work")


TRAIN = """
model = make_model(20_000, seed=rank)
optimizer = torch.optim.AdamW(model.parameters())
sync = nc.DiLoCo(model, every=2, optimizer=optimizer)
def train(steps):
    for step in range(steps):
        optimizer.zero_grad()
        ((model.weight - rank) ** 2).mean().backward()
        optimizer.step()
        sync.step()
    sync.finish()
train({steps})
"""

RESUME = """
model = make_model(20_000, seed=rank + 100)
optimizer = torch.optim.AdamW(model.parameters())
sync = nc.DiLoCo(model, every=2, optimizer=optimizer, resume="digits")
print(sync.round, state_hash(model.weight.detach().numpy(), sync._replica.momentum), len(optimizer.state))
"""


def saved_twice(work: Path) -> list[Path]:
    """Checkpoint ``digits`` of round 1 and of round 2, on 3 nodes; the folders, newest first."""
    with running_cluster(local=3) as cluster:
        run(cluster, SETUP)
        run(cluster, TRAIN.format(steps=2) + 'first = sync.checkpoint("digits")')
        said = run(cluster, 'train(2)\nprint(sync.checkpoint("digits"), first)')
        assert len(set(said.values())) == 1
        hashes = [record["commit"]["state_hash"] for record in commits(cluster)]
        assert len(hashes) == 2
        (work / "hashes").write_text(" ".join(hashes))
        return [Path(path) for path in said["local"].split()]


def flip_a_byte(folder: Path) -> None:
    path = folder / "global.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_of_three_nodes_is_resumed_on_two(work: Path) -> None:
    saved_twice(work)
    with running_cluster("other", local=2) as cluster:
        run(cluster, SETUP)
        said = run(cluster, RESUME)
        expected = f"2 {(work / 'hashes').read_text().split()[1]} 1\n"
        assert said == {"local": expected, "local-2": expected}
        run(cluster, "work(model, 0)\nsync.step()\nsync.finish()")
        assert [record["commit"]["round"] for record in commits(cluster)] == [3]
        assert commits(cluster)[0]["base_hash"] == expected.split()[1]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_resumed(work: Path) -> None:
    newest, oldest = saved_twice(work)
    flip_a_byte(newest)
    with running_cluster("other", local=2) as cluster:
        run(cluster, SETUP)
        said = run(cluster, RESUME)
        for text in said.values():
            assert f"{newest}/global.safetensors does not have the hash in its manifest" in text
            assert f"1 {(work / 'hashes').read_text().split()[0]} 1\n" in text
        flip_a_byte(oldest)
        cluster.restart("local", replay=False)
        cluster.restart("local-2", replay=False)
        run(cluster, SETUP)
        ended, _ = cluster.run(RESUME)
        for result in ended.results.values():
            assert result.error_name == "CheckpointError"
            assert "no whole checkpoint 'digits'" in result.error_value
            assert "delete" in result.error_value
            assert "\n" not in result.error_value


def test_a_later_cell_saves_what_an_earlier_one_trained() -> None:
    with running_cluster(local=2) as cluster:
        run(cluster, SETUP)
        run(cluster, TRAIN.format(steps=5))
        said = run(cluster, 'path = sync.checkpoint("later")\nprint(path)')
        assert said["local"] == said["local-2"]
        manifest = json.loads((Path(said["local"].strip()) / "manifest.json").read_text())
        assert (manifest["round"], manifest["state_hash"]) == (job(cluster).round, job(cluster).state_hash)


@pytest.mark.parametrize("running", [False, True], ids=["after", "during"])
def test_another_view_saves_a_checkpoint(work: Path, running: bool) -> None:
    with running_cluster(local=2) as cluster:
        run(cluster, SETUP)
        until = 'while not os.path.exists("enough"): train_some()' if running else "train_some()"
        source = TRAIN.format(steps=0).replace("train(0)", "") + (
            "def train_some():\n    for step in range(4):\n        work(model, step)\n        sync.step()\n"
        )
        watcher = Watcher(cluster.execute(f"{source}{until}\nsync.finish()"))
        if running:
            wait_until(lambda: len(commits(cluster)) > 1, 60, "two rounds")
        else:
            assert watcher.wait_end().status == "ok"
        other = Cluster.attach("test")
        path = Path(other.checkpoint("from-panel"))
        assert (path / "manifest.json").is_file()
        assert any(node.checkpoint.startswith("from-panel at round") for node in other.state().nodes)
        other.close()
        (work / "enough").touch()
        assert watcher.wait_end().status == "ok"
        assert set(run(cluster, "print(len(list(nc.shard(range(4)))))").values()) == {"2\n"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digits",), "run a cell that makes nc.DiLoCo"),
        (("digits", "nothing"), "there is no training job 'nothing'"),
        (("../x",), "checkpoint name '../x' is not usable"),
    ],
)
def test_a_checkpoint_that_cannot_be_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    with running_cluster(local=1) as cluster, pytest.raises(ClusterError) as error:
        cluster.checkpoint(*arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_resuming_what_was_never_saved_says_where_it_was_looked_for() -> None:
    with running_cluster(local=2) as cluster:
        run(cluster, SETUP)
        ended, outputs = cluster.run(RESUME)
        assert {result.error_name for result in ended.results.values()} == {"TrainingError"}
        assert "checkpoint 'digits' was not found on local, local-2" in text_of(outputs, "local")
