"""A cluster on hosts that ipyparallel's launchers start: with a real mpiexec, as processes, and with a real Slurm."""

import functools
import os
import shutil
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.launchers import LaunchError, LaunchOrder, find_launcher
from notebook_cluster.protocol.launches import LaunchKey
from notebook_cluster.security import data_directory
from notebook_cluster.widgets import render_text
from tests.cluster import running_cluster, told
from tests.conftest import shared_folders, wait_until
from tests.engines.running import no_slurm, no_ssh, slurm, ssh_hosts, where_it_stands
from tests.in_loop import in_loop
from tests.test_engines_ssh import setup

AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
SLURM_SCRIPT = """#!/bin/sh
#SBATCH --nodes={n} --ntasks-per-node=1 --time=5 --output={output_file}
exec srun --label {program_and_args}
"""


@functools.cache
def no_mpi() -> str:
    """Why there can be no MPI here, or an empty text."""
    missing = [name for name in ("mpiexec", "mpirun") if shutil.which(name) is None]
    return f"ipyparallel's mpi launcher needs the program {missing[0]!r}: make engines" if missing else ""


needs_mpi = pytest.mark.skipif(bool(no_mpi()), reason=no_mpi() or "there is one")
needs_ssh = pytest.mark.skipif(bool(no_ssh()), reason=no_ssh() or "there are some")
needs_slurm = pytest.mark.skipif(bool(no_slurm()), reason=no_slurm() or "there is one")


@pytest.fixture(name="folders", scope="module")
def own_folders() -> Iterator[Path]:
    """With a profile of IPython in which a site has said what its launchers need."""
    with shared_folders() as root, pytest.MonkeyPatch.context() as patch:
        work = root / "work"
        work.mkdir()
        patch.chdir(work)
        for name in AS_ROOT:
            patch.setenv(name, "1")
        patch.setattr("notebook_cluster.client.launching.PENDING_S", 1.0)
        configure(
            "default",
            "c.MPILauncher.mpi_args = ['--oversubscribe']\n"
            f"c.SlurmEngineSetLauncher.batch_template = {SLURM_SCRIPT!r}\n",
        )
        yield root


def configure(profile: str, lines: str) -> None:
    folder = Path(os.environ["IPYTHONDIR"], f"profile_{profile}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ipcluster_config.py").write_text(lines)


@pytest.fixture(name="cluster", scope="module", params=[pytest.param("mpi", marks=needs_mpi), "local"])
def shared_cluster(folders: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with running_cluster(f"on-{request.param}", on=f"ipp:{request.param}", hosts=2, address="127.0.0.1") as cluster:
        wait_until(lambda: len(names(cluster)) == 2)  # start() waits for a second only, see above
        yield cluster
        path = launch_folder(cluster)
    wait_until(lambda: not agents(path), what=lambda: str(agents(path)))
    assert not (path / "key.json").exists()


def launch_folder(cluster: Cluster, launch: int = 0) -> Path:
    return data_directory() / "launches" / cluster.state().launches[launch].launch


def agents(folder: Path) -> list[psutil.Process]:
    """Those of a launch that run."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if str(folder / "key.json") in (process.info["cmdline"] or []) and process.info["status"] != "zombie"
    ]


def engine(cluster: Cluster) -> str:
    return cluster.name.removeprefix("on-")


def names(cluster: Cluster) -> set[str]:
    return {node.name for node in cluster.state().nodes if node.condition == "ok"}


def test_hosts_compute_together_and_the_launch_is_shown(cluster: Cluster) -> None:
    ended, outputs = cluster.run("print(nc.mean_metrics(x=rank)['x'], world_size)")
    assert ended.status == "ok", ended
    assert {output.content["text"] for output in outputs} == {"0.5 2\n"}
    (launch,) = cluster.state().launches
    assert launch.name.startswith(f"ipp {engine(cluster)}")
    assert launch.text == f"{launch.name}: 2 running"
    assert launch.text in render_text(cluster.state())


def test_the_key_is_in_a_private_file_and_nowhere_else(cluster: Cluster) -> None:
    path = launch_folder(cluster) / "key.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    secret = msgspec.json.decode(path.read_bytes(), type=LaunchKey).secret_key
    assert len(agents(path.parent)) == 2
    assert where_it_stands(secret) == []
    for file in path.parent.rglob("*"):
        assert file == path or file.is_dir() or secret not in file.read_text()


def test_agents_on_one_host_have_folders_of_their_own(cluster: Cluster) -> None:
    ended, outputs = cluster.run("import os\nprint(os.getcwd())")
    assert ended.status == "ok", ended
    assert len({output.content["text"] for output in outputs}) == 2


def test_a_place_that_is_given_back_leaves_the_others_running(cluster: Cluster) -> None:
    with Cluster.attach(cluster.name) as view:
        launch = view.grow(f"ipp:{engine(cluster)}", 2, address="127.0.0.1")
        assert (launch.running, launch.joined) == (2, 2)
        folder = launch_folder(cluster, -1)
        assert len(cluster.shrink(1)) == 1
        wait_until(lambda: len(agents(folder)) == 1, what=lambda: str(agents(folder)))
        ended, outputs = cluster.run("print(world_size)")
        assert ended.status == "ok", ended
        assert {output.content["text"] for output in outputs} == {"3\n"}
        assert cluster.state().launches[-1].text.endswith(": 1 running")
        assert len(cluster.shrink(1)) == 1
        wait_until(lambda: not agents(folder), what=lambda: str(agents(folder)))
        assert cluster.state().launches[-1].condition == "ended"
    assert len(names(cluster)) == 2


def test_a_host_that_is_killed_is_gone_and_said(folders: Path) -> None:
    with running_cluster("killed", on="ipp:local", hosts=2, address="127.0.0.1") as cluster:
        agents(launch_folder(cluster))[0].kill()
        told(cluster, "has ended there: its process has ended")
        assert cluster.state().launches[0].text == "ipp local: 1 running"
        assert len(names(cluster)) == 1


@pytest.mark.proof
@needs_mpi
def test_with_mpi_one_host_that_is_killed_ends_all(folders: Path) -> None:
    with running_cluster("all", on="ipp:mpi", hosts=2, address="127.0.0.1") as cluster:
        folder = launch_folder(cluster)
        agents(folder)[0].kill()
        wait_until(lambda: cluster.state().launches[0].condition == "ended", what=lambda: render_text(cluster.state()))
        told(cluster, "signal 9 (Killed)")
        assert names(cluster) == set()
        assert not agents(folder)


@pytest.mark.parametrize("launcher", [pytest.param("mpi", marks=needs_mpi), "local"])
def test_a_coordinator_that_is_started_again_finds_its_hosts_and_ends_them(folders: Path, launcher: str) -> None:
    with running_cluster("again", on=f"ipp:{launcher}", hosts=2, address="127.0.0.1") as cluster:
        before, folder = names(cluster), launch_folder(cluster)
        os.kill(cluster.connection.file.pid, signal.SIGKILL)
        cluster.connection.wait_closed()
        with Cluster.start("again", on=f"ipp:{launcher}", hosts=2, address="127.0.0.1") as again:
            ended, outputs = again.run("print(world_size)")
            assert ended.status == "ok", ended
            assert {output.content["text"] for output in outputs} == {"2\n"}
            assert names(again) == before
            wait_until(
                lambda: again.state().launches[0].text.endswith(": 2 running"), what=lambda: render_text(again.state())
            )
            assert len(again.state().launches) == 1
            again.stop()
        wait_until(lambda: not agents(folder), what=lambda: str(agents(folder)))


@needs_mpi
def test_agents_end_when_their_coordinator_is_gone_for_good(folders: Path) -> None:
    with running_cluster("gone", on="ipp:mpi", hosts=2, address="127.0.0.1", agent_lease=3.0) as cluster:
        folder = launch_folder(cluster)
        os.kill(cluster.connection.file.pid, signal.SIGKILL)
        wait_until(lambda: not agents(folder), what=lambda: str(agents(folder)))
        cluster.connection.wait_closed()


@pytest.mark.proof
@pytest.mark.parametrize("launcher", [pytest.param("mpi", marks=needs_mpi), "local"])
def test_hosts_that_do_not_reach_this_machine_are_ended_too(
    folders: Path, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("notebook_cluster.client.launching.COMING_S", 1.0)
    with running_cluster("lost", on=f"ipp:{launcher}", hosts=2, address="192.0.2.1") as cluster:
        folder = launch_folder(cluster)
        wait_until(lambda: len(agents(folder)) == 2, what=lambda: str(agents(folder)))
        assert cluster.state().launches[0].text.endswith(": 2 running, 0 of them in the cluster")
        cluster.stop()
        assert not agents(folder)
    said = [path.read_text().splitlines()[-1] for path in folder.glob("*.log")]
    assert said == ["not in cluster lost any more: stopped by SIGTERM"] * 2


@needs_slurm
def test_a_batch_system_is_asked_with_the_template_of_the_profile(folders: Path) -> None:
    with slurm(), running_cluster("batch", on="ipp:slurm", hosts=2, address="127.0.0.1") as cluster:
        wait_until(lambda: len(names(cluster)) == 2, what=lambda: render_text(cluster.state()))
        folder = launch_folder(cluster)
        (launch,) = cluster.state().launches
        assert launch.name.split()[:2] == ["ipp", "slurm"]
        assert launch.name.split()[2].isdigit()
        assert len(list(folder.glob("*-*.log"))) == 2
        cluster.stop()
        wait_until(lambda: not agents(folder), what=lambda: str(agents(folder)))


@pytest.mark.proof
@needs_ssh
@pytest.mark.namespaces
def test_hosts_that_ipyparallel_reaches_with_ssh_are_those_of_the_profile(folders: Path) -> None:
    with ssh_hosts() as hosts:
        engines = {"h1": 1, "h2": 1}
        configure(
            "reached",
            f"c.SSHEngineSetLauncher.engines = {engines}\nc.SSHEngineSetLauncher.remote_python = {sys.executable!r}\n",
        )
        how = {"on": "ipp:ssh@reached", "setup": setup(), "address": hosts.address}
        with running_cluster("reached", hosts=2, **how) as cluster:
            wait_until(lambda: names(cluster) == {"h1", "h2"}, what=lambda: render_text(cluster.state()))
            assert cluster.state().launches[0].text == "ipp ssh: 2 running"
            with pytest.raises(ClusterError, match="it has 2 engines in its configuration, not 3: say --hosts 2"):
                cluster.grow(how["on"], 3, setup=how["setup"], address=hosts.address)
            folder = launch_folder(cluster)
            cluster.stop()
            wait_until(lambda: not agents(folder), what=lambda: str(agents(folder)))


@pytest.mark.parametrize(
    ("launcher", "submit", "delete"),
    [
        ("pbs", "qsub", "qdel"),
        ("sge", "qsub", "qdel"),
        ("lsf", "bsub", "bkill"),
        ("htcondor", "condor_submit", "condor_rm"),
    ],
)
def test_a_queue_gets_a_script_that_it_can_run_and_its_job_back(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, submit: str, delete: str
) -> None:
    for name in (submit, delete):
        (tmp_path / name).symlink_to(Path(__file__).parent / "engines" / "queue.sh")
    monkeypatch.setenv("QUEUE", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "hunter2")
    with running_cluster(f"on-{launcher}", on=f"ipp:{launcher}", hosts=2, address="127.0.0.1") as cluster:
        assert cluster.state().launches[0].text == f"ipp {launcher} 4711: 2 running"
        assert len(names(cluster)) == 2
        folder = launch_folder(cluster)
        for process in agents(folder):
            assert "JUPYTERHUB_API_TOKEN" not in process.environ()
        cluster.stop()
        assert (tmp_path / "deleted").read_text() == "4711\n"
        wait_until(lambda: not agents(folder), what=lambda: str(agents(folder)))


@needs_mpi
def test_what_an_engine_says_of_its_end_is_told(folders: Path) -> None:
    configure("strict", "c.MPILauncher.mpi_args = ['--no-such-option']\n")
    with pytest.raises(ClusterError, match=r"ipp mpi \d+: .*no-such-option"):
        Cluster.start("strict", on="ipp:mpi@strict", hosts=2, address="127.0.0.1")


@pytest.mark.parametrize(
    ("where", "options", "error"),
    [
        (
            "mip",
            {},
            r"--on ipp:mip: no such launcher \(did you mean 'mpi'\?\). ipyparallel has: batch, htcondor, local",
        ),
        ("", {}, "--on ipp: name a launcher. ipyparallel has: batch, "),
        ("pbs", {"partition": "gpu"}, "cannot be told --partition: write it into .* of IPython's profile default"),
        ("local", {"time": "1:00"}, "cannot be told --time"),
        ("local", {"gpus": 2}, "cannot be told --gpus"),
        ("winhpc", {}, "winhpc launcher does not start them: it starts ipyparallel's own engines"),
        ("sshproxy", {}, "sshproxy launcher does not start them: it starts ipyparallel's own engines"),
        ("pbs@nowhere", {}, "there is no IPython profile 'nowhere'"),
        ("pbs@old", {}, "its batch_template does not run {program_and_args}: write that in the place of ipengine"),
        ("pbs", {}, "pbs launcher does not start them: .*qsub"),
    ],
)
def test_what_cannot_be_started_is_refused(folders: Path, where: str, options: dict[str, str], error: str) -> None:
    configure("old", "c.PBSEngineSetLauncher.batch_template = '#!/bin/sh\\nipengine --profile-dir={profile_dir}\\n'\n")
    with pytest.raises(ClusterError, match=error):
        Cluster.start("refused", on=f"ipp:{where}", address="127.0.0.1", **options)  # type: ignore[arg-type]


@in_loop
async def test_a_start_without_an_answer_may_have_left_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notebook_cluster.launchers.ipyparallel_engines._START_S", 0.01)
    monkeypatch.setattr("notebook_cluster.launchers.ipyparallel_engines._START_EACH_S", 0.0)
    order = LaunchOrder(
        name="x", where="pbs", hosts=1, argv=("notebook-cluster",), secret=tmp_path / "key.json", folder=tmp_path
    )
    with pytest.raises(LaunchError, match=r"pbs launcher has not answered within 0.01 s: see whether its queue has"):
        await find_launcher("ipp").start(order)


def test_without_ipyparallel_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notebook_cluster.launchers.ipyparallel_engines.find_spec", lambda name: None)
    with pytest.raises(LaunchError, match="pip install ipyparallel"):
        find_launcher("ipp").hosts("mpi")
