"""The sidebar's commands in JupyterLab's menu and palette, and its setting; and the sidebar with what no test cluster
does: HTML as names, curves without a number, failures of all kinds.

The pages' WebSockets end in the test, which sends what the server would and keeps what is asked of it.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests import axe
from tests.browser import PATIENCE, Lab, browser_page, lab_with_extension, needs_extension
from tests.conftest import wait_until
from tests.fake_cluster import cluster_view
from tests.shown_overviews import HTML, OTHER_VERSION, curves, overview, plain_overview, serve
from tests.sidebar_page import show_more, show_sidebar, unfold, use_theme

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_extension

COMMANDS = [
    "Show Clusters", "Cluster Dashboard", "New Cluster Notebook", "Insert Cluster Cell Below", "Open Class Page",
    "Stop Cell on All Nodes", "Detach from Running Cell", "Save Checkpoint Now", "Stop Cluster",
]  # fmt: skip
REFUSED = "no checkpoint: the disk of 'desk' is <b>full</b>"

Asked = list[dict[str, Any]]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_with_extension(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def asked() -> Asked:
    """The actions that the page asked for."""
    return []


@pytest.fixture(scope="module")
def page(lab: Lab, asked: Asked) -> Iterator["Page"]:
    """JupyterLab, to which a server shows that cluster ``digits`` runs a cell; checkpoints fail."""

    def answer(action: dict[str, Any]) -> str:
        asked.append(action)
        return REFUSED if action["action"] == "checkpoint" else ""

    with browser_page(lab) as opened:
        serve(opened, [plain_overview()], answer)
        opened.goto("/lab")
        opened.locator(".nbc-side-status").wait_for(timeout=PATIENCE)
        # JupyterLab opens its launcher last and gives it the focus, without which the palette closes.
        opened.locator(".jp-Launcher:focus").wait_for(timeout=PATIENCE)
        yield opened


def open_menu(page: "Page") -> None:
    page.get_by_role("menuitem", name="Cluster", exact=True).click()
    page.locator(".lm-Menu").wait_for(timeout=PATIENCE)


def choose(page: "Page", command: str) -> None:
    """Click ``command`` in the menu."""
    open_menu(page)
    page.locator(".lm-Menu-item").filter(has_text=command).click()


def wait_for_action(asked: Asked, action: str) -> dict[str, Any]:
    wait_until(lambda: asked and asked[-1]["action"] == action, 60, lambda: f"{action} in {asked}")
    return asked[-1]


def test_the_menu_has_all_commands_and_those_that_need_a_notebook_are_off_without_one(page: "Page") -> None:
    open_menu(page)
    assert page.locator(".lm-Menu-itemLabel").all_inner_texts() == COMMANDS
    off = page.locator(".lm-Menu-item.lm-mod-disabled .lm-Menu-itemLabel")
    assert off.all_inner_texts() == ["Insert Cluster Cell Below"]
    page.keyboard.press("Escape")


def test_a_command_of_the_menu_acts_on_the_cluster_that_runs_a_cell(page: "Page", asked: Asked) -> None:
    choose(page, "Stop Cell on All Nodes")
    assert wait_for_action(asked, "interrupt")["cluster"] == "digits"
    choose(page, "Detach from Running Cell")
    assert wait_for_action(asked, "detach")["cluster"] == "digits"


def test_the_palette_has_them_too_and_what_failed_is_said_as_text(page: "Page", asked: Asked) -> None:
    page.keyboard.press("ControlOrMeta+Shift+c")
    search = page.locator(".jp-ModalCommandPalette input")
    search.fill("cluster")
    found = page.locator(".jp-ModalCommandPalette .lm-CommandPalette-itemLabel")
    wait_until(lambda: set(COMMANDS) <= set(found.all_inner_texts()), 60, lambda: str(found.all_inner_texts()))
    search.fill("Save Checkpoint Now")
    page.keyboard.press("Enter")
    action = wait_for_action(asked, "checkpoint")
    assert (action["cluster"], action["target"]) == ("digits", cluster_view().jobs[0].name)
    page.locator(".jp-Dialog").get_by_text(REFUSED).wait_for(timeout=PATIENCE)
    page.locator(".jp-Dialog").get_by_text("Save Checkpoint Now: digits").wait_for(timeout=PATIENCE)
    # The palette that fades out may be in a click's way.
    page.locator(".jp-Dialog").get_by_role("button").press("Enter")
    page.locator(".jp-Dialog").wait_for(state="detached", timeout=PATIENCE)


def test_the_cluster_is_stopped_by_command_only_after_a_question(page: "Page", asked: Asked) -> None:
    before = len(asked)
    choose(page, "Stop Cluster")
    page.get_by_text("Stop cluster digits?").wait_for(timeout=PATIENCE)
    page.locator(".jp-Dialog").get_by_role("button", name="Cancel").click()
    page.locator(".jp-Dialog").wait_for(state="detached", timeout=PATIENCE)
    assert len(asked) == before
    choose(page, "Stop Cluster")
    page.locator(".jp-Dialog").get_by_role("button", name="Stop Cluster").click()
    assert wait_for_action(asked, "stop")["cluster"] == "digits"


def test_dashboard_and_sidebar_open_by_command_and_by_the_line_in_the_status_bar(page: "Page") -> None:
    choose(page, "Cluster Dashboard")
    page.get_by_role("region", name="dashboard of digits").wait_for(timeout=PATIENCE)
    facts = page.locator(".nbc-dash-facts").inner_text()
    assert "Round" in facts
    assert "less than data parallel" in facts
    assert "Samples/s" in facts
    assert page.get_by_role("region", name="Rounds, and who was waited for").get_by_role("listitem").count() == 2
    side = page.get_by_role("region", name="cluster digits")
    page.evaluate("window.jupyterapp.shell.collapseLeft()")
    side.wait_for(state="hidden", timeout=PATIENCE)
    choose(page, "Show Clusters")
    side.wait_for(timeout=PATIENCE)
    page.evaluate("window.jupyterapp.shell.collapseLeft()")
    side.wait_for(state="hidden", timeout=PATIENCE)
    page.locator(".nbc-side-status").click()
    side.wait_for(timeout=PATIENCE)


def test_a_node_that_starts_or_replays_cells_has_not_the_colour_of_one_that_is_lost(page: "Page") -> None:
    mark = page.locator(".nbc-side-mark").first
    colours = {}
    for condition in ("ok", "starting", "replaying", "suspect", "lost"):
        colours[condition] = mark.evaluate(
            """(mark, condition) => {
                const copy = mark.parentElement.appendChild(mark.cloneNode());
                copy.dataset.condition = condition;
                const { color } = getComputedStyle(copy);
                copy.remove();
                return color;
            }""",
            condition,
        )
    assert colours["starting"] == colours["replaying"]
    assert len(set(colours.values())) == 4


def test_the_line_in_the_status_bar_leaves_room_for_others_and_is_whole_on_hover(page: "Page") -> None:
    line = page.locator(".nbc-side-status")
    assert line.get_attribute("title") == f"{line.inner_text()}\nShow the clusters"
    line.evaluate("line => { line.style.fontSize = '60px' }")
    assert line.evaluate("line => line.offsetWidth < 0.46 * innerWidth && line.scrollWidth > line.clientWidth")
    line.evaluate("line => { line.style.fontSize = '' }")


def test_the_setting_takes_the_line_out_of_the_status_bar_and_puts_it_back(page: "Page", lab: Lab) -> None:
    page.evaluate("void window.jupyterapp.commands.execute('settingeditor:open', { query: 'Notebook cluster' })")
    box = page.get_by_role("checkbox", name="Show the cluster in the status bar")
    box.uncheck(timeout=PATIENCE)
    page.locator(".nbc-side-status").wait_for(state="hidden", timeout=PATIENCE)
    kept = lab.settings / "notebook-cluster" / "plugin.jupyterlab-settings"
    wait_until(lambda: kept.exists() and json.loads(kept.read_text())["showStatusBar"] is False, 60, "the setting")
    box.check()
    page.locator(".nbc-side-status").wait_for(timeout=PATIENCE)


@pytest.fixture(scope="module")
def errors() -> list[str]:
    """What went wrong in the page's own code."""
    return []


@pytest.fixture(scope="module")
def hostile(page: "Page", errors: list[str]) -> Iterator["Page"]:
    """A second page with the sidebar, :func:`overview` and :func:`curves`; every action fails with HTML."""
    opened = page.context.new_page()
    opened.on("pageerror", lambda error: errors.append(str(error)))
    serve(opened, [overview(), curves()], lambda action: f"no: {HTML}")
    opened.goto("/lab")
    show_sidebar(opened)
    opened.locator(".nbc-side-cluster").nth(2).wait_for(timeout=PATIENCE)
    yield opened
    opened.close()


def assert_is_text(page: "Page", part: str) -> None:
    """HTML is there as text and nowhere as elements."""
    assert HTML in page.locator(part).inner_text()
    assert page.locator(f"{part} :is(img, b:not(.nbc-side-shared b, [data-level] b))").count() == 0
    assert page.evaluate("window.hacked") is None


def test_names_with_html_are_text_in_the_sidebar(hostile: "Page") -> None:
    assert_is_text(hostile, ".nbc-side-all")
    assert hostile.locator(".nbc-side-node").count() == 8
    assert "NaN" not in hostile.locator(".nbc-side-all").inner_html()


def test_names_with_html_are_text_in_what_failed(hostile: "Page") -> None:
    show_more(hostile.locator(".nbc-side-cluster"))
    hostile.get_by_role("button", name="Detach").click()
    alert = hostile.locator(".nbc-side-cluster").get_by_role("alert")
    alert.wait_for(timeout=PATIENCE)
    assert alert.inner_text().startswith(f"no: {HTML}")
    assert_is_text(hostile, ".nbc-side-all")


def test_a_curve_has_gaps_where_it_has_no_number_and_one_without_any_is_not_drawn(hostile: "Page") -> None:
    def drawn(name: str) -> list[str | None]:
        item = hostile.get_by_role("listitem", name=f"node {name},")
        return [path.get_attribute("d") for path in item.locator(".nbc-side-spark path").all()]

    (first,) = drawn(HTML)
    assert first is not None
    assert (first.count("M"), first.count("L")) == (2, 2)
    assert drawn("node-1") == []


def test_clusters_of_another_version_and_ended_ones_say_so_and_cannot_be_acted_on(hostile: "Page") -> None:
    unfold(hostile, "gone")
    for name, said, buttons in (
        ("old", OTHER_VERSION, ["old"]),
        ("gone", "cluster 'gone' has ended: stopped", ["gone", "Report", "Dismiss"]),
    ):
        part = hostile.get_by_role("region", name=f"cluster {name}")
        assert said in part.inner_text()
        assert part.get_by_role("button").all_inner_texts() == buttons


def test_the_dashboard_shows_the_same_as_text(hostile: "Page") -> None:
    hostile.get_by_role("button", name="Dashboard").click()
    hostile.get_by_role("img", name="Loss over 4 s, from 1.0000 to 3.0000").wait_for(timeout=PATIENCE)
    assert_is_text(hostile, ".nbc-dash")
    assert hostile.locator(".nbc-dash-table tbody tr").count() == 8
    assert "NaN" not in hostile.locator(".nbc-dash").inner_html()
    assert "No values yet." in hostile.locator(".nbc-dash-chart").filter(has_text="Memory").inner_text()


@pytest.mark.skipif(not axe.SCRIPT.exists(), reason="no axe-core: npm ci in labextension/")
@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_everyone_can_read_what_is_wrong(hostile: "Page", theme: str) -> None:
    use_theme(hostile, theme)
    hostile.locator(".nbc-side-node").first.get_by_role("button").last.click()  # asks once more, in red
    for part in (".nbc-side:not(.nbc-dash)", ".nbc-dash"):
        assert axe.violations(hostile, part) == []


def test_nothing_went_wrong_in_the_page(hostile: "Page", errors: list[str]) -> None:
    assert hostile.evaluate("window.hacked") is None
    assert errors == []
