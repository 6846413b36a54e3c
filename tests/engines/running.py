"""The engines as a test has them: started, asked, ended."""

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent


@functools.cache
def no_slurm() -> str:
    """Why there can be no Slurm here, or an empty text."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    for program in ("munged", "slurmctld", "slurmd", "sbatch"):
        if shutil.which(program, path=path) is None:
            return f"a Slurm of its own needs the program {program!r}: make engines"
    return ""


def ask(*words: str) -> str:
    """What a program prints; empty when it fails."""
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False).stdout


@dataclass(frozen=True)
class Slurm:
    """Three nodes, n1 to n3, all on 127.0.0.1; this process's environment means it."""

    folder: Path

    def jobs(self) -> dict[str, str]:
        """``4711_0`` -> its state, of jobs that are not over."""
        rows = [line.split("|") for line in ask("squeue", "-h", "-r", "-o", "%i|%T").splitlines()]
        return {name: state for name, state in rows if state != "COMPLETING"}

    def pid(self, daemon: str) -> int:
        return int((self.folder / "pid" / daemon).read_text())


@contextmanager
def slurm() -> Iterator[Slurm]:
    """Started, and ended with all that it runs."""
    folder = Path(tempfile.mkdtemp(prefix="nbt-slurm-", dir="/tmp"))
    script = str(_FOLDER / "slurm.sh")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODE", "ports")
        started = subprocess.run([script, "start", str(folder), "3"], capture_output=True, text=True, timeout=90)
        assert started.returncode == 0, started.stderr
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        try:
            yield Slurm(folder)
        finally:
            subprocess.run([script, "stop", str(folder)], capture_output=True, timeout=60, check=False)


def where_it_stands(secret: str) -> list[str]:
    """The command lines and environments, of all processes that can be read, in which ``secret`` stands."""
    found = []
    for path in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
        try:
            if secret.encode() in path.read_bytes():
                found.append(str(path))
        except OSError:
            continue  # it ended meanwhile
    return found
