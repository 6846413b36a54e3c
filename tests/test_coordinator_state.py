"""The coordinator's pure parts: what the state is after events, and what a log gives back."""

import random
from pathlib import Path

import pytest

from notebook_cluster.coordinator import events as e
from notebook_cluster.coordinator.outputs import CellOutputs, batches, hint_missing_name
from notebook_cluster.coordinator.runlog import RunLog, read_log
from notebook_cluster.coordinator.series import SeriesStore
from notebook_cluster.coordinator.state import State, apply, roster
from notebook_cluster.protocol.node import NodeHello
from notebook_cluster.protocol.thinning import MAX_POINTS
from notebook_cluster.protocol.views import Output


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
    log.round({"type": "Commit", "round": 1})
    log.received({"key": 17})
    log.close()
    recovered = read_log(tmp_path / "run.jsonl")
    assert recovered.state == after(*events)
    assert recovered.rounds == [{"type": "Commit", "round": 1}]
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
