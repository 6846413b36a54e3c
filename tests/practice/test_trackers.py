"""Weights & Biases and MLflow: one run for the whole cluster, each point once, whatever becomes of notebook, tracker
and cluster. Read back with the libraries themselves."""

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from notebook_cluster.journal.curves import read_series
from notebook_cluster.journal.store import curves_path
from notebook_cluster.protocol.state import Series
from notebook_cluster.security import cluster_directory
from notebook_cluster.tracking.points import new_points, note_logged
from notebook_cluster.tracking.remembered import Target, read_remembered
from notebook_cluster.tracking.trackers import one_line, without_key
from tests.conftest import wait_until
from tests.practice.measured_runs import AGAIN, LATER, POINTS, TRAIN, alike
from tests.practice.recipes import recipe
from tests.shared_notebook import SharedNotebook, shared_notebook

pytest.importorskip("torch")
pytest.importorskip("wandb")
pytest.importorskip("mlflow")
Logged = dict[str, list[tuple[int, float]]]


def wandb_records(work: Path) -> list[Any]:
    """All records of the offline runs below ``work``, the oldest run first: wandb's messages, from files in the log
    format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for file in sorted(work.glob("wandb/offline-run-*/*.wandb")):
        data, at, whole = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, size, kind = struct.unpack("<IHB", data[at : at + 7])
            whole += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):
                found.append(Record.FromString(whole))
                whole = b""
    return found


def wandb_points(work: Path) -> Logged:
    """Metric -> (our step, value), in order of wandb's own steps, which must only ever increase."""
    found: Logged = defaultdict(list)
    steps = []
    for record in wandb_records(work):
        if record.WhichOneof("record_type") != "history":
            continue
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        steps.append(row["_step"])
        for key, value in row.items():
            if not key.startswith("_") and key != "step":
                found[key].append((row["step"], float(value)))
    assert steps == sorted(set(steps))
    return dict(found)


def wandb_config(work: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in wandb_records(work):
        kind = record.WhichOneof("record_type")
        updates = record.run.config.update if kind == "run" else record.config.update if kind == "config" else []
        found |= {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in updates}
    return found


def as_logged(wanted: dict[tuple[str, int, str, str], list[float]]) -> dict[str, list[float]]:
    return {
        f"{job if run == 1 else f'{job} run {run}'}/{node or 'global model'}/{metric}": values
        for (job, run, node, metric), values in wanted.items()
    }


def agrees(found: Logged, wanted: dict[tuple[str, int, str, str], list[float]]) -> bool:
    """Each point of each curve once, and nothing else of a job."""
    expected = as_logged(wanted)
    of_jobs = {key: values for key, values in found.items() if not key.startswith("nc.report/")}
    return of_jobs.keys() == expected.keys() and all(
        alike([value for _, value in of_jobs[key]], values) for key, values in expected.items()
    )


def handed_over(tracker: str) -> int:
    """Points that the tracker was given so far."""
    there = read_remembered(cluster_directory("lesson"), tracker)
    return 0 if there is None else there.current.points + there.waiting


def counted(wanted: dict[tuple[str, int, str, str], list[float]]) -> int:
    return sum(map(len, wanted.values()))


@pytest.fixture(scope="module")
def notebook() -> Iterator[SharedNotebook]:
    with shared_notebook("--local 2") as shared:
        database = f"sqlite:///{shared.work}/mlflow.db"
        shared.works(f"import os; os.environ |= dict(WANDB_MODE='offline', MLFLOW_TRACKING_URI={database!r})")
        yield shared


def client(notebook: SharedNotebook) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{notebook.work}/mlflow.db")


def mlflow_runs(notebook: SharedNotebook, project: str = "lesson") -> list[Any]:
    found = client(notebook).get_experiment_by_name(project)
    return [] if found is None else list(client(notebook).search_runs([found.experiment_id]))


def mlflow_points(notebook: SharedNotebook) -> Logged:
    (run,) = mlflow_runs(notebook)
    return {
        key: [(one.step, one.value) for one in client(notebook).get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }


def test_wandb_gets_one_run_for_the_whole_cluster(notebook: SharedNotebook) -> None:
    said = notebook.works(recipe("Weights & Biases, MLflow"))
    assert "Weights & Biases: 0 points logged (project 'lesson', " in said
    notebook.works(TRAIN)
    wait_until(lambda: handed_over("wandb") >= counted(POINTS), 60, "all points, while it runs")
    assert "points logged" in notebook.works("%cluster track off")  # wandb writes its file every 15 seconds, and now
    found = wandb_points(notebook.work)
    assert agrees(found, POINTS), found
    assert [step for step, _ in found["model/global model/loss"]] == [2, 4, 6]
    assert [step for step, _ in found["model/local-2/loss"]] == [1, 2, 3, 4, 5, 6]
    assert len(list(notebook.work.glob("wandb/offline-run-*"))) == 1
    assert not any("memory" in key for key in found)


def test_wandb_is_told_what_the_run_was_trained_with(notebook: SharedNotebook) -> None:
    config = wandb_config(notebook.work)
    assert config["nodes"] == "local, local-2"
    assert config["devices"].startswith("local: ")
    assert config["world_size"] == "2"
    job = config["model"]
    assert (job["strategy"], job["codec"], job["every"], job["parameters"]) == ("DiLoCo", "int8", "2 steps", "20")


def test_nothing_is_logged_twice_when_the_tracker_was_killed_and_begins_again(notebook: SharedNotebook) -> None:
    begin = recipe("Weights & Biases, MLflow")
    notebook.works(begin)
    before = handed_over("wandb")
    notebook.works(AGAIN)
    wait_until(lambda: handed_over("wandb") >= before + counted(LATER) - 3, 60, "about all points")
    there = read_remembered(cluster_directory("lesson"), "wandb")
    assert there is not None
    psutil.Process(there.pid).kill()
    wait_until(lambda: "its process is gone" in notebook.works("%cluster track"), 30, "the end of the tracker")
    notebook.works(begin)
    notebook.works("%cluster track off")
    wanted = {**POINTS, **LATER}
    wait_until(lambda: agrees(wandb_points(notebook.work), wanted), 30, lambda: f"all: {wandb_points(notebook.work)}")
    runs = {record.run.run_id for record in wandb_records(notebook.work) if record.WhichOneof("record_type") == "run"}
    assert runs == {there.current.run_id}


def test_mlflow_gets_one_run_with_what_was_before_and_what_comes(notebook: SharedNotebook) -> None:
    said = notebook.works("%cluster track mlflow")
    assert f" points logged (project 'lesson', sqlite:///{notebook.work}/mlflow.db), and what comes" in said
    found = mlflow_points(notebook)
    largest = 1.7976931348623157e308  # what MLflow makes of infinity
    finite = {key: [(s, float("inf") if v == largest else v) for s, v in one] for key, one in found.items()}
    assert agrees(finite, {**POINTS, **LATER})
    (run,) = mlflow_runs(notebook)
    assert (run.data.params["model.codec"], run.data.params["model.every"]) == ("int8", "2 steps")
    assert run.data.params["nodes"] == "local, local-2"
    assert run.info.status == "RUNNING"


def test_asked_again_it_says_that_it_goes_on_and_another_project_is_refused(notebook: SharedNotebook) -> None:
    assert "goes on: MLflow: " in notebook.works("%cluster track mlflow")
    assert "MLflow logs this run to project 'lesson' already: %cluster track off first" in notebook.fails(
        "%cluster track mlflow --project other"
    )
    assert "there are wandb, mlflow, tensorboard, and off to end it (did you mean 'wandb'?)" in notebook.fails(
        "%cluster track wandbb"
    )
    assert "--project is for wandb and mlflow" in notebook.fails("%cluster track tensorboard --project x")


def test_a_server_that_is_away_is_one_line_and_what_was_missed_is_logged_later(notebook: SharedNotebook) -> None:
    notebook.works("%cluster track off")
    database, away = notebook.work / "mlflow.db", notebook.work / "away.db"
    before = sum(map(len, mlflow_points(notebook).values()))
    notebook.works("%cluster track mlflow")
    database.rename(away)
    database.mkdir()  # as a server that answers with an error
    said = notebook.works("%%on_all\ntrain('late', losses=[0.1, 0.2])")
    said += _until(notebook, "MLflow does not answer: ")
    assert said.count("MLflow does not answer: ") == 1
    assert "tried again until it does (training goes on; the points stay in the journal)" in said
    assert "tried again" in notebook.works("%cluster track")
    database.rmdir()
    away.rename(database)
    wait_until(lambda: sum(map(len, mlflow_points(notebook).values())) >= before + 6, 90, lambda: "six more points")
    assert [value for _, value in mlflow_points(notebook)["late/local/loss"]] == [0.1, 0.2]
    assert len(mlflow_runs(notebook)) == 1


def _until(notebook: SharedNotebook, text: str) -> str:
    shown = ""

    def look() -> bool:
        nonlocal shown
        shown += notebook.works("pass")
        return text in shown

    wait_until(look, 60, lambda: f"{text!r} below a cell: {shown}")
    return shown + "".join(notebook.works("pass") for _ in range(3))


def test_without_a_login_it_is_refused_in_one_line(notebook: SharedNotebook, tmp_path: Path) -> None:
    notebook.works("%cluster track off")
    secret = "0123456789abcdef" * 2 + "01234567"
    notebook.works(
        f"saved = dict(os.environ); os.environ |= dict(WANDB_MODE='online', HOME={str(tmp_path)!r}, "
        f"NETRC={str(tmp_path / 'netrc')!r}, WANDB_BASE_URL='http://127.0.0.1:9', MY_SECRET={secret!r})"
    )
    try:
        said = notebook.fails("%cluster track wandb --project private")
    finally:
        notebook.works("os.environ.clear(); os.environ |= saved")
    assert said.startswith("ClusterError: Weights & Biases does not let us in (")
    assert "wandb.login(), or set WANDB_API_KEY or WANDB_MODE=offline" in said
    assert notebook.works("%cluster track").count("stopped after 0 points") == 1
    for file in cluster_directory("lesson").iterdir():
        if file.is_file():
            assert secret.encode() not in file.read_bytes(), file


def test_the_last_points_come_also_when_the_cluster_ends_and_the_run_of_before_can_be_logged(
    notebook: SharedNotebook,
) -> None:
    notebook.works("%cluster track mlflow")
    notebook.works("%%on_all\ntrain('last', losses=[0.3, 0.4])")

    def is_written() -> bool:  # what a node measured last comes a moment after its cell has ended
        found = [one for one in read_series(curves_path(cluster_directory("lesson"))) if one.job == "last"]
        return {one.node for one in found if len(one.step) == 2} >= {"local", "local-2"}

    wait_until(is_written, 60, "the last points in the journal")
    notebook.works("%cluster stop")

    def is_over() -> bool:  # the run of before was over too
        come = "last/local/loss" in mlflow_points(notebook)
        return come and mlflow_runs(notebook)[0].info.status == "FINISHED"

    wait_until(is_over, 60, "the end of the run in MLflow")
    assert [value for _, value in mlflow_points(notebook)["last/local/loss"]] == [0.3, 0.4]
    notebook.works("%cluster start --local 1 --no-panel --fresh")
    before = len(wandb_points(notebook.work)["model/local/loss"])
    (kept,) = cluster_directory("lesson").glob("runs/*")
    start = notebook.value("__import__('notebook_cluster.client').client.Cluster.runs()[-1].started")
    name = notebook.value(f"__import__('time').strftime('%Y-%m-%dT%H:%M:%S', __import__('time').localtime({start}))")
    said = notebook.works(f"%cluster track wandb --project lesson --run lesson@{name.strip(chr(39))}")
    assert "points logged" in said
    wait_until(lambda: "last/local/loss" in wandb_points(notebook.work), 60, "the rest in wandb")
    assert len(wandb_points(notebook.work)["model/local/loss"]) == before
    ended = lambda: "not logging now" in notebook.works(f"%cluster track --run lesson@{name.strip(chr(39))}")  # noqa: E731
    wait_until(ended, 60, "the end of the tracker")
    assert read_remembered(kept, "wandb") is not None


# ---- without a cluster -------------------------------------------------------------------------------------------


def losses(steps: list[int], times: list[float], run: int = 1001, node: str = "a") -> Series:
    return Series(node=node, name="loss", step=steps, time=times, value=[1.0] * len(steps), job="model", run=run)


def logged_steps(target: Target, *pieces: Series) -> list[int]:
    found = new_points(pieces, target, {}, memory=False)
    note_logged(target, found)
    return [point.step for point in found]


def test_a_file_that_was_thinned_and_written_anew_brings_no_point_twice() -> None:
    target = Target()
    assert logged_steps(target, losses([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])) == [1, 2, 3, 4]
    assert logged_steps(target, losses([1, 4], [1.0, 4.0]), losses([5], [5.0])) == [5]
    assert logged_steps(target, losses([1, 5, 6], [1.0, 5.0, 4.9999])) == [6]  # a clock that is known better
    assert logged_steps(target, losses([1, 6], [1.0, 4.9999])) == []


def test_a_node_that_was_restarted_begins_its_steps_again_and_is_logged() -> None:
    target = Target()
    logged_steps(target, losses([1, 2, 3], [1.0, 2.0, 3.0]))
    whole = losses([1, 2, 3, 1, 2], [1.0, 2.0, 3.0, 30.0, 31.0])
    assert logged_steps(target, whole) == [1, 2]
    assert logged_steps(target, whole) == []


def test_a_run_keeps_its_number_when_those_before_are_dropped() -> None:
    places: dict[str, list[int]] = {}
    first = new_points([losses([1], [1.0]), losses([1], [9.0], run=2001)], Target(), places, memory=False)
    assert [point.place[0] for point in first] == ["model", "model run 2"]
    later = new_points([losses([1, 2], [9.0, 10.0], run=2001)], Target(), places, memory=False)
    assert {point.place[0] for point in later} == {"model run 2"}


def test_no_password_is_shown() -> None:
    assert without_key("https://me:secret@host:5000/x") == "https://host:5000/x"
    assert without_key("sqlite:///mlflow.db") == "sqlite:///mlflow.db"
    assert "secret" not in one_line(OSError("no answer from https://me:secret@host/x\nmore"))
