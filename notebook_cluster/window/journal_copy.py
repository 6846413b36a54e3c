"""What a run has left on the head comes to the owner's machine: for reports, and when the head's machine is no more."""

import asyncio
import os
from pathlib import Path

from notebook_cluster.journal.moving import MOST_BYTES as MOVED_BYTES
from notebook_cluster.journal.reading import has_crashed
from notebook_cluster.journal.store import JOURNAL_FILE, remove
from notebook_cluster.protocol import heads as h
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.window.agents import AgentLink

FILES: tuple[h.HeadFileName, ...] = ("run.journal", "curves.journal")
MOST_BYTES = 1 << 30


async def bring_files(head: AgentLink, cluster: str, folder: Path) -> None:
    """Copies of the journal and the curves as they are now, in ``folder``; each whole or as it was.

    Raises:
        RequestError: the head has none, of a run that has not ended, or stopped answering.
        ValueError: what it sent is no journal.
        OSError: there is no room for them here.
    """
    for name in FILES:
        await _bring(head, cluster, name, folder / name)


async def bring_moved(head: AgentLink, cluster: str, folder: Path) -> None:
    """What the head has written for the next coordinator, in ``folder``. RequestError, OSError: as of
    :func:`bring_files`."""
    await _bring(head, cluster, h.MOVED_FILE, folder / h.MOVED_FILE)


async def forget_moved(head: AgentLink, cluster: str) -> None:
    """The head need not keep it any more. RequestError: it did not hear that."""
    await head.ask(
        lambda ticket: h.ReadHeadFile(ticket=ticket, cluster=cluster, name=h.MOVED_FILE, offset=-1), h.HeadFile
    )


async def send_file(head: AgentLink, cluster: str, token: str, path: Path) -> None:
    """The bytes of ``path`` to the agent of the head, as MOVED_FILE of the hand over ``token``.

    Raises:
        RequestError: they are not taken, or it stopped answering.
        OSError: they cannot be read.
    """
    offset = 0
    with open(path, "rb") as file:  # noqa: ASYNC230 - a local file, a piece at a time
        total = os.fstat(file.fileno()).st_size
        while piece := file.read(h.FILE_CHUNK):
            answer, _ = await head.ask(
                lambda ticket, offset=offset: h.WriteHeadFile(  # type: ignore[misc]
                    ticket=ticket, cluster=cluster, token=token, offset=offset, total=total
                ),
                h.HeadFileTaken,
                buffers=[piece],
            )
            if answer.error:
                raise RequestError(answer.error)
            offset += len(piece)


async def _bring(head: AgentLink, cluster: str, name: h.HeadFileName, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.coming")
    offset, total = 0, 1
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:  # noqa: ASYNC230 - a local file, a piece at a time
            while offset < total:
                answer, pieces = await head.ask(
                    lambda ticket, offset=offset: h.ReadHeadFile(  # type: ignore[misc]
                        ticket=ticket, cluster=cluster, name=name, offset=offset
                    ),
                    h.HeadFile,
                )
                if answer.error:
                    raise RequestError(answer.error)
                piece, total = (pieces or [b""])[0], answer.total
                if not piece or total > (MOVED_BYTES if name == h.MOVED_FILE else MOST_BYTES):
                    raise RequestError(f"{head.candidate.name} sent {len(piece)} of {total} bytes of {name}")
                file.write(piece)
                offset += len(piece)
        if name == JOURNAL_FILE and await asyncio.to_thread(has_crashed, temporary):
            # A coordinator here would go on from it: run its cells again, on this machine.
            raise RequestError(f"the journal of {head.candidate.name} does not say that its run has ended: left there")
        for log in (path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
            log.unlink(missing_ok=True)
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a write names none
        raise
    finally:
        remove(temporary)
