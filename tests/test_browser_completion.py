"""Typing in a real JupyterLab: Tab and Shift-Tab know the names of the nodes, and questions of nodes are answered."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser import (
    PATIENCE,
    Lab,
    browser_page,
    needs_chromium,
    open_notebook,
    run_all,
    running_lab,
    shut_down_kernels,
    write_notebook,
)
from tests.cluster import stop_all
from tests.conftest import shared_folders, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = needs_chromium

CELLS = [
    "%load_ext notebook_cluster\n%cluster start --local 2 --no-panel",
    "%%on_all\nrecipe_book = ['bread']\ndef bake(loaf):\n    'Bakes a loaf.'\nprint('defined')",
    "%%on 1\nrecipe_of_one = 1\nprint('also defined')",
    "recipe_here = 1",
]
TYPED = len(CELLS)
"""The cell that the tests type in."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with shared_folders() as folder:
        try:
            with running_lab(folder, environment=dict(os.environ)) as running:
                yield running
        finally:
            stop_all()  # what a test that failed has left running


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator["Page"]:
    """A notebook with two nodes that have names which it has not itself, and an empty last cell."""
    with browser_page(lab) as opened:
        write_notebook(lab.folder / "lesson.ipynb", [*CELLS, ""])
        open_notebook(opened, "lesson.ipynb")
        run_all(opened)
        opened.get_by_text("also defined").wait_for(timeout=PATIENCE)
        yield opened
        shut_down_kernels(opened)


@pytest.fixture
def cell(page: "Page") -> "Locator":
    """The last cell, empty."""
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
