"""TensorBoard's event files of a run, read back with TensorBoard's own reader."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.security import cluster_directory
from tests.conftest import wait_until
from tests.practice.measured_runs import AGAIN, LATER, POINTS, TRAIN, alike
from tests.practice.recipes import recipe
from tests.shared_notebook import SharedNotebook, shared_notebook

pytest.importorskip("torch")
Scalars = dict[str, dict[str, list[tuple[int, float]]]]


def scalars(folder: Path) -> Scalars:
    """What ``tensorboard --logdir folder`` shows: run -> tag -> (step, value)."""
    found = EventMultiplexer().AddRunsFromDirectory(str(folder))
    found.Reload()
    return {
        run: {tag: [(one.step, one.value) for one in found.Scalars(run, tag)] for tag in tags["scalars"]}
        for run, tags in found.Runs().items()
    }


def agrees(found: Scalars, wanted: dict[tuple[str, int, str, str], list[float]]) -> bool:
    """Every curve is there, whole, under the name of its run and node, and no other of a job."""
    for (job, run, node, metric), values in wanted.items():
        place = f"{job if run == 1 else f'{job} run {run}'}/{node or 'global model'}"
        points = found.get(place, {}).get(metric, [])
        if not alike([round(value, 4) for _, value in points], values):
            return False
    return len([1 for run, tags in found.items() if not run.startswith("nc.report/") for _ in tags]) == len(wanted)


@pytest.fixture(scope="module")
def notebook() -> Iterator[SharedNotebook]:
    with shared_notebook("--local 2") as shared:
        yield shared


def test_the_recipe_follows_the_run_in_its_folder(notebook: SharedNotebook) -> None:
    said = notebook.works(recipe("TensorBoard"))
    folder = cluster_directory("lesson") / "tensorboard"
    assert re.search(rf"tensorboard --logdir '?{re.escape(str(folder))}'?\n", said)
    notebook.works(TRAIN)
    wait_until(lambda: agrees(scalars(folder), POINTS), 60, lambda: f"all points: {scalars(folder)}")
    shown = scalars(folder)
    assert [step for step, _ in shown["model/global model"]["loss"]] == [2, 4, 6]
    assert [step for step, _ in shown["model/local-2"]["loss"]] == [1, 2, 3, 4, 5, 6]
    assert shown["nc.report/local"]["memory"]


def test_a_tracker_that_begins_again_writes_each_point_once(notebook: SharedNotebook) -> None:
    folder = cluster_directory("lesson") / "tensorboard"
    assert "not logging now" in notebook.works("%cluster track off")
    notebook.works(AGAIN)
    notebook.works("%cluster track tensorboard")
    wanted = {**POINTS, **LATER}
    wait_until(lambda: agrees(scalars(folder), wanted), 60, lambda: f"all points: {scalars(folder)}")


def test_wall_times_are_those_of_the_measurement(notebook: SharedNotebook) -> None:
    folder = cluster_directory("lesson") / "tensorboard"
    (reader,) = [EventAccumulator(str(folder / "model" / "local"))]
    reader.Reload()
    with notebook.attach() as cluster:
        wanted = [
            list(one.time) for one in cluster.series() if (one.job, one.node, one.name) == ("model", "local", "loss")
        ]
    assert [one.wall_time for one in reader.Scalars("loss")] == wanted[0]


def test_a_folder_gets_the_same_once(notebook: SharedNotebook) -> None:
    said = notebook.works("%cluster export 'event files/'")
    folder = notebook.work / "event files"
    assert f"written to {folder}\n" in said
    assert f"tensorboard --logdir '{folder}'" in said
    assert agrees(scalars(folder), {**POINTS, **LATER})
    assert "holds event files already: --overwrite" in notebook.fails("%cluster export 'event files'")
    notebook.works("%cluster export 'event files' --overwrite --job other")
    assert agrees(scalars(folder), {key: value for key, value in LATER.items() if key[0] == "other"})
    (folder / "mine.txt").write_text("mine")
    assert "holds other files (mine.txt)" in notebook.fails("%cluster export 'event files' --overwrite")
    assert (folder / "mine.txt").read_text() == "mine"
    assert [path.name for path in notebook.work.iterdir() if path.name.startswith(".event")] == []


def test_without_tensorboard_it_says_what_to_install(
    notebook: SharedNotebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with notebook.attach() as cluster, pytest.raises(ClusterError, match="pip install tensorboard"):
        cluster.export(f"{tmp_path}/new/")
    assert list(tmp_path.iterdir()) == []


def test_the_files_go_with_the_run_when_the_next_one_begins(notebook: SharedNotebook) -> None:
    folder = cluster_directory("lesson")
    notebook.works("%cluster stop")
    notebook.works("%cluster start --local 1 --no-panel --fresh")
    assert not (folder / "tensorboard").exists()
    (kept,) = folder.glob("runs/*/tensorboard")
    assert agrees(scalars(kept), {**POINTS, **LATER})
    assert "nothing logs this run" in notebook.works("%cluster track")
    assert len(Cluster.runs()) >= 2
