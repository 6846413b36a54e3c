"""Menu, status bar and sidebar mean the cluster of the notebook in front: two real clusters, three notebooks.

The tests are one lesson in the order of the file.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser import (
    PATIENCE,
    Lab,
    browser_page,
    lab_with_extension,
    needs_extension,
    open_notebook,
    restart_kernel,
    shut_down_kernels,
    stop_clusters,
    wait_for_kernel,
    write_notebook,
)
from tests.sidebar_page import run_cell, show_sidebar

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_extension

START = "%load_ext notebook_cluster\n%cluster start {} --local 1 --no-panel"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_with_extension(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator["Page"]:
    """``first.ipynb`` has started cluster ``alpha``, ``second.ipynb`` cluster ``omega``; ``third.ipynb`` has none."""
    from playwright.sync_api import Error

    with browser_page(lab) as opened:
        write_notebook(lab.folder / "third.ipynb", ["1"])
        open_notebook(opened, "third.ipynb")
        for name, cluster in (("first", "alpha"), ("second", "omega")):
            write_notebook(lab.folder / f"{name}.ipynb", [START.format(cluster)])
            go_to(opened, name)
            wait_for_kernel(opened)
            run_cell(opened, 0)
            opened.get_by_text(f"cluster '{cluster}' is ready").wait_for(timeout=PATIENCE)
            wait_for_kernel(opened)
        show_sidebar(opened)
        opened.get_by_role("region", name="cluster omega").wait_for(timeout=PATIENCE)
        yield opened
        with contextlib.suppress(Error):
            shut_down_kernels(opened)
        stop_clusters(lab)


def go_to(page: "Page", notebook: str) -> None:
    """Bring the notebook of this name to the front."""
    # To the end: one that is still under way could bring its notebook to the front after the next one's.
    page.evaluate(
        "async path => void (await window.jupyterapp.commands.execute('docmanager:open', { path }))",
        f"{notebook}.ipynb",
    )
    page.wait_for_function(
        "path => window.jupyterapp.shell.currentWidget?.context?.path === path && "
        "window.jupyterapp.shell.currentWidget.content.widgets?.length > 0",
        arg=f"{notebook}.ipynb",
        timeout=PATIENCE,
    )


def wait_for_line(page: "Page", begins: str) -> None:
    """Wait until the line in the status bar begins so."""
    page.wait_for_function(
        "begins => document.querySelector('.nbc-side-status')?.textContent.startsWith(begins)",
        arg=begins,
        timeout=PATIENCE,
    )


def choose_stop(page: "Page") -> None:
    page.get_by_role("menuitem", name="Cluster", exact=True).click()
    page.locator(".lm-Menu-item").filter(has_text="Stop Cluster").click()


@pytest.mark.parametrize(("notebook", "cluster"), [("first", "alpha"), ("second", "omega")])
def test_the_cluster_of_the_notebook_in_front_is_meant(page: "Page", notebook: str, cluster: str) -> None:
    go_to(page, notebook)
    wait_for_line(page, f"{cluster}: 1 node")
    choose_stop(page)
    page.get_by_text(f"Stop cluster {cluster}?").wait_for(timeout=PATIENCE)
    page.locator(".jp-Dialog").get_by_text("every kernel of it (1 node)").wait_for(timeout=PATIENCE)
    # Enter that is still held down from the menu must not end it.
    page.keyboard.press("Enter")
    page.locator(".jp-Dialog").wait_for(state="detached", timeout=PATIENCE)
    wait_for_line(page, f"{cluster}: 1 node")


def test_a_notebook_whose_kernel_was_restarted_still_means_its_cluster(page: "Page") -> None:
    go_to(page, "second")
    restart_kernel(page)
    wait_for_line(page, "omega: 1 node")


def test_the_tab_of_a_cluster_means_it_whatever_notebook_is_behind_it(page: "Page") -> None:
    page.get_by_role("region", name="cluster alpha").get_by_role("button", name="Dashboard").click()
    wait_for_line(page, "alpha: 1 node")
    page.evaluate("window.jupyterapp.shell.currentWidget.close()")
    go_to(page, "second")
    wait_for_line(page, "omega: 1 node")


def test_from_a_notebook_without_a_cluster_it_is_asked_which_one_is_meant(page: "Page") -> None:
    go_to(page, "third")
    wait_for_line(page, "2 clusters · ")
    choose_stop(page)
    dialog = page.locator(".jp-Dialog")
    dialog.get_by_text("Which one?").wait_for(timeout=PATIENCE)
    dialog.locator("select").select_option("alpha")
    dialog.get_by_role("button", name="Ok").click()
    page.get_by_text("Stop cluster alpha?").wait_for(timeout=PATIENCE)
    dialog.get_by_role("button", name="Stop Cluster").click()
    wait_for_end(page, "alpha")


def wait_for_end(page: "Page", name: str) -> None:
    """Until the sidebar says that it was stopped: below its name, which is folded then."""
    section = page.locator(f".nbc-side-cluster[aria-label='cluster {name}']")
    section.locator(".nbc-side-progress").get_by_text("ended", exact=True).wait_for(timeout=PATIENCE)
    section.locator(".nbc-side-fold").click()
    section.get_by_text(f"cluster '{name}' has ended: stopped").wait_for(timeout=PATIENCE)


def test_the_only_cluster_that_is_left_is_meant_and_ended_after_its_name_was_said(page: "Page") -> None:
    wait_for_line(page, "omega: 1 node")
    choose_stop(page)
    page.get_by_text("Stop cluster omega?").wait_for(timeout=PATIENCE)
    page.locator(".jp-Dialog").get_by_role("button", name="Stop Cluster").click()
    wait_for_end(page, "omega")
