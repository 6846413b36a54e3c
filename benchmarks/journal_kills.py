"""A coordinator that is killed with SIGKILL again and again while two nodes train, with its journal on a tmpfs of 3 MB
that also fills up.

After each kill the next start has to read the journal; on a full disk it may be refused, with one line, and goes on
when there is room. No round that a node has applied may be gone: rounds only grow, each is committed once, on the
state of the one before it, and no node is told that its state is held by nobody. Then training has to go on.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import private_folders
from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.journal.reading import read_rounds
from notebook_cluster.journal.records import CommitRecord
from notebook_cluster.protocol.state import JobView
from notebook_cluster.protocol.views import CellEnded

DISK_BYTES = 3 << 20
PATIENCE = 60.0
FULL_SHARE = 0.35
"""Of the kills that come with a full disk."""
ENOUGH = 200
"""Rounds on a full disk after which the journal has free pages of its own: rows that nobody needed have gone."""
TRAIN = """
import os, time, torch
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
sync = nc.DiLoCo(model, every=1)
while not os.path.exists("over"):
    with torch.no_grad():
        model.weight -= 0.001 * (rank + 1)
    sync.step()
    time.sleep(0.01)
sync.finish()
print(sync.round)
"""


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """``folder`` is a tmpfs of DISK_BYTES; only root can mount one."""
    folder.mkdir(mode=0o700, parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Not one more block."""
    with open(disk / "ballast", "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


def make_room(disk: Path) -> None:
    (disk / "ballast").unlink(missing_ok=True)


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """What ``condition`` returns once that is true. RuntimeError: it never was."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise RuntimeError(f"waited {PATIENCE:g} s for {what}")


class Kills:
    """One cluster and what became of it."""

    def __init__(self, disk: Path, seed: int) -> None:
        self.disk = disk
        self.random = random.Random(seed)
        self.cluster = Cluster.start("kills", local=2)
        self.journal = Path(self.cluster.connection.file.run_log)
        self.cell = self.cluster.execute(TRAIN).cell
        self.counts = {
            "kills": 0,
            "on_a_full_disk": 0,
            "starts_refused": 0,
            "lines_told": 0,
            "had_room": 0,
            "went_on": 0,
        }
        self.hashes: dict[int, str] = {}
        """Round -> state hash, of every commit that was ever seen."""
        wait_until(lambda: self.job() and self.job().round > 3, "the first rounds")

    def job(self) -> Any:
        jobs: list[JobView] = self.cluster.state().jobs
        return jobs[0] if jobs else None

    def once(self) -> None:
        """One kill, and what comes after it."""
        full = self.random.random() < FULL_SHARE
        if full:
            fill(self.disk)
            began = self.job().round
            wait_until(
                lambda: self.told() or self.job().round > began + ENOUGH, "the line about the full disk, or more rounds"
            )
            self.counts["on_a_full_disk"] += 1
            self.counts["lines_told"] += len(self.told())
            self.counts["had_room"] += not self.told()
        time.sleep(self.random.uniform(0.0, 1.0))
        applied = max(node.last_round or 0 for node in self.cluster.state().nodes)
        self.kill()
        if full:
            self.refused()
            make_room(self.disk)
        self.cluster = Cluster.start("kills")
        back = self.job()
        if back is None or back.round < applied:
            raise RuntimeError(f"round {applied} was applied, and the next coordinator knows {back}")
        self.check()
        wait_until(
            lambda: self.job().round > applied + 3, f"rounds after {applied}: {self.cluster.state().events[-5:]}"
        )
        self.counts["went_on"] += 1

    def end(self) -> str:
        """How the cell ends once it may."""
        stream = self.cluster.watch(self.cell)
        return str(wait_until(lambda: isinstance(event := stream.get(1.0), CellEnded) and event.status, "the end"))

    def told(self) -> list[str]:
        """Lines about a full disk since the last start."""
        events = self.cluster.state().events
        starts = [place for place, event in enumerate(events) if "the coordinator was restarted" in event.text]
        return [event.text for event in events[starts[-1] if starts else 0 :] if "is full" in event.text]

    def kill(self) -> None:
        pid = self.cluster.connection.file.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "the kill"
        )
        self.cluster.close()
        self.counts["kills"] += 1

    def refused(self) -> None:
        """A start on a full disk: one clear line."""
        try:
            cluster = Cluster.start("kills")
        except ClusterError as error:
            if "is full" not in str(error) or "\n" in str(error):
                raise RuntimeError(f"the full disk was told as: {error}") from None
            self.counts["starts_refused"] += 1
        else:
            self.cluster = cluster
            self.kill()
            self.counts["kills"] -= 1

    def check(self) -> None:
        """Every commit in the journal follows from the one before it, and none that was seen is another one now."""
        for noted in read_rounds(self.journal):
            if not isinstance(noted.record, CommitRecord):
                continue
            commit, base = noted.record.commit, noted.record.base_hash
            first = self.hashes.setdefault(commit.round, commit.state_hash)
            if first != commit.state_hash or self.hashes.get(commit.round - 1, base) != base:
                raise RuntimeError(f"round {commit.round} was committed twice, or on another state")
        lost = [event.text for event in self.cluster.state().events if "holds" in event.text]
        if lost:
            raise RuntimeError(f"a committed round is lost: {lost}")


def kills(number: int, seed: int) -> dict[str, Any]:
    """Kill ``number`` times. RuntimeError: something was lost, unreadable or stood still."""
    began = time.perf_counter()
    with private_folders() as folder:
        (folder / "work").mkdir()
        os.chdir(folder / "work")
        clusters = Path(os.environ["JUPYTER_RUNTIME_DIR"]) / "notebook_cluster" / "clusters"
        with small_disk(clusters) as disk:
            kills = Kills(disk, seed)
            for _ in range(number):
                kills.once()
            rounds = kills.job().round
            (folder / "work" / "over").touch()
            status = kills.end()
            kills.cluster.stop()
            kills.cluster.close()
    return {
        **kills.counts, "seed": seed, "unreadable": 0, "rounds_lost": 0, "rounds": rounds, "cell": status,
        "disk_mb": DISK_BYTES / 1e6, "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
