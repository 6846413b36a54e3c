"""The three ways to run ``1+1`` on N kernels, and what both benchmarks need around them."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

SOURCE = "1+1"
MARK = "NOTEBOOK_CLUSTER_BENCHMARK"
TIMEOUT = 120.0


def last_answer(text: str) -> list[Any]:
    """What the last line of JSON in ``text`` says, in a list; empty: there is none. Libraries print around it: torch's
    gloo says from a thread of its own who is connected."""
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            return [json.loads(line)]
    return []


Runner = Callable[[], None]
"""Runs SOURCE on every node and returns when all have answered."""


@contextlib.contextmanager
def private_folders() -> Iterator[Path]:
    """Jupyter's and IPython's folders in a temporary one with a short path; ends every process that is left."""
    with tempfile.TemporaryDirectory(prefix="nbb-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ[MARK] = folder
        for variable in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
            path = Path(folder, variable.lower())
            path.mkdir(mode=0o700)
            os.environ[variable] = str(path)
        try:
            yield Path(folder)
        finally:
            end_children(folder)


def end_children(folder: str) -> None:
    """Wait up to 10 s for the processes that were started with MARK = ``folder``, then end the rest by their ids."""
    deadline = time.monotonic() + 10
    while (left := _marked(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _marked(folder: str) -> list[int]:
    wanted = f"{MARK}={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if int(path.parent.name) != os.getpid() and wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def new_shell() -> InteractiveShell:
    """The shell of a notebook, without a terminal and without a history file."""
    return InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))


def run_cell(shell: InteractiveShell, source: str) -> None:
    """Run a cell as a notebook does and raise what it raised."""
    shell.run_cell(source).raise_error()


@contextlib.contextmanager
def ours(nodes: int) -> Iterator[Runner]:
    """``%cluster start`` and ``%%on_all``, as typed in a notebook."""
    shell = new_shell()
    run_cell(shell, "%load_ext notebook_cluster")
    run_cell(shell, f"%cluster start benchmark --local {nodes} --no-panel")
    try:
        yield lambda: run_cell(shell, f"%%on_all --no-replay\n{SOURCE}")
    finally:
        run_cell(shell, "%cluster stop")


@contextlib.contextmanager
def ipyparallel(nodes: int) -> Iterator[Runner]:
    """ipyparallel's cluster and ``%%px --block``, as typed in a notebook."""
    shell = new_shell()
    with ipyparallel_engines(nodes) as (_, client):
        client[:].activate()
        yield lambda: run_cell(shell, f"%%px --block\n{SOURCE}")


@contextlib.contextmanager
def ipyparallel_engines(nodes: int) -> Iterator[tuple[Any, Any]]:
    """A running cluster of ipyparallel, and a client of it that sees all engines."""
    from ipyparallel import Cluster

    cluster = Cluster(n=nodes, log_level=40)
    cluster.start_cluster_sync()
    client = cluster.connect_client_sync()
    try:
        client.wait_for_engines(nodes, timeout=TIMEOUT, interactive=False)
        yield cluster, client
    finally:
        client.close()
        cluster.stop_cluster_sync()


def kernel_manager() -> Any:
    """jupyter_client's manager, over TCP as by default, with ports that nobody takes before the kernel binds them."""
    from jupyter_client.manager import KernelManager

    from tests.ports import free_port

    names = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
    return KernelManager(cache_ports=False, **{name: free_port() for name in names})


@contextlib.contextmanager
def jupyter_client(nodes: int) -> Iterator[Runner]:
    """Kernels and nothing around them: each started by jupyter_client's manager, each asked by its blocking client."""
    managers = [kernel_manager() for _ in range(nodes)]
    clients: list[Any] = []
    try:
        for manager in managers:
            manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for manager in managers:
            clients.append(manager.client())
            clients[-1].start_channels()
        for client in clients:
            client.wait_for_ready(timeout=TIMEOUT)
        yield lambda: execute_on_kernels(clients)
    finally:
        for client in clients:
            client.stop_channels()
        for manager in managers:
            manager.shutdown_kernel(now=True)


def execute_on_kernels(clients: list[Any]) -> None:
    """Send SOURCE to all kernels, then wait for each one's reply and for its idle status after all of its output."""
    sent = [client.execute(SOURCE) for client in clients]
    for client, message_id in zip(clients, sent, strict=True):
        while client.get_shell_msg(timeout=TIMEOUT)["parent_header"].get("msg_id") != message_id:
            pass
        while True:
            message = client.get_iopub_msg(timeout=TIMEOUT)
            of_this_cell = message["parent_header"].get("msg_id") == message_id
            if of_this_cell and message["content"].get("execution_state") == "idle":
                break


WAYS = {"ours": ours, "ipyparallel": ipyparallel, "jupyter_client": jupyter_client}
