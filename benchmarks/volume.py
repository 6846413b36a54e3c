"""Time and memory of much printed text: every node prints so many MB, all of it at once.

Both ways are typed into the kernel of a notebook whose frontend reads everything: ours is ``%%on_all``, the other
ipyparallel's ``%%px --block``, in turns. Time is from sending the cell until the kernel is idle. Memory is the sum of
the peaks of the resident memory of what passes the text on: the notebook's kernel, then our coordinator and agent, or
ipyparallel's controller with its schedulers. The nodes' own kernels are left out on both sides.
"""

import contextlib
import io
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.common import private_folders
from benchmarks.notebook import Notebook, notebook_with_cluster, notebook_with_engines

LINE_BYTES = 80
CELL = """{magic}
import os
_line = f"{{os.getpid():>9}} " + "x" * ({line} - 11) + "\\n"
for _ in range({lines}):
    print(_line, end="")
"""
SIZES_MB = (1, 2, 4, 8)


class Way:
    """One way to run a cell on all nodes, and the processes through which the text goes."""

    def __init__(self, opened: Notebook, magic: str, processes: list[int]) -> None:
        self._opened = opened
        self._magic = magic
        self._processes = processes

    def run(self, megabytes: float) -> tuple[float, float]:
        """(seconds, MB of memory) of a cell that prints ``megabytes`` on each node."""
        for pid in self._processes:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        lines = int(megabytes * 1e6) // LINE_BYTES
        started = time.perf_counter()
        ended = self._opened.finish(self._opened.start(CELL.format(magic=self._magic, line=LINE_BYTES, lines=lines)))
        seconds = time.perf_counter() - started
        if ended != "ok":
            raise RuntimeError(f"{self._magic} failed: {ended}")
        return seconds, sum(map(peak_memory, self._processes)) / 1e6


def peak_memory(pid: int) -> int:
    """Bytes, since clear_refs was written."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@contextlib.contextmanager
def ours(nodes: int) -> Iterator[Way]:
    """``%%on_all`` with ``nodes`` local nodes."""
    with notebook_with_cluster(nodes) as (opened, view):
        coordinator = view.connection.file.pid
        agents = [child.pid for child in psutil.Process(coordinator).children()]
        yield Way(opened, "%%on_all --no-replay", [opened.pid, coordinator, *agents])


@contextlib.contextmanager
def ipyparallel(nodes: int) -> Iterator[Way]:
    """``%%px --block`` with ``nodes`` local engines."""
    with notebook_with_engines(nodes) as (opened, engines, _):
        controller = psutil.Process(engines.controller.process.pid)
        passing = [controller.pid, *(child.pid for child in controller.children(recursive=True))]
        yield Way(opened, "%%px --block", [opened.pid, *passing])


def measure(nodes: int, most_mb: float, runs: int) -> dict[str, object]:
    """Medians for a part, then more, of ``most_mb`` per node, and the ratios at ``most_mb``."""
    ways = {"ours": ours, "ipyparallel": ipyparallel}
    sizes = [most_mb * size / SIZES_MB[-1] for size in SIZES_MB]
    samples: dict[tuple[str, float], list[tuple[float, float]]] = {}
    with private_folders(), contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        started = {name: stack.enter_context(start(nodes)) for name, start in ways.items()}
        for way in started.values():
            way.run(sizes[0] / 10)  # the first one imports things
        for size in sizes:
            for _ in range(runs):
                for name, way in started.items():
                    samples.setdefault((name, size), []).append(way.run(size))
    seconds = {key: statistics.median(row[0] for row in rows) for key, rows in samples.items()}
    memory = {key: statistics.median(row[1] for row in rows) for key, rows in samples.items()}
    result: dict[str, object] = {"stdout_mb": sizes}
    for name in ways:
        result[f"{name}_s"] = [round(seconds[name, size], 3) for size in sizes]
        result[f"{name}_memory_mb"] = [round(memory[name, size], 1) for size in sizes]
    result["ratio_to_ipyparallel"] = round(seconds["ours", most_mb] / seconds["ipyparallel", most_mb], 3)
    result["memory_ratio_to_ipyparallel"] = round(memory["ours", most_mb] / memory["ipyparallel", most_mb], 3)
    return result
