"""A notebook's kernel, driven as a frontend drives it: what both benchmarks type their cells into."""

import contextlib
import subprocess
import time
from collections.abc import Iterator

from jupyter_client.manager import KernelManager

TIMEOUT = 120.0


class Notebook:
    """A kernel with a frontend that reads everything that it publishes."""

    def __init__(self) -> None:
        self.manager = KernelManager()
        self.manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT)

    @property
    def pid(self) -> int:
        """Process id of the kernel."""
        return int(self.manager.provisioner.process.pid)  # type: ignore[union-attr]

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
