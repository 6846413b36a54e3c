"""``notebook-cluster bench`` and ``Cluster.bench``: how fast the nodes of a cluster reach each other."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from notebook_cluster.client import AsyncCluster, BenchedWay, Cluster, ClusterError
from tests.cluster import Watcher, mend, run, running_cluster, shared_cluster
from tests.command import COMMAND, run_command
from tests.conftest import wait_until
from tests.notebook_kernel import NotebookKernel
from tests.strangers import Strangers

WAYS = [
    (a, b) for a, b in (("local", "local-2"), ("local", "local-3"), ("local-2", "local-3")) for a, b in ((a, b), (b, a))
]
WAIT = "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.01)"


@pytest.fixture(name="shared", scope="module")
def of_this_file() -> Iterator[Cluster]:
    with shared_cluster(name="lesson", local=3) as cluster:
        yield cluster


@pytest.fixture(name="cluster")
def mended(shared: Cluster) -> Cluster:
    mend(shared)
    return shared


def test_each_pair_is_measured_in_both_directions_on_the_way_of_training(cluster: Cluster) -> None:
    seen: list[tuple[BenchedWay, int, int]] = []
    ways = cluster.bench(2, on_way=lambda *told: seen.append(told))
    assert [(way.source, way.target) for way in ways] == WAYS
    assert seen == [(way, number, 6) for number, way in enumerate(ways, 1)]
    for way in ways:
        assert (way.way, way.error) == ("ipc", "")
        assert way.megabytes_per_s is not None
        assert way.round_trip_ms is not None
        assert way.megabytes_per_s > 0
        assert way.round_trip_ms > 0
        assert 0 < way.megabytes <= 2


def test_nothing_of_it_is_left_in_cells_namespaces_or_what_a_later_node_runs(cluster: Cluster) -> None:
    names = "print(sorted(name for name in dir() if not name.startswith('_')))"
    before = run(cluster, names, replay=False)
    cells = cluster.history().cells_seen
    cluster.bench(1)
    assert cluster.history().cells_seen == cells
    assert run(cluster, names, replay=False) == before


def test_the_command_prints_a_table_with_way_and_units(cluster: Cluster) -> None:
    done = run_command("bench", "--mb", "1")
    assert (done.returncode, done.stderr) == (0, "")
    heads, rows = done.stdout.splitlines()[1], done.stdout.splitlines()[3:-1]
    assert [cell.strip() for cell in heads.strip("┃").split("┃")] == ["from", "to", "way", "MB/s", "round trip (ms)"]
    assert [tuple(cell.strip() for cell in row.strip("│").split("│"))[:3] for row in rows] == [
        (*way, "ipc") for way in WAYS
    ]


def test_the_command_prints_json_for_scripts(cluster: Cluster) -> None:
    done = run_command("bench", "lesson", "--mb", "1", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert (said["cluster"], said["left_out"], len(said["ways"])) == ("lesson", {}, 6)
    fields = {"source", "target", "way", "megabytes_per_s", "round_trip_ms", "megabytes", "error"}
    assert all(way.keys() == fields and way["megabytes_per_s"] > 0 for way in said["ways"])


def test_while_a_cell_runs_it_is_named_and_nothing_is_measured(cluster: Cluster) -> None:
    watcher = Watcher(cluster.execute(WAIT, ["local"], replay=False))
    watcher.wait_for("begun")
    cell = watcher.stream.cell
    with pytest.raises(
        ClusterError, match=rf"cell {cell} runs on local: nothing is measured beside it.* end it with Stop"
    ):
        cluster.bench(1)
    refused = run_command("bench")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"notebook-cluster: cell {cell} runs on local: ")
    assert [row.name for row in cluster.state().nodes if row.busy] == ["local"]
    cluster.interrupt()
    watcher.wait_end()
    assert len(cluster.bench(1)) == 6


def test_a_cell_that_begins_meanwhile_ends_it(cluster: Cluster) -> None:
    begun: list[Watcher] = []

    def begin(way: BenchedWay, done: int, ways: int) -> None:
        if not begun:
            begun.append(Watcher(cluster.execute(WAIT, replay=False)))
            begun[0].wait_for("begun")

    with pytest.raises(ClusterError, match="runs on local, local-2, local-3: nothing is measured"):
        cluster.bench(1, on_way=begin)
    cluster.interrupt()
    begun[0].wait_end()


def test_a_node_that_is_gone_is_named_and_left_out(cluster: Cluster) -> None:
    pid = int(run(cluster, "import os; print(os.getpid())", ("local-2",), replay=False)["local-2"])
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: any(row.condition == "dead" for row in cluster.state().nodes), what="the node to be dead")
    done = run_command("bench", "--mb", "1")
    assert done.returncode == 0, done.stderr
    assert "local-2 is left out: " in done.stdout.splitlines()[-1]
    assert [(way.source, way.target) for way in cluster.bench(1)] == [("local", "local-3"), ("local-3", "local")]


def test_ctrl_c_prints_what_was_measured_and_the_cluster_goes_on(cluster: Cluster) -> None:
    process = subprocess.Popen(
        [COMMAND, "bench", "--mb", "64", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: _is_view(cluster, process.pid), what="the command to be at work")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err
    assert run(cluster, "print(1)", replay=False) == dict.fromkeys(("local", "local-2", "local-3"), "1\n")


def _is_view(cluster: Cluster, pid: int) -> bool:
    """Whether the process has an open connection to the coordinator."""
    port = int(cluster.connection.file.address.rpartition(":")[2])
    return any(c.raddr and c.raddr.port == port for c in psutil.Process(pid).net_connections("tcp"))


@pytest.mark.parametrize("megabytes", [0, 65, -1])
def test_an_amount_that_is_not_measured_is_refused(cluster: Cluster, megabytes: int) -> None:
    with pytest.raises(ClusterError, match=f"--mb {megabytes}: use 1 to 64"):
        cluster.bench(megabytes)
    assert run_command("bench", "--mb", str(megabytes)).returncode == 2


def test_an_unknown_cluster_is_refused(cluster: Cluster) -> None:
    refused = run_command("bench", "other")
    assert refused.returncode == 2
    assert "no cluster is called 'other': running: lesson" in refused.stderr


def test_it_can_be_awaited(cluster: Cluster) -> None:
    assert len(asyncio.run(AsyncCluster(cluster).bench(1))) == 6


def test_the_magic_shows_a_table_and_names_the_cell_that_is_in_the_way(cluster: Cluster) -> None:
    kernel = NotebookKernel(Path.cwd())
    try:
        kernel.works("%load_ext notebook_cluster")
        kernel.works("%cluster attach lesson")
        heads, *rows = kernel.works("%cluster bench --mb 1").splitlines()
        assert heads.split() == ["from", "to", "way", "MB/s", "round", "trip", "(ms)"]
        assert [tuple(row.split()[:3]) for row in rows] == [(*way, "ipc") for way in WAYS]
        watcher = Watcher(cluster.execute(WAIT, ["local-3"], replay=False))
        watcher.wait_for("begun")
        refused = kernel.run("%cluster bench")
        assert refused.error is not None
        assert f"cell {watcher.stream.cell} runs on local-3: nothing is measured beside it" in refused.error.value
        cluster.interrupt()
        watcher.wait_end()
    finally:
        kernel.close()


@pytest.mark.usefixtures("work")
def test_one_node_alone_has_no_pair() -> None:
    with running_cluster("alone", local=1) as cluster:
        assert cluster.bench() == []
        done = run_command("bench")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("cluster alone: there is no pair of nodes to measure")
        assert json.loads(run_command("bench", "--json").stdout)["ways"] == []


@pytest.mark.usefixtures("work")
def test_nodes_of_two_peers_on_one_machine_reach_each_other_over_tcp(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster(local=1) as cluster:
        cluster.add(mini.name, code=mini.code)
        assert {(way.source, way.target, way.way) for way in cluster.bench(4)} == {
            ("local", mini.name, "tcp+curve"), (mini.name, "local", "tcp+curve"),
        }  # fmt: skip
