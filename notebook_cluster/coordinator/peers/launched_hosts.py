"""The agents that engines started, as peers of this cluster: who may come in, which places they have, who has left."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable

import msgspec

from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.nodes.membership import Membership
from notebook_cluster.coordinator.peers.links import PeerLinks
from notebook_cluster.journal import events as e
from notebook_cluster.journal.launched import LaunchedHost, LaunchRecord
from notebook_cluster.journal.state import Node
from notebook_cluster.launchers import HostState, LaunchState
from notebook_cluster.protocol import PROTOCOL_VERSION
from notebook_cluster.protocol.launches import ANY_PLACE, Enlist, Enlisted, NotEnlisted
from notebook_cluster.protocol.names import is_name
from notebook_cluster.protocol.wire import mismatch
from notebook_cluster.security import is_key

COMING_S = 10.0
"""For an agent that was let in to dial: until then nobody else gets its place."""
LATE_S = 20.0
"""After which a host that runs should have come."""
_CUT_S = 3.0
"""For an agent that left to hear that it may end."""

Answer = Callable[[Enlisted | NotEnlisted], None]


class LaunchedHosts:
    """An :class:`~notebook_cluster.link.Enlisting`. Each place of a launch is had by one agent at a time: the one of
    the latest start."""

    def __init__(
        self,
        core: Core,
        *,
        links: PeerLinks,
        membership: Membership,
        is_here: Callable[[str], bool],
        revoke: Callable[[str], None],
    ) -> None:
        """``is_here(key)``: that agent has a connection; ``revoke(key)`` cuts it."""
        self._core = core
        self._links = links
        self._membership = membership
        self._is_here = is_here
        self._revoke = revoke
        self._since: dict[str, float] = {}

    # ---- who comes in; the first two also on the ZAP thread

    def is_launch(self, key: str) -> bool:
        return self._launch_of(key) is not None

    def name_of(self, key: str) -> str | None:
        """The name of the host with ``key``, while it has a place."""
        found = self._place_of(key)
        return None if found is None else found[0].hosts[found[1]].name

    def nodes_per_host(self, key: str) -> int:
        """How many nodes the host with ``key`` is to have; 0: as many as it has accelerators."""
        found = self._place_of(key)
        return 0 if found is None else found[0].nodes_per_host

    def _launch_of(self, key: str) -> LaunchRecord | None:
        alive = (record for record in self._core.state.launches.values() if record.ended is None)
        return next((record for record in alive if record.key == key), None)

    def _place_of(self, key: str) -> tuple[LaunchRecord, int] | None:
        for record in self._core.state.launches.values():
            for place, host in record.hosts.items():
                if host.key == key:
                    return record, place
        return None

    def enlist(self, key: str, address: str, message: Enlist, answer: Answer) -> None:
        record = self._launch_of(key)
        if record is not None and message.place == ANY_PLACE:
            message = msgspec.structs.replace(message, place=self._free_place(record, message.key))
        reason = "this launch is over" if record is None else self._objection(record, message, address)
        if record is None or reason:
            answer(NotEnlisted(protocol=PROTOCOL_VERSION, reason=reason))
            return
        there = record.hosts.get(message.place)
        if there is None or there.key != message.key:
            if there is not None:
                self.leave(record.launch, message.place, f"its engine has started it again, on {message.name}")
            self._since[message.key] = time.monotonic()
            self._core.record(
                e.HostEnlisted(
                    launch=record.launch, place=message.place, start=message.start, key=message.key, name=message.name
                )
            )
        # Whoever was told has to be known to the coordinator after this one.
        self._core.journal.settled(lambda: answer(Enlisted()))

    def _free_place(self, record: LaunchRecord, key: str) -> int:
        """For an agent that was given none; the same when it asks again, and ANY_PLACE where all are taken."""
        had = self._place_of(key)
        if had is not None and had[0] is record:
            return had[1]
        free = [place for place in record.open_places if place not in record.hosts]
        free += [place for place, host in record.hosts.items() if not self._holds(host)]
        return free[0] if free else ANY_PLACE

    def _objection(self, record: LaunchRecord, message: Enlist, address: str) -> str:
        """Why an agent does not get the place that it wants, or empty."""
        if (versions := mismatch(message.name, message.protocol)) is not None:
            return versions
        if not is_name(message.name) or not is_key(message.key) or self._launch_of(message.key) is not None:
            return "it has no usable name or key"
        if message.place == ANY_PLACE:
            return f"all hosts of {record.engine} {record.handle} that are wanted are here"
        if message.place not in record.open_places:
            return f"place {message.place} of {record.wanted} is not wanted any more"
        there, other = record.hosts.get(message.place), self._place_of(message.key)
        if (other is None and self._links.is_used(message.key)) or other not in (None, (record, message.place)):
            return "its key is that of another peer"
        if there is None or there.key == message.key or message.start > there.start:
            return ""
        if message.start == there.start and not self._holds(there):
            return ""
        self._core.tell(
            "warning",
            f"{record.engine} {record.handle}: host {message.place} was started twice; {there.name} has its place, "
            f"{message.name} at {address} was sent away",
        )
        return f"{there.name} has place {message.place} of {record.engine} {record.handle} already"

    def _holds(self, host: LaunchedHost) -> bool:
        """It is here, or was let in a moment ago and has not dialled yet."""
        if self._is_here(host.key) or self._links.is_used(host.key):
            return self._is_here(host.key)
        return time.monotonic() - self._since.get(host.key, -COMING_S) < COMING_S

    # ---- who is there, and who has left

    def joined(self, record: LaunchRecord) -> int:
        """How many hosts have nodes that take part, and none that is on its way."""
        return sum(self._has_joined(self._nodes(host.key)) for host in record.hosts.values())

    def _has_joined(self, nodes: list[Node]) -> bool:
        coming = any(node.condition == "starting" or (node.is_in and not node.settled) for node in nodes)
        return not coming and any(node.is_in for node in nodes)

    def highest_rank(self, record: LaunchRecord, place: int) -> int | None:
        """Of the nodes on this host; None: there are none."""
        host = record.hosts.get(place)
        ranks = [self._core.state.rank(node.name) for node in self._nodes(host.key)] if host is not None else []
        return max((rank for rank in ranks if rank is not None), default=None)

    def placed(self, record: LaunchRecord, state: LaunchState) -> LaunchState:
        """``state`` by places, also where its engine knows none: hosts that are here run, and what else is told goes to
        the places that nobody has."""
        if state.by_place:
            return state
        order = {"running": 0, "pending": 1, "ended": 2}
        told = sorted(state.hosts.values(), key=lambda host: order[host.condition])
        over = [host for host in told if host.condition == "ended"]
        # Places that were given up are no news.
        told = told[: len(told) - len(over)] + over[len(record.given_up) :]
        hosts: dict[int, HostState] = {}
        holding = {place for place, host in record.hosts.items() if self._holds(host)}
        for place in sorted(record.open_places, key=lambda p: (p not in holding, p not in record.hosts, p)):
            host = told.pop(0) if told else HostState("ended", "it is gone")
            here = record.hosts[place].name if place in record.hosts else host.host
            if place in holding:
                host = HostState("running")
            hosts[place] = dataclasses.replace(host, host=here if host.condition == "running" else host.host)
        return LaunchState(hosts)

    def was_in_before(self, record: LaunchRecord, place: int, moment: float) -> bool:
        """An agent had the place then (monotonic time)."""
        host = record.hosts.get(place)
        return host is not None and self._since.get(host.key, 0.0) < moment

    def is_connected(self, record: LaunchRecord, place: int) -> bool:
        """The agent that has the place has a connection."""
        host = record.hosts.get(place)
        return host is not None and self._is_here(host.key)

    def on_left(self, peer: str, reason: str) -> None:
        """The agent of this peer has ended, and said so."""
        found = self._place_of(self._core.state.peers[peer].key)
        if found is not None:
            self.leave(found[0].launch, found[1], reason)

    def leave(self, launch: str, place: int, reason: str, *, given_up: bool = False) -> None:
        """Take out of the cluster whoever has this place; ``given_up``: nobody else gets it."""
        host = self._core.state.launches[launch].hosts.get(place)
        self._core.record(e.HostLeft(launch=launch, place=place, given_up=given_up))
        if host is None:
            return
        self._since.pop(host.key, None)
        for node in self._nodes(host.key):
            self._membership.remove(node.name)
        name = self._links.name_of(host.key)
        if name is not None and self._links.has(name):
            self._links.forget(name, reason)
        self._core.tell("warning", f"{name or host.name} has left: {reason}")
        self._core.spawn(self._cut(host.key))

    async def _cut(self, key: str) -> None:
        await asyncio.sleep(_CUT_S)
        self._revoke(key)

    def _nodes(self, key: str) -> list[Node]:
        name = self._links.name_of(key)
        return [node for node in self._core.state.nodes.values() if node.peer == name]


class Latecomers:
    """Places whose hosts run, as their engine says, and of which no agent has come: each is named once."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}
        self._named: set[tuple[str, int]] = set()

    def look(self, launch: str, running: Iterable[int], now: float) -> list[int]:
        """Those of ``running``, all that are so ``now`` (monotonic time), that are late for the first time."""
        missing = {(launch, place) for place in running}
        for key in [key for key in self._since if key[0] == launch and key not in missing]:
            del self._since[key]
            self._named.discard(key)
        late = [key for key in sorted(missing) if now - self._since.setdefault(key, now) > LATE_S]
        fresh = [key for key in late if key not in self._named]
        self._named.update(fresh)
        return [place for _, place in fresh]
