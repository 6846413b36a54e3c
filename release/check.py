"""What a release is not made without: the JupyterLab part, the server extension's configuration, one version number.

Each finding is one line that names the thing and the way out. Nothing is built or changed here.
"""

import json
import re
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from email.parser import Parser
from pathlib import Path

LABEXTENSION = "share/jupyter/labextensions/notebook-cluster"
SERVER_CONFIG = "etc/jupyter/jupyter_server_config.d/notebook_cluster.json"
SERVER_EXTENSION = "notebook_cluster.server"
_BUILD = "build it with 'make labextension', which needs Node.js 20.19 or newer, then make the wheel again"


def findings(wheel: Path, root: Path) -> list[str]:
    """Why ``wheel``, built from the checkout ``root``, must not be given to anybody; empty when it may.

    Raises:
        zipfile.BadZipFile: when it is no wheel.
        FileNotFoundError: when it or a file of ``root`` that has a version is missing.
    """
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith(".py")}
        modules = {name for name in archive.namelist() if name.endswith(".py")}
    metadata = next(name for name in files if name.endswith(".dist-info/METADATA"))
    data = metadata.replace(".dist-info/METADATA", ".data/data/")
    installed = {name.removeprefix(data): content for name, content in files.items() if name.startswith(data)}
    found = [*_labextension(installed), *_server_extension(installed, modules)]
    numbers = {wheel.name: Parser().parsestr(files[metadata].decode())["Version"], **versions(root)}
    if built := installed.get(f"{LABEXTENSION}/package.json"):
        numbers["the built JupyterLab part"] = json.loads(built).get("version", "none")
    return [f"{wheel.name}: {text}" for text in found] + disagreement(numbers)


def _labextension(installed: Mapping[str, bytes]) -> Iterator[str]:
    package = installed.get(f"{LABEXTENSION}/package.json")
    if package is None:
        yield f"no JupyterLab part ({LABEXTENSION}/package.json): {_BUILD}"
        return
    if f"{LABEXTENSION}/install.json" not in installed:
        yield (
            f"no {LABEXTENSION}/install.json, by which JupyterLab says how to uninstall it: "
            "put labextension/install.json back"
        )
    script = json.loads(package).get("jupyterlab", {}).get("_build", {}).get("load", "static/remoteEntry.js")
    if f"{LABEXTENSION}/{script}" not in installed:
        yield f"no {LABEXTENSION}/{script}, the script that JupyterLab loads: {_BUILD}"
    if not any(name.startswith(f"{LABEXTENSION}/schemas/") for name in installed):
        yield f"no {LABEXTENSION}/schemas, the sidebar's settings: {_BUILD}"


def _server_extension(installed: Mapping[str, bytes], modules: set[str]) -> Iterator[str]:
    config = installed.get(SERVER_CONFIG)
    if config is None:
        yield f"no {SERVER_CONFIG}, which enables the server extension: see shared-data in pyproject.toml"
    elif json.loads(config).get("ServerApp", {}).get("jpserver_extensions", {}).get(SERVER_EXTENSION) is not True:
        yield f"{SERVER_CONFIG} does not enable {SERVER_EXTENSION}: see notebook_cluster/server/config/"
    if f"{SERVER_EXTENSION.replace('.', '/')}/__init__.py" not in modules:
        yield f"no module {SERVER_EXTENSION}: see packages in pyproject.toml"


def versions(root: Path) -> dict[str, str]:
    """File of the checkout ``root`` -> the version that stands in it; ``none`` where it has no number."""
    source = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["version"]
    return {
        source["path"]: _number(root / source["path"], re.compile(source["pattern"])),
        "labextension/package.json": json.loads((root / "labextension/package.json").read_text())["version"],
        "labextension/package-lock.json": json.loads((root / "labextension/package-lock.json").read_text())["version"],
        "CHANGELOG.md": _number(root / "CHANGELOG.md", re.compile(r"^## (?P<version>\d\S*)", re.MULTILINE)),
        "CITATION.cff": _number(root / "CITATION.cff", re.compile(r'^version: "?(?P<version>[^"\s]+)', re.MULTILINE)),
    }


def _number(file: Path, pattern: re.Pattern[str]) -> str:
    """The first that is there: in CHANGELOG.md that of the newest version."""
    match = pattern.search(file.read_text("utf-8"))
    return match["version"] if match else "none"


def disagreement(numbers: Mapping[str, str]) -> list[str]:
    """One line with all ``numbers`` (where it stands -> version) unless they are the same."""
    if len(set(numbers.values())) <= 1:
        return []
    said = ", ".join(f"{number} in {place}" for place, number in numbers.items())
    return [f"versions differ, {said}: write one number everywhere and build again"]
