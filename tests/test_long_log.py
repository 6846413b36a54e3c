"""A run log of many hours: read again within seconds and little memory, by one coordinator at a time."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from notebook_cluster.client import Cluster, ClusterError, start
from notebook_cluster.coordinator import single
from tests.cluster import Watcher, kill, run, running_cluster
from tests.conftest import marked_processes, wait_until
from tests.training_cells import SETUP, commits, job

pytestmark = pytest.mark.usefixtures("work")

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


def lengthen(log: Path, rounds: int) -> int:
    """Put ``rounds`` more rounds before those in ``log``, numbered on below 1: the newest state stays what the nodes
    hold. Returns the new size."""
    lines = log.read_bytes().splitlines(keepends=True)
    records = [(json.loads(line).get("round") or {}) for line in lines]
    first = next(place for place, record in enumerate(records) if record.get("kind") == "seal")
    seals = [line for line, record in zip(lines, records, strict=True) if record.get("kind") == "seal"]
    sealed, committed = json.loads(seals[0]), json.loads(next(
        line for line, record in zip(lines, records, strict=True) if record.get("kind") == "commit"
    ))  # fmt: skip
    with open(log.with_suffix(".long"), "wb") as file:
        file.writelines(lines[:first])
        for number in range(1 - rounds, 1):
            sealed["round"]["seal"]["round"] = committed["round"]["commit"]["round"] = number
            file.write(json.dumps(sealed, separators=(",", ":")).encode() + b"\n")
            file.write(json.dumps(committed, separators=(",", ":")).encode() + b"\n")
        file.writelines(lines[first:])
    os.replace(log.with_suffix(".long"), log)
    return log.stat().st_size


def test_training_goes_on_after_a_log_of_many_rounds(work: Path, no_processes_left: str) -> None:
    killed = Cluster.start("test", local=2)
    run(killed, SETUP)
    cell = killed.execute(TRAIN).cell
    wait_until(lambda: len(commits(killed)) > 20, 60, "some rounds")
    kill(killed.connection.file.pid)
    killed.connection.wait_closed()
    before = commits(killed)[-1]["commit"]["round"]
    size = lengthen(Path(killed.connection.file.run_log), ROUNDS)
    assert size > 50e6
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
    return [pid for pid, command in marked_processes(mark).items() if "notebook_cluster.coordinator" in command]


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
        + "import time; from notebook_cluster.coordinator.single import Progress; read = Progress.read\n"
        + "    def slowly(self, done, size):\n        for _ in range(12): time.sleep(0.55); read(self, done, size)\n"
        + "    Progress.read = slowly\n"
    )
    said: list[str] = []
    with running_cluster(local=1, on_progress=said.append) as cluster:
        assert run(cluster, "print(x)") == {"local": "5\n"}
        assert any("reading its run log, 0 of 0 MB" in text for text in said)
        assert len(coordinators(no_processes_left)) == 1
    killed.close()


def test_a_second_coordinator_of_one_cluster_ends_at_once(
    no_processes_left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_cluster(local=0) as cluster:
        first = cluster.connection.file.pid
        folder = Path(cluster.connection.file.run_log).parent
        source = (
            "import sys; from notebook_cluster.coordinator import __main__ as main, single\n"
            "single.LOCK_WAIT = 0.5; sys.exit(main.main())"
        )
        command = [sys.executable, "-c", source, "--cluster", "test", "--runtime", str(folder), "--directory", "/"]
        for options in ([], ["--resume"]):
            second = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
            assert second.returncode == 1
            assert f"cluster 'test' has a coordinator already (process {first})" in second.stderr
        assert cluster.state().name == "test"
        assert (folder / single.LOCK_FILE).read_text() == f"{first}\n"


def test_a_damaged_log_is_one_line_with_the_way_out() -> None:
    killed = Cluster.start("test", local=1)
    kill(killed.connection.file.pid)
    killed.connection.wait_closed()
    log = Path(killed.connection.file.run_log)
    whole = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*whole[:3], b'{"time": 1, "event": {"type": "No\n', *whole[3:]]))
    with pytest.raises(ClusterError, match=r"run\.jsonl line 4 is not readable .*--fresh") as caught:
        Cluster.start("test", local=1)
    assert "\n" not in str(caught.value)
    log.write_bytes(b"".join([*whole[:3], b'{"time":1,"round":{"kind": \n', *whole[3:]]))
    with pytest.raises(ClusterError, match=r"run\.jsonl line 4 is not readable .*--fresh"):
        Cluster.start("test", local=1)
    log.write_bytes(b"".join(whole) + whole[-1][:20])
    with running_cluster(local=1) as cluster:
        assert run(cluster, "print(rank)") == {"local": "0\n"}
    killed.close()
