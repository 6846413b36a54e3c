"""A notebook kernel that is attached to a cluster of local nodes, for all tests of a file about cells."""

import queue
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import MARK, end_processes, marked_processes, wait_until
from tests.notebook_kernel import Cell, NotebookKernel


@contextmanager
def cells_notebook(nodes: int = 2) -> Iterator[NotebookKernel]:
    """The kernel, in Jupyter folders of its own; it and its cluster are ended at the end, and nothing is left."""
    root, mark = Path(tempfile.mkdtemp(prefix="nbt-", dir="/tmp")), uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        for variable, folder in {"JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "run", "IPYTHONDIR": "ip"}.items():
            (root / folder).mkdir(mode=0o700)
            patch.setenv(variable, str(root / folder))
        patch.setenv(MARK, mark)
        kernel = NotebookKernel(root)
        try:
            kernel.works("%load_ext notebook_cluster")
            kernel.works(f"%cluster start --local {nodes} --no-panel")
            yield kernel
            kernel.run("%cluster stop")
        finally:
            kernel.close()
            try:
                wait_until(lambda: not marked_processes(mark), 15, lambda: f"the end of {marked_processes(mark)}")
            finally:
                end_processes(marked_processes(mark))
                shutil.rmtree(root, ignore_errors=True)


def error_of(notebook: NotebookKernel, code: str) -> str:
    """What a cell that must fail ends with."""
    error = notebook.run(code).error
    assert error is not None, code
    return str(error.value)


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

    wait_until(shown, 30, lambda: f"{until!r} in {cells[0].shown}")
