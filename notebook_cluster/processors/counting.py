"""How many nodes the agents of this user run on this machine: one locked file for each agent, with its number in it.

The lock is an flock, so the operating system gives it back when the agent ends in whatever way, and what it had is not
counted any more. Whoever wants to know reads the files that are locked.
"""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Hashable
from pathlib import Path

PLACE = "NOTEBOOK_CLUSTER_NODES"
"""The variable that tells a node where all agents of its user say how many nodes they run."""
_WIDTH = 8
_MOST = 10_000


class NodeCount:
    """The nodes of one agent, told to the others.

    Args:
        directory: the folder of the files, the same for all agents of a user; made 0700 when it is missing.
        machine: in front of every file name, for home folders that several machines share.
    """

    def __init__(self, directory: Path, machine: str) -> None:
        self._directory = directory
        self._machine = machine
        self._nodes: set[Hashable] = set()
        self._path: Path | None = None
        self._file: int | None = None

    @property
    def place(self) -> str:
        """For :func:`count_nodes`, in whatever process."""
        return str(self._directory / self._machine)

    def add(self, node: Hashable) -> None:
        """``node`` is about to start.

        Raises:
            OSError: the others cannot be told: the folder is not there to be written, or takes no locks.
        """
        self._nodes.add(node)
        self._tell()

    def drop(self, node: Hashable) -> None:
        """``node`` is gone; nothing when it never was."""
        if node in self._nodes:
            self._nodes.discard(node)
            with contextlib.suppress(OSError):
                self._tell()

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None and self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _tell(self) -> None:
        if self._file is None:
            self._file = self._open()
        os.pwrite(self._file, f"{len(self._nodes):<{_WIDTH}}".encode(), 0)

    def _open(self) -> int:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(self.place)
        while True:
            self._path = Path(f"{self.place}-{os.getpid()}-{uuid.uuid4().hex[:8]}.nodes")
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                os.close(file)
                self._path.unlink(missing_ok=True)
                raise
            if os.fstat(file).st_nlink:
                return file
            os.close(file)  # another agent took it for an abandoned one, before it was locked


def count_nodes(place: str) -> int:
    """Nodes of all agents that run and tell it at ``place`` (:attr:`NodeCount.place`); 0 when there are none."""
    count = 0
    for path in _files(place):
        with contextlib.suppress(OSError, ValueError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if not _is_abandoned(file):
                    count += min(max(int(os.pread(file, _WIDTH, 0) or b"0"), 0), _MOST)
            finally:
                os.close(file)
    return count


def _files(place: str) -> list[Path]:
    base = Path(place)
    with contextlib.suppress(OSError):
        return [path for path in base.parent.iterdir() if path.name.startswith(base.name) and path.suffix == ".nodes"]
    return []


def _is_abandoned(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_abandoned(place: str) -> None:
    """Files of agents that were killed."""
    for path in _files(place):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _is_abandoned(file):
                    path.unlink()
            finally:
                os.close(file)
