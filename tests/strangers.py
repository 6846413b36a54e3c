"""Agents of other people: they share no folder with the test's user, so nothing but pairing makes them usable."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import COMMAND
from tests.conftest import wait_until


class Stranger:
    """A running ``notebook-cluster share`` of somebody else."""

    def __init__(
        self, root: Path, name: str, *options: str, folder: str = "", start_up: str = "", command: str = COMMAND
    ) -> None:
        self.name = name
        self._command = command
        self.home = root / "strangers" / (folder or name)
        self.options = options
        for part in ("data", "run", "agent"):
            (self.home / part).mkdir(parents=True, mode=0o700, exist_ok=True)
        (self.home / "start_up").mkdir(exist_ok=True)
        (self.home / "start_up" / "sitecustomize.py").write_text(start_up)
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [self._command, "share", "--name", self.name, "--no-qr"]
        folders = {
            "JUPYTER_DATA_DIR": str(self.home / "data"),
            "JUPYTER_RUNTIME_DIR": str(self.home / "run"),
            "PYTHONPATH": os.pathsep.join([str(self.home / "start_up"), os.environ.get("PYTHONPATH", "")]),
        }
        with (self.home / "output.txt").open("wb") as output:
            return subprocess.Popen(
                [*command, "--data-dir", str(self.home / "agent"), *self.options],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | folders,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """What it has printed and logged."""
        return (self.home / "output.txt").read_text(errors="replace")

    def said(self, pattern: str, timeout: float = 60.0) -> str:
        """The first group of ``pattern`` in its output, as soon as it is there."""

        def look() -> str:
            if self.process.poll() is not None:
                pytest.fail(f"{self.name} ended with exit code {self.process.returncode}: {self.output}")
            found = re.search(pattern, self.output, re.MULTILINE)
            return found[1] if found else ""

        return wait_until(look, timeout, lambda: f"{pattern!r} in: {self.output}")

    @property
    def code(self) -> str:
        """The code that is shown."""
        return self.said(r"^ +code +(\S+)$")

    @property
    def pairing(self) -> str:
        """``HOST:PORT`` where it is accepted, as others on this machine reach it."""
        return f"127.0.0.1:{self.said(r'^ +address +[0-9.]+:([0-9]+)$')}"

    @property
    def port(self) -> int:
        """Port of its link."""
        return int(self.said(r"shared as .*, port ([0-9]+)"))

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(30)

    def again(self) -> None:
        """Start it anew, with the key and the trust that it has."""
        self.process = self._start()


class Strangers:
    """Starts strangers; ``unique("mini")`` is a name that no agent outside the test has."""

    def __init__(self, root: Path, command: str = COMMAND) -> None:
        self._root = root
        self._command = command
        self._tag = secrets.token_hex(2)
        self.all: list[Stranger] = []

    def unique(self, name: str) -> str:
        return f"{name}-{self._tag}"

    def __call__(self, name: str, *options: str, folder: str = "", start_up: str = "") -> Stranger:
        """Start one that is called ``unique(name)``; ``folder``: where its key is, so that two may have one name;
        ``start_up``: Python code that its processes run first, to be another machine."""
        stranger = Stranger(
            self._root, self.unique(name), *options, folder=folder, start_up=start_up, command=self._command
        )
        self.all.append(stranger)
        return stranger


@contextlib.contextmanager
def running_strangers(root: Path, command: str = COMMAND) -> Iterator[Strangers]:
    """For a fixture: what it starts is ended. ``command``: the ``notebook-cluster`` that they run."""
    factory = Strangers(root, command)
    try:
        yield factory
    finally:
        for stranger in factory.all:
            stranger.end()
