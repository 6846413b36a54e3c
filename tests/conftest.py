"""What the tests share: Jupyter folders of their own, agents as processes, waiting, and that nothing is left behind."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from tests.command import COMMAND

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser import Lab
    from tests.strangers import Strangers

pytest_plugins = ["tests.unsteady", "tests.proofs"]

Value = TypeVar("Value")

# Nobody hears those of another worker, or of another run on this network, over mDNS: the kernels and agents that tests
# start inherit it. Before anything of the package is imported.
os.environ["NOTEBOOK_CLUSTER_MDNS_GROUP"] = f"tests {uuid.uuid4().hex}"

MARK = "NOTEBOOK_CLUSTER_TEST_MARK"
"""Environment variable with a value unique to one test: every process that the test starts inherits it."""


# Every process that the tests start begins with the file that lies there.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).with_name("startup")), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# A shell that starts a suite in the background has it ignore SIGINT, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Several workers: by file, see :mod:`tests.scheduling`."""
    from tests.scheduling import ByFile

    return ByFile(config, log)


def wait_until(
    condition: Callable[[], Value], timeout: float = 60.0, what: str | Callable[[], str] = "the condition"
) -> Value:
    """Call ``condition`` until it returns something true and return that; fail the test after ``timeout`` seconds.

    ``what`` says what was waited for; a function is called when the time is over.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout:g} s for {what() if callable(what) else what}")
        time.sleep(0.02)


def marked_processes(mark: str) -> dict[int, str]:
    """Process id -> command line of every live process whose environment carries ``mark`` (not this process)."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
        except OSError:
            continue  # it ended while we looked, or belongs to somebody else
    return found


def end_processes(processes: dict[int, str]) -> None:
    """SIGKILL each of them by its id."""
    for pid in processes:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.fixture(name="wait_until")
def wait_until_fixture() -> Callable[..., object]:
    """:func:`wait_until`."""
    return wait_until


@contextmanager
def own_folders(patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a short path that holds Jupyter's and IPython's data, runtime and configuration."""
    root = Path(tempfile.mkdtemp(prefix="nbt-", dir="/tmp"))
    for variable, folder in {
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "run",
        "JUPYTER_CONFIG_DIR": "config",
        "IPYTHONDIR": "ipython",
    }.items():
        (root / folder).mkdir(mode=0o700)
        patch.setenv(variable, str(root / folder))
    patch.delenv("JPY_SESSION_NAME", raising=False)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def nothing_left(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Fails the test, and ends them, when processes that were started meanwhile, directly or not, live 30 s longer."""
    mark = uuid.uuid4().hex
    patch.setenv(MARK, mark)
    try:
        yield mark
    finally:
        deadline = time.monotonic() + 30
        while (left := marked_processes(mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        end_processes(left)
    if left:
        pytest.fail("processes left behind:\n" + "\n".join(f"  {pid}: {command}" for pid, command in left.items()))


@contextmanager
def shared_folders() -> Iterator[Path]:
    """What ``jupyter_dirs`` and ``no_processes_left`` are for one test, for what all tests of a file share."""
    with pytest.MonkeyPatch.context() as patch, own_folders(patch) as root, nothing_left(patch):
        yield root


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of this test: what it starts or loads works there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def jupyter_dirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """:func:`own_folders` for this test."""
    with own_folders(monkeypatch) as root:
        yield root


@pytest.fixture
def no_processes_left(jupyter_dirs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """:func:`nothing_left` for this test."""
    with nothing_left(monkeypatch) as mark:
        yield mark


@pytest.fixture
def work(jupyter_dirs: Path, no_processes_left: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test runs in this folder, which is its own and its local nodes', and leaves no process."""
    folder = jupyter_dirs / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


class Agents:
    """Starts ``notebook-cluster share`` processes, each with a data folder of its own, and ends them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __call__(self, *names: str, options: tuple[str, ...] = (), environment: dict[str, str] | None = None) -> None:
        """Start an agent for each name and wait until a coordinator of this user may use it."""
        for name in names:
            folder = self.root / "agents" / name
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            command = [COMMAND, "share", "--name", name]
            with (folder / "output.txt").open("wb") as output:
                self.processes[name] = subprocess.Popen(
                    [*command, "--data-dir", str(folder), *options],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                    env=os.environ | (environment or {}),
                )  # fmt: skip
        for name in names:
            wait_until(partial(self._is_up, name), 60, f"agent {name!r} to announce itself")

    def _is_up(self, name: str) -> bool:
        from notebook_cluster.security.identity import same_user_keys

        if (code := self.processes[name].poll()) is not None:
            pytest.fail(f"agent {name!r} ended with exit code {code}: {self.output(name)}")
        return name in same_user_keys("agent").values()

    def output(self, name: str) -> str:
        """What the agent has printed."""
        return (self.root / "agents" / name / "output.txt").read_text(errors="replace")

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> int:
        """Send ``how`` and wait for the end; returns the exit code."""
        process = self.processes.pop(name)
        process.send_signal(how)
        try:
            return process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
            pytest.fail(f"agent {name!r} did not end within 30 s of {how.name}: {self.output(name)}")

    def close(self) -> None:
        for name in list(self.processes):
            if self.processes[name].poll() is None:
                self.end(name)


@pytest.fixture
def agents(jupyter_dirs: Path, no_processes_left: str) -> Iterator[Agents]:
    """``agents("mini", "desk")`` starts two agents; they are ended with the test."""
    factory = Agents(jupyter_dirs)
    yield factory
    factory.close()


@pytest.fixture
def strangers(jupyter_dirs: Path, no_processes_left: str) -> Iterator["Strangers"]:
    """``strangers("mini", "--code", ...)`` starts an agent that trusts nobody; all are ended with the test."""
    from tests.strangers import running_strangers

    with running_strangers(jupyter_dirs) as factory:
        yield factory


@pytest.fixture
def lab(jupyter_dirs: Path, no_processes_left: str) -> Iterator["Lab"]:
    """A JupyterLab for this test; its notebooks lie in ``lab.folder``."""
    from tests.browser import running_lab

    with running_lab(jupyter_dirs, environment=dict(os.environ)) as running:
        yield running


@pytest.fixture
def page(lab: "Lab") -> Iterator["Page"]:
    """A page of ``lab``, in Chromium; the kernels that it started are ended with the test."""
    from tests.browser import browser_page, shut_down_kernels

    with browser_page(lab) as opened:
        yield opened
        shut_down_kernels(opened)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where models are, and encode what they send: a GPU, or the processor, which does not without this."""
    import torch

    from notebook_cluster.training.loop import encoding

    monkeypatch.setattr(encoding, "KINDS", ("cuda", "cpu"))
    return "cuda" if torch.cuda.is_available() else "cpu"
