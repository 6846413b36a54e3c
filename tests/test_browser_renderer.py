"""Output of several nodes as tabs: a real JupyterLab with the extension, a real cluster, the system's Chromium."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

import notebook_cluster
from notebook_cluster.magics.display.folding import MIME_TYPE, Tabs, blocks_of, pages_of
from notebook_cluster.magics.display.slots import NodeOutput
from tests.browser import (
    PATIENCE,
    Lab,
    browser_page,
    lab_with_extension,
    needs_extension,
    open_next_notebook,
    open_notebook,
    save,
    shut_down_kernels,
    wait_for_kernel,
    write_notebook,
)
from tests.conftest import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = needs_extension

PANEL_CSS = Path(notebook_cluster.__file__).parent / "widgets" / "panel.css"
START = "%load_ext notebook_cluster\n%cluster start --local 2 --no-panel"
EQUAL = "%%on_all\n1 + 1"
DIFFERENT = """%%on_all
for epoch in range(6):
    print(f"\\x1b[32mepoch {epoch}\\x1b[0m loss {1 / (epoch + 1):.3f}")
print("best loss", 0.25 if rank == 0 else float("nan"))
"""
STREAM = """%%on_all
import pathlib, time
count = 0
while not pathlib.Path({path!r}).exists():
    count += 1
    print("line", count, "of", nc.node(), flush=True)
    time.sleep(0.02)
"""
STOP = "%cluster stop"
FIRST, SECOND = "local \N{MIDDLE DOT} rank 0", "local-2 \N{MIDDLE DOT} rank 1"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_with_extension(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator["Page"]:
    """A notebook that ran cells with equal and with different output on two nodes, and runs one that goes on."""
    with browser_page(lab) as opened:
        end = lab.folder / "end"
        write_notebook(lab.folder / "lesson.ipynb", [START, EQUAL, DIFFERENT, STREAM.format(path=str(end)), STOP])
        open_notebook(opened, "lesson.ipynb")
        for cell in range(4):
            run_cell(opened, cell)
        try:
            output(opened, 3).get_by_text("line 50 of local-2").first.wait_for(timeout=PATIENCE)
            yield opened
        finally:
            end.touch()
            wait_for_kernel(opened)
            run_cell(opened, 4)
            # The kernel is idle before the cell reaches it, too: its number says that it ran.
            prompt = opened.locator(".jp-CodeCell").nth(4).locator(".jp-InputArea-prompt")
            prompt.filter(has_text=re.compile(r"\[\d+\]")).wait_for(timeout=PATIENCE)
            shut_down_kernels(opened)


@pytest.fixture(scope="module")
def other(page: "Page", lab: Lab) -> Iterator["Page"]:
    """A second page in the same browser for the notebooks of single tests, whose kernels are ended at the end."""
    with another_page(page, lab) as opened:
        yield opened


def run_cell(page: "Page", cell: int) -> None:
    """Start cell ``cell`` (from 0)."""
    page.evaluate(
        """cell => {
            const { commands, shell } = window.jupyterapp;
            const notebook = shell.currentWidget.content;
            notebook.deselectAll();
            notebook.activeCellIndex = cell;
            void commands.execute('notebook:run-cell');
        }""",
        cell,
    )


def output(page: "Page", cell: int) -> "Locator":
    """The outputs of cell ``cell`` (from 0)."""
    return page.locator(".jp-CodeCell").nth(cell).locator(".jp-OutputArea-output")


def tab(page: "Page", cell: int, label: str) -> "Locator":
    return output(page, cell).get_by_role("tab").filter(has_text=label)


def seen(page: "Page", cell: int) -> list[str]:
    """The texts that can be seen below cell ``cell``."""
    return [text for text in output(page, cell).locator(".nbc-block pre:visible").all_inner_texts() if text]


def wait_for_more(page: "Page") -> None:
    """Wait until the running cell's output has changed twice."""
    for _ in range(2):
        before = output(page, 3).last.text_content()
        wait_until(lambda before=before: output(page, 3).last.text_content() != before, 60, "more output")


def test_equal_output_is_one_block_that_says_how_each_node_ended(page: "Page") -> None:
    assert seen(page, 1) == ["Out: 2"]
    assert output(page, 1).get_by_role("tab").count() == 0
    states = output(page, 1).locator(".nbc-state").evaluate_all("marks => marks.map(mark => mark.dataset.state)")
    assert states == ["ok", "ok"]


def test_style_of_the_panel_changes_no_output_and_that_of_the_output_no_panel(page: "Page") -> None:
    title = output(page, 2).locator(".nbc-block .nbc-title").first
    look = "element => ['fontSize', 'fontWeight', 'color'].map(name => getComputedStyle(element)[name])"
    before = title.evaluate(look)
    sheet = page.add_style_tag(path=PANEL_CSS)
    after = title.evaluate(look)
    sheet.evaluate("element => element.remove()")
    assert after == before
    for path in (PANEL_CSS, PANEL_CSS.with_name("report.css")):
        of_ours = re.findall(r"^[^@{}/*]*\.nbc-[^{}]*(?= \{)", path.read_text(), re.MULTILINE)
        assert [rule for rule in of_ours if not all(".nbc-panel" in part for part in rule.split(", "))] == []


def test_the_tab_of_a_node_shows_its_text_only(page: "Page") -> None:
    assert output(page, 2).get_by_role("tab").count() == 3
    assert len(seen(page, 2)) == 2
    tab(page, 2, SECOND).click()
    (text,) = seen(page, 2)
    assert text.splitlines()[-1] == "best loss nan"
    tab(page, 2, "All").click()
    assert len(seen(page, 2)) == 2


def test_arrow_keys_move_between_tabs_and_not_between_cells(page: "Page") -> None:
    tab(page, 2, "All").click()
    page.keyboard.press("ArrowRight")
    assert tab(page, 2, FIRST).get_attribute("aria-selected") == "true"
    page.keyboard.press("End")
    assert tab(page, 2, SECOND).evaluate("tab => tab === document.activeElement")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    assert tab(page, 2, "All").evaluate("tab => tab === document.activeElement")


def test_only_differences_are_shown_when_asked_for(page: "Page") -> None:
    button = output(page, 2).get_by_role("button", name="Differences")
    button.click()
    first, second = seen(page, 2)
    assert first.splitlines()[-1] == "best loss 0.25"
    assert second.splitlines() == ["\N{MIDDLE DOT}" * 3 + " 6 lines alike " + "\N{MIDDLE DOT}" * 3, "best loss nan"]
    assert output(page, 2).locator("mark:visible").all_inner_texts() == ["nan"]
    button.click()
    assert len(seen(page, 2)[0].splitlines()) == 7


def test_colours_of_the_terminal_are_kept(page: "Page") -> None:
    colour = output(page, 2).locator("pre span").first.evaluate("span => getComputedStyle(span).color")
    assert colour == "rgb(0, 162, 80)"


def test_tab_fold_and_scroll_position_stay_while_output_streams(page: "Page") -> None:
    output(page, 3).get_by_role("button", name=SECOND).click()
    body = output(page, 3).locator(".nbc-body").first
    body.evaluate("body => { body.scrollTop = 30; }")
    wait_for_more(page)
    assert body.evaluate("body => body.scrollTop") == 30
    assert len(seen(page, 3)) == 1
    tab(page, 3, SECOND).click()
    wait_for_more(page)
    assert tab(page, 3, SECOND).evaluate("tab => tab === document.activeElement")
    (text,) = seen(page, 3)
    assert "of local-2" in text
    assert "of local\n" not in text
    tab(page, 3, "All").click()
    output(page, 3).get_by_role("button", name=SECOND).click()
    assert len(seen(page, 3)) == 2


def test_a_running_node_is_marked_in_its_tab(page: "Page") -> None:
    assert tab(page, 3, FIRST).get_attribute("aria-label") == f"{FIRST}: running"


def test_a_saved_notebook_shows_the_same_when_it_is_opened_again(page: "Page", other: "Page", lab: Lab) -> None:
    shown = seen(page, 2)
    save(page)
    saved = nbformat.read(lab.folder / "lesson.ipynb", 4)
    write_saved(lab.folder / "again.ipynb", saved.cells[1:3])
    open_next_notebook(other, "again.ipynb")
    assert seen(other, 1) == shown
    tab(other, 1, SECOND).click()
    assert seen(other, 1) == shown[1:]


def test_jupyterlab_without_the_extension_shows_html(page: "Page", lab: Lab) -> None:
    save(page)
    write_saved(lab.folder / "plain.ipynb", nbformat.read(lab.folder / "lesson.ipynb", 4).cells[1:3])
    with without_extension(lab), another_page(page, lab) as plain:
        open_notebook(plain, "plain.ipynb")
        assert plain.get_by_role("tab", name=FIRST).count() == 0
        assert not plain.evaluate("window.jupyterapp.commands.hasCommand('notebook-cluster:show')")
        texts = output(plain, 1).locator("pre").all_inner_texts()
        assert [text.splitlines()[-1] for text in texts] == ["best loss 0.25", "best loss nan"]


@contextmanager
def without_extension(lab: Lab) -> Iterator[None]:
    """Pages that are opened meanwhile have no JupyterLab part of ours."""
    file = lab.private / "config" / "labconfig" / "page_config.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | {"disabledExtensions": {"notebook-cluster": True}}))
    try:
        yield
    finally:
        file.write_text(before)


def test_a_hostile_notebook_runs_nothing(other: "Page", lab: Lab) -> None:
    evil = "<img src=x onerror='window.hacked = true'><script>window.hacked = true</script>"
    mini, desk = (NodeOutput(name, rank, "nbc-x") for rank, name in enumerate(["mini", "desk"]))
    mini.write("one\n")
    desk.write("two\n")
    members = [(node, slot) for node in (mini, desk) if (slot := node.text_at(0)) is not None]
    (bundle,) = pages_of(blocks_of(members, 1000, final=True), 2, Tabs("nbc-x", 0, {"mini": "ok"}))
    bundle[MIME_TYPE]["names"][0] = evil
    bundle["text/html"] = bundle["text/html"].replace("one", f"one {evil}").replace("mini", evil)
    cell = nbformat.v4.new_code_cell("", outputs=[nbformat.v4.new_output("display_data", bundle)])
    write_saved(lab.folder / "hostile.ipynb", [cell])
    open_next_notebook(other, "hostile.ipynb")
    assert output(other, 0).get_by_role("tab").count() == 3
    assert seen(other, 0)[0].startswith("one")
    assert output(other, 0).locator("img, script").count() == 0
    assert other.evaluate("window.hacked") is None


def write_saved(path: Path, cells: "list[nbformat.NotebookNode]") -> None:
    """A notebook with these cells and their outputs."""
    notebook = nbformat.read(write_notebook(path, []), 4)
    notebook.cells = cells
    nbformat.write(notebook, path)


@contextmanager
def another_page(page: "Page", lab: Lab) -> Iterator["Page"]:
    """A second page in the same browser, logged in to ``lab``; the kernel of its notebook is ended with it."""
    opened = page.context.new_page()
    try:
        opened.goto(f"/api/status?token={lab.token}")
        yield opened
        opened.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    finally:
        opened.close()
