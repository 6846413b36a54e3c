"""``%cluster cells all``: cells without a magic run on all nodes, with a mark; ``%%local`` runs one here."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.session import goes_to_nodes
from tests.ipc_kernels import run_notebook
from tests.notebook_kernel import NotebookKernel
from tests.shared_notebook import error_of, lesson

MARK = "on all 2 nodes \u00b7 %cluster cells local ends this"


@pytest.fixture(scope="module")
def kernel() -> Iterator[NotebookKernel]:
    with lesson() as running:
        yield running


@pytest.fixture
def notebook(kernel: NotebookKernel) -> Iterator[NotebookKernel]:
    """In sticky mode."""
    kernel.works("%cluster cells all")
    yield kernel
    kernel.works("%cluster cells local")


@pytest.mark.parametrize(
    "cell", ["1", "x = 2\ny", "%%time\n1", "%%bash\nls", "!ls", "%pip list", "# a\n\n1", "%%onward\n"]
)
def test_cells_for_the_nodes(cell: str) -> None:
    assert goes_to_nodes(cell)


@pytest.mark.parametrize(
    "cell",
    [
        "%%on_all\n1",
        "%%on 0 --async\n1",
        "%%local\n1",
        "%cluster status",
        "# look\n%cluster status\n\n%cluster peers",
        "handle = %cluster attach --async",
        "%push x",
        "%pull x",
        "%load_ext notebook_cluster",
        "%unload_ext notebook_cluster",
        "# nothing\n",
        "",
    ],
)
def test_cells_for_the_notebook(cell: str) -> None:
    assert not goes_to_nodes(cell)


def test_a_line_for_the_notebook_among_lines_for_the_nodes_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        goes_to_nodes("x = 1\n%push x\n")
    assert str(caught.value) == (
        "'%push x' is for the notebook, the other lines of this cell are for the nodes (%cluster cells all): put it "
        "into a cell of its own, or %%local in front of all"
    )


def test_a_cell_runs_on_all_nodes_under_a_mark(notebook: NotebookKernel) -> None:
    shown = notebook.works("where = rank\nworld_size")
    assert shown.splitlines() == [MARK, "[all 2 nodes]", "Out: 2"]
    assert notebook.works("%%local\n'where' in globals()") == "False"


def test_local_runs_a_cell_here_also_with_await(notebook: NotebookKernel) -> None:
    assert notebook.works("%%local\nimport asyncio\nawait asyncio.sleep(0, 'here')") == "'here'"
    assert "runs in the notebook" not in notebook.works("%%local\nhere = 5")
    assert notebook.works("%%local\nhere") == "5"


def test_local_works_without_the_mode_and_takes_nothing(kernel: NotebookKernel) -> None:
    assert kernel.works("%%local\nprint('plain')") == "plain\n"
    assert error_of(kernel, "%%local now\n1") == "%%local takes nothing, got 'now'"


def test_lines_of_ours_stay_and_say_the_mode(notebook: NotebookKernel) -> None:
    assert "cells run on all nodes: %cluster cells local ends this" in notebook.works("%cluster status")
    notebook.works("%%local\nrate = 0.5")
    assert "pushed rate to 2 nodes" in notebook.works("%push rate")
    assert notebook.works("rate").splitlines()[-1] == "Out: 0.5"


def test_a_mixed_cell_runs_nowhere(notebook: NotebookKernel) -> None:
    told = error_of(notebook, "mixed = 1\n%cluster status")
    assert "'%cluster status' is for the notebook" in told
    assert notebook.works("'mixed' in globals()").splitlines()[-1] == "Out: False"


def test_typed_magics_stay_as_they_are(notebook: NotebookKernel) -> None:
    assert notebook.works("%%on 1\nrank") == "[local-2 \u00b7 rank 1]\nOut: 1"
    shown = notebook.works("%%time\nx = 1")
    assert "Wall time" in shown
    assert MARK in shown


def test_errors_show_the_cell_as_typed(notebook: NotebookKernel) -> None:
    cell = notebook.run("value = 1\nvalue / 0")
    assert "----> 2 value / 0" in cell.shown
    assert cell.error is not None
    assert "ZeroDivisionError" in cell.error.value
    assert "invalid syntax (the cell, line 2)" in error_of(notebook, "value = 1\nx = = 2")


def test_history_keeps_the_cell_as_typed(notebook: NotebookKernel) -> None:
    notebook.works("first = 'typed'")
    assert notebook.works("%%local\n_i") == "\"first = 'typed'\""


def test_code_that_is_not_typed_runs_here(notebook: NotebookKernel) -> None:
    assert notebook.works("%%local\nget_ipython().run_cell('print(40 + 2)');") == "42\n"
    request = notebook.client.execute("probe = 'of a frontend'", store_history=False)
    while notebook.client.get_shell_msg(timeout=60)["parent_header"]["msg_id"] != request:
        pass
    assert notebook.works("%%local\nprobe") == "'of a frontend'"


def test_the_mode_ends_with_the_cluster_and_with_the_extension() -> None:
    with lesson() as notebook:
        notebook.works("%cluster cells all")
        notebook.works("%reload_ext notebook_cluster")
        assert notebook.works("print('here')") == "here\n"
        notebook.works("%cluster attach")
        notebook.works("%cluster cells all")
        notebook.works("%%local\nfrom notebook_cluster.client import Cluster\nCluster.attach().stop()")
        assert "has ended" in (told := error_of(notebook, "1 + 1"))
        assert "cells run in the notebook again" in told
        assert notebook.works("1 + 1") == "2"


def test_the_mode_needs_a_cluster_and_a_known_word(kernel: NotebookKernel) -> None:
    assert error_of(kernel, "%cluster cells everywhere") == "%cluster cells everywhere: say all or local"
    assert "cells run in the notebook" in kernel.works("%cluster cells")


def test_a_notebook_in_sticky_mode_runs_under_nbclient(jupyter_dirs: Path, no_processes_left: str) -> None:
    sources = [
        "%load_ext notebook_cluster",
        "%cluster start lesson --local 2 --no-panel",
        "%cluster cells all",
        "total = nc.all_reduce(rank + 1)\ntotal",
        "%%local\nprint('only here')",
        "%cluster cells local",
        "print('here again')",
    ]
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(source)) for source in sources]
    book = nbformat.v4.new_notebook(cells=cells)
    run_notebook(book, jupyter_dirs)
    texts = [
        "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
        for cell in book.cells
    ]
    assert texts[3:] == [f"{MARK}[all 2 nodes]\nOut: 3", "only here\n", texts[5], "here again\n"]
    assert book.cells[3].source == sources[3]
