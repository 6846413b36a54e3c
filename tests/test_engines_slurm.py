"""A cluster on hosts that Slurm starts: a real controller and three real nodes, all on this machine."""

import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.protocol.launches import LaunchKey, LaunchView
from notebook_cluster.protocol.state import ClusterView
from notebook_cluster.security import data_directory
from notebook_cluster.widgets import render_text
from tests.cluster import running_cluster, told
from tests.command import run_command
from tests.conftest import shared_folders, wait_until
from tests.engines.running import Slurm, ask, no_slurm, slurm, where_it_stands

pytestmark = pytest.mark.skipif(bool(no_slurm()), reason=no_slurm() or "there is one")
HERE = {"on": "slurm", "address": "127.0.0.1", "time": "5"}


@pytest.fixture(name="engine", scope="module")
def running_engine() -> Iterator[Slurm]:
    with shared_folders() as root, pytest.MonkeyPatch.context() as patch, slurm() as engine:
        work = root / "work"
        work.mkdir()
        patch.chdir(work)
        patch.setattr("notebook_cluster.client.launching.PENDING_S", 1.0)
        yield engine


@pytest.fixture(name="cluster", scope="module")
def shared_cluster(engine: Slurm) -> Iterator[Cluster]:
    """On two of the three nodes."""
    with running_cluster("lesson", hosts=2, **HERE) as cluster:
        wait_for(cluster, "n1", "n2")
        yield cluster
    wait_until(lambda: not engine.jobs(), what=lambda: f"no job: {engine.jobs()}")


def launch(cluster: Cluster, text: str = "", place: int = -1) -> LaunchView:
    """The newest launch, once its line has ``text``."""

    def look(state: ClusterView) -> LaunchView | None:
        found = state.launches[place]
        return found if text in found.text else None

    try:
        return cluster.wait_until(look, 60)
    except TimeoutError:
        pytest.fail(f"no {text!r}: {render_text(cluster.state())}")


def number(cluster: Cluster) -> str:
    """Of the job."""
    return launch(cluster).name.split()[1]


def names(cluster: Cluster) -> set[str]:
    return {node.name for node in cluster.state().nodes if node.condition == "ok"}


def wait_for(cluster: Cluster, *wanted: str) -> None:
    def shown() -> str:
        logs = [f"{log}: {log.read_text()[-500:]}" for log in (data_directory() / "launches").glob("*/*.log")]
        return "\n".join([f"{wanted}: {render_text(cluster.state())}", *logs])

    wait_until(lambda: names(cluster) == set(wanted), what=shown)


def key_of(cluster: Cluster) -> Path:
    return data_directory() / "launches" / launch(cluster).launch / "key.json"


def agents_of(cluster: Cluster) -> list[psutil.Process]:
    path = str(key_of(cluster))
    return [process for process in psutil.process_iter(["cmdline"]) if path in (process.info["cmdline"] or [])]


def test_hosts_train_together_and_the_launch_is_shown(cluster: Cluster) -> None:
    ended, outputs = cluster.run(
        "import numpy\nprint(nc.all_reduce(numpy.full(1, rank + 1.0, numpy.float32)), world_size)"
    )
    assert ended.status == "ok", ended
    assert {output.content["text"].strip() for output in outputs} == {"[3.] 2"}
    assert launch(cluster).text == f"slurm {number(cluster)}: 2 running"
    assert f"slurm {number(cluster)}: 2 running" in render_text(cluster.state())
    assert not [node for node in cluster.state().nodes if node.peer == "local"]


def test_the_key_is_in_a_private_file_and_nowhere_else(cluster: Cluster, tmp_path: Path) -> None:
    path = key_of(cluster)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    secret = msgspec.json.decode(path.read_bytes(), type=LaunchKey).secret_key
    assert len(agents_of(cluster)) == 2
    assert where_it_stands(secret) == []
    assert str(path) in ask("scontrol", "write", "batch_script", f"{number(cluster)}_0", "-")
    for told_by_slurm in (
        ask("scontrol", "show", "job", number(cluster)), ask("scontrol", "write", "batch_script", number(cluster), "-"),
    ):  # fmt: skip
        assert secret not in told_by_slurm


def test_agents_know_when_their_time_is_over(cluster: Cluster) -> None:
    ends = set(ask("squeue", "-h", "-r", "-j", number(cluster), "-o", "%e").split())
    for process in agents_of(cluster):
        arguments = process.cmdline()
        assert arguments[arguments.index("--until") + 1] in ends


def test_a_second_start_asks_for_no_more(cluster: Cluster, engine: Slurm) -> None:
    before, said = engine.jobs(), []
    with Cluster.start("lesson", hosts=3, **HERE, on_progress=said.append) as again:
        assert again.attached
    assert engine.jobs() == before
    assert said == [f"{launch(cluster).text}: there already, %cluster grow --on slurm asks for more"]


def test_growing_shows_what_is_pending_and_shrinking_gives_that_back_first(cluster: Cluster, engine: Slurm) -> None:
    cluster.grow("slurm", 2, address="127.0.0.1", time="5")
    pending = launch(cluster, "1 of 2 running, pending: Resources")
    assert pending.condition == "pending"
    wait_for(cluster, "n1", "n2", "n3")
    assert cluster.shrink(1) == [f"a host of slurm {number(cluster)} that had not come"]
    wait_until(lambda: "PENDING" not in engine.jobs().values(), what=lambda: str(engine.jobs()))
    assert cluster.shrink(1) == ["n3"]  # it has the highest rank
    assert names(cluster) == {"n1", "n2"}
    assert launch(cluster).condition == "ended"
    wait_until(lambda: len(engine.jobs()) == 2, what=lambda: str(engine.jobs()))


def test_hosts_that_somebody_cancels_leave_and_that_is_said(cluster: Cluster, engine: Slurm) -> None:
    cluster.grow("slurm", 1, address="127.0.0.1", time="5")
    job, log = number(cluster), key_of(cluster).parent / "0.log"
    wait_for(cluster, "n1", "n2", "n3")
    ask("scancel", f"{job}_0")
    told(cluster, f"slurm {job}: n3 ended: cancelled", 10)
    assert names(cluster) == {"n1", "n2"}
    assert "ends: stopped by SIGTERM" in log.read_text()


def test_a_job_that_is_queued_again_joins_again(cluster: Cluster, engine: Slurm) -> None:
    cluster.grow("slurm", 1, address="127.0.0.1", time="5")
    job = f"{number(cluster)}_0"
    wait_for(cluster, "n1", "n2", "n3")
    cluster.run("kept = 41 + 1")
    ask("scontrol", "requeue", job)
    launch(cluster, "0 of 1 running, pending: BeginTime")
    assert names(cluster) == {"n1", "n2"}
    ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(cluster, "n1", "n2", "n3")
    ended, outputs = cluster.run("print(kept)", ["n3"])
    assert (ended.status, outputs[0].content["text"]) == ("ok", "42\n")
    cluster.shrink(1)


def test_a_controller_that_does_not_answer_is_named_and_nodes_go_on(cluster: Cluster, engine: Slurm) -> None:
    controller = engine.pid("slurmctld")
    os.kill(controller, signal.SIGSTOP)
    try:
        told(cluster, "squeue has not answered within 6 s; its hosts may be well")
        assert launch(cluster, "squeue has not answered", place=0).condition == "running"
        assert cluster.run("pass")[0].status == "ok"
    finally:
        os.kill(controller, signal.SIGCONT)
    launch(cluster, ": 2 running", place=0)


def test_a_cell_while_all_hosts_are_pending_says_where_to_look(engine: Slurm) -> None:
    ask("scontrol", "update", "PartitionName=test", "State=DOWN")
    try:
        with running_cluster("waiting", hosts=1, **HERE) as waiting:
            launch(waiting, "0 of 1 running, pending: PartitionDown")
            with pytest.raises(ClusterError, match="has no running node: %cluster status says how the machines stand"):
                waiting.run("pass")
    finally:
        ask("scontrol", "update", "PartitionName=test", "State=UP")


def test_unknown_partition_is_refused_in_the_words_of_slurm(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match=r"slurm does not take the job: .*invalid partition.*nope.* here are test"):
        cluster.grow("slurm", 1, partition="nope", address="127.0.0.1")


def test_without_slurm_on_the_path_the_error_says_where_to_start(
    engine: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"there is no sbatch on the PATH of this machine: .*login node"):
        Cluster.start("other", hosts=1, **HERE)


def test_a_folder_that_the_hosts_do_not_have_is_named(cluster: Cluster, engine: Slurm, tmp_path: Path) -> None:
    held = ask("sbatch", "--parsable", "--exclusive", "--time=5", "--output=/dev/null", "--wrap=sleep 300").strip()
    wait_until(lambda: engine.jobs().get(held) == "RUNNING", what=lambda: str(engine.jobs()))
    cluster.grow("slurm", 1, address="127.0.0.1", time="5", folder=str(tmp_path))
    shutil.rmtree(next(tmp_path.iterdir()))
    ask("scancel", held)
    assert re.search(r"name a folder that the compute nodes share with --folder DIR", told(cluster, "--folder DIR"))


def test_a_coordinator_that_dies_finds_its_hosts_again_or_leaves_no_job(engine: Slurm, cluster: Cluster) -> None:
    with running_cluster("brief", hosts=1, agent_lease=5.0, **HERE) as brief:
        job = f"{number(brief)}_0"
        wait_for(brief, "n3")
        brief.run("kept = 42")
        os.kill(brief.connection.file.pid, signal.SIGKILL)
        brief.connection.wait_closed()
        with Cluster.start("brief", local=0, agent_lease=5.0) as again:
            wait_for(again, "n3")
            assert again.run("print(kept)")[1][0].content["text"] == "42\n"
            launch(again, ": 1 running")
            os.kill(again.connection.file.pid, signal.SIGKILL)
            again.connection.wait_closed()
        wait_until(lambda: job not in engine.jobs(), what=lambda: str(engine.jobs()))


def test_a_script_runs_on_hosts_of_slurm_and_none_is_kept(engine: Slurm, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("WORD = 'here'\n")
    (tmp_path / "script.py").write_text("import os, part\nprint(part.WORD, os.environ['SLURMD_NODENAME'])\n")
    before = engine.jobs()
    done = run_command("run", str(tmp_path / "script.py"), "--on", "slurm", "--address", "127.0.0.1", "--time", "5")
    assert (done.returncode, done.stdout) == (0, "[n3] here n3\n"), done.stderr
    assert "slurm" in done.stderr
    assert engine.jobs() == before


def test_stopping_the_cluster_takes_everything_back(cluster: Cluster, engine: Slurm) -> None:
    cluster.grow("slurm", 2, address="127.0.0.1", time="5")
    path, processes = key_of(cluster), agents_of(cluster)
    began = time.monotonic()
    cluster.stop()
    assert time.monotonic() - began < 60
    assert not path.exists()
    wait_until(lambda: not engine.jobs(), what=lambda: str(engine.jobs()))
    wait_until(lambda: not any(process.is_running() for process in processes), what="the end of the agents")
