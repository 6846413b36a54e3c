"""An ``--async`` cell in a real JupyterLab: output below its own cell, a Stop button, a notebook that stays plain."""

from typing import TYPE_CHECKING

import nbformat

from tests.browser import (
    PATIENCE,
    Lab,
    needs_chromium,
    open_notebook,
    run_all,
    save,
    write_notebook,
)
from tests.conftest import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_chromium

CELLS = [
    "%load_ext notebook_cluster\n%cluster start --local 2 --no-panel",
    "%%on_all --async -o handle\nimport time\nfor step in range(100_000): print('step', step); time.sleep(0.05)",
    "import time\nwhile not handle.done:\n    time.sleep(0.05)\nprint('it is', handle.status)",
]


def test_an_async_cell_shows_its_output_and_stops_while_another_cell_runs(page: "Page", lab: Lab) -> None:
    path = write_notebook(lab.folder / "lesson.ipynb", CELLS)
    open_notebook(page, "lesson.ipynb")
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
