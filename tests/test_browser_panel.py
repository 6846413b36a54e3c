"""The panel as people see it: a real JupyterLab, a real kernel, the system's Chromium."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from tests import axe
from tests.browser import (
    PATIENCE,
    Lab,
    browser_page,
    leave,
    needs_chromium,
    open_next_notebook,
    open_notebook,
    run_all,
    save,
    set_comms_over_subshells,
    shared_lab,
    shut_down_kernels,
    write_notebook,
)
from tests.conftest import MARK, marked_processes, wait_until
from tests.ipc_kernels import run_notebook
from tests.panel_notebook import (
    BUSY_UNTIL_ADDED,
    SHOW,
    run,
    wait_for_curves,
    wait_for_newer_points,
    wait_for_progress,
    wait_until_running,
)
from tests.sidebar_page import press_and_confirm, use_theme

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_chromium

REAL_CLUSTER = """
from notebook_cluster.client import Cluster
from notebook_cluster.widgets import show_panel
cluster = Cluster.start("panel", local=2)
show_panel(cluster)
"""
TRAIN_FOR_EVER = """
cell = [
    "import time",
    "for step in range(100_000):",
    "    nc.report(step=step, loss=2.0 / (1 + step / 50))",
    "    time.sleep(0.02)",
]
ended, _ = cluster.run(chr(10).join(cell))
print("the cell ended:", ended.status)
"""
PANEL_THREADS = '[thread.name for thread in threading.enumerate()].count("cluster-panel")'
WAIT_FOR_THREAD = f"""
end = time.monotonic() + 60
while {PANEL_THREADS} and time.monotonic() < end:
    time.sleep(0.02)
print("threads of panels:", {PANEL_THREADS})
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with shared_lab() as running:
        yield running


@pytest.fixture(scope="module")
def shared_page(lab: Lab) -> Iterator["Page"]:
    with browser_page(lab) as opened:
        yield opened
        shut_down_kernels(opened)


@pytest.fixture
def page(shared_page: "Page") -> Iterator["Page"]:
    """The page of all tests; what is open in it is that of the test before, until :func:`run` runs the next."""
    yield shared_page
    shared_page.set_viewport_size({"width": 1280, "height": 1000})


@pytest.mark.parametrize("comms_over_subshells", ["disabled", "perCommTarget"])
def test_panel_moves_and_acts_while_a_cell_runs(
    page: "Page", lab: Lab, tmp_path: Path, comms_over_subshells: str
) -> None:
    set_comms_over_subshells(lab, comms_over_subshells)
    leave(page)
    run(page, lab, f"busy-{comms_over_subshells}.ipynb", BUSY_UNTIL_ADDED)
    wait_until_running(page, 1)
    assert page.locator(".nbc-node .nbc-node-name").all_text_contents() == ["laptop", "mini", "desk"]
    wait_for_progress(page)
    wait_for_curves(page, 6)
    wait_until_running(page, 1)

    page.get_by_role("button", name="Add attic").click()
    page.get_by_text("attic added").wait_for(timeout=PATIENCE)
    page.wait_for_selector(".nbc-node[data-node=attic]", timeout=PATIENCE)
    page.get_by_text("the cell saw [('add', 'attic')]").wait_for(timeout=PATIENCE)
    # A node that joins gets curves of its own, in the same figure, which goes on and is as wide as the panel.
    wait_for_curves(page, 8)
    wait_for_newer_points(page)
    assert page.locator(".js-plotly-plot").count() == 1
    page.wait_for_function(
        "() => { const plot = document.querySelector('.js-plotly-plot');"
        " return plot._fullLayout.width === plot.clientWidth && plot.clientWidth > 720; }",
        timeout=PATIENCE,
    )
    page.screenshot(path=tmp_path / "panel.png")


READ_SLOWLY = """
const Whole = Blob;
globalThis.Blob = class extends Whole {
  constructor(parts = [], options = {}) {
    const long = typeof parts[0] === "string" && parts[0].length > 2_000_000;
    super(long ? ["await new Promise((done) => setTimeout(done, 4000));", ...parts] : parts, options);
    if (long) globalThis.scriptsReadSlowly = (globalThis.scriptsReadSlowly ?? 0) + 1;
  }
};
"""
"""A script of more than 2 MB is there 4 s later, as on a busy laptop: anywidget waits for 2 s."""


def test_curves_miss_nothing_where_their_script_is_read_slowly(page: "Page", lab: Lab) -> None:
    leave(page)
    slow = page.context.new_page()
    slow.add_init_script(READ_SLOWLY)
    slow.goto("api/status")
    run(slow, lab, "slowly.ipynb", BUSY_UNTIL_ADDED)
    slow.get_by_role("button", name="Add attic").click()
    slow.wait_for_selector(".nbc-node[data-node=attic]", timeout=PATIENCE)
    wait_for_curves(slow, 8)
    wait_for_newer_points(slow)
    assert slow.evaluate("scriptsReadSlowly") == 1
    names = "[...new Set(document.querySelector('.js-plotly-plot').data.map((trace) => trace.name))].sort()"
    assert slow.evaluate(names) == ["attic", "desk", "laptop", "mini"]
    leave(slow)
    slow.close()


DRAW_SLOWLY = """
const closest = Element.prototype.closest;
globalThis.drawingMilliseconds = 1500;
Element.prototype.closest = function (selector) {
  const end = performance.now() + (selector === ".widget-vbox" ? drawingMilliseconds : 0);
  while (performance.now() < end);
  return closest.call(this, selector);
};
"""
"""panel.js looks for the figure each time that it draws, which takes as long as six states need to come."""
UNTIL_BEHIND_AND_STOPPED = """
from notebook_cluster.widgets import panel, subshell
subshell.PATIENCE_SECONDS, panel.STATE_SECONDS = 1e6, 0.1
def is_waited_for():
    return panel._panels[-1]._widget.state.get("tell", 0) > 0
def wait_for(condition):
    end = time.monotonic() + 120
    while not condition() and time.monotonic() < end: time.sleep(0.02)
wait_for(is_waited_for)
print("the page is waited for:", is_waited_for())
wait_for(lambda: cluster.calls)
before = cluster.step
wait_for(lambda: cluster.step > before + 16)
print("the cell saw", cluster.calls)
"""
UNTIL_PROMPT = """
subshell.PROMPT_SECONDS = 1e6
wait_for(lambda: not is_waited_for())
print("the page keeps up:", not is_waited_for())
"""


def test_a_page_that_draws_slowly_is_waited_for_and_shows_at_once_what_a_click_did(page: "Page", lab: Lab) -> None:
    leave(page)
    slow = page.context.new_page()
    slow.add_init_script(DRAW_SLOWLY)
    slow.goto("api/status")
    run(slow, lab, "slow-page.ipynb", UNTIL_BEHIND_AND_STOPPED, UNTIL_PROMPT)
    slow.get_by_text("the page is waited for: True").wait_for(timeout=PATIENCE)
    slow.get_by_role("button", name="Stop cell").click(timeout=PATIENCE)
    slow.get_by_text("Still busy: mini. Stop cell again kills and restarts it").wait_for(timeout=PATIENCE)
    slow.get_by_text("the cell saw [('interrupt', False)]").wait_for(timeout=PATIENCE)
    slow.evaluate("drawingMilliseconds = 0")
    slow.get_by_text("the page keeps up: True").wait_for(timeout=PATIENCE)
    wait_for_progress(slow)
    leave(slow)
    slow.close()


def test_panel_comes_back_after_a_page_reload_and_acts_in_a_busy_cell(page: "Page", lab: Lab) -> None:
    run(page, lab, "reload.ipynb")
    wait_for_curves(page, 6)
    save(page)
    write_another_cell(page, BUSY_UNTIL_ADDED)
    open_notebook(page, "reload.ipynb")
    page.wait_for_selector(".nbc-node", timeout=PATIENCE)
    wait_for_curves(page, 6)
    run_last_cell(page)
    wait_until_running(page, 1)
    wait_for_progress(page)
    page.get_by_role("button", name="Add attic").click()
    page.get_by_text("the cell saw [('add', 'attic')]").wait_for(timeout=PATIENCE)


def write_another_cell(page: "Page", source: str) -> None:
    """Append a code cell, select it and save."""
    page.evaluate(
        """async source => {
            const { commands, shell } = window.jupyterapp;
            const notebook = shell.currentWidget.content;
            notebook.activeCellIndex = notebook.widgets.length - 1;
            await commands.execute('notebook:insert-cell-below');
            notebook.activeCell.model.sharedModel.setSource(source);
            await commands.execute('docmanager:save');
        }""",
        source,
    )


def run_last_cell(page: "Page") -> None:
    page.evaluate(
        """() => {
            const { commands, shell } = window.jupyterapp;
            const notebook = shell.currentWidget.content;
            notebook.activeCellIndex = notebook.widgets.length - 1;
            void commands.execute('notebook:run-cell');
        }"""
    )


def test_what_an_action_says_is_shown_as_text(page: "Page", lab: Lab) -> None:
    run(page, lab, "texts.ipynb")
    press_and_confirm(
        page.get_by_role("button", name="Restart mini"),
        page.get_by_role("button", name="Really restart mini?"),
    )
    page.get_by_text("node 'mini' did not come back: <img src=x onerror=alert(1)>").wait_for(timeout=PATIENCE)
    assert page.locator(".nbc-panel img").count() == 0


def test_a_peer_that_is_not_trusted_cannot_be_clicked_and_says_why(page: "Page", lab: Lab) -> None:
    run(page, lab, "untrusted.ipynb")
    button = page.get_by_role("button", name="Add printer-room: another user's")
    assert button.is_disabled()
    assert page.get_by_role("listitem").filter(has_text="printer-room").filter(has_text="another user's").count() == 1


def test_a_peer_is_added_with_its_code_after_a_typo(page: "Page", lab: Lab) -> None:
    run(page, lab, "code.ipynb")
    add = page.get_by_role("button", name="Add library", exact=True)
    field = page.get_by_role("textbox", name="Code of library")
    add.dblclick()
    assert field.evaluate("field => field === document.activeElement")
    assert page.evaluate("getSelection().toString()") == ""
    field.press("Escape")
    assert field.is_hidden()
    add.click()
    add.click()
    field.fill("tiger-lamp-24")
    field.press("Enter")
    page.get_by_text("wrong code, 4 tries are left").wait_for(timeout=PATIENCE)
    assert page.locator(".nbc-answers .nbc-answer").count() == 0
    field.fill("tiger-lamp-42")
    page.get_by_role("button", name="Add library with this code").click()
    page.wait_for_selector(".nbc-node[data-node=library]", timeout=PATIENCE)


def test_an_answer_that_comes_late_is_shown_beside_the_code_all_the_same(page: "Page", lab: Lab) -> None:
    run(page, lab, "late.ipynb", "import os, pathlib\npathlib.Path('kernel').write_text(str(os.getpid()))")
    page.get_by_role("button", name="Add library", exact=True).click()
    field = page.get_by_role("textbox", name="Code of library")
    field.fill("tiger-lamp-24")
    kernel = int(wait_until(lambda: (lab.folder / "kernel").exists() and (lab.folder / "kernel").read_text(), 60))
    os.kill(kernel, signal.SIGSTOP)
    try:
        field.press("Enter")
        page.get_by_text("Adding library… No answer from the notebook's kernel yet.").wait_for(timeout=PATIENCE)
    finally:
        os.kill(kernel, signal.SIGCONT)
    page.get_by_text("wrong code, 4 tries are left").wait_for(timeout=PATIENCE)


def test_stop_cell_again_kills_what_was_still_busy(page: "Page", lab: Lab) -> None:
    run(page, lab, "stop-cell.ipynb", "while len(cluster.calls) < 2: time.sleep(0.02)\nprint(cluster.calls)")
    page.get_by_role("button", name="Stop cell").click()
    page.get_by_text("Still busy: mini. Stop cell again kills and restarts it").wait_for(timeout=PATIENCE)
    page.get_by_role("button", name="Stop cell").click()
    page.get_by_text("[('interrupt', False), ('interrupt', True)]").wait_for(timeout=PATIENCE)


def test_a_cell_that_a_node_replays_is_shown_and_can_be_skipped(page: "Page", lab: Lab) -> None:
    replaying = (
        "from tests.fake_cluster import node_view\n"
        "cluster._added = [node_view(3, 'attic', condition='replaying', replaying='replaying cell 2 of 3, 40 s',\n"
        "    left_out='without cell 1, which was skipped: %cluster restart attic --all-cells runs it again')]\n"
        "while len(cluster.calls) < 1: time.sleep(0.02)\nprint(cluster.calls)\ncluster._added = []"
    )
    run(page, lab, "skip.ipynb", replaying)
    attic = page.locator(".nbc-node[data-node=attic]")
    attic.get_by_text("replaying cell 2 of 3, 40 s").wait_for(timeout=PATIENCE)
    assert attic.get_by_text("without cell 1, which was skipped: %cluster restart attic").is_visible()
    assert page.get_by_role("button", name="Skip the cell that").count() == 1  # nowhere else
    page.get_by_role("button", name="Skip the cell that attic replays").click()
    page.get_by_text("Cell 3 skipped on attic").wait_for(timeout=PATIENCE)
    page.get_by_text("[('skip', 'attic')]").wait_for(timeout=PATIENCE)


def test_machines_of_an_engine_are_a_line_that_goes_when_they_are_given_back(page: "Page", lab: Lab) -> None:
    launched = (
        "from notebook_cluster.protocol.launches import LaunchView\n"
        "text = 'slurm 4711: 4 of 16 running, pending: Priority'\n"
        "cluster.launches = [LaunchView(launch='x', name='slurm 4711', condition='pending', hosts=16, running=4,\n"
        "    joined=4, text=text)]\n"
        "while len(cluster.calls) < 1: time.sleep(0.02)\ncluster.launches = []"
    )
    run(page, lab, "launched.ipynb", launched)
    machines = page.get_by_role("list", name="Machines from engines")
    machines.get_by_text("slurm 4711: 4 of 16 running, pending: Priority").wait_for(timeout=PATIENCE)
    page.get_by_role("button", name="Stop cell").click()
    machines.wait_for(state="hidden", timeout=PATIENCE)


def test_in_a_narrow_panel_numbers_are_read_whole_and_buttons_stay_at_the_right(page: "Page", lab: Lab) -> None:
    reported = (
        "from tests.fake_cluster import node_view\n"
        "scalars = {'validation_accuracy': 0.98, 'validation_loss_of_all': 0.12}\n"
        "cluster._added = [node_view(3, 'attic', scalars=scalars)]"
    )
    page.set_viewport_size({"width": 560, "height": 1000})
    run(page, lab, "narrow.ipynb", reported)
    attic = page.locator(".nbc-node[data-node=attic]")
    numbers = attic.get_by_text("validation_loss_of_all 0.1200")
    numbers.wait_for(timeout=PATIENCE)
    assert numbers.evaluate("element => element.scrollWidth <= element.clientWidth")
    # Of each group of buttons the last one is at the edge, whichever line it is in.
    right = "element => element.getBoundingClientRect().right"
    edges = "element => element.getBoundingClientRect().right - parseFloat(getComputedStyle(element).paddingRight) - 1"
    for box, name in ((attic, "Remove attic"), (page.locator(".nbc-panel"), "Stop cluster")):
        assert abs(box.get_by_role("button", name=name).evaluate(right) - box.evaluate(edges)) < 2


def overlapping(page: "Page") -> list[str]:
    """Texts of rows of nodes that lie over each other, or have no room."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll('.nbc-compact .nbc-node')].flatMap(row => {
            const parts = [...row.querySelectorAll('.nbc-rank, .nbc-node-name, .nbc-pill, .nbc-number, .nbc-button')]
                .filter(part => part.textContent && part.checkVisibility())
                .map(part => [part.textContent, part.getBoundingClientRect()]);
            const narrow = parts.filter(([text, box]) => box.width < 8).map(([text]) => text);
            return [...narrow, ...parts.flatMap(([text, one], place) => parts.slice(place + 1)
                .filter(([, other]) => one.left < other.right - 1 && other.left < one.right - 1
                    && one.top < other.bottom - 1 && other.top < one.bottom - 1)
                .map(([over]) => `${text} / ${over}`))];
        })"""
    )
    return found


CURVES_FIT = """() => {
    const plot = document.querySelector('.js-plotly-plot');
    return plot._fullLayout.width === plot.clientWidth && plot.querySelectorAll('.annotation-text').length === 3;
}"""
"""The curves are as wide as the panel."""


def titles_apart(page: "Page") -> bool:
    """The titles of the curves do not touch, nor leave the picture."""
    apart: bool = page.evaluate(
        """() => {
            const box = part => part.getBoundingClientRect();
            const titles = [...document.querySelectorAll('.js-plotly-plot .annotation-text')].map(box);
            const all = box(document.querySelector('.js-plotly-plot'));
            return titles.every(({ left, right, top }, place) => left >= all.left && right <= all.right
                && top >= all.top && (place === 0 || titles[place - 1].right + 4 <= left));
        }"""
    )
    return apart


def test_keys_choose_a_metric_and_open_a_list_while_a_cell_runs(page: "Page", lab: Lab, tmp_path: Path) -> None:
    many = """
from notebook_cluster.protocol.state import Series
from notebook_cluster.protocol.views import SeriesAdded
from tests.fake_cluster import node_view
rows = [node_view(3 + place, f"room-{place}", 12_345, scalars={"test_accuracy": 0.91}) for place in range(9)]
rows[0].scalars.clear()
cluster._added = [*rows[:-1], node_view(11, "n" * 60, 12_345, loss=4.151e-5)]
told = [Series(node="mini", name="<b>test_accuracy", step=[0, 9], time=[1.0, 2.0], value=[0.5, 0.9])]
cluster._tell(SeriesAdded(series=told))
"""
    page.set_viewport_size({"width": 900, "height": 1000})
    run(page, lab, "choose.ipynb", many, BUSY_UNTIL_ADDED)
    wait_for_curves(page, 6)
    page.locator(".nbc-compact .nbc-node").nth(11).wait_for(timeout=PATIENCE)
    fits = "rows => rows.every(row => row.scrollWidth <= row.clientWidth)"
    assert page.locator(".nbc-compact .nbc-number").evaluate_all(fits)
    page.locator("summary", has_text="Rounds, and who was waited for").press("Enter")
    page.locator(".nbc-wait").nth(4).wait_for(timeout=PATIENCE)
    for theme in axe.THEMES if axe.SCRIPT.exists() else ():
        use_theme(page, theme)
        for zoom in (1, 2):
            assert axe.violations(page, ".nbc-panel", zoom) == []
    for width in (520, 700, 900):  # 520: a window of 900 with the sidebar open
        page.set_viewport_size({"width": width, "height": 1000})
        assert overlapping(page) == []
        page.wait_for_function(CURVES_FIT, timeout=PATIENCE)
        assert titles_apart(page)
        page.locator(".js-plotly-plot").screenshot(path=tmp_path / f"curves-{width}.png")
        assert page.locator(".nbc-waits").evaluate("waits => waits.scrollWidth <= waits.clientWidth")
        page.locator(".nbc-panel").screenshot(path=tmp_path / f"{width}.png")
    chooser = page.get_by_label("Number that the curves show")
    chooser.focus()
    page.keyboard.press("End")
    page.locator(".js-plotly-plot .annotation-text", has_text="test_accuracy").first.wait_for(timeout=PATIENCE)
    page.set_viewport_size({"width": 520, "height": 1000})
    page.wait_for_function(CURVES_FIT, timeout=PATIENCE)
    assert titles_apart(page)
    page.locator(".js-plotly-plot").screenshot(path=tmp_path / "curves-long.png")
    page.set_viewport_size({"width": 900, "height": 1000})
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    kind = "() => document.querySelector('.js-plotly-plot').layout.yaxis.type === 'log'"
    page.wait_for_function(kind, timeout=PATIENCE)
    assert chooser.input_value() == "<b>test_accuracy"
    with page.expect_download(timeout=PATIENCE) as saved:
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
    assert saved.value.suggested_filename.startswith("digits-_b_test_accuracy-")
    assert saved.value.suggested_filename.endswith(".csv")
    lines = Path(saved.value.path()).read_text().splitlines()
    assert lines[0] == "metric,node,job,run,step,time,value"
    assert "<b>test_accuracy,mini,,,9,2.000,0.9" in lines
    assert {line.split(",")[0] for line in lines[1:]} == {"<b>test_accuracy", "memory"}
    events = page.locator("details", has_text="Events")
    assert not events.locator(".nbc-event").first.is_visible()
    events.locator("summary").focus()
    page.keyboard.press("Enter")
    events.locator(".nbc-event").first.wait_for(timeout=PATIENCE)
    wait_for_progress(page)
    assert events.locator(".nbc-event").first.is_visible()  # what comes meanwhile does not fold it again


def test_stop_cluster_leaves_a_picture_that_is_saved_and_no_thread(page: "Page", lab: Lab) -> None:
    run(page, lab, "stop.ipynb", WAIT_FOR_THREAD)
    wait_for_curves(page, 6)
    press_and_confirm(
        page.get_by_role("button", name="Stop cluster"),
        page.get_by_role("button", name="Really stop cluster"),
    )
    page.wait_for_selector(".jp-RenderedHTMLCommon .nbc-panel svg.nbc-chart path", timeout=PATIENCE)
    page.get_by_text("threads of panels: 0").wait_for(timeout=PATIENCE)
    assert page.locator(".js-plotly-plot").count() == 0
    assert page.locator(".nbc-button").count() == 0
    page.set_viewport_size({"width": 900, "height": 1000})  # the third chart has a row of its own
    widths = "charts => charts.map(chart => Math.round(chart.getBoundingClientRect().width))"
    assert len(set(page.locator("svg.nbc-chart").evaluate_all(widths))) == 1
    save(page)
    notebook = nbformat.read(lab.folder / "stop.ipynb", 4)
    (output,) = notebook.cells[0].outputs
    assert sorted(output.data) == ["text/html", "text/plain"]
    assert "stopped from the panel" in output.data["text/plain"]


def test_a_panel_shown_twice_is_one_panel_with_its_history(page: "Page", lab: Lab) -> None:
    run(page, lab, "twice.ipynb", f"show_panel(cluster)\nprint('threads of panels:', {PANEL_THREADS})")
    wait_for_curves(page, 12)
    page.get_by_text("threads of panels: 1").wait_for(timeout=PATIENCE)
    assert page.locator(".nbc-panel").count() == 2


def test_closing_the_panel_ends_its_thread_and_the_cluster_goes_on(page: "Page", lab: Lab) -> None:
    after = f"close_panel(cluster)\nprint('threads of panels:', {PANEL_THREADS}, cluster.calls)"
    run(page, lab, "close.ipynb", after)
    page.get_by_text("threads of panels: 0 []").wait_for(timeout=PATIENCE)


def test_a_real_cluster_is_shown_stopped_and_ended_from_its_panel(page: "Page", lab: Lab, tmp_path: Path) -> None:
    write_notebook(lab.folder / "real.ipynb", [REAL_CLUSTER, TRAIN_FOR_EVER])
    open_next_notebook(page, "real.ipynb")
    run_all(page)
    page.wait_for_selector(".nbc-node[data-node]", timeout=60_000)
    page.wait_for_function(
        "() => Number(document.querySelector('.nbc-number').textContent.replace(',', '')) > 20", timeout=PATIENCE
    )
    wait_for_progress(page)
    wait_for_curves(page, 4)
    assert page.locator(".nbc-node").count() == 2
    page.screenshot(path=tmp_path / "real.png")
    page.get_by_role("button", name="Stop cell").click()
    page.get_by_text("the cell ended: interrupted").wait_for(timeout=PATIENCE)
    press_and_confirm(
        page.get_by_role("button", name="Stop cluster"),
        page.get_by_role("button", name="Really stop cluster"),
    )
    page.wait_for_selector(".jp-RenderedHTMLCommon .nbc-panel svg.nbc-chart path", timeout=PATIENCE)
    wait_until(lambda: not processes_of_clusters(), 60, lambda: f"the end of {processes_of_clusters()}")


def processes_of_clusters() -> list[str]:
    """Their command lines."""
    return [command for command in marked_processes(os.environ[MARK]).values() if "notebook_cluster" in command]


def test_without_anybody_to_click_no_widget_is_made(lab: Lab, jupyter_dirs: Path) -> None:
    source = SHOW.replace("show_panel(cluster)", "show_panel(cluster, headless=True)")
    notebook = nbformat.read(write_notebook(lab.folder / "headless.ipynb", [source, "print(sorted(sys.modules))"]), 4)
    run_notebook(notebook, jupyter_dirs)
    (output,) = notebook.cells[0].outputs
    assert sorted(output.data) == ["text/html", "text/plain"]
    assert "laptop" in output.data["text/plain"]
    assert "'plotly'" not in notebook.cells[1].outputs[0].text
    assert not notebook.metadata.get("widgets")
