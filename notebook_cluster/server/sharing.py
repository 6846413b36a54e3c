"""Sharing this machine from the browser: a ``notebook-cluster share`` of its own session, which outlives the server."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import segno

from notebook_cluster.agent import SharedMachine, shared_machines
from notebook_cluster.client import ClusterError
from notebook_cluster.protocol.sidebar import Sharing
from notebook_cluster.security import runtime_directory

START_SECONDS = 20.0
END_SECONDS = 15.0
_started: list["subprocess.Popen[bytes]"] = []
"""By this process, to be waited for when they end."""
_one_at_a_time = threading.Lock()


def sharing() -> Sharing:
    """How it is now, from the agents' own files; of several agents the first."""
    for process in [process for process in _started if process.poll() is not None]:
        with contextlib.suppress(ValueError):
            _started.remove(process)
    return _shown(shared_machines())


def _shown(machines: Sequence[SharedMachine]) -> Sharing:
    if not machines:
        return Sharing(on=False, name="", code="", command="", qr_svg_data_url="")
    machine, keys = machines[0], [machine.public_key for machine in machines]
    if not machine.code:
        command = f"%cluster add {machine.name}"
        return Sharing(on=True, name=machine.name, code="", command=command, qr_svg_data_url="", keys=keys)
    command = f"%cluster add {machine.host}:{machine.pairing_port} --code {machine.code}"
    return Sharing(
        on=True, name=machine.name, code=machine.code, command=command, qr_svg_data_url=_picture(command), keys=keys
    )


@lru_cache(maxsize=8)
def _picture(content: str) -> str:
    return segno.make(content, error="l", micro=False).svg_data_uri(scale=4, border=2, dark="#000", light="#fff")


def share_on() -> Sharing:
    """Share this machine unless it is shared. Codes are made up: one given here would be seen in the list of
    processes.

    Raises:
        ClusterError: it did not start; what it said.
    """
    with _one_at_a_time:
        now = sharing()
        return now if now.on else _start()


def _start() -> Sharing:
    log = runtime_directory() / "sharing.log"
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "notebook_cluster", "share", "--no-qr"],
            # The code is in what it prints: that is for nobody's log.
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True, cwd=Path.home(),
        )  # fmt: skip
    _started.append(process)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        machines = shared_machines()
        if any(machine.pid == process.pid for machine in machines):
            return _shown(machines)
        time.sleep(0.05)
    if process.poll() is None:
        process.terminate()
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
    raise ClusterError(f"this machine is not shared: {''.join(said) or 'the agent did not start'} (whole log: {log})")


def share_off() -> Sharing:
    """Share this machine no more: the agent that is shown ends, and every kernel that was started there.

    Raises:
        ClusterError: it goes on.
    """
    with _one_at_a_time:
        for machine in shared_machines()[:1]:
            os.kill(machine.pid, signal.SIGTERM)
            deadline = time.monotonic() + END_SECONDS
            while any(other.pid == machine.pid for other in shared_machines()):
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"the agent {machine.name!r} has not ended within {END_SECONDS:g} s: end process {machine.pid}"
                    )
                time.sleep(0.05)
        return sharing()
