"""Training on a real cluster: what kills, restarts and Stop do to rounds, against the numpy reference."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notebook_cluster.client import Cluster
from tests.cluster import Watcher, kernel_pid, kill, mend, node, run, running_cluster, shared_cluster
from tests.conftest import wait_until
from tests.training_cells import SETUP, commits, counted, job, replay, unique_name, wait_for_commit

ALL = ("local", "local-2", "local-3")
PAIR = ALL[:2]
ELEMENTS = 120_000
"""More than a block of slices per node, and several chunks on the mesh."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with shared_cluster(local=3) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster, folder: Path) -> Iterator[Cluster]:
    """That of all tests, with new kernels for those that the test before has killed: torch takes a second to load."""
    run(shared, f"{SETUP}\nos.chdir({str(folder)!r})")
    yield shared
    mend(shared)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of the test's job."""
    return unique_name(request)


ROUNDS = """
model = make_model({elements}, seed=rank)
sync = nc.DiLoCo(model, every=2, name={name!r})
keep("theta", model, 0)
{hook}
for step in range(8):
    work(model, step)
    if step % 2:
        keep("local", model, sync.round + 1)
    if sync.step(loss=step, samples=rank + 1):
        keep("theta", model, sync.round)
sync.finish()
"""


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        ("local", "'receive', rounds.Seal, 2"),
        ("local-3", "'receive', rounds.Seal, 2"),
        ("local-2", "'send', rounds.Prepared, 2"),
        ("local", "'receive', rounds.Commit, 2"),
    ],
)
def test_sigkill_in_the_middle_of_a_round_leaves_the_survivors_on_the_reference(
    cluster: Cluster, folder: Path, name: str, victim: str, point: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = f"if nc.node() == {victim!r}: when({point}, die, {name!r})"
    ended, _ = cluster.run(ROUNDS.format(elements=ELEMENTS, hook=hook, name=name))
    assert "SIGKILL" in ended.results[victim].reason
    survivors = sorted({*ALL} - {victim})
    assert all(ended.results[survivor].status == "ok" for survivor in survivors)
    assert ended.trained
    records = commits(cluster, name)
    assert [record["commit"]["round"] for record in records] == [1, 2, 3, 4]
    if "Seal" in point:
        assert victim not in counted(records[1])
    elif "Commit" in point:
        assert victim in counted(records[1])
    assert sorted(counted(records[2])) == survivors
    for number, theta in enumerate(replay(folder, records), 1):
        for survivor in survivors:
            np.testing.assert_array_equal(np.load(folder / f"theta-{number}-{survivor}.npy"), theta)
    assert job(cluster, name).hash_mismatches == 0
    after = next(record["time"] for record in records if record["time"] > killed_at(folder))
    with capsys.disabled():
        print(f"\n[{victim} killed: the survivors' next COMMIT {after - killed_at(folder):.2f} s later]", end=" ")


LENDING = """
import pathlib
model = make_model(900_000, seed=rank)
sync = nc.DiLoCo(model, every=2, codec={codec!r}, name={name!r})
mesh, before = current_runtime()._mesh, 0
for step in range(6):
    work(model, step)
    sync.step()
    before = before or (mesh.bytes_sent if sync.round else 0)  # the state of rank 0 was sent
lent = [file for file in current_runtime().lending._files if not file.spent]  # others are of cells before
files = [file.shared._path for file in sorted(lent, key=lambda file: -file.size)]
pathlib.Path(f"files-{{nc.node()}}").write_text(" ".join(map(str, files)))
assert files and all(file.exists() for file in files), files
print(sync.round, mesh.bytes_sent - before, flush=True)
while {waits} and not os.path.exists("enough"):
    time.sleep(0.02)
sync.finish()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is lent through /dev/shm")
@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_nodes_of_one_peer_read_each_others_slices_where_they_are(
    cluster: Cluster, folder: Path, name: str, codec: str
) -> None:
    watcher = Watcher(cluster.execute(LENDING.format(codec=codec, name=name, waits=False)))
    assert {result.status for result in watcher.wait_end().results.values()} == {"ok"}
    for who in ALL:
        number, sent = map(int, watcher.text(who).split())
        assert number == 3
        assert sent < 100_000  # of 2 MB as int8
    assert job(cluster, name).hash_mismatches == 0
    # of a model so small the last means are kept for who is late; the contribution is the largest
    lent = [[Path(path) for path in (folder / f"files-{who}").read_text().split()] for who in ALL]
    assert all(len(files) >= 2 for files in lent)
    wait_until(lambda: not any(files[0].exists() for files in lent), 10, "memory to be given back after the cell")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is lent through /dev/shm")
def test_a_killed_node_leaves_no_memory_behind(cluster: Cluster, folder: Path, name: str) -> None:
    pid = kernel_pid(cluster, "local-2")
    watcher = Watcher(cluster.execute(LENDING.format(codec="float32", name=name, waits=True)))
    wait_until(lambda: "3 " in watcher.text("local-2"), 60, "three rounds")
    lent = [Path(path) for path in (folder / "files-local-2").read_text().split()]
    assert all(path.exists() for path in lent)
    kill(pid)
    wait_until(lambda: not any(path.exists() for path in lent), 30, "what it has lent to be removed")
    (folder / "enough").touch()
    ended = watcher.wait_end()
    assert {ended.results[who].status for who in ALL if who != "local-2"} == {"ok"}


def killed_at(work: Path) -> float:
    return float((work / "killed").read_text())


UNTIL = """
model = make_model(ELEMENTS, seed=rank)
sync = nc.DiLoCo(model, every=2)
begins = f"{sync.round} {sync._replica.state_hash}"
assert begins.endswith(state_hash(model.weight.detach().numpy(), sync._replica.momentum))
print("begins", begins, flush=True)
step = 0
while not os.path.exists("enough"):
    work(model, step)
    time.sleep(0.02)
    step += 1
    sync.step(loss=step)
sync.finish()
print("ends", sync.round, state_hash(model.weight.detach().numpy(), sync._replica.momentum))
"""


def test_a_killed_node_restarted_in_mid_run_replays_takes_the_state_and_is_in_a_later_round(work: Path) -> None:
    with running_cluster(local=3) as cluster:
        run(cluster, SETUP)
        run(cluster, f"ELEMENTS = {ELEMENTS}")
        pid = kernel_pid(cluster, "local-2")
        watcher = Watcher(cluster.execute(UNTIL))
        wait_until(lambda: len(commits(cluster)) >= 2, 60, "two rounds")
        kill(pid)
        wait_for_commit(cluster, lambda record: "local-2" not in counted(record), "a round without local-2")
        cluster.restart("local-2")

        def with_new_kernel(record: dict[str, Any]) -> bool:
            return {"local-2"} < set(counted(record)) and any(
                (member["name"], member["incarnation"]) == ("local-2", 2) for member in record["members"]
            )

        wait_for_commit(cluster, with_new_kernel, "a round with the new local-2")
        (work / "enough").touch()
        assert watcher.wait_end().results["local"].status == "ok"
        said = watcher.text("local-2")
        number, hash = said.rpartition("begins ")[2].split()[:2]
        committed = {record["commit"]["round"]: record["commit"]["state_hash"] for record in commits(cluster)}
        assert committed[int(number)] == hash
        ends = {watcher.text(name).rpartition("ends ")[2] for name in ("local", "local-2", "local-3")}
        assert ends == {f"{job(cluster).round} {job(cluster).state_hash}\n"}
        assert node(cluster.state(), "local-2").incarnation == 2
        alone = "cell 4 runs again alone: the models that it trains are not those of the others"
        assert not [row for row in cluster.state().events if alone in row.text], "it was not run again, but joined"
        cluster.restart("local-2")
        said = cluster.state().events
        wait_until(lambda: any(alone in row.text for row in cluster.state().events), what=lambda: f"that: {said}")


def test_rounds_go_on_without_a_node_that_raises_while_the_others_finish(
    cluster: Cluster, folder: Path, name: str
) -> None:
    cell = f"""
model = make_model(1000)
sync = nc.DiLoCo(model, every=3, name={name!r})
for step in range(4):
    work(model, step)
    sync.step()
if rank == 1:
    while not os.path.exists("raise"):
        time.sleep(0.01)
    raise ValueError("no more data")
sync.finish()
print(sync.round, *sync.members)
"""
    watcher = Watcher(cluster.execute(cell))

    def others_finish() -> bool:
        return any((row.name, row.round, row.waiting_for) == (name, 1, ["local-2"]) for row in cluster.state().jobs)

    wait_until(others_finish, 60, "the others to wait in finish()")
    (folder / "raise").touch()
    ended = watcher.wait_end()
    assert ended.results["local-2"].error_name == "ValueError"
    assert {ended.results[other].status for other in ("local", "local-3")} == {"ok"}
    assert watcher.text("local") == watcher.text("local-3") == "2 local local-3\n"


def test_on_one_node_averaging_every_step_is_plain_training(cluster: Cluster, name: str) -> None:
    said = run(
        cluster,
        f"NAME = {name!r}"
        """
def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()

def training(model, sync=None):
    momenta = [torch.zeros_like(p) for p in model.parameters()]
    generator, worst = torch.Generator().manual_seed(1), 0.0
    for _ in range(20):
        x, before = torch.randn(16, 10, generator=generator), flat(model)
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        loss.backward()
        with torch.no_grad():
            for p, momentum in zip(model.parameters(), momenta):
                momentum.mul_(0.9).add_(p.grad)
                p -= 0.1 * momentum
        if sync:
            local = flat(model)
            assert sync.step(loss, samples=16)
            unit = np.spacing(np.maximum(np.abs(before), np.abs(local)))
            worst = max(worst, float((np.abs(flat(model) - local) / unit).max()))
    return worst

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4))

shared, plain = build(), build()
worst = training(shared, nc.LocalSGD(shared, every=1, name=NAME))
training(plain)
print(worst, float(np.abs(flat(shared) - flat(plain)).max()))
""",
        ("local",),
    )
    units, apart = map(float, said["local"].split())
    assert units <= 1
    assert apart < 1e-5
    assert job(cluster, name).round == 20


@pytest.mark.parametrize("codec", ["fp16", "int8", "topk-8", "randomk-8"])
def test_lossy_codecs_leave_every_node_with_the_same_hash_after_every_round(
    cluster: Cluster, name: str, codec: str
) -> None:
    said = run(
        cluster,
        f"""
model = make_model({ELEMENTS}, seed=rank)
sync = nc.DiLoCo(model, every=2, codec={codec!r}, outer_momentum={0.0 if codec.endswith("k-8") else 0.9}, name={name!r})
for step in range(10):
    work(model, step)
    if done := sync.step(samples=rank + 1):
        assert done.state_hash == state_hash(model.weight.detach().numpy(), sync._replica.momentum)
        print(done.round, done.state_hash)
sync.finish()
""",
        PAIR,
    )
    assert said["local"] == said["local-2"]
    assert said["local"].split() == [
        word
        for record in commits(cluster, name)
        for word in (str(record["commit"]["round"]), record["commit"]["state_hash"])
    ]
    assert (job(cluster, name).round, job(cluster, name).hash_mismatches) == (5, 0)


def test_the_steps_after_the_last_boundary_are_in_a_last_round(cluster: Cluster, folder: Path, name: str) -> None:
    cell = f"""
model = make_model(1000)
keep("start", model, 0)
sync = nc.LocalSGD(model, every=100, name={name!r})
for step in range(250):
    work(model, step)
    sync.step()
sync.finish()
keep("end", model, sync.round)
"""
    run(cluster, cell, PAIR)
    assert [record["commit"]["round"] for record in commits(cluster, name)] == [1, 2, 3]
    ends = [np.load(folder / f"end-3-{member}.npy") for member in PAIR]
    np.testing.assert_array_equal(*ends)
    draws = [
        np.random.default_rng([*member.encode(), step]).standard_normal(1000, dtype=np.float32).astype(np.float64)
        for member in PAIR
        for step in range(250)
    ]
    expected = np.load(folder / "start-0-local.npy") - sum(draws) / 2
    np.testing.assert_allclose(ends[0], expected, atol=1e-4)


KEPT = """
model = make_model({elements}, seed=rank)
sync = nc.DiLoCo(model, every=2, name={name!r})
if not sync.round:
    keep("theta", model, 0)
step = 0
while not os.path.exists("enough"):
    work(model, step)
    time.sleep(0.02)
    step += 1
    if step % 2 == 0:
        keep("local", model, sync.round + 1)
    sync.step()
    if step % 2 == 0:
        keep("theta", model, sync.round)
if step % 2:
    keep("local", model, sync.round + 1)
sync.finish()
keep("theta", model, sync.round)
"""


def test_training_goes_on_when_the_coordinator_was_killed_and_started_again(work: Path) -> None:
    first = Cluster.start("test", local=2)
    run(first, SETUP)
    watcher = Watcher(first.execute(KEPT.format(elements=2000, name="model")))
    wait_until(lambda: len(commits(first)) >= 2, 60, "two rounds")
    kill(first.connection.file.pid)
    before = len(commits(first))
    first.close()
    with running_cluster(local=2) as cluster:
        assert cluster.attached
        wait_until(lambda: len(commits(cluster)) > before + 1, 60, "rounds after the restart")
        late = Watcher(cluster.watch(watcher.stream.cell))
        (work / "enough").touch()
        assert late.wait_end().status == "ok"
        records = commits(cluster)
        assert [record["commit"]["round"] for record in records] == list(range(1, len(records) + 1))
        end = replay(work, records)[-1]
        for name in ("local", "local-2"):
            np.testing.assert_array_equal(np.load(work / f"theta-{len(records)}-{name}.npy"), end)
        assert job(cluster).hash_mismatches == 0


def test_a_node_added_in_mid_run_takes_the_state_and_is_in_a_later_round(work: Path) -> None:
    with running_cluster(local=2) as cluster:
        run(cluster, SETUP)
        watcher = Watcher(cluster.execute(KEPT.format(elements=2000, name="model")))
        wait_until(lambda: len(commits(cluster)) >= 1, 60, "a round")
        assert cluster.add("local", 1) == ["local-3"]
        wait_for_commit(cluster, lambda record: len(counted(record)) == 3, "a round of three")
        (work / "enough").touch()
        ended = watcher.wait_end()
        assert {name: result.status for name, result in ended.results.items()} == dict.fromkeys(
            ("local", "local-2", "local-3"), "ok"
        )
        # No reference here: work that came too late for its round is re-based before it counts.
        ends = {
            (work / f"theta-{job(cluster).round}-{name}.npy").read_bytes() for name in ("local", "local-2", "local-3")
        }
        assert len(ends) == 1
        assert job(cluster).hash_mismatches == 0


def test_a_stopped_training_cell_that_is_run_again_goes_on_from_its_last_round(
    cluster: Cluster, folder: Path, name: str
) -> None:
    watcher = Watcher(cluster.execute(KEPT.format(elements=2000, name=name), PAIR))
    wait_until(lambda: len(commits(cluster, name)) >= 2, 60, "two rounds")
    cluster.interrupt()
    assert watcher.wait_end().status == "interrupted"
    stopped = len(commits(cluster, name))
    (folder / "enough").touch()
    run(cluster, KEPT.format(elements=2000, name=name) + "print(sync.round)", PAIR)
    again = run(cluster, "print(sync.round, sync._replica.state_hash)", PAIR)
    assert again["local"] == again["local-2"]
    assert int(again["local"].split()[0]) >= stopped
    assert job(cluster, name).hash_mismatches == 0
