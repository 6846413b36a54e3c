"""Steps of an unmodified cell on nodes of one machine, beside the same cell with ``torch.set_num_threads``.

Both train an MLP of 256-1024-256 on all nodes, in turns. Without a share of the cores for each node the unmodified one
is 20 to 35 times slower: each node's torch takes all of them. The cell that sets its number does so for its own time
only, as a user's setting would stay.
"""

import argparse
import json
import os
import statistics

from benchmarks.common import TIMEOUT, private_folders
from notebook_cluster.client import Cluster
from notebook_cluster.processors import threads_for, usable_cores

PREPARE = """
import statistics, time
import torch
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
x, y = torch.randn(64, 256), torch.randn(64, 256)

def median_step(steps):
    nc.barrier()
    milliseconds = []
    for _ in range(steps):
        began = time.perf_counter()
        model.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        milliseconds.append(1000 * (time.perf_counter() - began))
    return statistics.median(milliseconds)
"""
UNMODIFIED = "print(torch.get_num_threads(), median_step({steps}))"
# __wrapped__: torch's own function, which is not noted as the user's setting.
MODIFIED = """
before = torch.get_num_threads()
getattr(torch.set_num_threads, "__wrapped__", torch.set_num_threads)({threads})
print(torch.get_num_threads(), median_step({steps}))
getattr(torch.set_num_threads, "__wrapped__", torch.set_num_threads)(before)
"""


def sample(cluster: Cluster, source: str) -> tuple[int, float]:
    """(threads of a node, milliseconds of a step, the mean of the nodes' medians)."""
    ended, outputs = cluster.run(source, replay=False, timeout=TIMEOUT)
    if ended.status != "ok":
        raise RuntimeError(f"the cell ended as {ended.status}: {ended.results}")
    said = [output.content["text"].split() for output in outputs if output.kind == "stream"]
    return max(int(threads) for threads, _ in said), statistics.mean(float(step) for _, step in said)


def measure(nodes: int, runs: int, steps: int) -> dict[str, object]:
    """Medians over ``runs`` alternating runs of each cell with ``nodes`` nodes."""
    share = threads_for(nodes)
    cells = {"unmodified": UNMODIFIED.format(steps=steps), "modified": MODIFIED.format(steps=steps, threads=share)}
    samples: dict[str, list[float]] = {name: [] for name in cells}
    threads = 0
    load = os.getloadavg()[0]
    with private_folders() as folder, Cluster.start("threads", local=nodes, directory=str(folder)) as cluster:
        try:
            cluster.run(PREPARE)
            for source in cells.values():
                sample(cluster, source)  # the first one makes pools and caches
            for number in range(runs):
                # Who comes first takes turns as well.
                for name in sorted(cells, reverse=bool(number % 2)):
                    taken, step = sample(cluster, cells[name])
                    samples[name].append(step)
                    threads = taken if name == "unmodified" else threads
        finally:
            cluster.stop()
    median = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "benchmark": "threads", "nodes": nodes, "cores": usable_cores(), "threads": threads, "runs": runs,
        "unmodified_ms": round(median["unmodified"], 3), "modified_ms": round(median["modified"], 3),
        "ratio": round(median["unmodified"] / median["modified"], 3), "load": round(load, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.threads", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--runs", type=int, default=9, help="alternating runs of each cell; the median counts")
    parser.add_argument("--steps", type=int, default=100, help="in each run")
    arguments = parser.parse_args()
    for nodes in arguments.nodes:
        print(json.dumps(measure(nodes, arguments.runs, arguments.steps)), flush=True)


if __name__ == "__main__":
    main()
