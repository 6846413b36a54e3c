"""The CURVE key pair of an installation or an agent, the folders of this user, how a private file is written, and how
processes of this user tell each other their keys.

Nothing here is readable by other users. So processes of the same user on this machine trust each other: who can write a
0600 file here is that user. Each process writes one file with its public key; the others read the folder at the moment
they decide.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import zmq

from notebook_cluster.protocol import check_name

_FILE = "identity.json"
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""Z85 text of 32 bytes (ZeroMQ RFC 32)."""
_TOKENS = re.compile(r"(JUPYTER|JPY|JUPYTERHUB|CONFIGPROXY)_\w*(TOKEN|PASSWORD|SECRET)\w*")
"""What a Jupyter server and its hub put into a kernel's environment."""


@dataclass(frozen=True)
class Identity:
    """A CURVE key pair as Z85 text of 40 characters each. The secret is kept out of ``repr`` and so out of logs."""

    public_key: str
    secret_key: str = field(repr=False)


def without_tokens(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without the tokens of a Jupyter server and its hub: they are no business of another machine, nor
    of a kernel that somebody else may use."""
    return {name: value for name, value in environment.items() if not _TOKENS.fullmatch(name)}


def is_key(text: object) -> bool:
    """True for 40 characters of the Z85 alphabet: the form, not the truth, of a CURVE key."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def new_identity() -> Identity:
    """A new key pair."""
    public, secret = zmq.curve_keypair()
    return Identity(public.decode("ascii"), secret.decode("ascii"))


def load_identity(directory: Path) -> Identity:
    """The key pair kept in ``directory``/identity.json (mode 0600), made at the first call.

    Two processes that make it at the same time end with the same pair.

    Raises:
        PermissionError: others can read or write the file, so the key can no longer be trusted.
        ValueError: the content is not a key pair.
    """
    path = private_directory(directory) / _FILE
    if not path.exists():
        _create(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise PermissionError(
            f"{path} has mode {mode:04o}, so other users may know the key: delete it to get a new one, "
            f"or run 'chmod 600 {path}' if nobody else uses this machine"
        )
    try:
        record = json.loads(path.read_bytes())
        identity = Identity(str(record["public_key"]), str(record["secret_key"]))
        if not (is_key(identity.public_key) and is_key(identity.secret_key)):
            raise ValueError("a key is not 40 characters of Z85")
        if zmq.curve_public(identity.secret_key.encode()).decode() != identity.public_key:
            raise ValueError("the keys do not belong together")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no key pair ({error}): delete it to get a new one") from None
    return identity


def _create(path: Path) -> None:
    """Put a new pair at ``path`` unless another process was faster (a link never replaces an existing file)."""
    identity = new_identity()
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    content = json.dumps({"public_key": identity.public_key, "secret_key": identity.secret_key}).encode()
    try:
        _write_private(draft, content)
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError as error:
        raise in_words(error, path) from None
    finally:
        draft.unlink(missing_ok=True)


def fingerprint(public_key: str) -> str:
    """8 hex digits (blake2b) of ``public_key``: for people and file names, never for a decision."""
    return hashlib.blake2b(public_key.encode(), digest_size=4).hexdigest()


class CannotWrite(OSError):
    """What this package keeps finds no place; one line that names the file and the way out."""


def in_words(error: OSError, path: Path | None = None) -> OSError:
    """``error`` as :class:`CannotWrite` where a disk is full or may not be written, or a file is in a folder's way,
    else itself. ``path``: what was to be written; None: what the error names, if that is in a folder of this user's for
    notebook-cluster."""
    from jupyter_core.paths import jupyter_data_dir, jupyter_runtime_dir

    full, named = error.errno in (errno.ENOSPC, errno.EDQUOT), isinstance(error.filename, str)
    denied = named and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
    in_the_way = named and error.errno in (errno.ENOTDIR, errno.EEXIST)
    if error.strerror is None or not (full or denied or in_the_way) or not (path or named):
        return error
    place = path or Path(error.filename)
    if os.environ.get("JUPYTER_RUNTIME_DIR") and place.is_relative_to(jupyter_runtime_dir()):
        what, change = "what clusters and shared machines need while they run", "set JUPYTER_RUNTIME_DIR to"
    elif place.is_relative_to(jupyter_data_dir()) or place.is_relative_to(jupyter_runtime_dir()):
        what, change = "the keys and files of notebook-cluster", "set JUPYTER_DATA_DIR to"
    elif path:
        what, change = "the keys and files of notebook-cluster", "choose with --data-dir"
    else:
        return error
    where = "a folder on another disk" if full else "a folder in which you may write"
    way_out = f"{'make room there, or ' if full else ''}{change} {where}"
    why = "a file is there, or where a folder above it belongs" if in_the_way else error.strerror
    told = CannotWrite(f"{place} cannot be written, for {what} ({why}): {way_out}")
    told.errno = error.errno
    return told


def private_directory(path: Path) -> Path:
    """Make ``path`` (and its parents), give it mode 0700 and return it.

    Raises:
        PermissionError: it belongs to another user, who could read or replace what is in it.
        CannotWrite: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise in_words(error, path) from None
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
    """Write ``content`` to ``path`` with mode 0600, whole or not at all, durable when this returns.

    Raises:
        CannotWrite: there is no room, or no right to write.
    """
    try:
        _write_private(path, content)
    except OSError as error:
        raise in_words(error, path) from None


def _write_private(path: Path, content: bytes) -> None:
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


Role = Literal["agent", "coordinator"]
_MAX_BYTES = 4096
_log = logging.getLogger(__name__)


def _folder() -> Path:
    return private_directory(runtime_directory() / "same_user")


def own_key() -> str:
    """The public key that every coordinator of this user has, on any machine with this data folder; empty where none
    has run yet."""
    folder = data_directory()
    return load_identity(folder).public_key if (folder / "identity.json").exists() else ""


def announce(role: Role, public_key: str, name: str) -> Path:
    """Say that this process has ``public_key`` and is the ``role`` called ``name``; returns the file for
    :func:`withdraw`.

    The file name carries the process id, because all coordinators of a user have the same key and one that ends
    must not end the trust in the others.
    """
    if not is_key(public_key):
        raise ValueError(f"{public_key!r} is not a CURVE public key: it needs 40 characters of Z85")
    path = _folder() / f"{role}-{fingerprint(public_key)}-{os.getpid()}.json"
    record = {
        "role": role,
        "public_key": public_key,
        "name": check_name(name, role),
        "pid": os.getpid(),
        "machine": platform.node(),
    }
    write_private(path, json.dumps(record).encode())
    return path


def withdraw(path: Path) -> None:
    """Take back what :func:`announce` said; not an error when the file is gone."""
    path.unlink(missing_ok=True)


def same_user_keys(role: Role) -> dict[str, str]:
    """Public key -> name of every live process of this user that announced itself as ``role``.

    Reads the folder anew. Files of other users or open to them are ignored and logged; files of dead processes of
    this machine are removed.
    """
    keys: dict[str, str] = {}
    for path in sorted(_folder().glob(f"{role}-*.json")):
        record = _read(path, role)
        if record is None:
            continue
        if not _is_alive(record):
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        keys[record["public_key"]] = record["name"]
    return keys


def _read(path: Path, role: Role) -> dict[str, Any] | None:
    """The record in ``path``, or None with the reason logged.

    The descriptor is checked, not the path, so that the file judged is the file read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("ignored %s: %s", path, error)
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if hasattr(os, "getuid"):
            if status.st_uid != os.getuid():
                _log.warning("ignored %s: it belongs to user %d", path, status.st_uid)
                return None
            if status.st_mode & 0o077:
                _log.warning("ignored %s: mode %04o lets other users change it", path, status.st_mode & 0o777)
                return None
        if not stat.S_ISREG(status.st_mode):
            _log.warning("ignored %s: not a file", path)
            return None
        content = file.read(_MAX_BYTES)
    try:
        record = json.loads(content)
        valid = record["role"] == role and is_key(record["public_key"]) and isinstance(record["pid"], int)
        check_name(record["name"], role)
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("ignored %s: %s", path, error)
        return None
    if not valid:
        _log.warning("ignored %s: not a record of role %s", path, role)
        return None
    return dict(record)


def _is_alive(record: dict[str, Any]) -> bool:
    """False only for a process of this machine that has ended: a home folder may be shared with other machines."""
    if record.get("machine") != platform.node():
        return True
    try:
        os.kill(record["pid"], 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
