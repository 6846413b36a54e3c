"""Cells that return at once, last values, canaries: ``--async``, ``-o`` and ``--canary`` with real kernels."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import list_clusters
from tests.cluster import kill
from tests.notebook_kernel import NotebookKernel
from tests.shared_notebook import error_of, lesson, listen

TELL_WHEN_WAITING = """
import sys, threading, time, traceback
def tell():
    while not any("_over.wait" in row for row in traceback.format_stack(sys._current_frames()[main])):
        time.sleep(0.01)
    print("it waits", flush=True)
main = threading.main_thread().ident
threading.Thread(target=tell).start()
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[NotebookKernel]:
    with lesson() as kernel:
        yield kernel


@pytest.fixture
def gate(notebook: NotebookKernel, tmp_path: Path) -> Iterator[str]:
    """Source of a cell that runs until ``open_gate()`` in the notebook, or the test's end."""
    path = tmp_path / "open"
    notebook.works(f"def open_gate(): open({str(path)!r}, 'w').close()")
    yield f"\nimport os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.01)\n"
    path.touch()


# ---- --async


def test_an_async_cell_returns_a_handle_whose_results_come_later(notebook: NotebookKernel, gate: str) -> None:
    shown = notebook.works(f"%%on_all --async{gate}rank * 10")
    assert "runs on 2 nodes: local, local-2" in shown
    assert notebook.works("handle = _; handle.done, handle.status, handle.results") == "(False, 'running', {})"
    notebook.works("open_gate()")
    assert notebook.works("handle.wait()") == "{'local': 0, 'local-2': 10}"
    assert notebook.works("handle.done, handle.status, handle.nodes") == (
        "(True, 'ok', {'local': 'ok', 'local-2': 'ok'})"
    )


def test_output_goes_on_below_its_own_cell_while_others_run(notebook: NotebookKernel, gate: str) -> None:
    cell = notebook.start(f"%%on_all --async -o handle\nprint('begun'){gate}print('opened')")
    listen(notebook, cell, until="begun")
    other = notebook.start("open_gate()\nhandle.wait()\nprint('the other cell')")
    listen(notebook, other, cell, until="the other cell")
    listen(notebook, cell, other, until="ended on 2 nodes")
    assert "[all 2 nodes]\nbegun\nopened" in cell.shown
    assert "opened" not in other.shown


def test_what_a_node_has_put_out_is_read_from_the_handle(notebook: NotebookKernel) -> None:
    source = "from IPython.display import HTML\nprint('on', rank)\ndisplay(HTML('<b>x</b>'))\nrank"
    notebook.works(f"%%on_all --async -o handle\n{source}")
    notebook.works("handle.wait()")
    shown = notebook.works("print(handle.output('local-2'))")
    assert shown == "on 1\n<IPython.core.display.HTML object>\nOut: 1\n"
    assert notebook.works("print(handle.output(0)[:4])") == "on 0\n"
    assert "has no output of 'desk': there are local, local-2" in error_of(notebook, "handle.output('desk')")


def test_a_failed_async_cell_fails_where_it_is_waited_for(notebook: NotebookKernel) -> None:
    notebook.works("%%on_all --async -o handle\nif rank: raise ValueError('bad data')\n'fine'")
    told = error_of(notebook, "handle.wait()")
    assert "failed on 1 of 2 nodes" in told
    assert "ValueError: bad data" in told
    assert notebook.works("handle.results") == "{'local': 'fine', 'local-2': <local-2: ValueError: bad data>}"
    assert "failed on 1 of 2 nodes: local-2" in notebook.works("handle")


def test_waiting_ends_after_its_time_and_the_cell_goes_on(notebook: NotebookKernel, gate: str) -> None:
    notebook.works(f"%%on_all --async -o handle{gate}")
    cell = notebook.run("handle.wait(0.05)")
    assert cell.error is not None
    assert cell.error.name == "TimeoutError"
    assert "not ended after 0.05 s: cell" in cell.error.value
    assert notebook.works("open_gate(); handle.wait()") == "{'local': None, 'local-2': None}"


def test_stop_ends_the_waiting_only(notebook: NotebookKernel, gate: str) -> None:
    notebook.works(f"%%on_all --async -o handle{gate}")
    waiting = notebook.start(TELL_WHEN_WAITING + "handle.wait()")
    notebook.until(waiting, "it waits")
    notebook.manager.interrupt_kernel()
    error = notebook.until(waiting).error
    assert error is not None
    assert error.name == "KeyboardInterrupt"
    assert "goes on: .cancel() ends it" in error.value
    assert notebook.works("handle.status") == "'running'"
    notebook.works("open_gate(); handle.wait()")


def test_a_cancelled_cell_is_interrupted_on_every_node(notebook: NotebookKernel, gate: str) -> None:
    notebook.works(f"%%on_all --async -o handle{gate}")
    cell = notebook.run("handle.cancel()\nhandle.wait()")
    assert cell.error is not None
    assert cell.error.name == "KeyboardInterrupt"
    assert notebook.works("handle.nodes") == "{'local': 'interrupted', 'local-2': 'interrupted'}"
    assert notebook.works("handle.results") == "{'local': <local: interrupted>, 'local-2': <local-2: interrupted>}"


def test_a_cell_behind_an_async_one_says_what_it_waits_for(notebook: NotebookKernel, gate: str) -> None:
    notebook.works(f"%%on_all --async -o handle{gate}")
    waiting = notebook.start("%%on_all\nprint('my turn')")
    notebook.until(waiting, "which runs with --async")
    notebook.manager.interrupt_kernel()
    error = notebook.until(waiting).error
    assert error is not None
    assert error.name == "KeyboardInterrupt"
    assert notebook.works("handle.status") == "'running'"
    notebook.works("open_gate(); handle.wait()")


def test_a_queued_cell_is_cancelled_and_the_running_one_goes_on(notebook: NotebookKernel, gate: str) -> None:
    notebook.works(f"%%on_all --async -o handle{gate}")
    assert "waits in the queue: waiting for cell" in notebook.works("%%on_all --async -o second\n1")
    assert notebook.works("second.status") == "'queued'"
    assert notebook.run("second.cancel(); second.wait()").error is not None
    assert notebook.works("second.status, handle.status") == "('interrupted', 'running')"
    notebook.works("open_gate(); handle.wait()")


def test_attach_shows_the_handle_of_this_notebook_and_detach_leaves_it_alone(
    notebook: NotebookKernel, gate: str
) -> None:
    notebook.works(f"%%on_all --async -o handle{gate}")
    assert "is running, with --async from this notebook" in notebook.works("%cluster attach")
    assert notebook.works("again = %cluster attach --async\nprint(again is handle)").endswith("True\n")
    notebook.works("%cluster detach")
    assert notebook.works("handle.status") == "'running'"
    notebook.works("open_gate(); handle.wait()")


def test_a_new_view_replays_a_running_cell_and_gets_a_handle(notebook: NotebookKernel, gate: str) -> None:
    notebook.works(f"%%on_all --async\nprint('begun on', rank){gate}rank + 5")
    notebook.works("%reload_ext notebook_cluster")
    shown = notebook.works("again = %cluster attach --async")
    assert "runs on 2 nodes" in shown
    assert notebook.works("open_gate(); again.wait()") == "{'local': 5, 'local-2': 6}"
    assert notebook.works("print(again.output(1))") == "begun on 1\nOut: 6\n"


def test_where_nobody_looks_the_waiting_cell_shows_the_output(notebook: NotebookKernel) -> None:
    started = notebook.run("%%on_all --async -o handle\nprint('quiet work')", allow_stdin=False)
    assert not {kind for kind in started.kinds if "widget" in kind}
    assert "quiet work" not in started.shown
    assert "[all 2 nodes]\nquiet work" in notebook.run("handle.wait();", allow_stdin=False).shown
    assert "quiet work" not in notebook.run("handle.wait();", allow_stdin=False).shown


def test_the_coordinators_death_ends_the_waiting_and_the_cell_is_found_again(tmp_path: Path) -> None:
    opened = tmp_path / "open"
    with lesson(nodes=1) as notebook:
        source = f"import os, time\nwhile not os.path.exists({str(opened)!r}): time.sleep(0.01)\n'at last'"
        notebook.works(f"%%on_all --async -o handle\n{source}")
        waiting = notebook.start(TELL_WHEN_WAITING + "handle.wait()")
        notebook.until(waiting, "it waits")
        kill(list_clusters()[0].pid)
        error = notebook.until(waiting).error
        assert error is not None
        assert "the coordinator of cluster" in error.value
        assert notebook.works("handle.status") == "'lost'"
        notebook.works("from notebook_cluster.client import Cluster\nCluster.start('lesson').close()")
        notebook.works("again = %cluster attach --async")
        opened.touch()
        assert notebook.works("again.wait()") == "{'local': 'at last'}"


# ---- -o


@pytest.mark.parametrize(
    ("source", "held"),
    [
        ("rank + 3", "{'local': 3, 'local-2': 4}"),
        ("{'a': (rank, None)}", "{'local': {'a': (0, None)}, 'local-2': {'a': (1, None)}}"),
        ("import numpy\nnumpy.arange(2) + rank;", "{'local': array([0, 1]), 'local-2': array([1, 2])}"),
        ("y = rank", "{'local': None, 'local-2': None}"),
        ("import asyncio\nawait asyncio.sleep(0, rank)", "{'local': 0, 'local-2': 1}"),
    ],
)
def test_last_values_are_kept_in_rank_order(notebook: NotebookKernel, source: str, held: str) -> None:
    notebook.works(f"%%on_all -o found\n{source}")
    assert notebook.works("found") == held


def test_keeping_values_changes_nothing_of_what_is_shown(notebook: NotebookKernel) -> None:
    assert notebook.works("%%on_all -o found\n[1, 2];") == ""
    assert notebook.works("%%on_all -o found\n[1, 2]") == "[all 2 nodes]\nOut: [1, 2]"
    assert notebook.works("%%on_all\n_") == "[all 2 nodes]\nOut: [1, 2]"


def test_a_value_that_does_not_travel_stays_and_says_why(notebook: NotebookKernel) -> None:
    notebook.works("%%on_all -o found\nlambda: 1")
    shown = notebook.works("found['local']")
    assert "stays on local: a function does not travel" in shown
    notebook.works("%%on_all -o found\nb'x' * 5_000_000;")
    assert "stays on local: 5.0 MB, a cell's value may have 4 MiB: %pull" in notebook.works("found['local']")


def test_a_node_that_failed_is_missing_and_the_cell_fails(notebook: NotebookKernel) -> None:
    assert "ZeroDivisionError" in error_of(notebook, "%%on_all -o found\n1 // (1 - rank)")
    assert notebook.works("found") == "{'local': 1}"


def test_a_cell_that_was_not_sent_leaves_the_variable(notebook: NotebookKernel) -> None:
    notebook.works("found = 'as before'")
    error_of(notebook, "%%on_all -o found\nx = = 1")
    error_of(notebook, "%%on nobody -o found\n1")
    assert notebook.works("found") == "'as before'"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("%%on_all -o", "-o needs a value: %%on_all -o VAR"),
        ("%%on_all -o 3x", "-o takes the name of a variable, got '3x'"),
        ("%%on_all --output class", "--output takes the name of a variable, got 'class'"),
        ("%%on_all --async=yes", "--async takes no value, got 'yes'"),
        ("%%on_all --asinc", "did you mean '--async'?"),
        ("%%on_all --canary desk", "no node is called 'desk': there are 0 local, 1 local-2"),
        ("%%on 0 --canary 1", "--canary 1: local-2 is not among the nodes that run the cell: local"),
        ("%%on 0 --canary 0,1", "--canary takes one node, by name or rank, got '0,1'"),
    ],
)
def test_a_mistyped_option_is_one_line(notebook: NotebookKernel, line: str, told: str) -> None:
    assert told in error_of(notebook, f"{line}\n1")


# ---- --canary


def test_the_canary_runs_first_and_the_others_after_it(notebook: NotebookKernel) -> None:
    source = "%%on_all --canary -o found\nimport time\nnow = time.monotonic()\ntime.sleep(0.01)\nnow"
    shown = notebook.works(source)
    assert "local ran it without an error: now the other node" in shown
    assert notebook.works("found['local'] + 0.01 <= found['local-2']") == "True"
    assert notebook.works("%%on_all --canary 1 -o found\nimport time\ntime.monotonic();") != ""
    assert notebook.works("found['local'] > found['local-2']") == "True"


def test_when_the_canary_fails_nobody_else_runs_it(notebook: NotebookKernel) -> None:
    told = error_of(notebook, "%%on_all --canary local-2\ntouched = True\nraise ValueError('bad')")
    assert "failed on 1 of 2 nodes" in told
    assert "local did not run it: only local-2, the canary, ran it" in told
    assert notebook.works("%%on_all\n'touched' in globals()").splitlines()[1] == "Out: False"


def test_a_canary_is_alone_in_its_collectives(notebook: NotebookKernel) -> None:
    shown = notebook.works("%%on_all --canary -o found\nnc.barrier()\nnc.all_reduce(1)")
    assert "all 2 nodes" in shown
    assert notebook.works("found") == "{'local': 1, 'local-2': 1}"
    told = error_of(notebook, "%%on_all --canary\nnc.recv(1)")
    assert "recv: no rank 1 runs this cell; there are 0 (local)" in told


def test_a_stopped_canary_stops_the_cell(notebook: NotebookKernel, gate: str) -> None:
    notebook.works(f"%%on_all --async --canary -o handle{gate}")
    assert notebook.works("handle") != ""
    assert notebook.run("handle.cancel(); handle.wait()").error is not None
    assert notebook.works("handle.nodes") == "{'local': 'interrupted'}"


def test_a_node_that_comes_back_replays_a_cell_that_a_canary_ran_first(notebook: NotebookKernel) -> None:
    notebook.works("%%on_all --canary\nkept = 'from before'")
    notebook.works("%cluster restart local-2")
    assert notebook.works("%%on_all\nkept") == "[all 2 nodes]\nOut: 'from before'"
