"""A notebook that is saved while its cluster runs shows the panel's picture when it is opened without its kernel."""

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import nbformat
import pytest

from tests.browser import (
    PATIENCE,
    Lab,
    browser_page,
    lab_with_extension,
    needs_extension,
    open_next_notebook,
    open_notebook,
    run_all,
    save,
    shut_down_kernels,
    write_notebook,
)
from tests.panel_notebook import run, wait_for_progress
from tests.sidebar_page import press_and_confirm

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_extension

WIDGET = "application/vnd.jupyter.widget-view+json"
PLACE = "application/vnd.notebook-cluster.panel+json"
NOT_FOUND = "model not found"
PICTURE = ".jp-RenderedHTMLCommon .nbc-panel"
LIVE = ".nbc-panel .nbc-button"
POLLED_MILLISECONDS = 200
TRAIN = """%%on_all
import time
for step in range(100_000):
    nc.report(step=step, loss=2.0 / (1 + step / 50))
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_with_extension(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator["Page"]:
    from playwright.sync_api import Error

    with browser_page(lab) as opened:
        yield opened
        with contextlib.suppress(Error):
            shut_down_kernels(opened)


def outputs_of(lab: Lab, name: str) -> list[Any]:
    """The panels in the saved file."""
    cells = nbformat.read(lab.folder / name, 4).cells
    return [output for cell in cells for output in cell.get("outputs", ()) if PLACE in output.get("data", {})]


def steps(html: str) -> int:
    """The first node's step in a picture."""
    found = re.search(r'Step</div><div class="nbc-number">([\d,]+)', html)
    return int(found[1].replace(",", "")) if found else -1


def wait_for_saved_step(page: "Page", lab: Lab, name: str, least: int) -> None:
    """Wait until the pictures in the open notebook are of step ``least`` or later, and save them."""
    page.wait_for_function(
        """([place, least]) => {
            const cells = window.jupyterapp.shell.currentWidget.content.widgets;
            const outputs = cells.flatMap(cell => cell.model.outputs.toJSON().filter(one => place in (one.data ?? {})));
            const shown = /Step<\\/div><div class="nbc-number">([\\d,]+)/;
            const step = one => shown.exec([one.data['text/html']].flat().join(''))?.[1].replaceAll(',', '') ?? -1;
            return outputs.length > 0 && outputs.every(one => Number(step(one)) >= least);
        }""",
        arg=[PLACE, least],
        polling=POLLED_MILLISECONDS,
        timeout=PATIENCE,
    )
    save(page)
    assert all(steps(output.data["text/html"]) >= least for output in outputs_of(lab, name))


def step_now(page: "Page") -> int:
    return int(page.locator(".nbc-number").first.inner_text().replace(",", ""))


def test_a_panel_that_was_saved_in_mid_training_is_a_picture_where_its_kernel_is_gone(page: "Page", lab: Lab) -> None:
    start = "%load_ext notebook_cluster\n%cluster start lesson --local 2"
    write_notebook(lab.folder / "mid.ipynb", [start, TRAIN])
    open_next_notebook(page, "mid.ipynb")
    run_all(page)
    page.wait_for_function("() => Number(document.querySelector('.nbc-number')?.textContent) > 5", timeout=PATIENCE)
    wait_for_saved_step(page, lab, "mid.ipynb", step_now(page))
    press_and_confirm(
        page.get_by_role("button", name="Stop cluster"),
        page.get_by_role("button", name="Really stop cluster"),
    )
    page.locator(PICTURE).get_by_text("ended at").wait_for(timeout=PATIENCE)
    assert page.get_by_text("as it was on").count() == 0
    # The file is as it was while the cluster ran.
    shut_down_kernels(page)
    page.evaluate("window.jupyterapp.shell.currentWidget.context.model.dirty = false")
    open_notebook(page, "mid.ipynb")
    page.locator(PICTURE).locator(".nbc-node").nth(1).wait_for(timeout=PATIENCE)
    page.locator(PICTURE).locator("svg.nbc-chart path").first.wait_for(state="attached", timeout=PATIENCE)
    # Nobody takes it for how things are.
    page.locator(PICTURE).get_by_text("as it was on 20").wait_for(timeout=PATIENCE)
    assert page.get_by_text(NOT_FOUND).count() == 0
    assert page.get_by_text("Loading widget").is_hidden()
    assert page.locator(LIVE).count() == 0


@pytest.mark.proof
def test_the_live_panel_is_not_drawn_anew_when_its_picture_is_kept(page: "Page", lab: Lab) -> None:
    run(page, lab, "kept.ipynb")
    page.get_by_role("button", name="Add library", exact=True).click()
    page.get_by_role("textbox", name="Code of library").fill("tiger-la")
    page.evaluate("document.querySelector('.nbc-panel').marked = true")
    wait_for_saved_step(page, lab, "kept.ipynb", step_now(page) + 1)
    wait_for_progress(page)
    size = (lab.folder / "kept.ipynb").stat().st_size
    wait_for_saved_step(page, lab, "kept.ipynb", step_now(page) + 1)
    assert page.evaluate("document.querySelector('.nbc-panel').marked") is True
    assert page.get_by_role("textbox", name="Code of library").input_value() == "tiger-la"
    assert page.locator(".nbc-panel").count() == 1
    assert (lab.folder / "kept.ipynb").stat().st_size < 1.5 * size
    (output,) = outputs_of(lab, "kept.ipynb")
    assert sorted(output.data) == sorted([WIDGET, PLACE, "text/html", "text/plain"])


def test_after_a_reload_the_panel_lives_and_its_picture_is_still_kept(page: "Page", lab: Lab) -> None:
    run(page, lab, "reload.ipynb", "show_panel(cluster)")
    page.locator(LIVE).first.wait_for(timeout=PATIENCE)
    page.wait_for_function("() => document.querySelectorAll('.nbc-panel').length === 2", timeout=PATIENCE)
    save(page)
    open_notebook(page, "reload.ipynb")
    page.locator(LIVE).first.wait_for(timeout=PATIENCE)
    page.wait_for_function("() => document.querySelectorAll('.nbc-panel').length === 2", timeout=PATIENCE)
    wait_for_saved_step(page, lab, "reload.ipynb", step_now(page) + 1)
    assert len(outputs_of(lab, "reload.ipynb")) == 2
    # The end of the cluster reaches it too, though what the kernel sends to this output does not any more.
    press_and_confirm(
        page.get_by_role("button", name="Stop cluster").first,
        page.get_by_role("button", name="Really stop cluster"),
    )
    page.wait_for_function(f"() => document.querySelectorAll('{PICTURE}').length === 2", timeout=PATIENCE)
    save(page)
    assert outputs_of(lab, "reload.ipynb") == []
    assert "stopped from the panel" in (lab.folder / "reload.ipynb").read_text()


def test_a_panel_whose_kernel_was_restarted_is_a_picture(page: "Page", lab: Lab) -> None:
    run(page, lab, "restart.ipynb")
    page.locator(LIVE).first.wait_for(timeout=PATIENCE)
    page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    page.locator(PICTURE).wait_for(timeout=PATIENCE)
    page.locator(LIVE).first.wait_for(state="hidden", timeout=PATIENCE)


def test_a_notebook_that_is_not_trusted_shows_a_cleaned_picture(page: "Page", lab: Lab) -> None:
    path = write_notebook(lab.folder / "stranger.ipynb", ["1"])
    evil = '<div class="nbc-panel">nodes<img src=x onerror="window.hacked=1"><script>window.hacked=1</script></div>'
    data = {WIDGET: {"model_id": "gone"}, PLACE: {"version": 1}, "text/html": evil, "text/plain": "nodes"}
    notebook = nbformat.read(path, 4)
    notebook.cells[0].outputs = [nbformat.v4.new_output("display_data", data)]
    nbformat.write(notebook, path)
    open_next_notebook(page, "stranger.ipynb")
    page.get_by_text("nodes", exact=True).wait_for(timeout=PATIENCE)
    assert page.get_by_text(NOT_FOUND).count() == 0
    assert page.evaluate("window.hacked") is None
