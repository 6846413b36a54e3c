"""``make demo-slurm``: run 02_text.ipynb with nobody watching, on three nodes that a Slurm of the demo's own starts.

A controller and three ``slurmd`` are started as processes of whoever calls this (``tests/engines/slurm.sh``); no other
Slurm is asked or disturbed. Written to ``demo_output/`` (or ``--output DIR``): the notebook with its outputs, the same
as HTML with what came out on top, and ``summary.json`` with the keys of ``make demo`` where they mean something here,
and ``test_loss`` (nats per character, the worst of the nodes; guessing: 4.56).

Exit code 1, with the reason, when Slurm's programs are missing, when a node was missing or disagreed about a round,
when the model did not learn, or when a job or a process was left behind. ``--check`` only looks for the programs.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from demo import conclude, private_jupyter, run_notebook, say, spent, traffic_of

NOTEBOOK = Path(__file__).with_name("02_text.ipynb")
SCRIPT = Path(__file__).parents[1] / "tests" / "engines" / "slurm.sh"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
CLUSTER = "text"
NODES = ("n1", "n2", "n3")
MOST_LOSS = 2.4
START = "%cluster start text --nodes 4 --peers all"
"""As the notebook has it."""
LAST_CELL = "sample"
"""The next one stops the cluster."""
PATIENCE = 30.0
"""Seconds for Slurm to have ended what was given back."""


def missing() -> str:
    """Why there can be no Slurm here, with the way out; empty when there can."""
    if not SCRIPT.exists():
        return f"it needs {SCRIPT}: run it in a checkout of the repository"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if not absent:
        return ""
    root = "" if os.geteuid() == 0 else ", as root,"
    return f"it needs Slurm ({', '.join(absent)} not found): `make engines`{root} installs it on Debian and Ubuntu"


@contextmanager
def private_slurm():
    """A controller and its nodes as long as the block runs, which this process's environment means; its folder.

    Raises:
        RuntimeError: it does not start.
    """
    folder = Path(tempfile.mkdtemp(prefix="nbc-slurm-", dir="/tmp"))
    started = subprocess.run(
        [SCRIPT, "start", folder, str(len(NODES))], capture_output=True, text=True, timeout=120, check=False
    )
    if started.returncode:
        raise RuntimeError(f"Slurm did not start: {started.stderr.strip()[-500:]}")
    try:
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        yield folder
    finally:
        subprocess.run([SCRIPT, "stop", folder], capture_output=True, timeout=120, check=False)
        os.environ.pop("SLURM_CONF", None)


def jobs() -> list[str]:
    """What Slurm still has to do, one line each."""
    asked = subprocess.run(["squeue", "-h", "-o", "%i %j %T"], capture_output=True, text=True, timeout=30, check=False)
    return asked.stdout.splitlines() if asked.returncode == 0 else [f"squeue failed: {asked.stderr.strip()}"]


def wait_for_no_jobs() -> list[str]:
    """Those that are left after :data:`PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while (left := jobs()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def processes_of(folder: Path) -> list[str]:
    """Processes that belong to the Slurm in ``folder``, or that it has started."""
    mark, found = f"SLURM_CONF={folder}/slurm.conf".encode(), []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (place / "environ").read_bytes().split(b"\0"):
                found.append(f"{place.name} {(place / 'comm').read_text().strip()}")
        except OSError:
            continue  # it has ended, or is somebody else's
    return found


def summary_of(state, series) -> dict:
    """The numbers of ``summary.json`` from a ClusterView and its curves."""
    job = next((job for job in state.jobs if job.name == "text"), None)
    losses = [one.value[-1] for one in series if one.node and one.name == "test_loss" and one.value]
    hosts = {launch.name.split()[0]: launch.joined for launch in state.launches}
    return {
        "nodes": len(state.nodes),
        "peers": sorted(node.peer for node in state.nodes),
        "found_by": "+".join(sorted(hosts)) or "nothing",
        "rounds": job.round if job else 0,
        "hash_mismatches": sum(one.hash_mismatches for one in state.jobs),
        "test_loss": round(max(losses), 4) if losses else None,
        **traffic_of(job, len(state.nodes)),
    }


def complaints(summary: dict) -> list[str]:
    """What in ``summary`` is not as it should be, one line each."""
    found = []
    if summary["peers"] != list(NODES):
        found.append(f"nodes on {summary['peers']}, wanted {list(NODES)}")
    if summary["hash_mismatches"] or not summary["rounds"]:
        found.append(f"{summary['rounds']} rounds, {summary['hash_mismatches']} of them with unequal hashes")
    if summary["test_loss"] is None or summary["test_loss"] > MOST_LOSS:
        found.append(f"test loss {summary['test_loss']} is above {MOST_LOSS}")
    return found


def run(output: Path, epochs: int) -> tuple[dict, list[str]]:
    """(summary, what was left behind) of the notebook on a Slurm that is gone afterwards."""
    start = f"%cluster start {CLUSTER} --on slurm --hosts {len(NODES)}"
    with private_slurm() as slurm:
        say(f"  a controller and {', '.join(NODES)} run")
        say(f"running {NOTEBOOK.name} with {start}")
        summary = run_notebook(
            NOTEBOOK, {START: start, "epochs=2": f"epochs={epochs}"}, output,
            cluster=CLUSTER, last=LAST_CELL, training="sync.step(", summarise=summary_of,
        )  # fmt: skip
        left = [f"job {job} was left in the queue" for job in wait_for_no_jobs()]
    return summary, left + [f"process {process} was left" for process in processes_of(slurm)]


def main() -> int:
    arguments = argparse.ArgumentParser(description="run 02_text.ipynb on three nodes of a Slurm of its own")
    arguments.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for the results")
    arguments.add_argument("--epochs", type=int, default=2, help="times that the text is read; fewer are faster")
    arguments.add_argument("--check", action="store_true", help="only look whether Slurm's programs are there")
    given = arguments.parse_args()
    if given.epochs < 1:
        arguments.error(f"--epochs {given.epochs}: use 1 or more")
    if obstacle := missing():
        print(f"demo failed: {obstacle}", file=sys.stderr)
        return 1
    if given.check:
        return 0
    output = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    (output / "summary.json").unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # The hosts run what is installed here, whatever else is.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    started = time.monotonic()
    # A short path: sockets of the kernels live below it.
    with tempfile.TemporaryDirectory(prefix="nbc-demo-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        private_jupyter(Path(scratch))
        try:
            say("starting a Slurm of this demo's own")
            summary, problems = run(output, given.epochs)
        except Exception as error:  # whatever it was: people get one line, the notebook holds the rest
            say(f"demo failed: {str(error).strip() or type(error).__name__}")
            return 1
    problems += complaints(summary) if summary else []
    done = f"nothing is left in the queue; done in {spent(started)}"
    return conclude(summary, problems, output / NOTEBOOK.with_suffix(".html").name, done)


if __name__ == "__main__":
    sys.exit(main())
