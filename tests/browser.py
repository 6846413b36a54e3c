"""A real JupyterLab and a real Chromium for tests and for the pictures in docs/.

with running_lab(folder) as lab, browser_page(lab) as page:
    open_notebook(page, "panel.ipynb")
    run_all(page)
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = Path("/usr/bin/chromium")
CHROMIUM_OPTIONS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars",
]  # fmt: skip


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab. ``settings`` is the folder of its user settings; a page that is opened later obeys them."""

    url: str
    token: str
    folder: Path
    settings: Path


def write_notebook(path: Path, cells: Sequence[str]) -> Path:
    """A notebook with these code cells for the kernel ``python3``."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(notebook, path)
    return path


@contextmanager
def running_lab(folder: Path, environment: dict[str, str] | None = None, dark: bool = False) -> Iterator[Lab]:
    """JupyterLab on loopback with a token; its notebooks lie in ``folder``, all its own files in ``folder/.lab``.

    ``environment`` is put on top of this process's; JUPYTER_RUNTIME_DIR and the like are kept where they are set there.
    """
    private = folder / ".lab"
    own = {
        "JUPYTER_CONFIG_DIR": private / "config", "JUPYTER_DATA_DIR": private / "data",
        "JUPYTER_RUNTIME_DIR": private / "run", "IPYTHONDIR": private / "ipython",
    }  # fmt: skip
    variables = os.environ | {name: str(path) for name, path in own.items()} | (environment or {})
    for name in own:
        Path(variables[name]).mkdir(parents=True, exist_ok=True, mode=0o700)
    settings = private / "settings"
    _write_settings(settings, dark)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lab = Lab(f"http://127.0.0.1:{port}", secrets.token_hex(16), folder, settings)
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={lab.token}",
        f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", f"--LabApp.user_settings_dir={settings}",
        f"--LabApp.workspaces_dir={private / 'workspaces'}",
    ]  # fmt: skip
    with (private / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        _wait_for_server(lab, process, private / "server.log")
        yield lab
    finally:
        process.terminate()  # jupyter_server ends its kernels first
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


@contextmanager
def browser_page(lab: Lab, width: int = 1280, height: int = 1000) -> Iterator["Page"]:
    """A page of the system's Chromium that is logged in to ``lab``."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_OPTIONS)
        try:
            context = browser.new_context(base_url=lab.url, viewport={"width": width, "height": height})
            page = context.new_page()
            page.goto(f"/lab?token={lab.token}")
            yield page
        finally:
            browser.close()


def open_notebook(page: "Page", name: str) -> None:
    """Open notebook ``name`` alone, without side bars, and wait until its kernel is idle."""
    page.goto(f"/lab/tree/{name}?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    page.evaluate("window.jupyterapp.shell.collapseLeft()")
    wait_for_kernel(page)


def wait_for_kernel(page: "Page", status: str = "idle", timeout: float = 60.0) -> None:
    """Wait until the kernel of the open notebook has this status."""
    page.wait_for_function(
        "status => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === status",
        arg=status,
        timeout=timeout * 1000,
    )


def run_all(page: "Page") -> None:
    """Run all cells of the open notebook; returns at once."""
    page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")


def save(page: "Page") -> None:
    """Save the open notebook."""
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")


def shut_down_kernels(page: "Page") -> None:
    """End every kernel of the lab."""
    page.evaluate("window.jupyterapp.serviceManager.sessions.shutdownAll()")


def _write_settings(folder: Path, dark: bool) -> None:
    """No question about news, no cells that exist only while they are on the screen."""
    values = {
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
        "apputils-extension/themes": {"theme": "JupyterLab Dark" if dark else "JupyterLab Light"},
        "notebook-extension/tracker": {"windowingMode": "none"},
    }
    for name, value in values.items():
        path = folder / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))


def _wait_for_server(lab: Lab, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 60
    request = urllib.request.Request(f"{lab.url}/api/status", headers={"Authorization": f"token {lab.token}"})
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"JupyterLab did not start:\n{log.read_text(errors='replace')[-3000:]}") from None
            time.sleep(0.1)
