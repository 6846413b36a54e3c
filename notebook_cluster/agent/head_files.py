"""The files of one head on this machine, as its owner's window reads and writes them, a piece at a time."""

import shutil
from pathlib import Path

from notebook_cluster.agent.head_process import HeadTrouble
from notebook_cluster.journal.moving import BEGUN_FROM, MOST_BYTES, unpack
from notebook_cluster.journal.reading import read_state
from notebook_cluster.journal.store import copy, journal_path
from notebook_cluster.protocol import heads as h
from notebook_cluster.security import private_directory, write_private

COMING = "coming"
"""What an owner has sent, before it is begun from, with a BEGUN_FROM of its own."""


def read_piece(folder: Path, request: h.ReadHeadFile) -> tuple[int, bytes]:
    """(bytes of the whole, those from the request's offset on) of a file in ``folder``; at offset 0 the copy is made.

    Raises:
        HeadTrouble, OSError, sqlite3.Error: it cannot be read.
    """
    whole = request.name == h.MOVED_FILE
    path = folder / (request.name if whole else f"copy-of-{request.name}")
    if whole and request.offset == -1:
        path.unlink(missing_ok=True)
        return 0, b""
    if request.offset == 0 and not whole:
        source = journal_path(folder).parent / request.name
        if not source.exists():
            raise HeadTrouble(f"there is no {source.name}")
        check_room(folder, source.stat().st_size, f"a copy of {source.name}")
        copy(source, path)
    with open(path, "rb") as file:
        if not 0 <= request.offset <= path.stat().st_size:
            raise HeadTrouble(f"there is no byte {request.offset} in {request.name}")
        file.seek(request.offset)
        piece = file.read(h.FILE_CHUNK)
        total = path.stat().st_size
    if request.offset + len(piece) >= total and not whole:
        path.unlink()
    return total, piece


def write_piece(folder: Path, message: h.WriteHeadFile, piece: bytes) -> None:
    """Bytes of what the next head here begins from. HeadTrouble, OSError: they are not taken."""
    end = message.offset + len(piece)
    if not (0 <= message.offset < end <= message.total <= MOST_BYTES and len(piece) <= h.FILE_CHUNK):
        raise HeadTrouble(f"{len(piece)} bytes at {message.offset} of {message.total} are not taken")
    coming = folder / COMING
    if message.offset == 0:
        shutil.rmtree(coming, ignore_errors=True)
        private_directory(folder)
        private_directory(coming)
        check_room(folder, 2 * message.total)  # the file, and what is in it
        write_private(coming / BEGUN_FROM, f"{message.token} {message.total}".encode())
        write_private(coming / h.MOVED_FILE, b"")
    if _words(coming) != (message.token, message.total):
        raise HeadTrouble("the beginning of this file was not sent")
    file = coming / h.MOVED_FILE
    if file.stat().st_size != message.offset:
        raise HeadTrouble(f"{file.stat().st_size} bytes are there, those from {message.offset} on were sent")
    with open(file, "ab") as writing:
        writing.write(piece)


def begin_from(folder: Path, token: str) -> None:
    """Put what was sent for the hand over ``token`` in the place of what ran here before, which is kept.

    Raises:
        HeadTrouble, OSError, ValueError: it is not there, or not whole.
    """
    sent, total = _words(folder / COMING)
    if sent != token or (folder / COMING / h.MOVED_FILE).stat().st_size != total:
        raise HeadTrouble("what it would begin from was not sent, or not whole")
    unpack(folder / COMING / h.MOVED_FILE, folder)
    write_private(folder / BEGUN_FROM, f"{token} {read_state(journal_path(folder)).starts}".encode())
    shutil.rmtree(folder / COMING, ignore_errors=True)


def begun_from(folder: Path) -> str:
    """The token of the hand over that the last run in ``folder`` has begun from; empty: it did from none."""
    return _words(folder)[0]


def has_led(folder: Path, token: str) -> bool:
    """A coordinator has begun here from the hand over ``token``. ValueError: its journal is not readable."""
    begun, starts = _words(folder)
    return begun == token != "" and read_state(journal_path(folder)).starts > starts


def forget_sent(folder: Path) -> None:
    """What was sent for a hand over of which nothing came."""
    shutil.rmtree(folder / COMING, ignore_errors=True)


def check_room(folder: Path, needed: int, what: str = "the cluster's journal and outputs") -> None:
    """HeadTrouble where ``needed`` bytes are more than what is free."""
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    if needed > free:
        raise HeadTrouble(f"no room for {what} ({needed / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free)")


def _words(folder: Path) -> tuple[str, int]:
    """The token in ``folder``, and the number beside it."""
    try:
        token, number = (folder / BEGUN_FROM).read_text()[:200].split()
        return token, int(number)
    except (FileNotFoundError, ValueError):
        return "", 0
