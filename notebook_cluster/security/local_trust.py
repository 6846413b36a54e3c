"""Processes of the same user on this machine trust each other: who can write a 0600 file here is that user.

Each process writes one file with its public key; the others read the folder at the moment they decide.
"""

import contextlib
import json
import logging
import os
import platform
import stat
from pathlib import Path
from typing import Any, Literal

from notebook_cluster.protocol import check_name
from notebook_cluster.security.identity import fingerprint, is_key, private_directory, runtime_directory, write_private

Role = Literal["agent", "coordinator"]
_MAX_BYTES = 4096
_log = logging.getLogger(__name__)


def _folder() -> Path:
    return private_directory(runtime_directory() / "same_user")


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
