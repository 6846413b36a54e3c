"""Gaps between rounds, memory, and what is left when the cluster has been stopped."""

import contextlib
import fcntl
import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import psutil

from benchmarks.churn.faults import Fault
from benchmarks.churn.hosts import Hosts
from benchmarks.churn.recording import Life

MEMORY = Path("/dev/shm")


def commit_times(lives: Iterable[Life]) -> list[float]:
    """When the first node heard of each round of a leg."""
    first: dict[int, float] = {}
    for life in lives:
        for number, at in life.heard.items():
            first[number] = min(at, first.get(number, at))
    return sorted(first.values())


LONG = 3.0
"""Seconds from which on a gap is noted."""


def longest_gaps(
    times: list[float], faults: list[Fault], longest: dict[str, float]
) -> list[tuple[float, float, list[str]]]:
    """Into ``longest``: kind of fault -> seconds between two COMMITs at most. A gap belongs to the fault that began in
    it or was under way: until its victim was in a round again. Where these are more than one, it is one of ``several``:
    each of them may be waited for in turn. Returns the long ones: (when, seconds, faults)."""
    long = []
    for sooner, later in itertools.pairwise(times):
        within = [fault for fault in faults if sooner <= fault.began < later]
        under_way = [fault for fault in faults if fault.began < sooner and (not fault.over or fault.over > sooner)]
        concerned = [*under_way, *within]
        kind = "several" if len(concerned) > 1 else concerned[0].kind if concerned else "none"
        longest[kind] = max(longest.get(kind, 0.0), later - sooner)
        if later - sooner > LONG:
            whose = [f"{fault.kind} {fault.victim} at {fault.began - sooner:+.2f} s" for fault in concerned]
            long.append((sooner, later - sooner, whose))
    return long


class Memory:
    """Resident memory of the coordinator and of every agent, over time."""

    EVERY = 10.0
    WINDOW = 600.0

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._began = time.monotonic()
        self._next = 0.0
        self.samples: list[tuple[float, str, int]] = []
        """(seconds since the beginning, whose, bytes)."""

    def tick(self) -> None:
        """Look, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.EVERY
        pids = {}
        with contextlib.suppress(OSError, ValueError, KeyError):
            pids["coordinator"] = self._hosts.coordinator()
        for node in self._hosts.nodes:
            with contextlib.suppress(ProcessLookupError):
                pids[node] = self._hosts.agent(node)
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                self.samples.append((now - self._began, name, psutil.Process(pid).memory_info().rss))

    def growth(self, coordinator: bool) -> float | None:
        """The mean of the last ten minutes over that of minutes 10 to 20, the largest of all agents; None: it did not
        run for so long."""
        end = max((at for at, _, _ in self.samples), default=0.0)
        if end < 3 * self.WINDOW:
            return None
        names = {name for _, name, _ in self.samples if (name == "coordinator") == coordinator}
        ratios = []
        for name in names:
            late = [size for at, whose, size in self.samples if whose == name and at > end - self.WINDOW]
            early = [size for at, whose, size in self.samples if whose == name and self.WINDOW <= at < 2 * self.WINDOW]
            if late and early:
                ratios.append(statistics.mean(late) / statistics.mean(early))
        return round(max(ratios), 3) if ratios else None


class Traces:
    """What the hosts' processes have made in places that all processes of a machine share."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._folders: set[str] = set()
        self._memory = set(MEMORY.glob("nbc-*"))
        self._next = 0.0

    def tick(self) -> None:
        """Note the folders of sockets that are bound on the hosts now."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1.0
        for share in [*self._hosts.shares.values()]:
            self._note(share.process.pid)
        self._note(self._hosts.desk.process.pid)

    def _note(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines():
                path = line.rpartition(" ")[2]
                if path.startswith("/tmp/nbc-"):
                    self._folders.add("/".join(path.split("/")[:3]))

    def leftovers(self) -> list[str]:
        """Stop has returned and sharing has ended: what is there all the same after a moment."""
        deadline = time.monotonic() + 10
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _left(self) -> list[str]:
        known = self._hosts.desk.process.pid
        processes = [f"process {pid}: {line}" for pid, line in self._hosts.processes().items() if pid != known]
        folders = [f"folder {path}" for path in sorted(self._folders) if os.path.exists(path)]
        memory = [f"memory {path}" for path in set(MEMORY.glob("nbc-*")) - self._memory if _is_nobodys(path)]
        return processes + folders + memory


def _is_nobodys(path: Path) -> bool:
    """Whoever made it holds a lock on it as long as it lives."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def by_kind(faults: list[Fault]) -> dict[str, int]:
    """How many there were of each."""
    return dict(sorted(Counter(fault.kind for fault in faults).items()))


def journal_megabytes(folder: Path) -> float:
    """Of the journal with what belongs to it."""
    return round(sum(path.stat().st_size for path in folder.glob("run.journal*")) / 1e6, 2)
