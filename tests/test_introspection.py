"""Completion and inspection of names that live on the nodes, while a cell for them is typed."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.coordinator.kernels.inspection import ANSWER_S
from notebook_cluster.magics.completion import RemotePart, remote_part
from tests.cluster import Watcher, kernel_pid, stopped
from tests.conftest import wait_until
from tests.notebook_kernel import NotebookKernel
from tests.shared_notebook import lesson

SETUP = """
recipe = {"flour": 1}
class Model:
    'A small one.'
    weight = 1
    bias = 2
model = Model()
def bake(x):
    'Bakes x.'
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[NotebookKernel]:
    """A notebook whose two nodes have names that it has not."""
    with lesson() as kernel:
        kernel.works(f"%%on_all\n{SETUP}")
        kernel.works("%%on 1\nrecipe_of_one = 1")
        kernel.works("recipe_here = 1")
        yield kernel


def complete(notebook: NotebookKernel, cell: str) -> list[str]:
    """What ``cell`` is after each suggestion is taken."""
    reply: Any = notebook.client.complete(cell, reply=True, timeout=60)
    content = reply["content"]
    before, after = cell[: content["cursor_start"]], cell[content["cursor_end"] :]
    return [f"{before}{text}{after}" for text in content["matches"]]


def completes(notebook: NotebookKernel, typed: str, taken: str) -> None:
    """One of the suggestions makes ``taken`` of ``typed``; on a machine with much to do perhaps not the first time."""
    wait_until(lambda: taken in complete(notebook, typed), 60, lambda: f"{taken!r} in {complete(notebook, typed)}")


def inspect(notebook: NotebookKernel, cell: str) -> str:
    reply: Any = notebook.client.inspect(cell, reply=True, timeout=60)
    return str(reply["content"]["data"].get("text/plain", ""))


@pytest.mark.parametrize(
    ("typed", "taken"),
    [
        ("%%on_all\nprint(1)\nreci", "%%on_all\nprint(1)\nrecipe"),
        ("%%on_all\nmodel.wei", "%%on_all\nmodel.weight"),
        ("%%on_all --timeout 3\nx = model.b", "%%on_all --timeout 3\nx = model.bias"),
        ("\n  %%on_all\nrecipe['fl", "\n  %%on_all\nrecipe['flour"),
        ("%%on 1\nrecipe_", "%%on 1\nrecipe_of_one"),
        ("%%on no\nreci", "%%on no\nrecipe"),
        ("%%on_all\nimport colors", "%%on_all\nimport colorsys"),
        ("%%on_all\n%timei", "%%on_all\n%timeit"),
    ],
)
def test_names_of_the_nodes_are_completed(notebook: NotebookKernel, typed: str, taken: str) -> None:
    completes(notebook, typed, taken)


def test_names_of_the_notebook_alone_are_not_offered_where_the_nodes_have_fitting_ones(
    notebook: NotebookKernel,
) -> None:
    completes(notebook, "%%on 0\nrecipe", "%%on 0\nrecipe")
    found = complete(notebook, "%%on 0\nrecipe")
    assert "%%on 0\nrecipe_here" not in found
    assert "recipe_here" in complete(notebook, "recipe")


def test_words_of_the_magics_are_completed_in_the_first_line(notebook: NotebookKernel) -> None:
    assert complete(notebook, "%%on_all --time") == ["%%on_all --timeout"]
    assert "%%on names" not in complete(notebook, "%%on loc")


def test_inspection_shows_what_is_on_a_node_and_names_it(notebook: NotebookKernel) -> None:
    shown = wait_until(lambda: inspect(notebook, "%%on 1\nbake"), 60, "an answer")
    assert shown.startswith("on local-2:\n")
    assert "Bakes x." in shown
    assert inspect(notebook, "%%on_all\nrecipe_here") == ""
    assert "int" in inspect(notebook, "recipe_here")


def test_question_mark_in_a_cell_prints_what_the_nodes_know(notebook: NotebookKernel) -> None:
    assert "A small one." in notebook.works("%%on 0\nmodel?")


def test_sticky_mode_completes_without_a_magic(notebook: NotebookKernel) -> None:
    notebook.works("%cluster cells all")
    try:
        completes(notebook, "model.wei", "model.weight")
        assert "%%local\nrecipe_here" in complete(notebook, "%%local\nrecipe_h")
        assert "on local:" in inspect(notebook, "bake")
    finally:
        notebook.works("%cluster cells local")
    assert "model.weight" not in complete(notebook, "model.wei")


def test_busy_node_answers_and_a_stopped_one_makes_nobody_wait(notebook: NotebookKernel) -> None:
    with Cluster.attach() as cluster:
        pid = kernel_pid(cluster, "local-2")
        running = Watcher(cluster.execute("print('began', flush=True)\nwhile True: pass", ("local-2",), replay=False))
        running.wait_for("began")
        completes(notebook, "%%on 1\nrecipe_o", "%%on 1\nrecipe_of_one")
        with stopped(pid):
            began = time.monotonic()
            assert cluster.complete("recipe_o", 8, ("local-2",)) is None
            assert time.monotonic() - began < 10 * ANSWER_S
            assert complete(notebook, "%%on 1\nrecipe_o") == []
            # Asked of all nodes, the other one answers.
            assert wait_until(lambda: cluster.complete("reci", 4), 60, "an answer").node == "local"
        cluster.interrupt()
        assert running.wait_end().status == "interrupted"


def test_idle_node_is_preferred(notebook: NotebookKernel) -> None:
    with Cluster.attach() as cluster:
        running = Watcher(cluster.execute("print('began', flush=True)\nwhile True: pass", ("local",), replay=False))
        running.wait_for("began")
        found = wait_until(lambda: cluster.complete("reci", 4), 60, "an answer")
        assert found.node == "local-2"
        cluster.interrupt()
        running.wait_end()


def test_unloading_gives_the_kernel_its_own_inspection_back(notebook: NotebookKernel) -> None:
    notebook.works("%unload_ext notebook_cluster")
    assert "'do_inspect' in vars(kernel): False" in notebook.works(
        "kernel = get_ipython().kernel\nprint(\"'do_inspect' in vars(kernel):\", 'do_inspect' in vars(kernel))"
    )
    assert inspect(notebook, "%%on_all\nbake") == ""
    notebook.works("%load_ext notebook_cluster\n%cluster attach")


@pytest.mark.parametrize(
    ("cell", "sticky", "part"),
    [
        ("x = 1", False, None),
        ("x = 1", True, RemotePart(0, "x = 1")),
        ("%%on_all\nx", False, RemotePart(9, "x")),
        ("\n\n%%on_all --timeout 3\nx\ny", False, RemotePart(23, "x\ny")),
        ("%%on 0,2 --async\nx", True, RemotePart(17, "x", "0,2 --async")),
        ("%%on_all", False, RemotePart(9, "")),
        ("%%on_all_of_them\nx", False, None),
        ("%%local\nx", True, None),
        ("%%time\nx", True, RemotePart(0, "%%time\nx")),
        ("%%time\nx", False, None),
        ("%cluster status", True, None),
        ("", True, None),
    ],
)
def test_part_of_a_cell_that_nodes_run(cell: str, sticky: bool, part: RemotePart | None) -> None:
    assert remote_part(cell, sticky=sticky) == part
