"""Builds the JupyterLab part when the Python package is built, and puts it into the wheel.

Without Node.js, or when the build fails (no network), the wheel is made without it and one line says so: the machines
that only share their processor do not need it, and JupyterLab shows HTML where it is missing.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "labextension"
BUILT = "notebook_cluster/labextension"
INSTALLED = "share/jupyter/labextensions/notebook-cluster"
OLDEST_NODE = (20, 19)
NO_NPM = "NOTEBOOK_CLUSTER_NO_NPM"
"""Set in the environment: take what was built before, run nothing."""
MINUTES = 10


class LabExtensionHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling's hook for wheels, editable ones too, and source distributions."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build when sources are newer than what was built, then name the files for the wheel."""
        root = Path(self.root)
        problem = build(root)
        if (root / BUILT / "package.json").is_file():
            files = [path for path in sorted((root / BUILT).rglob("*")) if path.is_file()]
            shared = {str(path): f"{INSTALLED}/{path.relative_to(root / BUILT).as_posix()}" for path in files}
            shared[str(root / FOLDER / "install.json")] = f"{INSTALLED}/install.json"
            build_data.setdefault("shared_data", {}).update(shared)
        elif problem:
            self.app.display_warning(f"notebook-cluster is built without its JupyterLab sidebar and tabs: {problem}")


def build(root: Path) -> str:
    """Bring ``notebook_cluster/labextension`` up to date; returns why that could not be done, or nothing."""
    sources = root / FOLDER
    if not (sources / "package-lock.json").is_file() or is_up_to_date(root):
        return ""
    if os.environ.get(NO_NPM):
        return f"{NO_NPM} is set"
    npm = shutil.which("npm")
    if not npm or not shutil.which("node"):
        return "there is no Node.js (node, npm); install version 20.19 or newer and install again"
    if (found := node_version()) < OLDEST_NODE:
        return f"Node.js is {'.'.join(map(str, found))}; install version 20.19 or newer and install again"
    for command in (["ci"], ["run", "build"]):
        try:
            done = subprocess.run(
                [npm, *command], cwd=sources, capture_output=True, text=True, timeout=MINUTES * 60, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"npm {' '.join(command)}: {error}"
        if done.returncode:
            errors = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line.lower()]
            return f"npm {' '.join(command)} ended with {done.returncode}: {' '.join(errors[:3])}"
    return ""


def is_up_to_date(root: Path) -> bool:
    """True when what was built is newer than every source."""
    built = root / BUILT / "package.json"
    if not built.is_file():
        return False
    sources = root / FOLDER
    files = [sources / "package.json", sources / "package-lock.json", sources / "tsconfig.json"]
    files += [path for name in ("src", "style", "schema") for path in (sources / name).rglob("*.*")]
    return built.stat().st_mtime >= max(path.stat().st_mtime for path in files)


def node_version() -> tuple[int, ...]:
    """Of the node on the path, as numbers; empty when it does not run."""
    try:
        answer = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(map(int, re.findall(r"\d+", answer)[:3]))
