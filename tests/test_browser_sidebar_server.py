"""The sidebar and a Jupyter server that comes back as another one: without the extension, or with another token.

The tests go on where the one before them ended.
"""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import axe
from tests.browser import PATIENCE, Lab, browser_page, lab_with_extension, needs_extension
from tests.conftest import wait_until
from tests.sidebar_page import close_dialogs, show_sidebar

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_extension


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_with_extension(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator["Page"]:
    """The sidebar, open."""
    with browser_page(lab) as opened:
        opened.goto("/lab")
        show_sidebar(opened)
        opened.get_by_role("switch", name="Share this machine").wait_for(timeout=PATIENCE)
        yield opened


def switch_extension(lab: Lab, on: bool) -> None:
    """Run the server anew with or without the extension."""
    lab.end()
    configuration = {"ServerApp": {"jpserver_extensions": {"notebook_cluster.server": on}}}
    (lab.private / "config" / "jupyter_server_config.json").write_text(json.dumps(configuration))
    lab.start()


def test_a_server_without_the_extension_is_said_with_the_way_to_switch_it_on(page: "Page", lab: Lab) -> None:
    switch_extension(lab, on=False)
    banner = page.locator(".nbc-side-banner")
    banner.get_by_text("The Jupyter server has no notebook-cluster extension").wait_for(timeout=PATIENCE)
    assert "jupyter server extension enable notebook_cluster.server" in banner.inner_text()
    assert page.get_by_role("switch").is_disabled()


@pytest.mark.skipif(not axe.SCRIPT.exists(), reason="no axe-core: npm ci in labextension/")
def test_everyone_can_read_the_banner(page: "Page") -> None:
    found: list[str] = []

    def seen() -> bool:
        close_dialogs(page)  # JupyterLab's, which may come late, that the server was away; nothing is read through it
        found[:] = axe.violations(page, ".nbc-side")
        return not any("was seen" in text for text in found)

    wait_until(seen, 60, "the sidebar to be in front")
    assert found == []


def test_a_page_that_is_loaded_without_the_extension_says_the_same(page: "Page") -> None:
    page.reload()
    show_sidebar(page)
    page.get_by_text("The Jupyter server has no notebook-cluster extension").wait_for(timeout=PATIENCE)
    assert page.locator(".nbc-side section").count() == 0


def test_it_is_live_by_itself_when_the_extension_is_there(page: "Page", lab: Lab) -> None:
    switch_extension(lab, on=True)
    page.get_by_role("switch", name="Share this machine").wait_for(timeout=PATIENCE)
    assert page.get_by_role("switch").is_enabled()
    assert page.locator(".nbc-side-banner").count() == 0


def test_a_page_with_the_token_of_before_is_told_to_log_in_again(page: "Page", lab: Lab) -> None:
    lab.end()
    lab.token = secrets.token_hex(16)
    Path(lab.environment["JUPYTER_RUNTIME_DIR"], "jupyter_cookie_secret").unlink()  # else its cookie is good
    lab.start()
    page.get_by_text("The Jupyter server refuses this page: log in again").wait_for(timeout=PATIENCE)
    assert page.get_by_role("switch").is_disabled()
    page.goto(f"/lab?token={lab.token}")
    show_sidebar(page)
    page.get_by_role("switch", name="Share this machine").wait_for(timeout=PATIENCE)
    assert page.locator(".nbc-side-banner").count() == 0
