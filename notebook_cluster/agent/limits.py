"""What ends kernels here without their coordinator: its silence, the limits of this machine's owner, the hour."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from notebook_cluster.agent.clusters import Clusters
from notebook_cluster.agent.events import SharingEvent
from notebook_cluster.agent.host import ClusterHost
from notebook_cluster.agent.machine import memory_of_trees
from notebook_cluster.agent.resources import Resources
from notebook_cluster.agent.sharing.presence import Presence
from notebook_cluster.memory import amount

log = logging.getLogger(__name__)

_LOOK_S = 5.0
"""Between two looks at who is here and at the battery: they start programs."""


class SharingLimits:
    """Call :meth:`check` about once a second.

    Args:
        lease: seconds of awake time without its coordinator after which a cluster's kernels are ended.
        keep_after: such seconds after which their training is kept once, for the coordinator may be gone for good.
        stop: ends the agent, for a reason.
    """

    def __init__(
        self,
        clusters: Clusters,
        resources: Resources,
        presence: Presence,
        *,
        lease: float,
        keep_after: float,
        stop: Callable[[str], None],
    ) -> None:
        self._clusters = clusters
        self._peer = resources.peer
        self._admission = resources.admission
        self._tell = resources.tell
        self._presence = presence
        self._lease = lease
        self._keep_after = keep_after
        self._stop = stop
        self._looked = -_LOOK_S
        self._leaving: set[ClusterHost] = set()
        self._keeping: dict[ClusterHost, tuple[asyncio.Task[None], float]] = {}
        """Those whose training was kept, or is, since their coordinator has been silent: when it was last heard."""
        self._clearing = False
        self._ending = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def check(self) -> None:
        """One look at all of it; what takes longer goes on by itself."""
        self._check_leases()
        limits = self._admission.limits
        if limits.until is not None and time.time() >= limits.until and not self._ending:
            self._ending = True
            hour = time.strftime("%H:%M", time.localtime(limits.until))
            self._spawn(self._end_sharing(f"{self._peer} was shared until {hour}"))
        if limits.memory_bytes is not None:
            await self._check_memory(limits.memory_bytes)
        if limits.idle_only or limits.on_power is not None:
            await self._check_owner()

    def leave(self, reason: str) -> None:
        """End sharing after a checkpoint; returns at once."""
        if not self._ending:
            self._ending = True
            self._spawn(self._end_sharing(reason))

    def close(self) -> None:
        """End what goes on by itself."""
        for task in self._tasks:
            task.cancel()

    # ---- silence -----------------------------------------------------------------------------------------------

    def _check_leases(self) -> None:
        hosts = self._clusters.hosts()
        for host in hosts:
            silence = self._silence(host)
            if host not in self._leaving and silence > self._lease:
                self._leaving.add(host)
                self._spawn(self._lease_over(host))
            elif host not in self._keeping and silence > self._keep_after:
                self._keeping[host] = self._spawn(self._keep(host)), host.session.last_heard
        for host, (task, heard) in list(self._keeping.items()):
            if task.done() and (host not in hosts or host.session.last_heard != heard):
                del self._keeping[host]

    async def _keep(self, host: ClusterHost) -> None:
        """The nodes go on: they wait for their coordinator."""
        if folders := await host.keep_checkpoints("no word from its coordinator"):
            log.info("cluster %s: %.0f s without its coordinator%s", host.name, self._silence(host), _kept(folders))

    async def _lease_over(self, host: ClusterHost) -> None:
        reason = "no coordinator came back within its lease"
        log.warning("cluster %s: no word from its coordinator for %.0f s", host.name, self._silence(host))
        try:
            if host in self._keeping:
                await self._keeping[host][0]
            folders = await host.keep_checkpoints(reason)
            if self._silence(host) > self._lease:
                await self._clusters.end_cluster(host, f"{reason}{_kept(folders)}", asked=False, told=False)
            else:
                log.info("cluster %s: its coordinator is back, its kernels stay", host.name)
        finally:
            self._leaving.discard(host)

    @staticmethod
    def _silence(host: ClusterHost) -> float:
        # The monotonic clock stands still while a machine sleeps, so this counts awake time only.
        return time.monotonic() - host.session.last_heard

    # ---- limits ------------------------------------------------------------------------------------------------

    async def _check_memory(self, allowed: int) -> None:
        """End the largest kernel when all of them together use too much. No checkpoint: that would need more."""
        kernels = {
            kernel.process.pid: (host, kernel)
            for host in self._clusters.hosts()
            for kernel in host.kernels.values()
            if kernel.process is not None and kernel.running and not kernel.unwanted.is_set()
        }
        used = await asyncio.to_thread(memory_of_trees, list(kernels)) if kernels else {}
        total = self._admission.used_memory = sum(used.values())
        if total <= allowed:
            return
        largest = max(used, key=lambda pid: used[pid])
        host, kernel = kernels[largest]
        reason = (
            f"nodes on {self._peer} used {amount(total)} of memory together, its owner allows {amount(allowed)}, "
            f"and this one used the most ({amount(used[largest])})"
        )
        self._tell(
            SharingEvent(
                "limit",
                f"node {kernel.node} of cluster {host.name} of {host.owner} is ended: {reason}",
                owner=host.owner,
                cluster=host.name,
                node=kernel.node,
            )
        )
        self._spawn(kernel.end(reason, 0.0, asked=False))

    async def _check_owner(self) -> None:
        """End all kernels, after a checkpoint, when the machine's owner is back or its battery is low."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            await asyncio.to_thread(self._presence.poll)
        reason = self._admission.objection()
        if reason is not None and not self._clearing and any(host.kernels for host in self._clusters.hosts()):
            self._clearing = True
            self._tell(SharingEvent("limit", f"all nodes are ended: {reason}"))
            self._spawn(self._clear(reason))

    async def _clear(self, reason: str) -> None:
        """End all nodes after a checkpoint."""

        async def clear(host: ClusterHost) -> None:
            folders = await host.keep_checkpoints(reason)
            await host.end_nodes(f"{reason}{_kept(folders)}")

        try:
            await asyncio.gather(*(clear(host) for host in self._clusters.hosts()))
        finally:
            self._clearing = False

    async def _end_sharing(self, reason: str) -> None:
        self._admission.closed = reason
        await self._clear(reason)
        self._stop(reason)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _kept(folders: list[str]) -> str:
    return f"; checkpoint kept in {', '.join(folders)}" if folders else ""
