"""The sidebar in a real JupyterLab: a real cluster of two nodes, a peer of somebody else that is found on the network.

The tests are one lesson in the order of the file: each goes on where the one before it ended.
"""

import contextlib
import os
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import (
    CHROMIUM,
    Lab,
    browser_page,
    open_notebook,
    running_lab,
    shut_down_kernels,
    wait_for_kernel,
    write_notebook,
)
from tests.conftest import MARK, end_processes, marked_processes, wait_until
from tests.strangers import Stranger, running_strangers

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

EXTENSION = Path(__file__).parents[1] / "notebook_cluster" / "labextension"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no {CHROMIUM}: apt-get install chromium"),
    pytest.mark.skipif(not (EXTENSION / "schemas").exists(), reason="not built: make labextension"),
]

PATIENCE = 60_000
MARK_OF_LAB = uuid.uuid4().hex
START = "%load_ext notebook_cluster\n%cluster start lesson --local 2 --no-panel"
TRAIN = """%%on_all
import itertools, time
for step in itertools.count():
    nc.report(step=step, loss=2.0 / (1 + step / 50))
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab with the extension as it was built, whatever is installed; nothing that it started is left."""
    folder = tmp_path_factory.mktemp("lab")
    extensions = folder / "share" / "labextensions"
    extensions.mkdir(parents=True)
    (extensions / "notebook-cluster").symlink_to(EXTENSION)
    try:
        with running_lab(folder, {"JUPYTER_PATH": str(extensions.parent), MARK: MARK_OF_LAB}) as running:
            yield running
        wait_until(lambda: not marked_processes(MARK_OF_LAB), 20, lambda: f"the end of {marked_processes(MARK_OF_LAB)}")
    finally:
        end_processes(marked_processes(MARK_OF_LAB))


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    with running_strangers(tmp_path_factory.mktemp("peers")) as strangers:
        stranger = strangers("mini")
        assert stranger.code
        yield stranger


@pytest.fixture(scope="module")
def page(lab: Lab, mini: Stranger) -> Iterator["Page"]:
    """A notebook with a cluster of two nodes, and the sidebar open beside it."""
    from playwright.sync_api import Error

    with browser_page(lab) as opened:
        write_notebook(lab.folder / "lesson.ipynb", [START, TRAIN])
        open_notebook(opened, "lesson.ipynb")
        run_cell(opened, 0)
        show_sidebar(opened)
        cluster(opened).get_by_role("listitem").nth(1).wait_for(timeout=PATIENCE)
        yield opened
        with contextlib.suppress(Error):  # the last test ends the server, and with it the kernels
            shut_down_kernels(opened)


def run_cell(page: "Page", cell: int) -> None:
    """Start cell ``cell`` (from 0)."""
    page.evaluate(
        """cell => {
            const { commands, shell } = window.jupyterapp;
            shell.currentWidget.content.activeCellIndex = cell;
            void commands.execute('notebook:run-cell');
        }""",
        cell,
    )


def show_sidebar(page: "Page") -> None:
    """Open it, once JupyterLab has put its parts where they were."""
    page.wait_for_function("window.jupyterapp?.commands?.hasCommand('notebook-cluster:show')", timeout=PATIENCE)
    page.evaluate(
        "window.jupyterapp.restored.then(() => void window.jupyterapp.commands.execute('notebook-cluster:show'))"
    )


def cluster(page: "Page") -> "Locator":
    return page.get_by_role("region", name="cluster lesson")


def peer(page: "Page", name: str) -> "Locator":
    return page.get_by_role("listitem", name=f"peer {name}", exact=True)


def node(page: "Page", name: str) -> "Locator":
    return cluster(page).get_by_role("listitem", name=re.compile(rf"^node {re.escape(name)},"))


def wait_for_other_text(page: "Page", found: "Locator") -> None:
    """Wait until the text of ``found`` has changed twice."""
    for _ in range(2):
        before = found.inner_text()
        wait_until(lambda before=before: found.inner_text() != before, 30, f"another text than {before!r}")


def test_a_wrong_code_is_said_beside_the_peer_and_the_right_one_adds_it(page: "Page", mini: Stranger) -> None:
    row = peer(page, mini.name)
    row.wait_for(timeout=PATIENCE)
    field = row.get_by_role("textbox", name=f"Code that {mini.name} shows")
    field.fill("wrong-words-000")
    field.press("Enter")
    row.get_by_role("alert").wait_for(timeout=PATIENCE)
    assert "was not paired: the code 'wrong-words-000' is wrong" in row.get_by_role("alert").inner_text()
    field.fill(mini.code)
    row.get_by_role("button", name=f"Add {mini.name} to lesson").click()
    row.get_by_text("in lesson").wait_for(timeout=PATIENCE)
    page.get_by_role("listitem", name=f"node {mini.name}, ok").wait_for(timeout=PATIENCE)


def test_loss_and_memory_move_while_the_cell_runs(page: "Page") -> None:
    run_cell(page, 1)
    for name in ("local", "local-2"):
        wait_for_other_text(page, node(page, name).locator(".nbc-side-loss"))
        node(page, name).locator(".nbc-side-spark path").wait_for(state="attached", timeout=PATIENCE)
        assert re.fullmatch(r"\d.* MB of .* GB", node(page, name).get_by_role("meter").inner_text().strip())
    assert re.match(r"lesson: cell \d+ running · 3 nodes · loss ", page.locator(".nbc-side-status").inner_text())


def test_it_goes_on_after_a_reload_in_mid_cell_with_the_whole_curve(page: "Page") -> None:
    page.reload()
    show_sidebar(page)  # JupyterLab saves a moment later which sidebar is open
    spark = node(page, "local").locator(".nbc-side-spark path")
    spark.wait_for(state="attached", timeout=PATIENCE)
    assert spark.get_attribute("d").count("L") > 3  # type: ignore[union-attr]
    wait_for_other_text(page, node(page, "local").locator(".nbc-side-loss"))


def test_it_goes_on_while_the_kernel_restarts_and_detach_and_stop_are_a_click(page: "Page") -> None:
    cluster(page).get_by_role("button", name="Detach").click()
    wait_for_kernel(page)
    wait_for_other_text(page, node(page, "local").locator(".nbc-side-loss"))
    page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    wait_for_other_text(page, node(page, "local").locator(".nbc-side-loss"))
    cluster(page).get_by_role("button", name="Stop cell").click()
    wait_until(lambda: "running" not in cluster(page).locator("h3").inner_text(), 30, "the end of the cell")


def test_the_tab_of_a_cluster_shows_curves_nodes_and_events(page: "Page", mini: Stranger) -> None:
    cluster(page).get_by_role("button", name="Dashboard").click()
    page.get_by_role("img", name=re.compile("^Loss over ")).wait_for(timeout=PATIENCE)
    page.get_by_role("img", name=re.compile("^Memory over ")).wait_for(timeout=PATIENCE)
    assert page.locator(".nbc-dash-table tbody tr").count() == 3
    assert mini.name in page.locator(".nbc-dash-events").inner_text()
    page.evaluate("window.jupyterapp.shell.currentWidget.close()")


def test_a_cluster_cell_is_put_below_the_active_one(page: "Page") -> None:
    page.evaluate("window.jupyterapp.commands.execute('notebook-cluster:insert-cell')")
    source = "window.jupyterapp.shell.currentWidget.content.activeCell.model.sharedModel.getSource()"
    assert page.evaluate(source) == "%%on_all\n"


def test_a_node_is_removed_after_a_second_click(page: "Page", mini: Stranger) -> None:
    row = node(page, mini.name)
    row.get_by_role("button", name=f"Remove {mini.name}").click()
    row.get_by_role("button", name="Remove?").click()
    row.wait_for(state="detached", timeout=PATIENCE)


def test_the_cluster_is_stopped_after_a_second_click(page: "Page") -> None:
    cluster(page).get_by_role("button", name="Stop cluster").click()
    cluster(page).get_by_role("button", name="End all its kernels?").click()
    cluster(page).get_by_role("button", name="Stop cluster").wait_for(state="detached", timeout=PATIENCE)
    assert page.locator(".nbc-side-status").count() == 0


def test_a_banner_says_that_the_server_is_gone_and_nothing_can_be_pressed(page: "Page", lab: Lab) -> None:
    assert page.locator(".nbc-side-banner").count() == 0
    (server,) = [pid for pid, command in marked_processes(MARK_OF_LAB).items() if f"root_dir={lab.folder}" in command]
    os.kill(server, signal.SIGTERM)
    page.get_by_text("No connection to the Jupyter server.").wait_for(timeout=PATIENCE)
    assert page.get_by_role("button", name="Try now").is_enabled()
    assert page.get_by_role("switch").is_disabled()
