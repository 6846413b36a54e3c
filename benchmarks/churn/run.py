"""One run: legs that train with one codec each, while the schedule plays, each checked when it is over."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from benchmarks.churn import measures
from benchmarks.churn.checking import Checker, Findings
from benchmarks.churn.faults import KINDS, Fault, Stuck, World
from benchmarks.churn.hosts import Hosts
from benchmarks.churn.recording import Life, read_lives
from benchmarks.churn.schedule import TICK, Schedule, StateWatch
from benchmarks.churn.training import CELL, CODECS, first_state, job_name
from notebook_cluster.journal.reading import read_rounds
from notebook_cluster.journal.store import journal_path

WATCHDOG = "notebook-cluster-watchdog"
"""In the command of the shell that ends the kernels of an agent that was killed."""
LEG = 300.0
"""Seconds that one codec trains at most before the next one."""
START, QUIET = 120.0, 120.0
"""Seconds that a leg may take to its first round, and to its end once it is over."""


class Run:
    """The whole of it. ``kept``: where lines about what happens go, and beside it what the nodes noted of a leg with
    which something is wrong; None: nowhere."""

    def __init__(
        self, hosts: Hosts, minutes: float, seed: int, kept: IO[str] | None, kinds: Sequence[str] = tuple(KINDS)
    ) -> None:
        self.hosts, self.minutes, self.seed, self._kept = hosts, minutes, seed, kept
        self.world = World(hosts, random.Random(f"{seed} within"))
        self.schedule = Schedule(self.world, random.Random(seed), kinds)
        self.watch = StateWatch(self.world, lambda lines: self.note("said", lines=lines) if lines else None)
        self.memory, self.traces = measures.Memory(hosts), measures.Traces(hosts)
        self.found = Findings()
        self.gaps: dict[str, float] = {}
        self.journal_mb = 0.0
        self._began = time.monotonic()
        self._noted = 0

    def note(self, what: str, **fields: Any) -> None:
        """One line of what happens, for whoever looks at a long run."""
        if self._kept is not None:
            row = {"at": round(time.monotonic() - self._began, 1), "what": what, **fields}
            self._kept.write(json.dumps(row) + "\n")
            self._kept.flush()

    def play(self) -> dict[str, Any]:
        """All legs, the stop, and the line of figures."""
        rounds = max(1, round(self.minutes * 60 / (len(CODECS) * LEG)))
        legs = rounds * len(CODECS)
        try:
            for number in range(1, legs + 1):
                self.leg(number, CODECS[(number - 1) % len(CODECS)], self.minutes * 60 / legs)
                self.journal_mb = measures.journal_megabytes(self.hosts.runtime)
                self.note("so far", figures=self.figures([], self.world.state.get("mismatches")))
        except Stuck as error:
            self.schedule.troubles.append(str(error))
        self.journal_mb = measures.journal_megabytes(self.hosts.runtime)
        mismatches = self.world.state.get("mismatches")
        return self.figures(self.stop(), mismatches)

    def leg(self, number: int, codec: str, seconds: float) -> None:
        """Train with one codec, then check it. Every other leg ends in the middle of what befalls the nodes."""
        folder = self.hosts.folder / job_name(number)
        source = CELL.format(folder=str(self.hosts.folder), number=number, codec=codec)
        cell = self.hosts.desk.ask("execute", source).result(60)
        first = len(self.schedule.faults)
        self._tick_until(lambda: all(self._trains(node) for node in self.hosts.nodes), START, f"leg {number} to begin")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._tick(begin=True)
        quiet = number % 2 == 1
        self._tick_until(lambda: not (quiet and self.schedule.busy), 200.0, "the faults to be over")
        (folder / "over").touch()
        self.world.over, trained = True, time.monotonic()
        self._tick_until(lambda: self._status(cell) not in ("", "queued", "running"), QUIET, f"the end of leg {number}")
        if quiet and self._status(cell) != "ok":
            self.schedule.troubles.append(f"leg {number} ended as {self.world.state['cell']}")
        self._tick_until(lambda: not self.schedule.busy, 200.0, "the faults to be over")
        # Who was lost when the others ended is in the middle of its cell still, and brings its work alone.
        self._tick_until(lambda: not self._at_work(folder), QUIET, f"the last nodes to end leg {number}")
        self.world.over = False
        self._check(number, codec, folder)
        self._gaps(folder, self.schedule.faults[first:], trained)
        shutil.rmtree(folder)
        for progress in (self.hosts.folder / "progress").iterdir():
            progress.unlink()

    def _at_work(self, folder: Path) -> bool:
        """Whether a process that nobody ended has not come to the end of the leg."""
        lives = (life for life in read_lives(folder) if life.ends is None and life.pid not in self.world.ended)
        return any(Path(f"/proc/{life.pid}").exists() for life in lives)

    def _trains(self, node: str) -> bool:
        return self.hosts.progress(node).counted > 0

    def _status(self, cell: int) -> str:
        """Of that cell; empty: it is not the last one, or not known."""
        number, status = (self.world.state.get("cell") or [0, ""])[:2]
        return str(status) if number == cell else ""

    def _check(self, number: int, codec: str, folder: Path) -> None:
        lives, records = read_lives(folder), self._records(job_name(number))
        (folder / "journal.json").write_text(json.dumps(records))
        found = Checker(codec, number, first_state(number), records, lives, self.world.ended).check()
        self.found.add(found)
        self.note("leg", number=number, codec=codec, found=vars(found), processes=[_told(life) for life in lives])
        if found.notes and self._kept is not None:
            shutil.copytree(folder, f"{self._kept.name}.{job_name(number)}", dirs_exist_ok=True)

    def _gaps(self, folder: Path, faults: list[Fault], until: float) -> None:
        """Between rounds while the nodes trained: who finishes waits for everybody who may come."""
        times = [when for when in measures.commit_times(read_lives(folder)) if when < until]
        for began, seconds, whose in measures.longest_gaps(times, faults, self.gaps):
            self.note("gap", began=round(began - self._began, 2), seconds=round(seconds, 2), faults=whose)

    def _records(self, job: str) -> list[dict[str, Any]]:
        noted = read_rounds(journal_path(self.hosts.runtime))
        return [msgspec.to_builtins(row.record) for row in noted if row.record.job == job]

    # ---- meanwhile -------------------------------------------------------------------------------------------

    def _tick(self, *, begin: bool) -> None:
        self.watch.tick()
        self.memory.tick()
        self.traces.tick()
        self.schedule.tick(begin=begin)
        for fault in self.schedule.faults[self._noted :]:
            self.note("fault", kind=fault.kind, victim=fault.victim, detail=fault.detail)
        self._noted = len(self.schedule.faults)
        time.sleep(TICK)

    def _tick_until(self, true: Any, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                raise Stuck(f"waited {seconds:g} s for {what}: {self.world.state} {self.schedule.troubles}")
            self._tick(begin=False)

    # ---- the end ---------------------------------------------------------------------------------------------

    def stop(self) -> list[str]:
        """``%cluster stop``; then sharing ends. What is left."""
        self.hosts.desk.ask("stop").result(60)
        shared = {share.process.pid for share in self.hosts.shares.values()} | {self.hosts.desk.process.pid}
        deadline = time.monotonic() + 10
        while (left := self._kernels(shared)) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.traces.tick()
        for share in self.hosts.shares.values():
            share.process.send_signal(signal.SIGTERM)
        for share in self.hosts.shares.values():
            share.process.wait(30)
        return [*left, *self.traces.leftovers()]

    def _kernels(self, known: set[int]) -> list[str]:
        """What has not ended with the cluster. A peer that is shared goes on, with its watchdog."""
        found = self.hosts.processes()
        left = {pid: line for pid, line in found.items() if pid not in known and WATCHDOG not in line}
        return [f"process {pid} after the stop: {line[-100:]}" for pid, line in left.items()]

    def figures(self, leftovers: list[str], mismatches: int | None) -> dict[str, Any]:
        """The line."""
        return {
            "benchmark": "churn",
            "minutes": self.minutes,
            "peers": len(self.hosts.peers),
            "seed": self.seed,
            "faults": {"total": len(self.schedule.faults), **measures.by_kind(self.schedule.faults)},
            "rounds": self.found.rounds,
            "checked_rounds": self.found.checked_rounds,
            "wrong_means": self.found.wrong_means,
            "wrong_contributions": self.found.wrong_contributions,
            "lost_steps": self.found.lost_steps,
            "doubled_steps": self.found.doubled_steps,
            "hash_mismatches": mismatches,
            "stuck": len(self.schedule.troubles),
            "longest_gap_s": {kind: round(gap, 2) for kind, gap in sorted(self.gaps.items())},
            "leftovers": len(leftovers),
            "coordinator_growth": self.memory.growth(coordinator=True),
            "agent_growth": self.memory.growth(coordinator=False),
            "journal_mb": self.journal_mb,
            "load": [round(value, 1) for value in os.getloadavg()],
            "notes": [*self.found.notes[:20], *self.schedule.troubles[:20], *leftovers[:20]],
        }


def _told(life: Life) -> dict[str, Any]:
    """A process, in a line of what happens."""
    return {
        "node": life.node, "incarnation": life.incarnation, "pid": life.pid, "contributions": len(life.contributions),
        "refused": life.refused, "ends": life.ends,
    }  # fmt: skip
