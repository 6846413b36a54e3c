"""Checkpoints of a real cluster: saved in one, resumed in another, damaged on the way."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster, ClusterError
from tests.cluster import Watcher, mend, run, running_cluster, shared_cluster, text_of
from tests.conftest import wait_until
from tests.training_cells import SETUP, commits, job, unique_name

PAIR = ("local", "local-2")

TRAIN = """
model = make_model(20_000, seed=rank)
optimizer = torch.optim.AdamW(model.parameters())
sync = nc.DiLoCo(model, every=2, optimizer=optimizer, name={name!r})
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
sync = nc.DiLoCo(model, every=2, optimizer=optimizer, name={name!r}, resume={saved!r})
print(sync.round, state_hash(model.weight.detach().numpy(), sync._replica.momentum), len(optimizer.state))
"""

BESIDE = """
model = make_model(20_000, seed=rank)
sync = nc.DiLoCo(model, every=2)
def train_some():
    for step in range(4):
        work(model, step)
        sync.step()
"""


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with shared_cluster(local=3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two(three: Cluster) -> Iterator[Cluster]:
    """Beside that of three nodes."""
    with running_cluster("other", local=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(three: Cluster, folder: Path) -> Iterator[Cluster]:
    """Three nodes, those of all tests: torch and its optimisers take two seconds to load."""
    yield from prepared(three, folder)


@pytest.fixture
def other(two: Cluster, folder: Path) -> Iterator[Cluster]:
    """Two nodes of another cluster."""
    yield from prepared(two, folder)


def prepared(cluster: Cluster, folder: Path) -> Iterator[Cluster]:
    run(cluster, f"{SETUP}\nos.chdir({str(folder)!r})")
    yield cluster
    mend(cluster)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of the test's job, and of its checkpoints: all are below the folder in which the nodes were started."""
    return unique_name(request)


def saved_twice(cluster: Cluster, name: str) -> tuple[list[Path], list[str]]:
    """A checkpoint called ``name`` of round 1 and of round 2, on 3 nodes; the folders, newest first, and the hashes of
    the rounds."""
    run(cluster, TRAIN.format(steps=2, name=name) + f"first = sync.checkpoint({name!r})")
    said = run(cluster, f"train(2)\nprint(sync.checkpoint({name!r}), first)")
    assert len(said) == 3
    assert len(set(said.values())) == 1
    hashes = [record["commit"]["state_hash"] for record in commits(cluster, name)]
    assert len(hashes) == 2
    return [Path(path) for path in said["local"].split()], hashes


def flip_a_byte(folder: Path) -> None:
    path = folder / "global.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_of_three_nodes_is_resumed_on_two(cluster: Cluster, other: Cluster, name: str) -> None:
    _, hashes = saved_twice(cluster, name)
    said = run(other, RESUME.format(name=name, saved=name))
    expected = f"2 {hashes[1]} 1\n"
    assert said == {"local": expected, "local-2": expected}
    run(other, "work(model, 0)\nsync.step()\nsync.finish()")
    assert [record["commit"]["round"] for record in commits(other, name)] == [3]
    assert commits(other, name)[0]["base_hash"] == expected.split()[1]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_resumed(
    cluster: Cluster, other: Cluster, name: str
) -> None:
    (newest, oldest), hashes = saved_twice(cluster, name)
    flip_a_byte(newest)
    said = run(other, RESUME.format(name=name, saved=name))
    for text in said.values():
        assert f"{newest}/global.safetensors does not have the hash in its manifest" in text
        assert f"1 {hashes[0]} 1\n" in text
    flip_a_byte(oldest)
    ended, _ = other.run(RESUME.format(name=f"{name}-again", saved=name))
    assert len(ended.results) == 2
    for result in ended.results.values():
        assert result.error_name == "CheckpointError"
        assert f"no whole checkpoint {name!r}" in result.error_value
        assert "delete" in result.error_value
        assert "\n" not in result.error_value


def test_a_later_cell_saves_what_an_earlier_one_trained(cluster: Cluster, name: str) -> None:
    run(cluster, TRAIN.format(steps=5, name=name), PAIR)
    said = run(cluster, 'path = sync.checkpoint("later")\nprint(path)', PAIR)
    assert said["local"] == said["local-2"]
    manifest = json.loads((Path(said["local"].strip()) / "manifest.json").read_text())
    assert (manifest["round"], manifest["state_hash"]) == (job(cluster, name).round, job(cluster, name).state_hash)


@pytest.fixture(scope="module")
def shared_one_job(three: Cluster) -> Iterator[Cluster]:
    with running_cluster("one-job", local=2) as cluster:
        yield cluster


@pytest.fixture
def with_one_job(shared_one_job: Cluster, folder: Path) -> Iterator[Cluster]:
    """Two nodes that know of the job ``model`` alone: who saves need not say which one."""
    yield from prepared(shared_one_job, folder)


@pytest.mark.parametrize("running", [False, True], ids=["after", "during"])
def test_another_view_saves_a_checkpoint(with_one_job: Cluster, folder: Path, running: bool) -> None:
    before = len(commits(with_one_job))
    name = f"from-panel-{running}"
    until = 'while not os.path.exists("enough"): train_some()' if running else "train_some()"
    watcher = Watcher(with_one_job.execute(f"{BESIDE}{until}\nsync.finish()"))
    if running:
        wait_until(lambda: len(commits(with_one_job)) > before + 1, 60, "two rounds")
    else:
        assert watcher.wait_end().status == "ok"
    other = Cluster.attach("one-job")
    path = Path(other.checkpoint(name))
    assert (path / "manifest.json").is_file()
    assert any(node.checkpoint.startswith(f"{name} at round") for node in other.state().nodes)
    other.close()
    (folder / "enough").touch()
    assert watcher.wait_end().status == "ok"
    assert set(run(with_one_job, "print(len(list(nc.shard(range(4)))))").values()) == {"2\n"}


@pytest.fixture(scope="module")
def without_jobs(three: Cluster) -> Iterator[Cluster]:
    with running_cluster("without-jobs", local=1) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digits",), "run a cell that makes nc.DiLoCo"),
        (("digits", "nothing"), "there is no training job 'nothing'"),
        (("../x",), "checkpoint name '../x' is not usable"),
    ],
)
def test_a_checkpoint_that_cannot_be_is_one_line(
    without_jobs: Cluster, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ClusterError) as error:
        without_jobs.checkpoint(*arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_resuming_what_was_never_saved_says_where_it_was_looked_for(cluster: Cluster, name: str) -> None:
    ended, outputs = cluster.run(RESUME.format(name=name, saved=name), PAIR)
    assert {result.error_name for result in ended.results.values()} == {"TrainingError"}, ended
    assert f"checkpoint {name!r} was not found on local, local-2" in text_of(outputs, "local")
