"""Where a launch's key lies and what its hosts write: a private folder for each, on a file system that they see."""

import contextlib
import os
import shutil
import time
from pathlib import Path

import msgspec

from notebook_cluster.protocol.launches import LaunchKey
from notebook_cluster.security import data_directory, private_directory, write_private

KEY_FILE = "key.json"
KEPT_S = 14 * 86400.0
"""How long what its hosts wrote stays when a launch is over."""


def make_folder(shared: str, launch: str, key: LaunchKey) -> Path:
    """A new folder for ``launch`` with its key, below ``shared`` (empty: this user's data folder); what launches that
    are long over have left there goes.

    Raises:
        OSError: ``shared`` is not there, or cannot be written.
    """
    parent = _parent(shared)
    let_old_ones_go(parent)
    folder = private_directory(parent / launch)
    write_private(folder / KEY_FILE, msgspec.json.encode(key) + b"\n")
    return folder


def _parent(shared: str) -> Path:
    if not shared:
        return private_directory(data_directory() / "launches")
    path = Path(shared).expanduser()
    if not path.is_absolute() or not path.is_dir():
        raise NotADirectoryError(f"--folder {shared}: name a folder that is there, from the root on")
    return private_directory(path / f"notebook-cluster-{os.getuid()}")


def let_old_ones_go(parent: Path) -> None:
    """Remove the folders of launches that are over and were last written two weeks ago."""
    for folder in parent.iterdir():
        with contextlib.suppress(OSError):
            written = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if not (folder / KEY_FILE).exists() and time.time() - written > KEPT_S:
                shutil.rmtree(folder)


def forget_key(folder: Path) -> None:
    """The launch is over: what its hosts wrote stays, unless they wrote nothing."""
    (folder / KEY_FILE).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        if all(path.stat().st_size == 0 for path in folder.iterdir()):
            shutil.rmtree(folder)
