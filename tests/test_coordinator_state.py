"""The coordinator's pure parts: what the state is after events, and what a log gives back."""

import math
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from notebook_cluster.coordinator import events as e
from notebook_cluster.coordinator import kept_rounds
from notebook_cluster.coordinator.outputs import CellOutputs, batches, hint_missing_name
from notebook_cluster.coordinator.remains import LastView, last_run, read_view, write_view
from notebook_cluster.coordinator.runlog import RunLog, has_crashed, read_log
from notebook_cluster.coordinator.series import SeriesStore
from notebook_cluster.coordinator.series_file import GROWTH, SeriesFile, read_series
from notebook_cluster.coordinator.state import State, apply, roster
from notebook_cluster.protocol.node import NodeHello
from notebook_cluster.protocol.thinning import MAX_POINTS
from notebook_cluster.protocol.views import Output
from notebook_cluster.rounds.leader import commit as jobs_commit
from notebook_cluster.rounds.leader import machine as rounds
from tests.explorer import World
from tests.fake_cluster import cluster_view


def hello(node: str, incarnation: int) -> NodeHello:
    return NodeHello(
        node=node, incarnation=incarnation, pid=1, mesh_key="k" * 40, mesh_port=5, mesh_ipc="ipc:///x", master_port=6
    )


def joined(*names: str) -> list[e.Event]:
    """The events after which these nodes are in, one peer each."""
    events: list[e.Event] = [e.ClusterStarted(cluster="c", cluster_id="id", epoch=1, directory="/", time=1.0)]
    for name in names:
        events += [
            e.PeerAdded(name=name, key=name, address="tcp://127.0.0.1:1", found_by="mdns"),
            e.NodeAdded(node=name, peer=name, device="cpu"),
            e.NodeStarting(node=name, incarnation=1),
            e.NodeUp(node=name, incarnation=1, device="cpu", hello=hello(name, 1)),
        ]
    return events


def after(*events: e.Event) -> State:
    state = State()
    for event in events:
        state = apply(state, event)
    return state


def test_ranks_are_compact_and_ordered_by_join() -> None:
    state = after(*joined("a", "b", "c"), e.NodeDown(node="b", incarnation=1, dead=True, reason="killed"))
    assert [(row.name, row.rank) for row in roster(state).nodes] == [("a", 0), ("c", 1)]


def test_a_restarted_node_has_its_rank_again_and_a_higher_incarnation() -> None:
    state = after(
        *joined("a", "b"),
        e.NodeDown(node="a", incarnation=1, dead=True, reason="killed"),
        e.NodeStarting(node="a", incarnation=2),
        e.NodeUp(node="a", incarnation=2, device="cpu", hello=hello("a", 2)),
    )
    assert [(row.name, row.rank, row.incarnation) for row in roster(state).nodes] == [("a", 0, 2), ("b", 1, 1)]


def test_every_change_of_the_roster_raises_the_generation() -> None:
    state = after(*joined("a", "b"))
    assert state.generation == 2
    state = apply(state, e.NodeDown(node="b", incarnation=1, dead=False, reason="link"))
    assert state.generation == 3
    state = apply(state, e.NodeReturned(node="b", incarnation=1))
    assert state.generation == 4
    assert state.rank("b") == 1


def test_an_event_of_an_older_incarnation_changes_nothing() -> None:
    state = after(*joined("a"), e.NodeStarting(node="a", incarnation=2))
    assert apply(state, e.NodeDown(node="a", incarnation=1, dead=True, reason="late news")) == state
    assert apply(state, e.NodeUp(node="a", incarnation=1, device="cpu", hello=hello("a", 1))) == state


def test_cells_that_have_not_ended_are_known_in_their_order() -> None:
    def submitted(number: int) -> e.CellSubmitted:
        return e.CellSubmitted(cell=number, source="1+1", targets=[], replay=True)

    state = after(*joined("a"), *(submitted(number) for number in (1, 2, 3, 4)))
    assert (state.running(), [cell.id for cell in state.queue()]) == (None, [1, 2, 3, 4])
    state = apply(state, e.CellStarted(cell=1, nodes=["a"], generation=1, time=1.0))
    state = apply(state, e.CellFinished(cell=3, status="interrupted", time=2.0))
    running = state.running()
    assert running is not None
    assert (running.id, [cell.id for cell in state.queue()]) == (1, [2, 4])
    state = apply(state, e.CellFinished(cell=1, status="ok", time=3.0))
    assert (state.running(), [cell.id for cell in state.queue()]) == (None, [2, 4])
    assert [cell.status for cell in state.cells.values()] == ["ok", "queued", "interrupted", "queued"]


def test_a_node_that_restarts_leaves_the_roster_until_it_is_up() -> None:
    state = after(*joined("a", "b"), e.NodeStarting(node="a", incarnation=2))
    assert [row.name for row in roster(state).nodes] == ["b"]


def test_local_ranks_count_within_a_peer() -> None:
    state = after(
        *joined("a"),
        e.NodeAdded(node="a-2", peer="a", device="cpu"),
        e.NodeStarting(node="a-2", incarnation=1),
        e.NodeUp(node="a-2", incarnation=1, device="cpu", hello=hello("a-2", 1)),
    )
    assert [(row.name, row.local_rank) for row in roster(state).nodes] == [("a", 0), ("a-2", 1)]


def test_a_log_gives_the_state_back(tmp_path: Path) -> None:
    events = [
        *joined("a", "b"),
        e.CellSubmitted(cell=1, source="x = 1", targets=[], replay=True),
        e.CellStarted(cell=1, nodes=["a", "b"], generation=2, time=3.0),
        e.CellNodeEnded(cell=1, node="a", status="ok"),
    ]
    log = RunLog(tmp_path / "run.jsonl")
    for event in events:
        log.event(event, durable=isinstance(event, e.DURABLE))
    log.round({"kind": "cell", "job": "model"})
    log.received({"key": 17})
    log.close()
    recovered = read_log(tmp_path / "run.jsonl")
    assert recovered.state == after(*events)
    assert recovered.rounds == [{"kind": "cell", "job": "model"}]
    assert recovered.received == {"key": 17}
    assert (tmp_path / "run.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("seed", range(20))
def test_a_log_cut_anywhere_gives_the_state_of_its_whole_lines(tmp_path: Path, seed: int) -> None:
    events = joined("a", "b", "c")
    log = RunLog(tmp_path / "run.jsonl")
    for event in events:
        log.event(event, durable=False)
    log.close()
    data = (tmp_path / "run.jsonl").read_bytes()
    cut = random.Random(seed).randrange(len(data))
    (tmp_path / "run.jsonl").write_bytes(data[:cut])
    assert read_log(tmp_path / "run.jsonl").state == after(*events[: data[:cut].count(b"\n")])


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text('{"time": 1}\nnonsense\n{"time": 2}\n')
    with pytest.raises(ValueError, match="line 2 is not readable"):
        read_log(tmp_path / "run.jsonl")


@pytest.mark.parametrize("end", [b'{"time": 3', b"\0\0\0\0", b"\0\0\0\n", b'{"time": 3, "round": {"kind": "se\n'])
def test_a_torn_end_costs_nothing_else_and_is_cut_away(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "run.jsonl"
    whole = b'{"time": 1, "received": {"key": 1}}\n{"time": 2, "received": {"key": 2}}\n'
    path.write_bytes(whole + end)
    assert not has_crashed(path)
    assert read_log(path).received == {"key": 2}
    assert path.read_bytes() == whole


def test_what_is_kept_of_a_log_says_the_same_as_all_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logs = [[plain(record) for record in World(seed).run().log] for seed in range(300)]
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(jobs_commit, "KEPT_HASHES", 2)
    monkeypatch.setattr(kept_rounds, "_COMMITS", jobs_commit.KEPT_ROUNDS)
    left_out = 0
    for seed, records in enumerate(logs):
        log = RunLog(tmp_path / f"{seed}.jsonl")
        for record in records:
            log.round(record)
        log.close()
        seen: list[dict[str, Any]] = []
        kept = read_log(log.path, on_round=seen.append).rounds
        left_out += len(records) - len(kept)
        assert seen == [record for record in records if record["kind"] in ("commit", "void")]
        assert recovered_from(kept) == recovered_from(records), f"seed {seed}"
    assert left_out > 300


def recovered_from(records: list[dict[str, Any]]) -> rounds.RoundsState:
    nodes = tuple((f"n{rank}", 1) for rank in range(4))
    return rounds.apply(rounds.new_state(), rounds.Recovered(tuple(records), nodes, 1.0, 10**6, 0, ()))[0]


def plain(record: dict[str, Any]) -> dict[str, Any]:
    return dict(msgspec.json.decode(msgspec.json.encode(record)))


def stream(node: str, text: str) -> Output:
    return Output(node=node, rank=0, kind="stream", content={"name": "stdout", "text": text})


def test_output_of_one_node_is_merged_and_keeps_its_order() -> None:
    outputs = [stream("a", "1"), stream("a", "2"), stream("b", "3"), stream("a", "4")]
    merged = [(output.node, output.content["text"]) for batch in batches(outputs) for output in batch]
    assert merged == [("a", "12"), ("b", "3"), ("a", "4")]


def test_much_output_is_bounded_in_memory_and_whole_in_the_file(tmp_path: Path) -> None:
    outputs = CellOutputs(tmp_path / "cells" / "1.jsonl")
    for number in range(3000):
        outputs.add(stream("a", f"{number:06d}" + "x" * 1000 + "\n"), "key", number)
    kept = "".join(output.content["text"] for output in outputs.all())
    assert kept.startswith("000000")
    assert kept.endswith("x\n")
    assert "002999" in kept
    assert "bytes of output left out here" in kept
    assert f"all of it: {tmp_path / 'cells' / '1' / 'a.txt'}" in kept
    assert len(kept) < 2_000_000
    outputs.close()
    assert (tmp_path / "cells" / "1" / "a.txt").read_bytes().count(b"x\n") == 3000
    again = CellOutputs(tmp_path / "cells" / "1.jsonl")
    again.load()
    assert "".join(output.content["text"] for output in again.all()) == kept
    assert again.last_sequence == {"key": 2999}
    again.close()


def test_a_name_error_for_a_name_of_the_notebook_is_recognised() -> None:
    error = {"ename": "NameError", "evalue": "name 'data' is not defined"}
    assert hint_missing_name(error, ("other", "data")) == "data"
    assert hint_missing_name(error, ("other",)) is None
    assert hint_missing_name({"ename": "ValueError", "evalue": "'data'"}, ("data",)) is None


def test_a_long_curve_is_thinned_evenly_and_keeps_its_whole_range_and_its_peak() -> None:
    store = SeriesStore()
    for step in range(50_000):
        store.add("a", "loss", step, float(step), 1e9 if step == 12_345 else float(step))
    (series,) = store.all()
    assert len(series.step) <= MAX_POINTS
    assert (series.step[0], series.step[-1], series.seen) == (0, 49_999, 50_000)
    assert 1e9 in series.value
    assert max(b - a for a, b in zip(series.step, series.step[1:], strict=False)) <= 250


# ---- curves on disk ----------------------------------------------------------------------------------------------


def taken_over(path: Path) -> SeriesStore:
    """The store of a coordinator that is started again."""
    store = SeriesStore()
    store.take_over(read_series(path))
    return store


def test_curves_on_disk_are_those_in_memory_with_their_gaps(tmp_path: Path) -> None:
    store = SeriesStore()
    file = SeriesFile(tmp_path / "series.jsonl", store)
    for step in range(300):
        store.add("a", "loss", step, float(step), math.inf if step == 7 else step / 3)
        store.add("", "loss", step, float(step), 0.25, job="model")
        if step % 10 == 9:
            file.append(store.take_fresh())
    file.close()
    assert (tmp_path / "series.jsonl").stat().st_mode & 0o777 == 0o600
    loss, model = taken_over(tmp_path / "series.jsonl").all()
    assert (loss.node, loss.job, model.node, model.job) == ("a", "", "", "model")
    assert loss.step == list(range(300))
    assert [place for place, value in enumerate(loss.value) if not math.isfinite(value)] == [7]
    assert loss.value[8:] == [step / 3 for step in range(8, 300)]
    assert model.value == [0.25] * 300


def test_the_file_of_a_long_run_stays_small_and_keeps_range_and_peak(tmp_path: Path) -> None:
    path, store = tmp_path / "series.jsonl", SeriesStore()
    file, largest = SeriesFile(path, store), 0
    for step in range(120_000):
        store.add("a", "loss", step, 1e9 + step / 7, 1e9 if step == 12_345 else step / 7)
        if step % 20 == 19:
            file.append(store.take_fresh())
            largest = max(largest, path.stat().st_size)
    file.close()
    assert GROWTH < largest < 1.2 * GROWTH
    (series,) = taken_over(path).all()
    assert len(series.step) <= MAX_POINTS
    assert (series.step[0], series.step[-1]) == (0, 119_999)
    assert 1e9 in series.value
    assert series.seen >= 119_999


def test_a_file_cut_by_a_crash_gives_what_is_whole(tmp_path: Path) -> None:
    path, store = tmp_path / "series.jsonl", SeriesStore()
    file = SeriesFile(path, store)
    for step in range(10):
        store.add("a", "loss", step, float(step), 1.0)
        file.append(store.take_fresh())
    file.close()
    path.write_bytes(path.read_bytes()[:-5])
    assert [one.step for one in taken_over(path).all()] == [list(range(9))]
    path.write_bytes(b"\xff\n[1]\n" + path.read_bytes())
    assert [one.step for one in taken_over(path).all()] == [list(range(9))]
    assert read_series(tmp_path / "none") == []


def test_points_that_come_again_after_a_restart_are_left_out_and_a_new_run_is_not(tmp_path: Path) -> None:
    path, store = tmp_path / "series.jsonl", SeriesStore()
    file = SeriesFile(path, store)
    for step in range(100):
        store.add("a", "loss", step, 1000.0 + step / 10, 1.0)
    file.append(store.take_fresh())
    file.close()
    again = taken_over(path)
    for step in range(90, 110):
        again.add("a", "loss", step, 1000.0 + step / 10 + 0.3, 1.0)
    assert [one.step for one in again.all()] == [list(range(110))]
    assert [one.step for one in again.take_fresh()] == [list(range(100, 110))]
    new_run = taken_over(path)
    for step in range(3):
        new_run.add("a", "loss", step, 1100.0 + step, 1.0)
    assert [one.step[-3:] for one in new_run.all()] == [[0, 1, 2]]


def test_a_disk_that_is_full_costs_no_more_than_the_file(tmp_path: Path) -> None:
    store = SeriesStore()
    file = SeriesFile(tmp_path / "missing" / "series.jsonl", store)
    store.add("a", "loss", 1, 1.0, 1.0)
    file.append(store.take_fresh())
    (tmp_path / "missing").mkdir()
    store.add("a", "loss", 2, 2.0, 2.0)
    file.append(store.take_fresh())
    file.close()
    assert [one.value for one in read_series(tmp_path / "missing" / "series.jsonl")] == [[1.0, 2.0]]


def test_the_last_view_comes_back_as_it_was_and_a_damaged_one_not_at_all(tmp_path: Path) -> None:
    state = cluster_view()
    write_view(tmp_path, LastView(state=state, checkpoints=[], peers=[], ended="stopped"))
    assert read_view(tmp_path) == LastView(state=state, checkpoints=[], peers=[], ended="stopped")
    (tmp_path / "last.view").write_bytes(b"nonsense")
    assert read_view(tmp_path) is None
    assert last_run(tmp_path) is None
    assert last_run(tmp_path / "none") is None


def test_a_run_whose_coordinator_was_killed_says_so(tmp_path: Path) -> None:
    write_view(tmp_path, LastView(state=cluster_view(), checkpoints=[], peers=[]))
    run = last_run(tmp_path)
    assert run is not None
    assert run.ended.startswith("its coordinator was killed after ")
    assert (run.series(), run.history().rounds, run.history().cells_seen) == ([], [], 0)


def test_a_run_with_a_damaged_log_is_refused_with_the_line(tmp_path: Path) -> None:
    write_view(tmp_path, LastView(state=cluster_view(), checkpoints=[], peers=[]))
    (tmp_path / "run.jsonl").write_text('{"time": 1}\nnonsense\n{"time": 2}\n')
    with pytest.raises(ValueError, match=r"run\.jsonl line 2 is not readable"):
        last_run(tmp_path)
