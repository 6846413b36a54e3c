"""Many hosts of one launch that come in at once while others train: whether all get in, what that costs the
coordinator, and whether a round suffers. One JSON line.

Two real local nodes train with DiLoCo, one round after the other. Then an engine starts ``--agents`` hosts, played by
one process without kernels (:mod:`benchmarks.joiners_agents`), which all dial within 2 s and join the running cell.

``joined``: hosts whose node is in the cluster and runs the cell; ``seconds``: from the request to the last of them.
``coordinator_cpu_s``: processor time of the coordinator from the request until all are in and two more rounds are
committed, rounds and panel news included. ``attempts_aborted``: attempts of rounds that were sealed and not committed.
``rounds``: committed meanwhile. ``load``: the machine's load average at the beginning.

The program fails when not all come in, an attempt was aborted or the coordinator took more than 4 s.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.common import private_folders
from benchmarks.joiners_agents import ENGINE, install
from benchmarks.slept import MODEL

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster
    from notebook_cluster.protocol.state import ClusterView

MOST_CPU_S = 4.0
MORE_ROUNDS = 2
TIMEOUT = 120.0
_ROOT = Path(__file__).parent.parent

TRAIN = (
    MODEL
    + """
model = make_model()
sync = nc.DiLoCo(model, every=5, name="joined", fresh=True)
number = 0
while True:
    began = time.perf_counter()
    change(model, number)
    sleep_until(began + 0.02)
    number += 1
    sync.step(loss=1.0)
"""
)


@contextmanager
def known_engine(folder: Path) -> Iterator[None]:
    """The processes that are started meanwhile know the engine."""
    install(folder)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), str(_ROOT), before]))
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def newest(cluster: "Cluster") -> "ClusterView":
    """What the coordinator has sent to this view, as to a panel: asking costs it time that joining does not."""
    state = cluster.latest
    return state if state is not None else cluster.state()


def committed(cluster: "Cluster") -> int:
    """The last committed round."""
    return max((job.round for job in newest(cluster).jobs), default=0)


def in_cluster(cluster: "Cluster") -> int:
    """Hosts of the launch whose node takes part, and runs the cell that trains."""
    state = newest(cluster)
    running = state.cell.nodes if state.cell is not None else {}
    here = [node.name for node in state.nodes if node.peer != "local" and node.condition == "ok"]
    return min(sum(launch.joined for launch in state.launches), sum(running.get(name) == "running" for name in here))


def aborted(folder: Path) -> tuple[int, int]:
    """(attempts that were sealed and whose round was not committed with them, commits)."""
    from notebook_cluster.journal.reading import read_rounds
    from notebook_cluster.journal.records import CommitRecord, SealRecord
    from notebook_cluster.journal.store import journal_path

    records = [noted.record for noted in read_rounds(journal_path(folder))]
    commits = {(one.commit.round, one.commit.attempt) for one in records if isinstance(one, CommitRecord)}
    last = max((round for round, _ in commits), default=0)
    seals = {(one.seal.round, one.seal.attempt) for one in records if isinstance(one, SealRecord)}
    return len({seal for seal in seals - commits if seal[0] <= last}), len(commits)


def measure(agents: int) -> dict[str, object]:
    """The figures. TimeoutError, with how it stands, when hosts or rounds do not come."""
    from notebook_cluster.client import Cluster

    with private_folders() as folder, known_engine(folder / "packages"):
        load = [round(value, 2) for value in os.getloadavg()]
        with Cluster.start("joiners", local=2) as cluster:
            try:
                cluster.execute(TRAIN.format(parameters=1_000_000))
                cluster.wait_until(lambda state: committed(cluster) >= MORE_ROUNDS, TIMEOUT)
                coordinator = psutil.Process(cluster.connection.file.pid)
                figures = watch(cluster, coordinator, agents)
                run = Path(cluster.connection.file.run_log).parent
                figures["attempts_aborted"], _ = aborted(run)
            finally:
                cluster.stop()
    return {**figures, "load": load}


def watch(cluster: "Cluster", coordinator: psutil.Process, agents: int) -> dict[str, object]:
    """From the request for the hosts until all are in and rounds went on."""
    from notebook_cluster.client.stream import wait
    from notebook_cluster.protocol.launches import StartLaunch

    before, began, first = busy(coordinator), time.monotonic(), committed(cluster)
    # Not grow(), which looks at the state five times a second: that is not what joining costs.
    wait(cluster._request(StartLaunch(on=ENGINE, hosts=agents, address="127.0.0.1", more=True), str))
    deadline = began + TIMEOUT
    while (joined := in_cluster(cluster)) < agents and time.monotonic() < deadline:
        time.sleep(0.1)
    seconds, during = time.monotonic() - began, committed(cluster)
    while (last := committed(cluster)) < during + MORE_ROUNDS and time.monotonic() < deadline:
        time.sleep(0.1)
    return {
        "joined": joined,
        "seconds": round(seconds, 2),
        "coordinator_cpu_s": round(busy(coordinator) - before, 2),
        "rounds": last - first,
    }


def busy(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joiners", description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=64)
    arguments = parser.parse_args()
    if not 1 <= arguments.agents <= 256:
        parser.error("--agents is 1 to 256")
    figures = measure(arguments.agents)
    print(json.dumps({"benchmark": "joiners", "agents": arguments.agents, **figures}))
    if figures["joined"] != arguments.agents or figures["attempts_aborted"] or not figures["rounds"]:
        sys.exit("benchmarks.joiners: not all came in, or rounds suffered")
    if float(str(figures["coordinator_cpu_s"])) > MOST_CPU_S:
        sys.exit(f"benchmarks.joiners: the coordinator took more than {MOST_CPU_S:g} s of processor time")


if __name__ == "__main__":
    main()
