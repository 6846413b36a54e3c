"""What a real run leaves: the loss of the global model, curves that outlive a killed coordinator, and a report."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from notebook_cluster.client import Cluster, read_last_run
from notebook_cluster.coordinator.cluster_view import VIEW_PERIOD
from notebook_cluster.journal.kept_runs import LastRun
from notebook_cluster.journal.store import CURVES_FILE, JOURNAL_FILE
from notebook_cluster.protocol.state import ClusterView, RunHistory, Series
from notebook_cluster.widgets.report import render_report
from tests.cluster import Watcher, kill, run, running_cluster
from tests.conftest import shared_folders, wait_until
from tests.test_report import Page

NODES = ("local", "local-2")
GLOBAL = ("", "model", "loss")
SETUP = """
import os, sys, time, torch
torch.set_num_threads(1)

def is_enough(file):
    # All nodes measure the same round last: the file names one that none has reached.
    return os.path.exists(file) and sync.round >= int(open(file).read() or sys.maxsize)

def train(steps, until=""):
    global sync
    model = torch.nn.Linear(4, 1)
    sync = nc.DiLoCo(model, every=2)
    step = 0
    while step < steps or (until and not is_enough(until)):
        with torch.no_grad():
            model.weight -= 0.01 * (rank + 1)
        step += 1
        if sync.step(loss=10.0 - step, samples=4):
            measure(100.0)
            measured = sync.round
        if step > steps:
            time.sleep(0.02)
    sync.finish()
    print("measured", measured)

def measure(base):
    # Rank 1 sees it 2 higher: the point of a round is the mean.
    with sync.global_model():
        nc.report(loss=torch.tensor(base - sync.round + 2.0 * rank), accuracy=0.5)
"""


class Seen(NamedTuple):
    """What a view saw at one moment."""

    state: ClusterView
    series: dict[tuple[str, str, str], Series]
    history: RunHistory


def look(cluster: Cluster) -> Seen:
    return Seen(cluster.state(), by_name(cluster.series()), cluster.history())


def by_name(series: list[Series]) -> dict[tuple[str, str, str], Series]:
    """The curves, with the runs of a job one after the other."""
    found: dict[tuple[str, str, str], Series] = {}
    for one in sorted(series, key=lambda one: one.run):
        key = one.node, one.job, one.name
        if key not in found:
            found[key] = one
        else:
            before = found[key]
            found[key] = structs.replace(
                before, step=before.step + one.step, time=before.time + one.time, value=before.value + one.value
            )
    return found


def steps_of(cluster: Cluster, node: str) -> int:
    """How many points the loss curve of ``node`` has."""
    return next((len(one.step) for one in cluster.series() if (one.node, one.name) == (node, "loss")), 0)


class Kept(NamedTuple):
    """One run: trained, its coordinator killed in the middle of a second training cell, started again, stopped."""

    trained: Seen
    killed: Seen
    back: Seen
    end: Seen
    folder: Path
    stopped: LastRun
    printed: str
    page: str


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with shared_folders() as root, pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield live_through(root)


def live_through(root: Path) -> Kept:
    first = Cluster.start("kept", local=2)
    run(first, SETUP)
    run(first, "train(6)")
    run(first, "measure(50.0)")
    wait_until(lambda: (row := first.state().jobs) and row[0].loss == 48.0, 60, "the loss of the last measurement")
    wait_until(lambda: all(steps_of(first, name) == 6 for name in NODES), 60, "their losses")
    trained = look(first)
    watcher = Watcher(first.execute("train(4, 'enough')"))
    wait_until(lambda: (first.state().jobs[0].loss_round or 0) >= 6, 60, "three more rounds")
    killed = look(first)
    # What is older than a moment is on disk.
    wait_until(lambda: first.state().now > killed.state.now + VIEW_PERIOD + 0.5, 60, "a moment more")
    kill(first.connection.file.pid)
    first.close()
    with running_cluster("kept", local=2) as cluster:
        wait_until(lambda: cluster.state().jobs and not cluster.state().jobs[0].waiting_for, 60, "the nodes")
        back = look(cluster)
        (root / "enough").write_text(str(cluster.state().jobs[0].round + 40))
        again = Watcher(cluster.watch(watcher.stream.cell))
        assert again.wait_end().status == "ok"
        last = 101.0 - int(again.text("local").split("measured ")[1].split()[0])
        wait_until(lambda: by_name(cluster.series())[GLOBAL].value[-1] == last, 60, "what was measured last")
        cluster.checkpoint("last")
        end = look(cluster)
        folder = Path(cluster.connection.file.run_log).parent
        cluster.stop()
    command = [str(Path(sys.executable).with_name("notebook-cluster")), "report", "kept", "kept.html"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return Kept(trained, killed, back, end, folder, read_last_run("kept"), printed, (root / "kept.html").read_text())


def test_what_is_reported_inside_global_model_is_the_curve_of_the_job(kept: Kept) -> None:
    curve = kept.trained.series[GLOBAL]
    assert curve.value == [100.0, 99.0, 98.0, 48.0]
    assert curve.step == [2, 4, 6, 6]
    assert curve.time == sorted(curve.time)
    assert kept.trained.series["", "model", "accuracy"].value == [0.5] * 4
    (job,) = kept.trained.state.jobs
    assert (job.loss, job.loss_round) == (48.0, 3)


def test_the_loss_of_the_global_model_is_not_in_the_curve_of_a_node(kept: Kept) -> None:
    for name in NODES:
        assert kept.trained.series[name, "model", "loss"].value == [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]
    assert [node.scalars for node in kept.trained.state.nodes] == [{"accuracy": 0.5}] * 2


def test_curves_outlive_a_coordinator_that_was_killed(kept: Kept) -> None:
    for key in (GLOBAL, ("local", "model", "loss"), ("local-2", "model", "loss"), ("local", "", "memory")):
        before, after = kept.killed.series[key], kept.back.series[key]
        count = len(before.value)
        assert count > 0
        assert after.value[:count] == before.value[:count]
        assert after.time[:count] == before.time[:count]


def test_nothing_is_twice_in_the_curves_of_a_restarted_coordinator(kept: Kept) -> None:
    for name in NODES:
        curve = kept.end.series[name, "model", "loss"]
        second = curve.step[6:]
        assert second[0] == 1
        assert second == sorted(set(second))
    rounds = kept.end.series[GLOBAL].step[4:]
    assert rounds == sorted(set(rounds))
    (job,) = kept.end.state.jobs
    assert job.loss_round is not None
    assert job.loss_round >= job.round - 1  # the leftover step makes a last round that nobody measured
    assert job.loss == 101.0 - job.loss_round


def test_rounds_waits_and_events_outlive_it_too(kept: Kept) -> None:
    before = [(one.round, one.waits) for one in kept.killed.history.rounds]
    assert [(one.round, one.waits) for one in kept.back.history.rounds][: len(before)] == before
    assert all(len(waits) == 2 for _, waits in before)
    texts = [event.text for event in kept.back.state.events]
    assert any(text.startswith("the coordinator was restarted") for text in texts)
    assert "local is up on local (cpu)" in texts


def test_after_the_stop_the_run_is_still_there_for_a_report(kept: Kept) -> None:
    stopped = kept.stopped
    assert stopped.ended.endswith(": stopped")
    assert [node.name for node in stopped.state().nodes] == ["local", "local-2"]
    assert {(one.node, one.job, one.name) for one in stopped.series()} == kept.end.series.keys()
    assert by_name(stopped.series())[GLOBAL].value == kept.end.series[GLOBAL].value
    assert [one.round for one in stopped.history().rounds] == [one.round for one in kept.end.history.rounds]
    assert [one.name for one in stopped.history().checkpoints] == ["last"]
    assert [one.peer for one in stopped.history().peers] == ["local"]
    assert stopped.history().cells_seen == 4
    assert stopped.state().invitation == ""


def test_the_terminal_writes_the_report_of_a_run_that_is_over(kept: Kept) -> None:
    assert kept.printed == "kept.html\n"
    page = Page(kept.page)
    text = "\n".join(page.texts)
    for part in ("kept", ": stopped", "local-2", "global model", "train(6)", "last", "Global loss"):
        assert part in text, part
    assert kept.page.count("<svg") >= 4
    stopped = kept.stopped
    again = render_report(stopped.state(), stopped.series(), stopped.history(), ended=stopped.ended)
    assert again == kept.page


def test_what_is_kept_is_private(kept: Kept) -> None:
    for name in (JOURNAL_FILE, CURVES_FILE):
        assert os.stat(kept.folder / name).st_mode & 0o077 == 0, name
