"""Nodes that wait for each other in different calls: raised in the cell, with the lines. Whoever is only slow is left
in peace."""

import re
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.protocol.views import CellEnded, Output
from tests.cluster import Watcher, kernel_pid, kill, run, running_cluster, text_of
from tests.conftest import wait_until
from tests.training_cells import SETUP

UNEQUAL = """model = make_model(50)
sync = nc.DiLoCo(model, every=1)
for step in range(4 - rank):
    work(model, step)
    if sync.step(samples=8):
        metric = nc.all_reduce(float(step))
"""

CROSSED = """first, second = make_model(50), make_model(60, seed=1)
syncs = [nc.DiLoCo(first, every=1, name="generator"), nc.DiLoCo(second, every=1, name="critic")]
def turn(sync):
    sync.step(samples=8)
for step in range(3):
    for sync in syncs if rank != 1 or step < 1 else syncs[::-1]:
        turn(sync)
"""

BARRIER = """other = make_model(30)
late = nc.LocalSGD(other, every=1, name="late")
work(other, 0)
if rank == 0:
    nc.barrier()
late.step(samples=8)
if rank != 0:
    nc.barrier()
"""

LEGAL = """import time
import numpy as np
model = make_model(50, seed=2)
sync = nc.DiLoCo(model, every=1, name="legal")
if rank == 1:
    time.sleep(6)  # late for a round
work(model, 0)
sync.step(samples=8)
if rank == 0:
    time.sleep(6)  # late for a collective
nc.all_reduce(1.0)
if rank == 1:
    time.sleep(6)
    nc.send("x", 0)
elif rank == 0:
    print(nc.recv(1))
nc.barrier()
if rank == 0:  # one goes on alone, the others are in finish()
    for step in range(1, 5):
        time.sleep(1)
        work(model, step)
        sync.step(samples=8)
sync.finish()
nc.all_reduce(np.ones(10), out=np.ones(10))
print("done")
"""

QUORUM = """sync = nc.DiLoCo(model, every=2, name="quorum", quorum=2, grace=4.0)
seconds = nc.LocalSGD(make_model(20), every=nc.Seconds(3), name="seconds")
for step in range(6):
    if rank == 1 and step == 3:
        time.sleep(8)
    time.sleep(0.5)
    work(model, step)
    sync.step(samples=8)
sync.finish()
for step in range(6 + 6 * rank):
    time.sleep(0.5)
    seconds.step(samples=8)
seconds.finish()
nc.barrier()
print("done")
"""

AFTER = """model = make_model(50)
after = nc.DiLoCo(model, every=1, name=NAME, fresh=True)
for step in range(3):
    work(model, step)
    round = after.step(samples=8)
    assert round.counted and len(round.members) == world_size, round
    assert nc.all_reduce(1) == world_size
print("done")
"""


def stuck(cluster: Cluster, source: str) -> tuple[CellEnded, list[Output]]:
    """Run a cell that cannot end by itself; a Stop after a minute."""
    watcher = Watcher(cluster.execute(source))
    try:
        ended = watcher.wait_end(45)
    except BaseException:
        cluster.interrupt()
        watcher.wait_end()
        raise
    return ended, watcher.outputs


def said(outputs: list[Output], node: str) -> str:
    """The last line of a node's traceback, without colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text_of(outputs, node))
    return next((line for line in text.splitlines()[::-1] if "neither" in line or "none of them" in line), text[-1500:])


def test_calls_that_wait_for_each_other_are_raised_with_their_lines(
    jupyter_dirs: Path, no_processes_left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jupyter_dirs)
    with running_cluster(local=2) as cluster:
        run(cluster, SETUP)
        ended, outputs = stuck(cluster, UNEQUAL)
        assert ended.status == "error"
        text = said(outputs, "local")
        assert "local waits in all_reduce #4 (cell 2, line 6: metric = nc.all_reduce(float(step)))" in text
        assert "local-2 waits for round 5 of 'model' (at the end of cell 2)" in text
        assert "neither can go on: make the same calls on every node, as often and in the same order" in text
        assert run(cluster, AFTER.replace("NAME", "'model'"))["local-2"] == "done\n"

        ended, outputs = stuck(cluster, CROSSED)
        assert {name: result.error_name for name, result in ended.results.items()} == {
            "local": "Deadlock", "local-2": "Deadlock",
        }  # fmt: skip
        for name in ("local", "local-2"):
            text = said(outputs, name)
            assert "local waits for round 2 of 'generator' (cell 4, line 4: sync.step(samples=8))" in text
            assert "local-2 waits for round 2 of 'critic' (cell 4, line 4: sync.step(samples=8))" in text
        for name in ("'generator'", "'critic'", "'model'"):
            assert run(cluster, AFTER.replace("NAME", name))["local"] == "done\n"

        watcher = Watcher(cluster.execute("time.sleep(2)\n" + BARRIER.replace("late", "later")))
        wait_until(lambda: cluster.state().cell is not None, 60, "the cell to run")
        kill(cluster.connection.file.pid)
        with running_cluster(local=2) as again:  # the coordinator that comes next hears of the waits as well
            watcher = Watcher(again.watch(8))
            assert watcher.wait_end().results["local"].error_name == "Deadlock"
            assert "waits in barrier #1" in said(watcher.outputs, "local-2")
            assert run(again, "print(nc.all_reduce(1))")["local-2"] == "2\n"


def test_a_barrier_before_a_round_on_one_node_only_is_raised(
    jupyter_dirs: Path, no_processes_left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jupyter_dirs)
    with running_cluster(local=2) as cluster:
        run(cluster, SETUP)
        _, outputs = stuck(cluster, BARRIER)
        assert "local waits in barrier #1 (cell 2, line 5: nc.barrier())" in said(outputs, "local-2")
        assert "local-2 waits for round 1 of 'late' (cell 2, line 6: late.step(samples=8))" in said(outputs, "local-2")
        assert run(cluster, "print(nc.all_reduce(1))")["local-2"] == "2\n"


@pytest.mark.proof
def test_who_is_only_slow_is_left_in_peace(
    jupyter_dirs: Path, no_processes_left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late for rounds and collectives, values sent, a quorum, a coordinator that is killed, a node that is killed."""
    monkeypatch.chdir(jupyter_dirs)
    with running_cluster(local=3) as cluster:
        run(cluster, SETUP)
        assert run(cluster, LEGAL)["local"] == "x\ndone\n"
        assert run(cluster, QUORUM)["local"] == "done\n"
        subset = "sub = nc.LocalSGD(make_model(9), every=1, name='sub')\nif rank: time.sleep(5)\nsub.step(samples=1)\n"
        run(cluster, subset + "nc.barrier()", ("local", "local-3"))

        pid = kernel_pid(cluster, "local-3")
        cell = (
            "sync = nc.DiLoCo(model, every=1, name='killed')\n"
            "open(f'here-{nc.node()}', 'w').close()\n"
            "if rank == 2: time.sleep(600)\n"
            "work(model, 0)\nsync.step(samples=8)\nprint('done')\n"
        )
        watcher = Watcher(cluster.execute(cell))
        wait_until(lambda: len(list(jupyter_dirs.rglob("here-*"))) == 3, 60, "all nodes in the cell")
        wait_until(lambda: "round 1" in str([node.waiting for node in cluster.state().nodes]), 60, "a wait for a round")
        kill(pid)
        watcher.wait_end()
        assert watcher.text("local") == "done\n"
        assert not [event for event in cluster.state().events if "can go on" in event.text]
