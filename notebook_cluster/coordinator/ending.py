"""How a coordinator ends: with its cluster, or frozen, for the next one on another machine."""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from notebook_cluster.coordinator.cells.cells import Cells
from notebook_cluster.coordinator.cells.executions import Executions
from notebook_cluster.coordinator.cells.questions import StdinQuestions
from notebook_cluster.coordinator.cells.streaming import OutputStreaming
from notebook_cluster.coordinator.cluster_view import ClusterViews, ViewPersistence
from notebook_cluster.coordinator.core import Core, Disk
from notebook_cluster.coordinator.kernels.comms import Comms
from notebook_cluster.coordinator.nodes.measurements import GlobalModels
from notebook_cluster.coordinator.peers.invitation import InvitationHost
from notebook_cluster.coordinator.peers.launches import Launches
from notebook_cluster.coordinator.peers.links import PeerLinks
from notebook_cluster.coordinator.rounds.runner import RoundRunner
from notebook_cluster.coordinator.view_server import ViewServer
from notebook_cluster.journal import events as e
from notebook_cluster.journal.moving import pack, size_of
from notebook_cluster.peering.peer_finder import PeerFinder
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.hand_over import Moved
from notebook_cluster.protocol.heads import MOVED_FILE
from notebook_cluster.protocol.peer import Release
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import withdraw

log = logging.getLogger(__name__)

GOODBYE = 1.0
"""Seconds that the end waits for the disk before agents and views are told all the same."""
QUIET_S = 10.0
"""Seconds for requests to be answered, and nodes to have joined, before a hand over."""
DISK_S = 10.0
LOOK_S = 0.05


@dataclass(kw_only=True)
class Ending:
    """Of one coordinator. ``announcement``: the file that says to agents on this machine that it is one of this
    user's."""

    runtime: Path
    context: "zmq.Context[Any]"
    announcement: Path
    core: Core
    disk: Disk
    views: ViewServer
    shown: ClusterViews
    persistence: ViewPersistence
    global_models: GlobalModels
    streaming: OutputStreaming
    stdin: StdinQuestions
    executions: Executions
    cells: Cells
    comms: Comms
    runner: RoundRunner
    replaying: Callable[[], list[str]]
    closing: Callable[[], str]
    """Why the cluster ends, empty while it goes on."""
    links: PeerLinks
    launches: Launches
    finding: PeerFinder
    invitation: InvitationHost

    # ---- with the cluster

    async def close(self, reason: str, *, keep: bool) -> None:
        """Every kernel of this cluster ends. ``keep``: nobody asked for that, and what was trained last is saved."""
        log.info("cluster %s ends: %s", self.core.state.cluster, reason)
        try:
            self._say_goodbye(reason)
        except Exception:
            log.exception("the end could not be written down")  # the agents are told all the same
        await self.core.journal.written(GOODBYE)
        jobs = self.runner.job_views() if keep else []
        last = [job.name for job in jobs if job.cell == max(job.cell for job in jobs)]
        await self.links.release(Release(keep=reason if last else "", jobs=last))
        await self.launches.close()
        await self._close_parts()
        (self.runtime / "connection.json").unlink(missing_ok=True)
        await self.views.close()
        withdraw(self.announcement)
        if not self.core.journal.close():
            log.error("the end of the run is not in its journal: %s", self.disk.trouble())

    def _say_goodbye(self, reason: str) -> None:
        self.global_models.close()
        # What a view shows last is what stays of the run in the notebook.
        if fresh := self.persistence.keep(time.monotonic()):
            self.views.send_live(v.SeriesAdded(series=fresh))
        self.views.send_live(v.StateChanged(state=self.shown.cluster()))
        if (running := self.core.state.running()) is not None:
            self.views.send_watching(running.id, v.CellEnded(cell=running.id, status="interrupted"))
        self.views.send_live(v.Closing(reason=reason))
        self.persistence.close(reason)
        self.core.record(e.Stopped(reason=reason, time=time.time()))

    async def _close_parts(self) -> None:
        self.core.cancel_tasks()
        await self.links.close()
        await self.finding.close()
        await self.invitation.close()
        self.context.destroy(linger=0)
        self.comms.close()
        self.streaming.close()
        self.runner.close()

    # ---- for the next one

    async def calm(self, room: int = 0) -> None:
        """Return when nothing is being done that would be lost: all requests are answered, no node is joining.
        ``room``: bytes that are free on the machine of the next one; 0: it has looked itself.

        Raises:
            RequestError: that takes long, or there is no room; names what is in the way.
        """
        needed, here = 2 * size_of(self.runtime), shutil.disk_usage(self.runtime).free
        for free, where in ((room or needed, "on the machine of its owner"), (here, "where it is led from")):
            if needed > free:
                what = f"the journal and the outputs of cluster {self.core.state.cluster!r} {where}"
                mb, left = needed / 1e6, free / 1e6
                raise RequestError(f"no room for {what} ({mb:.1f} MB are needed, {left:.1f} MB are free)")
        deadline = time.monotonic() + QUIET_S
        while (busy := self._busy()) or self.views.is_busy:
            if self.closing():
                break
            if time.monotonic() > deadline:
                what = busy or f"a request is being done ({await self.views.quiet(0.0)})"
                raise RequestError(f"cluster {self.core.state.cluster!r} cannot move now: {what}; try it again")
            await (asyncio.sleep(LOOK_S) if busy else self.views.quiet(LOOK_S))
        if reason := self.closing():
            raise RequestError(f"cluster {self.core.state.cluster!r} ends: {reason}")

    def _busy(self) -> str:
        state = self.core.state
        if self.core.journal.holding:
            return self.disk.trouble()
        if unkept := self.streaming.unkept():
            return unkept
        if joining := [node.name for node in state.nodes.values() if node.condition == "starting"]:
            return f"{joining[0]} is joining"
        if replaying := self.replaying():
            return f"{replaying[0]} is running the cells that it missed"
        return ""

    async def freeze(self, token: str) -> Moved:
        """End without a word to agents and views, so that the next one goes on from the file that is made: nothing
        that an agent says from now on counts as heard. Call after :meth:`calm`, in the same step of the loop.

        Raises:
            RequestError: the disk does not take it; this coordinator is over all the same.
        """
        journal = self.core.journal
        self.streaming.hand_out()
        if fresh := self.persistence.keep(time.monotonic()):
            self.views.send_live(v.SeriesAdded(series=fresh))
        moved = self._moved(token)
        for view in self.views.views.values():
            view.asked = set(self.stdin.asked(view))
        # From here on there is no way back, and nothing between that may fail.
        self.links.freeze()
        journal.freeze()
        log.info("cluster %s moves: this coordinator is frozen", self.core.state.cluster)
        self.stdin.close()
        self.cells.close()
        written = await journal.all_written(DISK_S)
        journal.last_words(None, self.links.received())
        written = await journal.all_written(DISK_S) and written
        self.persistence.close("")
        await self._close_parts()
        if not written:
            raise RequestError(self.disk.trouble())
        try:
            await asyncio.to_thread(pack, self.runtime, moved, self.runtime / MOVED_FILE)
        except OSError as error:
            raise RequestError(f"cluster {self.core.state.cluster!r} cannot be packed: {error}") from None
        return moved

    def _moved(self, token: str) -> Moved:
        timeouts, reasons = self.cells.moved()
        may_ask, questions, next_question = self.stdin.moved()
        return Moved(
            token=token, questions=questions, may_ask=may_ask, next_question=next_question,
            with_widgets=sorted(self.executions.with_widgets), interrupted=sorted(self.executions.interrupted),
            timeouts=timeouts, reasons=reasons, open_widgets=self.comms.moved(),
        )  # fmt: skip

    def leave(self, to: str, token: str) -> None:
        """Say in the journal that the cluster is led from ``to`` now; in force when this returns.

        Raises:
            RequestError: it cannot be written; the cluster is led from here as before.
        """
        self.core.journal.last_words(e.HandedOver(to=to, token=token, time=time.time()), {})
        if (error := self.core.journal.flush(DISK_S)) is not None:
            raise RequestError(self.disk.trouble(error))

    def gone(self) -> None:
        """The process, or its next part, goes on without this coordinator."""
        self.core.journal.close()

    # ---- after another one

    def restore(self, moved: Moved) -> None:
        """What the one before knew beside the journal; the cells have been recovered. What cannot be taken from it is
        logged: the cluster goes on without."""
        self.executions.with_widgets |= set(moved.with_widgets)
        self.executions.interrupted |= set(moved.interrupted)
        parts: list[Callable[[], None]] = [
            lambda: self.cells.restore(moved.timeouts, moved.reasons),
            lambda: self.comms.restore(moved.open_widgets),
            lambda: self.stdin.restore(moved, self.executions.of_cell),
        ]
        for part in parts:
            try:
                part()
            except Exception:
                log.exception("something of the coordinator before is lost")
