"""The page of a class in JupyterLab: thirty machines come in with the code on it, and each has its row."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from notebook_cluster.client import Cluster
from tests.axe import THEMES, violations
from tests.browser import (
    PATIENCE,
    browser_page,
    lab_with_extension,
    needs_extension,
    open_notebook,
    run_all,
    shared_lab,
    shut_down_kernels,
    wait_for_kernel,
    write_notebook,
)
from tests.conftest import wait_until
from tests.sidebar_page import show_more, show_sidebar, sources, use_theme

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_extension  # what builds it brings axe

CODE = "maple-river-7"
PUPILS = 30
ROWS = ".nbc-class tbody tr"
_FITS = """() => ['.nbc-board', '.nbc-class-rows', '.nbc-class'].every(
    one => (found => found.scrollWidth <= found.clientWidth + 1)(document.querySelector(one)))"""


@contextmanager
def stand_ins(folder: Path, cluster: Cluster, number: int) -> Iterator[None]:
    door = f"127.0.0.1:{cluster.invite().addresses[0].rpartition(':')[2]}"
    command = [sys.executable, "-m", "tests.stand_in_class", str(folder), door, CODE, str(number)]
    with (folder.parent / "stand-ins.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=Path(__file__).parents[1], stdout=log, stderr=log, start_new_session=True, env=os.environ
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@pytest.mark.timeout(300)
def test_thirty_come_in_with_one_code_and_their_files_are_collected(tmp_path: Path) -> None:
    with shared_lab() as lab, browser_page(lab) as page:
        cells = ["%load_ext notebook_cluster", f"%cluster class start --code {CODE} --local 0"]
        write_notebook(lab.folder / "lesson.ipynb", cells)
        open_notebook(page, "lesson.ipynb")
        run_all(page)
        page.wait_for_selector(".nbc-board-code", timeout=PATIENCE)
        assert page.inner_text(".nbc-board-code") == CODE
        assert f"--code {CODE}" in page.inner_text(".nbc-board .nbc-command")
        assert page.get_attribute(".nbc-board img", "src").startswith("data:image/svg+xml")  # type: ignore[union-attr]
        with Cluster.attach("lesson") as cluster, stand_ins(tmp_path / "pupils", cluster, PUPILS):

            def are_in() -> bool:
                page.wait_for_timeout(200)  # Playwright's own loop has to run
                return page.inner_text(".nbc-board-said") == f"{PUPILS} are in"

            wait_until(are_in, 120, lambda: page.inner_text(".nbc-class-board"))
            assert page.locator(ROWS).count() == PUPILS
            names = page.locator(f"{ROWS} th").all_inner_texts()
            assert names == [f"pupil-{number:02d}" for number in range(1, PUPILS + 1)]
            for theme in THEMES:
                use_theme(page, theme)
                assert violations(page, ".nbc-panel") == [], theme
            assert violations(page, ".nbc-panel", zoom=2) == []
            for width in (900, 1600):
                page.set_viewport_size({"width": width, "height": 1000})
                page.wait_for_function(_FITS, timeout=PATIENCE)
                if pictures := os.environ.get("CLASS_PICTURES"):
                    page.locator(".nbc-panel").screenshot(path=f"{pictures}/class-{width}.png")
            places = cluster.collect_files("answer.txt", tmp_path / "collected")
            assert [place.error for place in places] == [""] * PUPILS
            for number in range(1, PUPILS + 1):
                text = (tmp_path / "collected" / f"pupil-{number:02d}" / "answer.txt").read_text()
                assert text == f"pupil-{number:02d} says {number}"
            cluster.stop()
        page.wait_for_selector(".nbc-panel .nbc-button", state="detached", timeout=PATIENCE)
        said = page.inner_text(".nbc-panel")
        assert CODE not in said, "what is saved with the notebook has no code"
        assert "pupil-30" in said
        shut_down_kernels(page)


@pytest.mark.timeout(300)
def test_it_is_opened_from_the_menu_once_more_and_after_a_reload(jupyter_dirs: Path) -> None:
    board = ".jp-CodeCell .nbc-board-code:visible"
    with lab_with_extension(jupyter_dirs, environment=dict(os.environ)) as lab, browser_page(lab) as page:
        page.goto("lab")
        page.wait_for_selector(".jp-Launcher", timeout=PATIENCE)
        page.get_by_role("menuitem", name="Cluster", exact=True).click()
        page.get_by_role("menuitem", name="Open Class Page").click()
        page.wait_for_selector(board, timeout=PATIENCE)
        code = page.inner_text(board)
        assert sources(page)[0] == "%load_ext notebook_cluster\n%cluster class start"
        show_sidebar(page)
        (name,) = [one.removeprefix("cluster ") for one in labels(page) if one.startswith("cluster ")]
        more = page.get_by_role("region", name=f"cluster {name}")
        show_more(more)
        more.get_by_role("button", name="Class page").click()
        page.wait_for_function("document.querySelectorAll('.jp-CodeCell').length === 3", timeout=PATIENCE)
        page.locator(".jp-CodeCell").nth(1).locator(".nbc-board-code").wait_for(timeout=PATIENCE)
        wait_for_kernel(page)
        assert f"%cluster class start {name}" in sources(page)
        assert set(page.locator(board).all_inner_texts()) == {code}, "who has written it down still comes in with it"
        if pictures := os.environ.get("CLASS_PICTURES"):
            page.screenshot(path=f"{pictures}/class-twice.png")
        page.evaluate("window.jupyterapp.shell.currentWidget.context.save()")  # the command asks for a name
        open_notebook(page, page.evaluate("window.jupyterapp.shell.currentWidget.context.path"))
        page.wait_for_selector(board, timeout=PATIENCE)
        assert set(page.locator(board).all_inner_texts()) == {code}
        saved = next(lab.folder.glob("Untitled*.ipynb")).read_text()
        assert code not in saved
        with Cluster.attach(name) as cluster:
            cluster.stop()
        shut_down_kernels(page)


def labels(page: "Page") -> list[str]:
    """Of the regions of the sidebar, once it shows a cluster."""
    page.locator("#notebook-cluster-sidebar [aria-label^='cluster ']").first.wait_for(timeout=PATIENCE)
    found = page.locator("#notebook-cluster-sidebar [role=region], #notebook-cluster-sidebar section")
    return [found.nth(place).get_attribute("aria-label") or "" for place in range(found.count())]
