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

from tests import namespaces

_FOLDER = Path(__file__).parent


@functools.cache
def no_slurm() -> str:
    """Why there can be no Slurm here, or an empty text."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    for program in ("munged", "slurmctld", "slurmd", "sbatch"):
        if shutil.which(program, path=path) is None:
            return f"a Slurm of its own needs the program {program!r}: make engines"
    return ""


@functools.cache
def no_ssh() -> str:
    """Why there can be no SSH hosts here, or an empty text."""
    for program in ("/usr/sbin/sshd", "ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"SSH hosts need the program {program!r}: make engines"
    return namespaces.missing()


def ask(*words: str) -> str:
    """What a program prints; empty when it fails."""
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False).stdout


@dataclass(frozen=True)
class Slurm:
    """Nodes n1, n2 ..., all on 127.0.0.1; this process's environment means it."""

    folder: Path

    def jobs(self) -> dict[str, str]:
        """``4711_0`` -> its state, of jobs that are not over."""
        rows = [line.split("|") for line in ask("squeue", "-h", "-r", "-o", "%i|%T").splitlines()]
        return {name: state for name, state in rows if state != "COMPLETING"}

    def pid(self, daemon: str) -> int:
        return int((self.folder / "pid" / daemon).read_text())


@contextmanager
def _started(engine: str, mode: str, hosts: int) -> Iterator[tuple[Path, pytest.MonkeyPatch]]:
    """The folder of ``engine``, which was started by its script and is ended with all that it runs, and an environment
    to change meanwhile."""
    folder = Path(tempfile.mkdtemp(prefix=f"nbt-{engine}-", dir="/tmp"))
    script = str(_FOLDER / f"{engine}.sh")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODE", mode)
        started = subprocess.run(
            [script, "start", str(folder), str(hosts)], capture_output=True, text=True, timeout=240
        )
        assert started.returncode == 0, started.stderr
        try:
            yield folder, patch
        finally:
            subprocess.run([script, "stop", str(folder)], capture_output=True, timeout=60, check=False)


@contextmanager
def slurm(nodes: int = 3) -> Iterator[Slurm]:
    """Started, and ended with all that it runs."""
    with _started("slurm", "ports", nodes) as (folder, patch):
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        yield Slurm(folder)


@dataclass(frozen=True)
class SshHosts:
    """h1 and h2, each with an address and processes of its own; ``ssh`` on PATH knows them. ``address``: of this
    machine, for them."""

    folder: Path
    address: str


@contextmanager
def ssh_hosts() -> Iterator[SshHosts]:
    """Started, and ended with all that they run."""
    with _started("ssh", "netns", 2) as (folder, patch):
        config = folder / "config"
        bridge = next(line.split()[1] for line in config.read_text().splitlines() if "HostName" in line)
        programs = folder / "bin"
        programs.mkdir()
        client = programs / "ssh"
        client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
        client.chmod(0o755)
        patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        yield SshHosts(folder, f"{bridge.rpartition('.')[0]}.1")


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
