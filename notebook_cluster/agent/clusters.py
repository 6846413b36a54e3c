"""The clusters that one agent serves: a session with each one's coordinator, from the first word to the last; and what
ends kernels here without their coordinator: its silence, the owner's limits, the hour.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from notebook_cluster.agent.events import EventKind, SharingEvent
from notebook_cluster.agent.host import GRACE_S, ClusterHost
from notebook_cluster.agent.kernels.control_socket import kept_checkpoints
from notebook_cluster.agent.machine import MachineSample, OwnAddresses, describe, memory_of_trees
from notebook_cluster.agent.resources import Resources
from notebook_cluster.agent.sharing.coordinators import Coordinators
from notebook_cluster.agent.sharing.presence import Presence
from notebook_cluster.link import Condition, Session
from notebook_cluster.memory import amount
from notebook_cluster.protocol.peer import Farewell, KeptCheckpoints, PeerInfo, Released, Slept
from notebook_cluster.security import fingerprint

log = logging.getLogger(__name__)

_MOST_UNTOLD = 100


class Clusters:
    """Give :meth:`new_session` to the listener.

    Args:
        on_end: called after a cluster is over here.

    Attributes:
        packages: versions for PeerInfo; portable: whether this machine has a battery; set once they are known.
        empty_since: monotonic time since which no cluster is served, when none is.
    """

    def __init__(self, resources: Resources, coordinators: Coordinators, on_end: Callable[[], None]) -> None:
        self._resources = resources
        self._coordinators = coordinators
        self._on_end = on_end
        self._hosts: dict[str, ClusterHost] = {}
        self._made = 0
        self._sent: dict[str, PeerInfo] = {}
        self._addresses = OwnAddresses()
        self._ending: set[asyncio.Task[None]] = set()
        self._untold: dict[tuple[str, str], str] = {}
        """(coordinator's key, cluster) -> why its kernels were ended here while it was not there."""
        self.packages: dict[str, str] = {}
        self.portable = False
        self.empty_since = time.monotonic()

    def hosts(self) -> list[ClusterHost]:
        """The clusters that are served now."""
        return list(self._hosts.values())

    def new_session(self, session: Session) -> None:
        """A coordinator that is trusted has opened a session."""
        self._made += 1
        own = self._coordinators.is_own(session.key)
        host = ClusterHost(
            session,
            self._resources,
            self._made,
            owner=self._coordinators.owner(session.key),
            owner_id=self._coordinators.owner_id(session.key),
            # Two people may give their clusters one name.
            folder=session.cluster_name if own else f"{session.cluster_name}-{fingerprint(session.key)}",
            on_release=lambda host: self._end_soon(host, "stopped", asked=True),
        )
        self._hosts[session.cluster] = host
        session.on_message = host.handle
        session.on_condition = lambda condition, reason: self._condition(host, condition, reason)
        session.on_restart = lambda: self._introduce(host)
        self._tell_of("cluster-started", f"cluster {host.name} of {host.owner} is served", host)
        self._introduce(host)

    def _introduce(self, host: ClusterHost) -> None:
        """What a coordinator that knows nothing yet must hear first."""
        host.session.send(host.inventory(self._untold.pop((host.session.key, host.session.cluster), "")))
        self._sent.pop(host.session.cluster, None)
        self.tell_peer_info()
        task = asyncio.create_task(self._tell_kept(host))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _tell_kept(self, host: ClusterHost) -> None:
        """Whoever is let in may go on with what was kept here, also of clusters that are no more."""
        rows = await asyncio.to_thread(kept_checkpoints, self._resources.directory / "work")
        if rows and self._hosts.get(host.session.cluster) is host:
            host.session.send(KeptCheckpoints(checkpoints=rows))

    def _condition(self, host: ClusterHost, condition: Condition, reason: str) -> None:
        log.info("cluster %s is %s%s", host.name, condition, f": {reason}" if reason else "")
        if condition == "connected" and host.was_silent:
            # The coordinator may have counted this peer's nodes as lost: say which are still here.
            self._introduce(host)
        host.was_silent = condition != "connected"

    def _end_soon(self, host: ClusterHost, reason: str, *, asked: bool, grace: float = GRACE_S) -> None:
        task = asyncio.create_task(self.end_cluster(host, reason, asked=asked, grace=grace))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def end_cluster(
        self, host: ClusterHost, reason: str, *, asked: bool, grace: float = GRACE_S, told: bool = True
    ) -> None:
        """End the kernels of ``host`` and forget it; ``asked``: by its coordinator. ``told`` False: the coordinator is
        not there, and is told when it comes back."""
        if self._hosts.get(host.session.cluster) is not host:
            return
        del self._hosts[host.session.cluster]
        self._sent.pop(host.session.cluster, None)
        if not told:
            self._untold[host.session.key, host.session.cluster] = reason
            while len(self._untold) > _MOST_UNTOLD:
                del self._untold[next(iter(self._untold))]
        await host.end_kernels(reason, asked=asked, grace=grace)
        host.close()
        self._tell_of("cluster-ended", f"cluster {host.name} of {host.owner} is over here: {reason}", host)
        if asked:
            host.session.send(Released())
            await host.session.conversation.flushed(1.0)
        host.session.close()
        self.empty_since = time.monotonic()
        self._on_end()

    def end_those_of(self, key: str, reason: str) -> None:
        """End at once what the coordinators with ``key`` have here."""
        for host in [host for host in self.hosts() if host.session.key == key]:
            self._end_soon(host, reason, asked=False, grace=0.0)

    async def end_all(self, reason: str) -> None:
        """Say farewell for ``reason`` and end all kernels; the sessions stay, for the last words."""
        # Clusters that are being ended already.
        await asyncio.gather(*self._ending, return_exceptions=True)
        for host in self.hosts():
            host.session.send(Farewell(reason=reason))
        grace = GRACE_S / 2
        await asyncio.gather(*(host.end_kernels("agent ended", asked=False, grace=grace) for host in self.hosts()))

    def close(self) -> None:
        """Remove the sockets of all clusters; call after :meth:`end_all`."""
        for host in self.hosts():
            host.close()

    # ---- what coordinators and people are told -----------------------------------------------------------------

    def tell_peer_info(self) -> None:
        """PeerInfo to every coordinator that has not heard exactly this."""
        if not self._resources.devices_known.is_set():
            return
        info = describe(
            self._resources.peer,
            self._resources.shared_devices(),
            self.packages,
            self._resources.leases.holders([device.id for device in self._resources.devices.accelerators()]),
            hosts=self._addresses.read(),
            portable=self.portable,
            limits=self._resources.admission.limits.lines(),
        )
        for cluster, host in self._hosts.items():
            if self._sent.get(cluster) != info:
                self._sent[cluster] = info
                host.session.send(info)

    def _tell_of(self, kind: EventKind, text: str, host: ClusterHost) -> None:
        self._resources.tell(SharingEvent(kind, text, owner=host.owner, cluster=host.name))

    def tell_slept(self, seconds: float) -> None:
        """To every coordinator; the link keeps it until they are there again."""
        for host in self.hosts():
            host.session.send(Slept(seconds=seconds))

    async def sample(self) -> None:
        """A PeerSample to every coordinator that is there."""
        listening = [host for host in self.hosts() if host.session.condition == "connected"]
        if listening:
            machine = await asyncio.to_thread(MachineSample, self._resources.devices)
            for host in listening:
                host.session.send(host.sample(machine), droppable=True)


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
        self._keeping: dict[ClusterHost, asyncio.Task[None]] = {}
        """Those whose training was kept, or is, since their coordinator has been silent."""
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
                self._keeping[host] = self._spawn(self._keep(host))
        for host, task in list(self._keeping.items()):
            if task.done() and (host not in hosts or self._silence(host) < self._keep_after):
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
                await self._keeping[host]
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
