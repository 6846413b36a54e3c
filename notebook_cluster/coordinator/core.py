"""What all parts share: the state and its journal, lines for people, tasks; and what parts may watch."""

import asyncio
import errno
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from notebook_cluster.journal import events as e
from notebook_cluster.journal.log import Journal
from notebook_cluster.journal.state import Node, State, apply
from notebook_cluster.protocol.state import EventView
from notebook_cluster.protocol.views import RequestError

log = logging.getLogger(__name__)

LOCAL = "local"
"""Name of the notebook machine's own, private agent."""
Level = Literal["info", "warning", "error"]
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Core:
    """Of one coordinator. ``state`` changes only in :meth:`record`; ``events`` are the lines that panels list."""

    def __init__(self, journal: Journal, state: State) -> None:
        self.journal = journal
        self.state = state
        self.events: deque[EventView] = deque(maxlen=100)
        self._dirty = True
        self._stumbled = ""
        self._tasks: set[asyncio.Task[Any]] = set()

    def record(self, event: e.Event) -> None:
        """Into the journal with ``event``, then change the state: everything that is decided goes through here."""
        if self.journal.frozen:
            return
        self.journal.event(event, durable=isinstance(event, e.DURABLE))
        self.state = apply(self.state, event)
        self._dirty = True

    def tell(self, level: Level, text: str) -> None:
        """A line for the event list and the log file."""
        self.events.append(EventView(time=time.time(), level=level, text=text))
        log.log({"info": logging.INFO, "warning": logging.WARNING}.get(level, logging.ERROR), "%s", text)
        self._dirty = True

    def known_node(self, name: str) -> Node:
        """The node of that name.

        Raises:
            RequestError: there is none; names those that there are.
        """
        node = self.state.nodes.get(name)
        if node is None:
            known = ", ".join(sorted(self.state.nodes)) or "none"
            raise RequestError(f"no node {name!r} in cluster {self.state.cluster!r}: its nodes are {known}")
        return node

    def dirty(self) -> None:
        """Something that views show has changed."""
        self._dirty = True

    @property
    def is_dirty(self) -> bool:
        """Views have not been sent what they show now."""
        return self._dirty

    def shown(self) -> None:
        """Views are sent what there is."""
        self._dirty = False

    def safely(self, look: Callable[[], None], log_file: Path) -> None:
        """Whatever one ``look`` at the cluster stumbles over, it goes on; it is said once."""
        try:
            look()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if text != self._stumbled:
                log.exception("a look at the cluster failed")
                self.tell("error", f"the coordinator stumbled: {text} (see {log_file})")
            self._stumbled = text

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do ``work`` beside everything else; an error of it becomes a line for people."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            self.tell("error", str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}")

    def cancel_tasks(self) -> None:
        """The cluster ends: what was spawned is not finished."""
        for task in list(self._tasks):
            task.cancel()


@dataclass(frozen=True)
class Departure:
    """A process of a node that is not there any more. ``dead``: it has ended, else only its peer's link is lost;
    ``was_in``: it was in the roster."""

    node: str
    incarnation: int
    reason: str
    log_tail: list[str]
    dead: bool
    was_in: bool


class MembershipWatcher(Protocol):
    """Is told of nodes that come and go, when the change is recorded. Who watches overrides what concerns it.

    Of a coming the watchers are told in the order in which they began to watch, of a going in the reverse one.
    """

    def node_up(self, name: str, *, replay: bool) -> None:
        """The node is in the roster with a new process; ``replay``: earlier cells are run on it."""
        return

    def node_down(self, departure: Departure) -> None:
        """A process of a node has ended, or its peer's link is lost."""
        return

    def node_returned(self, name: str) -> None:
        """The link of a lost node is back, and its process holds what it held."""
        return

    def node_removed(self, name: str) -> None:
        """The node was taken out of the cluster."""
        return


class CellWatcher(Protocol):
    """Is told which nodes run which cell, when that is recorded."""

    def cell_started(self, cell: int, nodes: list[str]) -> None:
        """``nodes`` begin to run ``cell``; those of a canary come when it has ended."""

    def node_joined(self, cell: int, node: str) -> None:
        """``node`` runs ``cell``, which others have begun already, or runs it again."""

    def cell_stopping(self, cell: int) -> None:
        """A Stop has come for ``cell`` on all its nodes; told before they hear of it."""
        return

    def node_left(self, cell: int, node: str, status: str) -> None:
        """``node`` has ended ``cell``."""


class CellWatchers(CellWatcher):
    """Several that are told, in this order."""

    def __init__(self, *watchers: CellWatcher) -> None:
        self._watchers = watchers

    def cell_started(self, cell: int, nodes: list[str]) -> None:
        for watcher in self._watchers:
            watcher.cell_started(cell, nodes)

    def node_joined(self, cell: int, node: str) -> None:
        for watcher in self._watchers:
            watcher.node_joined(cell, node)

    def cell_stopping(self, cell: int) -> None:
        for watcher in self._watchers:
            watcher.cell_stopping(cell)

    def node_left(self, cell: int, node: str, status: str) -> None:
        for watcher in self._watchers:
            watcher.node_left(cell, node, status)


class Disk:
    """A journal that cannot be written: agents keep what they said, people are told, and all goes on when there is
    room."""

    def __init__(self, core: Core, *, hold_links: Callable[[bool], None], tell_running_cell: Callable[[str], None]):
        """``hold_links`` is called with True while messages of agents must not be acknowledged, then with False;
        ``tell_running_cell`` puts a line before who watches the running cell."""
        self._core = core
        self._hold_links = hold_links
        self._tell_running_cell = tell_running_cell
        self._told = False
        self._news = asyncio.Event()
        core.journal.on_holding = self._holding

    async def ready(self) -> None:
        """Return when rows are written at once; of a disk that is only slow that is waited for.

        Raises:
            RequestError: rows wait, and it is known why.
        """
        journal = self._core.journal
        while journal.holding and journal.trouble is None:
            self._news.clear()
            await self._news.wait()
        if journal.holding:
            raise RequestError(self.trouble())

    def trouble(self, error: OSError | None = None) -> str:
        """One line: which disk, and what helps."""
        journal = self._core.journal
        folder, error = journal.path.parent, error or journal.trouble
        goes_on = "rounds and new cells wait, and go on by themselves"
        if error is None:
            return f"the disk of {folder} has taken nothing for a moment: {goes_on} when it does"
        if error.errno in _DISK_FULL:
            return f"the disk of {folder} is full ({_free(str(folder))}): {goes_on} when there is room (1 MB is enough)"
        return f"{journal.path} cannot be written ({error.strerror or error}): {goes_on} when it can"

    def _holding(self, holding: bool) -> None:
        self._news.set()
        self._hold_links(holding)
        if holding and self._core.journal.trouble is None:
            return  # a disk that is slow for a moment is no news
        if holding != self._told:
            self._told = holding
            text = self.trouble() if holding else f"{self._core.journal.path} is written again: everything goes on"
            # Not in the middle of what could not be written.
            asyncio.get_running_loop().call_soon(self._say, "error" if holding else "info", text)

    def _say(self, level: Level, text: str) -> None:
        self._core.tell(level, text)
        self._tell_running_cell(text)


def _free(folder: str) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB free"
    except OSError as error:
        return str(error)
