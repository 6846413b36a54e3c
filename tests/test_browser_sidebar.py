"""The sidebar in a real JupyterLab: a cluster of three nodes trains, with two peers of other people on the network.

The tests are one lesson in the order of the file: each goes on where the one before it ended.
"""

import contextlib
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
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
    restart_kernel,
    shut_down_kernels,
    stop_clusters,
    wait_for_kernel,
    write_notebook,
)
from tests.conftest import wait_until
from tests.sidebar_page import (
    CLUSTER,
    close_dialogs,
    cluster,
    loss,
    node,
    peer,
    press_and_confirm,
    round_number,
    run_cell,
    show_more,
    show_sidebar,
    sources,
    unfold,
    use_theme,
    wait_for_other_text,
    wait_for_round,
)
from tests.strangers import Strangers, running_strangers

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_extension

MARK_OF_LAB = uuid.uuid4().hex
START = f"%load_ext notebook_cluster\n%cluster start {CLUSTER} --local 2 --no-panel"
TRAIN = """%%on_all
import itertools, time
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(16, 1)
sync = nc.DiLoCo(model, every=10)
for step in itertools.count():
    x = torch.randn(32, 16)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():  # by hand: to import torch.optim takes as long as torch itself
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter -= 0.001 * gradient
    sync.step(loss=loss.item(), samples=len(x))
    nc.report(step=step, error=loss.item() ** 0.5)
    time.sleep(0.04)
"""
ATTACH = f"%load_ext notebook_cluster\n%cluster attach {CLUSTER}"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_with_extension(tmp_path_factory.mktemp("lab"), MARK_OF_LAB) as running:
        yield running


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Strangers]:
    """``mini`` and ``attic``, which show their codes."""
    with running_strangers(tmp_path_factory.mktemp("peers")) as started:
        started("mini")
        started("attic")
        assert all(stranger.code for stranger in started.all)
        yield started


@pytest.fixture(scope="module")
def mini(strangers: Strangers) -> str:
    return strangers.unique("mini")


@pytest.fixture(scope="module")
def page(lab: Lab, strangers: Strangers) -> Iterator["Page"]:
    """A notebook with a cluster of two nodes, and the sidebar open beside it."""
    from playwright.sync_api import Error

    with browser_page(lab) as opened:
        write_notebook(lab.folder / "lesson.ipynb", [START, TRAIN])
        open_notebook(opened, "lesson.ipynb")
        run_cell(opened, 0)
        show_sidebar(opened)
        cluster(opened).get_by_role("listitem").nth(1).wait_for(timeout=PATIENCE)
        yield opened
        with contextlib.suppress(Error):  # the server was ended, and with it the kernels
            shut_down_kernels(opened)
        stop_clusters(lab)


def test_both_peers_are_seen_and_wrong_codes_are_said_beside_the_one_that_they_were_for(
    page: "Page", strangers: Strangers, mini: str
) -> None:
    for stranger in strangers.all:
        peer(page, stranger.name).wait_for(timeout=PATIENCE)
    row = peer(page, mini)
    field = row.get_by_role("textbox", name=f"Code that {mini} shows")
    left = []
    for code in ("wrong-words-0", "wrong-words-1", "wrong-words-2"):
        field.fill(code)
        field.press("Enter")
        said = row.get_by_role("alert").get_by_text(f"{mini} was not paired: the code '{code}' is wrong at {mini}")
        said.wait_for(timeout=PATIENCE)
        left.append(int(re.findall(r"(\d+) tries left", said.inner_text())[0]))
    assert 20 > left[0] > left[1] > left[2]
    assert peer(page, strangers.unique("attic")).get_by_role("alert").count() == 0


def test_a_peer_is_added_with_a_click(page: "Page", strangers: Strangers, mini: str) -> None:
    row = peer(page, mini)
    row.get_by_role("textbox", name=f"Code that {mini} shows").fill(strangers.all[0].code)
    row.get_by_role("button", name=f"Add {mini} to {CLUSTER}").click()
    row.get_by_text(f"in {CLUSTER}").wait_for(timeout=PATIENCE)
    page.get_by_role("listitem", name=f"node {mini}, ok").wait_for(timeout=PATIENCE)
    assert peer(page, strangers.unique("attic")).get_by_role("textbox").count() == 1


def test_a_cluster_is_dragged_into_the_notebook_as_cells(page: "Page") -> None:
    name = cluster(page).locator(".nbc-mod-pulled").bounding_box()
    last = page.locator(".jp-Notebook-footer").bounding_box()
    assert name is not None
    assert last is not None
    page.mouse.move(name["x"] + 5, name["y"] + 5)
    page.mouse.down()
    page.mouse.move(name["x"] + 40, name["y"] + 40, steps=3)
    page.locator(".nbc-side-drag").wait_for(timeout=PATIENCE)
    page.mouse.move(last["x"] + 200, last["y"] + last["height"] / 2, steps=5)
    page.mouse.up()
    wait_until(lambda: len(sources(page)) == 4, 60, "two more cells")
    assert sources(page)[2:] == [ATTACH, "%%on_all\n"]
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")


def test_rounds_loss_and_memory_move_while_the_cell_trains(page: "Page", mini: str) -> None:
    names = ("local", "local-2", mini)
    before = {name: node(page, name).get_by_role("meter").inner_text() for name in names}
    run_cell(page, 1)
    wait_for_round(page, 2)
    for name in names:
        wait_for_other_text(loss(page, name))
        node(page, name).locator(".nbc-side-spark path").wait_for(state="attached", timeout=PATIENCE)
        used = node(page, name).get_by_role("meter").inner_text()
        assert re.fullmatch(r"\d.* MB of .* GB", used.strip())
        assert used != before[name]  # it holds torch now
    text = page.locator(".nbc-side-status").inner_text()
    assert re.match(rf"{CLUSTER}: cell \d+ running · 3 nodes · round \d+ · loss \d", text)


def test_the_model_that_trains_is_saved_with_a_click(page: "Page") -> None:
    show_more(cluster(page))
    cluster(page).get_by_role("button", name="Checkpoint").click()
    node(page, "local").get_by_text("✓ checkpoint model-round-").wait_for(timeout=PATIENCE)


def test_it_goes_on_after_a_reload_in_mid_cell_with_the_whole_curve(page: "Page") -> None:
    page.reload()
    show_sidebar(page)  # JupyterLab saves a moment later which sidebar is open
    spark = node(page, "local").locator(".nbc-side-spark path")
    spark.wait_for(state="attached", timeout=PATIENCE)
    assert spark.get_attribute("d").count("L") > 3  # type: ignore[union-attr]
    wait_for_other_text(loss(page, "local"))


def test_it_goes_on_while_the_notebooks_kernel_restarts_in_mid_cell(page: "Page") -> None:
    before = round_number(page)
    restart_kernel(page)
    wait_for_other_text(loss(page, "local"))
    wait_for_round(page, before + 1)


def test_the_cell_that_waits_in_the_notebook_is_freed_with_a_click(page: "Page") -> None:
    run_cell(page, sources(page).index(ATTACH))
    wait_for_kernel(page, "busy")
    page.locator(".jp-OutputArea").get_by_text("attached to cluster").wait_for(timeout=PATIENCE)
    cluster(page).get_by_role("button", name="Detach").click()
    wait_for_kernel(page)
    wait_for_other_text(loss(page, "local"))


def connect_only_after_a_click(page: "Page") -> None:
    """The sidebar's own tries fail from now on until "Try now" is pressed: else one may be faster than the test."""
    page.evaluate(
        """() => {
            const settings = window.jupyterapp.serviceManager.serverSettings;
            const Real = settings.WebSocket;
            settings.WebSocket = class extends Real {
                constructor(url, protocols) {
                    super(url.includes('/notebook-cluster/') ? 'ws://127.0.0.1:1/' : url, protocols);
                }
            };
            const pressed = event => {
                if (event.target.closest('.nbc-side-banner button')) {
                    settings.WebSocket = Real;
                    document.removeEventListener('click', pressed, true);
                }
            };
            document.addEventListener('click', pressed, true);
        }"""
    )


def test_a_banner_says_that_the_server_is_gone_until_it_is_back(page: "Page", lab: Lab) -> None:
    assert page.locator(".nbc-side-banner").count() == 0
    before = round_number(page)
    lab.end()
    page.get_by_text("No connection to the Jupyter server.").wait_for(timeout=PATIENCE)
    assert page.get_by_role("button", name="Try now").is_enabled()
    assert page.get_by_role("switch").is_disabled()
    assert cluster(page).get_by_role("button", name="Stop cell").is_disabled()
    assert node(page, "local").count() == 1  # what was known stays
    connect_only_after_a_click(page)
    lab.start()
    close_dialogs(page)
    page.get_by_role("button", name="Try now").click()
    page.locator(".nbc-side-banner").wait_for(state="detached", timeout=PATIENCE)
    assert page.get_by_role("switch").is_enabled()
    wait_for_round(page, before + 1)
    wait_for_other_text(loss(page, "local"))


@pytest.mark.skipif(not axe.SCRIPT.exists(), reason="no axe-core: npm ci in labextension/")
@pytest.mark.parametrize("theme", axe.THEMES)
def test_everyone_can_use_sidebar_and_dashboard(page: "Page", theme: str) -> None:
    close_dialogs(page)
    use_theme(page, theme)
    name = page.get_by_role("textbox", name="Name of a new cluster")
    name.fill(CLUSTER)
    page.get_by_text(f"{CLUSTER} runs already").wait_for(timeout=PATIENCE)
    cluster(page).get_by_role("button", name="Dashboard").click()
    page.get_by_role("img", name=re.compile("^Loss over ")).wait_for(timeout=PATIENCE)
    for part in (".nbc-side:not(.nbc-dash)", ".nbc-dash", ".nbc-side-status"):
        assert axe.violations(page, part) == []
        # In half the width JupyterLab has no room for its status bar.
        assert part == ".nbc-side-status" or axe.violations(page, part, zoom=2) == []
    name.fill("")
    page.evaluate("window.jupyterapp.shell.currentWidget.close()")


def test_the_tab_of_a_cluster_shows_curves_nodes_and_events(page: "Page", mini: str) -> None:
    cluster(page).get_by_role("button", name="Dashboard").click()
    page.get_by_role("img", name=re.compile("^Loss over ")).wait_for(timeout=PATIENCE)
    page.get_by_role("img", name=re.compile("^Memory over ")).wait_for(timeout=PATIENCE)
    assert page.locator(".nbc-dash-table tbody tr").count() == 3
    events = page.locator("details", has_text="Events")
    assert not events.locator(".nbc-dash-events").is_visible()
    events.locator("summary").press("Enter")
    events.locator(".nbc-dash-events").wait_for(timeout=PATIENCE)
    assert mini in events.locator(".nbc-dash-events").inner_text()


def test_any_number_that_was_reported_is_chosen_in_that_tab_with_the_keyboard(page: "Page") -> None:
    listed = page.get_by_role("combobox", name="Number that the curves show")
    assert listed.locator("option").all_inner_texts() == ["Loss", "error"]
    listed.focus()
    page.keyboard.press("e")
    page.get_by_role("img", name=re.compile("^error by step ")).wait_for(timeout=PATIENCE)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save error as CSV").press("Enter")
    assert saved.value.suggested_filename == "error.csv"
    lines = Path(saved.value.path()).read_text().splitlines()
    assert lines[0] == "line,step,time,value"
    assert {line.split(",")[0] for line in lines[1:]} >= {"local", "local-2"}
    listed.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.get_by_role("checkbox", name="Logarithmic").is_checked()
    # It stays over a look at the logs.
    page.get_by_role("tab", name="Logs").click()
    page.get_by_role("tab", name="Overview").click()
    page.get_by_role("img", name=re.compile("^error by step ")).wait_for(timeout=PATIENCE)
    assert page.get_by_role("checkbox", name="Logarithmic").is_checked()
    page.evaluate("window.jupyterapp.shell.currentWidget.close()")


def test_the_cell_is_stopped_on_all_nodes_with_a_click(page: "Page") -> None:
    cluster(page).get_by_role("button", name="Stop cell").click()
    wait_until(lambda: "running" not in cluster(page).locator("h3").inner_text(), 60, "the end of the cell")


def test_a_cluster_cell_is_put_below_the_active_one(page: "Page") -> None:
    page.evaluate("window.jupyterapp.commands.execute('notebook-cluster:insert-cell')")
    source = "window.jupyterapp.shell.currentWidget.content.activeCell.model.sharedModel.getSource()"
    assert page.evaluate(source) == "%%on_all\n"


def test_this_machine_is_shared_with_a_switch_that_shows_code_and_picture(page: "Page") -> None:
    switch = page.get_by_role("switch", name="Share this machine")
    switch.click()
    shared = page.locator(".nbc-side-shared")
    shared.wait_for(timeout=PATIENCE)
    name = shared.locator("b").inner_text()
    code = shared.locator(".nbc-side-code").inner_text()
    assert re.fullmatch(r"\w+-\w+-\w+.*", code)
    assert re.fullmatch(rf"%cluster add \S+:\d+ --code {code}", shared.locator(".nbc-side-command").inner_text())
    picture = shared.get_by_role("img", name="The code as a QR code")
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 20
    peer(page, name).get_by_text("this computer").wait_for(timeout=PATIENCE)
    page.get_by_role("switch", name="Share this machine").click()
    shared.wait_for(state="detached", timeout=PATIENCE)


def test_a_node_is_removed_after_a_second_click(page: "Page", mini: str) -> None:
    row = node(page, mini)
    press_and_confirm(
        row.get_by_role("button", name=f"Remove {mini}"),
        row.get_by_role("button", name=f"Really remove {mini}?"),
    )
    row.wait_for(state="detached", timeout=PATIENCE)


def test_the_cluster_is_stopped_after_a_second_click_and_says_so(page: "Page") -> None:
    press_and_confirm(
        cluster(page).get_by_role("button", name="Stop cluster"),
        cluster(page).get_by_role("button", name=f"Really stop cluster {CLUSTER} and end all its kernels?"),
    )
    cluster(page).get_by_role("button", name="Stop cluster").wait_for(state="detached", timeout=PATIENCE)
    unfold(page)
    cluster(page).get_by_text(f"cluster '{CLUSTER}' has ended: stopped").wait_for(timeout=PATIENCE)
    assert page.locator(".nbc-side-status").count() == 0


def test_a_cluster_is_started_with_the_keyboard_alone(page: "Page", strangers: Strangers, mini: str) -> None:
    page.get_by_role("textbox", name="Name of a new cluster").focus()
    page.keyboard.type("evening")
    page.keyboard.press("Tab")
    assert page.get_by_role("combobox", name="On").evaluate("one => one === document.activeElement")
    page.keyboard.press("Tab")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("0")
    box = page.get_by_role("checkbox", name=mini)
    for _ in range(20):
        page.keyboard.press("Tab")
        if box.evaluate("one => one === document.activeElement"):
            break
    page.keyboard.press("Space")
    assert box.is_checked()
    assert page.get_by_role("textbox", name="Code that the chosen peers show").count() == 0  # it was paired before
    page.get_by_role("textbox", name="Name of a new cluster").press("Enter")
    page.get_by_role("listitem", name=f"node {mini}, ok").wait_for(timeout=PATIENCE)
    evening = page.get_by_role("region", name="cluster evening")
    assert evening.get_by_role("listitem").count() == 1
    show_more(evening)
    press_and_confirm(
        evening.get_by_role("button", name="Stop cluster"),
        evening.get_by_role("button", name="Really stop cluster evening and end all its kernels?"),
    )
    evening.get_by_role("button", name="Stop cluster").wait_for(state="detached", timeout=PATIENCE)
