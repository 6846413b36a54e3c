"""The CURVE key pair by which an installation or an agent is known."""

import hashlib
import json
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from notebook_cluster.security.paths import private_directory, write_private

_FILE = "identity.json"
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""Z85 text of 32 bytes (ZeroMQ RFC 32)."""


@dataclass(frozen=True)
class Identity:
    """A CURVE key pair as Z85 text of 40 characters each. The secret is kept out of ``repr`` and so out of logs."""

    public_key: str
    secret_key: str = field(repr=False)


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
    write_private(draft, json.dumps({"public_key": identity.public_key, "secret_key": identity.secret_key}).encode())
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink(missing_ok=True)


def fingerprint(public_key: str) -> str:
    """8 hex digits (blake2b) of ``public_key``: for people and file names, never for a decision."""
    return hashlib.blake2b(public_key.encode(), digest_size=4).hexdigest()
