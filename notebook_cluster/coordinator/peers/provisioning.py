"""This machine's own, private agent, which is started with the cluster, and again whenever it has ended; and new nodes:
on this machine, on one peer, or on every peer that may be used.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil

from notebook_cluster.coordinator.core import LOCAL, Core
from notebook_cluster.coordinator.nodes.membership import Membership
from notebook_cluster.coordinator.peers.links import PeerLinks
from notebook_cluster.coordinator.peers.pairing import NotReached, Pairing
from notebook_cluster.coordinator.peers.resolving import PeerResolver
from notebook_cluster.coordinator.startup import start_private_agent
from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import Node
from notebook_cluster.peering.candidates import Candidate
from notebook_cluster.peering.peer_finder import PeerFinder
from notebook_cluster.protocol import peer as p
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import read_code

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

    def arrived(self) -> None:
        """It never dials in: the coordinator dials it."""

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


class OwnMachinesAgent(Protocol):
    """The agent of the notebook's machine: :class:`OwnAgent`, or of a head :class:`.owners_agent.OwnersAgent`."""

    async def wait(self) -> None:
        """Return when there is a link to it; RequestError that says why there is none."""

    async def keep(self) -> None:
        """Until the cluster ends."""

    def arrived(self) -> None:
        """It has dialled in."""


ALL = "all"
NOT_REACHED_AGAIN = 15.0
"""Seconds until a peer that was found, but did not answer, is tried again."""


class NodeProvisioner:
    """Starts nodes. Whoever asks for the same found peer meanwhile waits for the same nodes."""

    def __init__(
        self,
        core: Core,
        *,
        links: PeerLinks,
        resolver: PeerResolver,
        pairing: Pairing,
        finding: PeerFinder,
        membership: Membership,
        own_agent: OwnMachinesAgent,
        nodes_per_host: Callable[[str], int],
    ) -> None:
        """``nodes_per_host(key)``: so many the launch of that host wants on it; 0: one per accelerator."""
        self._core = core
        self._links = links
        self._resolver = resolver
        self._pairing = pairing
        self._finding = finding
        self._membership = membership
        self._own_agent = own_agent
        self._nodes_per_host = nodes_per_host
        self._adding: dict[str, asyncio.Task[list[str]]] = {}
        self._local_first = asyncio.Event()
        self._local_first.set()
        self.follow = False
        """Add every usable peer that is found from now on."""

    async def add(
        self, peer: str, count: int = 0, code: str = "", *, follow: bool = False, expect: int = 0
    ) -> list[str]:
        """Start nodes on ``peer`` (a name, ``HOST:PORT``, ``local`` or ``all``); names once they answer.

        ``code`` pairs with peers that are not trusted yet; with ``all`` ``follow`` adds also those found
        later, and less than ``expect`` peers are waited for some seconds longer.
        """
        if code:
            try:
                code = read_code(code)
            except ValueError as error:
                raise RequestError(str(error)) from None
        if peer == ALL:
            self.follow = self.follow or follow
            return await self._add_all(code, expect)
        names = await (self._order_local(count) if peer == LOCAL else self._order_nodes(peer, count, code))
        await self._membership.wait(names)
        return names

    async def _order_local(self, count: int) -> list[str]:
        """Nodes of the notebook's own machine; they come before those of peers that were asked for later."""
        self._local_first.clear()
        try:
            await self._own_agent.wait()
            return await self._start_on(LOCAL, count)
        finally:
            self._local_first.set()

    async def _order_nodes(self, peer: str, count: int, code: str) -> list[str]:
        name = await self._resolver.resolve(peer, code)
        await self._local_first.wait()
        return await self._start_on(name, count)

    async def _start_on(self, peer: str, count: int) -> list[str]:
        link = await self._links.ready(peer)
        assert link.info is not None
        devices = self._devices(peer, link.info, count)
        there = [node.name for node in self._nodes_on(peer) if node.condition != "dead"]
        if count == 0 and peer != LOCAL and there:
            # Asked for twice, or by the class code and by name: a machine without a free accelerator has one node.
            devices = [device for device in devices if device != "cpu"]
            if not devices:
                more = f"%cluster add {peer} --count 1 adds one"
                self._core.tell("info", f"{peer} has {' and '.join(there)} already ({more})")
                return there
        return [self._start_new(peer, device) for device in devices]

    async def _add_all(self, code: str, expect: int) -> list[str]:
        """A peer that cannot be added is said and left out."""
        if code:
            self._pairing.use_for_all(code)
        before = set(self._core.state.nodes)
        there = await self._finding.present(lambda found: sum(map(self._resolver.may_join, found)) >= expect)
        wanted = [row for row in there if row.key in self._adding or self._resolver.usable(row)]
        results = await asyncio.gather(
            *(self._add_or_later(candidate) for candidate in wanted),
            *(self._add_typed(name) for name in self._finding.typed_names),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, RequestError):
                self._core.tell("warning", str(result))
            elif isinstance(result, BaseException):
                raise result
        # Some may have been added while we listened, by whoever follows what is found.
        keys = {candidate.key for candidate in there}
        peers = {peer.name for peer in self._core.state.peers.values() if peer.key in keys}
        late = [node.name for node in self._core.state.nodes.values() if node.name not in before and node.peer in peers]
        return list(
            dict.fromkeys([*late, *(name for result in results if isinstance(result, list) for name in result)])
        )

    async def _add_typed(self, name: str) -> list[str]:
        return await self.add_found(await self._resolver.resolve_typed(name))

    # ---- what is found, or comes by itself

    def on_found(self, new: list[Candidate]) -> None:
        """These are there now, or say something else than before."""
        for candidate in new:
            self._resolver.note_found(candidate)
            if self.follow and not self._links.is_used(candidate.key) and self._resolver.usable(candidate):
                self._core.spawn(self.add_quietly(candidate))
        self._core.dirty()

    def on_arrival(self, key: str, address: str) -> None:
        """A trusted peer has dialled this cluster. It was asked to join there, so it gets nodes."""
        candidate = self._resolver.dial_arrived(key, address)
        if candidate is not None and self._links.name_of(key) == LOCAL:
            self._own_agent.arrived()
        elif candidate is not None:
            self._core.spawn(self.add_quietly(candidate))

    async def add_found(self, candidate: Candidate) -> list[str]:
        """Nodes on a peer that was found, unless it has some; paired by the class code when it is not trusted."""
        task = self._adding.get(candidate.key)
        if task is None:
            name = self._links.name_of(candidate.key)
            if name is not None and self._nodes_on(name):
                return []
            task = self._adding[candidate.key] = asyncio.ensure_future(self._add_candidate(candidate))
            task.add_done_callback(lambda done: self._adding.pop(candidate.key))
        return await asyncio.shield(task)

    async def _add_candidate(self, candidate: Candidate) -> list[str]:
        name = await self._resolver.admit(candidate, self._pairing.code)
        await self._local_first.wait()
        names = await self._start_on(name, self._nodes_per_host(candidate.key))
        await self._membership.wait(names)
        return names

    async def _add_or_later(self, candidate: Candidate) -> list[str]:
        try:
            return await self.add_found(candidate)
        except NotReached as error:
            if not self.follow:
                raise
            self._core.spawn(self._add_later(candidate))
            raise NotReached(candidate, error.reason, later=True) from None

    async def add_quietly(self, candidate: Candidate) -> None:
        """As :meth:`add_found`, for what nobody waits for: why it cannot be added becomes a line."""
        try:
            await self._add_or_later(candidate)
        except RequestError as error:
            self._core.tell("warning", str(error))

    async def _add_later(self, candidate: Candidate) -> None:
        """A peer with the class code was not reached; in a full classroom that passes."""
        await asyncio.sleep(NOT_REACHED_AGAIN)
        self._pairing.try_again(candidate)
        found = self._finding.find(candidate.key)
        if found is not None and not self._links.is_used(found.key) and self._resolver.usable(found):
            await self.add_quietly(found)

    def _nodes_on(self, peer: str) -> list[Node]:
        return [node for node in self._core.state.nodes.values() if node.peer == peer]

    def _devices(self, peer: str, info: p.PeerInfo, count: int) -> list[str]:
        """One node per free accelerator; else cpu. More nodes than accelerators share the cpu."""
        used = {node.device for node in self._nodes_on(peer)}
        free = [d.id for d in info.devices if d.kind != "cpu" and d.id not in info.leased and d.id not in used]
        taken = {d.id: info.leased[d.id] for d in info.devices if d.id in info.leased and d.id not in used}
        for device, cluster in taken.items():
            self._core.tell("warning", f"{device} of {peer} is used by cluster {cluster!r}: left alone")
        if count == 0:
            return free or ["cpu"]
        return (free + ["cpu"] * count)[:count]

    def _start_new(self, peer: str, device: str) -> str:
        name, number = peer, 2
        while name in self._core.state.nodes:
            name, number = f"{peer}-{number}", number + 1
        directory = self._core.state.directory if peer == LOCAL else ""
        self._core.record(e.NodeAdded(node=name, peer=peer, device=device, directory=directory))
        self._membership.order(name)
        return name
