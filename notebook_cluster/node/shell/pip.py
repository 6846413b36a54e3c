"""``%pip`` on a node: into this kernel's own environment, one node of a machine after the other, and a failure is one.

IPython's ``%pip`` ends well whatever pip says, and two kernels of one environment would write into it at the same time.
"""

import contextlib
import fcntl
import hashlib
import importlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from notebook_cluster.security import runtime_directory

_ERROR = re.compile(r"error:\s*(.+)", re.IGNORECASE)
_CANNOT_WRITE = re.compile(r"Permission denied|Read-only file system|externally-managed-environment", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CHANGES = ("install", "uninstall")
_END_SECONDS = 5.0
_WAIT_UNSAID = 5.0
"""Seconds of waiting for another node that are not worth a word, which would be the only difference between nodes."""


class PipFailed(Exception):
    """pip ended with an error; its own words are in the output above. Shown as one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


def register_pip(ip: Any) -> None:
    """Let ``%pip`` of the shell ``ip`` be :func:`run_pip`."""
    ip.register_magic_function(run_pip, magic_kind="line", magic_name="pip")


def run_pip(line: str) -> None:
    """Run ``pip LINE`` with this kernel's Python and print what it says.

    Raises:
        PipFailed: it ended with an error; names what went wrong and the way out.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise PipFailed(f"%pip {line} cannot be read: {str(error).lower()}") from None
    if words[:1] == ["uninstall"] and not {"-y", "--yes"} & set(words):
        words.insert(1, "--yes")  # nobody is there to be asked
    with _alone() if words[:1] and words[0] in _CHANGES else contextlib.nullcontext():
        code, trouble, read_only = _run(words)
    importlib.invalidate_caches()
    if code:
        hint = ": its environment cannot be written to, %pip install --user NAME may work" if read_only else ""
        raise PipFailed(f"%pip {line.strip()} failed on this node: {trouble or f'exit code {code}'}{hint}")
    if words[:1] and words[0] in _CHANGES:
        print("a package that was imported before is the old one until %cluster restart NODE")


def _run(words: list[str]) -> tuple[int, str, bool]:
    """(exit code, pip's first error, whether the environment cannot be written to)."""
    environment = os.environ | {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pip", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    trouble, read_only = "", False
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            found = _ERROR.match(_COLOUR.sub("", line))
            trouble = trouble or (found[1].strip() if found else "")
            read_only = read_only or _CANNOT_WRITE.search(line) is not None
        return process.wait(), trouble[:300], read_only
    except BaseException:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No other node of this user changes this environment meanwhile."""
    name = hashlib.blake2b(sys.prefix.encode(), digest_size=8).hexdigest()
    with (runtime_directory() / f"pip-{name}.lock").open("wb") as lock:
        began, told = time.monotonic(), False
        while not _locked(lock):
            if not told and time.monotonic() - began > _WAIT_UNSAID:
                told = True
                print("waiting for %pip of another node on this machine ...", flush=True)
            time.sleep(0.05)
        yield


def _locked(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
