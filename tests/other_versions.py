"""Other versions of packages than those that the tests run with, each alone in a folder below build/, from PyPI."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[1] / "build"


def installed(package: str, version: str) -> Path:
    """The folder that holds ``package`` of this version and nothing else; where pip gets none the test is skipped."""
    cache = BUILD / package
    folder = cache / version
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{version}-", dir=cache))
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--retries", "1", "--timeout", "10"]
        pip = subprocess.run(
            [*command, "--target", str(made), f"{package}=={version}"], capture_output=True, text=True, timeout=120
        )
        if pip.returncode != 0:
            shutil.rmtree(made)
            reason = (pip.stderr.strip().splitlines() or ["it said nothing"])[-1]
            pytest.skip(f"pip could not get {package} {version}: {reason}")
        try:
            made.rename(folder)
        except OSError:  # another run of the tests was faster
            shutil.rmtree(made)
    return folder
