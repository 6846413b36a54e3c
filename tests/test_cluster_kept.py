"""What a machine has kept of a training whose cluster was gone for longer than the lease is told, and found again."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import is_running, kill, run, running_cluster, text_of
from tests.conftest import Agents, wait_until
from tests.training_cells import SETUP

pytestmark = pytest.mark.usefixtures("work")

CELL = """
model = make_model(500, seed=7)
sync = nc.DiLoCo(model, every=2{more})
print("begins", sync.round, flush=True)
for step in range(4):
    work(model, step)
    sync.step()
sync.finish()
print("ends", sync.round)
"""


def told(cluster: Cluster, *words: str) -> list[str]:
    """Lines in the list of events that have all ``words``."""
    return [event.text for event in cluster.state().events if all(word in event.text for word in words)]


def reason_of(cluster: Cluster, peer: str) -> str:
    """Why the node on this peer is gone."""
    return next((row.reason for row in cluster.state().nodes if row.peer == peer), "")


def test_another_cluster_and_the_same_one_find_what_was_kept(jupyter_dirs: Path, agents: Agents) -> None:
    agents("mini", options=("--lease", "4"))
    first = Cluster.start("first", local=1, peers=["mini"], nodes=2, agent_lease=4)
    try:
        (there,) = [row.name for row in first.state().nodes if row.peer == "mini"]
        run(first, SETUP)
        assert "ends 2" in run(first, CELL.format(more=""))[there]
        kill(first.connection.file.pid)
    finally:
        first.close()
    kept = jupyter_dirs / "agents" / "mini" / "work" / "first" / "checkpoints" / "model-kept" / "round-000002"
    wait_until(lambda: "is over here: no coordinator came back" in agents.output("mini"), 60, "the end of the lease")
    assert (kept / "manifest.json").exists(), agents.output("mini")

    with running_cluster("second", local=1, peers=["mini"], nodes=2) as second:
        wait_until(
            lambda: told(second, "mini", "'model-kept'", "round 2", str(kept)), 60, "the kept checkpoint to be told"
        )
        run(second, SETUP)
        ended, outputs = second.run(CELL.format(more=", resume='model-kept'"))
        assert ended.status == "ok", text_of(outputs)
        (there,) = [row.name for row in second.state().nodes if row.peer == "mini"]
        assert {text_of(outputs, name).partition("begins ")[2].split()[0] for name in ended.results} == {"2"}
        assert f"resumes from {kept}" in text_of(outputs, there)
        # in the same kernels it is taken again, not missed
        assert "begins 2" in run(second, CELL.format(more=", resume='model-kept'"))[there]
        ended, _ = second.run(CELL.format(more=", resume='model-keep', fresh=True"))
        assert "checkpoint 'model-keep' was not found on " in ended.results[there].error_value
        assert " has 'model-kept'" in ended.results[there].error_value

    with running_cluster("first", local=1) as again:
        reason = wait_until(lambda: reason_of(again, "mini"), 60, "the reason")
        assert "no coordinator came back within its lease; checkpoint kept in" in str(reason)
        assert str(kept) in str(reason)


def ended_by_its_lease(cluster: Cluster) -> None:
    cluster.close()


def ended_by_a_signal(cluster: Cluster) -> None:
    os.kill(cluster.connection.file.pid, signal.SIGTERM)


@pytest.mark.parametrize("end", [ended_by_its_lease, ended_by_a_signal])
def test_an_end_that_nobody_asked_for_keeps_what_was_trained(
    end: Callable[[Cluster], None], work: Path, jupyter_dirs: Path, agents: Agents
) -> None:
    agents("mini")
    first = Cluster.start("first", local=1, peers=["mini"], nodes=2, lease=1.0)
    pid = first.connection.file.pid
    run(first, SETUP)
    run(first, CELL.format(more=", name='earlier'"))
    run(first, CELL.format(more=""))
    end(first)
    wait_until(lambda: not is_running(pid), 60, "the end of the cluster")
    first.close()
    there = jupyter_dirs / "agents" / "mini" / "work" / "first"
    for folder in (work, there):
        assert (folder / "checkpoints" / "model-kept" / "round-000002" / "manifest.json").exists(), folder
        assert [kept.name for kept in (folder / "checkpoints").iterdir()] == ["model-kept"], "what was trained last"

    with running_cluster("second", local=1) as second:  # in the folder where the first one's local nodes worked
        wait_until(lambda: told(second, "local has kept 'model-kept'", "round 2", str(work)), 60, "what is kept here")
        run(second, SETUP)
        assert "begins 2" in run(second, CELL.format(more=", resume='model-kept'"))["local"]


def test_a_stop_that_was_asked_for_keeps_nothing(work: Path) -> None:
    with running_cluster("first", local=1) as cluster:
        run(cluster, SETUP)
        run(cluster, CELL.format(more=""))
        cluster.stop()
    assert not (work / "checkpoints").exists()
