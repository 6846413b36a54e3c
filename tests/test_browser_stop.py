"""Stop and Restart in a real JupyterLab while a cell runs on a real cluster."""

from pathlib import Path
from typing import TYPE_CHECKING

import nbformat

from notebook_cluster.client import Cluster
from tests.browser import (
    PATIENCE,
    Lab,
    needs_chromium,
    open_notebook,
    run_all,
    save,
    wait_for_kernel,
    write_notebook,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_chromium

START = "%load_ext notebook_cluster\n%cluster start --local 2 --no-panel"
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


def run_all_until(page: "Page", lab: Lab, text: str) -> None:
    """Run all cells of a new notebook until both nodes have printed ``text`` in the second one."""
    write_notebook(lab.folder / "lesson.ipynb", [START, COUNT, AFTER])
    open_notebook(page, "lesson.ipynb")
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
    run_all_until(page, lab, "count 20")
    page.locator("[data-command='notebook:interrupt-kernel']").first.click()
    wait_for_text(page, 1, "KeyboardInterrupt: cell 1 was stopped")
    wait_for_kernel(page)
    page.screenshot(path=tmp_path / "stop.png")
    save(page)
    cells = nbformat.read(lab.folder / "lesson.ipynb", 4).cells
    texts, error = cells[1].outputs
    first, second = texts.data["text/plain"].split("[local-2 \N{MIDDLE DOT} rank 1]\n")
    assert first.startswith("[local \N{MIDDLE DOT} rank 0]\nthis is local\ncount 10\ncount 20\n")
    assert second.startswith("this is local-2\ncount 10\ncount 20\n")
    assert (error.output_type, error.ename) == ("error", "KeyboardInterrupt")
    assert cells[2].outputs == []


def test_restarting_the_kernel_stops_nothing_and_start_shows_the_run_again(page: "Page", lab: Lab) -> None:
    run_all_until(page, lab, "count 20")
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
