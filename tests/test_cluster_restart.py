"""The end of a notebook's kernel: a restart stops nothing, a shutdown ends what nobody needs any more."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster, ClusterError
from tests.conftest import marked_processes, wait_until
from tests.notebook_kernel import NotebookKernel

COUNT = """%%on_all
import os, time
count = 0
while not os.path.exists('enough'):
    count += 1
    if count % 10 == 0:
        print('count', count, flush=True)
    time.sleep(0.01)
print('counted')
"""


@pytest.fixture
def notebook(work: Path) -> Iterator[NotebookKernel]:
    """A notebook kernel with a running cluster of two nodes; both are ended."""
    kernel = NotebookKernel(work)
    kernel.works("%load_ext notebook_cluster")
    kernel.works("%cluster start --local 2 --no-panel")
    yield kernel
    if kernel.manager.has_kernel:
        kernel.close()
    with contextlib.suppress(ClusterError), Cluster.attach("lesson", live=False) as cluster:
        cluster.stop()


def restart(notebook: NotebookKernel) -> None:
    """What a frontend's Restart does: SIGINT, then a shutdown request that says ``restart``."""
    notebook.manager.restart_kernel()
    notebook.client.wait_for_ready(timeout=60)


def test_restarting_the_notebook_kernel_does_not_stop_the_running_cell(work: Path, notebook: NotebookKernel) -> None:
    running = notebook.start(COUNT)
    notebook.until(running, "count 20\n")
    restart(notebook)
    assert "cluster 'lesson' is running: %cluster attach" in notebook.works("%load_ext notebook_cluster")
    again = notebook.start("%cluster start --no-panel")
    notebook.until(again, "count 10\n")
    notebook.until(again, f"count {10 * (again.shown.count('count') + 10)}\n")
    (work / "enough").touch()
    notebook.until(again, "counted")
    assert notebook.until(again).error is None


def test_a_cluster_with_nothing_running_survives_a_restart(notebook: NotebookKernel) -> None:
    notebook.works("%%on_all\nx = 5")
    restart(notebook)
    notebook.works("%load_ext notebook_cluster")
    told = notebook.run("%%on_all\nx")
    assert told.error is not None
    assert told.error.value == ("cluster 'lesson' is running, this notebook is not attached to it: %cluster attach")
    assert "attached to cluster 'lesson'" in notebook.works("%cluster start --no-panel")
    assert "[all 2 nodes]\nOut: 5" in notebook.works("%%on_all\nx")


def test_a_cluster_with_nothing_running_ends_with_its_notebook(
    notebook: NotebookKernel, no_processes_left: str
) -> None:
    notebook.works("%%on_all\nx = 5")
    notebook.close()
    wait_until(lambda: not marked_processes(no_processes_left), 60, "every process to end")


def test_shutting_the_notebook_kernel_down_leaves_a_running_cell_alone(work: Path, notebook: NotebookKernel) -> None:
    notebook.until(notebook.start(COUNT), "count 20\n")
    notebook.close()
    with Cluster.attach("lesson") as cluster:
        state = cluster.state()
        assert state.cell is not None
        assert state.cell.status == "running"


def test_a_running_cell_ends_with_a_kernel_that_nobody_can_come_back_to(
    notebook: NotebookKernel, no_processes_left: str
) -> None:
    notebook.until(notebook.start(COUNT, allow_stdin=False), "count 20\n")
    notebook.close()
    wait_until(lambda: not marked_processes(no_processes_left), 60, "every process to end")


def test_a_pushed_variable_is_there_after_a_node_was_restarted(notebook: NotebookKernel) -> None:
    notebook.works("rate = 0.5")
    notebook.works("%push rate")
    notebook.works("%%on_all\nhalf = rate / 2")
    notebook.works("%cluster restart local-2")
    assert "[all 2 nodes]\n0.25" in notebook.works("%%on_all\nprint(half)")
