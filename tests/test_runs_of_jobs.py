"""Curves of several sync objects, and of several trainings under one name, are several curves."""

import math
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.journal.curves import CurvesFile, SeriesStore, read_series
from notebook_cluster.journal.kept_runs import import_old
from notebook_cluster.journal.store import curves_path
from notebook_cluster.protocol.runs import places, run_number
from notebook_cluster.protocol.state import Series
from notebook_cluster.protocol.thinning import ALL_CURVES, ALL_POINTS, KEPT_RUNS, MAX_POINTS, NODE_CURVES, OLD_POINTS
from notebook_cluster.server.watching import CurveHistory
from notebook_cluster.widgets import render_html
from notebook_cluster.widgets.curves import Curves
from notebook_cluster.widgets.report_charts import charts
from tests.cluster import run, running_cluster
from tests.conftest import wait_until
from tests.fake_cluster import cluster_view
from tests.training_cells import SETUP

TWO = """first, second = make_model(50), make_model(60)
syncs = nc.DiLoCo(first, every=2, name="generator"), nc.DiLoCo(second, every=2, name="critic")
for step in range(4):
    for index, sync in enumerate(syncs):
        sync.step(loss=100.0 * index + step, samples=8)
"""

SWEEP = """for turn in range(2):
    model = make_model(50)
    sync = nc.DiLoCo(model, every=2, name="generator", fresh=True)
    for step in range(3):
        sync.step(loss=10.0 * turn + step, samples=8)
        if step == 1:
            with sync.global_model():
                nc.report(loss=50.0 + turn)
    sync.finish()
nc.report(loss=7.0, step=1, run=3)  # a number of one's own may have that name
"""


def losses(cluster: Cluster) -> dict[tuple[str, str], list[list[float]]]:
    """(Node, job) -> the losses of its runs, oldest first."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for one in sorted(cluster.series(), key=lambda one: one.run):
        if one.name == "loss":
            found.setdefault((one.node, one.job), []).append(one.value)
    return found


def test_each_sync_object_and_each_training_has_a_curve(
    jupyter_dirs: Path, no_processes_left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jupyter_dirs)
    with running_cluster(local=2) as cluster:
        run(cluster, SETUP)
        run(cluster, TWO)
        run(cluster, SWEEP)
        wait_until(lambda: ("local-2", "") in losses(cluster) and ("local", "") in losses(cluster), 60, "the last loss")
        wait_until(lambda: len(losses(cluster).get(("", "generator"), ())) == 2, 60, "the global model's losses")
        first = [0.0, 1.0, 2.0, 3.0]
        for node in ("local", "local-2"):
            found = losses(cluster)
            assert found[node, "generator"] == [first, [0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]
            assert found[node, "critic"] == [[100.0, 101.0, 102.0, 103.0]]
            assert found[node, ""] == [[7.0]]
        assert losses(cluster)["", "generator"] == [[50.0], [51.0]]
        assert {one.value[-1] for one in cluster.series() if one.name == "run"} == {3.0}
        runs = {one.run for one in cluster.series() if one.job == "generator" and one.node == "local"}
        assert {one.run for one in cluster.series() if one.job == "generator" and one.node == "local-2"} == runs


# ---- where they are kept and drawn, without a cluster -------------------------------------------------------------


def curve(node: str, job: str = "", run: int = 0, values: tuple[float, ...] = (2.0, 1.0), start: float = 0.0) -> Series:
    steps = list(range(1, len(values) + 1))
    return Series(
        node=node, job=job, run=run, name="loss", step=steps, time=[start + step for step in steps], value=list(values)
    )  # fmt: skip


def test_runs_are_numbered_alike_on_all_nodes_and_in_order() -> None:
    numbers = [run_number(2, 0), run_number(2, 1), run_number(3, 0), run_number(3, 5000)]
    assert numbers == sorted(set(numbers))
    assert run_number(3, 9999) < run_number(4, 0)
    assert places([numbers[2], numbers[0], numbers[0]]) == {numbers[0]: 1, numbers[2]: 2}


def test_curves_of_before_are_read_and_new_ones_outlive_the_coordinator(tmp_path: Path) -> None:
    old = '[["desk","","loss",[1,2],[1.0,2.0],[3.0,2.0],2],["","m","loss",[1],[1.0],[5.0]]]\n'
    (tmp_path / "series.jsonl").write_text(old)
    (tmp_path / "run.jsonl").write_text("")
    import_old(tmp_path)
    store = SeriesStore()
    store.take_over(read_series(curves_path(tmp_path)))
    file = CurvesFile(tmp_path, store)
    store.add("desk", "loss", 1, 50.0, 9.0, job="m", run=4001)
    store.add("desk", "loss", 1, 60.0, math.nan, job="m", run=5001)
    file.append(store.take_fresh())
    file.close()
    found = {(one.node, one.job, one.run): one.value for one in read_series(curves_path(tmp_path))}
    assert found["desk", "", 0] == [3.0, 2.0]
    assert found["", "m", 0] == [5.0]
    assert found["desk", "m", 4001] == [9.0]
    assert math.isnan(found["desk", "m", 5001][0])


def test_only_the_newest_runs_of_a_job_are_kept() -> None:
    store, curves, history = SeriesStore(), Curves(), CurveHistory()
    history.begin([])
    for number in range(1, 40):
        for node in ("desk", "mini"):
            store.add(node, "loss", 1, float(number), 1.0, job="m", run=number)
    store.add("desk", "loss", 1, 99.0, 1.0, job="m", run=1)  # late
    store.add("desk", "memory", 1, 1.0, 1.0)
    curves.add_new(store.take_fresh())
    history.add(store.all())
    history.add([Series("desk", "loss", [2], [99.0], [1.0], job="m", run=1)])
    for series in (store.all(), curves.series(), history.all()):
        kept = {one.run for one in series if one.name == "loss"}
        assert kept == set(range(40 - KEPT_RUNS, 40)), series
        assert any(one.name == "memory" for one in series)


def test_curves_of_many_jobs_stay_few_and_those_of_older_jobs_keep_their_ends_and_their_peak() -> None:
    store, jobs = SeriesStore(), 90
    for number in range(jobs):
        for step in range(MAX_POINTS):
            store.add("desk", "loss", step, number * 1e4 + step, 1e9 if step == 777 else 1.0, job=f"m{number}", run=1)
        assert sum(len(one.step) for one in store.all()) <= ALL_POINTS + MAX_POINTS
    first, newest = store.all()[0], store.all()[-1]
    assert (len(store.all()), len(newest.step)) == (jobs, MAX_POINTS)
    assert len(first.step) <= OLD_POINTS + 2
    assert (first.step[0], first.step[-1], max(first.value)) == (0, MAX_POINTS - 1, 1e9)


def test_jobs_that_got_no_point_for_longest_are_dropped_where_there_are_too_many_curves() -> None:
    store = SeriesStore()
    store.add("desk", "memory", 1, 1.0, 1.0)
    for number in range(ALL_CURVES + 5):
        store.add("desk", "loss", 1, float(number), 1.0, job=f"m{number}", run=1)
        store.add("desk", "loss", 2, float(number), 1.0, job="goes on", run=1)
    kept = [one.job for one in store.all()]
    assert len(kept) == ALL_CURVES
    assert {"", "goes on", f"m{ALL_CURVES + 4}"} <= set(kept)
    assert "m1" not in kept


def test_a_node_that_tells_ever_new_numbers_takes_no_room_of_others() -> None:
    store = SeriesStore()
    for number in range(3 * NODE_CURVES):
        store.add("odd", f"number {number}", 1, 1.0, 1.0)
    store.add("desk", "memory", 1, 1.0, 1.0)
    store.add("odd", "loss", 1, 1.0, 1.0, job="m", run=1)
    kept = [(one.node, one.name) for one in store.all()]
    assert kept == [
        *(("odd", f"number {number}") for number in range(NODE_CURVES)),
        ("desk", "memory"),
        ("odd", "loss"),
    ]


def test_the_newest_run_of_each_job_is_plain_and_the_others_have_names() -> None:
    curves = Curves(
        [curve("desk", "gan", 1001), curve("desk", "gan", 2001, start=9), curve("desk", "critic", 2001, start=10)]
    )
    found = {(one.job, one.run): (one.newest, one.of_run, one.dash) for one in curves.losses()}
    assert found == {
        ("gan", 1001): (False, "gan run 1", 0),
        ("gan", 2001): (True, "gan run 2", 0),
        ("critic", 2001): (True, "critic", 1),
    }
    assert curves.get("desk", "loss").time[0] == 11
    assert curves.nodes() == ["desk"]
    (alone,) = Curves([curve("desk", "model", 1001)]).losses()
    assert (alone.newest, alone.of_run, alone.dash) == (True, "", 0)
    (before,) = Curves([curve("desk")]).losses()
    assert (before.newest, before.of_run) == (True, "")


def test_pictures_draw_earlier_runs_faint_and_say_which() -> None:
    state = cluster_view()
    name = state.nodes[0].name
    series = [
        curve(name, "m", 1001, (3.0, 2.0, 2.5), state.started),
        curve(name, "m", 2001, (3.0, 1.0, 0.5), state.started + 9),
    ]
    report = "".join(charts(state, Curves(series), []))
    for page, pictures in ((report, 4), (render_html(state, series), 2)):  # the report's with both kinds of axis
        assert page.count('stroke-opacity="0.3"') == pictures
        assert f"<title>{name}, m run 1</title>" in page
        assert f"<title>{name}, m run 2</title>" in page
        assert "Loss: m run 2; Faint: m run 1" in page
    both = [*series, curve(name, "critic", 2001, (4.0, 4.0, 4.0), state.started + 9)]
    page = "".join(charts(state, Curves(both), []))
    assert "Loss: m run 2 (solid), critic (dashed); Faint: m run 1" in page
    assert page.count('stroke-dasharray="7 4"') == 4


def test_the_panel_adds_a_curve_for_each_run_and_job() -> None:
    pytest.importorskip("plotly")
    from notebook_cluster.widgets.figure import CurvesFigure

    figure, one = CurvesFigure(), curve("desk", "gan", 1001, (3.0, 2.0))
    assert figure.draw(Curves([one]), {"desk": "#2f81f7"}, 0.0)
    data = figure.widget.data
    assert [trace.name for trace in data] == ["desk"] * 3
    two = [one, curve("desk", "gan", 2001, (1.0, 0.5), 9.0), curve("desk", "critic", 2001, (7.0, 8.0), 9.0)]
    assert not figure.draw(Curves(two), {"desk": "#2f81f7"}, 0.0)
    shown = {
        (trace.name, trace.opacity, trace.line.dash)
        for trace in figure.widget.data
        if trace.y is not None and len(trace.y)
    }
    assert shown == {
        ("desk, gan run 2", None, None), ("desk, critic", 1.0, "dash"), ("desk, gan run 1", 0.3, "solid"),
    }  # fmt: skip
    by_name = {trace.name: list(trace.y) for trace in figure.widget.data if trace.y is not None and len(trace.y)}
    assert by_name["desk, gan run 2"] == [1.0, 0.5]
    assert by_name["desk, gan run 1"] == [3.0, 2.0]
    legend = [trace.name for trace in figure.widget.data if trace.showlegend]
    assert legend == ["desk, gan run 2", "desk, critic"]


def test_of_jobs_one_after_the_other_the_panel_draws_that_plainly_which_is_trained_now() -> None:
    pytest.importorskip("plotly")
    from notebook_cluster.widgets.figure import CurvesFigure

    figure = CurvesFigure()
    jobs = [curve(node, job, run, (3.0, run / 1000)) for node in ("desk", "mini")
            for job, run in (("alone", 1001), ("two", 2001), ("all", 3001))]  # fmt: skip
    assert figure.draw(Curves(jobs[:-1]), {}, 0.0)
    drawn = [trace for trace in figure.widget.data if trace.y is not None and len(trace.y)]
    assert {trace.name: trace.opacity for trace in drawn} == {
        "desk, all": None, "desk, alone": 0.3, "desk, two": 0.3, "mini, two": None, "mini, alone": 0.3,
    }  # fmt: skip
    assert [trace.name for trace in drawn if trace.showlegend] == []  # the nodes' own entries are at their memory


def test_a_search_over_settings_adds_no_traces_without_end() -> None:
    """Of many runs those that are drawn no more leave their traces to the next."""
    pytest.importorskip("plotly")
    from notebook_cluster.widgets.figure import EARLIER_RUNS, CurvesFigure

    figure, curves, traces = CurvesFigure(), Curves(), []
    for number in range(1, 13):
        news = [
            curve(node, "sweep", number, (float(number), float(number) + 0.5), 10.0 * number)
            for node in ("desk", "mini")
        ]
        curves.add_new(news)
        figure.draw(curves, {"desk": "#2f81f7", "mini": "#e8853d"}, 0.0)
        traces.append(len(figure.widget.data) // 2)
    assert traces == [3 + 2 * min(earlier, EARLIER_RUNS) for earlier in range(12)]
    drawn = [trace for trace in figure.widget.data if trace.y is not None and len(trace.y)]
    assert {(trace.legendgroup, trace.opacity, *trace.y) for trace in drawn} == {
        (node, None if number == 12 else 0.3, number, number + 0.5)
        for node in ("desk", "mini")
        for number in (10.0, 11.0, 12.0)
    }
