"""Files of a node's working folder that a coordinator asks for. Blocking; the sockets are :mod:`.transfers`.

Only regular files inside the folder are given: no link that leads out of it, nothing above it.
"""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from notebook_cluster.agent.receiving import FileRefused, check_path, existing
from notebook_cluster.protocol.transfers import CHUNK_BYTES, LEFT_OUT, MOST_FILES, FileOffer, FilesAnswer

_WILD = frozenset("*?[")
_MOST_CHARACTERS = 1_000_000
"""Of the paths in one answer."""


def found_in(root: Path, pattern: str) -> list[FileOffer]:
    """The files below ``root`` that ``pattern`` means, in order: a file, a folder's, or those that match.

    Raises:
        FileRefused: it leads out of the folder, or means too many.
    """
    names = check_path(pattern)
    root = existing(root)
    found = sorted(islice(_matching(root, pattern, names), MOST_FILES + 1))
    if len(found) > MOST_FILES or sum(len(path) for path, _ in found) > _MOST_CHARACTERS:
        raise FileRefused(f"{pattern!r} means too many files there: name fewer, or pack them into one")
    return [FileOffer(path=path, size=size) for path, size in found]


def read_piece(root: Path, path: str, offset: int) -> FilesAnswer:
    """Bytes of the file ``path`` below ``root``, from ``offset`` on, with the size and time of change of the whole.

    Raises:
        FileRefused: there is no such file in the folder, or it cannot be read.
    """
    names = check_path(path)
    root = existing(root)
    file = root.joinpath(*names)
    if not _is_inside(file, root):
        raise FileRefused(f"there is no file {path!r} in the working folder")
    try:
        with file.open("rb") as reading:
            facts = os.fstat(reading.fileno())
            if not 0 <= offset <= facts.st_size:
                raise FileRefused(f"there is no byte {offset} in {path!r}")
            reading.seek(offset)
            data = reading.read(CHUNK_BYTES)
    except OSError as error:
        raise FileRefused(f"{path!r} cannot be read there: {error.strerror or error}") from None
    return FilesAnswer(request=0, data=data, size=facts.st_size, changed=facts.st_mtime_ns)


def _matching(root: Path, pattern: str, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    start = root.joinpath(*names)
    if start.is_file():
        matches: Iterator[Path] = iter((start,))
    elif _WILD & set(pattern):
        matches = root.glob(pattern)
    else:
        matches = start.rglob("*") if _is_below(start, root) else iter(())
    for file in matches:
        path = file.relative_to(root)
        named = set(names) & LEFT_OUT
        if _is_inside(file, root) and not (set(path.parts) & LEFT_OUT - named):
            yield path.as_posix(), file.stat().st_size


def _is_inside(file: Path, root: Path) -> bool:
    """A regular file that lies below ``root``, where its links end too."""
    return _is_below(file, root) and file.is_file()


def _is_below(place: Path, root: Path) -> bool:
    try:
        return place.resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # links in a circle
        return False
