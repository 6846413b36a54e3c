"""Take docs/cells.png: ``make picture``. example_notebooks/03_cells.ipynb as nbclient runs it and nbconvert shows it.

Needs the ``test`` extra and the system's Chromium.
"""

import tempfile
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from playwright.sync_api import sync_playwright

from example_notebooks.demo import private_jupyter
from tests.browser import CHROMIUM, CHROMIUM_OPTIONS
from tests.ipc_kernels import run_notebook

PICTURE = Path(__file__).with_name("cells.png")
NOTEBOOK = Path(__file__).parents[1] / "example_notebooks" / "03_cells.ipynb"
WIDTH = 900


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="nbc-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        private_jupyter(scratch)
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        run_notebook(notebook, scratch, timeout=120)
        page_file = scratch / "cells.html"
        page_file.write_text(HTMLExporter(template_name="lab").from_notebook_node(notebook)[0], encoding="utf-8")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_OPTIONS)
            try:
                page = browser.new_page(viewport={"width": WIDTH, "height": 1000})
                # The page would load a script for formulas, of which there are none here.
                page.route("http*://**", lambda route: route.abort())
                page.goto(page_file.as_uri())
                page.screenshot(path=PICTURE, full_page=True)
            finally:
                browser.close()


if __name__ == "__main__":
    main()
