"""How long nodes wait for one that makes no progress, and that nobody else is left out, one JSON line for each case.

A real cluster on hosts of their own (network namespaces), one node on each, that trains a small model, 0.2 s a round.
In each of ``--repeats`` a fault befalls one host for ``--seconds`` and is over again: its agent is killed, or stands
still, its cable is pulled, its kernel is stopped (SIGSTOP). ``longest_gap_s`` is the longest time between two COMMITs
from the fault to the first round with that node again; ``named`` are those that the cluster said made no progress.

The other cases have a node that lives and is slow: ``encoding`` (8 s before it arrives, at work), ``locked`` (Python's
lock held in C for 20 s) and ``slow-link`` (10 Mbit/s everywhere for a model of ``--mb``): ``left_out`` counts rounds
without somebody.

Needs root, ``ip``, ``nft`` and ``tc``; Linux only. All cases with five repeats take an hour.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from notebook_cluster.journal.reading import read_rounds
from notebook_cluster.journal.records import CommitRecord
from notebook_cluster.journal.store import journal_path

FAULTS = ("agent-killed", "agent-stopped", "cable-pulled", "kernel-stopped")
SLOW = ("encoding", "locked", "slow-link")
CODE = "tiger-lamp-42"
VICTIM = "book"
ROUND = 0.2
"""Seconds of training between two rounds."""

TRAIN = """
%%on_all
import os, time
import torch
print("pid", os.getpid(), flush=True)
torch.manual_seed(0)
model = torch.nn.Linear({parameters} // 64, 64, bias=False)
sync = nc.LocalSGD(model, every=2, name={job!r}, fresh=True)
{before}
step = 0
while {goes_on}:
    time.sleep({seconds} / 2)
    step += 1
    {each}
    sync.step(loss=step)
sync.finish()
"""

ENCODING = """
from notebook_cluster.training.loop.replica import Replica
encode = Replica.contribution
def slowly(replica, finishing):
    until = time.monotonic() + 8
    while nc.node() == "book" and step == 4 and time.monotonic() < until:
        torch.randn(200, 200) @ torch.randn(200, 200)
    return encode(replica, finishing)
Replica.contribution = slowly
"""

LOCKED = """
began = time.perf_counter()
sum(range(10_000_000))
once = time.perf_counter() - began
"""
HOLD = 'if step == 3 and nc.node() == "book": sum(range(int(10_000_000 * 20 / once)))'


@dataclass(frozen=True)
class Commit:
    job: str
    time: float
    members: list[str]


class Hosts:
    """A cluster on a network of hosts, and what may befall one of them."""

    def __init__(self, network: Any, notebook: Any, shares: dict[str, Any]) -> None:
        self.network, self.notebook, self.shares = network, notebook, shares
        self.names = ["local", *shares]
        self.jobs = 0
        self.told = 0

    # ---- training

    @contextlib.contextmanager
    def training(self) -> Iterator[str]:
        """The cell that runs until the block is left; the name of its job."""
        job, enough = self._job(), self.network.root / f"enough-{self.jobs}"
        cell = self.notebook.start(self._source(job, goes_on=f"not os.path.exists({str(enough)!r})"))
        try:
            yield job
        finally:
            enough.touch()
            self.notebook.until(cell, timeout=120)

    def run(self, timeout: float, **words: Any) -> tuple[str, float]:
        """Train to the end; (job, seconds)."""
        job, began = self._job(), time.monotonic()
        cell = self.notebook.until(self.notebook.start(self._source(job, **words)), timeout=timeout)
        if cell.error is not None:
            raise RuntimeError(f"the cell failed: {cell.error.name}: {cell.error.value}")
        return job, time.monotonic() - began

    def _job(self) -> str:
        self.jobs += 1
        return f"job-{self.jobs}"

    def _source(self, job: str, **words: Any) -> str:
        usual = {"parameters": 64_000, "seconds": ROUND, "before": "", "each": "pass", "goes_on": "step < 12"}
        return TRAIN.format(job=job, **{**usual, **words})

    def commits(self, job: str) -> list[Commit]:
        return [
            Commit(job, noted.time, noted.record.commit.members)
            for noted in read_rounds(journal_path(self.notebook.cluster_folder))
            if isinstance(noted.record, CommitRecord) and noted.record.job == job
        ]

    def named(self) -> list[str]:
        """Whom the cluster said to make no progress since this was asked last."""
        events = [text for text in self.notebook.events() if "has made no progress" in text]
        found = events[self.told :]
        self.told = len(events)
        return sorted({text.split("'")[1] for text in found})

    # ---- faults

    def kernel(self) -> int:
        """Process id of the victim's kernel."""
        return int(self.notebook.printed(VICTIM).rpartition("pid ")[2].split()[0])

    def befall(self, fault: str) -> None:
        match fault:
            case "agent-killed":
                os.kill(self.shares[VICTIM].process.pid, signal.SIGKILL)
            case "agent-stopped":
                os.kill(self.shares[VICTIM].process.pid, signal.SIGSTOP)
            case "cable-pulled":
                self.network[VICTIM].link_down()
            case "kernel-stopped":
                os.kill(self.kernel(), signal.SIGSTOP)

    def heal(self, fault: str) -> None:
        from tests.hosts import Share

        match fault:
            case "agent-killed":
                self.shares[VICTIM].process.wait()
                self.shares[VICTIM] = Share(self.network[VICTIM])
                wait_until(lambda: self._condition() == "dead", 60, "the end of the node")
                self.notebook.value(f"cluster.restart({VICTIM!r})")
            case "agent-stopped":
                os.kill(self.shares[VICTIM].process.pid, signal.SIGCONT)
            case "cable-pulled":
                self.network[VICTIM].link_up()
            case "kernel-stopped":
                os.kill(self.kernel(), signal.SIGCONT)

    def _condition(self) -> str:
        return str(self.notebook.nodes().get(VICTIM))


def wait_until(condition: Any, seconds: float, what: str) -> None:
    """Raises:
    TimeoutError: it did not become true in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.1)


@contextlib.contextmanager
def training_hosts(nodes: int) -> Iterator[Hosts]:
    """A cluster across ``nodes`` hosts that is gone afterwards."""
    from tests.hosts import CLUSTER, Share, notebook_on
    from tests.namespaces import Network

    names = [VICTIM, *(f"host-{number}" for number in range(nodes - 2))]
    with Network("desk", *names) as network:
        shares = {name: Share(network[name], "--code", CODE) for name in names}
        with notebook_on(network["desk"]) as notebook:
            notebook.works(f"%cluster start {CLUSTER} --peers all --code {CODE} --no-panel")
            notebook.wait_for_nodes({"local", *names})
            yield Hosts(network, notebook, shares)


def longest_gap(hosts: Hosts, job: str, fault: str, seconds: float) -> float:
    """Seconds between two COMMITs at most, from before the fault until the node is back in a round."""

    def all_are_in() -> bool:
        rows = hosts.commits(job)[-3:]
        return len(rows) == 3 and all(len(row.members) == len(hosts.names) for row in rows)

    wait_until(all_are_in, 120, "rounds of all")
    began = time.time()
    hosts.befall(fault)
    time.sleep(seconds)
    hosts.heal(fault)
    healed = time.time()
    wait_until(
        lambda: any(VICTIM in row.members and row.time > healed for row in hosts.commits(job)), 120, f"{VICTIM} again"
    )
    times = [row.time for row in hosts.commits(job)]
    first = max(0, sum(moment < began for moment in times) - 1)
    return max(later - sooner for sooner, later in zip(times[first:], times[first + 1 :], strict=False))


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One line for each case."""
    with training_hosts(arguments.nodes) as hosts:
        for case in arguments.cases:
            common = {"benchmark": "patience", "case": case, "nodes": arguments.nodes}
            if case in FAULTS:
                with hosts.training() as job:
                    gaps = [longest_gap(hosts, job, case, arguments.seconds) for _ in range(arguments.repeats)]
                yield {
                    **common,
                    "seconds": arguments.seconds,
                    "round_s": ROUND,
                    "longest_gap_s": [round(gap, 2) for gap in gaps],
                    "within_5_s": f"{sum(gap <= 5.0 + ROUND for gap in gaps)} of {len(gaps)}",
                    "named": hosts.named(),
                }
            else:
                yield {**common, **slow_case(hosts, case, arguments.mb)}


def slow_case(hosts: Hosts, case: str, mb: float) -> dict[str, Any]:
    """A node that lives and is slow."""
    from benchmarks.links_network import slow_down, speed_up

    if case == "slow-link":
        cables = list(hosts.network.hosts.values())
        parameters = int(mb * 1e6) // 4 // 64 * 64
        before = "nc.barrier(); time.sleep(1.0)"  # all have the state: from here on the cables are slow
        try:
            for host in cables:
                slow_down(hosts.network, host, "10mbit")
            job, seconds = hosts.run(1200, parameters=parameters, before=before, goes_on="step < 4", seconds=1.0)
        finally:
            for host in cables:
                speed_up(hosts.network, host)
    elif case == "locked":
        job, seconds = hosts.run(120, before=LOCKED, each=HOLD)
    else:
        job, seconds = hosts.run(120, before=ENCODING)
    rounds = hosts.commits(job)
    return {
        "rounds": len(rounds),
        "seconds": round(seconds, 1),
        "left_out": sum(len(row.members) < len(hosts.names) for row in rounds),
        "named": hosts.named(),
    }


def main() -> None:
    from benchmarks.links import missing

    parser = argparse.ArgumentParser(prog="python -m benchmarks.patience", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=(*FAULTS, *SLOW), default=[*FAULTS, *SLOW])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=45.0, help="how long a fault lasts (default 45)")
    parser.add_argument("--mb", type=float, default=40.0, help="size of the model of slow-link (default 40)")
    arguments = parser.parse_args()
    if arguments.nodes < 3:
        parser.error("--nodes is at least 3: two others whose rounds go on")
    if reason := missing():
        sys.exit(f"benchmarks.patience: {reason}")
    for line in measured(arguments):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
