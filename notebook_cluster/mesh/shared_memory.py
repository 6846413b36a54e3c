"""Memory that the nodes of one peer share: a file of 0600 that one node makes and the others map.

A file that all write to has a name only until the others have it open; one that its maker lends (:mod:`.lending`) has
one for as long as it is lent. Its path is never sent: whoever knows where the maker's ipc
socket is (0700 folder, in the roster) derives it. What is mapped is checked first: an ordinary file of this user that
nobody else may open, as large as was said. So nothing can end in a bus error but a node of the same user that cuts its
file short, and that one could end this process in any other way too.
"""

import contextlib
import hashlib
import mmap
import os
import stat
import sys
import time
from pathlib import Path
from typing import Literal

Where = Literal["shm", "folder"]
"""Where the file lies: ``/dev/shm``, which is never written to a disk, or the folder of the ipc sockets."""

WHERES: tuple[Where, ...] = ("shm", "folder")
_MEMORY = Path("/dev/shm")
_PREFIX = "nbc-"
_OLD = 10.0
"""Seconds: a younger file may be one that its maker has not locked yet."""


class SharedFile:
    """A mapped file; ``data`` is its memory. It is unmapped when nothing refers to ``data`` any more."""

    def __init__(self, path: Path, where: Where, data: mmap.mmap, descriptor: int = -1) -> None:
        self.where = where
        self.data = data
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def make(cls, ipc_path: str, number: int, size: int, only: Where | None = None) -> "SharedFile | None":
        """A new file of ``size`` bytes beside the ipc socket ``ipc_path``, its pages set aside; None where there is no
        room or no such memory. ``number`` tells the files of one node apart."""
        forget_left_over()
        for where in WHERES if only is None else (only,):
            path = _path(ipc_path, number, where)
            if where == "shm" and not _has_room(size):
                continue
            with contextlib.suppress(OSError):
                return cls._make(path, where, size)
        return None

    @classmethod
    def _make(cls, path: Path, where: Where, size: int) -> "SharedFile":
        _remove_left_over(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            _lock(descriptor)
            if not os.path.samestat(os.fstat(descriptor), path.lstat()):
                raise FileExistsError(f"{path} was taken for one that is left over")
            _set_aside(descriptor, size)
            return cls(path, where, mmap.mmap(descriptor, size), descriptor)
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def attach(cls, ipc_path: str, number: int, where: Where, size: int) -> "SharedFile":
        """Map the file that the node with the ipc socket ``ipc_path`` has made.

        Raises:
            OSError: there is none, or it is not what it should be; the text says what.
        """
        path = _path(ipc_path, number, where)
        descriptor = _opened(path, size, os.O_RDWR)
        try:
            return cls(path, where, mmap.mmap(descriptor, size))
        finally:
            os.close(descriptor)

    @staticmethod
    def read(ipc_path: str, number: int, size: int, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of such a file in ``/dev/shm``, mapped only to be read.

        Raises:
            OSError: as of :meth:`attach`.
            ValueError: the file has no such bytes.
        """
        if not 0 <= start < stop <= size:
            raise ValueError(f"there are no bytes {start} to {stop} in {size}")
        descriptor = _opened(_path(ipc_path, number, "shm"), size, os.O_RDONLY)
        try:
            first = start - start % mmap.ALLOCATIONGRANULARITY
            held = {"trackfd": False} if sys.version_info >= (3, 13) else {}  # else it keeps one more descriptor
            data = mmap.mmap(descriptor, stop - first, access=mmap.ACCESS_READ, offset=first, **held)
            return memoryview(data)[start - first :]
        finally:
            os.close(descriptor)

    def hide(self) -> None:
        """Remove the file's name: everybody has it open. Nothing is left of it when its last process ends."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def _opened(path: Path, size: int, access: int) -> int:
    """A descriptor of what lies at ``path``, once it is known to be what it should be."""
    descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} is not a file of this user alone")
        if size <= 0 or found.st_size != size:
            raise OSError(f"{path} has {found.st_size} bytes, not {size}")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def forget_left_over(age: float = _OLD) -> int:
    """Remove files of ``age`` seconds whose maker was killed before the others had them open; how many."""
    removed = 0
    with contextlib.suppress(OSError):
        for path in _MEMORY.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_ctime >= age:
                    removed += _remove_left_over(path)
    return removed


def _remove_left_over(path: Path) -> int:
    """Remove ``path`` when it is this user's and nobody holds its lock: its maker has ended."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            _lock(descriptor)
            path.unlink(missing_ok=True)
            return 1
    except OSError:
        pass  # its maker lives
    finally:
        os.close(descriptor)
    return 0


def _lock(descriptor: int) -> None:
    """Hold the file's lock until the descriptor is closed; OSError when another process holds it."""
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _path(ipc_path: str, number: int, where: Where) -> Path:
    if where == "folder":
        return Path(f"{ipc_path}.{number}")
    name = hashlib.blake2b(f"{ipc_path} {number}".encode(), digest_size=12).hexdigest()
    return _MEMORY / f"{_PREFIX}{name}"


def _has_room(size: int) -> bool:
    """Whether ``/dev/shm`` is there and the file takes at most a quarter of what is free: others need it too."""
    try:
        free = os.statvfs(_MEMORY)
    except OSError:
        return False
    return size <= free.f_bavail * free.f_frsize // 4


def _set_aside(descriptor: int, size: int) -> None:
    """Take the space now: a page that is missing later would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    zeros = bytes(1 << 20)
    for start in range(0, size, len(zeros)):
        os.write(descriptor, zeros[: size - start])
