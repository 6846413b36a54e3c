"""This machine's own, private agent: started with the cluster, and again whenever it has ended."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from notebook_cluster.coordinator.core import LOCAL, Core
from notebook_cluster.coordinator.nodes.membership import Membership
from notebook_cluster.coordinator.peers.links import PeerLinks
from notebook_cluster.coordinator.startup import start_private_agent
from notebook_cluster.protocol.views import RequestError

LOOK = 0.5
"""Seconds between two looks at an agent that the coordinator before this one has started."""
SETTLED = 60.0
"""Seconds after which an agent that ends is started again at once; before that it is waited, longer each time."""
MOST_WAIT = 60.0
MODULE = "notebook_cluster.agent"
log = logging.getLogger(__name__)


class OwnAgent:
    """Keeps one running: without it no node of this machine could be started again."""

    def __init__(
        self,
        core: Core,
        *,
        links: PeerLinks,
        membership: Membership,
        directory: Path,
        lease: float,
        closing: Callable[[], str],
    ) -> None:
        """``directory``: the cluster's, with the agent's log; ``closing()``: why the cluster ends, or empty."""
        self._core = core
        self._links = links
        self._membership = membership
        self._directory = directory
        self._lease = lease
        self._closing = closing
        self._there = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    async def wait(self) -> None:
        """Return when the link to it was dialled.

        Raises:
            RequestError: it did not start; names its log.
        """
        await self._there.wait()
        if not self._links.has(LOCAL):
            raise RequestError(f"the agent of this machine did not start: see {self._log}")

    async def keep(self) -> None:
        """Until the cluster ends. An agent of the coordinator before this one is kept if it still runs.

        Raises:
            RequestError: it does not start; names its log.
        """
        pid, wait = self._find(), 0.0
        while not self._closing():
            began = time.monotonic()
            try:
                pid = pid or await self._start()
            finally:
                self._there.set()
            reason = await self._end_of(pid)
            if self._closing():
                return
            pid = 0
            self._there.clear()
            self._membership.peer_gone(LOCAL, f"the agent of this machine has ended{reason}: see {self._log}")
            wait = 0.0 if time.monotonic() - began > SETTLED else min(2 * wait + 0.5, MOST_WAIT)
            await asyncio.sleep(wait)

    @property
    def _log(self) -> Path:
        return self._directory / "agent.log"

    def _find(self) -> int:
        """The process id of the agent that the coordinator before this one has started, if it still runs; else 0."""
        local = self._core.state.peers.get(LOCAL)
        return local.pid if local is not None and local.pid is not None and _runs(local.pid) else 0

    async def _start(self) -> int:
        agent, self._process = await start_private_agent(LOCAL, self._directory, self._lease)
        self._links.connect(LOCAL, agent.public_key, f"tcp://127.0.0.1:{agent.port}", "local", pid=agent.pid)
        self._membership.order_again(LOCAL)
        log.info("the agent of this machine has process id %d", agent.pid)
        return agent.pid

    async def _end_of(self, pid: int) -> str:
        """Wait for it; `` (killed by signal 9)``, or empty where that is not known."""
        if self._process is None:
            while _runs(pid):  # noqa: ASYNC110 - not a child of this process: nobody tells of its end
                await asyncio.sleep(LOOK)
            return ""
        status = await self._process.wait()
        return f" (killed by signal {-status})" if status < 0 else ""


def _runs(pid: int) -> bool:
    """The process is there and is an agent: ids are used again."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and MODULE in process.cmdline()
    except psutil.Error:
        return False
