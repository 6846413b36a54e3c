"""The panel in kernels with other versions of ipykernel: its buttons act in a busy cell, or it says what does; and in
one without a plotly that can be used.

Each version comes from PyPI, alone, into a folder under build/ that a kernelspec puts in front of the path.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import (
    PATIENCE,
    Lab,
    browser_page,
    leave,
    needs_chromium,
    running_lab,
    set_comms_over_subshells,
    shut_down_kernels,
)
from tests.other_versions import installed
from tests.panel_notebook import BUSY_UNTIL_ADDED, run, wait_for_progress, wait_until_running

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_chromium

WITH_SUBSHELLS, WITHOUT_SUBSHELLS = "7.3.0", "6.31.0"
"""The newest before 7.4, which is what the other tests run with, and the newest before 7."""
BUSY_UNTIL_FILE = """
import pathlib
end = time.monotonic() + 300
while not pathlib.Path("go-on").exists() and time.monotonic() < end:
    time.sleep(0.02)
print("the cell saw", cluster.calls)
"""


def add_kernel(lab: Lab, version: str) -> str:
    """A kernelspec of this Python with ipykernel of ``version``; returns its name."""
    return add_kernel_with(lab, installed("ipykernel", version), f"ipykernel {version}")


def add_kernel_with(lab: Lab, packages: Path, name: str) -> str:
    """A kernelspec, shown as ``name``, of this Python with the folder ``packages`` in front; returns its name."""
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "language": "python",
        "display_name": name, "env": {"PYTHONPATH": path},
    }  # fmt: skip
    folder = lab.private / "data" / "kernels" / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.json").write_text(json.dumps(spec))
    return folder.name


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator["Page"]:
    with browser_page(lab) as opened:
        yield opened
        shut_down_kernels(opened)


@pytest.mark.proof
@pytest.mark.parametrize("comms_over_subshells", ["perCommTarget", "disabled"])
def test_buttons_act_while_a_cell_runs_before_ipykernel_7_4(page: "Page", lab: Lab, comms_over_subshells: str) -> None:
    set_comms_over_subshells(lab, comms_over_subshells)
    kernel = add_kernel(lab, WITH_SUBSHELLS)
    leave(page)
    version = f"import ipykernel\nprint('ipykernel', ipykernel.__version__)\n{BUSY_UNTIL_ADDED}"
    run(page, lab, f"busy-{comms_over_subshells}.ipynb", version, kernel=kernel)
    wait_until_running(page, 1)
    wait_for_progress(page)
    page.get_by_role("button", name="Add attic").click()
    page.get_by_text("attic added").wait_for(timeout=PATIENCE)
    page.get_by_text("the cell saw [('add', 'attic')]").wait_for(timeout=PATIENCE)
    assert page.get_by_text(f"ipykernel {WITH_SUBSHELLS}", exact=True).count() == 1


@pytest.mark.proof
def test_without_subshells_the_panel_says_to_use_the_sidebar_and_acts_after_the_cell(page: "Page", lab: Lab) -> None:
    kernel = add_kernel(lab, WITHOUT_SUBSHELLS)
    leave(page)  # a page that is loaded looks for new kernels once a minute only
    run(page, lab, "waits.ipynb", BUSY_UNTIL_FILE, kernel=kernel)
    wait_until_running(page, 1)
    note = page.get_by_role("note").filter(has_text=f"This kernel has ipykernel {WITHOUT_SUBSHELLS}")
    note.get_by_text("use the sidebar").wait_for(timeout=PATIENCE)
    wait_for_progress(page)
    page.get_by_role("button", name="Add attic").click()
    page.get_by_text("Adding attic… No answer from the notebook's kernel yet.").wait_for(timeout=PATIENCE)
    (lab.folder / "go-on").touch()
    page.get_by_text("the cell saw []").wait_for(timeout=PATIENCE)
    page.get_by_text("attic added").wait_for(timeout=PATIENCE)


def test_without_plotly_the_panel_draws_pictures_that_go_on_and_says_how_to_get_it(
    page: "Page", lab: Lab, tmp_path: Path
) -> None:
    old = tmp_path / "plotly-5.24.1.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: plotly\nVersion: 5.24.1\n")
    kernel = add_kernel_with(lab, tmp_path, "old plotly")
    leave(page)
    run(page, lab, "pictures.ipynb", BUSY_UNTIL_ADDED, kernel=kernel)
    charts = page.locator(".nbc-drawn svg.nbc-chart")
    charts.nth(2).wait_for(timeout=PATIENCE)
    page.get_by_text('pip install "plotly>=6"').wait_for(timeout=PATIENCE)
    newest = "document.querySelector('.nbc-drawn svg.nbc-chart path').getAttribute('d')"
    for _ in range(2):
        page.wait_for_function(f"before => {newest} !== before", arg=page.evaluate(newest), timeout=PATIENCE)
    page.get_by_label("Logarithmic").check()
    page.get_by_label("Logarithmic").and_(page.locator(":checked")).wait_for(timeout=PATIENCE)
    page.get_by_role("button", name="Add attic").click()
    page.get_by_text("the cell saw [('add', 'attic')]").wait_for(timeout=PATIENCE)
    assert page.locator(".js-plotly-plot").count() == 0
    page.screenshot(path=tmp_path / "pictures.png")
