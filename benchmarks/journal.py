"""What the journal of a run costs: a start after SIGKILL, ten hours on disk, and whether a killed coordinator with a
full disk loses anything.

Without options: ``%cluster start`` after SIGKILL with a journal of a million rounds and with an empty one, taking turns
(seconds, and memory of the coordinator), and the disk that ten hours of DataParallel at ten steps a second take. The
rounds are written by the real journal as fast as it takes them. ``--kills N``: see :mod:`benchmarks.journal_kills`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import private_folders
from benchmarks.journal_kills import kills
from notebook_cluster.client import Cluster
from notebook_cluster.journal.curves import CurvesFile, SeriesStore
from notebook_cluster.journal.log import Journal
from notebook_cluster.journal.reading import recover
from notebook_cluster.journal.records import BaseRecord, CommitRecord, RegisterRecord, SealRecord
from notebook_cluster.journal.state import State
from notebook_cluster.journal.store import journal_path
from notebook_cluster.protocol.rounds import Commit, Member, OuterSettings, Seal, Slice
from notebook_cluster.protocol.runs import Register

NODES = ("local", "local-2")
AT_ONCE = 500
"""Rounds that are written before the disk is waited for."""
HOURS, STEPS_PER_SECOND = 10, 10


def write_round(journal: Journal, number: int) -> None:
    """SEAL and COMMIT of one step of DataParallel on two nodes."""
    members = [Member(name=name, incarnation=1, weight_bits=1056964608, contribution=number) for name in NODES]
    slices = [Slice(owner=name, start=512 * place, stop=512 * place + 512) for place, name in enumerate(NODES)]
    outer = OuterSettings(lr_bits=1065353216, momentum_bits=0)
    hashes = [f"{number * 7919 + place:032x}" for place in range(-1, 4)]
    seal = Seal(job="model", round=number, attempt=1, members=members, slices=slices, outer=outer, base_hash=hashes[0])
    journal.round(SealRecord("model", seal))
    commit = Commit(job="model", round=number, attempt=1, state_hash=hashes[1], members=list(NODES))
    journal.round(
        CommitRecord(
            "model", commit, members, slices, hashes[2:4], hashes[0], outer, 4096 * number, 8192 * number, 0,
            time=time.time(), waits={"local": 0.0, "local-2": 0.003},
        )
    )  # fmt: skip


async def write_rounds(folder: Path, rounds: int, each: Callable[[int], None] = lambda number: None) -> None:
    """Add ``rounds`` rounds to the journal in ``folder`` as a coordinator writes them, the last snapshot long ago."""
    recovered = recover(journal_path(folder))
    journal, state = Journal(folder, recovered), recovered.state or State()
    register = Register(
        job="model", cell=1, strategy="DataParallel", codec="float32", schema_hash="s", parameters=256,
        schema=[("w", [256], "float32")], every="1 steps", every_step=True,
    )  # fmt: skip
    for name in NODES:
        journal.round(RegisterRecord("model", name, 1, register))
    journal.round(BaseRecord("model", 1, 0, "0" * 32, 0, register))
    for number in range(1, rounds + 1):
        write_round(journal, number)
        if number % AT_ONCE == 0:
            error = await asyncio.to_thread(journal.flush, 60.0)
            if error is not None:
                raise error
            if number < rounds - journal._snapshot_rows // 2 + AT_ONCE:
                journal.snapshot_if_due(state)
            each(number)
            await asyncio.sleep(0)
    if not journal.close():
        raise RuntimeError(f"the journal in {folder} could not be closed")


def start_after_kill(name: str) -> dict[str, float]:
    """Start cluster ``name``, whose coordinator was killed, and kill it again: seconds, and MB of the coordinator."""
    began = time.perf_counter()
    cluster = Cluster.start(name, local=1)
    seconds = time.perf_counter() - began
    memory = psutil.Process(cluster.connection.file.pid).memory_info().rss / 1e6
    kill(cluster)
    return {"seconds": seconds, "memory_mb": memory}


def kill(cluster: Cluster) -> None:
    """SIGKILL to the coordinator; returns when it is gone."""
    pid = cluster.connection.file.pid
    os.kill(pid, signal.SIGKILL)
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    cluster.close()


def recovery(rounds: int, runs: int) -> dict[str, Any]:
    """Two clusters of one node, one with ``rounds`` rounds in its journal, killed and started in turns."""
    samples: dict[str, list[dict[str, float]]] = {"empty": [], "long": []}
    size = written = 0.0
    with private_folders() as folder:
        os.chdir(folder)
        for name in samples:
            cluster = Cluster.start(name, local=1)
            where = Path(cluster.connection.file.run_log).parent
            kill(cluster)
            if name == "long":
                began = time.perf_counter()
                asyncio.run(write_rounds(where, rounds))
                written = time.perf_counter() - began
                size = disk_of(where)
        for _ in range(runs):
            for name, found in samples.items():
                found.append(start_after_kill(name))
        for name in samples:
            with Cluster.start(name) as cluster:
                cluster.stop()
    middle = {
        name: {key: round(statistics.median(one[key] for one in found), 3) for key in found[0]}
        for name, found in samples.items()
    }
    longer = middle["long"]["seconds"] - middle["empty"]["seconds"]
    return {
        "rounds": rounds, "written_in_s": round(written, 1), "journal_mb": round(size, 1), **middle,
        "longer_s": round(longer, 3),
    }  # fmt: skip


def disk(hours: float) -> dict[str, Any]:
    """``hours`` of DataParallel at STEPS_PER_SECOND on two nodes, with the curves that it makes: the most of the disk
    that it took."""
    rounds, most = int(hours * 3600 * STEPS_PER_SECOND), 0.0
    with tempfile.TemporaryDirectory(prefix="nbb-", dir="/tmp") as name:
        folder, store = Path(name), SeriesStore()
        curves = CurvesFile(folder, store)

        def measure(number: int) -> None:
            nonlocal most
            for step in range(number - AT_ONCE, number):
                for node in NODES:
                    store.add(node, "loss", step, 1e9 + step / STEPS_PER_SECOND, 1 / (step + 1), job="model", run=1000)
                    if step % STEPS_PER_SECOND == 0:
                        store.add(node, "memory", step, 1e9 + step / STEPS_PER_SECOND, 4e9)
                if step % 3 == 0:
                    curves.append(store.take_fresh())
            most = max(most, disk_of(folder))

        began = time.perf_counter()
        asyncio.run(write_rounds(folder, rounds, measure))
        curves.close()
        seconds = time.perf_counter() - began
        end, found = disk_of(folder), recover(journal_path(folder))
        if found.committed.seen != rounds:
            raise RuntimeError(f"{found.committed.seen} rounds came back of {rounds}")
    return {
        "hours": hours, "rounds": rounds, "seconds": round(seconds, 1), "most_mb": round(most, 1),
        "end_mb": round(end, 1),
    }  # fmt: skip


def disk_of(folder: Path) -> float:
    """MB that the files in ``folder`` take; another thread may be making one of several meanwhile."""
    taken = 0
    for path in folder.glob("*.journal*"):
        with contextlib.suppress(FileNotFoundError):
            taken += path.stat().st_blocks * 512
    return taken / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.journal", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1_000_000, help="in the long journal (%(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="starts of each; the median counts (%(default)s)")
    parser.add_argument("--hours", type=float, default=HOURS, help="of DataParallel (%(default)s)")
    parser.add_argument("--kills", type=int, default=0, help="kill the coordinator so often instead; needs root")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of --kills")
    options = parser.parse_args()
    if options.kills:
        print(json.dumps({"kills": kills(options.kills, options.seed)}))
        return
    print(json.dumps({"recovery": recovery(options.rounds, options.runs)}))
    print(json.dumps({"disk": disk(options.hours)}))


if __name__ == "__main__":
    main()
