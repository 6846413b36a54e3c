"""One coordinator of a cluster at a time, and what it says to whoever started it until it answers."""

import contextlib
import fcntl
import os
import sys
import time
from pathlib import Path

from notebook_cluster.journal.place import LOCK_FILE

LOCK_WAIT = 15.0
"""Seconds for the coordinator before to end: it has taken its connection file away some time earlier."""
_PROGRESS_PERIOD = 0.5


class AnotherRuns(Exception):
    """The cluster has a coordinator already; one line."""


class StartProgress:
    """Lines about how far the start is, to the file ``descriptor``; -1 for nobody. Who does not read costs nothing."""

    def __init__(self, descriptor: int = -1) -> None:
        self._descriptor = descriptor
        self._due = 0.0
        if descriptor >= 0:
            os.set_blocking(descriptor, False)
            os.set_inheritable(descriptor, False)

    def say(self, text: str) -> None:
        """``text`` is one line."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, text.encode() + b"\n")

    def read(self, done: int, size: int) -> None:
        """So many bytes of the journal were read."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _PROGRESS_PERIOD
            self.say(f"reading its journal, {done / 1e6:.0f} of {size / 1e6:.0f} MB")

    def fail(self, text: str) -> None:
        """Why there is no coordinator; also to stderr, whose file may be on a disk that is full."""
        self.say(f"error: {text}")
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """It is over."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def lock(folder: Path, cluster: str, progress: StartProgress) -> int:
    """Hold ``folder`` for this process, until it ends; returns the lock's descriptor.

    Raises:
        AnotherRuns: another coordinator holds it, and does not end.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + LOCK_WAIT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
            if time.monotonic() > deadline:
                os.close(descriptor)
                way_out = "use that one, or end that process"
                raise AnotherRuns(
                    f"cluster {cluster!r} has a coordinator already (process {holder}): {way_out}"
                ) from None
            progress.say(f"waiting for process {holder}, its coordinator before, to end")
            time.sleep(0.2)
    with contextlib.suppress(OSError):  # a full disk: the number is only for people
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
