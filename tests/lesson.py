"""A notebook kernel that is attached to a cluster of local nodes, for all tests of a file."""

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster, list_clusters
from tests.conftest import MARK, end_processes, marked_processes, wait_until
from tests.notebook_kernel import NotebookKernel


@contextmanager
def lesson(nodes: int = 2) -> Iterator[NotebookKernel]:
    """The kernel, in Jupyter folders of its own; kernel and cluster are ended at the end, and leave no process."""
    root, mark = Path(tempfile.mkdtemp(prefix="nbt-", dir="/tmp")), uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
            (root / variable.lower()).mkdir(mode=0o700)
            patch.setenv(variable, str(root / variable.lower()))
        patch.setenv(MARK, mark)
        kernel = NotebookKernel(root)
        try:
            kernel.works("%load_ext notebook_cluster")
            kernel.works(f"%cluster start --local {nodes} --no-panel")
            yield kernel
        finally:
            # Not with a magic: the kernel may be busy with what a failed test has left.
            for file in list_clusters():
                with Cluster.attach(file.cluster) as cluster:
                    cluster.stop()
            kernel.close()
            try:
                wait_until(lambda: not marked_processes(mark), 15, lambda: f"the end of {marked_processes(mark)}")
            finally:
                end_processes(marked_processes(mark))
                shutil.rmtree(root, ignore_errors=True)


def error_of(notebook: NotebookKernel, code: str) -> str:
    """What a cell that must fail ends with."""
    cell = notebook.run(code)
    assert cell.error is not None, cell.shown
    return str(cell.error.value)
