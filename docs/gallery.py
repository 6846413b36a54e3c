"""The gallery: example notebooks as they were executed (``docs/gallery/*.ipynb.gz``), a page of the site for each.

``python -m docs.gallery [NAME ...]`` runs them, keeps what they show without names and folders of the machine, and
takes a picture of each in the system's Chromium. mkdocs calls :func:`on_files` and :func:`on_page_markdown`.
"""

import contextlib
import getpass
import gzip
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "example_notebooks"
FOLDER = Path(__file__).with_name("gallery")
SHOWN = {
    "01_quickstart": "chart",
    "02_text": "train",
    "03_cells": "plot",
    "05_finetune": "together",
    "06_overnight": "morning",
    "06_slurm": "status",
    "lessons/1_many_machines": "darts",
    "lessons/4_a_machine_fails": "accident",
}
"""Notebook -> the cell at which its picture begins."""
WIDTH, HEIGHT = 1000, 520
"""Of a picture, in pixels."""
_BEGINS = """cell => (cell.offsetHeight > innerHeight ? cell.querySelector('.jp-OutputArea') : cell).scrollIntoView()"""
"""What a long cell shows is more than how it is written."""


def source_of(name: str) -> Path:
    """The notebook that people open."""
    return EXAMPLES / f"{name}.ipynb"


def executed(name: str) -> Path:
    """Where it is kept with what it shows."""
    return FOLDER / f"{name.replace('/', '_')}.ipynb.gz"


def page_of(name: str) -> str:
    """The address in the site."""
    return f"gallery/{name.replace('/', '_')}.html"


def picture_of(name: str) -> Path:
    """Where its picture is."""
    return FOLDER / f"{name.replace('/', '_')}.png"


def read(name: str) -> Any:
    """What was executed."""
    return nbformat.reads(gzip.decompress(executed(name).read_bytes()).decode(), as_version=4)


def render(name: str) -> str:
    """One page, which loads nothing: as JupyterLab looks, by nbconvert, without what that takes from elsewhere."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="lab", embed_images=True, exclude_anchor_links=True)
    exporter.mathjax_url = exporter.require_js_url = exporter.mermaid_js_url = exporter.jquery_url = ""
    page, _ = exporter.from_notebook_node(read(name), {"metadata": {"name": title_of(read(name))}})
    page = re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)
    way_back = '<p style="padding: 12px 24px 0; font-family: sans-serif"><a href="../gallery/">Gallery</a></p>'
    return re.sub(r"(<body[^>]*>)", lambda found: found[1] + way_back, page, count=1)


def title_of(notebook: Any) -> str:
    """Its first heading."""
    return str(notebook.cells[0].source.splitlines()[0].lstrip("# "))


def on_files(files: Any, config: Any) -> Any:
    """A hook of mkdocs: the pages are among the site's files."""
    from mkdocs.structure.files import File

    for name in SHOWN:
        files.append(File.generated(config, page_of(name), content=render(name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A hook of mkdocs: each picture leads to its page, which is in the site alone."""
    if page.file.src_uri != "gallery.md":
        return markdown
    for name in SHOWN:
        picture = re.search(
            rf"!\[[^\]]*\]\(gallery/{re.escape(executed(name).name.removesuffix('.ipynb.gz'))}\.png\)", markdown
        )
        if picture is None:
            raise ValueError(f"docs/gallery.md shows no picture of {name}")
        address = page_of(name)
        markdown = markdown.replace(
            picture[0], f"[{picture[0]}]({address})\n\n[The notebook with its output]({address})"
        )
    return markdown


# ---- made here, and kept


def plain(text: str, folder: str) -> str:
    """Without what only the machine is about on which it was executed."""
    known = {folder: "/home/ann/notebooks", str(ROOT): "/home/ann/notebook-cluster", platform.node(): "laptop"}
    for told, said in known.items():
        text = text.replace(told, said)
    text = re.sub(r"/tmp/[\w.-]+", "/tmp/ann", text)
    text = re.sub(rf"\b{re.escape(getpass.getuser())}@", "ann@", text)
    return re.sub(r"Intel\(R\)[^<\"\\·]*Processor|AMD [^<\"\\·]*Processor", "cpu", text)


def execute(name: str) -> Any:
    """The notebook with what it shows on machines that this one plays."""
    from tests.cluster import stop_all
    from tests.conftest import shared_folders
    from tests.engines.running import slurm
    from tests.ipc_kernels import run_notebook

    notebook = nbformat.read(source_of(name), as_version=4)
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(shared_folders())
        stack.callback(stop_all)  # lessons leave theirs to the teacher
        if "slurm" in name:
            stack.enter_context(slurm(3))
        work = root / "notebooks"
        work.mkdir()
        run_notebook(notebook, work, timeout=600)
        made = nbformat.reads(plain(nbformat.writes(notebook), str(work)), as_version=4)
    for cell in made.cells:
        cell.metadata.pop("execution", None)
    return made


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A page that loads nothing from elsewhere."""
    from playwright.sync_api import sync_playwright

    from tests.browser import CHROMIUM, CHROMIUM_OPTIONS

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_OPTIONS)
        try:
            yield browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, offline=True).new_page()
        finally:
            browser.close()


def main(names: list[str]) -> None:
    if unknown := set(names) - set(SHOWN):
        sys.exit(f"no notebook {', '.join(sorted(unknown))}: say {', '.join(SHOWN)}")
    FOLDER.mkdir(exist_ok=True)
    for name in names or SHOWN:
        written = gzip.compress(nbformat.writes(execute(name)).encode(), mtime=0)
        executed(name).write_bytes(written)
        print(f"{executed(name)}: {len(written):,} bytes", file=sys.stderr)
    with chromium() as page:
        for name in names or SHOWN:
            page.set_content(render(name))
            page.locator(f"[id='cell-id={SHOWN[name]}']").evaluate(_BEGINS)
            page.screenshot(path=picture_of(name))


if __name__ == "__main__":
    os.environ.pop("JUPYTER_RUNTIME_DIR", None)
    main(sys.argv[1:])
