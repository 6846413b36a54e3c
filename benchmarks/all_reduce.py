"""all_reduce and barrier between nodes of one machine, beside torch's gloo: one JSON line for each case.

Each node is a process of its own with the sockets and the collectives of a node's kernel, and with a gloo group beside
them. Ours and gloo take turns in random blocks, so that a busy moment of the machine does not hit one of them alone.
Both write the result over the array (``in_place``); with ``--new`` ours makes a new one, as ``nc.all_reduce(x)`` does.
``shm`` is what nodes of one peer use, ``ipc`` what they use where memory cannot be shared, ``tcp+curve`` what is used
between peers (here over loopback), ``tcp`` the same without encryption, which no cluster uses.

``ratio_to_gloo`` is gloo's time / our time (2: twice as fast), ``barrier_ratio`` our time / gloo's (0.5: the same).
Times are the slowest node's, ``ms`` their median, ``spread`` the distance of the quartiles divided by it. ``cpu_ms``
is the processor's time on one node, all threads together: where other programs run it says more than the times.

With ``--rate 1gbit`` every node is on a host of its own, a network namespace whose cable is slowed down to that rate
with tc's tbf, both ways. ``ratio_to_plain`` is what encryption leaves of the speed (plain TCP's time / our time). Needs
root, ``ip``, ``nft`` and ``tc``; Linux only.
"""

import argparse
import contextlib
import json
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.all_reduce_nodes import TRANSPORTS, Block, Place, run_blocks
from benchmarks.links import bits_per_second, missing

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


@contextlib.contextmanager
def places(nodes: int, rate: str) -> Iterator[list[Place]]:
    """Here, or with ``rate`` each on a host of its own behind a cable of that rate."""
    if not rate:
        yield [Place()] * nodes
        return
    from benchmarks.links_network import slow_down
    from tests.namespaces import Network

    with Network(*(f"host-{number}" for number in range(nodes))) as network:
        for host in network.hosts.values():
            slow_down(network, host, rate)
        yield [Place(host.address, host.namespace) for host in network.hosts.values()]


def measure(
    nodes: int, sizes: list[float], transports: list[str], blocks: int, seed: int, in_place: bool, rate: str = ""
) -> dict[Block, Timing]:
    """Every block ``blocks`` times in random order, on ``nodes`` processes."""
    ways = ["gloo", *transports]
    cases = [Block(way, mb, repetitions(mb), in_place) for mb in [BARRIER, *sizes] for way in ways]
    order: list[Block] = []
    for _ in range(blocks):
        # Sizes apart, ways mixed: what is compared with each other lies close together in time.
        for mb in [BARRIER, *sizes]:
            same_size = [case for case in cases if case.mb == mb]
            random.Random(seed + len(order)).shuffle(same_size)
            order += same_size
    times = {case: Timing([], []) for case in cases}
    with places(nodes, rate) as there:
        for block, (seconds, busy) in zip(order, run_blocks(there, transports, order), strict=True):
            times[block].samples.extend(seconds)
            times[block].busy.append(busy)
    return times


def lines(
    nodes: int, sizes: list[float], transports: list[str], in_place: bool, found: dict[Block, Timing]
) -> list[dict[str, object]]:
    """What is printed for one number of nodes."""

    def timing(way: str, mb: float) -> Timing:
        return found[Block(way, mb, repetitions(mb), in_place)]

    printed = []
    for transport in transports:
        barrier, gloo_barrier = timing(transport, BARRIER), timing("gloo", BARRIER)
        for mb in sizes:
            ours, gloo = timing(transport, mb), timing("gloo", mb)
            plain = {"ratio_to_plain": round(timing("tcp", mb).median / ours.median, 3)} if "tcp" in transports else {}
            printed.append(
                {
                    "benchmark": "all_reduce",
                    "transport": transport,
                    "nodes": nodes,
                    "mb": mb,
                    "in_place": in_place,
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
                    **plain,
                }
            )
    return printed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all_reduce", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 64], help="sizes of float32 arrays in MiB")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, help="all, with --rate tcp and tcp+curve")
    parser.add_argument("--rate", default="", help="of each host's cable, as tc takes it: 1gbit")
    parser.add_argument("--new", action="store_true", help="ours makes a new array for each result")
    parser.add_argument("--blocks", type=int, default=10, help="random blocks of each case")
    parser.add_argument("--seed", type=int, default=0, help="of the order of blocks")
    arguments = parser.parse_args()
    if min(arguments.nodes) < 2 or min(arguments.mb) <= 0 or arguments.blocks < 1:
        parser.error("--nodes is at least 2, --mb more than 0, --blocks at least 1")
    transports = arguments.transports or (["tcp", "tcp+curve"] if arguments.rate else list(TRANSPORTS))
    if arguments.rate:
        if not {"tcp", "tcp+curve"}.issuperset(transports):
            parser.error("--rate: only tcp and tcp+curve go over a cable")
        try:
            bits_per_second(arguments.rate)
        except ValueError as error:
            parser.error(str(error))
        if reason := missing():
            sys.exit(f"benchmarks.all_reduce: {reason}")
    for nodes in arguments.nodes:
        in_place = not arguments.new
        found = measure(nodes, arguments.mb, transports, arguments.blocks, arguments.seed, in_place, arguments.rate)
        for line in lines(nodes, arguments.mb, transports, in_place, found):
            print(json.dumps(line | ({"rate": arguments.rate} if arguments.rate else {})), flush=True)


if __name__ == "__main__":
    main()
