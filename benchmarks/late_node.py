"""A node that joins over a slow cable while others train a large model: how often its state travels. One JSON line.

Three hosts (network namespaces), each with one node: two train with DiLoCo, a round every ``--every`` seconds, over
cables of ``--rate``. Then the third is added, and comes into the running cell: it takes over the state (theta and
momentum, in float32) while the rounds of the others go on.

``received_mb``: what the network card of the third host has got from then until its first round, headers and its part
of that round included, beside ``state_mb``; ``seconds``: until then. ``round_s``: the median of the rounds of the other
two before, and ``round_s_meanwhile`` the longest while it came. The program fails where the state travelled more than
once, or where the three do not hold the same model in the end.

Needs root, ``ip``, ``nft`` and ``tc``; Linux only.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.links_network import CODE, answers, slow_down, speed_up
from benchmarks.slept import MODEL
from tests.conftest import wait_until
from tests.hosts import CLUSTER, HostNotebook, Share, notebook_on
from tests.namespaces import Network, missing

HOSTS = ("host-0", "host-1", "host-2")
NODES = ("local", "host-1", "host-2")
MOST = 1.5
"""Times the state that the third host may get: with a round's numbers, what it missed meanwhile, and headers."""

TRAIN = (
    "\n%%on_all --async"
    + MODEL
    + """
import os

def got():
    "Bytes that this host's network card has got."
    with open("/proc/net/dev") as lines:
        return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("eth0:"))

model = make_model()
sync = nc.DiLoCo(model, every=nc.Seconds({every}), codec={codec!r}, name="late", fresh=True)
number = 0
while not os.path.exists({stop!r}):
    began = time.perf_counter()
    change(model, number)
    sleep_until(began + 0.25)
    number += 1
    done = sync.step(loss=1.0)
    if done:
        print(json.dumps([done.round, time.time(), got()]), flush=True)
sync.finish()
"""
)
LOOK = """
%%on_all --no-replay
import hashlib
seen = hashlib.sha256()
for parameter in model:
    seen.update(parameter.detach().numpy())
print(json.dumps([sync.round, seen.hexdigest()]))
"""


def rounds_of(notebook: HostNotebook, node: str) -> list[Any]:
    """[round, when, bytes that its network card has got] of what the cell has printed there."""
    rows = [json.loads(line) for line in notebook.printed(node).splitlines() if line.startswith("[")]
    return [row for row in rows if len(row) == 3]


def measured(arguments: argparse.Namespace, network: Network, notebook: HostNotebook) -> dict[str, Any]:
    """Raises:
    RuntimeError: the state has travelled more than once, or nodes hold different models.
    """
    stop, state = network.root / "stop", 8 * arguments.params / 1e6
    notebook.works(f"%cluster start {CLUSTER} --no-panel")
    notebook.works(f"%cluster add host-1 --code {CODE}")
    notebook.wait_for_nodes({"local", "host-1"})
    notebook.works(
        TRAIN.format(parameters=arguments.params, every=arguments.every, codec=arguments.codec, stop=str(stop))
    )
    wait_until(lambda: rounds_of(notebook, "local"), 300, "the first round")
    for host in network.hosts.values():
        slow_down(network, host, arguments.rate)
    try:
        wait_until(lambda: len(rounds_of(notebook, "local")) > 3, 600, "three rounds over slow cables")
        began, before = time.time(), network["host-2"].run(["cat", "/proc/net/dev"]).stdout
        notebook.works(f"%cluster add host-2 --code {CODE}")
        wait_until(lambda: rounds_of(notebook, "host-2"), arguments.most, "the first round of host-2")
        first = rounds_of(notebook, "host-2")[0]
        wait_until(lambda: rounds_of(notebook, "local")[-1][0] > first[0], 600, "one more round")
        stop.touch()
        found = answers(notebook, NODES, LOOK, 600)  # its cell waits for the end of the one that trains
    finally:
        for host in network.hosts.values():
            speed_up(network, host)
    lines = [line for line in before.splitlines() if line.strip().startswith("eth0:")]
    received = (first[2] - int(lines[0].split(":")[1].split()[0])) / 1e6
    if len({digest for _, digest in found}) > 1:
        raise RuntimeError(f"the nodes hold different models: {found}")
    if received > MOST * state:
        raise RuntimeError(f"host-2 got {received:.0f} MB until its first round, and the state has {state:.0f} MB")
    times = [when for _, when, _ in rounds_of(notebook, "local")]
    return {
        "state_mb": round(state), "received_mb": round(received), "seconds": round(first[1] - began, 1),
        "first_round": first[0], "last_round": found[0][0],
        "round_s": lengths(times, 0.0, began, statistics.median),
        "round_s_meanwhile": lengths(times, began, first[1], max),
    }  # fmt: skip


def lengths(times: Sequence[float], begin: float, end: float, of: Any) -> float:
    """``of`` the seconds from one of ``times`` to the next, of those that end from ``begin`` to ``end``."""
    return round(of(after - before for before, after in itertools.pairwise(times[1:]) if begin < after <= end), 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.late_node", description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=lambda text: int(float(text)), default=125_000_000)
    parser.add_argument("--rate", default="100mbit", help="of each host, both ways")
    parser.add_argument("--every", type=float, default=20, help="seconds of a round")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--most", type=float, default=1200, help="seconds that the node may take until its first round")
    arguments = parser.parse_args()
    if arguments.params < 1000 or not arguments.every > 0:
        parser.error("--params is at least 1000, --every above 0")
    if reason := missing():
        sys.exit(f"benchmarks.late_node: {reason}")
    with Network(*HOSTS) as network:
        for name in HOSTS[1:]:
            Share(network[name], "--code", CODE)
        with notebook_on(network["host-0"]) as notebook:
            try:
                found = measured(arguments, network, notebook)
            except RuntimeError as error:
                sys.exit(f"benchmarks.late_node: {error}")
    about = {name: getattr(arguments, name) for name in ("params", "rate", "every", "codec")}
    print(json.dumps({"benchmark": "late_node", **about, **found}))


if __name__ == "__main__":
    main()
