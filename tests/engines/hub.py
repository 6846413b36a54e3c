"""A JupyterHub of a test's own, below a prefix, and the culler that ends servers which nobody uses."""

import contextlib
import functools
import json
import os
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.browser import CHROMIUM, CHROMIUM_OPTIONS, PATIENCE, Lab, path_to_extension, prepared_lab
from tests.command import end_programs
from tests.conftest import wait_until
from tests.ports import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROXY = Path(__file__).parents[2] / "labextension" / "node_modules" / ".bin" / "configurable-http-proxy"
PREFIX = "/hubprefix/"
PASSWORD = "what is on the board"
_CULLER = {"scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"], "services": ["culler"]}
_TESTS = {"scopes": ["admin:users", "admin:servers"], "services": ["tests"]}


@functools.cache
def no_hub() -> str:
    """Why there can be no JupyterHub here, or an empty text."""
    return "" if PROXY.exists() else f"a JupyterHub needs {PROXY.name}: npm ci in labextension/"


@dataclass
class Hub:
    """Runs. Whoever logs in with :data:`PASSWORD` gets a server for ``folder/home/NAME``, a process of this machine."""

    folder: Path
    url: str
    tokens: dict[str, str]

    def ask(self, what: str, method: str = "GET") -> Any:
        """What its API says of ``users/ann`` and the like; None where it knows nothing of that."""
        headers = {"Authorization": f"token {self.tokens['tests']}"}
        request = urllib.request.Request(f"{self.url}hub/api/{what}", method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None

    def has_server(self, user: str) -> bool:
        """True while ``user`` has one that runs, or one that starts or ends."""
        known = self.ask(f"users/{user}")
        return bool(known and (known["server"] or known["pending"]))

    def home(self, user: str) -> Path:
        """Where the notebooks of ``user`` are."""
        folder = self.folder / "home" / user
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def page(self, user: str) -> Iterator["Page"]:
        """A page of Chromium in which ``user`` has logged in and waited for the server; addresses are below it."""
        from playwright.sync_api import sync_playwright

        self.home(user)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_OPTIONS)
            try:
                own = f"{self.url}user/{user}/"
                page = browser.new_context(base_url=own, viewport={"width": 1280, "height": 1000}).new_page()
                page.goto(f"{self.url}hub/login")
                page.get_by_label("Username").fill(user)
                page.get_by_label("Password").fill(PASSWORD)
                page.get_by_role("button", name="Sign in").click()
                self._enter(page, user)
                yield page
            finally:
                browser.close()

    def start_server(self, page: "Page", user: str) -> None:
        """As the hub's button does for one whose server is gone."""
        page.goto(f"{self.url}hub/spawn")
        self._enter(page, user)

    def _enter(self, page: "Page", user: str) -> None:
        page.wait_for_url(f"{self.url}user/{user}/lab**", timeout=2 * PATIENCE)

    @contextmanager
    def culler(self, seconds: int) -> Iterator[None]:
        """Servers that were idle for so long are ended, by the program that hubs use for it."""
        command = [
            sys.executable, "-m", "jupyterhub_idle_culler", f"--url={self.url}hub/api", f"--timeout={seconds}",
            "--cull-every=2",
        ]  # fmt: skip
        with _program(command, self.folder / "culler.log", {"JUPYTERHUB_API_TOKEN": self.tokens["culler"]}):
            yield


@contextmanager
def _program(command: list[str], log: Path, environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """It runs, and is ended."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=log.parent, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        end_programs(process)


@contextmanager
def running_hub(folder: Path) -> Iterator[Hub]:
    """Of JupyterHub as it is installed: its own proxy, one process for each user's server, no host but this one.

    Servers are given this process's Jupyter folders, and find our JupyterLab part as it was built.
    """
    port, tokens = free_port(), {name: secrets.token_hex(16) for name in ("culler", "tests")}
    hub = Hub(folder, f"http://127.0.0.1:{port}{PREFIX}", tokens)
    configuration, log = folder / "jupyterhub_config.py", folder / "hub.log"
    command = [sys.executable, "-m", "jupyterhub", "-f", str(configuration)]
    with prepared_lab(folder, {"JUPYTER_PATH": path_to_extension(folder)} | dict(os.environ)) as lab:
        configuration.write_text(_configuration(hub, lab))
        with _program(command, log, {"CONFIGPROXY_AUTH_TOKEN": secrets.token_hex(16)}) as process:

            def answers() -> bool:
                assert process.poll() is None, log.read_text()[-4000:]
                with contextlib.suppress(OSError):
                    return hub.ask("users") is not None
                return False

            wait_until(answers, 120, lambda: f"the hub: {log.read_text()[-4000:]}")
            yield hub


def _configuration(hub: Hub, lab: Lab) -> str:
    kept = {
        name: value for name, value in lab.environment.items() if name.startswith(("JUPYTER_", "NOTEBOOK_CLUSTER_"))
    }
    environment = kept | {name: lab.environment[name] for name in ("IPYTHONDIR", "PYTHONPATH")}
    settings = {
        "JupyterHub.bind_url": hub.url.rstrip("/"),
        "JupyterHub.hub_bind_url": f"http://127.0.0.1:{free_port()}",
        "JupyterHub.db_url": "sqlite://",
        "JupyterHub.cookie_secret": secrets.token_bytes(32),
        "JupyterHub.authenticator_class": "dummy",
        "JupyterHub.spawner_class": "simple",
        "JupyterHub.load_roles": [_CULLER | {"name": "culler"}, _TESTS | {"name": "tests"}],
        "JupyterHub.services": [{"name": name, "api_token": token} for name, token in hub.tokens.items()],
        "ConfigurableHTTPProxy.api_url": f"http://127.0.0.1:{free_port()}",
        "ConfigurableHTTPProxy.command": [str(PROXY)],
        "ConfigurableHTTPProxy.pid_file": str(hub.folder / "proxy.pid"),
        "Authenticator.allow_all": True,
        "DummyAuthenticator.password": PASSWORD,
        "SimpleLocalProcessSpawner.home_dir_template": str(hub.folder / "home" / "{username}"),
        "Spawner.cmd": [sys.executable, "-m", "jupyterhub.singleuser"],
        "Spawner.args": ["--allow-root", *lab.options],
        "Spawner.default_url": "/lab",
        "Spawner.environment": environment,
    }
    return "".join(f"c.{name} = {value!r}\n" for name, value in settings.items())
