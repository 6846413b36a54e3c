"""What a checkpoint says of itself (its manifest, with the hashes of its files), the newest one that is whole, and what
a machine has kept.

A machine keeps checkpoints when a cluster ends without having asked for one. A cluster on another person's machine
works in ``work/<cluster>/`` of the agent there, and the next one, perhaps of another owner, elsewhere. So what was kept
(``<job>-kept``, nothing else) is looked for in all of them; a folder that is reached through a link is none of them.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from notebook_cluster.protocol.names import check_name

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
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
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


Tensors = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest whole checkpoint of a name. ``warnings``: one line for each damaged one before it."""

    round: int
    path: Path
    manifest_hash: str
    warnings: tuple[str, ...] = ()
    saved_at: float = 0.0
    """Seconds since 1970."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: tensors by parameter name, float32. :meth:`part` reads a node's own state."""

    path: Path
    manifest: Manifest
    parameters: Tensors
    momentum: Tensors

    def part(self, node: str, rank: int, used: frozenset[str] = frozenset()) -> bytes | None:
        """The safetensors bytes saved by the node of this name; where there is none of that name, by the node of this
        rank unless its name is in ``used`` (it is here and takes its own); else None."""
        for entry in self.manifest.nodes:
            if entry.name == node:
                return self._read(entry)
        for entry in self.manifest.nodes:
            if entry.rank == rank and entry.name not in used:
                return self._read(entry)
        return None

    def about(self) -> dict[str, str]:
        """What the file with the parameters says of the model: which framework, what is tied to what."""
        with (self.path / GLOBAL_FILE).open("rb") as file:
            header = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")))
        return dict(header.get("__metadata__", {}))

    def parts(self) -> Iterator[bytes]:
        """The safetensors bytes of every node that saved some, read one after the other."""
        for entry in self.manifest.nodes:
            part = self._read(entry)
            if part is not None:
                yield part

    def _read(self, entry: NodeEntry) -> bytes | None:
        return (self.path / entry.file).read_bytes() if entry.file in self.manifest.files else None


def find_latest(directory: Path, name: str) -> FoundCheckpoint | None:
    """The newest checkpoint under ``directory/name`` whose files all have the sizes and hashes of its manifest, or None
    when nothing was ever saved there.

    Raises:
        CheckpointError: checkpoints are there and none is whole; names the first damaged file.
    """
    warnings: list[str] = []
    for folder in folders_newest_first(directory / check_name(name, "checkpoint")):
        try:
            manifest, manifest_hash = verify(folder)
        except CheckpointError as error:
            warnings.append(str(error))
            continue
        return FoundCheckpoint(manifest.round, folder, manifest_hash, tuple(warnings), manifest.saved_at)
    if warnings:
        raise CheckpointError(f"no whole checkpoint {name!r}: {warnings[0]}")
    return None


def verify(folder: Path) -> tuple[Manifest, str]:
    """The manifest and its hash, after every file was compared with it.

    Raises:
        CheckpointError: names the file that is missing or differs.
    """
    manifest, manifest_hash = read_manifest(folder)
    remedy = f"copy it back, or delete {folder} to use the checkpoint before it"
    for file, expected in manifest.files.items():
        path = folder / file
        try:
            size, blake2b = path.stat().st_size, file_digest(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: {remedy}") from None
        except OSError as error:
            raise CheckpointError(f"{path} is not readable ({error.strerror}): {remedy}") from None
        if size != expected.bytes:
            raise CheckpointError(f"{path} has {size} bytes, its manifest says {expected.bytes}: {remedy}")
        if blake2b != expected.blake2b:
            raise CheckpointError(f"{path} does not have the hash in its manifest: {remedy}")
    return manifest, manifest_hash


def load(folder: Path) -> Checkpoint:
    """Read a verified checkpoint (about twice the model's float32 size in memory).

    Raises:
        CheckpointError: a file is missing or does not have the hash in the manifest.
    """
    from safetensors.numpy import load_file

    manifest, _ = verify(folder)
    tensors = load_file(folder / GLOBAL_FILE)
    parameters = {name: value for name, value in tensors.items() if not name.startswith(MOMENTUM_PREFIX)}
    momentum = {
        name.removeprefix(MOMENTUM_PREFIX): value for name, value in tensors.items() if name.startswith(MOMENTUM_PREFIX)
    }
    wrong = [name for name, value in tensors.items() if value.dtype != np.float32]
    if wrong or (momentum and parameters.keys() != momentum.keys()):
        raise CheckpointError(f"{folder / GLOBAL_FILE} was not written by notebook-cluster: delete {folder}")
    return Checkpoint(folder, manifest, parameters, momentum)


def folders_newest_first(home: Path) -> list[Path]:
    """Every checkpoint folder of one name; those whose manifest cannot be read (they may be the newest) come first."""
    folders = [(serial_of(path), path.name, path) for path in home.glob("round-*") if path.is_dir()]
    return [path for _, _, path in sorted(folders, reverse=True)]


def serial_of(folder: Path) -> float:
    """The manifest's serial; infinity when it cannot be read."""
    try:
        return read_manifest(folder)[0].serial
    except CheckpointError:
        return math.inf


SUFFIX = "-kept"


@dataclass(frozen=True)
class KeptHere:
    """A kept checkpoint whose manifest can be read; its files are not looked at."""

    folder: Path
    manifest: Manifest


def kept_homes(work: Path, cluster: str = "*") -> Iterator[Path]:
    """Every ``<cluster>/checkpoints/<job>-kept`` below ``work``; ``cluster``: a pattern."""
    root = work.resolve()
    for home in sorted(root.glob(f"{cluster}/checkpoints/*{SUFFIX}")):
        if home.is_dir() and home.resolve() == home:
            yield home


def kept_below(work: Path, cluster: str = "*") -> list[KeptHere]:
    """The newest kept checkpoint of each name below ``work``, newest first; ``cluster``: a pattern."""
    newest: dict[str, KeptHere] = {}
    for home in kept_homes(work, cluster):
        for folder in home.glob("round-*"):
            if folder.is_symlink():
                continue
            try:
                manifest, _ = read_manifest(folder)
            except CheckpointError:
                continue
            known = newest.get(home.name)
            if known is None or manifest.saved_at > known.manifest.saved_at:
                newest[home.name] = KeptHere(folder, manifest)
    return sorted(newest.values(), key=lambda kept: -kept.manifest.saved_at)


def find_newest(directory: Path, name: str, work: Path | None) -> FoundCheckpoint | None:
    """:func:`.reading.find_latest` of ``directory``; a kept one also in what is below ``work``: the newest of all.

    Raises:
        CheckpointError: checkpoints of this name are there and none is whole.
    """
    places = [directory]
    if work is not None and name.endswith(SUFFIX):
        own = directory.resolve()
        places += [home.parent for home in kept_homes(work) if home.name == name and home.parent != own]
    found, damaged = [], []
    for place in places:
        try:
            one = find_latest(place, name)
        except CheckpointError as error:
            damaged.append(error)
        else:
            if one is not None and (place == directory or not one.path.is_symlink()):
                found.append(one)
    if damaged and not found:
        raise damaged[0]
    return max(found, key=lambda one: one.saved_at, default=None)


def names(directory: Path, work: Path | None) -> list[str]:
    """What ``resume=`` could be, where it is none of these."""
    here = {manifest.parent.parent.name for manifest in directory.glob("*/round-*/manifest.json")}
    return sorted(here | ({home.name for home in kept_homes(work)} if work is not None else set()))
