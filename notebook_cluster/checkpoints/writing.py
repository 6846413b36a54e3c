"""Writing a checkpoint so that it is either complete or not there."""

import math
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from notebook_cluster.checkpoints.kept import CLUSTER_ID
from notebook_cluster.checkpoints.reading import (
    FORMAT,
    GLOBAL_FILE,
    MANIFEST_FILE,
    MOMENTUM_PREFIX,
    CheckpointError,
    FileEntry,
    Manifest,
    NodeEntry,
    digest,
    file_digest,
    folders_newest_first,
    read_manifest,
    serial_of,
)
from notebook_cluster.protocol.names import check_name
from notebook_cluster.protocol.wire import VERSION

KEPT = 2
KEPT_OF_OTHERS = 2
_TEMPORARY = ".writing-"

Tensors = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
Step = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """What one node adds: ``data`` are the bytes of a safetensors file; None when the node left before sending them."""

    node: str
    rank: int
    data: bytes | bytearray | memoryview | None


@dataclass(frozen=True)
class Contents:
    """The state after ``round``. Tensors by parameter name, float32, in the model's shapes."""

    job: str
    round: int
    state_hash: str
    parameters: Tensors
    momentum: Tensors
    parts: list[Part] = field(default_factory=list)
    settings: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    """What is to be known of the model when its parameters are read."""
    files: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    """Further files (``*.safetensors``) and what writes each, given its path."""


def save(directory: Path, name: str, contents: Contents, on_step: Step | None = None) -> tuple[Path, str]:
    """Write ``contents`` under ``directory/name``; returns the checkpoint's folder and its manifest's hash.

    ``on_step`` is called with the name of each step before it: ``folder``, ``global``, ``node <name>``, ``manifest``,
    ``rename``, ``prune``. Whatever goes wrong before ``rename`` ended, the previous checkpoint is untouched.

    Raises:
        CheckpointError: the disk refused (full, read only); says what is still valid.
        ValueError: ``name`` is not usable as a folder's name.
    """
    home = directory / check_name(name, "checkpoint")
    step = on_step or (lambda _step: None)
    temporary: Path | None = None
    try:
        step("folder")
        _make_private(directory)
        home.mkdir(exist_ok=True)
        _remove_left_over(home)
        temporary = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{os.getpid()}-", dir=home))
        manifest_hash = _fill(temporary, home, name, contents, step)
        step("rename")
        folder = _rename(temporary, home, contents.round)
    except OSError as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(_not_written(home, name, error)) from error
    step("prune")
    for old in _superseded(_readable(home)):
        shutil.rmtree(old, ignore_errors=True)
    return folder, manifest_hash


def _make_private(directory: Path) -> None:
    """Make the folder of all checkpoints, readable by this user only: what is in it is somebody's data. One that is
    there already is closed for others, unless it is a link or another user's."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    if mine and stat.S_ISDIR(status.st_mode) and status.st_mode & 0o077:
        directory.chmod(0o700)


def _fill(folder: Path, home: Path, name: str, contents: Contents, step: Step) -> str:
    """Every file of the checkpoint, the manifest last; returns the manifest's hash."""
    from safetensors.numpy import save_file

    step("global")
    tensors = {key: np.ascontiguousarray(value) for key, value in contents.parameters.items()}
    tensors |= {MOMENTUM_PREFIX + key: np.ascontiguousarray(value) for key, value in contents.momentum.items()}
    about = {**contents.about, "job": contents.job, "round": str(contents.round), "state_hash": contents.state_hash}
    _written_by(lambda path: save_file(tensors, path, metadata=about), folder / GLOBAL_FILE)
    files = {GLOBAL_FILE: _entry(folder / GLOBAL_FILE)}
    for file, write in contents.files.items():
        step(file)
        _written_by(write, folder / file)
        files[file] = _entry(folder / file)
    nodes = []
    for part in contents.parts:
        step(f"node {part.node}")
        file = f"node-{part.rank}-{check_name(part.node, 'node')}.safetensors" if part.data is not None else ""
        nodes.append(NodeEntry(part.node, part.rank, file))
        if part.data is not None:
            _write(folder / file, part.data)
            files[file] = _entry(folder / file)
    step("manifest")
    versions = {"notebook_cluster": VERSION, "python": platform.python_version(), "numpy": np.__version__}
    manifest = Manifest(
        format=FORMAT, job=contents.job, name=name, round=contents.round, state_hash=contents.state_hash,
        serial=_next_serial(home), saved_at=time.time(), settings=contents.settings, nodes=nodes,
        versions=versions | contents.versions, files=files,
    )  # fmt: skip
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    _write(folder / MANIFEST_FILE, data)
    _sync(folder)
    return digest(data)


def _written_by(write: Callable[[Path], None], path: Path) -> None:
    try:
        write(path)
    except Exception as error:  # safetensors raises its own type for a full disk
        raise error if isinstance(error, OSError) else OSError(str(error)) from error
    _sync(path)


def _rename(temporary: Path, home: Path, round: int) -> Path:
    """``temporary`` becomes ``round-000012``, or ``-2``, ``-3`` ... where that round was saved before."""
    count = 1
    while True:
        folder = home / (f"round-{round:06d}" + (f"-{count}" if count > 1 else ""))
        count += 1
        if not folder.exists():
            temporary.rename(folder)
            _sync(home)
            return folder


def _next_serial(home: Path) -> int:
    return max((int(serial_of(folder)) for folder in _readable(home)), default=0) + 1


def _readable(home: Path) -> list[Path]:
    """Checkpoints with a manifest, newest first. Others are left alone: they may be of a newer version."""
    return [folder for folder in folders_newest_first(home) if serial_of(folder) != math.inf]


def _superseded(newest_first: list[Path]) -> list[Path]:
    """Those that may go. Of the training that was saved last :data:`KEPT` stay, and of :data:`KEPT_OF_OTHERS` before
    it, which only a kept checkpoint knows apart, the last one each: a short run must not replace a long night's."""
    trainings: dict[str, list[Path]] = {}
    for folder in newest_first:
        try:
            settings = read_manifest(folder)[0].settings
        except CheckpointError:
            continue  # it went, or somebody damages it now: not ours to remove
        trainings.setdefault(str(settings.get(CLUSTER_ID, "")), []).append(folder)
    kept = [folders[: 1 if place else KEPT] for place, folders in enumerate(trainings.values())]
    stay = {folder for folders in kept[: 1 + KEPT_OF_OTHERS] for folder in folders}
    return [folder for folders in trainings.values() for folder in folders if folder not in stay]


def _remove_left_over(home: Path) -> None:
    """Folders of writers that were killed; the process id in the name says whether one is still writing."""
    import psutil

    for left in home.glob(f"{_TEMPORARY}*"):
        writer = left.name.removeprefix(_TEMPORARY).partition("-")[0]
        if writer.isdigit() and (int(writer) == os.getpid() or not psutil.pid_exists(int(writer))):
            shutil.rmtree(left, ignore_errors=True)


def _not_written(home: Path, name: str, error: OSError) -> str:
    kept = _readable(home)
    still = f"{kept[0]} is still the newest" if kept else "there is no earlier one"
    cause = error.strerror or error
    return f"checkpoint {name!r} not written to {home}: {cause}: make room or use another folder; {still}"


def _write(path: Path, data: bytes | bytearray | memoryview) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """fsync of a file or, where the system allows to open one, a folder."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entry(path: Path) -> FileEntry:
    return FileEntry(path.stat().st_size, file_digest(path))
