"""The JupyterLab part is in the wheel when it can be built, and left out in one line when it cannot."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from notebook_cluster.magics.display.folding import MIME_TYPE
from notebook_cluster.protocol import VERSION

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "labextension"
BUILT = ROOT / "notebook_cluster" / "labextension"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
INSTALLED = f"notebook_cluster-{VERSION}.data/data/share/jupyter/labextensions/notebook-cluster/"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The project without what was built before."""
    folder = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("node_modules", "lib", "labextension", "__pycache__")
    shutil.copytree(ROOT / "notebook_cluster", folder / "notebook_cluster", ignore=ignored)
    shutil.copytree(SOURCES, folder / "labextension", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    return folder


def build_wheel(checkout: Path, **environment: str) -> tuple[list[str], str]:
    """Names in the wheel, and what the build said. No program is on the path."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "wheels"],
        cwd=checkout, env=os.environ | {"PATH": str(checkout / "nothing")} | environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = (checkout / "wheels").glob("*.whl")
    return zipfile.ZipFile(wheel).namelist(), done.stdout + done.stderr


def made(checkout: Path) -> None:
    """As if npm had built it."""
    for name in ("package.json", "static/remoteEntry.js"):
        path = checkout / "notebook_cluster" / "labextension" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")


def test_without_node_the_wheel_is_built_without_it_and_one_line_says_so(checkout: Path) -> None:
    names, said = build_wheel(checkout)
    assert "notebook_cluster/magics/display/folding.py" in names
    assert not [name for name in names if "labextension" in name]
    (line,) = [line for line in said.splitlines() if "JupyterLab" in line]
    assert line.startswith("notebook-cluster is built without its JupyterLab sidebar and tabs: there is no Node.js")
    assert "install version 20.19 or newer" in line


def test_what_was_built_before_is_put_where_jupyterlab_finds_it(checkout: Path) -> None:
    made(checkout)
    names, said = build_wheel(checkout)
    assert {INSTALLED + name for name in ("package.json", "install.json", "static/remoteEntry.js")} <= set(names)
    assert "JupyterLab" not in said


@pytest.mark.skipif(not (BUILT / "schemas").exists(), reason="not built: make labextension")
def test_the_wheel_puts_sidebar_and_server_extension_where_jupyter_finds_them(checkout: Path) -> None:
    shutil.copytree(BUILT, checkout / "notebook_cluster" / "labextension")
    # What was built is newer than the sources, as it is after a build.
    os.utime(checkout / "notebook_cluster" / "labextension" / "package.json")
    build_wheel(checkout)
    python = fresh_environment(checkout / "venv")
    (wheel,) = (checkout / "wheels").glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel))
    assert f"{checkout}/venv/" in run(python, "-c", "import notebook_cluster; print(notebook_cluster.__file__)")
    listed = run(python, "-m", "jupyterlab.labextensions", "list")
    (line,) = [line for line in listed.splitlines() if "notebook-cluster" in line]
    assert f"notebook-cluster v{VERSION} enabled OK" in line
    assert f"{checkout}/venv/share/jupyter/labextensions" in listed
    listed = run(python, "-m", "jupyter_server.extension.serverextension", "list")
    (line,) = [line for line in listed.splitlines() if "notebook_cluster.server enabled" in line]
    assert f"notebook_cluster.server {VERSION} OK" in listed


def fresh_environment(folder: Path) -> str:
    """The Python of a new environment with all packages of this one except notebook-cluster."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = str(folder / "bin" / "python")
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # A .pth file is read, those in the folder that it names are not: the editable install of this project is one.
    (packages / "here.pth").write_text(sysconfig.get_path("purelib"))
    return python


def run(*command: str) -> str:
    """What it said; it must work."""
    gone = {"JUPYTER_PATH", "JUPYTER_CONFIG_PATH", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "PYTHONPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in gone}
    environment |= {"JUPYTER_PREFER_ENV_PATH": "1", "NO_COLOR": "1"}
    # Not here: Python finds packages in the folder where it is started.
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return COLOUR.sub("", done.stdout + done.stderr)


def test_old_node_is_named_with_the_version_that_is_wanted(checkout: Path) -> None:
    programs = checkout / "nothing"
    programs.mkdir()
    for name in ("node", "npm"):
        (programs / name).write_text("#!/bin/sh\necho v18.20.4\n")
        (programs / name).chmod(0o755)
    _, said = build_wheel(checkout)
    assert "Node.js is 18.20.4; install version 20.19 or newer and install again" in said


def test_a_build_that_fails_leaves_it_out_and_says_why(checkout: Path) -> None:
    programs = checkout / "nothing"
    programs.mkdir()
    (programs / "node").write_text("#!/bin/sh\necho v22.12.0\n")
    (programs / "npm").write_text("#!/bin/sh\necho 'npm error network is unreachable' >&2\nexit 1\n")
    for name in ("node", "npm"):
        (programs / name).chmod(0o755)
    names, said = build_wheel(checkout)
    assert "npm ci ended with 1: npm error network is unreachable" in said
    assert not [name for name in names if "labextension" in name]


def test_npm_is_not_run_when_the_environment_says_so(checkout: Path) -> None:
    _, said = build_wheel(checkout, NOTEBOOK_CLUSTER_NO_NPM="1")
    assert "NOTEBOOK_CLUSTER_NO_NPM is set" in said


def test_its_version_is_that_of_the_package() -> None:
    assert json.loads((SOURCES / "package.json").read_text())["version"] == VERSION


def test_both_sides_name_the_same_type() -> None:
    assert f"'{MIME_TYPE}'" in (SOURCES / "src" / "page.ts").read_text()


def test_the_lock_file_names_the_public_registry_only() -> None:
    packages = json.loads((SOURCES / "package-lock.json").read_text())["packages"]
    hosts = {urlsplit(package["resolved"]).netloc for package in packages.values() if "resolved" in package}
    assert hosts == {"registry.npmjs.org"}
    assert all("integrity" in package for name, package in packages.items() if name)
