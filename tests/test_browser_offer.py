"""A notebook that is opened while its cluster runs, and does not show it, offers to: a reload in mid-training.

The tests are one lesson in the order of the file.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser import (
    PATIENCE,
    Lab,
    begin_new_kernel,
    browser_page,
    lab_with_extension,
    needs_extension,
    open_notebook,
    run_all,
    save,
    shut_down_kernels,
    stop_clusters,
    wait_for_kernel,
    write_notebook,
)
from tests.sidebar_page import sources, unfold

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = needs_extension

START = "%load_ext notebook_cluster\n%cluster start lesson --local 2"
TRAIN = """%%on_all
import itertools, time
for step in itertools.count():
    nc.report(step=step, loss=1 / (1 + step))
    time.sleep(0.05)
"""
SHOWN = "import notebook_cluster\n%cluster start lesson"
LIVE = ".nbc-panel .nbc-button"
IN_SIGHT = """() => {
    const view = document.querySelector('.jp-Notebook').getBoundingClientRect();
    const panel = document.querySelector('.nbc-panel').getBoundingClientRect();
    return view.top <= panel.top && panel.top + 200 <= view.bottom;
}"""
"""The head of the panel is where one looks."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_with_extension(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator["Page"]:
    """A notebook, never saved, whose cluster runs a cell that does not end."""
    from playwright.sync_api import Error

    with browser_page(lab) as opened:
        write_notebook(lab.folder / "digits.ipynb", [START, TRAIN])
        write_notebook(lab.folder / "other.ipynb", ["1"])
        open_notebook(opened, "digits.ipynb")
        run_all(opened)
        opened.wait_for_function("() => Number(document.querySelector('.nbc-number')?.textContent) > 5")
        yield opened
        with contextlib.suppress(Error):
            shut_down_kernels(opened)
        stop_clusters(lab)


def reload(page: "Page", name: str = "digits.ipynb") -> None:
    """Load the page anew; a kernel that is busy does not say so to a page that comes later."""
    page.goto(f"/lab/tree/{name}?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=PATIENCE)


def offer(page: "Page") -> "Locator":
    return page.get_by_role("group", name="Offer to show cluster lesson")


def test_nothing_is_offered_to_who_has_run_the_cells(page: "Page") -> None:
    assert offer(page).count() == 0


def test_after_a_reload_in_mid_training_the_tab_of_the_cluster_is_offered_once(page: "Page") -> None:
    reload(page)
    offer(page).get_by_text("Cluster lesson is running cell 1; its output is not shown here.").wait_for(
        timeout=PATIENCE
    )
    assert page.locator(".jp-Dialog").count() == 0
    assert offer(page).get_by_role("button", name="Show it here").count() == 0
    offer(page).get_by_role("button", name="Dashboard of lesson").click()
    page.get_by_role("region", name="dashboard of lesson").wait_for(timeout=PATIENCE)
    assert offer(page).count() == 0
    page.evaluate("window.jupyterapp.shell.currentWidget.close()")


def test_it_can_be_dismissed(page: "Page") -> None:
    reload(page)
    offer(page).get_by_role("button", name="Dismiss").click()
    offer(page).wait_for(state="detached", timeout=PATIENCE)
    # It does not come back with the next state of the cluster.
    line = page.locator(".nbc-side-status")
    before = line.inner_text()
    page.wait_for_function(
        "before => document.querySelector('.nbc-side-status').innerText !== before", arg=before, timeout=PATIENCE
    )
    assert offer(page).count() == 0


def test_a_notebook_without_a_cluster_is_offered_none(page: "Page") -> None:
    reload(page, "other.ipynb")
    page.locator(".nbc-side-status").wait_for(timeout=PATIENCE)
    assert page.locator(".nbc-offer").count() == 0


def test_where_the_kernel_is_free_the_cluster_is_shown_in_a_new_cell_with_a_click(page: "Page") -> None:
    reload(page)
    begin_new_kernel(page)
    reload(page)
    offer(page).get_by_text("Cluster lesson is running cell 1.").wait_for(timeout=PATIENCE)
    page.set_viewport_size({"width": 1280, "height": 460})
    offer(page).get_by_role("button", name="Show it here").click()
    page.locator(LIVE).first.wait_for(timeout=PATIENCE)
    page.wait_for_function(IN_SIGHT, timeout=PATIENCE)
    page.set_viewport_size({"width": 1280, "height": 1000})
    assert sources(page) == [START, TRAIN, SHOWN]
    page.get_by_text("cell 1 is running; Stop ends the watching only").wait_for(timeout=PATIENCE)
    assert offer(page).count() == 0


def test_a_cell_that_shows_it_already_is_run_again_without_a_word_about_what_is_loaded(page: "Page") -> None:
    page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.interrupt()")
    wait_for_kernel(page)
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs').then(() => null)")
    save(page)
    reload(page)
    offer(page).get_by_role("button", name="Show it here").click(timeout=PATIENCE)
    page.locator(LIVE).first.wait_for(timeout=PATIENCE)
    page.get_by_text("cell 1 is running; Stop ends the watching only").wait_for(timeout=PATIENCE)
    assert sources(page) == [START, TRAIN, SHOWN]
    assert page.get_by_text("already loaded").count() == 0


def test_a_panel_that_was_saved_lives_again_and_nothing_is_offered(page: "Page") -> None:
    page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.interrupt()")
    wait_for_kernel(page)
    save(page)
    reload(page)
    page.locator(LIVE).first.wait_for(timeout=PATIENCE)
    assert offer(page).count() == 0
    page.evaluate("() => window.jupyterapp.commands.execute('notebook-cluster:show').then(() => null)")
    page.locator(".nbc-side-cluster").get_by_role("button", name="Stop cell").click()
    page.evaluate("() => void window.jupyterapp.commands.execute('notebook-cluster:stop')")
    page.locator(".jp-Dialog").get_by_role("button", name="Stop Cluster").click()
    unfold(page)
    page.get_by_text("cluster 'lesson' has ended: stopped").wait_for(timeout=PATIENCE)
