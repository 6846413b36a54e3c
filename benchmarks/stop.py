"""Time from Stop to the moment when every node is idle again and the notebook's cell has ended.

Both ways are typed into the kernel of a notebook, which gets SIGINT from its parent as from a Jupyter server: ours is
``%%on_all``, the other ipyparallel's ``%%px --block``, in turns whose order is drawn anew each time. The nodes count in
a pure Python loop, or sleep.
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


class Way:
    """One way to run a cell on all nodes: the notebook, its magic, and how to see that no node runs anything."""

    def __init__(self, opened: Notebook, magic: str, all_idle: Callable[[], bool]) -> None:
        self.opened = opened
        self.magic = magic
        self.all_idle = all_idle


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.perf_counter() + PATIENCE
    while not condition():
        if time.perf_counter() > deadline:
            raise TimeoutError(f"waited {PATIENCE:g} s for {what}")
        time.sleep(0.001)


def one_stop(way: Way, body: str, nodes: int, folder: Path) -> float:
    """Seconds from Stop until the cell has ended and every node is idle."""
    for path in folder.iterdir():
        path.unlink()
    request = way.opened.start(f"{way.magic}\n{BEGIN.format(folder=str(folder))}{body}")
    wait_for(lambda: len(list(folder.iterdir())) == nodes, f"{nodes} nodes to run {body!r} with {way.magic}")
    time.sleep(0.2)  # into the loop itself
    pressed = time.perf_counter()
    way.opened.press_stop()
    way.opened.finish(request)
    wait_for(way.all_idle, f"every node to be idle after Stop with {way.magic}")
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


def measure(nodes: int, runs: int) -> dict[str, dict[str, float]]:
    """Median seconds by body, then by way; the first stop of each way is not counted."""
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
    return {name: {way: statistics.median(values) for way, values in each.items()} for name, each in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stop", description="time from Stop to all nodes idle")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--runs", type=int, default=30)
    arguments = parser.parse_args()
    median = measure(arguments.nodes, arguments.runs)
    result: dict[str, object] = {"benchmark": "stop", "nodes": arguments.nodes, "runs": arguments.runs}
    for name, seconds in median.items():
        end = "" if name == "busy" else f"_{name}"
        result |= {f"{way}{end}_s": round(value, 4) for way, value in seconds.items()}
        result[f"ratio_to_ipyparallel{end}"] = round(seconds["ours"] / seconds["ipyparallel"], 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
