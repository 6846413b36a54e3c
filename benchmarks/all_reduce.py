"""all_reduce and barrier between nodes of one machine, beside torch's gloo: one JSON line for each case.

Each node is a process of its own with the sockets and the collectives of a node's kernel, and with a gloo group beside
them. Ours and gloo take turns in random blocks, so that a busy moment of the machine does not hit one of them alone.
``shm`` is what nodes of one peer use, ``ipc`` what they use where memory cannot be shared, ``tcp+curve`` what is used
between peers (here over loopback), ``tcp`` the same without encryption, which no cluster uses.

``ratio_to_gloo`` is gloo's time / our time (2: twice as fast), ``barrier_ratio`` our time / gloo's (0.5: the same).
Times are the slowest node's, ``ms`` their median, ``spread`` the distance of the quartiles divided by it. ``cpu_ms``
is the processor's time on one node, all threads together: where other programs run it says more than the times.
"""

import argparse
import json
import random
import statistics
from dataclasses import dataclass

from benchmarks.all_reduce_nodes import TRANSPORTS, Block, run_blocks

BARRIER = 0.0
"""The size that stands for a barrier."""


@dataclass(frozen=True)
class Timing:
    """Seconds of each repetition, and processor seconds of one in each block."""

    samples: list[float]
    busy: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        lower, _, upper = statistics.quantiles(self.samples, n=4)
        return (upper - lower) / self.median


def repetitions(mb: float) -> int:
    """How often one block repeats an operation on ``mb`` MB."""
    return 40 if mb == BARRIER else 20 if mb <= 4 else 4


def measure(nodes: int, sizes: list[float], transports: list[str], blocks: int, seed: int) -> dict[Block, Timing]:
    """Every block ``blocks`` times in random order, on ``nodes`` processes."""
    ways = ["gloo", *transports]
    cases = [Block(way, mb, repetitions(mb)) for mb in [BARRIER, *sizes] for way in ways]
    order: list[Block] = []
    for _ in range(blocks):
        # Sizes apart, ways mixed: what is compared with each other lies close together in time.
        for mb in [BARRIER, *sizes]:
            same_size = [case for case in cases if case.mb == mb]
            random.Random(seed + len(order)).shuffle(same_size)
            order += same_size
    times = {case: Timing([], []) for case in cases}
    for block, (seconds, busy) in zip(order, run_blocks(nodes, transports, order), strict=True):
        times[block].samples.extend(seconds)
        times[block].busy.append(busy)
    return times


def lines(nodes: int, sizes: list[float], transports: list[str], found: dict[Block, Timing]) -> list[dict[str, object]]:
    """What is printed for one number of nodes."""

    def timing(way: str, mb: float) -> Timing:
        return found[Block(way, mb, repetitions(mb))]

    printed = []
    for transport in transports:
        barrier, gloo_barrier = timing(transport, BARRIER), timing("gloo", BARRIER)
        for mb in sizes:
            ours, gloo = timing(transport, mb), timing("gloo", mb)
            printed.append(
                {
                    "benchmark": "all_reduce",
                    "transport": transport,
                    "nodes": nodes,
                    "mb": mb,
                    "runs": len(ours.samples),
                    "ratio_to_gloo": round(gloo.median / ours.median, 3),
                    "ms": round(ours.median * 1e3, 3),
                    "spread": round(ours.spread, 2),
                    "gloo_ms": round(gloo.median * 1e3, 3),
                    "gloo_spread": round(gloo.spread, 2),
                    "cpu_ms": round(statistics.median(ours.busy) * 1e3, 3),
                    "gloo_cpu_ms": round(statistics.median(gloo.busy) * 1e3, 3),
                    "barrier_ratio": round(barrier.median / gloo_barrier.median, 3),
                    "barrier_ms": round(barrier.median * 1e3, 4),
                    "gloo_barrier_ms": round(gloo_barrier.median * 1e3, 4),
                }
            )
    return printed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all_reduce", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 64], help="sizes of float32 arrays in MiB")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--blocks", type=int, default=6, help="random blocks of each case")
    parser.add_argument("--seed", type=int, default=0, help="of the order of blocks")
    arguments = parser.parse_args()
    if min(arguments.nodes) < 2 or min(arguments.mb) <= 0 or arguments.blocks < 1:
        parser.error("--nodes is at least 2, --mb more than 0, --blocks at least 1")
    for nodes in arguments.nodes:
        found = measure(nodes, arguments.mb, arguments.transports, arguments.blocks, arguments.seed)
        for line in lines(nodes, arguments.mb, arguments.transports, found):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
