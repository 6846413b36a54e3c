"""The curves of a run as a file: whole, self-explaining, and read back with what people read them with."""

import csv
import math
import re
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest

from notebook_cluster.client import Cluster, ClusterError, Run, export_run
from notebook_cluster.client.curve_rows import curve_rows, outside_name
from notebook_cluster.journal.curves import SeriesStore, pack, unpack
from notebook_cluster.protocol.state import RoundView, Series
from tests.command import run_command
from tests.conftest import wait_until
from tests.full_disk import small_disk
from tests.practice.measured_runs import AGAIN, LATER, POINTS, TRAIN, alike
from tests.practice.recipes import recipe
from tests.shared_notebook import SharedNotebook, shared_notebook

pytest.importorskip("torch")
Values = dict[tuple[str, int, str, str], list[float]]


def values_of(rows: list[dict[str, str]]) -> Values:
    """Of a CSV file: (job, run, node, metric) -> values in order, without those of no job."""
    found: Values = defaultdict(list)
    for row in rows:
        if row["job"]:
            found[row["job"], int(row["run"]), row["node"], row["metric"]].append(float(row["value"]))
    return dict(found)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def same(found: Values, wanted: Values) -> bool:
    return found.keys() == wanted.keys() and all(alike(found[key], wanted[key]) for key in wanted)


@pytest.fixture(scope="module")
def notebook() -> Iterator[SharedNotebook]:
    """Two nodes that have trained twice under one name, and once under another."""
    with shared_notebook("--local 2") as shared:
        shared.works(TRAIN)
        shared.works("%%on_all\nnc.report(step=7, seen=float(rank))")
        shared.works(AGAIN)
        with shared.attach() as cluster:
            wanted = sum(map(len, {**POINTS, **LATER}.values()))

            def measured() -> int:
                return sum(len(one.step) for one in cluster.series() if one.job)

            wait_until(lambda: measured() == wanted, 60, lambda: f"{wanted} points, there are {measured()}")
        yield shared


@pytest.fixture
def cluster(notebook: SharedNotebook) -> Iterator[Cluster]:
    with notebook.attach() as attached:
        yield attached


def test_the_csv_has_each_point_of_each_job_and_run_once(notebook: SharedNotebook) -> None:
    said = notebook.works("%cluster export 'my run.csv'")
    file = notebook.work / "my run.csv"
    rows = read_csv(file)
    assert same(values_of(rows), {**POINTS, **LATER})
    assert re.fullmatch(
        rf"cluster 'lesson': [\d,]+ rows of \d+ curves written to {re.escape(str(file))}\nstep is that of .*\n", said
    )
    assert f" {len(rows):,} rows" in said
    assert ",".join(rows[0]) == "cluster,started,job,run,cell,node,metric,step,round,time,utc,value"
    assert {row["cluster"] for row in rows} == {"lesson"}
    assert [path.name for path in notebook.work.iterdir() if path.name.startswith(".my")] == []


def test_each_row_says_which_step_round_and_time_it_is_of(notebook: SharedNotebook) -> None:
    def exported() -> list[dict[str, str]]:
        notebook.works("%cluster export axes.csv --overwrite")
        return read_csv(notebook.work / "axes.csv")

    # what a node reports last comes within a second of the cell's end
    wait_until(lambda: any((row["metric"], row["step"]) == ("seen", "7") for row in exported()), 60, "the last report")
    rows = exported()
    local = [row for row in rows if (row["job"], row["run"], row["node"]) == ("model", "1", "local")]
    assert [row["step"] for row in local] == ["1", "2", "3", "4", "5", "6"]
    assert [row["round"] for row in local] == ["0", "0", "1", "1", "2", "2"]
    measured = [row for row in rows if (row["job"], row["run"], row["node"]) == ("model", "1", "")]
    assert [(row["step"], row["round"]) for row in measured if row["metric"] == "loss"] == [
        ("2", "1"), ("4", "2"), ("6", "3"),
    ]  # fmt: skip
    # begun anew: rounds count from 0 again, though three were complete before
    again = [row for row in rows if (row["job"], row["run"], row["node"]) == ("model", "2", "local")]
    assert [(row["step"], row["round"]) for row in again] == [("1", "0"), ("2", "0")]
    assert int(again[0]["cell"]) > int(local[0]["cell"])
    for row in rows:
        assert pandas.Timestamp(row["utc"]).timestamp() == pytest.approx(float(row["time"]), abs=1e-5)
    seen = [row for row in rows if row["metric"] == "seen"]
    assert {(row["node"], row["value"]) for row in seen} == {("local", "0.0"), ("local-2", "1.0")}
    assert {(row["job"], row["run"], row["cell"], row["round"]) for row in seen} == {("", "", "", "")}


def test_parquet_csv_and_the_frame_are_the_same_table(notebook: SharedNotebook, cluster: Cluster) -> None:
    for name in ("same.csv", "same.parquet"):
        cluster.export(str(notebook.work / name), job="model")
    table = pandas.read_parquet(notebook.work / "same.parquet")
    text = pandas.read_csv(notebook.work / "same.csv", parse_dates=["started", "utc"])
    text = text.fillna({"node": ""})
    frame = cluster.to_pandas("model")
    assert list(table.columns) == list(text.columns) == list(frame.columns)
    pandas.testing.assert_frame_equal(table, frame)
    for column in ("job", "node", "metric", "step", "run", "round", "time"):
        assert list(table[column]) == list(text[column]), column
    assert alike(list(table["value"]), list(text["value"].astype(float)))
    assert (table["utc"] == text["utc"]).all()
    assert set(table["job"]) == {"model"}
    assert sum(math.isinf(value) for value in table["value"]) == 2


def test_a_file_that_is_there_is_replaced_only_when_that_is_asked_for(notebook: SharedNotebook) -> None:
    file = notebook.work / "there.csv"
    file.write_text("mine")
    assert notebook.fails("%cluster export there.csv") == (
        f"ClusterError: {file} exists already: --overwrite (overwrite=True) replaces it"
    )
    assert file.read_text() == "mine"
    notebook.works("%cluster export there.csv --overwrite")
    assert len(read_csv(file)) > 10


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "run.txt",
            "'run.txt' says no format: name a file that ends in .csv or .parquet, or, for TensorBoard, a folder",
        ),
        ("nowhere/run.csv", "/nowhere does not exist: make it first, or name another place"),
        ("run.csv --job othr", "no job 'othr' has measured anything in this run: model, other"),
        ("run.csv --run lesson@1999", "'lesson@1999' names no run; there are lesson@20"),
        ("run.csv --run none", "no run of a cluster 'none' was kept here: lesson"),
    ],
)
def test_what_cannot_be_written_is_named_with_the_way_out(notebook: SharedNotebook, typed: str, said: str) -> None:
    assert said in notebook.fails(f"%cluster export {typed}")
    assert not (notebook.work / "run.csv").exists()


def test_a_full_disk_leaves_no_part_of_a_file_and_what_was_there(notebook: SharedNotebook, cluster: Cluster) -> None:
    with small_disk(notebook.root / "small") as disk:
        before = disk.folder / "before.csv"
        before.write_text("mine")
        disk.fill()
        for name in ("full.csv", "full.parquet", "before.csv", "events/"):
            with pytest.raises(ClusterError, match="cannot be written: No space left on device"):
                cluster.export(f"{disk.folder}/{name}", overwrite=True)
        assert sorted(path.name for path in disk.folder.iterdir()) == ["ballast", "before.csv"]
        assert before.read_text() == "mine"


def test_parquet_without_its_library_says_what_to_install(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ClusterError, match=r"pyarrow is not installed here\): pip install pandas pyarrow, or write a .csv"
    ):
        cluster.export(str(tmp_path / "run.parquet"))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert cluster.export(str(tmp_path / "run.csv")).rows > 10  # which needs neither
    with pytest.raises(ClusterError, match="a frame needs pandas"):
        cluster.to_pandas()


def test_the_recipe_writes_a_file_and_reads_it(notebook: SharedNotebook) -> None:
    said = notebook.works(recipe("Curves in a file"))
    assert "written to" in said
    assert "global model" in said
    assert "local-2" in said


def test_the_terminal_writes_a_run_and_says_where(notebook: SharedNotebook, tmp_path: Path) -> None:
    file = tmp_path / "from the terminal.csv"
    done = run_command("export", "lesson", str(file), "--job", "other")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"6 rows of 4 curves written to {file}\n" in done.stdout
    assert same(values_of(read_csv(file)), {key: value for key, value in LATER.items() if key[0] == "other"})
    done = run_command("export", "lesson", str(file))
    assert (done.returncode, done.stdout) == (1, "")
    assert "exists already: --overwrite" in done.stderr
    assert run_command("export", "nobody", str(file)).returncode == 2


def test_a_run_that_is_over_and_one_of_before_are_written_as_they_were(notebook: SharedNotebook) -> None:
    def values(name: str) -> Values:
        return values_of(read_csv(notebook.work / name))

    notebook.works("%cluster stop")
    said = notebook.works("%cluster export over.csv")
    assert "the last run of cluster 'lesson' (ended at " in said
    assert same(values("over.csv"), {**POINTS, **LATER})
    shutil.copy(notebook.work / "over.csv", notebook.work / "before.csv")
    (run, *_) = [one for one in Cluster.runs() if one.job == "other"]
    notebook.works("%cluster start --local 1 --no-panel --fresh")
    day = run_day(run)
    listed = notebook.works("%cluster runs")
    assert day[:16].replace("T", " ") in listed
    assert "%cluster export FILE.csv --run" in listed
    said = notebook.works(f"%cluster export kept.csv --run lesson@{day}")
    assert f"run lesson@{day}" in said
    assert (notebook.work / "kept.csv").read_bytes() == (notebook.work / "over.csv").read_bytes()
    (kept, *_) = [one for one in Cluster.runs() if one.job == "other"]
    assert set(kept.to_pandas()["job"]) == {"other"}
    assert kept.export(str(notebook.work / "kept.parquet")).rows == 6
    done = run_command("export", f"lesson@{day}", str(notebook.work / "terminal.csv"))
    assert (done.returncode, done.stderr) == (0, "")
    assert same(values("terminal.csv"), {**POINTS, **LATER})


def run_day(run: Run) -> str:
    """Its start, with the seconds: the runs of a test may be of the same minute."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(run.started))


# ---- without a cluster -------------------------------------------------------------------------------------------


class Recorded:
    """A run with these curves."""

    def __init__(self, series: list[Series], like: Any) -> None:
        self._series, self._like = series, like

    def state(self) -> Any:
        return self._like

    def series(self) -> list[Series]:
        return self._series

    def history(self) -> Any:
        class Nothing:
            rounds: list[RoundView] = []

        return Nothing()


class Named:
    name, started = "lesson", 1000.0


def test_a_run_without_curves_says_so_and_writes_nothing(tmp_path: Path) -> None:
    for path in ("none.csv", "none.parquet", "none/"):
        with pytest.raises(ClusterError, match=r"'lesson' has measured nothing yet.*sync\.step\(loss=\.\.\.\)"):
            export_run(Recorded([], Named()), f"{tmp_path}/{path}")
    assert list(tmp_path.iterdir()) == []
    memory = Series(node="local", name="memory", step=[0], time=[1.0], value=[1e9])
    written = export_run(Recorded([memory], Named()), str(tmp_path / "memory.csv"))
    assert "there is no curve but memory: sync.step(loss=...)" in "\n".join(written.lines())


def test_thinned_curves_are_said_to_be(tmp_path: Path) -> None:
    store = SeriesStore()
    for step in range(1, 5001):
        store.add("local", "loss", step, float(step), 1.0 / step, job="model", run=1001)
    written = export_run(Recorded(store.all(), Named()), str(tmp_path / "long.csv"))
    assert written.rows == len(read_csv(tmp_path / "long.csv")) < 2001
    assert f"1 of the curves are thinned, with their ends and peaks: {written.rows:,} of 5,000 measured points" in (
        "\n".join(written.lines())
    )


def test_what_is_not_finite_comes_back_from_the_disk_as_it_was() -> None:
    one = Series(node="a", name="loss", step=[1, 2, 3, 4], time=[1.0] * 4, value=[math.inf, math.nan, -math.inf, 1.0])
    (back,) = unpack(pack([one]))
    assert alike(back.value, one.value)
    # as versions before this one have written it
    assert alike(unpack(b'[["a","","loss",[1],[1.0],[null],1,0]]')[0].value, [math.nan])


def test_a_round_that_nobody_knows_is_left_empty() -> None:
    rounds = [RoundView(job="model", round=3, time=10.0, members=[])]
    late = Series(node="a", name="loss", step=[1], time=[20.0], value=[1.0], job="model", run=2001)
    assert [row.round for row in curve_rows([late], rounds)] == [None]  # it may have begun anew
    assert [row.round for row in curve_rows([late], [])] == [0]


def test_a_name_that_is_no_path_becomes_one_and_stays_its_own() -> None:
    assert outside_name("model run 2") == "model run 2"
    odd = [outside_name(name) for name in ("../up", "a/b", "a\\b", "..", "", "x" * 200)]
    assert len(set(odd)) == len(odd)
    assert not any("/" in name or "\\" in name or name in ("", ".", "..") for name in odd)
