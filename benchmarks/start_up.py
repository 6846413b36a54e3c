"""Time from nothing (no process) to the first ``1+1`` answered by all nodes: ours, ipyparallel, bare jupyter_client.

Each sample is a fresh Python process, timed from outside: the start of the interpreter and all imports count, for
everyone. The three take turns, so that a busy moment of the machine does not hit one of them alone.

``--on slurm``: on nodes that Slurm starts, ours beside ipyparallel's own launcher for Slurm
(:mod:`benchmarks.start_up_slurm`), from the call that starts the cluster to the first answer of all nodes; imports do
not count. The program starts a Slurm of its own. ``ratio_to_ipyparallel`` is to be at most 0.5; ``load`` is the
machine's load average at the beginning.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from benchmarks import start_up_slurm
from benchmarks.common import WAYS, last_answer, private_folders

READY = "all nodes answered"


def sample(way: str, nodes: int) -> float:
    """Seconds from starting a Python process to its line READY; the process has ended when this returns.

    Raises:
        RuntimeError: with what the process printed, when it did not get so far.
    """
    command = [sys.executable, "-m", "benchmarks.start_up", "--nodes", str(nodes), "--way", way]
    with private_folders() as folder, (folder / "output.txt").open("w+") as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True, env=os.environ.copy())
        assert process.stdout is not None
        seconds = None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.strip() == READY:
                seconds = time.perf_counter() - started
        if process.wait() != 0 or seconds is None:
            output.seek(0)
            raise RuntimeError(f"{way} failed with exit code {process.returncode}:\n{''.join(printed)}{output.read()}")
    return seconds


def sample_on_slurm(way: str, nodes: int) -> float:
    """Seconds that a fresh process measures; Slurm is idle before and the process has ended behind it. RuntimeError as
    :func:`sample`."""
    start_up_slurm.wait_until_idle(nodes)
    command = [sys.executable, "-m", "benchmarks.start_up", "--nodes", str(nodes), "--on", "slurm", "--way", way]
    with private_folders():
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ.copy(), check=False)
    if done.returncode or not (answer := last_answer(done.stdout)):
        raise RuntimeError(f"{way} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return float(answer[0])


def on_slurm(nodes: int, runs: int) -> dict[str, object]:
    """The line of ``--on slurm``."""
    from tests.engines.running import slurm

    load = [round(value, 2) for value in os.getloadavg()]
    samples: dict[str, list[float]] = {way: [] for way in start_up_slurm.WAYS}
    with slurm(nodes):
        for _ in range(runs):
            for way in start_up_slurm.WAYS:
                samples[way].append(sample_on_slurm(way, nodes))
    median = {way: statistics.median(values) for way, values in samples.items()}
    return {
        "benchmark": "start_up",
        "on": "slurm",
        "nodes": nodes,
        "runs": runs,
        **{f"{way}_s": round(seconds, 3) for way, seconds in median.items()},
        **{f"{way}_all_s": [round(seconds, 3) for seconds in values] for way, values in samples.items()},
        "ratio_to_ipyparallel": round(median["ours"] / median["ipyparallel"], 3),
        "load": load,
    }


def run_once(way: str, nodes: int) -> None:
    """What a sample's process does."""
    with WAYS[way](nodes) as run:
        run()
        print(READY, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_up", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3, help="samples of each; the median counts")
    parser.add_argument("--on", choices=["slurm"], help="nodes that an engine starts")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on and arguments.way:
        print(json.dumps(start_up_slurm.run_once(arguments.way, arguments.nodes)), flush=True)
        return
    if arguments.on:
        if reason := start_up_slurm.missing():
            sys.exit(f"benchmarks.start_up: --on slurm: {reason}")
        print(json.dumps(on_slurm(arguments.nodes, arguments.runs)))
        return
    if arguments.way:
        run_once(arguments.way, arguments.nodes)
        return
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(arguments.runs):
        for way in WAYS:
            samples[way].append(sample(way, arguments.nodes))
    median = {way: statistics.median(values) for way, values in samples.items()}
    result = {"benchmark": "start_up", "nodes": arguments.nodes, "runs": arguments.runs}
    result |= {f"{way}_s": round(seconds, 3) for way, seconds in median.items()}
    result["ratio_to_ipyparallel"] = round(median["ours"] / median["ipyparallel"], 3)
    result["ratio_to_jupyter_client"] = round(median["ours"] / median["jupyter_client"], 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
