"""A journal of many hours: read again within seconds and little memory, by one coordinator at a time."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from notebook_cluster.client import Cluster, ClusterError, start
from notebook_cluster.coordinator import startup
from notebook_cluster.journal.events import CellSubmitted
from notebook_cluster.journal.records import COMMIT, SEAL
from notebook_cluster.journal.store import JOURNAL, checkpoint, open_to_write, reading, remove
from tests.cluster import Watcher, kill, read_events, run, running_cluster
from tests.conftest import marked_processes, wait_until
from tests.training_cells import SETUP, commits, job

pytestmark = pytest.mark.usefixtures("work")

LEFT = Path(__file__).parent / "written_before" / "run"
ROUNDS = 60_000
"""Put before those that a test trains."""

TRAIN = """
model = make_model(1000)
sync = nc.DiLoCo(model, every=1)
while not os.path.exists("go"):
    work(model, sync.round)
    sync.step()
print("over", flush=True)
"""


def lengthen(journal: Path, rounds: int) -> int:
    """Put ``rounds`` more rounds before those in ``journal``, numbered on below 1: the newest state stays what the
    nodes hold. There is no snapshot: all of it has to be read. Returns the new size."""
    with reading(journal) as connection:
        rows = connection.execute("SELECT * FROM rounds ORDER BY id").fetchall()
    first, sealed = next(place for place, row in enumerate(rows) if row[2] == SEAL), next(
        row for row in rows if row[2] == SEAL
    )  # fmt: skip
    committed = next(row for row in rows if row[2] == COMMIT)
    connection = open_to_write(journal, JOURNAL)
    connection.execute("BEGIN")
    for table in ("rounds", "events", "received"):  # the highest numbers first, so that none is there twice
        connection.execute(f"UPDATE {table} SET id = -id - {2 * rounds} WHERE id >= {rows[first][0]}")
        connection.execute(f"UPDATE {table} SET id = -id WHERE id < 0")
    row = rows[first][0]
    for number in range(1 - rounds, 1):
        for one in (sealed, committed):
            connection.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                               (row, *one[1:4], number, *one[5:]))  # fmt: skip
            row += 1
    connection.execute("COMMIT")
    checkpoint(connection)
    connection.close()
    return journal.stat().st_size


@pytest.mark.proof
def test_training_goes_on_after_a_log_of_many_rounds(work: Path, no_processes_left: str) -> None:
    killed = Cluster.start("test", local=2)
    run(killed, SETUP)
    cell = killed.execute(TRAIN).cell
    wait_until(lambda: len(commits(killed)) > 20, 60, "some rounds")
    kill(killed.connection.file.pid)
    killed.connection.wait_closed()
    before = commits(killed)[-1]["commit"]["round"]
    size = lengthen(Path(killed.connection.file.run_log), ROUNDS)
    assert size > 10e6
    with running_cluster() as cluster:
        watcher = Watcher(cluster.watch(cell))
        memory = psutil.Process(cluster.connection.file.pid).memory_info().rss
        wait_until(lambda: job(cluster).round > before + 20, 60, "more rounds")
        assert not [event.text for event in cluster.state().events if "holds" in event.text]
        assert memory < 150e6
        assert cluster.history().rounds_seen > ROUNDS
        numbers = [record["commit"]["round"] for record in commits(cluster)]
        assert numbers == list(range(1 - ROUNDS, numbers[-1] + 1))
        (work / "go").touch()
        assert watcher.wait_end().status == "ok"
    killed.close()


def coordinators(mark: str) -> list[int]:
    """Process ids. A process that a coordinator has just started has its command line for a moment."""
    found = [pid for pid, command in marked_processes(mark).items() if "notebook_cluster.coordinator" in command]
    return [pid for pid in found if parent(pid) not in found]


def parent(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return None


@pytest.fixture
def late(work: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Coordinators that start run this file first."""
    folder = work / "late"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(start, "START_TIMEOUT", 3.0)
    return folder / "sitecustomize.py"


IN_COORDINATOR = 'import sys\nif "notebook_cluster.coordinator" in sys.orig_argv:\n    '


def test_a_coordinator_that_never_answers_is_ended_before_another_is_started(
    late: Path, no_processes_left: str
) -> None:
    late.write_text(IN_COORDINATOR + "import time; time.sleep(600)")
    for _ in range(2):
        with pytest.raises(ClusterError, match=r"said nothing for 3 s and was ended"):
            Cluster.start("test", local=0)
        assert coordinators(no_processes_left) == []
    late.unlink()
    with running_cluster(local=0):
        assert len(coordinators(no_processes_left)) == 1


def test_a_coordinator_that_says_how_far_it_is_is_waited_for(late: Path, no_processes_left: str) -> None:
    killed = Cluster.start("test", local=1)
    run(killed, "x = 5")
    kill(killed.connection.file.pid)
    late.write_text(
        IN_COORDINATOR
        + "import time; from notebook_cluster.coordinator.startup import StartProgress; read = StartProgress.read\n"
        + "    def slowly(self, done, size):\n        for _ in range(12): time.sleep(0.55); read(self, done, size)\n"
        + "    StartProgress.read = slowly\n"
    )
    said: list[str] = []
    with running_cluster(local=1, on_progress=said.append) as cluster:
        assert run(cluster, "print(x)") == {"local": "5\n"}
        assert any("reading its journal, 0 of 0 MB" in text for text in said)
        assert len(coordinators(no_processes_left)) == 1
    killed.close()


def test_a_second_coordinator_of_one_cluster_ends_at_once(
    no_processes_left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_cluster(local=0) as cluster:
        first = cluster.connection.file.pid
        folder = Path(cluster.connection.file.run_log).parent
        source = (
            "import sys; from notebook_cluster.coordinator import __main__ as main, startup\n"
            "startup.LOCK_WAIT = 0.5; sys.exit(main.main())"
        )
        command = [sys.executable, "-c", source, "--cluster", "test", "--runtime", str(folder), "--directory", "/"]
        for options in ([], ["--resume"]):
            second = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
            assert second.returncode == 1
            assert f"cluster 'test' has a coordinator already (process {first})" in second.stderr
        assert cluster.state().name == "test"
        assert (folder / startup.LOCK_FILE).read_text() == f"{first}\n"


def test_a_damaged_journal_is_one_line_with_the_way_out() -> None:
    killed = Cluster.start("test", local=1)
    run(killed, "x = 5")
    kill(killed.connection.file.pid)
    killed.connection.wait_closed()
    path = Path(killed.connection.file.run_log)
    connection = open_to_write(path, JOURNAL)
    checkpoint(connection)
    connection.close()
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"nonsense" * 1000):
        remove(path)
        path.write_bytes(damaged)
        with pytest.raises(ClusterError, match=r"run\.journal is not readable .*--fresh") as caught:
            Cluster.start("test", local=1)
        assert "\n" not in str(caught.value)
    remove(path)
    path.write_bytes(whole)
    with running_cluster(local=1) as cluster:
        assert run(cluster, "print(rank, x)") == {"local": "0 5\n"}
    killed.close()


def test_a_run_of_a_version_without_a_journal_is_gone_on_with(work: Path, jupyter_dirs: Path) -> None:
    folder = jupyter_dirs / "run" / "notebook_cluster" / "clusters" / "test"
    shutil.copytree(LEFT, folder)
    with running_cluster(local=0) as cluster:
        state = cluster.state()
        assert [node.name for node in state.nodes] == ["local", "local-2"]
        assert [one.round for one in cluster.history().rounds] == [1, 2, 3, 4]
        assert (folder / "run.jsonl.imported").exists()


def test_a_fresh_start_keeps_the_run_before_also_a_damaged_one() -> None:
    for content in ("first", "second"):
        with running_cluster(fresh=True, local=1) as cluster:
            run(cluster, f"{content} = 1")
            path = Path(cluster.connection.file.run_log)
    path.write_bytes(b"nonsense" * 1000)
    with running_cluster(fresh=True, local=0):
        kept = sorted(path.parent.glob("runs/*/run.journal"))
    assert [[event.source for event in read_events(one) if isinstance(event, CellSubmitted)] for one in kept[:1]] == [
        ["first = 1"]
    ]
    assert kept[1].read_bytes() == b"nonsense" * 1000
