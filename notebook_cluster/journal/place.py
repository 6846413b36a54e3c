"""Where the journal of a run lies.

Beside the run's other files, in its folder. But in a folder on a file system of another machine (NFS, SMB, FUSE, 9p),
where home directories of universities often lie, SQLite's write-ahead log does not work: there it lies on this machine,
in ``/var/tmp/notebook-cluster-UID``, and the folder gets a copy of it now and then and at the end.
"""

import hashlib
import os
import shutil
import stat
from pathlib import Path

import psutil

JOURNAL_FILE = "run.journal"
CURVES_FILE = "curves.journal"
LOCK_FILE = "coordinator.lock"
"""The lock in the run's folder; the coordinator holds it (flock) as long as it lives."""
_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "afpfs", "webdav", "osxfuse", "macfuse", "sshfs")
_LOCAL_ROOT = Path("/var/tmp")


def journal_path(folder: Path) -> Path:
    """The journal of the run in ``folder``, or the copy of it where the journal is on another machine."""
    return _newest(folder, JOURNAL_FILE)


def curves_path(folder: Path) -> Path:
    """The curves of the run in ``folder``, as :func:`journal_path`."""
    return _newest(folder, CURVES_FILE)


def _newest(folder: Path, name: str) -> Path:
    path = place_of(folder) / name
    return path if path.exists() else folder / name


def place_of(folder: Path) -> Path:
    """The folder in which the journal is written: ``folder``, or one on this machine."""
    if not is_remote(folder):
        return folder
    root = _LOCAL_ROOT / f"notebook-cluster-{os.getuid()}"
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    place = root / f"{folder.name[:40]}-{name}"
    return folder if is_remote(_LOCAL_ROOT) else place


def make_place(folder: Path) -> Path:
    """:func:`place_of`, made (0700) where it is not there, with what the folder has copies of.

    Raises:
        OSError: somebody else's folder is in the way; names it.
    """
    place = place_of(folder)
    if place != folder:
        for part in (place.parent, place):
            part.mkdir(mode=0o700, exist_ok=True)
            found = part.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise OSError(f"{part} is not a private folder of this user: remove it, or have its owner remove it")
        for name in (JOURNAL_FILE, CURVES_FILE):
            if (folder / name).exists() and not (place / name).exists():
                shutil.copyfile(folder / name, place / name)
                (place / name).chmod(0o600)
    return place


def is_remote(folder: Path) -> bool:
    """True when the folder's file system is one of another machine, or of a program."""
    return file_system(folder).startswith(_REMOTE)


def file_system(folder: Path) -> str:
    """The type of the file system that ``folder`` is on, as the system names it; empty when it does not say."""
    path = os.path.realpath(folder)
    found = ("", "")
    for part in psutil.disk_partitions(all=True):
        mounted = part.mountpoint.rstrip("/")
        if (path == mounted or path.startswith(f"{mounted}/")) and len(mounted) >= len(found[0]):
            found = mounted, part.fstype
    return found[1].lower()
