"""Take docs/sidebar.png and docs/sidebar-dark.png: ``make picture``. The sidebar while the quickstart's model trains.

Needs the ``test`` extra, the system's Chromium and the JupyterLab part (``make labextension``).
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat

from example_notebooks.demo import NOTEBOOK, private_jupyter, stop_clusters
from notebook_cluster.server.sharing import share_off
from tests.browser import browser_page, open_notebook, run_all, running_lab, write_notebook
from tests.strangers import Stranger

if TYPE_CHECKING:
    from playwright.sync_api import Page

FOLDER = Path(__file__).parent
EXTENSION = FOLDER.parent / "notebook_cluster" / "labextension"
CLUSTER = "lesson"
START = f"%load_ext notebook_cluster\n%cluster start {CLUSTER} --local 1 --no-panel"
LOOK = "%%on_all\nprint(nc.node(), 'computes on', device)"
PATIENCE = 60_000
# Who else is on this network is nobody's business.
ONLY_OURS = """
.nbc-side-peer:not([aria-label="peer attic"], [aria-label="peer studio"]),
.nbc-side-choice:not(:has([value="all"], [value="attic"], [value="studio"])) { display: none }
"""


def cells() -> list[str]:
    """The quickstart's model, trained for longer, with checkpoints."""
    sources = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    data, training = (
        next(source for source in sources if word in source) for word in ("load_digits", "def train_model")
    )
    return [START, LOOK, data, training, '%%on_all\ntrain_model("digits", steps=3000)']


def wait_for_round(page: "Page", number: int) -> None:
    page.wait_for_function(
        """number => {
            const text = document.querySelector('.nbc-side-status')?.textContent;
            return Number(/round (\\d+)/.exec(text)?.[1]) >= number;
        }""",
        arg=number,
        timeout=PATIENCE,
    )


def take_pictures(page: "Page", peer: Stranger) -> None:
    """From the empty notebook to both pictures."""
    page.evaluate("void window.jupyterapp.commands.execute('notebook-cluster:show')")
    page.locator(".nbc-side").first.wait_for(timeout=PATIENCE)
    page.add_style_tag(content=ONLY_OURS)
    page.get_by_role("switch").click()
    run_all(page)
    page.get_by_role("region", name=f"cluster {CLUSTER}").wait_for(timeout=PATIENCE)
    page.get_by_role("textbox", name=f"Code that {peer.name} shows").fill(peer.code, timeout=PATIENCE)
    page.get_by_role("button", name=f"Add {peer.name} to {CLUSTER}").click()
    page.get_by_role("listitem", name=f"node {peer.name}, ok").wait_for(timeout=PATIENCE)
    page.locator(".nbc-side-shared").wait_for(timeout=PATIENCE)
    wait_for_round(page, 12)
    page.get_by_role("button", name="More …").click()
    page.get_by_role("button", name="Checkpoint", exact=True).click()
    page.get_by_text("checkpoint digits").first.wait_for(timeout=PATIENCE)
    page.get_by_role("button", name="Less", exact=True).click()
    page.screenshot(path=FOLDER / "sidebar.png")
    page.evaluate("window.jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Dark' })")
    page.get_by_role("button", name="Dashboard").click()
    page.get_by_role("img", name="Loss over").wait_for(timeout=PATIENCE)
    wait_for_round(page, 18)
    page.screenshot(path=FOLDER / "sidebar-dark.png")


@contextmanager
def ending(*strangers: Stranger) -> Iterator[tuple[Stranger, ...]]:
    try:
        yield strangers
    finally:
        for stranger in strangers:
            stranger.end()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="nbc-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        private_jupyter(scratch)
        extensions = scratch / "share" / "labextensions"
        extensions.mkdir(parents=True)
        (extensions / "notebook-cluster").symlink_to(EXTENSION)
        notebooks = scratch / "notebooks"
        notebooks.mkdir()
        write_notebook(notebooks / "lesson.ipynb", cells())
        environment = dict(os.environ) | {"JUPYTER_PATH": str(extensions.parent)}
        with (
            ending(Stranger(scratch, "attic"), Stranger(scratch, "studio")) as (_, studio),
            running_lab(notebooks, environment) as lab,
            browser_page(lab, width=1280, height=960) as page,
        ):
            open_notebook(page, "lesson.ipynb")
            try:
                take_pictures(page, studio)
            finally:
                share_off()
                stop_clusters()


if __name__ == "__main__":
    main()
