"""What is given to people has all its parts and one version: ``python -m release`` refuses it otherwise."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from notebook_cluster.protocol import VERSION
from release.__main__ import build
from release.check import LABEXTENSION, SERVER_CONFIG, disagreement, findings, versions
from tests.browser import EXTENSION

ROOT = Path(__file__).parents[1]
DATA = f"notebook_cluster-{VERSION}.data/data/"
MARK = f"{DATA}{LABEXTENSION}/"
needs_built = pytest.mark.skipif(not (EXTENSION / "schemas").exists(), reason="not built: make labextension")


def test_the_version_is_the_same_in_package_javascript_changelog_and_citation() -> None:
    assert set(versions(ROOT).values()) == {VERSION}


def test_versions_that_differ_are_named_with_their_places() -> None:
    (line,) = disagreement({"CHANGELOG.md": "0.1.0", "labextension/package.json": "0.2.0"})
    assert line.startswith("versions differ, 0.1.0 in CHANGELOG.md, 0.2.0 in labextension/package.json: write one")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it is built from this checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTEBOOK_CLUSTER_NO_NPM", "1")
        (made,) = build(ROOT, tmp_path_factory.mktemp("dist"), "wheel")
    return made


def changed(wheel: Path, folder: Path, beginning: str, content: str | None) -> Path:
    """A copy of ``wheel`` in ``folder``; files whose names begin with ``beginning`` have ``content``, or are absent."""
    copy = folder / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(copy, "w") as new:
        for name in old.namelist():
            written = content if name.startswith(beginning) else old.read(name)
            if written is not None:
                new.writestr(name, written)
    return copy


@needs_built
def test_a_whole_wheel_passes(wheel: Path) -> None:
    assert findings(wheel, ROOT) == []


@needs_built
@pytest.mark.parametrize(
    ("beginning", "content", "finding"),
    [
        (MARK, None, "no JupyterLab part (share/jupyter/labextensions/notebook-cluster/package.json): build it with"),
        (f"{MARK}install.json", None, "no share/jupyter/labextensions/notebook-cluster/install.json, by which"),
        (f"{MARK}static", None, "the script that JupyterLab loads: build it with 'make labextension'"),
        (f"{MARK}schemas", None, "schemas, the sidebar's settings: build it with"),
        (f"{DATA}{SERVER_CONFIG}", None, f"no {SERVER_CONFIG}, which enables the server extension: see shared-data"),
        (f"{DATA}{SERVER_CONFIG}", '{"ServerApp": {}}', "does not enable notebook_cluster.server: see"),
        ("notebook_cluster/server/__init__.py", None, "no module notebook_cluster.server: see packages"),
    ],
)
def test_what_a_wheel_lacks_is_named_with_the_way_out(
    wheel: Path, tmp_path: Path, beginning: str, content: str | None, finding: str
) -> None:
    (line,) = findings(changed(wheel, tmp_path, beginning, content), ROOT)
    assert line.startswith(f"{wheel.name}: ")
    assert finding in line


@needs_built
def test_a_javascript_part_of_another_version_is_refused(wheel: Path, tmp_path: Path) -> None:
    package = json.loads((EXTENSION / "package.json").read_text()) | {"version": "0.0.9"}
    (line,) = findings(changed(wheel, tmp_path, f"{MARK}package.json", json.dumps(package)), ROOT)
    assert "0.0.9 in the built JupyterLab part" in line
    assert f"{VERSION} in {wheel.name}" in line


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of a release, with the JupyterLab part where it is built."""
    folder = tmp_path / "checkout"
    for name in ("notebook_cluster", "labextension", "release"):
        ignored = shutil.ignore_patterns("node_modules", "lib", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, folder)
    return folder


def release(checkout: Path) -> "subprocess.CompletedProcess[str]":
    """``python -m release`` there, with no program on the path: no Node.js."""
    environment = os.environ | {"PATH": str(checkout / "nothing")}
    return subprocess.run(
        [sys.executable, "-m", "release"], cwd=checkout, env=environment, capture_output=True, text=True, timeout=120
    )


@needs_built
def test_both_distributions_are_made_and_hold_the_javascript_part(checkout: Path) -> None:
    os.utime(checkout / "notebook_cluster" / "labextension" / "package.json")  # newer than the copied sources
    done = release(checkout)
    assert done.returncode == 0, done.stderr
    wheel, source = f"notebook_cluster-{VERSION}-py3-none-any.whl", f"notebook_cluster-{VERSION}.tar.gz"
    assert sorted(path.name for path in (checkout / "dist").iterdir()) == [wheel, source]
    with tarfile.open(checkout / "dist" / source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"notebook_cluster/labextension/package.json", "CHANGELOG.md", "CITATION.cff", "LICENSE"} <= names


def test_nothing_is_made_where_the_javascript_part_cannot_be_built(checkout: Path) -> None:
    shutil.rmtree(checkout / "notebook_cluster" / "labextension", ignore_errors=True)
    done = release(checkout)
    assert done.returncode == 1
    assert done.stderr.startswith("not released: the JupyterLab part is not up to date: there is no Node.js")
    assert not (checkout / "dist").exists()


def test_nothing_is_made_where_versions_differ(checkout: Path) -> None:
    changelog = checkout / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(f"\n## {VERSION}", "\n## 9.9.9"))
    done = release(checkout)
    assert done.returncode == 1
    assert f"not released: versions differ, {VERSION} in notebook_cluster/protocol/wire.py" in done.stderr
    assert "9.9.9 in CHANGELOG.md" in done.stderr
    assert not (checkout / "dist").exists()
