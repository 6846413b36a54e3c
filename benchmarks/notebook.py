"""A notebook's kernel, driven as a frontend drives it: what benchmarks type their cells into."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.common import TIMEOUT, ipyparallel_engines, kernel_manager

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster


class Notebook:
    """A kernel with a frontend that reads everything that it publishes."""

    def __init__(self) -> None:
        self.manager = kernel_manager()
        self.manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT)

    @property
    def pid(self) -> int:
        """Process id of the kernel."""
        return int(self.manager.provisioner.process.pid)

    def start(self, cell: str) -> str:
        """Send ``cell``; returns what :meth:`finish` wants."""
        return self.client.execute(cell)

    def finish(self, request: str) -> str:
        """Wait until the kernel has run it and is idle; returns how it ended: ``ok``, or the error in one line."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
            of_this_cell = message["parent_header"].get("msg_id") == request
            if of_this_cell and message["content"].get("execution_state") == "idle":
                break
        while True:
            reply = self.client.get_shell_msg(timeout=TIMEOUT)
            if reply["parent_header"].get("msg_id") == request:
                content = reply["content"]
                return "ok" if content["status"] == "ok" else f"{content['ename']}: {content['evalue']}"

    def run(self, cell: str) -> None:
        """Run ``cell``, which must work."""
        ended = self.finish(self.start(cell))
        if ended != "ok":
            raise RuntimeError(f"{cell!r} failed: {ended}")

    def press_stop(self) -> None:
        """What a Jupyter server does when Stop is pressed: its process sends the kernel SIGINT."""
        self.manager.interrupt_kernel()

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@contextlib.contextmanager
def notebook() -> Iterator[Notebook]:
    """A kernel that is ended."""
    opened = Notebook()
    try:
        yield opened
    finally:
        opened.close()


@contextlib.contextmanager
def notebook_with_cluster(nodes: int) -> Iterator[tuple[Notebook, "Cluster"]]:
    """A notebook with a cluster of ``nodes`` local nodes, and a view of it."""
    from notebook_cluster.client import Cluster

    with notebook() as opened:
        opened.run("%load_ext notebook_cluster")
        opened.run(f"%cluster start benchmark --local {nodes} --no-panel")
        with Cluster.attach("benchmark", live=False) as view:
            try:
                yield opened, view
            finally:
                view.stop()


@contextlib.contextmanager
def notebook_with_engines(nodes: int) -> Iterator[tuple[Notebook, Any, Any]]:
    """A notebook with ``nodes`` local engines of ipyparallel, their cluster, and a client of it."""
    with ipyparallel_engines(nodes) as (engines, client), notebook() as opened:
        opened.run(
            f"import ipyparallel\nengines = ipyparallel.Cluster.from_file({engines.cluster_file!r})\n"
            f"client = engines.connect_client_sync()\n"
            f"client.wait_for_engines({nodes}, timeout=60, interactive=False)\nclient[:].activate()"
        )
        yield opened, engines, client
