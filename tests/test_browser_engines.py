"""The sidebar starts a cluster on hosts of an engine: a Slurm of the tests' own, and one that another package brings.

The tests are one lesson in the order of the file.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import axe
from tests.browser import PATIENCE, Lab, browser_page, lab_with_extension, needs_extension, stop_clusters
from tests.command import COMMAND
from tests.conftest import wait_until
from tests.engines.processes import install
from tests.engines.running import Slurm, ask, no_slurm, slurm
from tests.sidebar_page import press_and_confirm, show_more, show_sidebar, use_theme

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = needs_extension
needs_slurm = pytest.mark.skipif(bool(no_slurm()), reason=no_slurm() or "there is one")

ROOT = str(Path(__file__).parent.parent)
NARROW = 900
"""Pixels."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Slurm | None]:
    """None where there can be no Slurm."""
    if no_slurm():
        yield None
        return
    with slurm() as running:
        yield running


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, engine: Slurm | None) -> Iterator[Lab]:
    """It knows the engine ``processes``, as pip makes it known."""
    folder = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        install(folder / "packages")
        known = [str(folder / "packages"), ROOT, os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, known)))
        patch.setenv("PATH", f"{Path(COMMAND).parent}{os.pathsep}{os.environ['PATH']}")
        with lab_with_extension(folder) as running:
            yield running


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator["Page"]:
    """The sidebar, open in a narrow window."""
    with browser_page(lab, width=NARROW) as opened:
        opened.goto("/lab")
        # JupyterLab opens its launcher last and gives it the focus.
        opened.locator(".jp-Launcher:focus").wait_for(timeout=PATIENCE)
        show_sidebar(opened)
        form(opened).get_by_role("combobox", name="On").wait_for(timeout=PATIENCE)
        yield opened
        stop_clusters(lab)


def form(page: "Page") -> "Locator":
    return page.get_by_role("region", name="Start a cluster")


def cluster(page: "Page", name: str) -> "Locator":
    return page.get_by_role("region", name=f"cluster {name}")


def walk_to(page: "Page", wanted: "Locator") -> None:
    """Press Tab until ``wanted`` has the focus."""
    for _ in range(20):
        if wanted.evaluate("one => one === document.activeElement"):
            return
        page.keyboard.press("Tab")
    pytest.fail(f"the keyboard does not reach {wanted}")


def start(page: "Page") -> "Locator":
    return form(page).get_by_role("button", name="Start a cluster")


def stop(page: "Page", name: str) -> None:
    show_more(cluster(page, name))
    press_and_confirm(
        cluster(page, name).get_by_role("button", name="Stop cluster"),
        cluster(page, name).get_by_role("button", name=f"Really stop cluster {name} and end all its kernels?"),
    )
    cluster(page, name).get_by_role("button", name="Stop cluster").wait_for(state="detached", timeout=PATIENCE)


def test_all_known_engines_are_offered_and_this_machine_first(page: "Page") -> None:
    listed = form(page).get_by_role("combobox", name="On").locator("option")
    listed.nth(3).wait_for(state="attached", timeout=PATIENCE)
    assert listed.first.inner_text() == "this machine"
    assert {"Slurm", "SSH", "processes"} < set(listed.all_inner_texts())
    assert form(page).get_by_role("spinbutton", name="Hosts").count() == 0


def test_a_cluster_on_an_engine_is_started_with_the_keyboard_alone(page: "Page") -> None:
    name = form(page).get_by_role("textbox", name="Name of a new cluster")
    name.focus()
    page.keyboard.type("hosts")
    walk_to(page, form(page).get_by_role("combobox", name="On"))
    page.keyboard.type("proc")
    hosts = form(page).get_by_role("spinbutton", name="Hosts")
    walk_to(page, hosts)
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("2")
    more = form(page).get_by_role("button", name="More", exact=True)
    walk_to(page, more)
    page.keyboard.press("Enter")
    assert more.get_attribute("aria-expanded") == "true"
    walk_to(page, form(page).get_by_role("textbox", name="Address of this machine"))
    page.keyboard.type("127.0.0.1")
    assert form(page).get_by_role("spinbutton", name="nodes here").input_value() == "0"
    walk_to(page, start(page))
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    for host in ("p0", "p1"):
        cluster(page, "hosts").get_by_role("listitem", name=f"node {host}, ok").wait_for(timeout=PATIENCE)
    cluster(page, "hosts").get_by_text("processes here: 2 running").wait_for(timeout=PATIENCE)
    wait_until(lambda: name.input_value() == "", 60, "the answer")
    assert cluster(page, "hosts").get_by_role("listitem").count() == 2
    assert form(page).get_by_role("alert").count() == 0
    stop(page, "hosts")


def test_names_of_hosts_that_ssh_does_not_take_are_refused_in_its_own_words(page: "Page") -> None:
    form(page).get_by_role("combobox", name="On").select_option("SSH")
    form(page).get_by_role("textbox", name="Name of a new cluster").fill("refused")
    form(page).get_by_text("SSH needs the names of hosts.").wait_for(timeout=PATIENCE)
    assert start(page).is_disabled()
    assert form(page).get_by_role("textbox", name="Partition").count() == 0
    hosts = form(page).get_by_role("textbox", name="Hosts, commas between")
    hosts.fill("-oProxyCommand=x")
    hosts.press("Enter")
    said = form(page).get_by_role("alert")
    said.get_by_text(re.compile(r"--on ssh:-oProxyCommand=x: name hosts of ~/\.ssh/config")).wait_for(timeout=PATIENCE)
    assert hosts.input_value() == "-oProxyCommand=x"
    assert form(page).get_by_role("textbox", name="Name of a new cluster").input_value() == "refused"
    assert form(page).get_by_role("textbox", name="Address of this machine").input_value() == "127.0.0.1"


@needs_slurm
def test_what_slurm_refuses_is_shown_with_all_that_was_typed(page: "Page", engine: Slurm) -> None:
    form(page).get_by_role("combobox", name="On").select_option("Slurm")
    form(page).get_by_role("textbox", name="Name of a new cluster").fill("evening")
    form(page).get_by_role("spinbutton", name="Hosts").fill("2")
    form(page).get_by_role("textbox", name="Time").fill("5")
    partition = form(page).get_by_role("textbox", name="Partition")
    partition.fill("nope")
    partition.press("Enter")
    said = form(page).get_by_role("alert")
    said.get_by_text(re.compile("slurm does not take the job: .*nope.*partitions here are test")).wait_for(
        timeout=PATIENCE
    )
    typed = {
        label: form(page).get_by_label(label, exact=True).input_value() for label in ("Hosts", "Time", "Partition")
    }
    assert typed == {"Hosts": "2", "Time": "5", "Partition": "nope"}
    assert form(page).get_by_role("textbox", name="Name of a new cluster").input_value() == "evening"
    assert engine.jobs() == {}


@pytest.mark.skipif(not axe.SCRIPT.exists(), reason="no axe-core: npm ci in labextension/")
@pytest.mark.parametrize("theme", axe.THEMES)
def test_everyone_can_use_the_form(page: "Page", theme: str) -> None:
    use_theme(page, theme)
    assert axe.violations(page, ".nbc-side:not(.nbc-dash)") == []
    assert axe.violations(page, ".nbc-side:not(.nbc-dash)", zoom=2) == []
    sizes = page.locator(".nbc-side").first.evaluate("one => [one.scrollWidth, one.clientWidth]")
    assert sizes[0] <= sizes[1]  # nothing is cut off at the side


@needs_slurm
def test_hosts_that_wait_are_shown_meanwhile_and_two_quick_clicks_ask_once(page: "Page", engine: Slurm) -> None:
    ask("scontrol", "update", "PartitionName=test", "State=DOWN")
    try:
        form(page).get_by_role("textbox", name="Partition").fill("test")
        start(page).dblclick()
        cluster(page, "evening").get_by_text(
            re.compile(r"slurm \d+: 0 of 2 running, pending: PartitionDown")
        ).first.wait_for(timeout=PATIENCE)
        assert len(engine.jobs()) == 2  # the two hosts of one launch
    finally:
        ask("scontrol", "update", "PartitionName=test", "State=UP")
    for host in ("n1", "n2"):
        cluster(page, "evening").get_by_role("listitem", name=f"node {host}, ok").wait_for(timeout=PATIENCE)
    cluster(page, "evening").get_by_text(re.compile(r"slurm \d+: 2 running$")).wait_for(timeout=PATIENCE)
    assert len(engine.jobs()) == 2
    assert form(page).get_by_text("PartitionDown").count() == 0  # what is so no more is not shown
    stop(page, "evening")
    wait_until(lambda: not engine.jobs(), what=lambda: f"no job: {engine.jobs()}")
