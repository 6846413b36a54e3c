"""What survives what, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from notebook_cluster.client import Cluster, ClusterError, list_clusters
from notebook_cluster.client.start import read_connection
from notebook_cluster.coordinator.cells.cell_files import CellFiles, text_of
from notebook_cluster.protocol.views import Stop
from tests.cluster import Watcher, is_running, kernel_pid, kill, node, run, running_cluster
from tests.conftest import Agents, marked_processes, wait_until
from tests.test_cluster_take_over import agent_pid

pytestmark = pytest.mark.usefixtures("work")

MINI = f"mini-{os.getpid()}"
"""Others on this network may share a machine called mini as well."""

LOOP = """
import time, os
count = 0
while not os.path.exists(f"go-{nc.node()}"):
    count += 1
    if count % 10 == 0:
        print("count", count, flush=True)
    time.sleep(0.01)
print("done")
"""


def test_start_again_attaches() -> None:
    with running_cluster(local=1) as cluster:
        run(cluster, "x = 1")
        again = Cluster.start("test", local=1)
        assert again.attached
        assert not cluster.attached
        assert len(again.state().nodes) == 1
        assert run(again, "print(x)") == {"local": "1\n"}
        again.close()


def test_a_cluster_may_have_the_longest_name() -> None:
    with running_cluster("n" * 63, local=1) as cluster:
        assert [node.name for node in cluster.state().nodes] == ["local"]
        assert cluster.invite().code


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_start_while_the_cluster_is_ending_gives_a_running_one(how: str) -> None:
    ending = Cluster.start("test", local=2)
    if how == "stop":
        ending.connection.request(Stop())
    else:
        kill(ending.connection.file.pid)
    with running_cluster(local=2) as cluster:
        assert cluster.connection.file.pid != ending.connection.file.pid
        assert run(cluster, "print(rank)") == {"local": "0\n", "local-2": "1\n"}
        assert cluster.add("local", 1) == ["local-3"]
    ending.close()


def test_a_cell_runs_once_although_the_coordinator_was_killed_when_it_began(work: Path) -> None:
    killed = Cluster.start("test", local=2)
    cell = killed.execute("with open(f'ran-{nc.node()}', 'a') as file: file.write('x')\nnc.barrier()").cell
    kill(killed.connection.file.pid)
    with running_cluster(local=2) as cluster:
        assert Watcher(cluster.watch(cell)).wait_end().status == "ok"
        assert run(cluster, "print(rank)") == {"local": "0\n", "local-2": "1\n"}
    assert [(work / f"ran-{name}").read_text() for name in ("local", "local-2")] == ["x", "x"]
    killed.close()


def test_start_returns_when_it_is_known_which_nodes_died_with_their_coordinator() -> None:
    killed = Cluster.start("test", local=2)
    kernels = [kernel_pid(killed, "local"), kernel_pid(killed, "local-2")]
    for pid in (killed.connection.file.pid, agent_pid(killed), *kernels):
        kill(pid)
    killed.close()
    with running_cluster(local=2) as cluster:
        assert [row.condition for row in cluster.state().nodes] == ["dead", "dead"]


def test_fresh_gives_clean_kernels() -> None:
    with running_cluster(local=1) as cluster:
        run(cluster, "x = 1")
        with running_cluster(local=1, fresh=True) as again:
            ended, _ = again.run("x")
            assert ended.results["local"].error_name == "NameError"


def test_nodes_fills_up_with_local_ones() -> None:
    with running_cluster(nodes=3) as cluster:
        assert [row.name for row in cluster.state().nodes] == ["local", "local-2", "local-3"]


def test_stop_ends_every_process(work: Path) -> None:
    with running_cluster(local=2) as cluster:
        pids = [kernel_pid(cluster, "local"), kernel_pid(cluster, "local-2"), cluster.connection.file.pid]
        cluster.stop()
        assert not any(is_running(pid) for pid in pids)
        assert list_clusters() == []
        with pytest.raises(ClusterError, match="no cluster 'test' runs"):
            Cluster.attach("test")


def test_the_lease_ends_a_cluster_that_nobody_looks_at() -> None:
    cluster = Cluster.start("test", local=1, lease=0.5)
    pid = cluster.connection.file.pid
    cluster.close()
    wait_until(lambda: not is_running(pid), 60, "the coordinator to end")


def test_a_process_that_ends_between_two_looks_at_it_is_not_running(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["true"])
    process.wait(30)
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: True)  # as the first look found
    assert not is_running(process.pid)


def test_kernels_and_private_agent_end_when_no_coordinator_comes_back_within_their_lease(
    no_processes_left: str,
) -> None:
    cluster = Cluster.start("test", local=2, agent_lease=1)
    kernels = [kernel_pid(cluster, name) for name in ("local", "local-2")]
    cluster.execute("import time\nwhile True: time.sleep(0.01)")
    kill(cluster.connection.file.pid)
    wait_until(lambda: not any(is_running(pid) for pid in kernels), 60, "the kernels to end")
    wait_until(lambda: not marked_processes(no_processes_left), 60, "the private agent to end")
    cluster.close()


def test_a_running_cell_keeps_a_cluster_without_views(work: Path) -> None:
    cluster = Cluster.start("test", local=1, lease=0.3)
    watcher = Watcher(cluster.execute(LOOP))
    watcher.wait_for("count 10")
    cluster.close()
    output = Path(cluster.connection.file.run_log).parent / "cells" / "000001.jsonl"

    def printed() -> str:
        return "".join(text_of(line.output) for line in CellFiles(output).read())

    # 150 turns of 0.01 s and more: several leases.
    wait_until(lambda: "count 150" in printed(), 60, "the cell to go on for several leases")
    again = Cluster.attach("test")
    late = Watcher(again.watch(watcher.stream.cell))
    late.wait_for("count 10")
    (work / "go-local").touch()
    assert late.wait_end().status == "ok"
    again.stop()


def test_a_killed_kernel_is_named_with_its_reason_and_restart_brings_it_back() -> None:
    with running_cluster(local=2) as cluster:
        run(cluster, "x = 5")
        pid = kernel_pid(cluster, "local-2")
        watcher = Watcher(cluster.execute("import time; print('on', flush=True); time.sleep(60 * rank)", replay=False))
        watcher.wait_for("on", "local-2")
        kill(pid)
        ended = watcher.wait_end()
        assert ended.status == "error"
        assert ended.results["local"].status == "ok"
        assert "SIGKILL" in ended.results["local-2"].reason
        row = node(cluster.state(), "local-2")
        assert (row.condition, row.rank) == ("dead", None)
        cluster.restart("local-2")
        assert run(cluster, "print(x)")["local-2"] == "5\n"


def test_a_node_that_is_restarted_while_it_restarts_is_up_for_both_who_asked() -> None:
    with running_cluster(local=1) as cluster:
        run(cluster, "x = 1")
        with ThreadPoolExecutor(3) as threads:
            asked = [threads.submit(cluster.restart, "local") for _ in range(3)]
            assert [one.result() for one in asked] == [None] * 3
        assert node(cluster.state(), "local").condition == "ok"
        assert run(cluster, "print(x)") == {"local": "1\n"}


def test_a_killed_coordinator_is_revived_and_the_cell_goes_on(work: Path) -> None:
    cluster = Cluster.start("test", local=2)
    run(cluster, "x = 11")
    watcher = Watcher(cluster.execute(LOOP))
    watcher.wait_for("count 20", "local-2")
    kill(cluster.connection.file.pid)
    wait_until(lambda: cluster.connection.closed, 60, "the view to notice")
    assert "%cluster start test brings it back" in str(cluster.connection.closed)
    with running_cluster(local=2) as revived:
        wait_until(lambda: all(row.condition == "ok" for row in revived.state().nodes), 60, "the nodes")
        late = Watcher(revived.watch(watcher.stream.cell))
        late.wait_for("count 10\ncount 20", "local-2")
        before = late.text("local").count("\n")
        wait_until(lambda: late.text("local").count("\n") > before, 60, "more output")
        for name in ("local", "local-2"):
            (work / f"go-{name}").touch()
        assert late.wait_end().status == "ok"
        lines = late.text("local").splitlines()
        assert lines == [f"count {10 * (i + 1)}" for i in range(len(lines) - 1)] + ["done"]
        assert run(revived, "print(x)") == {"local": "11\n", "local-2": "11\n"}


def test_a_replay_cut_off_by_the_coordinators_death_is_done_again(work: Path) -> None:
    cluster = Cluster.start("test", local=2)
    run(cluster, "import os, time")
    run(cluster, "while os.path.exists('hold'): time.sleep(0.01)")
    run(cluster, "x = 8")
    (work / "hold").touch()

    def restart_until_the_end() -> None:
        with pytest.raises(ClusterError):
            cluster.restart("local-2")

    restart = threading.Thread(target=restart_until_the_end)
    restart.start()
    watcher = Cluster.attach("test")
    wait_until(lambda: node(watcher.state(), "local-2").condition == "replaying", 60, "the replay to begin")
    watcher.close()
    kill(cluster.connection.file.pid)
    restart.join(20)
    (work / "hold").unlink()
    with running_cluster(local=2) as revived:
        wait_until(lambda: node(revived.state(), "local-2").condition == "ok", 60, "local-2 to be back")
        assert node(revived.state(), "local-2").incarnation == 3
        assert run(revived, "print(x)") == {"local": "8\n", "local-2": "8\n"}
    cluster.close()


def test_a_killed_agent_takes_its_kernels_and_a_restarted_one_is_used_again(agents: Agents) -> None:
    agents(MINI)
    with running_cluster(local=1, peers=[MINI]) as cluster:
        pid = kernel_pid(cluster, MINI)
        agents.end(MINI, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), 60, "mini's kernel to end")
        wait_until(lambda: node(cluster.state(), MINI).condition in ("lost", "dead"), 60, "mini to be lost")
        assert run(cluster, "print(world_size)") == {"local": "1\n"}
        agents(MINI)
        wait_until(lambda: node(cluster.state(), MINI).condition == "dead", 60, "mini's kernel to be known as gone")
        cluster.restart(MINI)
        assert run(cluster, "print(world_size)") == {"local": "2\n", MINI: "2\n"}


def own_agent(mark: str) -> int:
    """The process id of this machine's own agent."""
    (pid,) = [pid for pid, line in marked_processes(mark).items() if "notebook_cluster.agent --private" in line]
    return pid


def test_this_machines_own_agent_is_started_again_when_it_was_killed(no_processes_left: str) -> None:
    killed = Cluster.start("test", local=2)
    run(killed, "x = 3")

    def kill_agent(cluster: Cluster, restarted: str) -> None:
        kill(own_agent(no_processes_left))
        wait_until(lambda: {row.condition for row in cluster.state().nodes} == {"dead"}, 60, "the end of its kernels")
        assert "the agent of this machine has ended" in node(cluster.state(), restarted).reason
        cluster.restart(restarted)
        assert run(cluster, "print(x)") == {restarted: "3\n"}

    kill_agent(killed, "local")
    kill(killed.connection.file.pid)
    killed.connection.wait_closed()
    with running_cluster() as cluster:
        wait_until(lambda: node(cluster.state(), "local").condition == "ok", 60, "local to be there")
        kill_agent(cluster, "local-2")
    killed.close()


def test_an_agent_that_is_stopped_says_goodbye(agents: Agents) -> None:
    agents(MINI)
    with running_cluster(local=1, peers=[MINI]) as cluster:
        assert agents.end(MINI) == 0
        wait_until(lambda: node(cluster.state(), MINI).condition == "dead", 60, "mini to be gone, not only silent")
        assert f"agent of {MINI} ended" in node(cluster.state(), MINI).reason
        for ask in (cluster.add, cluster.restart):
            with pytest.raises(
                ClusterError, match="it is not shared any more, stopped by SIGTERM: run notebook-cluster"
            ):
                ask(MINI)
        agents(MINI)
        wait_until(lambda: condition_of(cluster, MINI) == "connected", 60, "mini to be back")
        cluster.restart(MINI)
        assert run(cluster, "print(nc.node())")[MINI] == f"{MINI}\n"


def condition_of(cluster: Cluster, peer: str) -> str:
    return next(row.condition for row in cluster.state().peers if row.name == peer)


def test_a_node_is_not_waited_for_whose_machine_is_lost(agents: Agents) -> None:
    agents(MINI)
    with running_cluster(local=1, peers=[MINI]) as cluster:
        agents.end(MINI, signal.SIGKILL)
        with pytest.raises(ClusterError, match=f"^{MINI}-2 did not start: peer {MINI} is lost: nothing answers at "):
            cluster.add(MINI, 1)
        assert condition_of(cluster, MINI) == "lost"


def test_a_killed_notebook_leaves_the_cell_running_and_start_attaches(work: Path) -> None:
    script = f"""
from notebook_cluster.client import Cluster
cluster = Cluster.start("test", local=2, kind="magics")
cluster.run('''{LOOP}''')
"""
    notebook = subprocess.Popen([sys.executable, "-c", script])
    wait_until(lambda: read_connection("test") is not None, 60, "the cluster")
    cluster = Cluster.attach("test")
    wait_until(lambda: (cell := cluster.state().cell) is not None and cell.status == "running", 60, "the cell")
    watcher = Watcher(cluster.watch(1))
    watcher.wait_for("count 10", "local-2")
    os.kill(notebook.pid, signal.SIGKILL)
    notebook.wait()
    with running_cluster(local=2) as again:
        assert again.attached
        late = Watcher(again.watch(1))
        late.wait_for("count 10", "local")
        for name in ("local", "local-2"):
            (work / f"go-{name}").touch()
        assert late.wait_end().status == "ok"
    cluster.close()


def test_bad_start_options_are_one_line() -> None:
    for options, message in (
        ({"local": -1}, "--local -1"),
        ({"local": 1000}, "--local 1000"),
        ({"nodes": -2}, "--nodes -2"),
    ):
        with pytest.raises(ClusterError, match=message):
            Cluster.start("test", **options)
    with pytest.raises(ClusterError, match="is not usable"):
        Cluster.start("../x")
    assert list_clusters() == []


def test_an_unknown_peer_is_named_and_the_cluster_does_not_stay() -> None:
    with pytest.raises(ClusterError, match="nowhere"):
        Cluster.start("test", local=1, peers=["nowhere"])
    wait_until(lambda: list_clusters() == [], 60, "the cluster to end")
