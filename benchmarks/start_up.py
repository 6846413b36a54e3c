"""Time from nothing (no process) to the first ``1+1`` answered by all nodes: ours, ipyparallel, bare jupyter_client.

Each sample is a fresh Python process, timed from outside: the start of the interpreter and all imports count, for
everyone. The three take turns, so that a busy moment of the machine does not hit one of them alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from benchmarks.common import WAYS, private_folders

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


def run_once(way: str, nodes: int) -> None:
    """What a sample's process does."""
    with WAYS[way](nodes) as run:
        run()
        print(READY, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_up", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3, help="samples of each; the median counts")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
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
