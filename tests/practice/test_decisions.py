"""nc.should_stop and nc.mean_metrics on real kernels: unequal batches, votes, nodes that die, join or stand still."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import Watcher, kernel_pid, kill, mend, run, running_cluster, shared_cluster, stopped
from tests.conftest import wait_until
from tests.practice.recipes import recipe
from tests.training_cells import SETUP

NODES = ("local", "local-2", "local-3")

TRAIN = """
def run(name, batches, stop_at=None, **vote):
    "Rounds of two steps; the node whose number is in stop_at wants to stop from that round on."
    model = make_model(50)
    sync = nc.DiLoCo(model, every=2, name=name, fresh=True)
    rounds, asked = 0, []
    for step in range(batches):
        work(model, step)
        done = sync.step(samples=8)
        if done:
            rounds = done.round
            asked.append(nc.should_stop(stop_at is not None and rounds >= stop_at, **vote))
            if asked[-1]:
                break
    sync.finish()
    return rounds, asked
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with shared_cluster(local=3) as cluster:
        run(cluster, SETUP + "import warnings\n" + TRAIN)
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    mend(shared)


def alike(printed: dict[str, str]) -> str:
    assert len(set(printed.values())) == 1, "\n".join(map(repr, printed.items()))
    return next(iter(printed.values()))


def test_unequal_batches_with_a_sync_object_hang_nobody_and_one_flag_stops_all_in_one_round(cluster: Cluster) -> None:
    printed = run(cluster, "print(run('unequal', 9 - 3 * rank))")
    assert printed == {"local": "(4, [False, False, False, False])\n", "local-2": "(3, [False, False, False])\n",
                       "local-3": "(1, [False])\n"}  # fmt: skip
    assert alike(run(cluster, "print(run('flag', 20 + rank, stop_at=3 if rank == 1 else None))")) == (
        "(3, [False, False, True])\n"
    )
    cell = "print(run('vote', 20, stop_at=2 + rank, by='majority'))\nprint(run('vote', 20, stop_at=2 + rank, by='all'))"
    assert alike(run(cluster, cell)) == "(3, [False, False, True])\n(4, [False, False, False, True])\n"


def test_unequal_batches_without_a_sync_object(cluster: Cluster) -> None:
    """A node that has ended its cell, or left its loop over nc.shard and waits in what comes after, is not asked."""
    cell = """
answers = [nc.should_stop(rank == 0 and step == 3) for step in range(5 - 2 * rank)]
print(answers)
"""
    printed = run(cluster, cell)
    assert printed["local"] == "[False, False, False, True, False]\n"
    assert printed["local-3"] == "[False]\n"
    cell = """
for epoch in range(3):
    total = count = 0
    for batch in nc.shard(np.arange(26.0), batch_size=1, seed=epoch):  # 9, 9 and 8 batches
        total, count = total + batch.sum(), count + 1
        assert not nc.should_stop(False)
    mean = nc.mean_metrics(value=total / count, weight=count)
    assert mean.weight == 26 and mean.nodes == ("local", "local-2", "local-3"), (mean, mean.nodes, mean.weight)
    print(mean["value"])
    nc.barrier()
    small = [nc.should_stop(False) for batch in nc.shard(np.arange(4), batch_size=1)]
    print(nc.all_reduce(len(small)))
"""
    assert alike(run(cluster, cell)) == "12.5\n4\n" * 3


def test_means_are_those_by_hand_with_the_same_bits_and_name_who_has_no_number(cluster: Cluster) -> None:
    cell = """
import struct
samples = np.random.default_rng(rank).standard_normal(100 + 50 * rank)
mean = nc.mean_metrics(loss=torch.tensor(samples.mean()), accuracy=np.float32(rank), weight=len(samples))
every = np.concatenate([np.random.default_rng(r).standard_normal(100 + 50 * r) for r in range(3)])
assert abs(mean["loss"] - every.mean()) < 1e-15 and mean["accuracy"] == (150 + 2 * 200) / 450, mean
print(struct.pack("d", mean["loss"]).hex(), mean.weight, mean.nodes)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    nan = nc.mean_metrics(loss=float("nan") if rank == 1 else 1.0, other=rank)
    none = nc.mean_metrics(loss=1.0, weight=0)
    empty = nc.mean_metrics(loss=float("nan") if rank else 5.0, weight=0 if rank else 3)
print(nan, none, none.weight, empty, [str(one.message) for one in caught])
"""
    text = alike(run(cluster, cell))
    assert "450.0 ('local', 'local-2', 'local-3')" in text
    assert "{'loss': nan, 'other': 1.0} {'loss': nan} 0.0 {'loss': 5.0}" in text
    assert "mean_metrics: loss is nan on local-2" in text
    assert "mean_metrics: the weights of local, local-2, local-3 are 0 (all 3 nodes are without data)" in text


def test_bad_arguments_and_calls_that_differ_are_named(cluster: Cluster) -> None:
    cell = """
import mlx.core as mx
def refused(call):
    try:
        call()
    except (TypeError, ValueError) as error:
        print(type(error).__name__, error)
refused(lambda: nc.should_stop(0.3))
refused(lambda: nc.should_stop(torch.tensor([True, False])))
refused(lambda: nc.should_stop("no"))
refused(lambda: nc.should_stop(True, by="most"))
refused(lambda: nc.mean_metrics())
refused(lambda: nc.mean_metrics(loss="0.5"))
refused(lambda: nc.mean_metrics(loss=None))
refused(lambda: nc.mean_metrics(loss=np.ones(3)))
refused(lambda: nc.mean_metrics(loss=1.0, weight=-1))
refused(lambda: nc.mean_metrics(loss=1.0, weight=float("nan")))
print([nc.should_stop(flag) for flag in (True, 0, np.bool_(True), torch.tensor([False]), mx.array(1) > mx.array(0))])
print(nc.mean_metrics(loss=mx.array(0.5), other=torch.ones(1, 1, requires_grad=True), third=True))
"""
    text = alike(run(cluster, cell))
    for line in (
        "TypeError should_stop: flag=0.3: use True or False, such as loss < 0.1",
        "TypeError should_stop: flag has shape (2,): use a single number, such as flag.any()",
        "TypeError should_stop: flag='no': use True or False",
        """ValueError should_stop: by='most': use "any", "majority" or "all\"""",
        "TypeError mean_metrics: nothing to take the mean of",
        "TypeError mean_metrics: loss='0.5' is a str: use a number",
        "TypeError mean_metrics: loss=None is a NoneType: use a number",
        "TypeError mean_metrics: loss has shape (3,): use a single number, such as loss.mean()",
        "ValueError mean_metrics: weight=-1.0: use a finite number of at least 0",
        "ValueError mean_metrics: weight=nan: use a finite number of at least 0",
        "[True, False, True, False, True]",
        "{'loss': 0.5, 'other': 1.0, 'third': 1.0}",
    ):
        assert line in text, line
    cell = "nc.mean_metrics(loss=1.0) if rank == 0 else nc.should_stop(True, by='all')"
    ended, _outputs = cluster.run(cell)
    for name in NODES:
        said = ended.results[name].error_value
        assert "local calls mean_metrics(loss=) (cell" in said, said
        assert "local-2, local-3 call should_stop(by='all') (cell" in said


def test_a_wait_against_a_barrier_is_raised_with_both_lines(cluster: Cluster) -> None:
    ended, _outputs = cluster.run("if rank == 0:\n    nc.should_stop(False)\nnc.barrier()")
    assert {result.error_name for result in ended.results.values()} == {"Deadlock"}
    said = ended.results["local"].error_value
    assert re.search(r"local waits in should_stop #1 \(cell \d+, line 2: nc.should_stop\(False\)\)", said), said
    assert re.search(r"local-2, local-3 wait in barrier #1 \(cell \d+, line 3: nc.barrier\(\)\)", said), said
    assert "make the same calls on every node" in said
    assert "sync.finish()" in said
    assert run(cluster, "print(nc.should_stop(True))")["local"] == "True\n"


def test_a_round_that_needs_a_node_that_asks_goes_on_and_a_stop_reaches_who_was_in_it(cluster: Cluster) -> None:
    """A node that asks at every step, one step behind: its boundary comes when the others wait for it."""
    cell = """
model = make_model(50)
sync = nc.DiLoCo(model, every=4, name="shifted", fresh=True)
steps = 0
if rank == 1:
    sync.step(samples=8)  # a step ahead
while True:
    steps += 1
    sync.step(samples=8)
    if nc.should_stop(rank == 0 and steps >= 7):
        break
sync.finish()
print(sync.round, steps)
"""
    printed = run(cluster, cell)
    assert {name: int(text.split()[1]) for name, text in printed.items() if name != "local-2"} == {
        "local": 7, "local-3": 7,
    }  # fmt: skip
    assert len({text.split()[0] for text in printed.values()}) == 1, printed


MAKE = """
torch.manual_seed(0)
inputs = torch.randn(500, 8)
targets = (inputs.sum(1) > 0).long()
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()
"""


def test_the_recipes_as_they_are_printed(cluster: Cluster) -> None:
    run(cluster, SETUP + MAKE)
    cell = recipe("Stop all nodes together") + "print(sync.round, patience == 0)"
    printed = run(cluster, cell)
    assert len({text.split()[0] for text in printed.values()}) == 1
    assert any("True" in text for text in printed.values()), printed
    printed = alike(run(cluster, recipe("A metric over all nodes")))
    found = re.fullmatch(r"(\d\.\d+) of 500 samples on 3 nodes\n", printed)
    assert found is not None, printed
    by_hand = "print(f'{(model(inputs).argmax(1) == targets).double().mean():.3f}')"
    assert alike(run(cluster, by_hand)).strip() == found[1]
    assert float(found[1]) > 0.9


DATASETS = """
import os
class datasets:
    @staticmethod
    def MNIST(root, download):
        there = os.path.isdir(root)
        if download and not there:
            os.makedirs(root)  # raises where two do it at once
        return there
"""


def test_a_download_of_nodes_in_one_folder_is_made_once(cluster: Cluster) -> None:
    printed = run(cluster, DATASETS + recipe("Download once") + "print(train_set)")
    assert sorted(printed.values()) == ["False\n", "True\n", "True\n"]
    assert printed["local"] == "False\n"


def test_a_node_that_is_killed_in_the_middle_is_left_out(cluster: Cluster) -> None:
    pid = kernel_pid(cluster, "local-3")
    cell = """
pathlib.Path(f"here-{nc.node()}").touch()
first = nc.should_stop(False)
if rank == 2:
    pathlib.Path("waits").touch()
    time.sleep(600)
print(first, nc.should_stop(rank == 1), nc.mean_metrics(loss=rank, weight=2.0).nodes)
"""
    watcher = Watcher(cluster.execute(cell, replay=False))
    wait_until(lambda: Path("waits").exists(), 60, "the third node past the first call")
    wait_until(
        lambda: all("should_stop #2 for local-3" in row.waiting for row in cluster.state().nodes[:2]), 60,
        lambda: f"the others to wait for it: {[row.waiting for row in cluster.state().nodes]}",
    )  # fmt: skip
    kill(pid)
    watcher.wait_end()
    assert watcher.text("local") == watcher.text("local-2") == "False True ('local', 'local-2')\n"


def test_a_node_that_stands_still_is_left_out_and_hears_of_the_stop_later(cluster: Cluster) -> None:
    pid = kernel_pid(cluster, "local-3")
    cell = """
import os, pathlib, time
if rank == 2:
    pathlib.Path("asleep").touch()
    while not os.path.exists("awake"):
        time.sleep(0.05)
for step in range(100):
    if nc.should_stop(rank == 0 and step == 2):
        break
print(step)
if rank != 2:
    pathlib.Path(f"over-{rank}").touch()
"""
    watcher = Watcher(cluster.execute(cell, replay=False))
    wait_until(lambda: Path("asleep").exists(), 60, "the third node")
    with stopped(pid):
        wait_until(lambda: Path("over-0").exists() and Path("over-1").exists(), 60, "the others to go on without it")
        Path("awake").touch()
    watcher.wait_end()
    assert (watcher.text("local"), watcher.text("local-3")) == ("2\n", "0\n")


def test_stop_reaches_a_node_that_waits(cluster: Cluster) -> None:
    cell = """
import pathlib, time
pathlib.Path(f"in-{rank}").touch()
if rank:
    nc.should_stop(False)
else:
    time.sleep(600)
"""
    watcher = Watcher(cluster.execute(cell))
    wait_until(lambda: len(list(Path.cwd().glob("in-*"))) == 3, 60, "all nodes in the cell")
    cluster.interrupt()
    ended = watcher.wait_end(20)
    assert {result.status for result in ended.results.values()} == {"interrupted"}
    assert alike(run(cluster, "print(nc.should_stop(rank == 2), nc.mean_metrics(x=rank))")) == "True {'x': 1.0}\n"


def test_a_coordinator_that_is_killed_while_nodes_wait_and_a_node_that_joins_change_no_result() -> None:
    with shared_cluster(local=2) as first:
        run(first, SETUP)
        run(first, "stopped = [nc.should_stop(step == 3) for step in range(5)]\nmean = nc.mean_metrics(a=2, weight=4)")
        cell = """
answers = []
sync = nc.LocalSGD(make_model(9), every=1, name="joined")
for epoch in range(2):
    for step in range(10_000):
        sync.step(samples=1)
        if nc.should_stop(nc.node() == "local-2" and os.path.exists(f"enough-{epoch}")):
            break
        time.sleep(0.02)
        if step == 10:
            pathlib.Path(f"step-{nc.node()}-{epoch}").touch()
    answers.append(nc.mean_metrics(nodes=1.0, weight=1.0).nodes)
sync.finish()
print(answers)
"""
        watcher = Watcher(first.execute(cell))
        wait_until(lambda: len(list(Path.cwd().glob("step-*-0"))) == 2, 60, "both nodes in the loop")
        assert first.add("local", 1) == ["local-3"]
        wait_until(lambda: Path("step-local-3-0").exists(), 60, "the third node to join")
        running = first.state().cell
        assert running is not None
        kill(first.connection.file.pid)
        with running_cluster() as again:
            watcher = Watcher(again.watch(running.id))
            Path("enough-0").touch()
            wait_until(lambda: len(list(Path.cwd().glob("step-*-1"))) == 3, 60, lambda: watcher.text())
            Path("enough-1").touch()
            ended = watcher.wait_end()
            assert {result.status for result in ended.results.values()} == {"ok"}, watcher.text()
            together = str([NODES, NODES]) + "\n"
            assert {name: watcher.text(name) for name in NODES} == dict.fromkeys(NODES, together)

            replayed = run(again, "print(stopped, mean, mean.nodes, mean.weight)")
            assert replayed["local-2"] == "[False, False, False, True, False] {'a': 2.0} ('local', 'local-2') 8.0\n"
            assert replayed["local-3"] == "[False, False, False, True, False] {'a': 2.0} ('local-3',) 4.0\n"
