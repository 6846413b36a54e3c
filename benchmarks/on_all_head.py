"""Median time of ``1+1`` on all nodes of a cluster that is led from another host, beside one that is led from here.

Two network namespaces, desk and mini. On desk one process has two notebooks, whose clusters have the same three nodes
(two on desk, one on mini) and take turns in short blocks, in an order drawn anew each time.
"""

import contextlib
import io
import json
import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import SOURCE, new_shell, run_cell

CODE = "tiger-lamp-42"
HEADS = {"here": "", "there": "--head mini"}


def measure(blocks: int, times: int) -> dict[str, Any]:
    """Both medians in milliseconds, the round trip to mini, and by how much the head is slower without it."""
    from tests.hosts import Share
    from tests.namespaces import Network

    with Network("desk", "mini") as network:
        Share(network["mini"], "--code", CODE)
        program = [sys.executable, "-m", "benchmarks.on_all_head", str(blocks), str(times)]
        root = str(Path(__file__).parents[1])
        done = network["desk"].run(program, {"PYTHONPATH": root}, timeout=600)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["ratio_to_local_head"] = round((found["there_ms"] - found["round_trip_ms"]) / found["here_ms"], 3)
    return found


def inside(blocks: int, times: int) -> dict[str, float]:
    """On desk."""
    from benchmarks.on_all import block
    from notebook_cluster.client import Cluster

    samples: dict[str, list[float]] = {name: [] for name in HEADS}
    with contextlib.redirect_stdout(io.StringIO()):
        shells = {name: new_shell() for name in HEADS}
        try:
            for name, shell in shells.items():
                run_cell(shell, "%load_ext notebook_cluster")
                pairs = "--peers mini --code " + CODE
                run_cell(shell, f"%cluster start {name} --local 2 {HEADS[name]} {pairs} --no-panel")
            runners = {
                name: lambda shell=shell: run_cell(shell, f"%%on_all --no-replay\n{SOURCE}")
                for name, shell in shells.items()
            }
            for run in runners.values():
                block(run, 5)  # the first ones import things
            order = list(runners)
            for _ in range(blocks):
                random.shuffle(order)
                for name in order:
                    samples[name] += block(runners[name], times)
            with Cluster.attach("here") as cluster:
                state = cluster.wait_until(lambda state: state if _round_trip(state) else None)
        finally:
            for name, shell in shells.items():
                with contextlib.suppress(Exception):
                    run_cell(shell, f"%cluster stop {name}")
    medians = {f"{name}_ms": round(statistics.median(values), 2) for name, values in samples.items()}
    return medians | {"round_trip_ms": round(_round_trip(state) or 0.0, 2), "load": round(os.getloadavg()[0], 2)}


def _round_trip(state: Any) -> float | None:
    return next((peer.round_trip_ms for peer in state.peers if peer.name == "mini"), None)


if __name__ == "__main__":
    print(json.dumps(inside(*map(int, sys.argv[1:]))))
