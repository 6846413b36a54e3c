"""Time from Stop to the moment when every node is idle again and the notebook's cell has ended.

Both ways are typed into the kernel of a notebook, which gets SIGINT from its parent as from a Jupyter server: ours is
``%%on_all``, the other ipyparallel's ``%%px --block``, in turns whose order is drawn anew each time. The nodes count in
a pure Python loop, or sleep.

A Stop that reaches a node late may end the cell after the one that it was for. Such a cell is stopped, counted as lost
by its way, and run once more.
"""

import argparse
import contextlib
import io
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.common import private_folders
from benchmarks.notebook import Notebook, notebook_with_cluster, notebook_with_engines

BEGIN = "import time, pathlib, os\npathlib.Path({folder!r}, str(os.getpid())).touch()\n"
BODIES = {"busy": "while True: sum(range(1000))", "asleep": "time.sleep(600)"}
PATIENCE = 60.0
BEGINS = 20.0
"""Seconds for a cell to run on all nodes."""
MOST_LOST = 3


class Way:
    """One way to run a cell on all nodes: the notebook, its magic, and how to see that no node runs anything."""

    def __init__(self, opened: Notebook, magic: str, all_idle: Callable[[], bool]) -> None:
        self.opened = opened
        self.magic = magic
        self.all_idle = all_idle
        self.lost = 0


def wait_for(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    deadline = time.perf_counter() + patience
    while not condition():
        if time.perf_counter() > deadline:
            raise TimeoutError(f"waited {patience:g} s for {what}")
        time.sleep(0.001)


def one_stop(way: Way, body: str, nodes: int, folder: Path) -> float:
    """Seconds from Stop until the cell has ended and every node is idle."""
    while True:
        for path in folder.iterdir():
            path.unlink()
        request = way.opened.start(f"{way.magic}\n{BEGIN.format(folder=str(folder))}{body}")
        try:
            wait_for(lambda: len(list(folder.iterdir())) == nodes, f"{nodes} nodes to run {body!r}", BEGINS)
            runs = True
        except TimeoutError as error:
            way.lost += 1
            runs = False
            if way.lost > MOST_LOST:
                raise TimeoutError(f"{error} with {way.magic}, {way.lost} times") from None
        time.sleep(0.2)  # into the loop itself
        pressed = time.perf_counter()
        way.opened.press_stop()
        way.opened.finish(request)
        wait_for(way.all_idle, f"every node to be idle after Stop with {way.magic}")
        if runs:
            return time.perf_counter() - pressed


@contextlib.contextmanager
def ours(nodes: int) -> Iterator[Way]:
    """``%%on_all`` in a notebook with a cluster of ``nodes`` local nodes."""
    with notebook_with_cluster(nodes) as (opened, view):

        def all_idle() -> bool:
            cell = view.state().cell
            return cell is not None and cell.ended is not None

        yield Way(opened, "%%on_all --no-replay", all_idle)


@contextlib.contextmanager
def ipyparallel(nodes: int) -> Iterator[Way]:
    """``%%px --block`` in a notebook with ``nodes`` local engines."""
    with notebook_with_engines(nodes) as (opened, _, client):

        def all_idle() -> bool:
            status = client.queue_status()
            return all(row["queue"] == 0 and row["tasks"] == 0 for key, row in status.items() if isinstance(key, int))

        yield Way(opened, "%%px --block", all_idle)


def measure(nodes: int, runs: int) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Median seconds by body, then by way; the first stop of each way is not counted. How many cells each way lost."""
    ways = {"ours": ours, "ipyparallel": ipyparallel}
    samples: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name in BODIES}
    with private_folders() as folder, contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        marks = folder / "marks"
        marks.mkdir()
        started = {name: stack.enter_context(start(nodes)) for name, start in ways.items()}
        turns = [(name, way) for name in BODIES for way in started]
        for run in range(runs + 1):
            random.shuffle(turns)
            for name, way in turns:
                seconds = one_stop(started[way], BODIES[name], nodes, marks)
                if run > 0:
                    samples[name][way].append(seconds)
    medians = {name: {way: statistics.median(values) for way, values in each.items()} for name, each in samples.items()}
    return medians, {name: way.lost for name, way in started.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stop", description="time from Stop to all nodes idle")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--runs", type=int, default=30)
    arguments = parser.parse_args()
    median, lost = measure(arguments.nodes, arguments.runs)
    result: dict[str, object] = {"benchmark": "stop", "nodes": arguments.nodes, "runs": arguments.runs}
    for name, seconds in median.items():
        end = "" if name == "busy" else f"_{name}"
        result |= {f"{way}{end}_s": round(value, 4) for way, value in seconds.items()}
        result[f"ratio_to_ipyparallel{end}"] = round(seconds["ours"] / seconds["ipyparallel"], 3)
    print(json.dumps(result | {f"{way}_cells_lost": number for way, number in lost.items()}))


if __name__ == "__main__":
    main()
