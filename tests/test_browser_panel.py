"""The panel as people see it: a real JupyterLab, a real kernel, the system's Chromium."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import CHROMIUM, Lab, browser_page, open_notebook, run_all, running_lab, wait_for_kernel, write_notebook

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no {CHROMIUM}: apt-get install chromium"),
]

PATIENCE = 30_000
SHOW = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from fake_cluster import FakeCluster
from notebook_cluster.widgets import close_panel, show_panel
cluster = FakeCluster()
show_panel(cluster)
"""
BUSY_UNTIL_ADDED = """
end = time.monotonic() + 60
while ("add", "attic") not in cluster.calls and time.monotonic() < end:
    time.sleep(0.02)
print("the cell saw", cluster.calls)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture
def page(lab: Lab) -> Iterator["Page"]:
    with browser_page(lab) as opened:
        yield opened


def run(page: "Page", lab: Lab, name: str, *cells: str) -> None:
    write_notebook(lab.folder / name, [SHOW, *cells])
    open_notebook(page, name)
    run_all(page)
    page.wait_for_selector(".nbc-node", timeout=60_000)


def test_panel_shows_the_cluster_and_acts_while_a_cell_runs(page: "Page", lab: Lab, tmp_path: Path) -> None:
    run(page, lab, "busy.ipynb", BUSY_UNTIL_ADDED)
    wait_for_kernel(page, "busy")
    assert page.locator(".nbc-node-name").all_text_contents()[:3] == ["laptop", "mini", "desk"]
    step = page.locator(".nbc-node >> nth=0 >> .nbc-number >> nth=0")
    before = step.text_content()
    page.wait_for_function("b => document.querySelector('.nbc-number').textContent !== b", arg=before, timeout=PATIENCE)
    page.wait_for_function(
        "() => document.querySelectorAll('.js-plotly-plot .scatterlayer .js-line').length >= 6", timeout=PATIENCE
    )
    wait_for_kernel(page, "busy", 1)

    page.get_by_role("button", name="Add attic").click()
    page.get_by_text("attic added").wait_for(timeout=PATIENCE)
    page.wait_for_selector(".nbc-node[data-node=attic]", timeout=PATIENCE)
    page.get_by_text("the cell saw [('add', 'attic')]").wait_for(timeout=PATIENCE)
    page.screenshot(path=tmp_path / "panel.png")
