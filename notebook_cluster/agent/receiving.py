"""Files that a coordinator sends into a node's working folder: checked, written beside their place, put there at once.

Blocking; the sockets are :mod:`.transfers`. Nothing is written outside the folder, over a folder, or before there is
room for everything; what is incomplete is removed.
"""

import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from notebook_cluster.memory import amount
from notebook_cluster.protocol.names import names_in
from notebook_cluster.protocol.transfers import MOST_FILES, FileOffer

DIGEST_BYTES = 16
SPARE_BYTES = 64 << 20
"""Of the disk, which stay free."""
_PART = ".nbc-{ticket}-{number}.part"
_OLD_PART_SECONDS = 3600.0
"""After which an unfinished file is nobody's: the agent that wrote it was killed."""
_READ_BYTES = 1 << 20
_TICKET = re.compile(r"[0-9a-f]{8,64}")


class FileRefused(Exception):
    """A file is not taken; the text is the one-line reason."""


def check_path(path: str) -> tuple[str, ...]:
    """The names in a relative ``path``; FileRefused: it is not one (:func:`.names.names_in`)."""
    try:
        return names_in(path)
    except ValueError as error:
        raise FileRefused(str(error)) from None


def existing(root: Path) -> Path:
    """A working folder, resolved; FileRefused: it is gone."""
    try:
        return root.resolve(strict=True)
    except OSError:
        raise FileRefused(f"the working folder {root} is not there any more: %cluster restart makes it") from None


def digest_of(path: Path) -> bytes:
    """blake2b of a file's content."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.digest()


def free_bytes(folder: Path) -> int:
    """What may be written on the disk of ``folder``."""
    return max(shutil.disk_usage(folder).free - SPARE_BYTES, 0)


class Receiving:
    """One offer of files for the folder ``root``.

    Attributes:
        wanted: numbers of the files that are to be sent.
        replaced: those of them in whose place another file is.
        size: bytes of the wanted ones.

    Raises:
        FileRefused: a path, a size or a place is not usable; nothing was written.
    """

    def __init__(self, root: Path, ticket: str, files: Sequence[FileOffer]) -> None:
        if not _TICKET.fullmatch(ticket) or len(files) > MOST_FILES:
            raise FileRefused(f"an offer of {len(files)} files is not usable: at most {MOST_FILES:,} are taken")
        self._root = existing(root)
        self._ticket = ticket
        self._files = list(files)
        self.wanted: list[int] = []
        self.replaced: list[int] = []
        self._open: _Part | None = None
        self._inspect()
        self.size = sum(self._files[number].size for number in self.wanted)
        self._written = 0

    @property
    def left(self) -> int:
        """Bytes that are still to come."""
        return self.size - self._written

    def make_folders(self) -> None:
        """The empty ones of the offer."""
        for file in self._files:
            if file.folder:
                self._place(file).mkdir(parents=True, exist_ok=True)

    def write(self, number: int, offset: int, data: bytes) -> None:
        """The bytes of a wanted file from ``offset`` on; the last ones put it in its place.

        Raises:
            FileRefused: they do not follow each other, are not those that were announced, or cannot be written.
        """
        part = self._open
        if part is None or part.number != number:
            if part is not None or number not in self.wanted or offset:
                raise FileRefused("the pieces of a file came out of order: send it again")
            part = self._open = self._begin(number)
        try:
            if part.add(offset, data):
                part.finish(self._place(self._files[number]))
                self._open = None
                self.wanted.remove(number)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise FileRefused(f"{self._files[number].path}: {error.strerror or error}") from None
            raise
        self._written += len(data)

    def close(self) -> None:
        """Remove what is incomplete."""
        if self._open is not None:
            self._open.remove()
            self._open = None

    def _inspect(self) -> None:
        """Check every file, and find those that are not there yet."""
        seen = set()
        for number, file in enumerate(self._files):
            place = self._place(file)
            if file.path in seen or not (0 <= file.size < 1 << 50 and len(file.digest) in (0, DIGEST_BYTES)):
                raise FileRefused(f"path {file.path[:200]!r} is offered twice, or with a size that none has")
            seen.add(file.path)
            if file.folder:
                if place.exists() and not place.is_dir():
                    raise FileRefused(f"{file.path} is a file there: a folder of this name cannot be made")
            elif place.is_dir():
                raise FileRefused(f"{file.path} is a folder there: a file of this name cannot be written")
            elif not self._is_there(place, file):
                self.wanted.append(number)
                if place.exists() or place.is_symlink():
                    self.replaced.append(number)

    def _is_there(self, place: Path, file: FileOffer) -> bool:
        try:
            found = place.stat()
            same_size = stat.S_ISREG(found.st_mode) and found.st_size == file.size
            return same_size and digest_of(place) == file.digest
        except OSError:
            return False

    def _place(self, file: FileOffer) -> Path:
        """Where ``file`` belongs. FileRefused when that is not inside the working folder, or below a file."""
        place = self._root.joinpath(*check_path(file.path))
        parent = place.parent
        while not parent.exists():
            if parent.is_symlink():
                raise FileRefused(f"{file.path}: {parent.name} is a link that leads nowhere")
            parent = parent.parent
        if not parent.is_dir():
            raise FileRefused(f"{file.path}: {parent.name} is a file there")
        if not parent.resolve().is_relative_to(self._root):
            raise FileRefused(f"{file.path}: {parent.name} leads out of the working folder {self._root}")
        return place

    def _begin(self, number: int) -> "_Part":
        file = self._files[number]
        place = self._place(file)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _remove_old_parts(place.parent)
            return _Part(place.parent / _PART.format(ticket=self._ticket[:16], number=number), number, file)
        except OSError as error:
            raise FileRefused(f"{file.path}: {error.strerror or error}") from None


class _Part:
    """A file that is not complete yet, beside its place."""

    def __init__(self, path: Path, number: int, file: FileOffer) -> None:
        self.number = number
        self._path = path
        self._offer = file
        self._size = 0
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        self._file = os.fdopen(os.open(path, flags, 0o777 if file.executable else 0o666), "wb", buffering=0)

    def add(self, offset: int, data: bytes) -> bool:
        """True when the file is complete now."""
        if offset != self._size or self._size + len(data) > self._offer.size or (not data and self._offer.size):
            raise FileRefused(f"{self._offer.path}: its pieces came out of order: send it again")
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._digest.update(data)
        self._size += len(data)
        return self._size == self._offer.size

    def finish(self, place: Path) -> None:
        self._file.close()
        if self._digest.digest() != self._offer.digest:
            raise FileRefused(f"{self._offer.path} changed while it was sent: send it again")
        os.replace(self._path, place)

    def remove(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def check_room(wanted: int, promised: int, free: int, allowed: int | None, taken: int) -> None:
    """Raise FileRefused unless ``wanted`` bytes fit, beside those ``promised`` to others, on a disk with ``free``
    bytes, and the owner allows them: ``allowed`` in all, of which ``taken`` are used up."""
    if allowed is not None and taken + promised + wanted > allowed:
        raise FileRefused(
            f"{amount(wanted)} of files are too much: its owner allows {amount(allowed)} for each cluster, "
            f"{amount(taken + promised)} of it are used; ask for a higher --files"
        )
    if promised + wanted > free:
        left = amount(max(free - promised, 0))
        raise FileRefused(f"{amount(wanted)} of files do not fit on the disk: {left} are free there")


def _remove_old_parts(folder: Path) -> None:
    for path in folder.glob(".nbc-*.part"):
        if time.time() - path.lstat().st_mtime > _OLD_PART_SECONDS:
            path.unlink(missing_ok=True)
