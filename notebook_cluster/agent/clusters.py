"""The clusters that one agent serves: a session with each one's coordinator, from the first word to the last."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from notebook_cluster.agent.events import EventKind, SharingEvent
from notebook_cluster.agent.heads import Heads
from notebook_cluster.agent.host import GRACE_S, ClusterHost
from notebook_cluster.agent.machine import MachineSample, OwnAddresses, describe
from notebook_cluster.agent.resources import Resources
from notebook_cluster.agent.sharing.coordinators import Coordinators
from notebook_cluster.agent.taking_over import Predecessors
from notebook_cluster.link import Condition, Session
from notebook_cluster.protocol.heads import FollowHead, Granted
from notebook_cluster.protocol.peer import Farewell, PeerInfo, Release, Released, Slept
from notebook_cluster.protocol.wire import Message
from notebook_cluster.security import fingerprint

log = logging.getLogger(__name__)

_MOST_UNTOLD = 100


class Clusters:
    """Give :meth:`new_session` to the listener.

    Args:
        on_end: called after a cluster is over here.
        heads: coordinators that may run on this machine; None: none may.
        follow: of a private agent, goes to the head with a key at an address, or (empty) to none.

    Attributes:
        packages: versions for PeerInfo; portable: whether this machine has a battery; set once they are known.
        empty_since: monotonic time since which no cluster is served, when none is.
    """

    def __init__(
        self,
        resources: Resources,
        coordinators: Coordinators,
        on_end: Callable[[], None],
        heads: Heads | None = None,
        follow: Callable[[str, str], None] | None = None,
    ) -> None:
        self._heads = heads
        self._follow = follow
        self._resources = resources
        self._coordinators = coordinators
        self._on_end = on_end
        self._hosts: dict[str, ClusterHost] = {}
        self._predecessors = Predecessors(
            resources.directory, self.hosts, coordinators.is_own, self.end_cluster,
            lambda host: coordinators.grants.end(coordinators.owner_key(host.session.key), host.name),
        )  # fmt: skip
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
        own, owner_key = self._coordinators.is_own(session.key), self._coordinators.owner_key(session.key)
        host = ClusterHost(
            session,
            self._resources,
            self._made,
            owner=self._coordinators.owner(session.key),
            owner_id=self._coordinators.owner_id(session.key),
            # Two people may give their clusters one name.
            folder=session.cluster_name if own else f"{session.cluster_name}-{fingerprint(owner_key)}",
            on_release=self._release,
            on_ask_kept=self._predecessors.on_ask_kept,
        )
        self._hosts[session.cluster] = host
        session.on_message = lambda message, buffers: self._handle(host, message, buffers)
        session.on_condition = lambda condition, reason: self._condition(host, condition, reason)
        session.on_restart = lambda: self._taken_over(host)
        self._tell_of("cluster-started", f"cluster {host.name} of {host.owner} is served", host)
        self._introduce(host)

    def _handle(self, host: ClusterHost, message: Message, buffers: list[bytes]) -> None:
        is_owners = not self._coordinators.is_head(host.session.key)
        if isinstance(message, FollowHead):
            host.is_window = host.is_window or is_owners
            host.session.send(Granted(ticket=message.ticket, error=self._go_to_head(host, message)))
        elif self._heads is not None and self._heads.handle(host.session, message, buffers):
            host.is_window = host.is_window or is_owners
        else:
            host.handle(message, buffers)

    def _go_to_head(self, host: ClusterHost, message: FollowHead) -> str:
        """Why not, or empty."""
        if self._follow is None or self._coordinators.is_head(host.session.key):
            return f"{self._resources.peer} goes to no head: only its owner can say so, to a private agent"
        try:
            self._follow(message.key, message.address)
        except ValueError as error:
            return str(error)
        return ""

    def _taken_over(self, host: ClusterHost) -> None:
        if self._heads is not None:
            self._heads.left(host.session)
        if not (host.is_window or self._coordinators.is_head(host.session.key)):
            # Led by the owner again: a head of before, whose grant may still run, is not obeyed any more.
            self._coordinators.grants.end(host.session.key, host.name)
        self._introduce(host)

    def _introduce(self, host: ClusterHost) -> None:
        """What a coordinator that knows nothing yet must hear first."""
        host.session.send(host.inventory(self._untold.pop((host.session.key, host.session.cluster), "")))
        self._sent.pop(host.session.cluster, None)
        self.tell_peer_info()
        self._go_on(host.kept.tell())

    def _condition(self, host: ClusterHost, condition: Condition, reason: str) -> None:
        log.info("cluster %s is %s%s", host.name, condition, f": {reason}" if reason else "")
        if condition == "connected" and host.was_silent:
            # The coordinator may have counted this peer's nodes as lost: say which are still here.
            self._introduce(host)
        host.was_silent = condition != "connected"
        if self._heads is not None:
            self._heads.silent(host.session, condition == "lost")
            if condition == "refused":
                self._heads.left(host.session)

    def _release(self, host: ClusterHost, message: Release) -> None:
        async def end() -> None:
            if message.keep:
                await host.keep_checkpoints(message.keep, jobs=message.jobs)
            await self.end_cluster(host, "stopped", asked=True)

        self._go_on(end())

    def _end_soon(self, host: ClusterHost, reason: str, *, asked: bool, grace: float = GRACE_S) -> None:
        self._go_on(self.end_cluster(host, reason, asked=asked, grace=grace))

    def _go_on(self, work: Coroutine[Any, Any, None]) -> None:
        """Until it is done, or this agent has waited for it at its own end."""
        task = asyncio.create_task(work)
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
        if self._heads is not None:
            self._heads.left(host.session)
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
