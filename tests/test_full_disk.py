"""The disk of the journal is full: nothing is lost, nothing is done twice, and all goes on when there is room."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.coordinator.core import Core, Disk
from notebook_cluster.journal import log
from notebook_cluster.journal.events import DoorOpened
from notebook_cluster.journal.log import Journal
from notebook_cluster.journal.reading import read_rounds, recover
from notebook_cluster.journal.records import EndedRecord
from notebook_cluster.journal.state import State
from notebook_cluster.journal.writer import RETRY, Writer
from notebook_cluster.protocol.views import CellChanged, RequestError
from tests.cluster import Watcher, is_running, kernel_pid, kill, read_events, run, running_cluster
from tests.conftest import wait_until
from tests.full_disk import SmallDisk, small_disk
from tests.in_loop import in_loop, until
from tests.training_cells import SETUP, commits, job, replay

TRAIN = """
model = make_model(1000)
keep("theta", model, 0)
sync = nc.DiLoCo(model, every=1)
step = 0
while not os.path.exists(f"go-{nc.node()}"):
    work(model, step)
    step += 1
    keep("local", model, sync.round + 1)
    sync.step()
    time.sleep(0.02)
sync.finish()
print(sync.round, state_hash(sync), flush=True)
"""

BEGIN = "import os, time\nopen('begun', 'w').close()\n"
"""A cell that has not come to its nodes when the disk is full waits for room, too."""


@pytest.fixture
def disk(jupyter_dirs: Path, no_processes_left: str, work: Path) -> Iterator[SmallDisk]:
    """The disk of every cluster's folder."""
    with small_disk(jupyter_dirs / "run" / "notebook_cluster" / "clusters") as mounted:
        yield mounted


def told(cluster: Cluster, words: str) -> list[str]:
    return [event.text for event in cluster.state().events if words in event.text]


def train(cluster: Cluster) -> int:
    """Begin to train, on two nodes; the number of the cell, once some rounds are over."""
    run(cluster, SETUP)
    cell = cluster.execute(TRAIN.replace("state_hash(sync)", "'end'")).cell
    wait_until(lambda: len(commits(cluster)) > 5, 60, "some rounds")
    return cell


def hold(cluster: Cluster, disk: SmallDisk) -> int:
    """Fill the disk; the last round in the log, once nothing goes on."""
    disk.fill()
    wait_until(lambda: told(cluster, "is full"), 60, lambda: f"the line: {cluster.state().events}")
    return int(commits(cluster)[-1]["commit"]["round"])


def end_and_check(cluster: Cluster, cell: int, held: int, work: Path) -> None:
    """More rounds come, and each is there once, with the mean of what its members had."""
    wait_until(lambda: job(cluster).round > held + 10, 60, "more rounds")
    for name in ("local", "local-2"):
        (work / f"go-{name}").touch()
    ended = Watcher(cluster.watch(cell)).wait_end()
    assert ended.status == "ok", ended
    records = commits(cluster)
    numbers = [record["commit"]["round"] for record in records]
    assert numbers == list(range(1, len(numbers) + 1))
    replay(work, records[:-1])
    assert all(record["commit"]["members"] == ["local", "local-2"] for record in records[:-1])


def test_rounds_wait_for_room_and_go_on(disk: SmallDisk, work: Path) -> None:
    with running_cluster(local=2) as cluster:
        cell = train(cluster)
        watched = cluster.watch(cell)
        held = hold(cluster, disk)
        (line,) = told(cluster, "is full")
        assert str(disk.folder / "test") in line
        assert "MB free" in line
        with pytest.raises(ClusterError, match="is full"):
            cluster.execute("1")
        assert cluster.latest is not None
        assert psutil.pid_exists(cluster.connection.file.pid)
        assert job(cluster).round <= held + 1
        assert commits(cluster)[-1]["commit"]["round"] == held

        def notice() -> bool:
            event = watched.get(0.1)
            return isinstance(event, CellChanged) and "is full" in event.note

        wait_until(notice, 60, "the line in the cell")
        disk.make_room()
        wait_until(lambda: told(cluster, "everything goes on"), 60, "the line")
        end_and_check(cluster, cell, held, work)
        assert run(cluster, "print(rank)") == {"local": "0\n", "local-2": "1\n"}


def test_a_coordinator_that_dies_on_a_full_disk_goes_on_from_what_is_written(disk: SmallDisk, work: Path) -> None:
    killed = Cluster.start("test", local=2)
    cell = train(killed)
    held = hold(killed, disk)
    kill(killed.connection.file.pid)
    killed.connection.wait_closed()
    for _ in range(2):
        with pytest.raises(ClusterError, match=rf"cannot start: the disk of {disk.folder}/test is full"):
            Cluster.start("test")
    disk.make_room()
    with running_cluster() as cluster:
        end_and_check(cluster, cell, held, work)
    killed.close()


def test_a_cluster_that_is_stopped_on_a_full_disk_leaves_no_kernel(disk: SmallDisk, work: Path) -> None:
    cluster = Cluster.start("test", local=2)
    pids = [kernel_pid(cluster, name) for name in ("local", "local-2")]
    train(cluster)
    hold(cluster, disk)
    cluster.stop()
    assert not any(is_running(pid) for pid in pids)
    cluster.close()


def test_what_a_node_said_meanwhile_is_heard_by_the_next_coordinator(disk: SmallDisk, work: Path) -> None:
    killed = Cluster.start("test", local=1)
    run(killed, "x = 1")
    stream = killed.execute(
        f"{BEGIN}while not os.path.exists('go'): time.sleep(0.01)\nopen('ran', 'a').write('x')\nprint('d' * 9000)"
    )
    wait_until((work / "begun").exists, 60, "the cell")
    disk.fill()
    try:
        killed.execute("open('never', 'w')  # " + "x" * 600_000)  # more than the write-ahead log has room for
    except ClusterError as error:  # where something smaller had no room before, it is refused at once
        if "is full" not in str(error):
            raise
    wait_until(lambda: told(killed, "is full"), 60, "the line")
    (work / "go").touch()
    assert Watcher(stream).wait_end().status == "ok"
    kill(killed.connection.file.pid)
    killed.connection.wait_closed()
    disk.make_room()
    with running_cluster(local=1) as cluster:
        watcher = Watcher(cluster.watch(stream.cell))
        assert watcher.wait_end().status == "ok"
        assert watcher.text("local") == "d" * 9000 + "\n"
        assert run(cluster, "print(x)") == {"local": "1\n"}
    assert not (work / "never").exists()
    assert (work / "ran").read_text() == "x"
    killed.close()


def test_output_that_cannot_be_written_is_shown_all_the_same(disk: SmallDisk, work: Path) -> None:
    with running_cluster(local=1) as cluster:
        watcher = Watcher(
            cluster.execute(
                f"{BEGIN}while not os.path.exists('go'): time.sleep(0.01)\n"
                "print('x' * 5000, 'seen', flush=True)\n"
                "while not os.path.exists('end'): time.sleep(0.01)"
            )
        )
        wait_until((work / "begun").exists, 60, "the cell")
        disk.fill()
        (work / "go").touch()
        watcher.wait_for("seen")
        disk.make_room()
        (work / "end").touch()
        assert watcher.wait_end().status == "ok"
        wait_until(lambda: len(told(cluster, "is full")) == len(told(cluster, "everything goes on")), 60, "room")
        assert run(cluster, "print(5)") == {"local": "5\n"}


@in_loop
async def test_rows_wait_in_order_and_half_a_row_is_none(tmp_path: Path) -> None:
    done: list[str] = []
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        journal = Journal(disk.folder)
        journal.on_holding = lambda holding: done.append(f"holding {holding}")
        journal.round(EndedRecord("0"))
        assert journal.flush(10) is None
        await journal.written(10)
        disk.fill()
        journal.round(EndedRecord("1" * 300_000))
        journal.when_written(lambda: done.append("told of 1"))
        journal.when_written(lambda: journal.round(EndedRecord("2")))
        journal.when_written(lambda: done.append("told of 2"))
        journal.settled(lambda: done.append("it waits"))
        await until(lambda: journal.holding, "word of the full disk")
        journal.received({"key": 1})
        await asyncio.sleep(4 * RETRY)
        assert done == ["holding True", "it waits"]
        assert [noted.record for noted in read_rounds(journal.path)] == [EndedRecord("0")]
        assert journal.held_seconds() > 2 * RETRY
        disk.make_room()
        await until(lambda: not journal.holding, "room")
        assert done[2:] == ["told of 1", "told of 2", "holding False"]
        journal.when_written(lambda: done.append("at once"))
        assert done[-1] == "at once"
        assert journal.close()
        assert [record.job[:1] for record in recover(journal.path).rounds] == ["0", "1", "2"]


@in_loop
async def test_a_disk_that_does_not_answer_lets_messages_be_handled_and_is_named_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, done = threading.Event(), []
    journal = Journal(tmp_path)
    journal.on_holding = lambda holding: done.append((holding, journal.trouble is None))
    write = Writer._write
    monkeypatch.setattr(Writer, "_write", lambda self, batch: (gate.wait(), write(self, batch)))
    monkeypatch.setattr(log, "SILENT_AFTER", 2 * log.STALLED_AFTER)
    journal.event(DoorOpened(reception=1, pairing=0), durable=True)
    journal.when_written(lambda: done.append("told"))
    journal.settled(lambda: done.append("handled"))
    journal.look()
    assert done == []
    await asyncio.sleep(log.STALLED_AFTER)
    journal.look()
    assert done == [(True, True), "handled"]
    assert journal.holding
    await asyncio.sleep(log.STALLED_AFTER)
    journal.look()
    assert done[2:] == [(True, False)]
    assert "takes nothing" in str(journal.trouble)
    gate.set()
    await until(lambda: not journal.holding, "the disk")
    assert done[3:] == ["told", (False, True)]
    assert 2 * log.STALLED_AFTER < journal.held_seconds() < 20
    assert journal.close()


@in_loop
async def test_what_must_be_in_the_journal_waits_for_a_slow_disk_and_is_refused_when_it_is_known_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    disk = Disk(Core(journal, State()), hold_links=lambda hold: None, tell_running_cell=lambda text: None)
    write = Writer._write
    for silent_after, said in ((60.0, ""), (2 * log.STALLED_AFTER, "takes nothing for 1 s")):
        gate = threading.Event()
        monkeypatch.setattr(Writer, "_write", lambda self, batch, gate=gate: (gate.wait(), write(self, batch)))
        monkeypatch.setattr(log, "SILENT_AFTER", silent_after)
        journal.event(DoorOpened(reception=1, pairing=0), durable=True)
        await asyncio.sleep(log.STALLED_AFTER)
        journal.look()
        assert journal.holding
        waiting = asyncio.create_task(disk.ready())
        await asyncio.sleep(log.STALLED_AFTER)
        journal.look()
        assert not waiting.done()
        if said:
            with pytest.raises(RequestError, match=said):
                await waiting
        gate.set()
        await until(lambda: not journal.holding, "the disk")
        if not said:
            await waiting
        await disk.ready()
    assert journal.close()


@in_loop
async def test_what_follows_from_a_row_waits_for_it_and_messages_for_what_came_before(tmp_path: Path) -> None:
    done: list[int] = []
    journal = Journal(tmp_path)
    for number in range(100):
        journal.event(DoorOpened(reception=number, pairing=0), durable=True)
        journal.when_written(lambda number=number: done.append(len(read_events(journal.path)) > number))  # type: ignore[misc]
        journal.settled(lambda: done.append(True))
    assert done == []
    await journal.written(60)
    await until(lambda: len(done) == 200, "calls")
    assert all(done)
    assert journal.close()
