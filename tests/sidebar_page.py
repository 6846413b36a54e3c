"""The sidebar of a page, for tests in a browser: how it is opened, and where its parts are."""

import re
from typing import TYPE_CHECKING

import pytest

from tests.browser import PATIENCE
from tests.conftest import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

CLUSTER = "lesson"


def run_cell(page: "Page", cell: int) -> None:
    """Start cell ``cell`` (from 0) of the open notebook."""
    page.evaluate(
        """cell => {
            const { commands, shell } = window.jupyterapp;
            shell.currentWidget.content.activeCellIndex = cell;
            void commands.execute('notebook:run-cell');
        }""",
        cell,
    )


def sources(page: "Page") -> list[str]:
    """What is in the cells of the open notebook."""
    found: list[str] = page.evaluate(
        "window.jupyterapp.shell.currentWidget.content.widgets.map(cell => cell.model.sharedModel.getSource())"
    )
    return found


def show_sidebar(page: "Page") -> None:
    """Open it, once JupyterLab has put its parts where they were."""
    page.wait_for_function("window.jupyterapp?.commands?.hasCommand('notebook-cluster:show')", timeout=PATIENCE)
    # Not awaited here: a promise that nobody in the page holds may be collected before it is kept.
    page.evaluate(
        """() => void window.jupyterapp.restored.then(() => {
            void window.jupyterapp.commands.execute('notebook-cluster:show');
            window.nbcRestored = true;
        })"""
    )
    page.wait_for_function("window.nbcRestored", timeout=PATIENCE)


def cluster(page: "Page") -> "Locator":
    return page.get_by_role("region", name=f"cluster {CLUSTER}")


def peer(page: "Page", name: str) -> "Locator":
    return page.get_by_role("listitem", name=f"peer {name}", exact=True)


def node(page: "Page", name: str) -> "Locator":
    return cluster(page).get_by_role("listitem", name=re.compile(rf"^node {re.escape(name)},"))


def loss(page: "Page", name: str) -> "Locator":
    return node(page, name).locator(".nbc-side-loss")


def round_number(page: "Page") -> int:
    """The round that the cluster's line shows, 0 without one."""
    found = re.search(r"round (\d+)", cluster(page).locator("h3").inner_text())
    return int(found[1]) if found else 0


def show_more(where: "Locator") -> None:
    """Open the row with the rarer buttons of the cluster that ``where`` is, or has; it stays open."""
    if (closed := where.get_by_role("button", name="More …")).count():
        closed.click()


def unfold(page: "Page", name: str = CLUSTER) -> None:
    """Show what there is of a cluster that is folded, as one that has ended is."""
    page.get_by_role("region", name=f"cluster {name}").get_by_role("button", name=name, exact=True).and_(
        page.locator("[aria-expanded=false]")
    ).click(timeout=PATIENCE)


def wait_for_round(page: "Page", number: int) -> None:
    """Wait until the cluster's line shows this round, or a later one."""
    wait_until(lambda: round_number(page) >= number, 60, lambda: f"round {number} in: {cluster(page).inner_text()}")


def wait_for_other_text(found: "Locator") -> None:
    """Wait until the text of ``found`` has changed twice."""
    for _ in range(2):
        before = found.inner_text()
        wait_until(lambda before=before: found.inner_text() != before, 60, f"another text than {before!r}")


SECOND_TRY = 6000
"""Milliseconds: longer than a button asks."""


def confirm(question: "Locator") -> None:
    """Press a button that asks once more for the second time, once it takes that for an answer."""
    question.and_(question.page.locator(":not(.nbc-mod-early, .nbc-early)")).click(timeout=PATIENCE)


def press_and_confirm(button: "Locator", question: "Locator") -> None:
    """Press ``button`` and :func:`confirm` its question; again where a busy machine comes to that when the question has
    been taken back, even between the look and the press: such a press asks anew."""
    from playwright.sync_api import TimeoutError as TooLate

    ready = question.and_(question.page.locator(":not(.nbc-mod-early, .nbc-early)"))
    for _ in range(PATIENCE // SECOND_TRY):
        button.click(timeout=PATIENCE)
        try:
            ready.click(timeout=SECOND_TRY)
        except TooLate:
            continue
        if not question.count():
            return
    pytest.fail(f"{question} was taken back each time before it was answered")


def press_key(button: "Locator", key: str) -> None:
    """Press ``key`` with the focus on ``button``; again as long as the key goes elsewhere, for the focus is taken away
    for a moment after a reload: JupyterLab opens the notebook of the page's address once more when all else is there.

    The browser makes a click of a key that goes down and up on the same element, so a button that is drawn anew in
    between is not pressed here either.
    """
    element = button.element_handle(timeout=PATIENCE)
    element.evaluate(
        """button => {
            button.isPressedByKey = false;
            const look = ({ detail }) => { button.isPressedByKey = detail === 0; };
            button.addEventListener('click', look, { once: true });
        }"""
    )

    def is_pressed() -> bool:
        element.press(key)
        return bool(element.evaluate("button => button.isPressedByKey"))

    wait_until(is_pressed, PATIENCE / 1000, f"{key} to come to {button}")


def use_theme(page: "Page", name: str) -> None:
    """Change to theme ``name`` and wait until the page has it."""
    page.evaluate("name => window.jupyterapp.commands.execute('apputils:change-theme', { theme: name })", name)
    page.wait_for_selector(f'body[data-jp-theme-name="{name}"]', state="attached", timeout=PATIENCE)
    page.locator("#jupyterlab-splash").wait_for(state="detached", timeout=PATIENCE)  # it covers all while a theme loads


def close_dialogs(page: "Page") -> None:
    """JupyterLab's own, about a server or a kernel that is gone."""
    while (button := page.locator(".jp-Dialog-button").first).count():
        button.click()
