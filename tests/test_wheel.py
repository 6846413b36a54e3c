"""The wheel as somebody gets it: pip puts it and what it needs, and nothing else, into an empty environment.

JupyterLab is not put there: to install it takes as long again as the wheel. The tests' own one is lent for the two
lists, which show what lies in the empty environment.
"""

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.protocol import VERSION
from release.__main__ import build
from tests.browser import EXTENSION
from tests.notebook_kernel import NotebookKernel
from tests.strangers import running_strangers

pytestmark = pytest.mark.skipif(not (EXTENSION / "schemas").exists(), reason="not built: make labextension")

ROOT = Path(__file__).parents[1]
MOST_BYTES = 160_000_000
"""Without compiled files, which pip adds: two fifths are numpy, a quarter what ipykernel needs (jedi, debugpy)."""
UNREACHABLE = re.compile(
    r"NewConnectionError|Failed to establish a new connection|name resolution|Max retries exceeded"
)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CELL = """%%on_all
import importlib.util, notebook_cluster, numpy
total = nc.all_reduce(numpy.full(2, rank + 1.0))
absent = [name for name in ("torch", "plotly", "jupyterlab") if importlib.util.find_spec(name) is None]
print(f"{rank} of {world_size}: {total} without {absent} in {notebook_cluster.__file__}")
"""


class Environment:
    """A virtual environment without pip in ``folder``; what runs there knows of no other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = str(folder / "bin" / "python")
        self.run(sys.executable, "-m", "venv", "--without-pip", str(folder))

    def install(self, *what: str) -> None:
        """With the versions of constraints.txt; where pip reaches no index the test is skipped."""
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-compile", "--retries", "1"]
        done = self._run(*pip, "-c", str(ROOT / "constraints.txt"), *what)
        if done.returncode and UNREACHABLE.search(done.stderr):
            pytest.skip("pip reached no index")
        assert done.returncode == 0, done.stderr

    def run(self, *command: str, **variables: str) -> str:
        """What it said; it must work. ``variables`` are put into its environment."""
        done = self._run(*command, **variables)
        assert done.returncode == 0, done.stderr
        return COLOUR.sub("", done.stdout + done.stderr)

    def _run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        # Not in this folder: Python finds packages where it is started.
        return subprocess.run(
            command, cwd=self.folder.parent, env=without_paths() | variables, capture_output=True, text=True,
            timeout=280, check=False,
        )  # fmt: skip

    def bytes_in_files(self) -> int:
        """Of what is installed, without what Python compiles from it."""
        files = (self.folder / "lib").rglob("*.*")
        return sum(file.stat().st_size for file in files if file.is_file() and file.suffix != ".pyc")


def without_paths() -> dict[str, str]:
    """This process's environment without what leads to other packages, extensions and settings."""
    gone = {"JUPYTER_PATH", "JUPYTER_CONFIG_PATH", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "PYTHONPATH"}
    kept = {name: value for name, value in os.environ.items() if name not in gone}
    return kept | {"JUPYTER_PREFER_ENV_PATH": "1", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With the wheel and what it needs."""
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTEBOOK_CLUSTER_NO_NPM", "1")
        (wheel,) = build(ROOT, folder / "dist", "wheel")
    made = Environment(folder / "environment")
    made.install(str(wheel))
    return made


@pytest.fixture
def notebook(work: Path, environment: Environment, monkeypatch: pytest.MonkeyPatch) -> Iterator[NotebookKernel]:
    """A kernel of that environment."""
    monkeypatch.delenv("PYTHONPATH")
    kernel = NotebookKernel(work, environment.python)
    yield kernel
    kernel.close()


def test_it_brings_neither_a_training_library_nor_plotly_and_is_small(environment: Environment) -> None:
    names = environment.run(
        environment.python, "-c", "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"
    )
    assert "notebook-cluster" in names
    assert not {"torch", "mlx", "plotly", "pandas", "jupyterlab", "jupyter-server"} & set(names.split())
    assert environment.bytes_in_files() < MOST_BYTES


def test_a_shared_machine_is_paired_and_runs_cells(
    notebook: NotebookKernel, environment: Environment, jupyter_dirs: Path
) -> None:
    with running_strangers(jupyter_dirs, str(environment.folder / "bin" / "notebook-cluster")) as strangers:
        mini = strangers("mini", "--code", "tiger-lamp-42")
        assert mini.code == "tiger-lamp-42"
        notebook.works("%load_ext notebook_cluster")
        notebook.works("%cluster start --local 1")
        notebook.works(f"%cluster add {mini.name} --code {mini.code}")
        said = notebook.works(CELL)
        notebook.works("%cluster stop")
    package = environment.folder / "lib"
    assert re.findall(r"(\d of \d): (\[.*?\]) without (\[.*?\]) in (.*?)/python3", said) == [
        (f"{rank} of 2", "[3. 3.]", "['torch', 'plotly', 'jupyterlab']", str(package)) for rank in range(2)
    ]


def test_jupyterlab_and_its_server_find_and_enable_both_extensions(environment: Environment) -> None:
    # A .pth file, which names the folder of an editable install, is not read there: notebook-cluster is the wheel's.
    lent = {"PYTHONPATH": sysconfig.get_path("purelib")}
    where = environment.run(environment.python, "-c", "import notebook_cluster as n; print(n.__file__)", **lent)
    assert where.startswith(f"{environment.folder}/lib/")
    listed = environment.run(environment.python, "-m", "jupyterlab.labextensions", "list", **lent)
    assert f"{environment.folder}/share/jupyter/labextensions" in listed
    assert f"notebook-cluster v{VERSION} enabled OK (python, notebook-cluster)" in listed
    listed = environment.run(environment.python, "-m", "jupyter_server.extension.serverextension", "list", **lent)
    assert f"Config dir: {environment.folder}/etc/jupyter" in listed
    assert "notebook_cluster.server enabled" in listed
    assert f"notebook_cluster.server {VERSION} OK" in listed
