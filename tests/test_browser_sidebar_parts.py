"""Folding, rarer buttons, copying, logs, notifications and reports of the sidebar, and the launcher's tile, in a real
JupyterLab with a real cluster.

The tests are one lesson in the order of the file: each goes on where the one before it ended.
"""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests import axe
from tests.browser import (
    PATIENCE,
    Lab,
    browser_page,
    lab_with_extension,
    needs_extension,
    open_notebook,
    shut_down_kernels,
    wait_for_kernel,
    write_notebook,
)
from tests.conftest import wait_until
from tests.sidebar_page import (
    CLUSTER,
    cluster,
    node,
    press_and_confirm,
    press_key,
    run_cell,
    show_more,
    show_sidebar,
    sources,
    unfold,
    use_theme,
    wait_for_round,
)

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = needs_extension

START = f"%load_ext notebook_cluster\n%cluster start {CLUSTER} --local 3 --no-panel"
WRITE = r"""%%on_all
import os
with open(f"pid-{nc.node()}", "w") as file:
    file.write(str(os.getpid()))
os.write(2, b"  \x1b[31m<b>red</b>\x1b[0m <img src=x onerror='window.hacked=1'>\n" + b"x" * 5000 + b"\nthe end\n")
"""
TRAIN = """%%on_all
import os, time, torch
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
sync = nc.DiLoCo(model, every=5, name="digits")
while not os.path.exists("enough"):
    with torch.no_grad():
        model.weight -= 0.001
    sync.step(loss=float(model.weight.abs().sum()), samples=8)
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_with_extension(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator["Page"]:
    """A notebook with a cluster of three nodes, and the sidebar open beside it."""
    from playwright.sync_api import Error

    # Otherwise a test is not disturbed by what is told.
    told_in = lab.settings / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    told_in.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    with browser_page(lab) as opened:
        opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
        write_notebook(lab.folder / "lesson.ipynb", [START, WRITE, TRAIN])
        open_notebook(opened, "lesson.ipynb")
        run_cell(opened, 0)
        show_sidebar(opened)
        cluster(opened).get_by_role("listitem").nth(2).wait_for(timeout=PATIENCE)
        run_cell(opened, 1)
        wait_until(lambda: (lab.folder / "pid-local-3").exists(), 60, "all nodes")
        wait_for_kernel(opened)
        yield opened
        with contextlib.suppress(Error):
            shut_down_kernels(opened)


def fold(page: "Page") -> "Locator":
    """The button with the cluster's name."""
    return cluster(page).get_by_role("button", name=CLUSTER, exact=True)


def reload(page: "Page") -> None:
    page.reload()
    show_sidebar(page)
    cluster(page).wait_for(timeout=PATIENCE)


def told(page: "Page") -> list[str]:
    """Every notification of this page, also those that are hidden again."""
    page.evaluate("void window.jupyterapp.commands.execute('apputils:display-notifications')")
    page.locator(".jp-Notification-Header").wait_for(timeout=PATIENCE)
    texts = [one.inner_text() for one in page.locator(".jp-Notification-List .Toastify__toast").all()]
    page.evaluate("void window.jupyterapp.commands.execute('apputils:display-notifications')")
    page.locator(".jp-Notification-Header").wait_for(state="detached", timeout=PATIENCE)
    return [" ".join(text.split()) for text in texts]


def test_a_cluster_is_folded_with_the_keyboard_and_is_so_after_a_reload(page: "Page") -> None:
    assert fold(page).get_attribute("aria-expanded") == "true"
    press_key(fold(page), "Enter")
    cluster(page).get_by_role("listitem").first.wait_for(state="detached", timeout=PATIENCE)
    reload(page)
    assert fold(page).get_attribute("aria-expanded") == "false"
    assert "3 nodes" in cluster(page).inner_text()
    press_key(fold(page), "Space")
    node(page, "local-3").wait_for(timeout=PATIENCE)


def test_rarer_buttons_are_behind_more_and_what_ends_the_cluster_is_last(page: "Page") -> None:
    names = [button.inner_text() for button in cluster(page).locator(".nbc-side-buttons button").all()]
    assert names == ["Dashboard", "More …"]
    press_key(cluster(page).get_by_role("button", name="More …"), "Enter")
    assert cluster(page).get_by_role("button", name="Less", exact=True).get_attribute("aria-expanded") == "true"
    names = [button.inner_text() for button in cluster(page).locator(".nbc-side-more button").all()]
    assert (names[0], names[-1]) == ("Insert cell", "Stop cluster")


def test_the_line_of_an_invitation_is_copied_with_a_click(page: "Page") -> None:
    show_more(cluster(page))
    cluster(page).get_by_role("button", name="Invite").click()
    copy = cluster(page).get_by_role("button", name=f"Copy the line that joins {CLUSTER}")
    copy.click(timeout=PATIENCE)
    cluster(page).get_by_role("button", name=f"Copied: the line that joins {CLUSTER}").wait_for(timeout=PATIENCE)
    line = page.evaluate("navigator.clipboard.readText()")
    assert re.fullmatch(r"notebook-cluster share --dial \S+:\d+ --code \w+-\w+-\w+", line)
    assert line == cluster(page).locator(".nbc-side-copied code").inner_text()
    cluster(page).get_by_role("button", name="End invitation").click()
    cluster(page).locator(".nbc-side-copied").wait_for(state="detached", timeout=PATIENCE)


def test_the_log_of_each_node_is_text_in_a_tab_of_the_dashboard(page: "Page") -> None:
    cluster(page).get_by_role("button", name="Dashboard").click()
    page.get_by_role("tab", name="Overview").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("combobox", name="Node").select_option("local-2")
    log = page.get_by_role("region", name="log of local-2")
    log.wait_for(timeout=PATIENCE)
    lines = log.inner_text().splitlines()
    assert lines[-3] == "  <b>red</b> <img src=x onerror='window.hacked=1'>"
    assert (len(lines[-2]), lines[-1]) == (2000, "the end")
    assert log.locator("b, img").count() == 0
    assert page.evaluate("window.hacked") is None
    page.get_by_role("button", name="Refresh the log of local-2").click()
    page.get_by_role("button", name="Copy the log of local-2").wait_for(timeout=PATIENCE)


@pytest.mark.skipif(not axe.SCRIPT.exists(), reason="no axe-core: npm ci in labextension/")
@pytest.mark.parametrize("theme", axe.THEMES)
def test_everyone_can_use_buttons_and_logs(page: "Page", theme: str) -> None:
    use_theme(page, theme)
    for zoom in (1, 2):
        assert axe.violations(page, ".nbc-side:not(.nbc-dash)", zoom) == []
        assert axe.violations(page, ".nbc-dash", zoom) == []


def test_that_a_kernel_was_killed_is_told_once_also_in_mid_training(page: "Page", lab: Lab) -> None:
    page.evaluate("window.jupyterapp.shell.currentWidget.close()")
    run_cell(page, 2)
    wait_for_round(page, 2)
    os.kill(int((lab.folder / "pid-local-3").read_text()), signal.SIGKILL)
    text = f"Node local-3 of cluster {CLUSTER} is dead: killed by SIGKILL"
    toast = page.locator(".Toastify__toast", has_text=text)
    toast.wait_for(timeout=PATIENCE)
    assert toast.get_by_role("button", name="Dashboard").count() == 1
    node(page, "local-3").get_by_text("killed by SIGKILL").wait_for(timeout=PATIENCE)
    assert [one for one in told(page) if one.startswith("Node ")] == told(page)
    assert len(told(page)) == 1


def test_that_training_ended_is_told_and_nothing_of_before_when_the_page_is_loaded_again(
    page: "Page", lab: Lab
) -> None:
    reload(page)
    node(page, "local-3").get_by_text("killed by SIGKILL").wait_for(timeout=PATIENCE)
    assert told(page) == []
    (lab.folder / "enough").touch()
    toast = page.locator(".Toastify__toast", has_text=f"Training of digits in cluster {CLUSTER}")
    toast.wait_for(timeout=PATIENCE)
    assert re.search(r"has ended without local-3 after .*\d s, round \d+", toast.inner_text())
    assert len(told(page)) == 1


def test_a_node_that_somebody_restarts_is_not_told_as_lost(page: "Page") -> None:
    before = told(page)
    press_and_confirm(
        node(page, "local-2").get_by_role("button", name="Restart local-2"),
        node(page, "local-2").get_by_role("button", name="Really restart local-2?"),
    )
    page.get_by_role("listitem", name=re.compile("^node local-2, (starting|replaying)")).wait_for(timeout=PATIENCE)
    page.get_by_role("listitem", name="node local-2, ok").wait_for(timeout=PATIENCE)
    assert told(page) == before


def test_a_cluster_that_has_ended_has_a_report_and_goes_from_the_list(page: "Page") -> None:
    show_more(cluster(page))
    press_and_confirm(
        cluster(page).get_by_role("button", name="Stop cluster"),
        cluster(page).get_by_role("button", name=f"Really stop cluster {CLUSTER} and end all its kernels?"),
    )
    report = cluster(page).get_by_role("button", name=f"Report of {CLUSTER}")
    report.wait_for(timeout=PATIENCE)
    unfold(page)
    cluster(page).get_by_text(f"cluster '{CLUSTER}' has ended: stopped").wait_for(timeout=PATIENCE)
    report.click()
    frame = page.frame_locator(f'iframe[title="Report of cluster {CLUSTER}"]')
    frame.get_by_role("heading", name=CLUSTER, exact=True).wait_for(timeout=PATIENCE)
    assert frame.get_by_text("killed by SIGKILL").count() > 0
    assert page.locator("iframe").get_attribute("sandbox") == ""
    assert axe.violations(page, ".nbc-side:not(.nbc-dash)") == []
    cluster(page).get_by_role("button", name=f"Dismiss {CLUSTER}").click()
    cluster(page).wait_for(state="detached", timeout=PATIENCE)
    page.reload()
    show_sidebar(page)
    page.get_by_role("textbox", name="Name of a new cluster").wait_for(timeout=PATIENCE)
    assert cluster(page).count() == 0


def test_the_launcher_has_a_tile_for_a_notebook_that_starts_a_cluster(page: "Page") -> None:
    page.evaluate("void window.jupyterapp.commands.execute('launcher:create', { cwd: '' })")
    tile = page.locator(".jp-LauncherCard", has_text="Cluster Notebook")
    picture = tile.locator("img")
    picture.wait_for(timeout=PATIENCE)
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    tile.click()
    wanted = ["%load_ext notebook_cluster\n%cluster start", "%%on_all\n"]
    wait_until(lambda: is_notebook(page) and sources(page) == wanted, 60, "the new notebook with its cells")
    wait_for_kernel(page)
    assert page.evaluate("window.jupyterapp.shell.currentWidget.content.activeCellIndex") == 0


def is_notebook(page: "Page") -> bool:
    return bool(page.evaluate("Boolean(window.jupyterapp.shell.currentWidget?.content?.widgets)"))
