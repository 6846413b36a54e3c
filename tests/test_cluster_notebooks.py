"""Real notebooks on a real cluster: a killed notebook kernel, nbclient, papermill, and what people mistype."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
from nbclient.exceptions import CellExecutionError

from notebook_cluster.client import list_clusters
from tests.conftest import marked_processes, wait_until
from tests.ipc_kernels import kernel_config, run_notebook
from tests.notebook_kernel import NotebookKernel

pytestmark = pytest.mark.usefixtures("work")


@pytest.fixture
def notebook(work: Path) -> Iterator[NotebookKernel]:
    kernel = NotebookKernel(work)
    yield kernel
    kernel.close()


TRAIN = """
import os, time, torch
torch.set_num_threads(1)
model = torch.nn.Linear(100, 10)
sync = nc.DiLoCo(model, every=5)
steps = 0
while {condition}:
    loss = model(torch.randn(8, 100)).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():  # by hand: to import torch.optim takes as long as torch itself
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter -= 0.01 * gradient
    steps += 1
    done = sync.step(loss, samples=8)
    if done:
        print("round", done.round, flush=True)
        time.sleep(0.02)
sync.finish()
print("trained", sync.round)
"""
COUNT = """
for number in range(1, 5):
    nc.barrier()
    print("round", number, flush=True)
    nc.report(step=number, loss=1 / number)
print("trained", number)
"""
"""Prints the same as TRAIN with 20 steps, without a model: to import torch takes most of the time."""


def test_a_killed_notebook_kernel_is_replaced_and_start_shows_the_run_going_on(work: Path) -> None:
    first = NotebookKernel(work)
    first.works("%load_ext notebook_cluster")
    assert "2 nodes (local, local-2)" in first.works("%cluster start lesson --local 2")
    condition = "not os.path.exists('enough')"
    running = first.start("%%on_all\n" + TRAIN.format(condition=condition))
    first.until(running, "round 3\n")
    first.kill()

    second = NotebookKernel(work)
    try:
        assert "cluster 'lesson' is running: %cluster attach" in second.works("%load_ext notebook_cluster")
        again = second.start("%cluster start lesson --local 2")
        second.until(again, "round 1\n")
        assert "attached to cluster 'lesson', which runs already: 2 nodes (local, local-2)" in again.shown
        shown = [int(line.split()[-1]) for line in again.shown.splitlines() if "round " in line and line[-1].isdigit()]
        second.until(again, f"round {max(shown) + 5}\n")
        (work / "enough").touch()
        second.until(again, "trained ")
        assert second.until(again).error is None

        assert "cluster lesson · " in (status := second.works("%cluster status"))
        assert "local-2" in status
        assert "local" in second.works("%cluster peers")
        second.works("%%on local-2\nimport os; os.system('echo to the terminal >&2')")
        assert "to the terminal" in second.works("%cluster logs local-2")
        assert "cluster 'lesson' has ended" in second.works("%cluster stop")
        assert list_clusters() == []
    finally:
        second.close()


@pytest.mark.parametrize(
    ("line", "name", "words"),
    [
        ("%%on_all\n1", "UsageError", ["no cluster is running", "%cluster start"]),
        ("%cluster statr", "UsageError", ["statr", "did you mean", "status"]),
        ("%cluster start --lokal 2", "UsageError", ["--lokal", "did you mean", "--local"]),
        ("%cluster start x --local many", "UsageError", ["many", "whole number from 0 to 64"]),
        ("%cluster start ../x", "UsageError", ["'../x' is not usable"]),
        ("%cluster start x --peers nowhere", "ClusterError", ["nowhere"]),
        ("%cluster stop nothing", "ClusterError", ["no cluster 'nothing' runs"]),
    ],
)
def test_a_mistyped_magic_is_one_line_that_names_the_way_out(
    notebook: NotebookKernel, line: str, name: str, words: list[str]
) -> None:
    notebook.works("%load_ext notebook_cluster")
    cell = notebook.run(line)
    assert cell.error is not None
    assert cell.error.name == name
    assert "\n" not in cell.error.value
    for word in words:
        assert word in cell.error.value
    assert "Traceback" not in cell.shown
    assert list_clusters() == []


def test_an_import_is_enough_for_the_magics_until_they_are_unloaded(notebook: NotebookKernel) -> None:
    def refused(line: str) -> str:
        cell = notebook.run(line)
        assert cell.error is not None
        return cell.error.value

    assert "`%cluster` not found" in refused("%cluster status")
    notebook.works("import notebook_cluster as nc")
    assert "no cluster is running in this notebook: %cluster start" in refused("%%on_all\nprint(rank)")
    notebook.works("%cluster start lesson --local 1 --no-panel")
    notebook.works("%cluster stop")
    notebook.works("%unload_ext notebook_cluster")
    assert "`%cluster` not found" in refused("%cluster status")


def test_mistakes_with_a_running_cluster_are_one_line_and_it_goes_on(notebook: NotebookKernel) -> None:
    notebook.works("%load_ext notebook_cluster")
    notebook.works("%cluster start lesson --local 2 --no-panel")
    for line, words in (
        ("%%on nobody\n1", ["nobody", "0 local, 1 local-2"]),
        ("%%on 7\n1", ["7"]),
        ("%%on_all --tiemout 3\n1", ["--tiemout", "did you mean", "--timeout"]),
        ("%%on_all --timeout never\n1", ["never", "seconds"]),
        ("%cluster add nobody", ["nobody"]),
        ("%cluster restart lokal", ["lokal", "local"]),
        ("%cluster logs lokal-2", ["lokal-2"]),
        ("%%on_all\nx = = 2", ["nothing was sent"]),
        ("%push nothing", ["no variable 'nothing'"]),
    ):
        cell = notebook.run(line)
        assert cell.error is not None, line
        assert "\n" not in cell.error.value
        for word in words:
            assert word in cell.error.value, line
    notebook.works("data = 3")
    cell = notebook.run("%%on_all\nprint(data)")
    assert cell.error is not None
    assert "%push data sends it" in cell.shown + cell.error.value
    assert "3" in notebook.works("%push data\n") + notebook.works("%%on_all\nprint(data)")
    notebook.works("%cluster stop")


def book(*cells: str, work: str = COUNT) -> Any:
    """A notebook that does ``work`` on all nodes and does not stop its cluster."""
    start = ["%load_ext notebook_cluster", "%cluster start lesson --local 2", f"%%on_all\n{work}"]
    sources = [*start, *map(textwrap.dedent, cells)]
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.outputs]


def text_of(notebook: Any) -> str:
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs_of(notebook)]
    return "\n".join(texts)


def assert_plain(notebook: Any) -> None:
    """Nothing in it needs a running widget to be seen."""
    kinds = {kind for output in outputs_of(notebook) for kind in output.get("data", {})}
    assert not {kind for kind in kinds if "widget" in kind or "javascript" in kind}, kinds


def test_nbclient_leaves_plain_outputs_and_no_cluster(work: Path, no_processes_left: str) -> None:
    notebook = book("%cluster status", work=TRAIN.format(condition="steps < 20"))
    run_notebook(notebook, work)
    assert_plain(notebook)
    assert "[all 2 nodes]\nround 1" in text_of(notebook)
    assert text_of(notebook).count("trained 4") == 1
    wait_until(lambda: not marked_processes(no_processes_left), 60, "every process to end")


def test_papermill_leaves_plain_outputs_and_no_cluster(work: Path, no_processes_left: str) -> None:
    nbformat.write(book(), work / "in.ipynb")
    papermill.execute_notebook("in.ipynb", "out.ipynb", progress_bar=False, cwd=str(work), config=kernel_config())
    notebook = nbformat.read(work / "out.ipynb", as_version=4)
    assert_plain(notebook)
    assert "[all 2 nodes]\nround 1" in text_of(notebook)
    assert text_of(notebook).count("trained 4") == 1
    wait_until(lambda: not marked_processes(no_processes_left), 60, "every process to end")


def test_an_error_on_one_node_ends_the_notebook_with_an_error(work: Path, no_processes_left: str) -> None:
    notebook = book("%%on_all\nif rank == 1: raise ValueError('no data')\nnc.barrier()", "print('not reached')")
    with pytest.raises(CellExecutionError) as error:
        run_notebook(notebook, work)
    assert "ValueError: no data" in str(error.value)
    assert "not reached" not in text_of(notebook)
    wait_until(lambda: not marked_processes(no_processes_left), 60, "every process to end")


PICTURE = """
%%on_all
import struct, zlib
from IPython.display import Image

def part(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

rows = b"".join(b"\\0" + bytes([80 * rank, 40, 200] * 16) for _ in range(16))
size = struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)
Image(b"\\x89PNG\\r\\n\\x1a\\n" + part(b"IHDR", size) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b""))
"""


def test_without_a_person_plots_bars_and_errors_are_kept_plain_and_input_raises(work: Path) -> None:
    cells = [
        PICTURE.strip(),
        "%%on_all\nfrom tqdm.auto import tqdm\nfor step in tqdm(range(2000), desc='steps'): pass",
        "%%on_all\nname = input('who? ')",
        "%cluster vars",
    ]
    notebook = book(*cells)
    notebook.cells[5].metadata["tags"] = ["raises-exception"]
    run_notebook(notebook, work)
    assert_plain(notebook)
    picture, bar, failing, table = notebook.cells[3:]
    images = [output.data["image/png"] for output in picture.outputs if "image/png" in output.get("data", {})]
    assert len(set(images)) == 2
    labels = [output.data["text/plain"] for output in picture.outputs if "[local" in output.data["text/plain"]]
    assert len(labels) == 2
    shown = "\n".join(output.data["text/plain"] for output in bar.outputs)
    assert shown.count("100%") == shown.count("steps") == 2  # one line a node: the last state of the bar
    assert failing.outputs[-1].ename == "RemoteError"
    assert "StdinNotImplementedError" in failing.outputs[-1].evalue
    assert "nobody can be asked" in failing.outputs[-1].evalue
    assert "variables on 2 nodes" in table.outputs[0].data["text/plain"]
    assert len(nbformat.writes(notebook)) < 48_000
