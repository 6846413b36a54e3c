"""The two ways of :mod:`benchmarks.start_up` to nodes that Slurm starts, and a Slurm of this machine's own for them.

Ours is ``Cluster.start(on="slurm", hosts=N)`` and a cell. ipyparallel's is its own launcher for Slurm, one engine on
each of N nodes by a batch script with an ``srun`` line, and ``client[:].apply_sync``. Both are given what they need to
know of this Slurm; both jobs ask for whole nodes.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator

from benchmarks.common import SOURCE, TIMEOUT, Runner

NEEDS_IPYPARALLEL = "ipyparallel is not installed, which this is compared with: pip install ipyparallel"
_TEMPLATE = """#!/bin/sh
#SBATCH --export=ALL
#SBATCH --job-name=ipengine-{cluster_id}
#SBATCH --nodes={n}
#SBATCH --ntasks={n}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=5
srun {program_and_args}
"""
_PAUSE_S = 0.05


def missing() -> str:
    """Why this cannot be measured here, or an empty text."""
    from tests.engines.running import no_slurm

    try:
        import ipyparallel  # noqa: F401
    except ImportError:
        return NEEDS_IPYPARALLEL
    return no_slurm()


@contextlib.contextmanager
def ours(nodes: int) -> Iterator[Runner]:
    """The call of the Runner starts the cluster and runs a cell on all hosts; behind it the cluster is stopped."""
    from notebook_cluster.client import Cluster

    started: list[Cluster] = []

    def run() -> None:
        cluster = Cluster.start("benchmark", on="slurm", hosts=nodes, address="127.0.0.1", time="5")
        started.append(cluster)
        ended, _ = cluster.run(SOURCE)
        if ended.status != "ok" or len(ended.results) != nodes:
            raise RuntimeError(f"the cell ended with {ended.status} on {len(ended.results)} of {nodes} nodes")

    try:
        yield run
    finally:
        for cluster in started:
            cluster.stop()


@contextlib.contextmanager
def ipyparallel(nodes: int) -> Iterator[Runner]:
    """As :func:`ours`, with ipyparallel."""
    from ipyparallel import Cluster
    from traitlets.config import Config

    config = Config({"SlurmEngineSetLauncher": {"batch_template": _TEMPLATE}})
    cluster = Cluster(engines="slurm", n=nodes, log_level=40, config=config)
    clients = []

    def run() -> None:
        cluster.start_cluster_sync()
        client = cluster.connect_client_sync()
        clients.append(client)
        client.wait_for_engines(nodes, timeout=TIMEOUT, interactive=False)
        answers = client[:].apply_sync(eval, SOURCE)
        if answers != [2] * nodes:
            raise RuntimeError(f"the engines answered {answers}")

    try:
        yield run
    finally:
        for client in clients:
            client.close()
        cluster.stop_cluster_sync()


WAYS = {"ours": ours, "ipyparallel": ipyparallel}


def run_once(way: str, nodes: int) -> float:
    """Seconds from the call that starts the cluster to the answer of all nodes; imports are done before."""
    os.chdir(os.environ["IPYTHONDIR"])  # ipyparallel's script, and what its engines print, lie in the current folder
    with WAYS[way](nodes) as run:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began


def wait_until_idle(nodes: int) -> None:
    """Until Slurm has no job and all nodes are free: nobody pays for the end of what was before.

    Raises:
        RuntimeError: they do not become free.
    """
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        jobs, free = _ask("squeue", "-h"), _ask("sinfo", "-h", "-N", "-t", "idle", "-o", "%N")
        if not jobs.strip() and len(free.split()) >= nodes:
            return
        time.sleep(_PAUSE_S)
    raise RuntimeError(f"Slurm's nodes did not become free within {TIMEOUT:g} s")


def _ask(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
