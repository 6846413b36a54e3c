"""One notebook with a cluster for all tests of a file: starting kernels takes most of a test's time."""

import queue
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from notebook_cluster.client import Cluster
from tests.cluster import stop_all
from tests.conftest import Agents, shared_folders, wait_until
from tests.notebook_kernel import Cell, NotebookKernel

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class SharedNotebook:
    """``work``: the notebook's folder; ``folder_of("mini")``: the working folder of a peer's nodes."""

    def __init__(self, root: Path, agents: Agents) -> None:
        self.root, self.agents = root, agents
        self.work = root / "lesson"
        self.work.mkdir()
        self.kernel = NotebookKernel(self.work)

    def works(self, code: str) -> str:
        """Run a cell that must work; what it showed."""
        return self.kernel.works(code)

    def fails(self, code: str) -> str:
        """Run a cell that must fail; its error in one text."""
        cell = self.kernel.run(code)
        assert cell.error is not None, cell.shown
        return _COLOUR.sub("", f"{cell.error.name}: {cell.error.value}")

    def start(self, code: str) -> Cell:
        return self.kernel.start(code)

    def value(self, expression: str) -> str:
        """The repr of an expression in the notebook."""
        return self.works(f"print(repr(({expression})))").rstrip("\n")

    def folder_of(self, peer: str) -> Path:
        """Where the nodes of ``peer`` work (every agent here has one cluster)."""
        return next((self.root / "agents" / peer / "work").iterdir())

    def attach(self) -> Cluster:
        """Another view of the same cluster."""
        return Cluster.attach("lesson")


@contextmanager
def shared_notebook(start: str, *peers: str, options: tuple[str, ...] = ()) -> Iterator[SharedNotebook]:
    """A notebook in which ``%cluster start`` with ``start`` was run; ``peers`` share themselves before.

    Kernel, cluster and peers are ended at the end, and leave no process.
    """
    with shared_folders() as root:
        agents = Agents(root)
        notebook = None
        try:
            agents(*peers, options=options)
            notebook = SharedNotebook(root, agents)
            notebook.works("%load_ext notebook_cluster")
            notebook.works(f"%cluster start {start} --no-panel")
            yield notebook
        finally:
            stop_all()
            if notebook is not None:
                notebook.kernel.close()
            agents.close()


@contextmanager
def lesson(nodes: int = 2) -> Iterator[NotebookKernel]:
    """The kernel of a notebook with a cluster of local nodes."""
    with shared_notebook(f"--local {nodes}") as notebook:
        yield notebook.kernel


def error_of(notebook: NotebookKernel, code: str) -> str:
    """What a cell that must fail ends with."""
    cell = notebook.run(code)
    assert cell.error is not None, cell.shown
    return str(cell.error.value)


def listen(notebook: NotebookKernel, *cells: Cell, until: str) -> None:
    """Take what any of ``cells`` shows, also after its end, until the first of them shows ``until``."""

    def shown() -> bool:
        try:
            message = notebook.client.get_iopub_msg(timeout=0.1)
        except queue.Empty:
            return until in cells[0].shown
        for cell in cells:
            if message["parent_header"].get("msg_id") == cell.request:
                cell.take(message["msg_type"], message["content"])
        return until in cells[0].shown

    wait_until(shown, 60, lambda: f"{until!r} in {cells[0].shown}")
