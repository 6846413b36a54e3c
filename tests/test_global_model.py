"""The loss of the global model: how it is measured, collected and shown. tests/test_run_kept.py: on a real cluster."""

import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.coordinator.nodes.measurements import MOST_VALUES, WAIT, GlobalModels, Measurements
from notebook_cluster.journal.curves import SeriesStore
from notebook_cluster.journal.state import Cell, State
from notebook_cluster.protocol.node import GlobalMeasured, Telemetry
from notebook_cluster.protocol.state import ClusterView, JobView, RunHistory, Series
from notebook_cluster.server.watching import CurveHistory
from notebook_cluster.training.loop.progress import open_block
from notebook_cluster.widgets import render_html, render_text
from notebook_cluster.widgets.curves import Curves
from notebook_cluster.widgets.formatting import GLOBAL
from notebook_cluster.widgets.model import panel_model
from notebook_cluster.widgets.report import render_report
from tests.cluster_in_process import Cluster, Node
from tests.fake_cluster import cluster_view, series_until

NO_HISTORY = RunHistory(rounds=[], rounds_seen=0, checkpoints=[], cells=[], cells_seen=0, peers=[])


# ---- on a node ---------------------------------------------------------------------------------------------------


def measured_in(cell: Any, tmp_path: Path) -> list[GlobalMeasured]:
    """What a node tells in ``cell(node)``, which must work."""
    told: list[GlobalMeasured] = []

    def watch(direction: str, node: str, message: Any) -> None:
        if isinstance(message, GlobalMeasured):
            told.append(message)

    with Cluster(["a"], tmp_path) as cluster:
        cluster.watch = watch
        (result,) = cluster.run(cell).values()
        assert result is None, result
    return told


def note(**values: Any) -> None:
    block = open_block()
    assert block is not None
    block.note(values)


def test_a_block_tells_its_last_numbers_once_with_round_and_step(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        sync = nc.DiLoCo(nn.Linear(2, 1), every=2)
        for _ in range(5):
            sync.step()
        with sync.global_model():
            note(loss=3.0)
            note(loss=torch.tensor(2.0), accuracy=0.5)
        assert open_block() is None
        with sync.global_model():
            pass

    (message,) = measured_in(cell, tmp_path)
    # The fifth step is in no round yet, and the parameters in the block are those of before it.
    assert (message.job, message.round, message.step) == ("model", 2, 4)
    assert message.values == {"loss": 2.0, "accuracy": 0.5}


def test_a_block_that_fails_tells_nothing(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        sync = nc.DiLoCo(nn.Linear(2, 1), every=1)
        sync.step()

        def evaluate() -> None:
            with sync.global_model():
                note(loss=1.0)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            evaluate()
        assert open_block() is None

    assert measured_in(cell, tmp_path) == []


def test_while_a_cell_is_replayed_the_block_runs_and_tells_nothing(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        node.is_replaying = True
        sync = nc.DiLoCo(nn.Linear(2, 1), every=1)
        sync.step()
        with sync.global_model():
            note(loss=1.0)
        node.is_replaying = False

    assert measured_in(cell, tmp_path) == []


# ---- in the coordinator ------------------------------------------------------------------------------------------


class FakeCoordinator:
    """What :class:`GlobalModels` asks of a coordinator: a job at ``round``, and nodes that run the cell."""

    def __init__(self, *running: str, round: int = 9) -> None:
        self.series = SeriesStore()
        cell = Cell(1, "", (), False, {}, (), status="ok", nodes=dict.fromkeys(running, "running"))
        self.state = State(cells={1: cell})
        core: Any = self
        self.models = GlobalModels(core, self.series, committed=lambda job: round if job == "model" else None)

    def dirty(self) -> None: ...

    def told(self, node: str, round: int, **values: float) -> None:
        message = GlobalMeasured(job="model", round=round, step=round * 10, time=0.0, values=values)
        self.models.told(node, message, float(round))

    @property
    def losses(self) -> list[float]:
        return next((one.value for one in self.series.all() if one.name == "loss"), [])


def test_a_round_is_the_mean_of_what_all_nodes_of_the_cell_say() -> None:
    fake = FakeCoordinator("a", "b")
    fake.told("a", 1, loss=1.0)
    assert fake.losses == []
    fake.told("b", 1, loss=2.0, accuracy=0.5)
    assert fake.losses == [1.5]
    (loss, accuracy) = fake.series.all()
    assert (loss.node, loss.job, loss.step, loss.time) == ("", "model", [10], [1.0])
    assert (accuracy.name, accuracy.value) == ("accuracy", [0.5])


def test_nodes_that_do_not_measure_are_waited_for_a_moment_only() -> None:
    fake = FakeCoordinator("a", "b")
    fake.told("a", 1, loss=1.0)
    since = fake.models._rounds["model"].since
    fake.models.tick(since + WAIT - 0.01)
    assert fake.losses == []
    fake.models.tick(since + WAIT)
    assert fake.losses == [1.0]
    fake.told("b", 1, loss=5.0)
    assert fake.losses == [1.0]


def test_what_comes_after_the_end_of_a_node_s_cell_is_waited_for_and_who_failed_is_not() -> None:
    fake = FakeCoordinator("a", "b", "c")
    fake.state.cells[1].nodes.update(a="ok", b="ok", c="error")
    fake.told("b", 1, loss=1.0)
    assert fake.losses == []
    fake.told("a", 1, loss=2.0)
    assert fake.losses == [1.5]


def test_a_node_that_is_late_by_a_round_changes_nothing_and_a_new_run_begins_again() -> None:
    fake = FakeCoordinator("a", "b")
    fake.told("a", 1, loss=1.0)
    fake.told("a", 2, loss=0.9)
    fake.told("b", 1, loss=7.0)
    fake.told("b", 2, loss=1.1)
    assert fake.losses == [1.0, 1.0]
    fresh = FakeCoordinator("a", round=0)
    for round in (8, 0):
        fresh.told("a", round, loss=float(round))
    assert fresh.losses == [8.0, 0.0]


def test_measuring_a_round_again_is_a_new_point() -> None:
    fake = FakeCoordinator()
    for loss in (3.0, 2.0):
        fake.told("a", 4, loss=loss)
    assert fake.losses == [3.0, 2.0]
    job = JobView(name="model", strategy="DiLoCo", round=9, attempt=0, phase="idle", members=[])
    assert (fake.models.shown_in(job).loss, fake.models.shown_in(job).loss_round) == (2.0, 4)
    assert fake.models.shown_in(msgspec.structs.replace(job, name="other")).loss is None


def test_of_a_job_that_nobody_trains_nothing_is_kept() -> None:
    fake = FakeCoordinator()
    fake.models.told("a", GlobalMeasured(job="<b>", round=1, step=1, time=0.0, values={"loss": 1.0}), 0.0)
    fake.told("a", 1, **{"x" * 65: 1.0})
    assert fake.series.all() == []


def test_what_is_still_waited_for_is_shown_when_the_cluster_ends() -> None:
    fake = FakeCoordinator("a", "b")
    fake.told("a", 1, loss=1.0)
    fake.models.close()
    assert fake.losses == [1.0]


# ---- on the page -------------------------------------------------------------------------------------------------


def model_loss(*values: float, job: str = "model", start: float = 0.0) -> Series:
    """Measured each 40 steps."""
    steps = [40 * (place + 1) for place in range(len(values))]
    return Series(node="", job=job, name="loss", step=steps, time=[start + 0.1 * s for s in steps], value=list(values))


def measured(*values: float) -> tuple[ClusterView, list[Series]]:
    """A run whose global model was measured."""
    state = cluster_view()
    job = msgspec.structs.replace(state.jobs[0], loss=values[-1], loss_round=12)
    state = msgspec.structs.replace(state, jobs=[job])
    return state, [*series_until(120, state.started), model_loss(*values, start=state.started)]


def test_the_header_says_the_loss_of_the_global_model_only_when_it_was_measured() -> None:
    state, _ = measured(2.0, 1.25)
    facts = {fact["label"]: fact for fact in panel_model(state)["facts"]}
    assert (facts["Global loss"]["value"], facts["Global loss"]["note"]) == ("1.2500", "measured at round 12")
    assert "Global loss" not in {fact["label"] for fact in panel_model(cluster_view())["facts"]}


def test_text_html_and_report_draw_its_curve() -> None:
    state, series = measured(2.0, 1.25, 1.5)
    assert re.search(r"^loss of the global model  1\.5000  step 120  █▁▃$", render_text(state, series), re.MULTILINE)
    markup = render_html(state, series)
    assert markup.count(f'stroke="{GLOBAL}"') == 4  # line and dots, over steps and over time
    assert "Dotted: the global model" in markup
    assert "Dotted" not in render_html(cluster_view(), series_until(120, 0.0))
    page = render_report(state, series, NO_HISTORY)
    for kind in ("linear", "log"):
        for over in ("steps", "time"):
            picture = page.partition(f"nbc-over-{over} nbc-{kind}")[2].partition("</svg>")[0]
            assert picture.count(f' fill="none" stroke="{GLOBAL}"') == 2
            assert ">global model</text>" in picture


def test_it_has_no_part_in_the_mean_of_the_nodes() -> None:
    state, series = measured(900.0, 900.0, 900.0)
    without = render_report(cluster_view(), series_until(120, 0.0), NO_HISTORY)
    assert "mean of the nodes" in without
    alone = [one for one in series if one.node in ("", "laptop")]
    assert "mean of the nodes" not in render_report(state, alone, NO_HISTORY)


def test_the_figure_has_a_dotted_line_for_each_job_in_both_loss_charts() -> None:
    from notebook_cluster.widgets.figure import CurvesFigure

    figure = CurvesFigure()
    state, series = measured(2.0, 1.25)
    assert figure.draw(Curves(series_until(120, state.started)), {}, state.started) is True
    assert figure.draw(Curves(series), {}, state.started) is False
    steps, seconds = [trace for trace in figure.widget.data if trace.name == "global model"]
    assert (list(steps.x), list(steps.y)) == ([40.0, 80.0], [2.0, 1.25])
    assert list(seconds.x) == pytest.approx([4.0, 8.0])
    assert (steps.line.dash, steps.line.color, steps.mode) == ("dot", GLOBAL, "lines+markers")
    assert [steps.xaxis, seconds.xaxis] == ["x", "x2"]
    second = [*series, model_loss(1.0, job="other <b>")]
    assert figure.draw(Curves(second), {}, state.started) is False
    assert "global model other  b " in [trace.name for trace in figure.widget.data]


def test_a_loss_that_is_not_finite_is_a_gap_and_is_named() -> None:
    state, series = measured(2.0, math.nan, math.inf, 1.0, math.nan)
    assert "loss of the global model  NaN" in render_text(state, series)
    for markup in (render_html(state, series), render_report(state, series, NO_HISTORY)):
        for path in re.findall(rf' d="([^"]*)" fill="none" stroke="{GLOBAL}"', markup):
            assert path.count("M") == 2
            assert "nan" not in path
            assert "inf" not in path


def test_the_sidebar_s_server_keeps_the_curves_of_two_jobs_apart() -> None:
    history = CurveHistory()
    history.begin([model_loss(2.0), model_loss(5.0, job="other")])
    history.add([model_loss(2.0, 1.0)])
    found = [(curve.node, curve.job, curve.name, curve.value) for curve in history.all()]
    assert found == [("", "model", "loss", [2.0, 1.0]), ("", "other", "loss", [5.0])]


def numbers_of(node: str) -> tuple[Measurements, SeriesStore]:
    series, core = SeriesStore(), SimpleNamespace(dirty=lambda: None)
    core.state = SimpleNamespace(nodes={node: SimpleNamespace(is_in=True)}, cells={})
    nothing: Any = lambda *said: None  # noqa: E731 - takes whatever it is told
    unused: Any = core
    return Measurements(unused, series, unused, committed=nothing, on_waiting=nothing), series


def test_of_a_node_that_tells_thousands_of_numbers_a_few_are_taken() -> None:
    numbers, series = numbers_of("odd")
    told = {"x" * 1000: 1.0} | {f"number {index}": 1.0 for index in range(5000)}
    points = {name: [(1, time.time(), value)] for name, value in told.items()}
    numbers.on_telemetry("odd", Telemetry(step=1, scalars=told, history=points, sent=time.time()))
    assert len(numbers.telemetry("odd").scalars) == len(series.all()) == MOST_VALUES - 1


def test_what_a_node_has_kept_for_a_while_keeps_its_time() -> None:
    numbers, series = numbers_of("mini")
    clock = time.time() - 500.0  # the node's, which is behind
    points = [(1, clock - 60, 0.5), (2, clock - 30, 0.25)]
    numbers.on_telemetry("mini", Telemetry(step=2, history={"loss": points}, sent=clock))
    (curve,) = series.all()
    now = time.time()
    assert [pytest.approx(now - moment, abs=10) for moment in (60, 30)] == list(curve.time)
    assert list(curve.step) == [1, 2]
