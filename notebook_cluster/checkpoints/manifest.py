"""The manifest of a checkpoint and the hashes in it."""

import hashlib
import re
from pathlib import Path

import msgspec

MANIFEST_FILE = "manifest.json"
GLOBAL_FILE = "global.safetensors"
MOMENTUM_PREFIX = "outer.momentum/"
FORMAT = 1
MAX_MANIFEST_BYTES = 4 * 1024 * 1024

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.safetensors")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; one line that names the file and the way out."""


class FileEntry(msgspec.Struct, frozen=True):
    """What a file of the checkpoint must look like."""

    bytes: int
    blake2b: str


class NodeEntry(msgspec.Struct, frozen=True):
    """A node that took part. ``file`` is empty when its own state was not saved (it left)."""

    name: str
    rank: int
    file: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``manifest.json``."""

    format: int
    job: str
    name: str
    round: int
    state_hash: str
    serial: int
    """Counts the saves under this name in this folder: the highest is the newest, whatever its round."""
    saved_at: float
    """Seconds since 1970, for people."""
    settings: dict[str, str | int | float | bool | None]
    nodes: list[NodeEntry]
    versions: dict[str, str]
    files: dict[str, FileEntry]


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest in ``folder`` and the blake2b hash of its bytes.

    Raises:
        CheckpointError: missing, unreadable, of a newer format, or it names files outside the folder.
    """
    path = folder / MANIFEST_FILE
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path} is over {MAX_MANIFEST_BYTES} bytes: not a manifest; delete {folder}")
        data = path.read_bytes()
        manifest = msgspec.json.decode(data, type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} is not readable ({error}): delete {folder}") from None
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.format}, this version reads {FORMAT}: upgrade notebook-cluster"
        )
    bad = [name for name in manifest.files if not _FILE.fullmatch(name)]
    if bad or GLOBAL_FILE not in manifest.files:
        raise CheckpointError(
            f"{path} lists {bad[0]!r}: delete {folder}" if bad else f"{path} lists no {GLOBAL_FILE}: delete {folder}"
        )
    return manifest, digest(data)


def digest(data: bytes) -> str:
    """blake2b, 32 bytes, as hexadecimal text."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def file_digest(path: Path) -> str:
    """:func:`digest` of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
