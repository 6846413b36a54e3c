"""A real JupyterLab and a real Chromium for tests and for the pictures in docs/.

with running_lab(folder) as lab, browser_page(lab) as page:
    open_notebook(page, "panel.ipynb")
    run_all(page)
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from tests.cluster import stop_all
from tests.command import end_programs
from tests.conftest import MARK, end_processes, marked_processes, shared_folders, wait_until
from tests.ports import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = Path("/usr/bin/chromium")
CHROMIUM_OPTIONS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars",
]  # fmt: skip
EXTENSION = Path(__file__).parents[1] / "notebook_cluster" / "labextension"
"""The JupyterLab part, where it is built."""
PATIENCE = 60_000
"""Milliseconds for what a page shows only after kernels have started."""
KERNEL = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
"""Of the open notebook, in a page."""

needs_chromium = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no {CHROMIUM}: apt-get install chromium"),
]
needs_extension = [
    *needs_chromium,
    pytest.mark.skipif(not (EXTENSION / "schemas").exists(), reason="not built: make labextension"),
]
"""For ``pytestmark`` of files with tests in a browser."""


@dataclass
class Lab:
    """A running JupyterLab. ``settings`` is the folder of its user settings; a page that is opened later obeys them.
    ``program``: a module of Python, and options, that runs in place of ``jupyterlab``."""

    url: str
    token: str
    folder: Path
    settings: Path
    environment: dict[str, str]
    program: tuple[str, ...] = ("jupyterlab",)
    _process: "subprocess.Popen[bytes] | None" = None

    @property
    def private(self) -> Path:
        """The folder of all its own files."""
        return self.folder / ".lab"

    @property
    def options(self) -> list[str]:
        """Of any server that shows its pages: its settings, what a test looks at, and nothing from the network."""
        return [
            "--KernelManager.transport=ipc", "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
            f"--LabApp.user_settings_dir={self.settings}", f"--LabApp.workspaces_dir={self.private / 'workspaces'}",
        ]  # fmt: skip

    def start(self) -> None:
        """Run its server until :meth:`end`, at the same address each time; returns when it answers."""
        command = [
            sys.executable, "-m", *self.program, "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={self.url.rpartition(':')[2]}", "--ServerApp.port_retries=0",
            f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.folder}", *self.options,
        ]  # fmt: skip
        with (self.private / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        _wait_for_server(self, self._process, self.private / "server.log")

    def end(self) -> None:
        """End its server, which ends its kernels first."""
        process, self._process = self._process, None
        if process is not None:
            end_programs(process, seconds=20)


def write_notebook(path: Path, cells: Sequence[str], kernel: str = "python3") -> Path:
    """A notebook with these code cells for the kernel of this name."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
        metadata={"kernelspec": {"name": kernel, "display_name": kernel, "language": "python"}},
    )
    nbformat.write(notebook, path)
    return path


@contextmanager
def running_lab(
    folder: Path,
    environment: dict[str, str] | None = None,
    dark: bool = False,
    program: tuple[str, ...] = ("jupyterlab",),
) -> Iterator[Lab]:
    """:func:`prepared_lab` that runs."""
    with prepared_lab(folder, environment, dark, program) as lab:
        try:
            lab.start()
            yield lab
        finally:
            lab.end()


@contextmanager
def prepared_lab(
    folder: Path,
    environment: dict[str, str] | None = None,
    dark: bool = False,
    program: tuple[str, ...] = ("jupyterlab",),
) -> Iterator[Lab]:
    """JupyterLab on loopback with a token; its notebooks lie in ``folder``, all its own files in ``folder/.lab``.

    ``environment`` is put on top of this process's; JUPYTER_RUNTIME_DIR and the like are kept where they are set there.
    Its kernels use ipc sockets (why: see :mod:`tests.ipc_kernels`), so the runtime folder has a short path.
    """
    private = folder / ".lab"
    runtime = Path(tempfile.mkdtemp(prefix="nbl-", dir="/tmp"))
    own = {
        "JUPYTER_CONFIG_DIR": private / "config", "JUPYTER_DATA_DIR": private / "data",
        "JUPYTER_RUNTIME_DIR": runtime, "IPYTHONDIR": private / "ipython",
    }  # fmt: skip
    variables = os.environ | {name: str(path) for name, path in own.items()} | (environment or {})
    for name in own:
        Path(variables[name]).mkdir(parents=True, exist_ok=True, mode=0o700)
    settings = private / "settings"
    _write_settings(settings, dark)
    _check_no_build(Path(variables["JUPYTER_CONFIG_DIR"]))
    try:
        yield Lab(f"http://127.0.0.1:{free_port()}", secrets.token_hex(16), folder, settings, variables, program)
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


@contextmanager
def lab_with_extension(
    folder: Path, mark: str = "", environment: dict[str, str] | None = None, program: tuple[str, ...] = ("jupyterlab",)
) -> Iterator[Lab]:
    """:func:`running_lab` with our JupyterLab part as it was built, whatever is installed; no process with ``mark``
    (by default one of its own) is left."""
    mark = mark or uuid.uuid4().hex
    try:
        ours = {"JUPYTER_PATH": path_to_extension(folder), MARK: mark}
        with running_lab(folder, ours | (environment or {}), program=program) as running:
            yield running
        wait_until(lambda: not marked_processes(mark), 60, lambda: f"the end of {marked_processes(mark)}")
    finally:
        end_processes(marked_processes(mark))


def path_to_extension(folder: Path) -> str:
    """JUPYTER_PATH of a lab in ``folder`` that is to find our JupyterLab part."""
    extensions = folder / "share" / "labextensions"
    extensions.mkdir(parents=True)
    (extensions / "notebook-cluster").symlink_to(EXTENSION)
    return str(extensions.parent)


@contextmanager
def shared_lab() -> Iterator[Lab]:
    """JupyterLab for all tests of a file; clusters that their notebooks have left running are stopped at its end."""
    with shared_folders() as folder:
        try:
            with running_lab(folder, environment=dict(os.environ)) as running:
                yield running
        finally:
            stop_all()


@contextmanager
def browser_page(lab: Lab, width: int = 1280, height: int = 1000) -> Iterator["Page"]:
    """A page of the system's Chromium that is logged in to ``lab``, which it does not show yet."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_OPTIONS)
        try:
            context = browser.new_context(base_url=f"{lab.url}/", viewport={"width": width, "height": height})
            context.set_default_timeout(PATIENCE)
            page = context.new_page()
            page.goto(f"api/status?token={lab.token}")
            yield page
        finally:
            browser.close()


def open_notebook(page: "Page", name: str) -> None:
    """Open notebook ``name`` alone, without side bars, and wait until its kernel is idle."""
    page.goto(f"lab/tree/{name}?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    page.evaluate("window.jupyterapp.shell.collapseLeft()")
    wait_for_kernel(page)


def open_next_notebook(page: "Page", name: str) -> None:
    """:func:`open_notebook` in place of what is open, whose kernels end. JupyterLab is loaded only where the page does
    not show it yet: that takes most of the time."""
    if not page.evaluate("'jupyterapp' in window"):
        return open_notebook(page, name)
    page.evaluate(
        """async name => {
            const { commands, serviceManager, shell } = window.jupyterapp;
            for (const widget of [...shell.widgets('main')]) {
                const session = widget.sessionContext?.session?.id;
                widget.dispose();
                if (session) await serviceManager.sessions.shutdown(session);
            }
            await commands.execute('docmanager:open', { path: name });
        }""",
        name,
    )
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    return wait_for_kernel(page)


def replace_cells(page: "Page", name: str, cells: Sequence[str], kernel: str = "python3") -> bool:
    """Give the open notebook other cells and another name, with the kernel that it has: a new one takes seconds.

    False where there is none, or where it is another one, or busy with what a test has left.
    """
    replaced: bool = page.evaluate(
        """async ([name, sources, kernel]) => {
            const notebook = window.jupyterapp?.shell.currentWidget;
            const running = notebook?.sessionContext?.session?.kernel;
            const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];
            const waits = prompts.some(prompt => prompt.textContent.includes('*'));
            if (running?.status !== 'idle' || running.name !== kernel || waits) return false;
            const cells = notebook.content.model.sharedModel;
            const before = cells.cells.length;
            const code = source => ({ cell_type: 'code', source, metadata: { trusted: true }, outputs: [] });
            cells.insertCells(before, sources.map(code));
            cells.deleteCellRange(0, before);
            await notebook.context.rename(name);
            return true;
        }""",
        [name, list(cells), kernel],
    )
    return replaced


def leave(page: "Page") -> None:
    """End all kernels and show nothing of JupyterLab: with the next notebook it is loaded anew, and obeys settings that
    were made before."""
    if page.evaluate("'jupyterapp' in window"):
        shut_down_kernels(page)
    page.goto("api/status")


def wait_for_kernel(page: "Page", status: str = "idle", timeout: float = 60.0) -> None:
    """Wait until the kernel of the open notebook has this status."""
    page.wait_for_function(
        "status => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === status",
        arg=status,
        timeout=timeout * 1000,
    )


def begin_new_kernel(page: "Page") -> None:
    """Restart the kernel of the open notebook, once that has it; returns when Jupyter Server has an answer of the new
    one. This page may never hear it, one that is loaded then does."""
    page.wait_for_function(f"!!{KERNEL.replace('.', '?.')}", timeout=PATIENCE)  # a page that was reloaded looks for it
    page.evaluate(f"{KERNEL}.restart()")


def restart_kernel(page: "Page") -> None:
    """:func:`begin_new_kernel`, and wait until it is idle.

    A new kernel may say so before Jupyter Server listens to it again (seen where a page had connected 0.3 s before):
    then the page connects once more, as people do with "Reconnect to Kernel".
    """
    from playwright.sync_api import TimeoutError

    begin_new_kernel(page)
    for _ in range(int(PATIENCE / 5000) - 1):
        try:
            return wait_for_kernel(page, timeout=5)
        except TimeoutError:
            page.evaluate(f"void {KERNEL}.reconnect()")
    return wait_for_kernel(page, timeout=5)


def run_all(page: "Page") -> None:
    """Run all cells of the open notebook; returns at once."""
    page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")


def set_comms_over_subshells(lab: Lab, value: str) -> None:
    """JupyterLab's setting of this name, for pages that are opened later: do comm messages go to subshells?"""
    path = lab.settings / "@jupyterlab" / "apputils-extension" / "kernels-settings.jupyterlab-settings"
    path.write_text(json.dumps({"commsOverSubshells": value}))


def save(page: "Page") -> None:
    """Save the open notebook."""
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")


def shut_down_kernels(page: "Page") -> None:
    """End every kernel of the lab."""
    page.evaluate("window.jupyterapp.serviceManager.sessions.shutdownAll()")


def stop_clusters(lab: Lab) -> None:
    """End every cluster of the lab: where only some tests of a file ran, a busy one outlives the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR"):
            patch.setenv(name, lab.environment[name])
        stop_all()


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


def _check_no_build(config: Path) -> None:
    """Else each page that is opened starts Node.js, to see whether JupyterLab should be built anew. What a test has
    written into the page's configuration stays."""
    file = config / "labconfig" / "page_config.json"
    file.parent.mkdir(exist_ok=True)
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({"buildCheck": False, "buildAvailable": False} | settings))


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
