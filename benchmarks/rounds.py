"""What a round costs the training loop, in time and memory, beside the same by hand on torch's gloo, or beside writing
and reading its state once. One JSON line for each case.

A real cluster of local nodes, each with the same model: a handful of tensors. By hand is DiLoCo as people write it with
``torch.distributed``: ``delta = start - parameters``, all_reduce, divide, Nesterov step, load back. Ours is
``nc.DiLoCo`` with ``--codec``, or ``nc.SparseLoCo`` (``sparse``). Both run in the same processes, in turns. The inner
steps are one multiplication in place, which is not timed. Afterwards both must hold the same parameters, as near as the
codec allows (``apart``: the largest difference, as a share of the largest parameter), and all nodes the same state:
otherwise the program ends without a figure.

``ours_s`` and ``gloo_s`` are medians over ``--rounds`` turns of each after one that warms up, each turn the slowest
node's; ``ratio_to_gloo`` is ours / gloo's (1: the same). With ``--fragments`` it is a round of all fragments.

``..._multiple``: what a node's process holds beyond the model alone, in multiples of the model in float32, the mean
over nodes. It is Pss_Anon + Pss_Shmem of /proc/PID/smaps_rollup, so that memory which nodes share is counted once, read
every 20 ms from outside (less often where the kernel needs longer to count). ``peak``: each node's most, from the first
round until the cell has ended; ``between``: the mean between two rounds; ``after``: ``--after`` seconds after the end
of the cell, with the sync object still there. ``estimate`` is what is said of ``peak`` beforehand, and
``gloo_peak`` is that of the loop by hand. Memory is measured in rounds of its own, ours and gloo's apart, because
reading it takes the processor.

``io_thread_longest_ms`` is the longest that one task (a ready socket, a call, a timer) kept a node's I/O thread, in
processor time, during the timed rounds: so long no other message of this node is read. ``load`` is the machine's load
average as these begin.

``--beside files`` is for models too large for both ways, with ``--state disk``: in turns with ours each node writes
as much as its state has (theta, momentum, error feedback) to a file, until it is on the disk, and reads it again
(``files_s``, ``ratio_to_files``). ``together_gb``: the most that all nodes held at once, their models included.

``--link tcp`` has each node on a host of its own, a network namespace, where nodes talk over TCP with CURVE, and gloo
over the same cable without encryption; needs root, ``ip`` and ``nft``. Linux only.
"""

import argparse
import inspect
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import rounds_nodes
from benchmarks.rounds_nodes import LINKS, Case, Run
from notebook_cluster.codecs import CODEC_NAMES, SPARSE_NAMES
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.momentum import MOMENTUM_DTYPES, NOT_KEPT
from notebook_cluster.training.loop.costs import costs_of

CODECS = (*(name for name in CODEC_NAMES if name not in SPARSE_NAMES), "sparse")
PERIOD = 0.02
"""Seconds between two readings of memory."""
PAUSE = 0.5
"""Seconds between two rounds while memory is read."""
NEEDED = {"gloo": 12, "files": 2.5}
"""Times the model in float32 that a node may need in all, with both ways in one process: more is not begun."""

_APART = {"float32": 1e-5, "int4": 2e-2, "e3m0": 2e-2, "sparse": float("inf")}
"""The most that the parameters of both ways may differ, as a share of the largest; a round that is missing changes them
by more than 2e-2. SparseLoCo is another algorithm."""
_APART_OTHERS = 2e-3
_APART_BFLOAT16 = 2e-2
"""Twice the distance of two neighbours in bfloat16, where both ways round to different ones."""


def held(pid: int) -> int:
    """Bytes of memory of its own that process ``pid`` holds, and its part of what it shares with others."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


class Watch:
    """A thread that reads what processes hold, all the time while the block runs."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._readings: list[list[tuple[float, int]]] = [[] for _ in pids]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            for pid, readings in zip(self._pids, self._readings, strict=True):
                readings.append((time.monotonic(), held(pid)))
            self._over.wait(max(0.0, began + PERIOD - time.monotonic()))

    def peak(self, spans: Sequence[Sequence[Sequence[float]]]) -> list[int]:
        """The most that each process held from its first round on; ``spans``: (begin, end) of each one's rounds."""
        return [
            max(size for moment, size in readings if moment >= rounds[0][0])
            for readings, rounds in zip(self._readings, spans, strict=True)
        ]

    def together(self) -> int:
        """The most that all processes held at once."""
        return max(sum(size for _, size in at_once) for at_once in zip(*self._readings, strict=False))

    def between(self, spans: Sequence[Sequence[Sequence[float]]]) -> list[float]:
        """The mean of what each process held between two of its rounds."""
        return [
            statistics.mean(
                size
                for moment, size in readings
                if any(one[1] < moment < next_one[0] for one, next_one in itertools.pairwise(rounds))
            )
            for readings, rounds in zip(self._readings, spans, strict=True)
        ]


def multiple(sizes: Sequence[float], alone: Sequence[int], parameters: int) -> float:
    """The mean of ``sizes`` - ``alone``, in multiples of a float32 model."""
    beyond = [size - before for size, before in zip(sizes, alone, strict=True)]
    return round(statistics.mean(beyond) / (4 * parameters), 2)


def memory(case: Case, run: Run, pids: list[int], after: float) -> dict[str, float]:
    """Rounds by hand, where these are what ours are beside, then ours, with pauses between them."""

    def model_alone() -> list[int]:
        run(rounds_nodes.GIVE_BACK)
        time.sleep(PAUSE)
        return [held(pid) for pid in pids]

    found = {}
    if case.beside == "gloo":
        alone = model_alone()
        with Watch(pids) as watch:
            spans = run(rounds_nodes.BY_HAND_MEMORY)
        found = {"gloo_peak_multiple": multiple(watch.peak(spans), alone, case.parameters)}
    alone = model_alone()
    with Watch(pids) as watch:
        spans = run(rounds_nodes.OUR_MEMORY)
    if case.beside == "files":
        found = {"together_gb": round(watch.together() / 1e9, 2)}
    time.sleep(after)
    return {
        "peak_multiple": multiple(watch.peak(spans), alone, case.parameters),
        "between_multiple": multiple(watch.between(spans), alone, case.parameters),
        "after_multiple": multiple([held(pid) for pid in pids], alone, case.parameters),
        **found,
    }


def times(case: Case, run: Run) -> dict[str, Any]:
    """Rounds of both ways in turns.

    Raises:
        RuntimeError: nodes hold different states, or the two ways different parameters.
    """
    load = [round(value, 2) for value in os.getloadavg()]
    found = run(rounds_nodes.TIMES if case.beside == "gloo" else rounds_nodes.FILE_TIMES)
    if len({node["hash"] for node in found}) > 1:
        raise RuntimeError(f"the nodes hold different states: {[node['hash'] for node in found]}")
    apart = max(node.get("apart", 0.0) for node in found)
    most = _APART.get(case.codec, _APART_OTHERS) + (_APART_BFLOAT16 if case.dtype == "bfloat16" else 0)
    if not apart <= most:
        raise RuntimeError(f"ours and the loop by hand differ by {apart:.2g} of the largest parameter, above {most:g}")
    ours, other = (
        statistics.median(max(seconds) for seconds in zip(*(node[way] for node in found), strict=True))
        for way in ("ours", case.beside)
    )
    return {
        "ours_s": round(ours, 5),
        f"{case.beside}_s": round(other, 5),
        f"ratio_to_{case.beside}": round(ours / other, 3),
        **({"apart": float(f"{apart:.2g}")} if case.beside == "gloo" else {}),
        "io_thread_longest_ms": round(1000 * max(node["task"] for node in found), 2),
        "load": load,
    }


def estimated(case: Case, link: str) -> float:
    """What ``sync.memory`` says that ``peak_multiple`` is; for nodes on machines of their own so does ``%cluster
    estimate``."""
    sparse = case.codec == "sparse"
    momentum = NOT_KEPT if sparse else case.momentum
    fragments = Fragments(
        case.codec, case.parameters, count=case.fragments, over_senders=sparse, momentum_dtype=momentum
    )
    exact, disk, together = case.dtype == "float32", case.state == "disk", case.nodes if link == "none" else 1
    return round(costs_of(fragments, case.nodes, exact=exact, disk=disk, together=together).times, 2)


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One line for each case."""
    for nodes in arguments.nodes:
        for parameters in map(int, arguments.params):
            for codec in arguments.codec:
                case = Case(
                    codec,
                    nodes,
                    parameters,
                    arguments.rounds,
                    arguments.fragments,
                    arguments.state,
                    arguments.dtype,
                    arguments.momentum,
                    arguments.beside,
                )
                check_memory(case)
                with LINKS[arguments.link](nodes) as run:
                    pids = run(case.set_up(PAUSE))
                    found = memory(case, run, pids, arguments.after)
                    yield {
                        "benchmark": "rounds",
                        "codec": codec,
                        "nodes": nodes,
                        "params": parameters,
                        "link": arguments.link,
                        "state": case.state,
                        "dtype": case.dtype,
                        "momentum": case.momentum,
                        "fragments": case.fragments,
                        "rounds": case.rounds,
                        **times(case, run),
                        **found,
                        "estimate_multiple": estimated(case, arguments.link),
                    }


def check_memory(case: Case) -> None:
    """RuntimeError: the machine has too little free memory for ``case``."""
    needed, free = case.nodes * case.parameters * 4 * NEEDED[case.beside], psutil.virtual_memory().available
    if needed > free:
        raise RuntimeError(
            f"{case.nodes} nodes with {case.parameters:.0e} parameters may need {needed / 1e9:.1f} GB and "
            f"{free / 1e9:.1f} GB are free: use fewer --nodes or --params"
            + (", or --state disk --beside files" if case.beside == "gloo" else "")
        )


def missing(link: str) -> str:
    """Why this cannot be measured here, or an empty text."""
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.exists() or "Pss_Shmem:" not in rollup.read_text():
        return "memory is read from /proc/PID/smaps_rollup with its Pss_Shmem, which Linux has from 5.4 on"
    if link == "tcp":
        from tests import namespaces

        return f"--link tcp: {reason}" if (reason := namespaces.missing()) else ""
    return ""


def not_there_yet(codecs: Sequence[str], state: str) -> str:
    """Which option this notebook-cluster does not have, or an empty text."""
    import notebook_cluster as nc

    strategies = {nc.SparseLoCo if codec == "sparse" else nc.DiLoCo for codec in codecs}
    for strategy in sorted(strategies, key=lambda kind: kind.__name__):
        if state != "memory" and "state" not in inspect.signature(strategy).parameters:
            return f"--state {state}: nc.{strategy.__name__} of this notebook-cluster has no state=, only memory"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--params", type=float, nargs="+", default=[1e7, 1e8], help="parameters of the model")
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=["float32", "int8", "int4", "sparse"])
    parser.add_argument("--state", choices=["memory", "disk"], default="memory", help="where ours keeps its state")
    parser.add_argument("--beside", choices=NEEDED, default="gloo", help="what our rounds are compared with")
    parser.add_argument("--momentum", choices=MOMENTUM_DTYPES, default="float32", help="how DiLoCo keeps it")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the model")
    parser.add_argument("--fragments", type=int, default=1, help="in which ours sends the model")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way; the median counts")
    parser.add_argument("--link", choices=LINKS, default="none", help="between the nodes; tcp needs root")
    parser.add_argument("--after", type=float, default=10, help="seconds from a cell's end to the last look at memory")
    arguments = parser.parse_args()
    if min(arguments.nodes) < 2 or min(arguments.params) < 1000 or arguments.fragments < 1 or arguments.rounds < 2:
        parser.error("--nodes and --rounds are at least 2, --params at least 1000, --fragments at least 1")
    if arguments.beside == "files" and arguments.state != "disk":
        parser.error("--beside files is for --state disk: in memory a state is not written to files")
    if not arguments.after >= 0:
        parser.error("--after is at least 0")
    if reason := not_there_yet(arguments.codec, arguments.state):
        parser.error(reason)
    if reason := missing(arguments.link):
        sys.exit(f"benchmarks.rounds: {reason}")
    try:
        for line in measured(arguments):
            print(json.dumps(line), flush=True)
    except RuntimeError as error:
        sys.exit(f"benchmarks.rounds: {str(error).splitlines()[-1]}")  # above it is the cell that failed


if __name__ == "__main__":
    main()
