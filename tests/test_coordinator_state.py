"""The coordinator's pure parts: what the state is after events, and what a log gives back."""

import math
import random
import shutil
import sqlite3
from pathlib import Path

import pytest
from msgspec import structs

from notebook_cluster.coordinator.cells.cell_files import Origin
from notebook_cluster.coordinator.cells.outputs import CellOutputs, batches, hint_missing_name, hint_other_nodes
from notebook_cluster.journal import events as e
from notebook_cluster.journal import kept_rounds, log
from notebook_cluster.journal.curves import GROWTH, CurvesFile, LastView, SeriesStore, read_series, read_view
from notebook_cluster.journal.kept_runs import last_run
from notebook_cluster.journal.log import Journal
from notebook_cluster.journal.reading import has_crashed, read_rounds, recover
from notebook_cluster.journal.records import (
    CommitRecord,
    EndedRecord,
    Record,
    RegisterRecord,
    Shape,
    from_row,
    packed,
    to_row,
    unpacked,
)
from notebook_cluster.journal.state import State, apply, failure_of, roster
from notebook_cluster.journal.store import JOURNAL_FILE, curves_path, journal_path
from notebook_cluster.journal.writer import SYNC_PERIOD, SYNC_ROWS
from notebook_cluster.protocol.node import NodeHello
from notebook_cluster.protocol.thinning import MAX_POINTS
from notebook_cluster.protocol.views import Output
from notebook_cluster.rounds.leader import attempts
from notebook_cluster.rounds.leader import machine as rounds
from notebook_cluster.rounds.member.state import MemberSettings
from tests.conftest import wait_until
from tests.explorer import World
from tests.fake_cluster import cluster_view
from tests.in_loop import in_loop, until


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


def test_a_place_of_a_launch_is_had_by_the_last_that_came_until_it_is_given_up() -> None:
    ordered = e.LaunchOrdered(launch="x", on="ssh:a,b", hosts=2, key="k", folder="/f")
    came = [e.HostEnlisted(launch="x", place=1, start=start, key=f"k{start}", name="b") for start in range(2)]
    record = after(ordered, e.LaunchAccepted(launch="x", handle="a,b"), *came).launches["x"]
    assert (record.engine, record.handle, record.open_places) == ("ssh", "a,b", [0, 1])
    assert {place: host.key for place, host in record.hosts.items()} == {1: "k1"}
    left = after(ordered, *came, e.HostLeft(launch="x", place=1)).launches["x"]
    assert (left.hosts, left.open_places) == ({}, [0, 1])
    gone = after(ordered, *came, e.HostLeft(launch="x", place=1, given_up=True)).launches["x"]
    assert (gone.hosts, gone.open_places) == ({}, [0])
    over = after(ordered, *came, e.LaunchEnded(launch="x", reason="given back")).launches["x"]
    assert (over.hosts, over.ended) == ({}, "given back")


def test_a_removed_name_remembers_its_last_incarnation() -> None:
    state = after(*joined("a", "b"), e.NodeRemoved(node="b", reason="removed"))
    assert (state.last_incarnation("a"), state.last_incarnation("b"), state.last_incarnation("c")) == (1, 1, 0)
    again = after(
        *joined("a", "b"), e.NodeRemoved(node="b", reason="removed"), e.NodeAdded(node="b", peer="b", device="cpu")
    )
    assert (again.nodes["b"].incarnation, again.last_incarnation("b")) == (0, 1)


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


async def write(folder: Path, *what: e.Event | Record, **received: int) -> None:
    """A journal in ``folder`` with these rows behind those that are there, and closed."""
    journal = Journal(folder, recover(journal_path(folder)))
    for one in what:
        if isinstance(one, Record):
            journal.round(one)
        else:
            journal.event(one, durable=isinstance(one, e.DURABLE))
    if received:
        journal.received(received)
    assert journal.close()


def test_what_a_node_has_failed_of_is_said_until_the_next_cell_or_its_next_kernel() -> None:
    failed = [
        *joined("a", "b"),
        e.CellSubmitted(cell=1, source="x = 1", targets=[], replay=True),
        e.CellStarted(cell=1, nodes=["a", "b"], generation=2, time=3.0),
        e.CellNodeEnded(cell=1, node="b", status="error", error_name="KeyError", error_value="'y'"),
    ]

    def said(*more: e.Event) -> list[str]:
        state = after(*failed, *more)
        return [failure_of(state, node) for node in state.nodes.values()]

    assert said() == ["", "cell 1: KeyError: 'y'"]
    again = [
        e.NodeDown(node="b", incarnation=1, dead=True, reason="restarted"),
        e.NodeStarting(node="b", incarnation=2),
        e.NodeUp(node="b", incarnation=2, device="cpu", hello=hello("b", 2)),
    ]
    assert said(*again) == ["", ""]
    joins = e.CellJoined(cell=1, node="b")
    fails = e.CellNodeEnded(cell=1, node="b", status="error", error_name="NameError")
    assert said(*again, joins) == ["", ""]
    assert said(*again, joins, fails) == ["", "cell 1: NameError"]
    other = e.CellSubmitted(cell=2, source="y = 1", targets=[], replay=True)
    assert said(e.CellFinished(cell=1, status="error", time=4.0), other) == ["", ""]


@in_loop
async def test_a_journal_gives_the_state_back(tmp_path: Path) -> None:
    events = [
        *joined("a", "b"),
        e.CellSubmitted(cell=1, source="x = 1", targets=[], replay=True),
        e.CellStarted(cell=1, nodes=["a", "b"], generation=2, time=3.0),
        e.CellNodeEnded(cell=1, node="a", status="ok"),
    ]
    await write(tmp_path, *events, EndedRecord("model"), key=17)
    recovered = recover(journal_path(tmp_path))
    assert recovered.state == after(*events)
    assert [*recovered.rounds] == [EndedRecord("model")]
    assert recovered.received == {"key": 17}
    assert journal_path(tmp_path).stat().st_mode & 0o777 == 0o600


@in_loop
async def test_a_snapshot_says_what_the_rows_before_it_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_ROW_BYTES", log.MOST_BYTES)  # let go of every row that nobody needs
    monkeypatch.setattr(kept_rounds, "_COMMITS", 8)
    monkeypatch.setattr(kept_rounds, "MAX_ROUNDS", 20)
    records = [
        structs.replace(one, time=5.0) if isinstance(one, CommitRecord) else one for one in World(3).run().records
    ]
    events = [*joined("a", "b"), e.CellSubmitted(cell=1, source="x = 1", targets=["a"], replay=True)]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        journal = Journal(folder)
        state = State()
        for record in records * 30:
            journal.round(record)
            if folder == cut:
                journal.snapshot_if_due(state)
        for event in events:
            journal.event(event, durable=True)
            state = apply(state, event)
        if folder == cut:
            journal._snapshot_at = -(10**9)
            journal.snapshot_if_due(state)
        journal.event(e.Stopped(reason="over", time=1.0), durable=True)
        journal.received({"key": 3})
        assert journal.close()
    first, second = (recover(journal_path(folder)) for folder in (whole, cut))
    assert first.state == second.state == after(*events, e.Stopped(reason="over", time=1.0))
    assert [*first.rounds] == [*second.rounds]
    assert (first.committed.rounds, first.committed.seen) == (second.committed.rounds, second.committed.seen)
    assert first.received == second.received
    assert 2 * len(read_rounds(journal_path(cut))) < len(read_rounds(journal_path(whole)))


@in_loop
async def test_what_need_not_be_synced_is_so_before_it_is_more_than_nodes_keep(tmp_path: Path) -> None:
    assert 2 * MemberSettings().kept_commits > SYNC_ROWS  # a round is two rows
    journal = Journal(tmp_path)
    commit = next(one for one in World(3).run().records if isinstance(one, CommitRecord))
    synced = []
    journal._writer._synced += 1000.0  # not by the time
    for _ in range(SYNC_ROWS + 2):
        journal.round(commit, durable=False)
        assert journal.flush(10) is None
        synced.append(not journal._writer._unsynced)
    assert synced.count(True) == 1
    assert journal.close()


@in_loop
async def test_rows_of_another_process_are_not_taken_for_ones_own(tmp_path: Path) -> None:
    first, second = Journal(tmp_path), Journal(tmp_path)
    for _ in range(3):
        first.event(e.Stopped(reason="first", time=1.0), durable=True)
    assert first.flush(10) is None
    for _ in range(2):
        second.event(e.Stopped(reason="second", time=2.0), durable=True)
    wait_until(lambda: "another process writes it too" in str(second.flush(1)), 30, "the second journal to say why")
    assert not second.close()
    assert first.close()
    assert recover(journal_path(tmp_path)).state.stopped == "first"


@pytest.mark.parametrize("every_step", [False, True])
@in_loop
async def test_a_round_is_synced_when_it_is_written_and_what_decides_nothing_within_a_second(
    tmp_path: Path, every_step: bool
) -> None:
    records = World(3).run().records
    register = next(one for one in records if isinstance(one, RegisterRecord))
    journal = Journal(tmp_path)
    journal.round(structs.replace(register, register=structs.replace(register.register, every_step=every_step)))
    commit = next(one for one in records if isinstance(one, CommitRecord))
    journal.round(commit)
    assert journal.flush(10) is None
    assert read_rounds(journal.path)[-1].record == commit
    writer = journal._writer
    assert (writer._level, writer._unsynced) == ("FULL", False)
    journal.round(commit, durable=False)
    assert journal.flush(10) is None
    assert read_rounds(journal.path)[-1].record == commit
    assert (writer._level, writer._unsynced) == ("NORMAL", True)
    journal.received({"key": 3})
    assert journal.flush(10) is None
    assert (writer._level, writer._unsynced) == ("NORMAL", True)
    await until(lambda: not writer._unsynced, "the sync", 5 * SYNC_PERIOD)
    assert journal.close()


@pytest.mark.parametrize("seed", range(20))
@in_loop
async def test_a_write_ahead_log_cut_anywhere_gives_the_state_of_its_whole_rows(tmp_path: Path, seed: int) -> None:
    events = joined("a", "b", "c")
    (tmp_path / "whole").mkdir()
    journal = Journal(tmp_path / "whole")
    states = [State()]
    for event in events:
        journal.event(event, durable=False)
        assert journal.flush(10) is None
        states.append(apply(states[-1], event))
    copied = shutil.copytree(tmp_path / "whole", tmp_path / "cut", ignore=lambda *_: [f"{JOURNAL_FILE}-shm"])
    assert journal.close()
    ahead = copied / f"{JOURNAL_FILE}-wal"
    data = ahead.read_bytes()
    ahead.write_bytes(data[: random.Random(seed).randrange(len(data))])
    assert recover(journal_path(copied)).state in states


@pytest.mark.parametrize("damage", [b"", b"nonsense" * 1000])
@in_loop
async def test_a_journal_that_is_not_readable_is_one_line_that_names_it(tmp_path: Path, damage: bytes) -> None:
    await write(tmp_path, *joined("a", "b"))
    whole = journal_path(tmp_path).read_bytes()
    journal_path(tmp_path).write_bytes(damage or whole[: len(whole) // 2])
    for read in (recover, has_crashed):
        with pytest.raises(ValueError, match=rf"{JOURNAL_FILE} is not readable .*--fresh") as caught:
            read(journal_path(tmp_path))
        assert "\n" not in str(caught.value)


@in_loop
async def test_only_a_journal_without_an_end_has_crashed(tmp_path: Path) -> None:
    assert not has_crashed(journal_path(tmp_path))
    await write(tmp_path, joined()[0])
    assert not has_crashed(journal_path(tmp_path))  # nothing to go on with
    await write(tmp_path, *joined("a")[1:])
    assert has_crashed(journal_path(tmp_path))
    await write(tmp_path, e.Stopped(reason="over", time=1.0))
    assert not has_crashed(journal_path(tmp_path))


def test_a_record_is_the_same_when_it_was_a_row(tmp_path: Path) -> None:
    shapes: list[Shape] = []

    def number(shape: Shape) -> int:
        if shape not in shapes:
            shapes.append(shape)
        return shapes.index(shape)

    compact = 0
    for seed in range(100):
        for record in World(seed).run().records:
            noted = [record]
            if isinstance(record, CommitRecord):
                waits = {member.name: 0.25 * place for place, member in enumerate(record.members)}
                noted += [structs.replace(record, time=5.0, waits=waits), structs.replace(record, time=5.0)]
                noted.append(structs.replace(record, time=5.0, base_hash="15 characters..", waits={"n0": 0.12345}))
            for one in noted:
                row = to_row(one, 7.0, number)
                compact += row.shape is not None
                assert from_row(row, shapes.__getitem__) == one
    assert compact > 1000


@pytest.mark.parametrize("text", ["", "h1", "0" * 32, "A" * 32, "f" * 31, "x" * 14, "x" * 15, " " * 15, " " * 16])
def test_a_hash_is_unpacked_as_it_was(text: str) -> None:
    assert unpacked(packed(text)) == text


@in_loop
async def test_what_is_kept_of_a_journal_says_the_same_as_all_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worlds = [World(seed).run().records for seed in range(300)]
    monkeypatch.setattr(attempts, "KEPT_HASHES", 2)
    monkeypatch.setattr(attempts, "MOST_MISSED", attempts.KEPT_ROUNDS)
    monkeypatch.setattr(kept_rounds, "_COMMITS", 2 * attempts.KEPT_ROUNDS)  # some are taken back
    left_out = 0
    for seed, records in enumerate(worlds):
        (tmp_path / str(seed)).mkdir()
        await write(tmp_path / str(seed), *records)
        kept = [*recover(journal_path(tmp_path / str(seed))).rounds]
        left_out += len(records) - len(kept)
        assert recovered_from(kept) == recovered_from(records), f"seed {seed}"
        assert [noted.record for noted in read_rounds(journal_path(tmp_path / str(seed)))] == records
    assert left_out > 300


def recovered_from(records: list[Record]) -> rounds.RoundsState:
    nodes = tuple((f"n{rank}", 1) for rank in range(4))
    return rounds.apply(rounds.new_state(), rounds.LeaderRestarted(tuple(records), nodes, 1.0, 10**6, 0, ()))[0]


def stream(node: str, text: str) -> Output:
    return Output(node=node, rank=0, kind="stream", content={"name": "stdout", "text": text})


def test_output_of_one_node_is_merged_and_keeps_its_order() -> None:
    outputs = [stream("a", "1"), stream("a", "2"), stream("b", "3"), stream("a", "4")]
    merged = [(output.node, output.content["text"]) for batch in batches(outputs) for output in batch]
    assert merged == [("a", "12"), ("b", "3"), ("a", "4")]


def test_much_output_is_bounded_in_memory_and_whole_in_the_file(tmp_path: Path) -> None:
    outputs = CellOutputs(tmp_path / "cells" / "1.jsonl")
    for number in range(3000):
        outputs.add(stream("a", f"{number:06d}" + "x" * 1000 + "\n"), Origin("key", number))
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


def test_output_that_comes_again_to_the_next_coordinator_is_kept_once(tmp_path: Path) -> None:
    index = tmp_path / "1.jsonl"
    outputs = CellOutputs(index)
    # While acknowledgements are held, 7 is the last one that need not come again.
    assert outputs.add(stream("a", "8"), Origin("key", 7, 8, 1))
    assert outputs.add(stream("a", "9"), Origin("key", 7, 9, 1))
    outputs.close()
    again = CellOutputs(index)
    again.recover()
    assert again.last_sequence == {"key": 7}
    assert not again.add(stream("a", "8"), Origin("key", 8, 8, 1))
    assert not again.add(stream("a", "9"), Origin("key", 9, 9, 1))
    assert again.add(stream("b", "8"), Origin("key", 9, 8, 1))
    assert again.add(stream("a", "9 of an agent that was started again"), Origin("key", 9, 9, 2))
    assert again.add(stream("a", "10"), Origin("key", 10, 10, 1))
    assert again.add(stream("a", "10, its end"), Origin("key", 10, 10, 1))
    again.unload()
    assert again.add(stream("a", "11"), Origin("key", 11, 11, 1))
    assert again.add(stream("a", "11, its end"), Origin("key", 11, 11, 1))
    texts = "".join(output.content["text"] for output in again.all())
    assert texts == "898" + "9 of an agent that was started again" + "1010, its end1111, its end"
    again.close()


def test_a_name_error_for_a_name_of_the_notebook_is_recognised() -> None:
    error = {"ename": "NameError", "evalue": "name 'data' is not defined"}
    assert hint_missing_name(error, ("other", "data")) == "data"
    assert hint_missing_name(error, ("other",)) is None
    assert hint_missing_name({"ename": "ValueError", "evalue": "'data'"}, ("data",)) is None


@pytest.mark.parametrize(
    ("source", "nodes", "names"),
    [
        ("data = 5", ["a"], "a"),
        ("x = 1\nother, data = load()", ["c", "a"], "a, c"),
        ("data: list[int] = []", list("acdefg"), "a, c, d, e, ..."),
        ("def data(): pass", ["a"], "a"),
        ("from somewhere import x as data", ["a"], "a"),
        ("data = 5", ["a", "b"], ""),  # deleted since then, on this node at least
        ("data = 5", [], ""),
        ("print(data)\ndata == 5\nf(data=3)\nmydata = 5\ndata.x = 1", ["a"], ""),
    ],
)
def test_a_name_error_for_a_name_of_other_nodes_says_which_cell_defined_it(
    source: str, nodes: list[str], names: str
) -> None:
    error = {"ename": "NameError", "evalue": "name 'data' is not defined"}
    hint = f"cell 7 defined 'data' on {names} only: %%on_all defines it on every node" if names else None
    assert hint_other_nodes(error, "b", [(8, "print(data)", ["b"]), (7, source, nodes)]) == hint
    assert hint_other_nodes(error | {"ename": "ValueError"}, "b", [(7, source, nodes)]) is None


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


def taken_over(folder: Path) -> SeriesStore:
    """The store of a coordinator that is started again."""
    store = SeriesStore()
    store.take_over(read_series(curves_path(folder)))
    return store


def test_curves_on_disk_are_those_in_memory_with_their_gaps(tmp_path: Path) -> None:
    store = SeriesStore()
    file = CurvesFile(tmp_path, store)
    for step in range(300):
        store.add("a", "loss", step, float(step), math.inf if step == 7 else step / 3)
        store.add("", "loss", step, float(step), 0.25, job="model")
        if step % 10 == 9:
            file.append(store.take_fresh())
    file.close()
    assert curves_path(tmp_path).stat().st_mode & 0o777 == 0o600
    loss, model = taken_over(tmp_path).all()
    assert (loss.node, loss.job, model.node, model.job) == ("a", "", "", "model")
    assert loss.step == list(range(300))
    assert [place for place, value in enumerate(loss.value) if not math.isfinite(value)] == [7]
    assert loss.value[8:] == [step / 3 for step in range(8, 300)]
    assert model.value == [0.25] * 300


def test_the_file_of_a_long_run_stays_small_and_keeps_range_and_peak(tmp_path: Path) -> None:
    store = SeriesStore()
    file, largest = CurvesFile(tmp_path, store), 0
    for step in range(120_000):
        store.add("a", "loss", step, 1e9 + step / 7, 1e9 if step == 12_345 else step / 7)
        if step % 20 == 19:
            file.append(store.take_fresh())
            assert file._working is not None
            file._working.result(10)
            largest = max(largest, sum(path.stat().st_size for path in tmp_path.iterdir()))
    file.close()
    assert GROWTH < largest < 3.2 * GROWTH
    assert curves_path(tmp_path).stat().st_size < 1.7 * GROWTH
    (series,) = taken_over(tmp_path).all()
    assert len(series.step) <= MAX_POINTS
    assert (series.step[0], series.step[-1]) == (0, 119_999)
    assert 1e9 in series.value
    assert series.seen >= 119_999


def test_a_piece_that_is_not_readable_costs_no_other_piece_before_it(tmp_path: Path) -> None:
    store = SeriesStore()
    file = CurvesFile(tmp_path, store)
    store.add("a", "loss", 1, 1.0, 1.0)
    file.append(store.take_fresh())
    file.close()
    with sqlite3.connect(curves_path(tmp_path)) as connection:
        connection.execute("INSERT INTO pieces (body) VALUES (?)", (b"\xff",))
    connection.close()
    assert [one.step for one in taken_over(tmp_path).all()] == [[1]]
    curves_path(tmp_path).write_bytes(b"nonsense" * 1000)
    assert not list(read_series(curves_path(tmp_path)))
    assert not list(read_series(tmp_path / "none"))


def test_points_that_come_again_after_a_restart_are_left_out_and_a_new_run_is_not(tmp_path: Path) -> None:
    store = SeriesStore()
    file = CurvesFile(tmp_path, store)
    for step in range(100):
        store.add("a", "loss", step, 1000.0 + step / 10, 1.0)
    file.append(store.take_fresh())
    file.close()
    again = taken_over(tmp_path)
    for step in range(90, 110):
        again.add("a", "loss", step, 1000.0 + step / 10 + 0.3, 1.0)
    assert [one.step for one in again.all()] == [list(range(110))]
    assert [one.step for one in again.take_fresh()] == [list(range(100, 110))]
    new_run = taken_over(tmp_path)
    for step in range(3):
        new_run.add("a", "loss", step, 1100.0 + step, 1.0)
    assert [one.step[-3:] for one in new_run.all()] == [[0, 1, 2]]


def test_a_disk_that_is_full_costs_no_more_than_the_file(tmp_path: Path) -> None:
    store, folder = SeriesStore(), tmp_path / "missing"
    file = CurvesFile(folder, store)
    store.add("a", "loss", 1, 1.0, 1.0)
    file.append(store.take_fresh())
    file._thread.submit(int).result(10)
    folder.mkdir()
    store.add("a", "loss", 2, 2.0, 2.0)
    file.append(store.take_fresh())
    file.close()
    assert [one.value for one in read_series(curves_path(folder))] == [[1.0, 2.0]]


def kept_view(folder: Path, ended: str = "") -> LastView:
    """What a run has left in ``folder``."""
    view = LastView(state=cluster_view(), checkpoints=[], peers=[], ended=ended)
    file = CurvesFile(folder, SeriesStore())
    file.keep_view(view)
    file.close()
    return view


def test_the_last_view_comes_back_as_it_was_and_a_damaged_one_not_at_all(tmp_path: Path) -> None:
    view = kept_view(tmp_path, "stopped")
    assert read_view(curves_path(tmp_path)) == view
    curves_path(tmp_path).write_bytes(b"nonsense" * 1000)
    assert read_view(curves_path(tmp_path)) is None
    assert last_run(tmp_path) is None
    assert last_run(tmp_path / "none") is None


def test_a_run_whose_coordinator_was_killed_says_so(tmp_path: Path) -> None:
    kept_view(tmp_path)
    run = last_run(tmp_path)
    assert run is not None
    assert run.ended.startswith("its coordinator was killed after ")
    assert (run.series(), run.history().rounds, run.history().cells_seen) == ([], [], 0)


def test_a_run_with_a_damaged_journal_is_refused_with_its_name(tmp_path: Path) -> None:
    kept_view(tmp_path)
    journal_path(tmp_path).write_bytes(b"nonsense" * 1000)
    with pytest.raises(ValueError, match=rf"{JOURNAL_FILE} is not readable"):
        last_run(tmp_path)
