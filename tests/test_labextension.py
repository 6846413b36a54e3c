"""The JupyterLab part is in the wheel when it can be built, and left out in one line when it cannot."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from notebook_cluster.magics.display.folding import MIME_TYPE
from notebook_cluster.protocol import VERSION

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "labextension"
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
