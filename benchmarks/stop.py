"""Time from Stop to the moment when every node is idle again.

A cell counts in a loop on all nodes; SIGINT goes to the process as a notebook's Stop button sends it. Ours through
``%%on_all``, ipyparallel through ``%%px``, in turns.
"""

import argparse
import contextlib
import io
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell

from benchmarks.common import private_folders

LOOP = "import time, pathlib, os\npathlib.Path({folder!r}, str(os.getpid())).touch()\nwhile True: sum(range(1000))"
PATIENCE = 60.0


def press_stop_when_all_run(folder: Path, nodes: int, pressed: list[float]) -> threading.Thread:
    """A thread that sends this process SIGINT once ``nodes`` nodes have said in ``folder`` that they loop."""

    def wait_and_press() -> None:
        deadline = time.monotonic() + PATIENCE
        while len(list(folder.iterdir())) < nodes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(list(folder.iterdir()))} of {nodes} nodes run the loop")
            time.sleep(0.005)
        time.sleep(0.2)  # into the loop itself
        pressed.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait_and_press, daemon=True)
    thread.start()
    return thread


def one_stop(shell: InteractiveShell, magic: str, nodes: int, folder: Path, is_idle: Callable[[], bool]) -> float:
    """Seconds from SIGINT until ``is_idle()``."""
    for path in folder.iterdir():
        path.unlink()
    pressed: list[float] = []
    thread = press_stop_when_all_run(folder, nodes, pressed)
    # The error that ends the cell is what Stop is for; it is printed into nothing.
    shell.run_cell(f"{magic}\n{LOOP.format(folder=str(folder))}")
    while not is_idle():
        if time.perf_counter() - pressed[0] > PATIENCE:
            raise TimeoutError(f"{magic} is still busy {PATIENCE:g} s after Stop")
        time.sleep(0.002)
    seconds = time.perf_counter() - pressed[0]
    thread.join(1)
    return seconds


def measure(nodes: int, runs: int) -> dict[str, float]:
    """Median seconds of both."""
    from benchmarks.common import new_shell, run_cell

    samples: dict[str, list[float]] = {"ours": [], "ipyparallel": []}
    with private_folders() as folder, contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        from ipyparallel import Cluster as Engines

        from notebook_cluster.client import Cluster

        marks = folder / "marks"
        marks.mkdir()
        shell = new_shell()
        run_cell(shell, "%load_ext notebook_cluster")
        run_cell(shell, f"%cluster start benchmark --local {nodes} --no-panel")
        stack.callback(run_cell, shell, "%cluster stop")
        view = stack.enter_context(Cluster.attach("benchmark", live=False))

        engines = Engines(n=nodes, log_level=40)
        engines.start_cluster_sync()
        stack.callback(engines.stop_cluster_sync)
        client = engines.connect_client_sync()
        stack.callback(client.close)
        client.wait_for_engines(nodes, timeout=PATIENCE, interactive=False)
        client[:].activate()

        def ours_idle() -> bool:
            cell = view.state().cell
            return cell is not None and cell.ended is not None

        def engines_idle() -> bool:
            status = client.queue_status()
            return all(row["queue"] == 0 and row["tasks"] == 0 for key, row in status.items() if isinstance(key, int))

        for _ in range(runs):
            samples["ours"].append(one_stop(shell, "%%on_all --no-replay", nodes, marks, ours_idle))
            samples["ipyparallel"].append(one_stop(shell, "%%px --block", nodes, marks, engines_idle))
    return {way: statistics.median(values) for way, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stop", description="time from Stop to all nodes idle")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    median = measure(arguments.nodes, arguments.runs)
    result = {"benchmark": "stop", "nodes": arguments.nodes, "runs": arguments.runs}
    result |= {f"{way}_s": round(seconds, 4) for way, seconds in median.items()}
    result["ratio_to_ipyparallel"] = round(median["ours"] / median["ipyparallel"], 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
