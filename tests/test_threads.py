"""Nodes of one machine share its cores: how many threads each takes, who may say otherwise, what is told."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.processors import OURS, NodeCount, count_nodes, thread_variables, threads_for, usable_cores
from notebook_cluster.widgets import render_text
from tests.cluster import Watcher, mend, node, run, running_cluster, shared_cluster
from tests.conftest import Agents, wait_until

CORES = usable_cores()
THEIRS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", OURS)
ASK = """
import os, torch, numpy, threadpoolctl
numbers = {library["num_threads"] for library in threadpoolctl.threadpool_info()}
print(torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["OPENBLAS_NUM_THREADS"], *sorted(numbers))
"""


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THEIRS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cluster(work: Path) -> Iterator[Cluster]:
    with running_cluster(local=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name in THEIRS:
            patch.delenv(name, raising=False)
        with shared_cluster(local=2) as cluster:
            yield cluster


@pytest.fixture
def two(shared: Cluster) -> Iterator[Cluster]:
    """Nodes ``local`` and ``local-2``, whatever the test does with them, in which nobody sets a number of threads."""
    yield shared
    mend(shared)
    for row in shared.state().nodes:
        if row.name not in ("local", "local-2"):
            shared.remove(row.name)
    while len(shared.state().nodes) < 2:
        shared.add("local", 1)


def shares(nodes: int) -> str:
    return " ".join([str(threads_for(nodes))] * 4) + "\n"


def shown(cluster: Cluster, name: str) -> tuple[int, bool]:
    row = node(cluster.state(), name)
    return row.threads, row.threads_chosen


def test_every_library_takes_the_nodes_share_of_the_cores_and_status_says_so(two: Cluster) -> None:
    assert set(run(two, ASK).values()) == {shares(2)}
    wait_until(lambda: shown(two, "local-2") == (threads_for(2), False))
    words = "1 thread" if threads_for(2) == 1 else f"{threads_for(2)} threads"
    line = next(line for line in render_text(two.state()).splitlines() if line.startswith("  local-2:"))
    assert words in line


def test_the_share_changes_with_the_next_cell_when_nodes_come_or_go(two: Cluster) -> None:
    assert set(run(two, ASK).values()) == {shares(2)}
    two.add("local", count=2)
    assert set(run(two, ASK, replay=False).values()) == {shares(4)}
    for name in ("local-2", "local-3", "local-4"):
        two.remove(name)
    assert run(two, ASK) == {"local": shares(1)}


def test_the_share_stays_as_it_is_while_a_cell_runs(two: Cluster, tmp_path: Path) -> None:
    run(two, ASK)
    go = tmp_path / "go"
    code = (
        f"print('in')\nimport time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        "print(torch.get_num_threads())"
    )
    watcher = Watcher(two.execute(code, targets=("local",)))
    watcher.wait_for("in")
    two.remove("local-2")
    go.touch()
    watcher.wait_end()
    assert watcher.text("local") == f"in\n{threads_for(2)}\n"


@pytest.mark.proof
def test_nodes_of_all_clusters_and_agents_count_and_those_of_a_killed_agent_do_not(
    agents: Agents, cluster: Cluster
) -> None:
    agents("mini")
    with running_cluster("other", local=1) as other:
        other.add("mini")
        assert set(run(cluster, ASK).values()) == {shares(4)}
        assert set(run(other, ASK).values()) == {shares(4)}
        agents.processes.pop("mini").send_signal(signal.SIGKILL)
        wait_until(lambda: node(other.state(), "mini").condition != "ok")
        assert set(run(cluster, ASK).values()) == {shares(3)}
    assert set(run(cluster, ASK).values()) == {shares(2)}


def test_a_number_that_the_user_has_set_in_a_cell_stays(cluster: Cluster) -> None:
    run(cluster, "import torch\ntorch.set_num_threads(3)", ("local",))
    run(cluster, f"import torch\ntorch.set_num_threads({threads_for(2)})", ("local-2",))
    cluster.add("local")
    wait_until(lambda: len(cluster.state().nodes) == 3)
    said = run(cluster, "print(torch.get_num_threads())", ("local", "local-2"))
    assert said == {"local": "3\n", "local-2": f"{threads_for(2)}\n"}
    wait_until(lambda: shown(cluster, "local") == (3, True))
    cluster.remove("local-3")
    cluster.remove("local")
    assert run(cluster, "print(torch.get_num_threads())", ("local-2",)) == {"local-2": f"{threads_for(2)}\n"}


def test_a_library_that_only_looks_whether_torch_is_there_does_not_hide_its_import(cluster: Cluster) -> None:
    run(cluster, "import importlib.util\nassert importlib.util.find_spec('torch') is not None")
    run(cluster, f"import torch\ntorch.set_num_threads({threads_for(2)})", ("local",))
    code = "import sys; print('_TorchFinder' in [type(finder).__name__ for finder in sys.meta_path])"
    assert run(cluster, code) == {"local": "False\n", "local-2": "True\n"}
    wait_until(lambda: shown(cluster, "local") == (threads_for(2), True))


def test_a_variable_that_the_user_has_set_in_a_cell_stays(cluster: Cluster) -> None:
    run(cluster, "import os\nos.environ['OMP_NUM_THREADS'] = '3'", ("local",))
    cluster.add("local")
    wait_until(lambda: len(cluster.state().nodes) == 3)
    said = run(cluster, "import torch; print(os.environ['OMP_NUM_THREADS'], torch.get_num_threads())", ("local",))
    assert said["local"].startswith("3 ")


def test_variables_of_the_users_own_environment_stay(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with running_cluster(local=1) as cluster:
        code = "import os, torch; print(torch.get_num_threads(), os.environ.get('MKL_NUM_THREADS'))"
        assert run(cluster, code) == {"local": "1 None\n"}
        wait_until(lambda: shown(cluster, "local") == (1, True))


def test_a_variable_for_one_library_leaves_the_others_to_the_share(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    with running_cluster(local=2) as cluster:
        code = "import os, torch; print(torch.get_num_threads(), os.environ['OPENBLAS_NUM_THREADS'])"
        assert set(run(cluster, code).values()) == {f"{threads_for(2)} 3\n"}


def test_what_an_agent_has_set_is_not_taken_for_the_users_by_one_that_a_node_starts() -> None:
    first = thread_variables({"PATH": "/bin"}, 4)
    assert first["OMP_NUM_THREADS"] == first["MKL_NUM_THREADS"] == first["OPENBLAS_NUM_THREADS"] == "4"
    assert thread_variables(first, 2)["OMP_NUM_THREADS"] == "2"
    assert thread_variables(first | {"OMP_NUM_THREADS": "7"}, 2) == {}
    assert "OPENBLAS_NUM_THREADS" not in thread_variables(first | {"OPENBLAS_NUM_THREADS": "7"}, 2)


def test_agents_that_were_killed_do_not_count_and_their_files_go(tmp_path: Path) -> None:
    count = NodeCount(tmp_path / "nodes", "machine")
    code = (
        "import sys, time; from pathlib import Path; from notebook_cluster.processors import NodeCount\n"
        f"count = NodeCount(Path({str(tmp_path / 'nodes')!r}), 'machine')\n"
        "count.add(1); count.add(2); print('told', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    assert count_nodes(count.place) == 2
    assert count_nodes(str(tmp_path / "nodes" / "another-machine")) == 0
    other.kill()
    other.wait()
    assert count_nodes(count.place) == 0
    count.add("mine")
    assert count_nodes(count.place) == 1
    assert len(list((tmp_path / "nodes").iterdir())) == 1
    count.drop("mine")
    assert count_nodes(count.place) == 0
    count.close()
    assert list((tmp_path / "nodes").iterdir()) == []
    (tmp_path / "nodes" / "machine-1-x.nodes").write_text("many")
    assert count_nodes(count.place) == 0


def machine(root: Path, group: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": group, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_quota_of_a_container_counts_where_it_is_less_than_the_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    second = {"sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}
    assert usable_cores(machine(tmp_path / "2", "0::/a/b\n", second)) == 2
    first = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}
    assert usable_cores(machine(tmp_path / "1", "4:cpu,cpuacct:/docker/x\n1:cpuset:/\n", first)) == 1
    free = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}
    assert usable_cores(machine(tmp_path / "free", "4:cpu:/\n", free)) == 8
    assert usable_cores(tmp_path / "nothing is known") == 8
    topology = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)
    }
    assert usable_cores(machine(tmp_path / "hyper-threads", "", topology)) == 4
    assert [threads_for(nodes, 8) for nodes in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]


def test_which_hardware_threads_are_one_core_is_not_read_again_at_every_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(256)), raising=False)
    files = [f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in range(256)]
    root = machine(tmp_path, "0::/\n", {name: f"{cpu % 128},{cpu % 128 + 128}" for cpu, name in enumerate(files)})
    read: list[Path] = []
    text = Path.read_text

    def counted(path: Path) -> str:
        read.append(path)
        return text(path)

    monkeypatch.setattr(Path, "read_text", counted)
    assert usable_cores(root) == 128
    assert len(read) > 256
    read.clear()
    assert usable_cores(root) == 128
    assert len(read) < 10
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 128}, raising=False)
    assert usable_cores(root) == 2
