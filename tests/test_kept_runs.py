"""Runs that are over stay, are listed, and are pandas frames; and where a journal lies on a network's disk."""

import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import msgspec
import pytest

from notebook_cluster.client import Cluster, ClusterError, Frames
from notebook_cluster.client import past as past_runs
from notebook_cluster.client.past import Run, run_name, runs_table
from notebook_cluster.journal import store
from notebook_cluster.journal.events import DoorOpened
from notebook_cluster.journal.kept_runs import KeptRun, LastRun, kept_runs, let_old_runs_go, set_aside
from notebook_cluster.journal.log import Journal
from notebook_cluster.journal.store import JOURNAL_FILE, file_system, is_remote, journal_path, place_of
from notebook_cluster.protocol.state import JobView, RunHistory, Series
from notebook_cluster.widgets import compare_runs
from tests.cluster import read_events, run, running_cluster
from tests.command import run_command
from tests.conftest import shared_folders, wait_until
from tests.fake_cluster import cluster_view
from tests.in_loop import in_loop
from tests.test_run_kept import SETUP, steps_of
from tests.test_widgets import ATTACK

# ---- a real run --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def past() -> Iterator[tuple[Frames, Frames, list[Run], str]]:
    """Frames of a run while it was there, of its job alone, the runs after the next one began, and what the terminal
    said of them."""
    with shared_folders() as root, pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        with running_cluster("lesson", local=2) as cluster:
            run(cluster, SETUP)
            run(cluster, "train(6)")
            wait_until(lambda: all(steps_of(cluster, name) == 6 for name in ("local", "local-2")), 60, "their losses")
            cluster.checkpoint("kept")
            frames, model = cluster.frames(), cluster.frames("model")
            with pytest.raises(ClusterError, match="no job 'other' has measured anything in this run: model"):
                cluster.frames("other")
            patch.setitem(sys.modules, "pandas", None)
            with pytest.raises(ClusterError, match="frames need pandas, which is not installed here"):
                cluster.frames()
            patch.delitem(sys.modules, "pandas")
            cluster.stop()
        with running_cluster("lesson", local=1) as cluster:
            wait_until(lambda: len(Cluster.runs()) == 2, 60, lambda: f"two runs: {Cluster.runs()}")
            assert "98.00" in run_command("compare", run_name(Cluster.runs()[1])).stdout
            yield frames, model, Cluster.runs(), run_command("runs").stdout


def test_the_rounds_of_a_run_are_a_frame(past: tuple[Frames, Frames, list[Run], str]) -> None:
    rounds = past[0].rounds
    assert list(rounds["round"]) == [1, 2, 3]
    assert set(rounds["job"]) == {"model"}
    assert rounds["members"][0] == ["local", "local-2"]
    assert (rounds["wait"] >= 0).all()
    assert set(rounds["waited_for"]) <= {"local", "local-2"}
    assert rounds["time"].is_monotonic_increasing
    assert list(past[0].checkpoints["name"]) == ["kept"]


def test_the_curves_of_a_run_are_a_frame(past: tuple[Frames, Frames, list[Run], str]) -> None:
    every, model, _, _ = past
    loss = model.curves.query("name == 'loss' and node == 'local'")
    assert list(loss["value"]) == [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]
    assert list(loss["step"]) == [1, 2, 3, 4, 5, 6]
    assert list(model.curves.query("name == 'loss' and node == ''")["value"]) == [100.0, 99.0, 98.0]
    assert set(model.curves["job"]) == {"model"}
    assert "memory" in set(every.curves["name"])


def test_the_run_before_is_listed_with_its_rounds_and_its_last_loss(
    past: tuple[Frames, Frames, list[Run], str],
) -> None:
    newest, before = past[2]
    assert (newest.cluster, newest.job, newest.rounds, newest.loss) == ("lesson", "", 0, None)
    assert (before.job, before.strategy, before.nodes, before.rounds, before.loss) == ("model", "DiLoCo", 2, 3, 98.0)
    assert before.ended == "stopped"
    assert before.frames().rounds.equals(past[1].rounds)
    assert runs_table([before])[1][0][2:] == ("model", "DiLoCo", "2", "3", "98", "stopped")
    for word in ("lesson", "DiLoCo", "98", "stopped"):
        assert word in past[3]


def test_each_job_of_a_run_has_its_own_last_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where only nodes measured: their cards show that of the job that was trained last."""
    jobs = [
        JobView(name=name, strategy="DiLoCo", round=3, attempt=1, phase="", members=[], loss=loss)
        for name, loss in (("alone", None), ("two", None), ("all", 0.25), ("none", None))
    ]
    told = [
        ("alone", "a", 1, [3.0, 1.0]),
        ("alone", "b", 1, [3.0, 2.0]),
        ("two", "a", 1, [9.0]),
        ("two", "a", 2, [0.5]),
    ]
    series = [
        Series(
            node=node, name="loss", job=job, run=number, step=[1] * len(values), time=[1.0] * len(values), value=values
        )
        for job, node, number, values in told
    ]
    kept_run = KeptRun("lesson", tmp_path, cluster_view(jobs=jobs), "stopped")
    monkeypatch.setattr(past_runs, "kept_runs", lambda folder: [kept_run])
    monkeypatch.setattr(past_runs, "read_run", lambda folder: SimpleNamespace(series=lambda: series))
    assert {row.job: row.loss for row in Cluster.runs()} == {"alone": 1.5, "two": 0.5, "all": 0.25, "none": None}


# ---- laid over each other ----------------------------------------------------------------------------------------


def kept(codec: str, values: list[float], node: str = "", metric: str = "loss") -> LastRun:
    (job,) = cluster_view().jobs
    job = msgspec.structs.replace(job, settings={"strategy": "DiLoCo", "codec": codec, "every": "20 steps"})
    steps = list(range(1, len(values) + 1))
    of = "model" if not node or metric == "loss" else ""
    curve = Series(node=node, job=of, name=metric, step=steps, time=[float(step) for step in steps], value=values)
    past = RunHistory(rounds=[], rounds_seen=0, checkpoints=[], cells=[], cells_seen=0, peers=[])
    return LastRun(view=cluster_view(jobs=[job]), curves=[curve], past=past, ended="stopped")


def test_runs_are_laid_over_each_other_and_what_differs_stands_out() -> None:
    runs = [("a@1", kept("int8", [3.0, 1.0, 2.0])), ("b@2", kept("float32", [3.0, math.nan]))]
    text, markup = compare_runs(runs)
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == ["loss", "a@1", "b@2"]
    assert ["*", "codec", "int8", "float32"] in rows
    assert ["every", "20", "steps", "20", "steps"] in rows
    assert ["*", "lowest", "loss", "1.0000", "3.0000"] in rows
    assert "<td class=nbc-odd>float32</td>" in markup
    assert "<td>20 steps</td>" in markup
    assert markup.count('stroke-width="2.6"') == 2
    assert ["trained", "for", "2.0", "s", "1.0", "s"] in [row[1:] if row[0] == "*" else row for row in rows]
    table = unquote(re.findall('href="data:text/csv;charset=utf-8,([^"]*)"', markup)[0])
    assert table.splitlines() == ["run,step,value", "a@1,1,3.0", "a@1,2,1.0", "a@1,3,2.0", "b@2,1,3.0", "b@2,2,nan"]
    assert len(re.findall('download="runs-loss.svg"', markup)) == 1


def test_runs_are_compared_by_one_job_on_a_logarithmic_axis() -> None:
    one, other = kept("int8", [0.1, 10.0]), kept("int8", [0.0, -1.0])
    critic = msgspec.structs.replace(one.view.jobs[0], name="critic")
    both = msgspec.structs.replace(one, view=msgspec.structs.replace(one.view, jobs=[*one.view.jobs, critic]))
    assert compare_runs([("a@1", both)]).text.splitlines()[0].split() == ["loss", "a@1", "model", "a@1", "critic"]
    text, markup = compare_runs([("a@1", both), ("b@2", one)], job="model", log=True)
    assert text.splitlines()[0].split() == ["loss", "a@1", "b@2"]
    assert re.findall(r">(0\.1|1|10)</text>", markup)[:3] == ["0.1", "1", "10"]
    assert "No value is above 0" in compare_runs([("b@2", other)], log=True).html
    with pytest.raises(ClusterError, match="run 'a@1' is named twice: name each run once"):
        compare_runs([("a@1", both), ("a@1", both)])
    with pytest.raises(ClusterError, match=r"none of these runs has a job 'x': there is model, critic \(--job NAME\)"):
        compare_runs([("a@1", both)], job="x")


def test_without_a_global_model_runs_are_compared_by_their_nodes() -> None:
    text, _ = compare_runs([("a@1", kept("int8", [0.5], "desk", "accuracy"))], "accuracy")
    assert "mean of the nodes" in text
    hostile = compare_runs([(ATTACK, kept(ATTACK, [0.5], ATTACK, ATTACK))], ATTACK)
    assert not re.search("<img|<script", hostile.html)
    with pytest.raises(ClusterError, match=r"none of these runs has measured 'x': there is loss \(--metric NAME\)"):
        compare_runs([("a@1", kept("int8", [0.5]))], "x")


def test_a_run_that_was_not_kept_is_named(jupyter_dirs: Path) -> None:
    done = run_command("compare", "none")
    assert (done.returncode, done.stderr) == (
        2, "notebook-cluster: no run of a cluster 'none' was kept here: there is none of any\n",
    )  # fmt: skip


# ---- how many are kept -------------------------------------------------------------------------------------------


def runs_of(clusters: Path, number: int) -> list[Path]:
    """Folders of runs, 100 kB each, of two clusters in turn."""
    made = []
    for index in range(number):
        folder = clusters / ("a", "b")[index % 2] / "runs" / f"20260101-0000{index:02d}"
        folder.mkdir(parents=True)
        (folder / JOURNAL_FILE).write_bytes(bytes(100_000))
        made.append(folder)
    return made


@pytest.mark.parametrize(
    ("runs", "megabytes", "left"), [("", "", 8), ("3", "", 3), ("0", "", 0), ("", "0", 0), ("100", "100", 8)]
)
def test_the_newest_runs_of_all_clusters_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: str, megabytes: str, left: int
) -> None:
    made = runs_of(tmp_path, 8)
    monkeypatch.setenv("NOTEBOOK_CLUSTER_KEEP_RUNS", runs)
    monkeypatch.setenv("NOTEBOOK_CLUSTER_KEEP_MB", megabytes)
    let_old_runs_go(tmp_path)
    assert [folder for folder in made if folder.exists()] == made[8 - left :]


def test_a_number_of_runs_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTEBOOK_CLUSTER_KEEP_RUNS", "many")
    with pytest.raises(ValueError, match="NOTEBOOK_CLUSTER_KEEP_RUNS=many: use a whole number, 0 or more"):
        let_old_runs_go(tmp_path)


def test_nothing_is_set_aside_where_nothing_ran(tmp_path: Path) -> None:
    assert set_aside(tmp_path) is None
    assert kept_runs(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


# ---- where a journal lies ----------------------------------------------------------------------------------------


@pytest.fixture
def network_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that another machine serves."""
    folder = tmp_path / "home" / "clusters" / "lesson"
    folder.mkdir(parents=True)
    (tmp_path / "var").mkdir()
    monkeypatch.setattr(store, "_LOCAL_ROOT", tmp_path / "var")
    monkeypatch.setattr(
        store, "file_system", lambda path: "nfs4" if Path(path).is_relative_to(tmp_path / "home") else "ext4"
    )
    return folder


@in_loop
async def test_on_a_network_disk_the_journal_is_on_this_machine_and_the_folder_gets_a_copy(network_disk: Path) -> None:
    opened = DoorOpened(reception=1, pairing=2)
    journal = Journal(network_disk)
    journal.event(opened, durable=True)
    assert journal.flush(10) is None
    here = place_of(network_disk)
    assert here.parent.name == f"notebook-cluster-{os.getuid()}"
    assert here.stat().st_mode & 0o777 == here.parent.stat().st_mode & 0o777 == 0o700
    assert journal_path(network_disk).parent == here
    assert journal.close()
    copy = network_disk / JOURNAL_FILE
    assert read_events(copy) == read_events(here / JOURNAL_FILE) == [opened]
    assert copy.stat().st_mode & 0o777 == 0o600
    (here / JOURNAL_FILE).unlink()  # another machine, or this one without its /var/tmp
    assert read_events(journal_path(network_disk)) == [opened]
    journal = Journal(network_disk)
    journal.event(opened, durable=True)
    assert journal.close()
    assert read_events(copy) == [opened, opened]
    kept = set_aside(network_disk)
    assert kept is not None
    assert kept.parent == network_disk / "runs"
    assert read_events(kept / JOURNAL_FILE) == [opened, opened]
    assert not list(here.iterdir())


@in_loop
async def test_somebody_elses_folder_is_not_used(network_disk: Path) -> None:
    place_of(network_disk).parent.mkdir(mode=0o777)
    place_of(network_disk).parent.chmod(0o777)
    with pytest.raises(OSError, match="is not a private folder of this user: remove it"):
        Journal(network_disk)


def test_the_file_system_of_a_folder_is_that_of_the_mount_it_is_on() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert not is_remote(Path("/proc"))
