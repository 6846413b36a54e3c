"""A double click, or a key that is held down, ends nothing: what asks once more wants a second, separate press.

A real cluster, in the sidebar and in the notebook's panel. The tests are one lesson in the order of the file.
"""

import contextlib
import re
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
    shut_down_kernels,
    wait_for_kernel,
    write_notebook,
)
from tests.conftest import wait_until
from tests.sidebar_page import CLUSTER, cluster, confirm, run_cell, show_more, show_sidebar, unfold

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = needs_extension

START = f"%load_ext notebook_cluster\n%cluster start {CLUSTER} --local 2"
SLOW = "%%on local-2\nimport time\ntime.sleep(2)\nprint('slept')"
"""A new kernel of the node replays it: that takes longer than views wait for the next state, however fast it starts."""
PLACES = ["sidebar", "panel"]
QUESTIONS = {
    "Restart local-2": "Really restart local-2?",
    "Remove local-2": "Really remove local-2?",
    "Stop cluster": f"Really stop cluster {CLUSTER} and end all its kernels?",
}
QUIET_MILLISECONDS = 500
"""So long after a press of a button the next one is not taken for another."""
HELD_MILLISECONDS = 3 * QUIET_MILLISECONDS
REPEAT_MILLISECONDS = 30
"""How often a key that is held down presses anew."""
HURRIED_MILLISECONDS = 150
"""And a person in a hurry."""

OWN_CLOCK = """
const stamp = Object.getOwnPropertyDescriptor(Event.prototype, 'timeStamp');
globalThis.ownTime = performance.now();
performance.now = () => ownTime;
Object.defineProperty(Event.prototype, 'timeStamp', { ...stamp, get: () => ownTime });
globalThis.giveClockBack = () => {
  delete performance.now;
  Object.defineProperty(Event.prototype, 'timeStamp', stamp);
};
"""
"""The page's clock goes on only where a test says so: on a busy computer clicks would come too late to be quick."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_with_extension(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator["Page"]:
    """A notebook with the panel of a cluster of two nodes, and the sidebar open beside it."""
    from playwright.sync_api import Error

    with browser_page(lab, width=1500) as opened:
        write_notebook(lab.folder / "lesson.ipynb", [START, SLOW])
        open_notebook(opened, "lesson.ipynb")
        run_cell(opened, 0)
        show_sidebar(opened)
        cluster(opened).get_by_role("listitem").nth(1).wait_for(timeout=PATIENCE)
        show_more(cluster(opened))
        opened.locator(".nbc-panel .nbc-node").nth(1).wait_for(timeout=PATIENCE)
        yield opened
        with contextlib.suppress(Error):
            shut_down_kernels(opened)


@pytest.fixture(autouse=True)
def a_press_of_its_own(page: "Page") -> None:
    """The first press of each test comes long enough after the last one of the test before."""
    over = page.evaluate("performance.now()") + QUIET_MILLISECONDS
    page.wait_for_function("over => performance.now() > over", arg=over, timeout=PATIENCE)


def part(page: "Page", place: str) -> "Locator":
    return page.locator(".nbc-side-cluster" if place == "sidebar" else ".nbc-panel")


def named(where: "Locator", name: str) -> "Locator":
    return where.get_by_role("button", name=name, exact=True)


def incarnations(page: "Page") -> dict[str, int]:
    """Node -> how many kernels it has had, as the server knows it."""
    overview = page.evaluate("fetch('/notebook-cluster/overview').then(answer => answer.json())")
    (row,) = overview["clusters"]
    return {node["name"]: node["incarnation"] for node in row["state"]["nodes"]}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", list(QUESTIONS))
def test_a_double_click_only_asks_and_escape_takes_the_question_back(page: "Page", place: str, name: str) -> None:
    where, before = part(page, place), incarnations(page)
    named(where, name).dblclick()
    named(where, QUESTIONS[name]).wait_for(timeout=PATIENCE)
    page.keyboard.press("Escape")
    named(where, name).wait_for(timeout=PATIENCE)
    assert incarnations(page) == before


@pytest.mark.parametrize("place", PLACES)
def test_a_held_enter_key_only_asks(page: "Page", place: str) -> None:
    where, before = part(page, place), incarnations(page)
    named(where, "Restart local-2").focus()
    began = page.evaluate("performance.now()")
    page.keyboard.down("Enter")
    while page.evaluate("performance.now()") < began + HELD_MILLISECONDS:
        page.keyboard.down("Enter")
        page.wait_for_timeout(REPEAT_MILLISECONDS)
    page.keyboard.up("Enter")
    named(where, "Really restart local-2?").wait_for(timeout=PATIENCE)
    page.keyboard.press("Escape")
    named(where, "Restart local-2").wait_for(timeout=PATIENCE)
    assert incarnations(page) == before


@pytest.mark.parametrize("place", PLACES)
def test_many_quick_clicks_only_ask(page: "Page", place: str) -> None:
    where, before = part(page, place), incarnations(page)
    box = named(where, "Restart local-2").bounding_box()
    assert box is not None
    page.evaluate(OWN_CLOCK)
    for _ in range(HELD_MILLISECONDS // HURRIED_MILLISECONDS):
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.evaluate(f"ownTime += {HURRIED_MILLISECONDS}")
    page.evaluate("giveClockBack()")
    page.wait_for_function("performance.now() > ownTime", timeout=PATIENCE)
    named(where, "Really restart local-2?").wait_for(timeout=PATIENCE)
    page.keyboard.press("Escape")
    named(where, "Restart local-2").wait_for(timeout=PATIENCE)
    assert incarnations(page) == before


@pytest.mark.parametrize("place", PLACES)
def test_a_second_separate_click_restarts_the_node(page: "Page", place: str) -> None:
    where, before = part(page, place), incarnations(page)
    named(where, "Restart local-2").click()
    confirm(named(where, "Really restart local-2?"))
    wanted = before | {"local-2": before["local-2"] + 1}
    wait_until(lambda: incarnations(page) == wanted, 60, lambda: f"{wanted}, not {incarnations(page)}")
    cluster(page).get_by_role("listitem", name="node local-2, ok").wait_for(timeout=PATIENCE)


def test_the_line_in_the_status_bar_and_the_heading_count_nodes_that_are_up(page: "Page") -> None:
    run_cell(page, 1)
    page.locator(".jp-OutputArea").get_by_text("slept").wait_for(timeout=PATIENCE)
    wait_for_kernel(page)
    named(part(page, "sidebar"), "Restart local-2").click()
    confirm(named(part(page, "sidebar"), "Really restart local-2?"))
    page.locator(".nbc-side-status").get_by_text(re.compile("1 of 2 nodes")).wait_for(timeout=PATIENCE)
    page.locator(".nbc-side-status").get_by_text(re.compile("[^f] 2 nodes")).wait_for(timeout=PATIENCE)


def test_a_node_is_removed_and_the_cluster_ended_with_the_keyboard(page: "Page") -> None:
    where = part(page, "sidebar")
    for name, gone in (("Remove local-2", "Remove local-2"), ("Stop cluster", "Stop cluster")):
        named(where, name).focus()
        page.keyboard.press("Enter")
        question = named(where, QUESTIONS[name])
        question.and_(page.locator(":not(.nbc-mod-early)")).wait_for(timeout=PATIENCE)
        page.keyboard.press("Enter")
        named(where, gone).wait_for(state="detached", timeout=PATIENCE)
        question.wait_for(state="detached", timeout=PATIENCE)
    unfold(page)
    cluster(page).get_by_text(f"cluster '{CLUSTER}' has ended: stopped").wait_for(timeout=PATIENCE)
