"""The oldest JupyterLab that is supported, and Notebook 7: the sidebar reaches its server, and a panel acts.

The other tests in a browser run in the newest JupyterLab.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import (
    PATIENCE,
    browser_page,
    lab_with_extension,
    needs_extension,
    run_all,
    shut_down_kernels,
    wait_for_kernel,
    write_notebook,
)
from tests.other_versions import installed
from tests.panel_notebook import BUSY_UNTIL_ADDED, SHOW
from tests.sidebar_page import show_sidebar

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_extension

OLDEST_LAB = "4.4.0"
NOTEBOOKS = {"4.4": "7.4.7", "4.5": "7.5.8", "4.6": "7.6.5"}
"""Minor version of JupyterLab -> a Notebook that is made of it."""


@contextmanager
def opened(folder: Path, packages: Path, program: tuple[str, ...], path: str) -> Iterator["Page"]:
    """A page that shows a notebook with a panel and a cell that waits for its button.

    The folder ``packages`` is in front of the path, and JupyterLab's own files are those in it, where it has some.
    """
    environment = {"PYTHONPATH": os.pathsep.join([str(packages), os.environ["PYTHONPATH"]])}
    if ((files := packages / "share" / "jupyter" / "lab") / "static").is_dir():
        environment["JUPYTERLAB_DIR"] = str(files)
    with lab_with_extension(folder, environment=environment, program=program) as lab, browser_page(lab) as page:
        write_notebook(lab.folder / "panel.ipynb", [SHOW, BUSY_UNTIL_ADDED])
        page.goto(path)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=PATIENCE)
        wait_for_kernel(page)
        yield page
        shut_down_kernels(page)


def use(page: "Page") -> None:
    """Look at the sidebar, then press a button of the panel while a cell runs."""
    show_sidebar(page)
    sidebar = page.locator("#notebook-cluster-sidebar")
    # This is there once the server has told what there is.
    sidebar.get_by_role("region", name="Start a cluster").wait_for(timeout=PATIENCE)
    run_all(page)
    page.get_by_role("button", name="Add attic").click(timeout=PATIENCE)
    page.get_by_text("the cell saw [('add', 'attic')]").wait_for(timeout=PATIENCE)


def test_the_oldest_jupyterlab(tmp_path: Path) -> None:
    packages = installed("jupyterlab", OLDEST_LAB)
    with opened(tmp_path, packages, ("jupyterlab",), "/lab/tree/panel.ipynb?reset") as page:
        assert page.evaluate("window.jupyterapp.version") == OLDEST_LAB
        use(page)
        page.screenshot(path=tmp_path / "lab.png")


def test_notebook_7(tmp_path: Path) -> None:
    wanted = NOTEBOOKS.get(version("jupyterlab").rpartition(".")[0])
    if wanted is None:
        pytest.skip(f"no Notebook is known for JupyterLab {version('jupyterlab')}: add one to NOTEBOOKS")
    packages = installed("notebook", wanted)
    program = ("notebook", "--JupyterNotebookApp.expose_app_in_browser=True")
    with opened(tmp_path, packages, program, "/notebooks/panel.ipynb") as page:
        assert page.evaluate("window.jupyterapp.name") == "Jupyter Notebook"
        use(page)
        page.screenshot(path=tmp_path / "notebook.png")
