"""A notebook with a panel of an invented cluster, as tests in a browser open it."""

from pathlib import Path
from typing import TYPE_CHECKING

from tests.browser import PATIENCE, Lab, open_next_notebook, replace_cells, run_all, write_notebook
from tests.sidebar_page import close_dialogs

if TYPE_CHECKING:
    from playwright.sync_api import Page

SHOW = f"""
import sys, threading, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from tests.fake_cluster import FakeCluster
from notebook_cluster.widgets import close_panel, show_panel
if "cluster" in globals():  # of the test before, in the same kernel
    close_panel(cluster)
    cluster.stop()
cluster = FakeCluster()
show_panel(cluster)
"""
BUSY_UNTIL_ADDED = """
end = time.monotonic() + 300
while ("add", "attic") not in cluster.calls and time.monotonic() < end:
    time.sleep(0.02)
print("the cell saw", cluster.calls)
"""


def run(page: "Page", lab: Lab, name: str, *cells: str, kernel: str = "python3") -> None:
    """Run SHOW and ``cells`` in a new notebook and wait until the panel is there.

    Its kernel may be that of the notebook that was open, as plotly is imported there already.
    """
    close_dialogs(page)
    if replace_cells(page, name, [SHOW, *cells], kernel):
        # The cells are gone at once, what they showed a moment later: it must not be taken for the new panel.
        page.wait_for_selector(".jp-Notebook .nbc-node", state="detached", timeout=PATIENCE)
    else:
        write_notebook(lab.folder / name, [SHOW, *cells], kernel)
        open_next_notebook(page, name)
    run_all(page)
    page.wait_for_selector(".nbc-node", timeout=PATIENCE)


def wait_until_running(page: "Page", cell: int) -> None:
    """Wait until cell ``cell`` (from 0) runs: the kernel's own status also tells of other threads."""
    page.wait_for_function(
        "cell => document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')[cell]?.textContent.includes('*')",
        arg=cell,
        timeout=PATIENCE,
    )


def wait_for_progress(page: "Page") -> None:
    """Wait until the first node's step has changed twice."""
    for _ in range(2):
        page.wait_for_function(
            "before => document.querySelector('.nbc-number').textContent !== before",
            arg=page.locator(".nbc-number").first.text_content(),
            timeout=PATIENCE,
        )


def wait_for_curves(page: "Page", count: int) -> None:
    """Wait until plotly has drawn ``count`` lines."""
    page.wait_for_function(
        "count => document.querySelectorAll('.js-plotly-plot .scatterlayer .js-line').length >= count",
        arg=count,
        timeout=PATIENCE,
    )


def wait_for_newer_points(page: "Page") -> None:
    """Wait until the first curve that plotly shows has got newer points twice."""
    newest = "document.querySelector('.js-plotly-plot')?.data?.[0]?.x?.at(-1)"
    for _ in range(2):
        page.wait_for_function(
            f"before => {newest} !== undefined && {newest} !== before",
            arg=page.evaluate(f"{newest} ?? null"),
            timeout=PATIENCE,
        )
