"""Starts, asks and ends the process of a tracker. Nothing of the library is imported here."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from notebook_cluster.client import ClusterError
from notebook_cluster.tracking.remembered import (
    TITLES,
    TRACKERS,
    Remembered,
    is_tracked,
    log_path,
    read_remembered,
)

CONNECT = 60.0
"""Seconds that somebody waits to hear that logging has begun."""
LET_FINISH = 15.0
"""Seconds in which a tracker that is told to stop logs the rest."""
_PROJECT_VARIABLES = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""MLflow's own are seven tries of two minutes; the points wait in the journal, and we try again."""


def start_tracking(folder: Path, cluster: str, started: float, tracker: str, project: str = "") -> str:
    """Log the run in ``folder`` from now on, and what was measured before; returns a line for people when logging has
    begun, or when it takes long.

    Raises:
        ClusterError: the library is not installed, does not let us in, or this run is tracked already with another
            project; one line with the way out.
    """
    _check_installed(tracker)
    project = project or os.environ.get(_PROJECT_VARIABLES.get(tracker, ""), "") or cluster
    if is_tracked(folder, tracker):
        there = _read(folder, tracker)
        if there.project != project:
            raise ClusterError(
                f"{TITLES[tracker]} logs this run to project {there.project!r} already: %cluster track off first"
            )
        return f"goes on: {describe(folder, tracker)}"
    process = _launch(folder, cluster, started, tracker, project)
    deadline = time.monotonic() + CONNECT
    while time.monotonic() < deadline:
        there = _read(folder, tracker)
        if there.pid == process.pid and there.condition == "failed":
            raise ClusterError(there.text)
        if there.pid == process.pid and there.condition != "connecting":
            return describe(folder, tracker)
        if process.poll() is not None:
            raise ClusterError(f"{TITLES[tracker]} could not be started: see {log_path(folder, tracker)}")
        time.sleep(0.05)
    return f"{TITLES[tracker]} has not answered yet; it is tried on: %cluster track says how it is"


def stop_tracking(folder: Path, tracker: str) -> str:
    """Have the tracker log the rest and end; a line for people. ClusterError: it does not track this run."""
    if not is_tracked(folder, tracker):
        raise ClusterError(f"{TITLES[tracker]} does not log this run")
    pid = _read(folder, tracker).pid
    deadline = time.monotonic() + LET_FINISH
    _signal(pid, signal.SIGTERM)
    while is_tracked(folder, tracker):
        if time.monotonic() > deadline:
            _signal(pid, signal.SIGKILL)
            return f"{TITLES[tracker]}: ended before all was logged; %cluster track {tracker} logs the rest"
        time.sleep(0.05)
    return describe(folder, tracker)


def trackers_of(folder: Path) -> list[str]:
    """Names of the trackers that log this run now."""
    return [tracker for tracker in TRACKERS if is_tracked(folder, tracker)]


def describe(folder: Path, tracker: str) -> str:
    """How it is with ``tracker`` and this run, in a line; empty when it has never logged it."""
    there = _read(folder, tracker)
    if not there.pid:
        return ""
    target, tracked = there.current, is_tracked(folder, tracker)
    count = target.points + (there.waiting if tracked else 0)
    where = f"project {there.project!r}, {target.address}" if tracker != "tensorboard" else target.address
    known = f"{TITLES[tracker]}: {count:,} point{'' if count == 1 else 's'} logged ({where})"
    if not tracked:
        if there.condition == "failed":
            return f"{TITLES[tracker]}: stopped after {count:,} points: {there.text}"
        if there.condition != "ended":
            return f"{known}; its process is gone: %cluster track {tracker} goes on where it was"
        return f"{known}; not logging now"
    if there.condition == "retrying":
        return f"{TITLES[tracker]}: {count:,} points logged so far, then: {there.text}"
    return f"{known}, and what comes, until the cluster ends"


def trouble(folder: Path, tracker: str) -> str:
    """What goes wrong with it now; empty while it does not."""
    there = read_remembered(folder, tracker)
    return there.text if there is not None and there.condition in ("retrying", "failed") else ""


def _check_installed(tracker: str) -> None:
    found = importlib.util.find_spec(tracker)
    if found is None or found.origin is None:  # a folder called wandb in the working directory is no library
        raise ClusterError(f"{TITLES[tracker]} is not installed here: pip install {tracker}")


def _launch(folder: Path, cluster: str, started: float, tracker: str, project: str) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable, "-m", "notebook_cluster.tracking", "--folder", str(folder), "--cluster", cluster,
        "--started", repr(started), "--tracker", tracker, f"--project={project}",
    ]  # fmt: skip
    try:
        handle = os.open(log_path(folder, tracker), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise ClusterError(f"{log_path(folder, tracker)} cannot be written: {error.strerror}") from None
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=handle, stderr=handle, start_new_session=True,
            env=_PATIENCE | os.environ,
        )  # fmt: skip
    finally:
        os.close(handle)
    threading.Thread(target=process.wait, name="tracker", daemon=True).start()
    return process


def _read(folder: Path, tracker: str) -> Remembered:
    try:
        return read_remembered(folder, tracker) or Remembered()
    except ValueError as error:
        raise ClusterError(str(error)) from None


def _signal(pid: int, number: int) -> None:
    try:
        if pid > 0:
            os.kill(pid, number)
    except ProcessLookupError:
        pass
