"""Which files ``%cluster send PATH`` means, and where they belong on a node."""

import difflib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from notebook_cluster.client.connection import ClusterError
from notebook_cluster.protocol.transfers import MOST_FILES, MOST_PATH_CHARACTERS

LEFT_OUT = frozenset((".git", "__pycache__", ".ipynb_checkpoints"))
"""Folders that are not sent."""


@dataclass(frozen=True)
class SourceFile:
    """A file here, and its relative ``path`` with ``/`` on the nodes."""

    file: Path
    path: str
    size: int
    executable: bool


@dataclass
class Sources:
    """What is to be sent.

    Attributes:
        base: the folder here to which the paths are relative, when they are the same on the nodes.
        skipped: what is left out, with the reason, for people.
    """

    base: Path | None
    files: list[SourceFile] = field(default_factory=list)
    empty_folders: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(source.size for source in self.files)

    def are_in(self, folder: str) -> bool:
        """True when ``folder`` of this machine is the one in which they lie at the same paths."""
        try:
            return self.base is not None and os.path.samefile(folder, self.base)
        except OSError:
            return False


def find_sources(path: str, directory: Path | None = None) -> Sources:
    """The file ``path``, or everything in the folder ``path`` but caches and version control.

    Inside ``directory`` (default: the current one) the relative path stays what it is, so that a cell finds the file
    under the same name on every node; what is elsewhere goes into the working folder itself.

    Raises:
        ClusterError: it does not exist (names what is near), cannot be read, or is too much.
    """
    base = (directory or Path.cwd()).resolve()
    try:
        typed = Path(path).expanduser()
        found = base / typed
        mode = found.stat().st_mode
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(_not_there(path, base, error)) from None
    name, inside = _target(found, base)
    sources = Sources(base if inside else None)
    if stat.S_ISDIR(mode):
        _walk(found, found.resolve(), name, sources, {found.resolve()})
    elif stat.S_ISREG(mode):
        _add(found, name, sources)
    else:
        raise ClusterError(f"{path} is neither a file nor a folder: only those can be sent")
    if not sources.files and not sources.empty_folders and sources.skipped:
        raise ClusterError(f"there is nothing to send in {path}: {sources.skipped[0]}")
    return sources


def _target(found: Path, base: Path) -> tuple[str, bool]:
    """The path on the nodes, and whether it is the same as here."""
    # Not resolved: a link to a data disk keeps the name that the notebook uses.
    plain = Path(os.path.normpath(found))
    if plain == base:
        return "", True
    if plain.is_relative_to(base):
        return plain.relative_to(base).as_posix(), True
    return found.resolve().name, False


def _walk(folder: Path, root: Path, name: str, sources: Sources, seen: set[Path]) -> None:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ClusterError(f"folder {folder} cannot be read: {error.strerror}") from None
    if not entries and name:
        sources.empty_folders.append(name)
    for entry in entries:
        path = f"{name}/{entry.name}" if name else entry.name
        if entry.name in LEFT_OUT:
            continue
        target = entry.resolve()
        if entry.is_symlink() and not target.is_relative_to(root):
            sources.skipped.append(f"{path} is a link that leads out of the folder")
        elif entry.is_dir():
            if target in seen:
                sources.skipped.append(f"{path} is a link to a folder that is sent already")
                continue
            _walk(entry, root, path, sources, seen | {target})
        elif entry.is_file():
            _add(entry, path, sources)
        else:
            sources.skipped.append(f"{path} is neither a file nor a folder")


def _add(file: Path, path: str, sources: Sources) -> None:
    if len(sources.files) >= MOST_FILES:
        raise ClusterError(f"more than {MOST_FILES:,} files: pack them into one (shutil.make_archive) and send that")
    if not path.isprintable() or "\\" in path or len(path) > MOST_PATH_CHARACTERS:
        raise ClusterError(f"{path!r} has a name that not every machine can write: rename it")
    try:
        facts = file.stat()
        with file.open("rb"):
            pass
    except OSError as error:
        raise ClusterError(f"{file} cannot be read: {error.strerror}") from None
    sources.files.append(SourceFile(file, path, facts.st_size, bool(facts.st_mode & stat.S_IXUSR)))


def _not_there(path: str, base: Path, error: Exception) -> str:
    if not isinstance(error, FileNotFoundError):
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return f"{path!r} cannot be read: {reason}"
    parent = (base / path).parent
    try:
        names = [entry.name for entry in parent.iterdir()]
    except OSError:
        return f"there is no file or folder {path!r}: {parent} does not exist"
    near = difflib.get_close_matches(Path(path).name, names, n=1, cutoff=0.6)
    hint = f" (did you mean {str(Path(path).with_name(near[0]))!r}?)" if near else ""
    return f"there is no file or folder {path!r} in {base}{hint}"
