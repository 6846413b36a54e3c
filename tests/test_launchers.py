"""Hosts that an engine starts, without an engine: one of another package that starts agents as processes here."""

import argparse
import contextlib
import datetime
import os
import subprocess
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import msgspec
import psutil
import pytest
import zmq

from notebook_cluster.cli.launched import leave_at
from notebook_cluster.cli.values import until as read_until
from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.coordinator.peers.launch_folders import let_old_ones_go
from notebook_cluster.coordinator.peers.launched_hosts import LATE_S, Latecomers, LaunchedHosts
from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import State, apply
from notebook_cluster.launchers import HostState, LaunchError, LaunchState, find_launcher, known_engines
from notebook_cluster.launchers.commands import environment, own_words
from notebook_cluster.launchers.slurm import _NOT_OURS
from notebook_cluster.link import Listener
from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.node_commands import launch_options
from notebook_cluster.magics.parsing import parse_cluster
from notebook_cluster.protocol import PROTOCOL_VERSION
from notebook_cluster.protocol.launches import ANY_PLACE, Enlist, Enlisted, LaunchKey, NotEnlisted
from notebook_cluster.security import Identity, data_directory, new_identity
from notebook_cluster.server.hub import engine_choices
from notebook_cluster.widgets import render_html, render_text
from tests.cluster import run, running_cluster, told
from tests.command import COMMAND
from tests.conftest import shared_folders, wait_until
from tests.engines.processes import install
from tests.in_loop import in_loop, until
from tests.test_agent_keeping import JOB

Condition = Literal["pending", "running", "ended"]
HERE = {"on": "processes", "address": "127.0.0.1"}
ROOT = str(Path(__file__).parent.parent)


@pytest.fixture(name="cluster", scope="module")
def shared_cluster() -> Iterator[Cluster]:
    """On two hosts, p0 and p1, of which the coordinator's own PATH has the command."""
    with shared_folders() as root, pytest.MonkeyPatch.context() as patch:
        install(root / "packages")
        patch.syspath_prepend(str(root / "packages"))
        inherited = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", ":".join(filter(None, [str(root / "packages"), ROOT, inherited])))
        patch.setenv("PATH", f"{Path(COMMAND).parent}:{os.environ['PATH']}")
        patch.setattr("notebook_cluster.client.launching.PENDING_S", 1.0)
        work = root / "work"
        work.mkdir()
        patch.chdir(work)
        with running_cluster("lesson", hosts=2, **HERE) as cluster:
            yield cluster


def names(cluster: Cluster) -> set[str]:
    return {node.name for node in cluster.state().nodes if node.condition == "ok"}


def folder_of(cluster: Cluster, launch: int = -1) -> Path:
    return data_directory() / "launches" / cluster.state().launches[launch].launch


def key_of(cluster: Cluster) -> LaunchKey:
    return msgspec.json.decode((folder_of(cluster, 0) / "key.json").read_bytes(), type=LaunchKey)


def agent(cluster: Cluster, name: str) -> psutil.Process:
    """The one that calls itself so."""
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "--launch-key" in (words := process.info["cmdline"] or [])
        and str(folder_of(cluster)) in " ".join(words)  # first: those of other tests on this machine have no --name
        and words[words.index("--name") + 1] == name
    ]
    assert len(found) == 1, found
    return found[0]


def address(cluster: Cluster) -> str:
    """Where peers dial in."""
    words = agent(cluster, "p1").cmdline()
    return words[words.index("--dial") + 1]


def share(cluster: Cluster, key: LaunchKey, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What an agent says that comes with ``key``, until it ends."""
    path = tmp_path / "key.json"
    path.write_bytes(msgspec.json.encode(key) + b"\n")
    dial = f"127.0.0.1:9,{address(cluster)}"  # nobody is at the first one
    command = [COMMAND, "share", "--dial", dial, "--launch-key", str(path), "--name", "p9", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_engines_of_other_packages_are_known_beside_ours(cluster: Cluster) -> None:
    assert {"processes", "slurm", "ssh"} <= set(known_engines())
    (other,) = [choice for choice in engine_choices() if choice.name == "processes"]
    assert (other.title, other.hosts) == ("processes", "either")
    assert [choice.name for choice in engine_choices()][:2] == ["slurm", "ssh"]


def test_an_engine_of_another_package_starts_hosts_that_compute_together(cluster: Cluster) -> None:
    ended, outputs = cluster.run("print(nc.mean_metrics(x=rank)['x'])")
    assert ended.status == "ok", ended
    assert {output.content["text"] for output in outputs} == {"0.5\n"}
    assert names(cluster) == {"p0", "p1"}
    assert cluster.state().launches[0].text == "processes here: 2 running"
    for render in (render_text, render_html):
        assert "processes here: 2 running" in render(cluster.state())


def test_a_place_that_is_started_twice_stays_with_the_first(cluster: Cluster, tmp_path: Path) -> None:
    second = share(cluster, key_of(cluster), tmp_path, "--place", "1")
    assert second.returncode == 1
    assert "cluster lesson refuses: p1 has place 1 of processes here already" in second.stderr
    assert "host 1 was started twice; p1 has its place, p9 at 127.0.0.1" in told(cluster, "started twice")
    assert names(cluster) == {"p0", "p1"}


def test_a_place_that_the_launch_has_not_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    refused = share(cluster, key_of(cluster), tmp_path, "--place", "2")
    assert refused.returncode == 1
    assert "place 2 of 2 is not wanted any more" in refused.stderr


def test_an_agent_without_a_place_is_not_wanted_where_all_are_taken(cluster: Cluster, tmp_path: Path) -> None:
    refused = share(cluster, key_of(cluster), tmp_path, "--place", "any")
    assert refused.returncode == 0  # an engine may end all of them when one fails
    assert "cluster lesson refuses: all hosts of processes here that are wanted are here" in refused.stderr
    assert names(cluster) == {"p0", "p1"}


def test_another_key_is_no_key_of_this_launch(cluster: Cluster, tmp_path: Path) -> None:
    pair = new_identity()
    key = msgspec.structs.replace(key_of(cluster), public_key=pair.public_key, secret_key=pair.secret_key)
    refused = share(cluster, key, tmp_path, "--start", "1")
    assert refused.returncode == 1
    assert "refuses this launch's key: the launch is over" in refused.stderr


def test_an_agent_talks_to_no_other_coordinator(cluster: Cluster, tmp_path: Path) -> None:
    key = msgspec.structs.replace(key_of(cluster), server_key=new_identity().public_key)
    alone = share(cluster, key, tmp_path, "--start", "1", "--lease", "1")
    assert alone.returncode == 1
    assert "does not answer as the peer that was found: another key or another program; " in alone.stderr
    assert "for 1 s now" in alone.stderr
    assert names(cluster) == {"p0", "p1"}


@in_loop
async def test_the_key_of_a_launch_opens_no_other_door(cluster: Cluster) -> None:
    key, sessions, before = key_of(cluster), [], {peer.name for peer in cluster.state().peers}
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    intruder = Listener(
        context, "tcp://127.0.0.1:*", Identity(key.public_key, key.secret_key), authorise=lambda other: "anybody",
        on_session=sessions.append,
    )  # fmt: skip
    intruder.start()
    dialled = intruder.dial_out(address(cluster), key.server_key)
    log = Path(cluster.connection.file.run_log).with_name("coordinator.log")
    await until(lambda: "dropped a frame of 127.0.0.1" in log.read_text(), "the frame to be dropped")
    assert dialled.condition == "connected"
    assert sessions == []
    assert {peer.name for peer in cluster.state().peers} == before
    await intruder.close()
    context.destroy(linger=0)


def test_a_second_start_while_the_first_is_there_is_one_line(cluster: Cluster) -> None:
    said: list[str] = []
    with Cluster.start("lesson", hosts=5, **HERE, on_progress=said.append):
        assert said == ["processes here: 2 running: there already, %cluster grow --on processes asks for more"]


def test_a_host_that_its_engine_ends_keeps_its_training_and_leaves(cluster: Cluster) -> None:
    cluster.grow("processes", 1, address="127.0.0.1")
    (third,) = names(cluster) - {"p0", "p1"}
    peer = next(node.peer for node in cluster.state().nodes if node.name == third)
    assert cluster.run(JOB.format(write="pass"), [third])[0].status == "ok"
    log = folder_of(cluster) / "0.log"
    agent(cluster, "p0").terminate()
    assert told(cluster, f"{peer} has left").endswith("stopped by SIGTERM")
    wait_until(lambda: "not in cluster lesson any more" in log.read_text(), what=log.read_text)
    kept = data_directory() / "agents" / "p0" / "work" / "lesson" / "checkpoints" / "digits" / "state"
    assert f"checkpoint of cluster lesson kept in {kept.parent}" in log.read_text()
    assert kept.read_text() == "kept"
    assert names(cluster) == {"p0", "p1"}


def test_a_host_leaves_before_its_time_is_over(cluster: Cluster) -> None:
    with contextlib.suppress(ClusterError):  # it may be over before it has come
        end = datetime.datetime.now() + datetime.timedelta(seconds=8)
        cluster.grow("processes", 1, address="127.0.0.1", time=end.isoformat())
    log = folder_of(cluster) / "0.log"
    wait_until(lambda: "not in cluster lesson any more: p0 was shared until" in log.read_text(), what=log.read_text)
    wait_until(lambda: cluster.state().launches[-1].condition == "ended", what="the end of the launch")
    assert names(cluster) == {"p0", "p1"}


def test_shrinking_gives_back_the_highest_ranks_and_never_more_than_there_are(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match=r"shrink 3: engines started 2 hosts of this cluster; %cluster remove NODE"):
        cluster.shrink(3)
    ranks = {node.rank: node.peer for node in cluster.state().nodes}
    assert cluster.shrink(1) == [ranks[1]]
    assert names(cluster) == {ranks[0]}


def test_each_host_has_as_many_nodes_as_were_asked_for(cluster: Cluster) -> None:
    before = {node.name for node in cluster.state().nodes}
    launch = cluster.grow("processes", 2, nodes_per_host=2, address="127.0.0.1")
    assert (launch.hosts, launch.running, launch.joined) == (2, 2, 2)
    nodes = [node for node in cluster.state().nodes if node.name not in before]
    assert [node.condition for node in nodes] == ["ok"] * 4
    assert sorted(Counter(node.peer for node in nodes).values()) == [2, 2]
    assert set(run(cluster, "print(world_size)").values()) == {f"{len(before) + 4}\n"}
    given = cluster.shrink(2)
    assert len(given) == 2
    wait_until(lambda: names(cluster) == before, what=lambda: str(names(cluster)))


@pytest.mark.parametrize("number", [-1, 65])
def test_a_host_has_from_one_to_64_nodes(cluster: Cluster, number: int) -> None:
    with pytest.raises(ClusterError, match=f"--nodes-per-host {number}: use 1 to 64, or leave it out"):
        cluster.grow("processes", 1, nodes_per_host=number, address="127.0.0.1")


def test_an_engine_that_is_not_known_is_named_with_those_that_are(cluster: Cluster) -> None:
    with pytest.raises(
        ClusterError,
        match=r"--on slrum: no such engine \(did you mean 'slurm'\?\). There are: fake, ipp, processes, slurm, ssh",
    ):
        cluster.grow("slrum")


def test_where_hosts_are_shared_must_be_there(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="--folder /nowhere: name a folder that is there"):
        cluster.grow("processes", 1, folder="/nowhere")


# ---- what is typed, read and said


def test_the_launcher_that_the_page_shows_is_the_one_that_is_tried_here() -> None:
    page = Path(ROOT, "docs", "engines.md").read_text()
    shown = page.split("```python\nimport asyncio")[1].split("```")[0]
    assert shown.strip() in Path(ROOT, "tests", "engines", "processes.py").read_text()


def test_our_own_engines_are_known() -> None:
    assert find_launcher("slurm").hosts("") == 0
    assert find_launcher("ssh").hosts("gpu1, me@gpu2") == 2
    with pytest.raises(LaunchError, match="slurm finds the hosts itself, say --on slurm --partition gpu"):
        find_launcher("slurm").hosts("gpu")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("start --hosts 2", "--hosts is for hosts that an engine starts"),
        ("grow --time 1:00", "name it with --on slurm"),
        ("start --nodes-per-host 2", "--nodes-per-host is for hosts that an engine starts"),
    ],
)
def test_options_of_hosts_need_an_engine(line: str, error: str) -> None:
    call = parse_cluster(line)
    assert call is not None
    with pytest.raises(UsageError, match=error):
        launch_options(call)


def test_options_of_an_engine_reach_the_client_as_they_were_typed() -> None:
    line = 'grow --on slurm --hosts 16 --gpus 4 --nodes-per-host 8 --time 2:00:00 --setup "source ~/venv/bin/activate"'
    call = parse_cluster(line)
    assert call is not None
    typed = {"on": "slurm", "hosts": 16, "gpus": 4, "nodes_per_host": 8, "time": "2:00:00"}
    assert launch_options(call) == typed | {"setup": "source ~/venv/bin/activate"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--launch-key", "key.json"), "say where it is with --dial HOST:PORT"),
        (
            ("--launch-key", "key.json", "--dial", "127.0.0.1:9", "--code", "tiger-lamp-42"),
            "--launch-key and --code exclude",
        ),
        (("--dial", "127.0.0.1:9", "--place", "1"), "--place and --start go with --launch-key"),
        (("--dial", "127.0.0.1:9,127.0.0.1:10"), "give one HOST:PORT; several go with --launch-key"),
        (("--place", "first"), "'first' is not a place: use 0 or more, or any"),
        (("--launch-key", "/nowhere", "--dial", "127.0.0.1:9"), "No such file or directory: '/nowhere'"),
    ],
)
def test_what_an_engine_gives_is_checked(options: tuple[str, ...], error: str, jupyter_dirs: Path) -> None:
    done = subprocess.run([COMMAND, "share", *options], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2)
    assert error in done.stderr


def test_what_is_no_key_is_not_repeated(jupyter_dirs: Path) -> None:
    command = [COMMAND, "share", "--launch-key", "-", "--dial", "127.0.0.1:9"]
    secret = '{"type": "LaunchKey", "secret_key": "hunter2'
    done = subprocess.run(command, input=secret, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "notebook-cluster: the first line of standard input is not the key of a launch\n",
    )


@pytest.mark.parametrize("how", ["SIGTERM", "end of input"])
def test_an_agent_that_still_looks_for_its_cluster_can_be_ended(how: str, no_processes_left: str) -> None:
    pair, server = new_identity(), new_identity()
    key = LaunchKey(
        cluster="lesson", owner="me@here", server_key=server.public_key, public_key=pair.public_key,
        secret_key=pair.secret_key,
    )  # fmt: skip
    command = [COMMAND, "share", "--dial", "127.0.0.1:9", "--launch-key", "-", "--name", "p9", "--lease", "600"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(msgspec.json.encode(key) + b"\n")
        assert b"nothing answers at 127.0.0.1:9" in process.stderr.readline()
        if how == "SIGTERM":
            process.terminate()
        else:
            process.stdin.close()
        assert process.wait(30) == 0


def test_a_time_may_have_its_date() -> None:
    assert read_until("2026-11-19T14:03:00") - read_until("2026-11-19T14:02") == 60
    with pytest.raises(argparse.ArgumentTypeError, match="'2026-11-19T99:03' is not a time: write it like"):
        read_until("2026-11-19T99:03")


def test_a_host_leaves_a_minute_early_or_a_fifth_of_a_short_time() -> None:
    assert leave_at(10_000, 0) == 9_940
    assert leave_at(100, 0) == 80
    assert leave_at(100, 200) == 100


class MadeUpCore:
    """Where a launch stands."""

    def __init__(self, hosts: int = 1) -> None:
        self.state = apply(State(), e.LaunchOrdered(launch="x", on="slurm", hosts=hosts, key="K" * 40, folder="/f"))
        self.journal = SimpleNamespace(settled=lambda call: call())

    def record(self, event: e.Event) -> None:
        self.state = apply(self.state, event)

    def tell(self, level: str, text: str) -> None: ...

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        work.close()


@pytest.mark.parametrize(
    ("first", "start", "let_in"),
    [
        ("is here", 1, False),
        ("was let in and has not dialled yet", 1, False),
        ("has dialled and is gone", 1, True),  # its controller started the job again, and killed it
        ("is here", 2, True),
        ("has dialled and is gone", 0, False),
    ],
)
def test_a_place_is_had_by_the_latest_start_and_by_the_first_of_two(first: str, start: int, let_in: bool) -> None:
    core, keys, said = MadeUpCore(), [new_identity().public_key for _ in range(2)], []
    links = SimpleNamespace(
        is_used=lambda key: key == keys[0] and "dialled yet" not in first, name_of=lambda key: None,
    )  # fmt: skip
    hosts = LaunchedHosts(
        core,
        links=links,
        membership=None,
        is_here=lambda key: first == "is here",
        revoke=lambda key: None,  # type: ignore[arg-type]
    )
    core.record(e.HostEnlisted(launch="x", place=0, start=1, key=keys[0], name="n1"))
    hosts._since[keys[0]] = time.monotonic()
    second = Enlist(protocol=PROTOCOL_VERSION, name="n2", place=0, start=start, key=keys[1])
    hosts.enlist("K" * 40, "127.0.0.1:9", second, said.append)
    assert [type(answer) for answer in said] == [Enlisted if let_in else NotEnlisted]
    assert core.state.launches["x"].hosts[0].name == ("n2" if let_in else "n1")


def hosts_of(core: MadeUpCore, here: set[str], dialled: set[str]) -> LaunchedHosts:
    """With connections to those whose keys are ``here``, and links to those that have ``dialled`` once."""
    links = SimpleNamespace(is_used=lambda key: key in dialled, name_of=lambda key: None)
    return LaunchedHosts(
        core,  # type: ignore[arg-type]
        links=links,  # type: ignore[arg-type]
        membership=None,  # type: ignore[arg-type]
        is_here=lambda key: key in here,
        revoke=lambda key: None,
    )


def test_agents_that_were_given_no_place_take_free_ones() -> None:
    core, keys = MadeUpCore(hosts=2), [new_identity().public_key for _ in range(4)]
    here: set[str] = set()
    dialled: set[str] = set()
    said: list[Enlisted | NotEnlisted] = []
    hosts = hosts_of(core, here, dialled)

    def come(number: int) -> dict[int, str]:
        message = Enlist(protocol=PROTOCOL_VERSION, name=f"n{number}", place=ANY_PLACE, start=0, key=keys[number])
        hosts.enlist("K" * 40, "127.0.0.1:9", message, said.append)
        here.add(keys[number])
        dialled.add(keys[number])
        return {place: host.name for place, host in core.state.launches["x"].hosts.items()}

    assert come(0) == {0: "n0"}
    assert come(0) == {0: "n0"}  # it has not heard the answer
    assert come(1) == {0: "n0", 1: "n1"}
    assert come(2) == {0: "n0", 1: "n1"}
    assert [type(answer) for answer in said] == [Enlisted, Enlisted, Enlisted, NotEnlisted]
    here.remove(keys[0])
    assert come(3) == {0: "n3", 1: "n1"}


@pytest.mark.parametrize(
    ("told", "is_here", "given_up", "by_place"),
    [
        (["running", "running", "pending"], [], [], ["running", "running", "pending"]),
        (["running", "pending", "pending"], [2], [], ["pending", "pending", "running"]),
        (["ended", "running", "running"], [1, 2], [], ["ended", "running", "running"]),
        (["ended", "ended", "ended"], [], [], ["ended", "ended", "ended"]),
        (["ended", "ended", "ended"], [1], [], ["ended", "running", "ended"]),  # its engine has lost it
        (["ended", "running", "running"], [0, 1], [2], ["running", "running"]),
        (["ended", "ended", "running"], [0], [2], ["running", "ended"]),
        ([], [], [], ["ended", "ended", "ended"]),
    ],
)
def test_what_an_engine_without_places_tells_is_told_of_those_that_are_free(
    told: list[Condition], is_here: list[int], given_up: list[int], by_place: list[Condition]
) -> None:
    core, keys = MadeUpCore(hosts=3), [new_identity().public_key for _ in range(3)]
    for place in is_here:
        core.record(e.HostEnlisted(launch="x", place=place, start=0, key=keys[place], name=f"n{place}"))
    for place in given_up:
        core.record(e.HostLeft(launch="x", place=place, given_up=True))
    state = LaunchState(dict(enumerate(map(HostState, told))), by_place=False)
    here = {keys[place] for place in is_here}
    placed = hosts_of(core, here, here).placed(core.state.launches["x"], state)
    assert [placed.hosts[place].condition for place in sorted(placed.hosts)] == by_place


def test_a_host_that_runs_and_does_not_come_is_named_once() -> None:
    late = Latecomers()
    assert late.look("x", [0, 1], 0.0) == []
    assert late.look("x", [1], LATE_S - 1) == []  # the other one has come
    assert late.look("y", [1], LATE_S + 1) == []
    assert late.look("x", [0, 1], LATE_S + 1) == [1]
    assert late.look("x", [0, 1], LATE_S + 2) == []
    assert late.look("x", [0, 1], 3 * LATE_S) == [0]


def test_tokens_of_jupyter_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "hunter2")
    monkeypatch.setenv("JUPYTER_DATA_DIR", "/data")
    assert "JUPYTERHUB_API_TOKEN" not in environment()
    assert environment()["JUPYTER_DATA_DIR"] == "/data"


def test_a_notebook_that_is_a_job_itself_hands_nothing_of_that_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SCANCEL_INTERACTIVE", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "1")
    passed = environment(_NOT_OURS)
    assert {name for name in passed if name.startswith(("SLURM_", "SCANCEL_"))} == {"SLURM_CONF"}
    assert "SBATCH_ACCOUNT" in passed


def test_what_hosts_wrote_goes_when_it_is_old_and_its_launch_over(tmp_path: Path) -> None:
    for name, file in (("old", "0.log"), ("pending", "key.json"), ("new", "0.log")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("said")
        if name != "new":
            for path in (tmp_path / name / file, tmp_path / name):
                os.utime(path, (1, 1))
    let_old_ones_go(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "pending"]


def test_an_engines_words_are_one_line() -> None:
    said = "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed\n"
    assert own_words(said, "sbatch") == "invalid partition specified: nope; Batch job submission failed"
