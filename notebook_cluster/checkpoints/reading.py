"""Finding the newest checkpoint that is whole, and reading it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from notebook_cluster.checkpoints.manifest import (
    GLOBAL_FILE,
    MOMENTUM_PREFIX,
    CheckpointError,
    Manifest,
    NodeEntry,
    file_digest,
    read_manifest,
)
from notebook_cluster.protocol.names import check_name

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
    if wrong or parameters.keys() != momentum.keys():
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
