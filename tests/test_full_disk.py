"""The disk of the run log is full: nothing is lost, nothing is done twice, and all goes on when there is room."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.coordinator.runlog import RunLog, read_log
from notebook_cluster.protocol.views import CellChanged
from tests.cluster import Watcher, is_running, kernel_pid, kill, run, running_cluster
from tests.conftest import wait_until
from tests.full_disk import SmallDisk, small_disk
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


@pytest.mark.parametrize("when", ["room before the start", "room after the start"])
def test_a_coordinator_that_dies_on_a_full_disk_goes_on_from_what_is_logged(
    disk: SmallDisk, work: Path, when: str
) -> None:
    killed = Cluster.start("test", local=2)
    cell = train(killed)
    held = hold(killed, disk)
    kill(killed.connection.file.pid)
    killed.connection.wait_closed()
    if when == "room before the start":
        (disk.folder / "test" / "connection.json").unlink()
        disk.fill()
        with pytest.raises(ClusterError, match=rf"cannot start: the disk of {disk.folder}/test is full"):
            Cluster.start("test")
        disk.make_room()
    with running_cluster() as cluster:
        if when == "room after the start":  # in the pages of files that were there
            wait_until(lambda: told(cluster, "is full"), 60, lambda: f"the line: {cluster.state().events}")
            disk.make_room()
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
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
        "open('ran', 'a').write('x')\nprint('d' * 9000)"
    )
    disk.fill()
    killed.execute("open('never', 'w')  # " + "x" * 8000)  # more than what is left of the log's last page
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
                "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
                "print('x' * 5000, 'seen', flush=True)\n"
                "while not os.path.exists('end'): time.sleep(0.01)"
            )
        )
        disk.fill()
        (work / "go").touch()
        watcher.wait_for("seen")
        disk.make_room()
        (work / "end").touch()
        assert watcher.wait_end().status == "ok"
        assert run(cluster, "print(5)") == {"local": "5\n"}


def test_lines_wait_in_order_and_half_a_line_is_taken_back(tmp_path: Path) -> None:
    done: list[str] = []
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        log = RunLog(disk.folder / "run.jsonl")
        log.on_holding = lambda holding: done.append(f"holding {holding}")
        log.round({"kind": "cell", "job": "0"})
        disk.fill()
        whole = log.path.stat().st_size
        log.round({"kind": "cell", "job": "1" * 20_000})
        assert log.path.stat().st_size == whole
        log.when_written(lambda: done.append("told of 1"))
        log.when_written(lambda: log.round({"kind": "cell", "job": "2"}))
        log.when_written(lambda: done.append("told of 2"))
        log.received({"key": 1})
        log.retry()
        assert done == ["holding True"]
        disk.make_room()
        log.retry()
        assert done == ["holding True", "told of 1", "told of 2", "holding False"]
        assert not log.holding
        log.when_written(lambda: done.append("at once"))
        assert done[-1] == "at once"
        log.close()
        assert [record["job"][:1] for record in read_log(log.path).rounds] == ["0", "1", "2"]
        assert [json.loads(line)["round"]["job"][:1] for line in log.path.read_bytes().splitlines()] == ["0", "1", "2"]
        assert os.path.getsize(log.path) > whole + 20_000
