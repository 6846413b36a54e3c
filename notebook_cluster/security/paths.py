"""Folders of this user and how a private file is written: nothing here is readable by other users."""

import os
import tempfile
from pathlib import Path

from notebook_cluster.protocol import check_name


def private_directory(path: Path) -> Path:
    """Make ``path`` (and its parents), give it mode 0700 and return it.

    Raises:
        PermissionError: it belongs to another user, who could read or replace what is in it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, not to you: remove it or set JUPYTER_DATA_DIR and "
            "JUPYTER_RUNTIME_DIR to folders of your own"
        )
    if status.st_mode & 0o077:
        path.chmod(0o700)
    return path


def data_directory() -> Path:
    """``<jupyter data>/notebook_cluster``: what outlives a reboot (identity, agents' working folders)."""
    from jupyter_core.paths import jupyter_data_dir

    return private_directory(Path(jupyter_data_dir()) / "notebook_cluster")


def runtime_directory() -> Path:
    """``<jupyter runtime>/notebook_cluster``: what belongs to running processes."""
    from jupyter_core.paths import jupyter_runtime_dir

    return private_directory(Path(jupyter_runtime_dir()) / "notebook_cluster")


def cluster_directory(name: str) -> Path:
    """Folder of cluster ``name``: connection file, journal, coordinator's log. ValueError for an unusable name."""
    return private_directory(runtime_directory() / "clusters" / check_name(name, "cluster"))


def agent_directory(name: str) -> Path:
    """Data folder of agent ``name``: its identity and the working folders of its kernels. ValueError as above."""
    return private_directory(data_directory() / "agents" / check_name(name, "peer"))


def private_socket_directory() -> Path:
    """A fresh 0700 folder with a short path: an ipc address may hold about 100 bytes, a home folder may be longer."""
    base = Path("/tmp")
    return Path(tempfile.mkdtemp(prefix="nbc-", dir=base if base.is_dir() else None))


def write_private(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` with mode 0600, whole or not at all, durable when this returns."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """Make a rename in ``path`` durable; systems that cannot open a folder keep names durable on their own."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
