"""What a coordinator has written, packed into one file for the next one on another machine, and unpacked there.

The file is a tar of ``run.journal``, ``curves.journal`` and the outputs in ``cells/``, whole or not there at all. What
is unpacked was sent by another machine: only regular files of these names are taken, within a bound.
"""

import contextlib
import errno
import os
import re
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from notebook_cluster.journal.kept_runs import set_aside
from notebook_cluster.journal.reading import read_state
from notebook_cluster.journal.store import (
    CURVES_FILE,
    JOURNAL_FILE,
    as_os_error,
    copy,
    curves_path,
    journal_path,
    place_of,
    reading,
    remove,
)
from notebook_cluster.protocol.hand_over import Moved

CELLS = "cells"
MOVED = "moved.json"
BEGUN_FROM = "begun-from"
"""In the folder of a cluster: the token of the hand over from which the last run there has begun."""
STAGE = ".coming"
"""Folder of what was unpacked and is not in its place yet."""
MOST_BYTES = 7 << 30
MOST_MOVED = 256 << 20
"""Of what is in no journal; widgets have at most 16 MB on each node."""
_BLOCK = 512
_NAME = re.compile(
    rf"{JOURNAL_FILE}|{CURVES_FILE}|{MOVED}|{CELLS}/[0-9]{{6,9}}(\.jsonl|/[\w.-]{{1,100}}\.txt)", re.ASCII
)


def pack(folder: Path, moved: Moved, target: Path) -> int:
    """Write the run in ``folder``, which nobody changes meanwhile, to ``target``; returns its bytes.

    Raises:
        OSError: there is no room for it, or it cannot be read.
    """
    partial, copies = target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.copies")
    shutil.rmtree(copies, ignore_errors=True)
    copies.mkdir(mode=0o700)
    try:
        for source, name in ((journal_path(folder), JOURNAL_FILE), (curves_path(folder), CURVES_FILE)):
            if source.exists():
                copy(source, copies / name)
        (copies / MOVED).write_bytes(msgspec.json.encode(moved))
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for path in sorted(copies.iterdir()):
                tar.add(path, path.name, recursive=False, filter=_nobodys)
            for path in sorted((folder / CELLS).rglob("*")):
                name = f"{CELLS}/{path.relative_to(folder / CELLS)}"
                if path.is_file() and _NAME.fullmatch(name):
                    tar.add(path, name, recursive=False, filter=_nobodys)
        os.replace(partial, target)
    except sqlite3.Error as error:
        raise as_os_error(error, folder) from None
    finally:
        partial.unlink(missing_ok=True)
        shutil.rmtree(copies, ignore_errors=True)
    return target.stat().st_size


def size_of(folder: Path) -> int:
    """About how many bytes :func:`pack` would write."""
    files = [journal_path(folder), curves_path(folder), *(folder / CELLS).rglob("*")]
    return sum(path.stat().st_size for path in files if path.is_file()) + 100_000


def unpack(source: Path, folder: Path) -> None:
    """:func:`stage`, then :func:`settle`. OSError, ValueError: as those."""
    stage(source, folder)
    settle(folder)


def stage(source: Path, folder: Path) -> None:
    """Unpack ``source`` beside what is in ``folder``.

    Raises:
        OSError: there is no room for it.
        ValueError: ``source`` is not what :func:`pack` writes.
    """
    coming = folder / STAGE
    shutil.rmtree(coming, ignore_errors=True)
    try:
        _extract(source, coming)
        read_moved(coming)
        with reading(coming / JOURNAL_FILE):
            pass
    except (tarfile.TarError, msgspec.DecodeError, sqlite3.Error, FileNotFoundError) as error:
        raise ValueError(f"{source} is not what a coordinator has written: {error}") from None


def settle(folder: Path) -> None:
    """Put the run that was staged in the place of what a run before has left in ``folder``, which is kept where it was
    of another cluster. The journal comes last: without it nothing goes on from here. OSError: it cannot be."""
    coming = folder / STAGE
    if not (coming / JOURNAL_FILE).exists():
        raise FileNotFoundError(errno.ENOENT, "nothing was unpacked", str(coming))
    with contextlib.suppress(ValueError):
        before = read_state(journal_path(folder)).cluster_id
        if before and before != read_state(coming / JOURNAL_FILE).cluster_id:
            set_aside(folder)
    shutil.rmtree(folder / CELLS, ignore_errors=True)
    for old in {folder, place_of(folder)}:
        for name in (JOURNAL_FILE, CURVES_FILE):
            remove(old / name)
    for name in (CELLS, CURVES_FILE, MOVED, JOURNAL_FILE):
        if (coming / name).exists():
            os.replace(coming / name, folder / name)
    shutil.rmtree(coming, ignore_errors=True)


def read_moved(folder: Path) -> Moved:
    """What the coordinator before the one in ``folder`` knew beside its journal. Raises FileNotFoundError where that is
    its first one, msgspec.DecodeError."""
    with open(folder / MOVED, "rb") as file:
        return msgspec.json.decode(file.read(MOST_MOVED), type=Moved)


def note_moved(folder: Path, moved: Moved) -> None:
    """For the next coordinator in ``folder``. OSError: there is no room."""
    with _private(folder / f".{MOVED}") as file:
        file.write(msgspec.json.encode(moved))
    os.replace(folder / f".{MOVED}", folder / MOVED)


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Whose it is here means nothing there, and may be more than the header holds."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = int(member.mtime)
    return member


def _check_headers(source: Path) -> None:
    """Only plain headers: tarfile would read one that has a long name, or more, into memory whole. ValueError."""
    with open(source, "rb") as file:
        while len(block := file.read(_BLOCK)) == _BLOCK and block.strip(b"\0"):
            kind, size = block[156:157], block[124:136].strip(b"\0 ")
            if kind not in (b"0", b"\0", b"5", b"1", b"2", b"6") or not size.isdigit():
                raise ValueError(f"{source} is not what a coordinator has written: a header of kind {kind!r}")
            file.seek(-(-int(size, 8) // _BLOCK) * _BLOCK, os.SEEK_CUR)


def _extract(source: Path, target: Path) -> None:
    _check_headers(source)
    target.mkdir(mode=0o700)
    names: set[str] = set()
    room = MOST_BYTES
    with tarfile.open(source, mode="r:") as tar:
        for member in tar:
            if not (member.isreg() and _NAME.fullmatch(member.name)) or member.name in names:
                raise ValueError(f"{source} has {member.name[:100]!r} in it, which is no file of a run")
            room -= member.size
            if room < 0:
                raise ValueError(f"{source} is larger than {MOST_BYTES >> 30} GiB")
            names.add(member.name)
            with _private(target / member.name) as written:
                content = tar.extractfile(member)
                assert content is not None
                shutil.copyfileobj(content, written)


@contextlib.contextmanager
def _private(path: Path) -> Iterator[IO[bytes]]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        yield file
        if path.name == JOURNAL_FILE:  # the others may be lost with the machine
            file.flush()
            os.fsync(file.fileno())
