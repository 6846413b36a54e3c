"""One notebook with a cluster for all tests of a file: starting kernels takes most of a test's time."""

import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster
from tests.conftest import MARK, Agents, end_processes, marked_processes, wait_until
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
    """A notebook in which ``%cluster start`` with ``start`` was run; ``peers`` share themselves before."""
    root, mark = Path(tempfile.mkdtemp(prefix="nbt-", dir="/tmp")), uuid.uuid4().hex
    agents = Agents(root)
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
            folder = root / variable.split("_")[1].lower() if "_" in variable else root / "ipython"
            folder.mkdir(mode=0o700)
            patch.setenv(variable, str(folder))
        patch.setenv(MARK, mark)
        notebook = None
        try:
            agents(*peers, options=options)
            notebook = SharedNotebook(root, agents)
            notebook.works("%load_ext notebook_cluster")
            notebook.works(f"%cluster start {start} --no-panel")
            yield notebook
        finally:
            if notebook is not None:
                try:
                    notebook.kernel.run("%cluster stop")
                finally:
                    notebook.kernel.close()
            agents.close()
            try:
                wait_until(lambda: not marked_processes(mark), 15, lambda: f"the end of {marked_processes(mark)}")
            finally:
                end_processes(marked_processes(mark))
                shutil.rmtree(root, ignore_errors=True)
