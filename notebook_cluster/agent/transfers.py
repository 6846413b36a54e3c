"""What a coordinator asks about files in the nodes' working folders: one request after the other, off the loop."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from notebook_cluster.agent.handing_in import found_in, read_piece
from notebook_cluster.agent.receiving import FileRefused, Receiving, check_room, free_bytes
from notebook_cluster.agent.settings import Limits
from notebook_cluster.protocol.transfers import (
    CHUNK_BYTES,
    EndFiles,
    FilesAnswer,
    FilesRequest,
    FindFiles,
    FindFolder,
    OfferFiles,
    ReadFile,
    WriteFile,
)

log = logging.getLogger(__name__)

IDLE_SECONDS = 600.0
"""Without a word about an offer, after which what is incomplete of it is removed: the notebook is gone."""
_MOST_WAITING = 1024
_MOST_OFFERS = 16


class FileTransfers:
    """Of one cluster on this peer.

    Args:
        folder_of: the working folder of a node that was started here, or None.
        answer: sends to the coordinator.
    """

    def __init__(
        self,
        limits: Limits,
        folder_of: Callable[[str], Path | None],
        answer: Callable[[FilesAnswer], object],
    ) -> None:
        self._limits = limits
        self._folder_of = folder_of
        self._answer = answer
        self._requests: asyncio.Queue[tuple[FilesRequest, bytes]] = asyncio.Queue()
        self._offers: dict[str, Receiving] = {}
        self._used: dict[str, float] = {}
        self._taken = 0
        self._worker: asyncio.Task[None] | None = None

    def handle(self, message: FilesRequest, buffers: Sequence[bytes]) -> None:
        """Take one request; its answer follows those before it."""
        data = bytes(buffers[0]) if buffers else b""
        if self._requests.qsize() >= _MOST_WAITING or len(data) > CHUNK_BYTES:
            self._answer(FilesAnswer(request=message.request, error="more was sent at once than is taken"))
            return
        self._requests.put_nowait((message, data))
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work())

    def close(self) -> None:
        """Remove what is incomplete; nothing is taken any more."""
        if self._worker is not None:
            self._worker.cancel()
        for offer in self._offers.values():
            offer.close()
        self._offers.clear()

    async def _work(self) -> None:
        while True:
            try:
                message, data = await asyncio.wait_for(self._requests.get(), IDLE_SECONDS / 4)
            except TimeoutError:
                await asyncio.to_thread(self._remove_idle)
                continue
            try:
                answer = await asyncio.to_thread(self._do, message, data)
            except FileRefused as error:
                answer = FilesAnswer(request=message.request, error=str(error))
            except Exception as error:
                log.exception("a file of the coordinator could not be handled")
                answer = FilesAnswer(request=message.request, error=f"{type(error).__name__}: {error}")
            self._answer(answer)

    # ---- in a thread, one at a time ------------------------------------------------------------------------------

    def _do(self, message: FilesRequest, data: bytes) -> FilesAnswer:
        body = message.body
        match body:
            case FindFolder():
                return FilesAnswer(request=message.request, folder=str(self._folder(body.node).resolve()))
            case OfferFiles():
                offer = self._open(body)
                return FilesAnswer(request=message.request, wanted=list(offer.wanted), replaced=list(offer.replaced))
            case WriteFile():
                self._write(body, data)
            case EndFiles():
                self._end(body.ticket)
            case FindFiles():
                return FilesAnswer(request=message.request, files=found_in(self._folder(body.node), body.pattern))
            case ReadFile():
                piece = read_piece(self._folder(body.node), body.path, body.offset)
                return replace(piece, request=message.request)
        return FilesAnswer(request=message.request)

    def _folder(self, node: str) -> Path:
        folder = self._folder_of(node)
        if folder is None:
            raise FileRefused(f"no kernel of node {node[:80]!r} was started here")
        return folder

    def _open(self, body: OfferFiles) -> Receiving:
        folder = self._folder(body.node)
        if body.ticket in self._offers or len(self._offers) >= _MOST_OFFERS:
            raise FileRefused("too much is being sent there at once: wait until the other files have arrived")
        offer = Receiving(folder, body.ticket, body.files)
        if offer.wanted:
            promised = sum(other.left for other in self._offers.values())
            check_room(offer.size, promised, free_bytes(folder), self._limits.files_bytes, self._taken)
        try:
            offer.make_folders()
        except OSError as error:
            raise FileRefused(f"a folder cannot be made there: {error.strerror or error}") from None
        if offer.wanted:
            self._offers[body.ticket] = offer
            self._used[body.ticket] = time.monotonic()
            log.info("%d files, %d bytes, are sent to %s", len(offer.wanted), offer.size, folder)
        return offer

    def _write(self, body: WriteFile, data: bytes) -> None:
        offer = self._offers.get(body.ticket)
        if offer is None:
            raise FileRefused("what was offered is not known any more (the agent was restarted?): send it again")
        self._used[body.ticket] = time.monotonic()
        try:
            offer.write(body.number, body.offset, data)
        except FileRefused:
            self._end(body.ticket)
            raise
        self._taken += len(data)
        if not offer.wanted:
            self._end(body.ticket)

    def _end(self, ticket: str) -> None:
        offer = self._offers.pop(ticket, None)
        self._used.pop(ticket, None)
        if offer is not None:
            offer.close()

    def _remove_idle(self) -> None:
        limit = time.monotonic() - IDLE_SECONDS
        for ticket in [ticket for ticket, used in self._used.items() if used < limit]:
            self._end(ticket)
