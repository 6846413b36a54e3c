"""Arrays in files that have no name: memory that the system may write to a disk and forget.

A file that was never listed, or was removed before anything was written to it, is gone with the process that has it,
however that ends: nothing is left over, and nobody can take what is in it for a state. Its space is set aside when the
array is made, since a mapped page for which the disk has no room kills a process.
"""

import contextlib
import mmap
import os
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ZEROS = bytes(1 << 20)
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class NamelessFile(mmap.mmap):
    """A mapped file below ``folder``, with the descriptor by which it is written to the disk."""

    folder: Path
    descriptor: int = -1

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def write_to_disk(self) -> None:
        """Until it is there; then the system may take its pages, and what nobody uses is not in this process."""
        sync = getattr(os, "fdatasync", os.fsync)
        sync(self.descriptor)
        if hasattr(mmap, "MADV_DONTNEED") and os.uname().sysname == "Linux":
            self.madvise(mmap.MADV_DONTNEED)  # of a shared mapping nothing is lost, also of what is written meanwhile


def array_in(folder: Path, count: int, dtype: Any) -> "NDArray[Any]":
    """A flat array of zeros in a new file, on the filesystem of ``folder``, which need not exist yet.

    Raises:
        OSError: there is no room for it, or no file may be made or mapped there.
    """
    import numpy

    kind, folder = numpy.dtype(dtype), existing(folder)
    size = max(1, count * kind.itemsize)
    descriptor = _open(folder)
    try:
        _set_aside(descriptor, size)
        file = NamelessFile(descriptor, size)
        file.folder, file.descriptor = folder, descriptor
    except BaseException:
        os.close(descriptor)
        raise
    return numpy.ndarray((count,), kind, buffer=file)


def file_of(array: Any) -> NamelessFile | None:
    """The file that ``array``, or the array it is a view of, lies in; None: it lies in memory."""
    while array is not None and not isinstance(array, NamelessFile):
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
    return array


def existing(folder: Path) -> Path:
    """``folder``, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next((one for one in (folder, *folder.parents) if one.is_dir()), folder)


def is_in_memory(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether the files below ``folder`` are kept in memory themselves; False where that cannot be told."""
    found, place = "", existing(folder).resolve()
    with contextlib.suppress(OSError, ValueError):
        longest = -1
        for line in mounts.read_text(errors="replace").splitlines():
            _, point, kind, *_ = line.split()
            if place.is_relative_to(point) and len(point) >= longest:
                found, longest = kind, len(point)
    return found in _IN_MEMORY


class WrittenBehind:
    """Writes files to the disk on a thread of its own, while they are used. A file that waits already is not put in
    line again."""

    def __init__(self) -> None:
        self._waiting: dict[int, NamelessFile] = {}
        self._lock = threading.Lock()
        self._running = False

    def write(self, arrays: Iterable[Any]) -> None:
        """Those of ``arrays`` that lie in files."""
        with self._lock:
            for file in filter(None, map(file_of, arrays)):
                self._waiting[id(file)] = file
            if self._waiting and not self._running:
                self._running = True
                threading.Thread(target=self._run, name="written-behind", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                _, file = self._waiting.popitem()
            with contextlib.suppress(OSError):  # what cannot be written stays in memory; the system says why
                file.write_to_disk()
            del file


def _open(folder: Path) -> int:
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):  # not every filesystem has it
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    descriptor, path = tempfile.mkstemp(prefix=".notebook-cluster-", dir=folder)
    os.unlink(path)
    return descriptor


def _set_aside(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    for start in range(0, size, len(_ZEROS)):
        os.write(descriptor, _ZEROS[: size - start])
