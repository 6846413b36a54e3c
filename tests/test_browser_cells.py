"""Cells of a real cluster in a real JupyterLab: typing in them, what they ask, Stop, Restart, and ``--async``.

Tab and Shift-Tab know the names of the nodes, and questions of nodes are answered. One page for all tests.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from notebook_cluster.client import Cluster
from tests.browser import (
    PATIENCE,
    Lab,
    browser_page,
    needs_chromium,
    open_next_notebook,
    run_all,
    save,
    shared_lab,
    shut_down_kernels,
    wait_for_kernel,
    write_notebook,
)
from tests.conftest import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = needs_chromium

START = "%load_ext notebook_cluster\n%cluster start --local 2 --no-panel"
CELLS = [
    START,
    "%%on_all\nrecipe_book = ['bread']\ndef bake(loaf):\n    'Bakes a loaf.'\nprint('defined')",
    "%%on 1\nrecipe_of_one = 1\nprint('also defined')",
    "recipe_here = 1",
]
TYPED = len(CELLS)
"""The cell that the tests type in."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with shared_lab() as running:
        yield running


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator["Page"]:
    with browser_page(lab) as opened:
        yield opened
        shut_down_kernels(opened)


@pytest.fixture
def cell(page: "Page", lab: Lab) -> "Locator":
    """The last cell, empty, of a notebook with two nodes that have names which it has not itself."""
    waiting = page.locator(".jp-CodeCell .jp-InputPrompt").filter(has_text="*").count()  # of a test that failed
    if waiting or page.evaluate("window.jupyterapp?.shell.currentWidget?.context.path") != "typing.ipynb":
        write_notebook(lab.folder / "typing.ipynb", [*CELLS, ""])
        open_next_notebook(page, "typing.ipynb")
        run_all(page)
        page.get_by_text("also defined").wait_for(timeout=PATIENCE)
    return page.locator(".jp-CodeCell").nth(TYPED)


def type_into(page: "Page", cell: "Locator", text: str) -> None:
    """Empty the cell and type ``text`` as a person does."""
    editor = cell.locator(".cm-content")
    editor.click()
    page.keyboard.press("Escape")  # what is open from before
    editor.click()
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    page.keyboard.type(text)
    wait_until(lambda: text_of(cell) == text, 60, lambda: f"{text!r} in the cell: {text_of(cell)!r}")


def text_of(cell: "Locator") -> str:
    return "\n".join(cell.locator(".cm-line").all_inner_texts()).rstrip("\n")


def press_until(page: "Page", keys: str, shown: "Locator") -> str:
    """Press ``keys`` until ``shown`` appears: JupyterLab drops an answer that takes longer than a second."""
    from playwright.sync_api import TimeoutError

    def appears() -> bool:
        page.keyboard.press(keys)
        try:
            shown.wait_for(timeout=5_000)
        except TimeoutError:
            return False
        return True

    wait_until(appears, 60, f"an answer to {keys}")
    return shown.inner_text()


def test_tab_offers_names_of_the_nodes_and_inserts_the_one_that_is_chosen(page: "Page", cell: "Locator") -> None:
    type_into(page, cell, "%%on 1\nreci")
    offered = press_until(page, "Tab", page.locator(".jp-Completer").filter(has_text="recipe_of_one"))
    assert "recipe_book" in offered
    assert "recipe_here" not in offered
    page.locator(".jp-Completer-item").filter(has_text="recipe_of_one").click()
    wait_until(lambda: text_of(cell) == "%%on 1\nrecipe_of_one", 60, lambda: f"the name in {text_of(cell)!r}")


def test_shift_tab_shows_what_is_on_a_node_and_names_it(page: "Page", cell: "Locator") -> None:
    type_into(page, cell, "%%on 1\nbake")
    shown = press_until(page, "Shift+Tab", page.locator(".jp-Tooltip"))
    assert shown.startswith("on local-2:")
    assert "Bakes a loaf." in shown


def run_typed(page: "Page", cell: "Locator", source: str) -> None:
    """Run ``source`` in the last cell and stay there."""
    type_into(page, cell, source)
    page.keyboard.press("Control+Enter")


def test_questions_of_nodes_are_asked_below_their_cell_one_after_the_other(page: "Page", cell: "Locator") -> None:
    run_typed(page, cell, "%%on_all\nname = input('your name? ')\nprint(nc.node(), 'greets', name)")
    answers = {"local: your name?": "Ada", "local-2: your name?": "Grace"}
    for _ in range(2):
        prompt = cell.locator(".jp-Stdin-prompt")
        prompt.wait_for(timeout=PATIENCE)
        assert prompt.count() == 1
        asked = prompt.inner_text().strip()
        field = cell.locator(".jp-Stdin-input")
        assert field.evaluate("field => field.type") == "text"
        field.fill(answers.pop(asked))
        field.press("Enter")
        prompt.filter(has_text=asked).wait_for(state="detached", timeout=PATIENCE)
    cell.get_by_text("local greets Ada").wait_for(timeout=PATIENCE)
    cell.get_by_text("local-2 greets Grace").wait_for(timeout=PATIENCE)


def test_a_password_for_a_node_is_not_shown(page: "Page", cell: "Locator") -> None:
    run_typed(page, cell, "%%on 0\nimport getpass\nprint(len(getpass.getpass('key: ')), 'characters')")
    cell.locator(".jp-Stdin-prompt").filter(has_text="local: key:").wait_for(timeout=PATIENCE)
    field = cell.locator(".jp-Stdin-input")
    assert field.evaluate("field => field.type") == "password"
    field.fill("hush")
    field.press("Enter")
    cell.get_by_text("4 characters").wait_for(timeout=PATIENCE)
    assert "hush" not in cell.inner_text()


def test_stop_ends_a_cell_that_asks(page: "Page", cell: "Locator") -> None:
    run_typed(page, cell, "%%on_all\ninput('for ever? ')")
    cell.locator(".jp-Stdin-prompt").wait_for(timeout=PATIENCE)
    page.locator("[data-command='notebook:interrupt-kernel']").first.click()
    cell.get_by_text("was stopped").first.wait_for(timeout=PATIENCE)
    run_typed(page, cell, "%%on_all\nprint('and', 'on')")
    cell.get_by_text("and on").wait_for(timeout=PATIENCE)


ASYNC = [
    START,
    "%%on_all --async -o handle\nimport time\nfor step in range(100_000): print('step', step); time.sleep(0.05)",
    "import time\nwhile not handle.done:\n    time.sleep(0.05)\nprint('it is', handle.status)",
]


def test_an_async_cell_shows_its_output_and_stops_while_another_cell_runs(page: "Page", lab: Lab) -> None:
    path = write_notebook(lab.folder / "async.ipynb", ASYNC)
    open_next_notebook(page, "async.ipynb")
    run_all(page)
    output = page.locator(".jp-CodeCell").nth(1).locator(".jp-OutputArea")
    output.get_by_text("runs on 2 nodes: local, local-2").wait_for(timeout=PATIENCE)
    output.get_by_text("step 20").first.wait_for(timeout=PATIENCE)
    output.get_by_role("button", name="Stop").click()
    output.get_by_text("was stopped").wait_for(timeout=PATIENCE)
    page.locator(".jp-CodeCell").nth(2).get_by_text("it is interrupted").wait_for(timeout=PATIENCE)
    assert output.get_by_role("button", name="Stop").count() == 0

    save(page)
    wait_until(lambda: "was stopped" in path.read_text(), 60, "the saved notebook")
    saved = nbformat.read(path, as_version=4)
    kinds = {kind for out in saved.cells[1].outputs for kind in out.get("data", {})}
    assert not {kind for kind in kinds if "widget" in kind}
    assert "step 20" in "".join(out.get("data", {}).get("text/plain", "") for out in saved.cells[1].outputs)


COUNT = """%%on_all
import time
print("this is", nc.node())  # else what both print is folded into one block
count = 0
while True:
    count += 1
    if count % 10 == 0:
        print("count", count, flush=True)
    time.sleep(0.01)
"""
AFTER = "print('the cell', 'after')"


def run_all_until(page: "Page", lab: Lab, name: str, text: str) -> None:
    """Run all cells of a new notebook until both nodes have printed ``text`` in the second one."""
    write_notebook(lab.folder / name, [START, COUNT, AFTER])
    open_next_notebook(page, name)
    run_all(page)
    wait_for_text(page, 1, text, times=2)


def wait_for_text(page: "Page", cell: int, text: str, times: int = 1) -> None:
    """Wait until the outputs of cell ``cell`` (from 0) hold ``text`` so many times."""
    page.wait_for_function(
        """([cell, text, times]) => {
            const area = document.querySelectorAll('.jp-CodeCell')[cell].querySelector('.jp-OutputArea');
            return area.textContent.split(text).length > times;
        }""",
        arg=[cell, text, times],
        timeout=PATIENCE,
    )


def test_stop_ends_the_cell_keeps_its_output_and_ends_run_all(page: "Page", lab: Lab, tmp_path: Path) -> None:
    run_all_until(page, lab, "stop.ipynb", "count 20")
    page.locator("[data-command='notebook:interrupt-kernel']").first.click()
    wait_for_text(page, 1, "KeyboardInterrupt: cell 1 was stopped")
    wait_for_kernel(page)
    page.screenshot(path=tmp_path / "stop.png")
    save(page)
    cells = nbformat.read(lab.folder / "stop.ipynb", 4).cells
    texts, error = cells[1].outputs
    first, second = texts.data["text/plain"].split("[local-2 \N{MIDDLE DOT} rank 1]\n")
    assert first.startswith("[local \N{MIDDLE DOT} rank 0]\nthis is local\ncount 10\ncount 20\n")
    assert second.startswith("this is local-2\ncount 10\ncount 20\n")
    assert (error.output_type, error.ename) == ("error", "KeyboardInterrupt")
    assert cells[2].outputs == []


def test_restarting_the_kernel_stops_nothing_and_start_shows_the_run_again(page: "Page", lab: Lab) -> None:
    run_all_until(page, lab, "lesson.ipynb", "count 20")
    page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    with Cluster.attach("lesson", live=False) as cluster:
        cell = cluster.state().cell
        assert cell is not None
        assert cell.status == "running"
        page.evaluate(
            """() => {
                const { commands, shell } = window.jupyterapp;
                shell.currentWidget.content.activeCellIndex = 0;
                void commands.execute('notebook:run-cell');
            }"""
        )
        wait_for_text(page, 0, "attached to cluster 'lesson', which runs already")
        wait_for_text(page, 0, "count 10\ncount 20", times=2)
        wait_for_text(page, 0, "count 200", times=2)
        cluster.detach()
        wait_for_text(page, 0, "detached: cell 1 goes on")
        cluster.stop()
