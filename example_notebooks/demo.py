"""``make demo``: run 01_quickstart.ipynb with nobody watching, on three nodes that find each other over mDNS.

Two agents, ``mini`` and ``desk``, are started on this machine as processes of their own; with the notebook's own node
that makes three. Written to ``demo_output/`` (or ``--output DIR``): the notebook with its outputs, the same as HTML
with what came out on top, and ``summary.json``, whose numbers come from the cluster's own state at the notebook's end:
test accuracies of the models that nodes shared, means over the runs (``alone``: of one node; ``together``: of all),
bytes of the first run of all per node (what DiLoCo sent, and what data-parallel training would have sent for the same
steps), and how long the bytes of all nodes take at 20 Mbit/s.

Exit code 1, with the reason, when a node was missing, was not found over mDNS, disagreed about a round, or when the
model did not learn.
"""

import argparse
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

NOTEBOOK = Path(__file__).with_name("01_quickstart.ipynb")
CLUSTER = "quickstart"
AGENTS = ("mini", "desk")
NODES = 3
LEAST_ACCURACY = 0.95
LEAST_GAIN = 0.05
"""By which all nodes together are to be better than one alone."""
LAST_CELL = "status"
"""After it the kernel ends, and the cluster with it: nobody is there who would go on."""
RESULTS = ("chart", "traffic", "train", "sample")
"""Cells whose outputs the page begins with, in whatever notebook they are."""
RUNS = "RUNS = 3"
"""As the notebook has it."""
WIFI = 20e6
"""Bits per second."""


def say(text: str) -> None:
    print(text, flush=True)


def private_jupyter(scratch: Path) -> None:
    """Jupyter's folders in ``scratch`` for this process and its children: peers and clusters that this user has
    running otherwise are neither used nor disturbed."""
    folders = {"JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime", "IPYTHONDIR": "ipython"}
    for variable, name in folders.items():
        (scratch / name).mkdir(mode=0o700)
        os.environ[variable] = str(scratch / name)


@contextmanager
def sharing(names: tuple[str, ...], scratch: Path):
    """Agents with these names, each with its own data folder, as long as the block runs."""
    command = str(Path(sys.executable).with_name("notebook-cluster"))
    processes = {}
    try:
        for name in names:
            with (scratch / f"{name}.txt").open("wb") as output:
                processes[name] = subprocess.Popen(
                    [command, "share", "--name", name, "--data-dir", str(scratch / f"agent-{name}")],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            say(f"  agent {name} is process {processes[name].pid}")
        yield processes
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for_peers(processes: dict[str, subprocess.Popen], scratch: Path, seconds: float = 30.0) -> None:
    """Return when all agents are visible over mDNS.

    Raises:
        RuntimeError: an agent ended, or was not seen in time.
    """
    from notebook_cluster.client import find_peers

    deadline = time.monotonic() + seconds
    missing = set(processes)
    while missing:
        for name, process in processes.items():
            if process.poll() is not None:
                printed = (scratch / f"{name}.txt").read_text(errors="replace").split("\n")
                last = next((line for line in reversed(printed) if line.strip()), "it printed nothing")
                raise RuntimeError(f"agent {name} ended with exit code {process.returncode}: {last}")
        if time.monotonic() > deadline:
            names = ", ".join(sorted(missing))
            raise RuntimeError(f"{names} not found over mDNS in {seconds:g} s: does a firewall block UDP port 5353?")
        for peer in find_peers(1.0):
            if peer.name in missing and peer.found_by == "mdns" and peer.trusted:
                missing.discard(peer.name)
                say(f"  found {peer.name} over mDNS at {peer.address}")


def accuracy_of(series, runs: str) -> float:
    """The mean over the runs whose names begin with ``runs``, each the last of its global model; 0: there are none."""
    last = [one.value[-1] for one in series if not one.node and one.name == "accuracy" and one.job.startswith(runs)]
    return sum(last) / len(last) if last else 0.0


def summary_of(state, series) -> dict:
    """The numbers of ``summary.json`` from a ClusterView and its curves."""
    job = next((job for job in state.jobs if job.name == "all-0"), None)
    alone, together = (round(accuracy_of(series, runs), 4) for runs in ("one-", "all-"))
    used = {node.peer for node in state.nodes}
    # On a network with other people their peers are listed too: what counts is how those of the nodes were found.
    found_by = {peer.found_by for peer in state.peers if peer.trusted and peer.name in used and peer.name in AGENTS}
    return {
        "nodes": len(state.nodes),
        "peers": sorted(used),
        "found_by": "+".join(sorted(found_by)) or "nothing",
        "rounds": job.round if job else 0,
        "hash_mismatches": sum(one.hash_mismatches for one in state.jobs),
        "test_accuracy": together,
        "single_node_accuracy": alone,
        "alone": alone,
        "together": together,
        **traffic_of(job, len(state.nodes)),
    }


def traffic_of(job, nodes: int) -> dict:
    """What went over the network for ``job``, a JobView or None, on so many nodes."""
    return {
        "bytes_sent_per_node": job.bytes_sent // nodes if job else 0,
        "bytes_data_parallel": job.bytes_data_parallel // nodes if job else 0,
        "seconds_on_20_mbit": round(8 * job.bytes_sent / WIFI, 1) if job else 0.0,
        "seconds_data_parallel": round(8 * job.bytes_data_parallel / WIFI, 1) if job else 0.0,
    }


def complaints(summary: dict) -> list[str]:
    """What in ``summary`` is not as it should be, one line each."""
    found = []
    if summary.get("nodes") != NODES or not set(AGENTS) <= set(summary["peers"]):
        found.append(f"{summary.get('nodes')} nodes on {summary.get('peers')}, wanted {NODES}, also on {AGENTS}")
    if summary.get("found_by") != "mdns":
        found.append(f"peers were found by {summary.get('found_by')!r}, not by mDNS")
    if summary.get("hash_mismatches") or not summary.get("rounds"):
        found.append(f"{summary.get('rounds')} rounds, {summary.get('hash_mismatches')} of them with unequal hashes")
    if summary.get("test_accuracy", 0) < LEAST_ACCURACY:
        found.append(f"test accuracy {summary.get('test_accuracy')} is below {LEAST_ACCURACY}")
    if summary.get("together", 0) < summary.get("alone", 0) + LEAST_GAIN:
        found.append(f"together {summary.get('together')}, one node alone {summary.get('alone')}")
    return found


class Progress:
    """One line for each cell of a notebook, and one every two seconds while a cell trains; keeps the summary of the
    state after the cell ``last``.

    Args:
        cluster: which the notebook starts.
        training: what stands in the cells that train.
        summarise: a ClusterView and its curves -> the summary.
    """

    def __init__(self, cells: int, cluster: str, last: str, training: str, summarise) -> None:
        self.cells = cells
        self.cluster = cluster
        self.last = last
        self.training = training
        self.summarise = summarise
        self.started = 0.0
        self.summary: dict = {}
        self._done = threading.Event()
        self._watcher: threading.Thread | None = None

    async def cell_starts(self, cell, cell_index: int) -> None:
        if cell.cell_type != "code":
            return
        self.started = time.monotonic()
        lines = cell.source.splitlines()
        title = " ".join(lines[:2]) if lines[0].startswith("%%") else next(iter(lines), "")
        say(f"  [{cell_index + 1}/{self.cells}] {title[:90]}")
        if self.training in cell.source and not cell.source.startswith("%%on_all --async"):
            self._done.clear()
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()

    def cell_completes(self, cell, cell_index: int) -> None:
        if cell.cell_type != "code":
            return
        self.close()
        for line in printed_lines(cell):
            say(f"      {line}")
        say(f"      {time.monotonic() - self.started:.1f} s")
        if cell.get("id") == self.last:
            self.read_summary()

    def close(self) -> None:
        self._done.set()
        if self._watcher is not None:
            self._watcher.join(10)
            self._watcher = None

    def _watch(self) -> None:
        """Ask the coordinator, as any other view could, how far the nodes are."""
        from notebook_cluster.client import Cluster, ClusterError

        with suppress(ClusterError), Cluster.attach(self.cluster, kind="cli") as cluster:
            while not self._done.wait(3.0):
                state = cluster.state()
                losses = ", ".join(
                    f"{node.name} step {node.step or 0} loss {node.loss:.3f}"
                    for node in state.nodes
                    if node.loss is not None
                )
                job = max((job for job in state.jobs if job.cell), key=lambda job: job.cell, default=None)
                begun = f"{job.name} round {job.round}" if job else "no round yet"
                say(f"      {begun}: {losses or 'no step yet'}")

    def read_summary(self) -> None:
        """While the cluster is there."""
        from notebook_cluster.client import Cluster, ClusterError

        with suppress(ClusterError), Cluster.attach(self.cluster, kind="cli") as cluster:
            self.summary = self.summarise(cluster.state(), cluster.series())


def printed_lines(cell) -> list[str]:
    """The plain text of a cell's outputs, at most 12 lines."""
    texts = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
        if output.output_type != "error"
    ]
    lines = [line.rstrip() for text in texts for line in text.splitlines() if line.strip()]
    return lines if len(lines) <= 12 else [*lines[:11], f"... {len(lines) - 11} more lines in the notebook"]


def with_result_first(notebook):
    """A copy of ``notebook`` that begins with what came out: what the cells :data:`RESULTS` show and print."""
    import nbformat

    page = copy.deepcopy(notebook)
    shown = [cell for cell in page.cells if cell.get("id") in RESULTS and cell.outputs]
    first = [nbformat.v4.new_markdown_cell("# What came out")]
    for cell in shown:
        outputs = sorted(cell.outputs, key=lambda output: "data" not in output)  # the picture before the text
        first.append(nbformat.v4.new_code_cell("", outputs=outputs, metadata={"tags": ["result"]}))
    page.cells = [*(first if shown else []), *page.cells]
    return page


def run_notebook(source: Path, changes: dict[str, str], output: Path, **progress_of) -> dict:
    """Execute the notebook ``source``, with ``changes`` of its words, and write it to ``output`` as it then is, also
    when a cell failed; returns the summary. ``progress_of``: see :class:`Progress`.

    Raises:
        RuntimeError: a cell raised; one line with what.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    text = source.read_text(encoding="utf-8")
    for before, after in changes.items():
        text = text.replace(before, after)
    notebook = nbformat.reads(text, as_version=4)
    progress = Progress(len(notebook.cells), **progress_of)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(output)}},
        config=Config({"KernelManager": {"transport": "ipc", "ip": os.environ["JUPYTER_RUNTIME_DIR"] + "/notebook"}}),
        on_cell_start=progress.cell_starts,
        on_cell_executed=lambda cell, cell_index, execute_reply: progress.cell_completes(cell, cell_index),
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise RuntimeError(f"{error.ename}: {error.evalue} (see {output / source.name})") from None
    finally:
        progress.close()
        stop_clusters()
        nbformat.write(notebook, output / source.name)
        hidden = Config({"TagRemovePreprocessor": {"enabled": True, "remove_input_tags": ["result"]}})
        exporter = HTMLExporter(template_name="lab", config=hidden)
        page, _ = exporter.from_notebook_node(with_result_first(notebook))
        (output / source.with_suffix(".html").name).write_text(page, encoding="utf-8")
    return progress.summary


def stop_clusters() -> None:
    """End what a failed notebook has left running (in the private folders: nobody else's)."""
    from notebook_cluster.client import Cluster, ClusterError, list_clusters

    for connection in list_clusters():
        with suppress(ClusterError):
            Cluster.attach(connection.cluster, kind="cli").stop()


def spent(started: float) -> str:
    """``41 s``, since ``started`` (monotonic)."""
    return f"{time.monotonic() - started:.0f} s"


def conclude(summary: dict, problems: list[str], page: Path, done: str) -> int:
    """Write ``summary.json`` beside the ``page`` of the notebook and say how it went; the exit code. An empty summary:
    the notebook did not reach its last cell."""
    (page.parent / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    say(json.dumps(summary))
    problems = problems if summary else [*problems, "the notebook did not reach its last cell"]
    for problem in problems:
        say(f"demo failed: {problem}")
    if not problems:
        say(f"{done}: see {Path(os.path.relpath(page))}")
    return 1 if problems else 0


def main() -> int:
    arguments = argparse.ArgumentParser(description="run 01_quickstart.ipynb on three nodes found over mDNS")
    arguments.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for the results")
    arguments.add_argument("--runs", type=int, default=3, help="trainings of each kind; fewer are faster")
    given = arguments.parse_args()
    if given.runs < 1:
        arguments.error(f"--runs {given.runs}: use 1 or more")
    output = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    (output / "summary.json").unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    # A short path: sockets of the kernels live below it.
    with tempfile.TemporaryDirectory(prefix="nbc-demo-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        private_jupyter(scratch)
        try:
            say(f"starting two more agents on this machine: {', '.join(AGENTS)}")
            with sharing(AGENTS, scratch) as processes:
                wait_for_peers(processes, scratch)
                say(f"running {NOTEBOOK.name}")
                summary = run_notebook(
                    NOTEBOOK, {RUNS: f"RUNS = {given.runs}"}, output,
                    cluster=CLUSTER, last=LAST_CELL, training="train_model(", summarise=summary_of,
                )  # fmt: skip
        except Exception as error:  # whatever it was: people get one line, the notebook holds the rest
            say(f"demo failed: {str(error).strip() or type(error).__name__}")
            return 1
    problems = complaints(summary) if summary else []
    return conclude(summary, problems, output / NOTEBOOK.with_suffix(".html").name, f"done in {spent(started)}")


if __name__ == "__main__":
    sys.exit(main())
