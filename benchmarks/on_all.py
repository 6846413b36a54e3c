"""Median time of ``1+1`` on all nodes of a running cluster.

Ours through ``%%on_all``, ipyparallel through ``%%px --block``, and bare jupyter_client kernels. All three are up
at the same time and take turns in short blocks, in an order drawn anew each time: what one does after its answer (say
so to other views, tidy up) is paid by the next. With ``--stdout-mb`` it is about printed text instead: see
:mod:`benchmarks.volume`; with ``--head`` about a cluster that is led from another host: :mod:`benchmarks.on_all_head`.
"""

import argparse
import contextlib
import io
import json
import random
import statistics
import time

from benchmarks import on_all_head, volume
from benchmarks.common import WAYS, Runner, private_folders

VOLUME_RUNS = 3


def block(run: Runner, times: int) -> list[float]:
    """Milliseconds of each of ``times`` runs."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return [1000 * value for value in seconds]


def measure(nodes: int, blocks: int, times: int) -> dict[str, float]:
    """Median milliseconds of each way over ``blocks`` interleaved blocks of ``times`` runs.

    What the cells show is rendered as always, but not printed.
    """
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    with private_folders(), contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        runners = {way: stack.enter_context(start(nodes)) for way, start in WAYS.items()}
        for run in runners.values():
            block(run, 5)  # the first ones import things
        order = list(runners)
        for _ in range(blocks):
            random.shuffle(order)
            for way in order:
                samples[way] += block(runners[way], times)
    return {way: statistics.median(values) for way, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_all", description="time of 1+1 on all nodes")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=60, help="how often the three take turns")
    parser.add_argument("--times", type=int, default=8, help="runs in each block")
    parser.add_argument("--stdout-mb", type=float, help="print up to so many MB on every node instead")
    parser.add_argument("--head", action="store_true", help="led from another host beside led from here (Linux, root)")
    arguments = parser.parse_args()
    if arguments.head:
        found = on_all_head.measure(arguments.blocks, arguments.times)
        print(json.dumps({"benchmark": "on_all", "head": "mini", "nodes": 3} | found))
        return
    result: dict[str, object] = {"benchmark": "on_all", "nodes": arguments.nodes}
    if arguments.stdout_mb is not None:
        print(json.dumps(result | volume.measure(arguments.nodes, arguments.stdout_mb, runs=VOLUME_RUNS)))
        return
    median = measure(arguments.nodes, arguments.blocks, arguments.times)
    result |= {"runs": arguments.blocks * arguments.times}
    result |= {f"{way}_ms": round(milliseconds, 2) for way, milliseconds in median.items()}
    result["ratio_to_jupyter_client"] = round(median["ours"] / median["jupyter_client"], 3)
    result["ratio_to_ipyparallel"] = round(median["ours"] / median["ipyparallel"], 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
