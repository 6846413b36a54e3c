"""JupyterHub: a user's server behind the hub's proxy and below a prefix, and the culler that ends it.

The tests go on where the one before them ended.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from notebook_cluster.client import list_clusters
from tests.browser import PATIENCE, needs_extension, open_notebook, run_all, write_notebook
from tests.cluster import stop_all
from tests.conftest import shared_folders, wait_until
from tests.engines.hub import PREFIX, Hub, no_hub, running_hub
from tests.sidebar_page import cluster, node, run_cell, show_sidebar, unfold, wait_for_round

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [*needs_extension, pytest.mark.skipif(bool(no_hub()), reason=no_hub())]

USER = "ann"
START = "%load_ext notebook_cluster\n%cluster start lesson --local 2"
TRAIN = """%%on_all
import os, time, torch
model = torch.nn.Linear(20, 1)
sync = nc.DiLoCo(model, every=5{more})
print("begins at round", sync.round, flush=True)
while sync.round < 6 or not os.path.exists("go"):
    loss = model(torch.randn(32, 20)).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    sync.step(loss)
    time.sleep(0.02)
sync.finish()
print("secrets:", [name for name in os.environ if "TOKEN" in name])
"""
FOR_A_MOMENT = """%load_ext notebook_cluster
from notebook_cluster.client import Cluster
Cluster.start("lesson", local=2, lease=2.0).close()
%cluster attach lesson"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with shared_folders() as root, running_hub(root / "hub") as running:
        try:
            yield running
        finally:
            stop_all()


@pytest.fixture(scope="module")
def page(hub: Hub) -> Iterator["Page"]:
    """A notebook whose cells are run one after the other, and the sidebar."""
    write_notebook(hub.home(USER) / "first.ipynb", [START, TRAIN.format(more=""), "%cluster stop"])
    with hub.page(USER) as opened:
        open_notebook(opened, "first.ipynb")
        show_sidebar(opened)
        yield opened


def test_sidebar_panel_and_training_work_below_the_prefix(page: "Page", hub: Hub) -> None:
    assert f"{PREFIX}user/{USER}/" in page.url
    run_cell(page, 0)
    run_cell(page, 1)
    wait_for_round(page, 3)
    page.locator(".jp-OutputArea .nbc-node").first.wait_for(timeout=PATIENCE)  # the panel under the first cell
    (hub.home(USER) / "go").touch()
    # no node has the key to its user's account, which is in the environment of the server
    page.get_by_text("secrets: []").first.wait_for(timeout=PATIENCE)
    page.screenshot(path=hub.folder / "hub.png")


def test_this_machine_is_shared_and_added_below_the_prefix(page: "Page") -> None:
    switch = page.get_by_role("switch", name="Share this machine")
    switch.click()
    shared = page.locator(".nbc-side-shared")
    shared.wait_for(timeout=PATIENCE)
    name, command = shared.locator("b").inner_text(), shared.locator(".nbc-side-command").inner_text()
    assert command.startswith("%cluster add ")
    page.get_by_role("button", name=f"Add {name} to lesson").click(timeout=PATIENCE)  # the panel has one as well
    node(page, name).wait_for(timeout=PATIENCE)
    switch.click()
    shared.wait_for(state="detached", timeout=PATIENCE)
    run_cell(page, 2)
    unfold(page)
    cluster(page).get_by_text("cluster 'lesson' has ended: stopped").wait_for(timeout=PATIENCE)


def test_the_culler_ends_the_server_nodes_end_with_the_lease_and_the_next_start_finds_what_was_kept(
    page: "Page", hub: Hub
) -> None:
    go = hub.home(USER) / "go"
    go.unlink(missing_ok=True)
    stop_all()  # where the test before did not come to that
    write_notebook(hub.home(USER) / "second.ipynb", [FOR_A_MOMENT, TRAIN.format(more="")])
    open_notebook(page, "second.ipynb")
    show_sidebar(page)
    run_all(page)
    wait_for_round(page, 6)
    page.goto("about:blank")
    with hub.culler(seconds=3):
        wait_until(lambda: not hub.has_server(USER), 120, "the culler")
    # The cell runs: that keeps the cluster, as it would where only the browser was closed.
    assert [file.cluster for file in list_clusters()] == ["lesson"]
    go.touch()
    wait_until(lambda: not list_clusters(), 60, "the end of the lease")
    kept = kept_round(hub.home(USER))
    assert kept >= 6

    write_notebook(hub.home(USER) / "third.ipynb", [START, TRAIN.format(more=", resume='model-kept'")])
    hub.start_server(page, USER)
    open_notebook(page, "third.ipynb")
    run_all(page)
    printed = page.locator(".jp-OutputArea-output pre")
    printed.filter(has_text=f"local has kept 'model-kept' of job 'model' (round {kept},").wait_for(timeout=PATIENCE)
    page.get_by_text(f"begins at round {kept}").first.wait_for(timeout=PATIENCE)
    page.get_by_text("secrets: []").first.wait_for(timeout=PATIENCE)
    page.screenshot(path=hub.folder / "culled.png")


def test_who_comes_back_within_the_lease_finds_the_cluster_as_it_was(page: "Page", hub: Hub) -> None:
    assert [file.cluster for file in list_clusters()] == ["lesson"]
    page.goto("about:blank")
    with hub.culler(seconds=3):
        wait_until(lambda: not hub.has_server(USER), 120, "the culler")
    write_notebook(hub.home(USER) / "fourth.ipynb", [START, "%%on_all\nprint('still at round', sync.round)"])
    hub.start_server(page, USER)
    open_notebook(page, "fourth.ipynb")
    run_all(page)
    page.get_by_text("attached to cluster 'lesson', which runs already").wait_for(timeout=PATIENCE)
    page.get_by_text("still at round").first.wait_for(timeout=PATIENCE)


def kept_round(home: Path) -> int:
    """The newest that nodes have kept in ``home``."""
    return max(int(folder.name.split("-")[1]) for folder in home.glob("checkpoints/model-kept/round-*"))
