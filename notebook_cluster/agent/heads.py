"""Coordinators that run on this peer for clusters of others, its *heads*, and what their owners' windows say to them.

Each is a process of its own, as on an owner's machine, with a key of its own. It is started for a coordinator that may
use this agent, is started again when it was killed, and ends with the sharing and with the trust in its owner.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.agent.events import SharingEvent
from notebook_cluster.agent.head_files import (
    begin_from,
    begun_from,
    check_room,
    forget_sent,
    has_led,
    read_piece,
    write_piece,
)
from notebook_cluster.agent.head_process import LOOK_S, ORDER_FILE, START_TIMEOUT, Head, HeadTrouble
from notebook_cluster.agent.head_views import HeadViews
from notebook_cluster.agent.resources import Resources
from notebook_cluster.agent.sharing.coordinators import Coordinators
from notebook_cluster.discovery.addresses import MAX_TARGETS, NO, reach
from notebook_cluster.journal.kept_runs import last_run
from notebook_cluster.journal.reading import has_crashed, read_state
from notebook_cluster.journal.store import journal_path
from notebook_cluster.link import Session
from notebook_cluster.link.tcp import read_host_port
from notebook_cluster.protocol import Message
from notebook_cluster.protocol import heads as h
from notebook_cluster.protocol.names import is_name
from notebook_cluster.security import Trusted, fingerprint, load_identity, private_directory, write_private

log = logging.getLogger(__name__)

MOST_HEADS = 16
"""On one machine, of all owners together: each is a process."""


class Heads:
    """All heads of one agent, in folders below its data folder."""

    def __init__(self, resources: Resources, coordinators: Coordinators) -> None:
        self._resources = resources
        self._coordinators = coordinators
        self._folder = resources.directory / "heads"
        self._heads: dict[tuple[str, str], Head] = {}
        self._windows: dict[str, HeadViews] = {}
        """Id of the session's cluster -> what it has open."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: dict[tuple[str, str], asyncio.Lock] = {}
        self._recovered = asyncio.Event()
        self.open = True

    # ---- what windows say

    def handle(self, session: Session, message: Message, buffers: Sequence[bytes]) -> bool:
        """Do what a window asks for; False: it is no message of a window."""
        if not isinstance(message, h.ToHeadAgent):
            return False
        match message:
            case h.Grant():
                session.send(h.Granted(ticket=message.ticket, error=self._grant(session, message)))
            case h.StartHead():
                self._spawn(self._answer_start(session, message))
            case h.ReadHeadFile():
                self._spawn(self._answer_file(session, message))
            case h.WriteHeadFile():
                self._spawn(self._answer_write(session, message, buffers))
            case h.AskReady():
                self._spawn(self._answer_ready(session, message))
            case h.HeadPeers():
                if (head := self._head_of(session, message.cluster)) is not None:
                    try:
                        self._write_peers(head.folder, message.peers)
                    except (ValueError, OSError) as error:
                        log.error("cluster %s: the peers of its head stay as they were: %s", message.cluster, error)
            case h.ToHead():
                window = self._window_of(session, message)
                if window is not None:
                    window.take(message, buffers)
                elif buffers:
                    session.send(h.FromHead(view=0))
        return True

    def silent(self, session: Session, silent: bool) -> None:
        """Nothing is heard from this window, or something is again."""
        if (window := self._windows.get(session.cluster)) is not None:
            window.silent() if silent else window.heard()

    def left(self, session: Session) -> None:
        """This window has no business here any more, or another one took over: its views are gone."""
        window = self._windows.pop(session.cluster, None)
        if window is not None:
            window.close(told=False)

    def _grant(self, session: Session, grant: h.Grant) -> str:
        """Why it is not taken, or empty."""
        if self._coordinators.is_head(session.key):
            return "a head grants nothing: only the owner of a cluster does"
        if self._coordinators.is_owner(grant.key):
            return f"key {fingerprint(grant.key)} is that of an owner, not of a head"
        try:
            self._coordinators.grants.take(session.key, grant)
        except ValueError as error:
            return str(error)
        return ""

    async def _answer_start(self, session: Session, order: h.StartHead) -> None:
        await self._recovered.wait()  # nobody starts a second one of what ran before
        place = session.key, order.cluster
        if order.peers and place in self._heads:  # a window is opened; others look for as long as they are
            self._heads[place].hurry()
        async with self._starting.setdefault(place, asyncio.Lock()):
            try:
                state = await self._start(session, order)
            except (HeadTrouble, OSError, ValueError) as error:
                state = h.HeadState(
                    ticket=order.ticket, error=f"{self._resources.peer}: {error}",
                    begun=await asyncio.to_thread(self._has_led, session, order),
                )  # fmt: skip
        session.send(state)

    def _has_led(self, session: Session, order: h.StartHead) -> bool:
        """Of an order that was not carried out: the one that it means has led, so nobody may go on from before it."""
        try:
            return is_name(order.cluster) and has_led(self._folder_of(session.key, order.cluster), order.token)
        except (OSError, ValueError):
            return True  # nobody knows

    async def _start(self, session: Session, order: h.StartHead) -> h.HeadState:
        if self._coordinators.is_head(session.key):
            raise HeadTrouble("a head starts no other one: only the owner of a cluster does")
        if not is_name(order.cluster):
            raise HeadTrouble(f"cluster name {order.cluster[:80]!r} is not usable")
        owner = self._coordinators.owner(session.key)
        folder = self._folder_of(session.key, order.cluster)
        head = self._head_of(session, order.cluster)
        found = head is not None and head.wanted
        if found and order.token and begun_from(folder) != order.token:
            raise HeadTrouble(f"another run of cluster {order.cluster} is led from here: stop that one first")
        if found and order.fresh and head is not None:
            await self._end([head])
            found = False
        if not found:
            begun = order.token != "" and await asyncio.to_thread(begun_from, folder) == order.token
            meant = folder.is_dir() and (begun or not order.token)  # what has run here is what the order is about
            crashed = meant and await asyncio.to_thread(has_crashed, journal_path(folder))
            if not crashed and (begun or order.only_look):
                return await asyncio.to_thread(_how_it_ended, folder, order.ticket, begun)
            self._check_start()
            private_directory(folder)
            if not order.only_look:
                self._write_peers(folder, order.peers)
            if order.token and not begun:
                await asyncio.to_thread(begin_from, folder, order.token)
                crashed = True
            head = Head(order, session.key, owner, folder, self._resources)
            await self._begin(head, resume=crashed and not order.fresh)
        assert head is not None
        deadline = time.monotonic() + START_TIMEOUT
        while head.file is None and head.wanted and time.monotonic() < deadline:  # noqa: ASYNC110 - it may end as well
            await asyncio.sleep(LOOK_S)
        if (file := head.file) is None:
            raise HeadTrouble(f"the head of cluster {order.cluster} is being started again and is not there yet")
        return h.HeadState(
            ticket=order.ticket, running=True, key=file.key, reception=file.reception, epoch=file.epoch, found=found,
            begun=order.token != "" and begun_from(folder) == order.token,
        )  # fmt: skip

    def _check_start(self) -> None:
        """HeadTrouble: no coordinator may be started now."""
        if not self.open:
            raise HeadTrouble("sharing ends")
        if sum(head.wanted for head in self._heads.values()) >= MOST_HEADS:
            raise HeadTrouble(f"it leads {MOST_HEADS} clusters already: stop one of them first")

    async def _begin(self, head: Head, *, resume: bool) -> None:
        self._heads[head.owner_key, head.cluster] = head
        head.on_gone = lambda: self._gone(head)
        head.note_order()
        try:
            await head.start(resume=resume)
        except BaseException:
            del self._heads[head.owner_key, head.cluster]
            head.forget_order()
            raise
        self._tell(head, f"{head.owner} leads cluster {head.cluster} from here")

    def _gone(self, head: Head) -> None:
        """The process has ended: windows tell their views."""
        for cluster, window in list(self._windows.items()):
            if window.head is head:
                del self._windows[cluster]
                window.close(told=True)
        self._tell(head, f"cluster {head.cluster} of {head.owner} is not led from here any more")

    # ---- its files

    async def _answer_file(self, session: Session, request: h.ReadHeadFile) -> None:
        try:
            total, piece = await asyncio.to_thread(self._read_file, session, request)
        except (OSError, sqlite3.Error, HeadTrouble) as error:
            session.send(h.HeadFile(ticket=request.ticket, error=f"{self._resources.peer}: {error}"))
        else:
            session.send(h.HeadFile(ticket=request.ticket, total=total), [piece])

    def _read_file(self, session: Session, request: h.ReadHeadFile) -> tuple[int, bytes]:
        return read_piece(self._files_of(session, request.cluster), request)

    async def _answer_write(self, session: Session, message: h.WriteHeadFile, buffers: Sequence[bytes]) -> None:
        error = ""
        try:
            folder = self._idle_files_of(session, message.cluster)
            await asyncio.to_thread(write_piece, folder, message, b"".join(buffers))
        except (OSError, HeadTrouble) as trouble:
            error = f"{self._resources.peer}: {trouble}"
        session.send(h.HeadFileTaken(ticket=message.ticket, error=error))

    async def _answer_ready(self, session: Session, question: h.AskReady) -> None:
        try:
            folder = self._idle_files_of(session, question.cluster)
            self._check_start()
            private_directory(folder)
            await asyncio.to_thread(forget_sent, folder)
            check_room(folder, 2 * question.bytes)
            key = load_identity(folder).public_key
            ways = await reach({name: [(host, port)] for name, host, port in _places(question.places)})
        except (OSError, ValueError, HeadTrouble) as trouble:
            session.send(h.HeadReady(ticket=question.ticket, error=f"{self._resources.peer}: {trouble}"))
        else:
            blocked = [(name, way.removeprefix(NO)) for name, way in ways.items() if way.startswith(NO)]
            session.send(h.HeadReady(ticket=question.ticket, key=key, unreachable=blocked))

    def _files_of(self, session: Session, cluster: str) -> Path:
        """The folder of that cluster's head, for its owner. HeadTrouble: the name, or who asks, is none."""
        if not is_name(cluster) or self._coordinators.is_head(session.key):
            raise HeadTrouble(f"cluster {cluster[:80]!r} is none of yours")
        return self._folder_of(session.key, cluster)

    def _idle_files_of(self, session: Session, cluster: str) -> Path:
        """As :meth:`_files_of`, for what is to be begun there. HeadTrouble: also where the head runs."""
        folder = self._files_of(session, cluster)
        if (head := self._head_of(session, cluster)) is not None and head.wanted:
            raise HeadTrouble(f"cluster {cluster} is led from here already")
        return folder

    def _folder_of(self, owner_key: str, cluster: str) -> Path:
        return self._folder / f"{cluster}-{fingerprint(owner_key)}"

    @staticmethod
    def _write_peers(folder: Path, peers: Sequence[h.PeerKey]) -> None:
        rows = [Trusted(row.name, row.key, row.owner, row.address) for row in peers[: h.MOST_HEAD_PEERS]]
        entries = [{"name": row.name, "key": row.key, "owner": row.owner, "address": row.address} for row in rows]
        write_private(folder / "trusted_peers.json", msgspec.json.encode(entries))

    # ---- life

    async def recover(self) -> None:
        """Start again what ran when an agent before this one was killed."""
        try:
            await self._recover()
        finally:
            self._recovered.set()

    async def _recover(self) -> None:
        for path in sorted(self._folder.glob(f"*/{ORDER_FILE}")):
            try:
                kept = msgspec.json.decode(path.read_bytes())
                order = msgspec.convert(kept["order"], h.StartHead)
                head = Head(order, kept["owner_key"], kept["owner"], path.parent, self._resources)
                if not self._coordinators.is_owner(head.owner_key) or not has_crashed(journal_path(path.parent)):
                    path.unlink()
                    continue
                await self._begin(head, resume=True)
            except (HeadTrouble, OSError, ValueError, KeyError, TypeError, msgspec.DecodeError) as error:
                log.error("the head in %s is not started again: %s", path.parent, error)

    def end_soon_those_of(self, owner_key: str) -> None:
        """That owner is trusted no more."""
        self._spawn(self._end([head for head in self._heads.values() if head.owner_key == owner_key]))

    async def close(self) -> None:
        """The sharing ends: so do the clusters that are led from here."""
        self.open = False
        for task in self._tasks:
            task.cancel()
        await self._end(list(self._heads.values()))
        for window in self._windows.values():
            window.close(told=False)
        self._windows.clear()

    async def _end(self, heads: list[Head]) -> None:
        await asyncio.gather(*(head.end() for head in heads))
        for head in heads:
            self._heads.pop((head.owner_key, head.cluster), None)

    # ---- small parts

    def _head_of(self, session: Session, cluster: str) -> Head | None:
        """The head of that cluster, for its owner alone."""
        return self._heads.get((session.key, cluster))

    def _window_of(self, session: Session, message: h.ToHead) -> HeadViews | None:
        """What the session has open of its running head; None where that is not the one that it knows."""
        window = self._windows.get(session.cluster)
        head = self._head_of(session, message.cluster)
        if head is None or head.file is None or head.file.epoch != message.epoch:
            return None
        if window is not None and window.head is head and window.session is session:
            return window
        if window is not None:
            window.close(told=False)
        window = self._windows[session.cluster] = HeadViews(head, session, lambda: self.left(session))
        return window

    def _tell(self, head: Head, text: str) -> None:
        self._resources.tell(SharingEvent("head", text, owner=head.owner, cluster=head.cluster))

    def _spawn(self, coroutine: "Coroutine[Any, Any, None]") -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _how_it_ended(folder: Path, ticket: int, begun: bool) -> h.HeadState:
    """How the last run in ``folder`` has ended; ``begun``: it is the one of the order's token."""
    try:
        run = last_run(folder) if folder.is_dir() else None
        left = read_state(journal_path(folder)).left if (folder / h.MOVED_FILE).exists() else ""
    except (ValueError, OSError) as error:
        return h.HeadState(ticket=ticket, ended=f"what it left is not readable: {error}", begun=begun)
    ended = (run.ended or "nobody knows why") if run is not None else ""
    return h.HeadState(ticket=ticket, ended=ended, begun=begun, left=left)


def _places(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str, int]]:
    """(name, host, port) of each row. ValueError: there are too many, or one is no HOST:PORT."""
    if len(rows) > MAX_TARGETS:
        raise ValueError(f"{len(rows)} machines are more than the {MAX_TARGETS} that can be tried")
    places = [(name, read_host_port(address)) for name, address in rows]
    if any(place is None for _, place in places):
        raise ValueError("an address is no HOST:PORT")
    return [(name, *place) for name, place in places if place is not None]
