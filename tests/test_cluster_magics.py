"""The magics on a real cluster, where its answers surprised: dead nodes, progress bars, questions."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.notebook_kernel import NotebookKernel
from tests.shared_notebook import error_of
from tests.strangers import Strangers


@pytest.fixture
def notebook(jupyter_dirs: Path, no_processes_left: str) -> Iterator[NotebookKernel]:
    """A notebook kernel with a running cluster of two nodes."""
    kernel = NotebookKernel(jupyter_dirs)
    kernel.works("%load_ext notebook_cluster")
    kernel.works("%cluster start --local 2 --no-panel")
    yield kernel
    kernel.close()


def test_a_cell_that_ends_a_nodes_process_does_not_end_its_next_kernel_for_ever(notebook: NotebookKernel) -> None:
    notebook.works("%%on_all\nx = 5")
    assert "exit code 3" in error_of(notebook, "%%on_all\nimport os\nif rank == 1: os._exit(3)")
    assert error_of(notebook, "%cluster restart local-2") == (
        "node 'local-2' did not start: exit code 3 while it replayed cell 2: "
        "%cluster restart local-2 leaves that cell out"
    )
    lacks = "without cell 2, whose replay ended its kernel: %cluster restart local-2 --all-cells runs it again"
    assert f"local-2 is back, with the cluster's earlier cells replayed, {lacks}\n" in notebook.works(
        "%cluster restart local-2"
    )
    assert f"local-2 runs {lacks}" in notebook.works("%cluster status")
    assert f"; local-2 runs {lacks}" in error_of(notebook, "%%on 1 --no-replay\nraise ValueError('no')")
    assert error_of(notebook, "%cluster skip local-2") == "node 'local-2' replays no cell now: nothing to skip"
    assert "exclude each other" in error_of(notebook, "%cluster restart local-2 --all-cells --no-replay")
    assert notebook.works("%%on_all\nx") == "[all 2 nodes]\nOut: 5"


def test_what_is_said_about_nodes_tells_the_dead_ones(notebook: NotebookKernel) -> None:
    notebook.run("%%on_all\nimport os\nif rank == 1: os._exit(3)")
    assert "2 nodes (local, local-2: dead)" in notebook.works("%cluster attach")
    notebook.works("rate = 0.5")
    assert notebook.works("%push rate") == "pushed rate to 1 node\n"


def test_progress_bars_for_notebooks_are_text_that_moves(notebook: NotebookKernel) -> None:
    for imported in ("from tqdm.auto import tqdm", "from tqdm.notebook import tqdm", "import tqdm.notebook as tqdm"):
        call = "tqdm.tqdm" if imported.startswith("import") else "tqdm"
        shown = notebook.works(f"%%on 0\n{imported}\nfor _ in {call}(range(30)): pass")
        assert "100%" in shown
        assert "30/30" in shown


def said(notebook: NotebookKernel, code: str) -> str:
    """What a cell that must fail shows beside its error."""
    cell = notebook.run(code)
    assert cell.error is not None, cell.shown
    return cell.shown


def test_a_name_that_lives_on_the_nodes_is_said_to_where_on_all_was_forgotten(notebook: NotebookKernel) -> None:
    notebook.works("%%on_all\nmodel = 3")
    shown = said(notebook, "print(model)")
    assert shown == (
        "'model' is on local, not in the notebook: begin this cell with %%on_all, or bring it here with %pull model\n"
    )
    assert said(notebook, "nc.barrier()") == "'nc' is there on the nodes: begin this cell with %%on_all\n"
    assert said(notebook, "print(modle)") == said(notebook, "1 / 0") == ""
    shown = said(notebook, "%%on_all\nprint(modle)").partition("[cluster ")[0]  # a line that one still runs may follow
    assert shown.count("'modle' is not defined") == 1
    notebook.works("%cluster stop")
    begin = "'rank' is there on nodes of a cluster: %cluster start, then begin this cell with %%on_all\n"
    assert said(notebook, "rank") == begin
    notebook.works("%unload_ext notebook_cluster")
    assert said(notebook, "rank") == ""


def test_a_cell_of_the_nodes_may_begin_with_comments_and_with_nothing_else(notebook: NotebookKernel) -> None:
    assert "3 local" in notebook.works("# how many\n\n%%on_all\n# on each\nprint(1 + 2, nc.node())")
    notebook.works("# only here\n%%on local")  # empty
    line = "raise ValueError(f\"in line {__import__('sys')._getframe().f_lineno}\")"
    assert "in line 3" in error_of(notebook, f"# a\n%%on_all\nx = 1\n{line}")  # without the magic's own
    for magic in ("%%on_all", "%%on local"):
        shown = error_of(notebook, f"x = 1\n{magic}\nprint(x)")
        assert shown.startswith(f"{magic.split()[0]} has to be the first line of its cell: put what is above it")
    notebook.works("%cluster stop")
    notebook.works("%unload_ext notebook_cluster")
    assert "not found" in error_of(notebook, "# a\n%%on_all\nprint(1)")


def test_a_mistyped_variable_is_compared_with_those_of_the_notebook_only(notebook: NotebookKernel) -> None:
    assert error_of(notebook, "%push opem") == "the notebook has no variable 'opem'"


def test_a_restart_says_which_cells_were_stopped_and_are_not_replayed(notebook: NotebookKernel) -> None:
    notebook.works("%%on_all\nx = 5")
    notebook.works("handle = get_ipython().run_cell_magic('on_all', '--async', 'import time\\ntime.sleep(600)')")
    notebook.run("handle.cancel()\nhandle.wait()")
    said = notebook.works("%cluster restart local-2")
    assert "is back, with the cluster's earlier cells replayed, but for what was stopped (cell 2)\n" in said


def test_a_restart_says_which_cell_it_replays_for_long_and_what_ends_that(
    notebook: NotebookKernel, jupyter_dirs: Path
) -> None:
    notebook.works("%%on_all\nimport os, time\nwhile os.path.exists('hold'):\n    time.sleep(0.05)")
    (jupyter_dirs / "hold").touch()
    restarting = notebook.start("%cluster restart local-2")
    said = notebook.until(restarting, "ends it\n").shown
    way_out = "Skip in the panel, or notebook-cluster skip lesson local-2, ends it"
    assert said.count(f"local-2 is replaying cell 1 of 1: {way_out}\n") == 1
    (jupyter_dirs / "hold").unlink()
    assert "local-2 is back, with the cluster's earlier cells replayed\n" in notebook.until(restarting).shown


def test_all_nodes_are_restarted_at_once_with_an_empty_namespace_or_what_they_held(notebook: NotebookKernel) -> None:
    notebook.works("%%on_all\nx = 5")
    assert "they hold what cells made (%cluster restart all --no-replay" in notebook.works("%cluster start --no-panel")
    said = notebook.works("%cluster restart all --no-replay")
    assert said == "restarting local, local-2 ...\nlocal, local-2 are back, with an empty namespace\n"
    assert notebook.works("%%on_all\n'x' in globals()") == "[all 2 nodes]\nOut: False"
    killed = error_of(notebook, "%%on_all --no-replay\nimport os\nos.kill(os.getpid(), 9)")
    assert "killed by SIGKILL" in killed
    assert "has no running node: %cluster add PEER or %cluster restart all" in error_of(notebook, "%%on_all\nx")
    said = notebook.works("%cluster restart local, local-2")
    assert said == "restarting local, local-2 ...\nlocal, local-2 are back, with the cluster's earlier cells replayed\n"
    assert notebook.works("%%on_all\nx") == "[all 2 nodes]\nOut: 5"
    assert "no node is called 'lokal'" in error_of(notebook, "%cluster restart local lokal")


def test_a_second_cluster_says_that_the_first_one_goes_on(notebook: NotebookKernel) -> None:
    said = notebook.works("%cluster start second --local 1 --no-panel")
    assert "cluster 'lesson' goes on without this notebook: %cluster attach lesson comes back to it\n" in said
    assert "attached to cluster 'lesson'" in notebook.works("%cluster attach lesson")
    assert "goes on" not in notebook.works("%cluster start lesson --no-panel")
    notebook.works("%cluster stop")
    assert "goes on" not in notebook.works("%cluster attach second")
    notebook.works("%cluster stop")


def test_machines_are_invited_and_it_is_said_what_to_type_there(notebook: NotebookKernel) -> None:
    told = notebook.works("%cluster invite --code open-house-31 --minutes 30")
    assert re.search(r"notebook-cluster share --dial [0-9.]+:[0-9]+ --code open-house-31", told)
    assert "valid for 30 minutes" in told
    assert "nobody else may join" in notebook.works("%cluster invite --close")


def test_the_doctor_reports_in_the_notebook(notebook: NotebookKernel) -> None:
    told = notebook.works("%cluster doctor --packages ipykernel")
    assert "notebook-cluster" in told
    assert "multicast" in told.lower()


def test_a_peer_that_is_not_paired_is_refused_with_what_to_type(notebook: NotebookKernel, strangers: Strangers) -> None:
    mini = strangers("mini")
    code = mini.code
    wait_until(lambda: mini.name in notebook.works("%cluster peers"), 60, f"{mini.name} to be heard")
    assert f"%cluster add {mini.name} --code CODE" in error_of(notebook, f"%cluster add {mini.name}")
    assert "18 tries left" in "".join(
        error_of(notebook, f"%cluster add {mini.name} --code wrong-code-77") for _ in range(2)
    )
    assert f"added {mini.name}; 3 nodes" in notebook.works(f"%cluster add {mini.name} --code {code}")
    again = notebook.works(f"%cluster add {mini.name}")
    assert f"added no node: {mini.name} is there already, %cluster add {mini.name} --count 1 adds one more" in again
    assert mini.name in notebook.works("%cluster peers")
