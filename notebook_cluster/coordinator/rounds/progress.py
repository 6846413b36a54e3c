"""Who makes progress: what the rounds and the collectives wait by."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.delivery import Delivery
from notebook_cluster.protocol.awake import AwakeClock
from notebook_cluster.protocol.clock import roughly
from notebook_cluster.protocol.node import Heartbeat, NodeSilent
from notebook_cluster.protocol.peer import PeerSample
from notebook_cluster.rounds.leader.silence import limit

HEARTBEAT = 1.0
"""Seconds between two words of a node that is well."""
SUSPICIOUS = 2.0
"""Seconds without a sign after which something may be wrong: a node that is well gives one each second."""
BEHIND, JUST_NOW = 3.0, 0.5
"""Seconds since the last sample of an agent, and since a byte of it: what it says is on its way. An agent that ends is
never so far behind in the half second after its last byte."""
MOST_HEARD = 1000
"""Nodes that one Heartbeat names."""
WITHOUT_PYTHON = 60.0
"""Seconds in which processor time counts although the runtime says nothing."""
_ENOUGH = 0.02
"""Seconds of processor time from one sample to the next that are progress: two ticks of the system's clock. Threads of
libraries that wait need less."""


@dataclass
class _Signs:
    incarnation: int
    heard: float
    """When something showed progress; ``said``: when the process itself last said something."""
    said: float
    processor: float = math.inf
    """Its processor time at the last sample."""
    stopped: bool = False
    beat: float = math.nan
    """When its last Heartbeat came; ``late``: seconds that this one was on its way."""
    late: float = 0.0


class SignsOfLife:
    """When each node last gave a sign of progress. Times are those of a clock that stands still when this process does.

    A sign is a message of the node's process (its runtime says Heartbeat each second) and, for at most a minute without
    one, numbers of it that another node got over the mesh, or processor time that its agent reads: a first
    ``torch.compile``, or C code that keeps Python's lock. While bytes come from an agent, but no sample of it, what it
    has to say waits behind other things, and nobody is to blame. A process that is stopped, or gets no processor time,
    and a peer of which nothing is heard give no signs.
    """

    def __init__(self, core: Core, delivery: Delivery, *, patience_for: Callable[[str], float]) -> None:
        """``patience_for(node)``: seconds that its jobs wait for it."""
        self._core = core
        self._delivery = delivery
        self._patience_for = patience_for
        self._clock = AwakeClock()
        self._signs: dict[str, _Signs] = {}
        self._sampled: dict[str, float] = {}
        self._marked: dict[str, int] = {}
        """Nodes -> incarnation: the others were told that they make no progress."""

    def said(self, node: str) -> None:
        """The process of ``node`` said something."""
        signs = self._of(node)
        if signs is not None:
            signs.heard = signs.said = self._now()
            signs.stopped = False

    def on_heartbeat(self, node: str, message: Heartbeat) -> None:
        """That it came is what counts; of other nodes it says what it got from them, when it was sent."""
        late = self._lateness(node)
        for sender in message.heard[:MOST_HEARD]:
            if sender != node:
                self.got_numbers(sender, late)

    def _lateness(self, node: str) -> float:
        """Seconds that the Heartbeat of ``node`` which comes now was on its way. After a silence those that waited
        behind a link, or an agent that stood still, come at once: each was said a second after the one before."""
        signs, now = self._of(node), self._now()
        if signs is None:
            return 0.0
        since, signs.beat = now - signs.beat, now
        if since > SUSPICIOUS:
            signs.late = since - HEARTBEAT
        else:
            signs.late = max(0.0, signs.late + since - HEARTBEAT) if since < HEARTBEAT / 2 else 0.0
        return signs.late

    def got_numbers(self, sender: str, late: float = 0.0) -> None:
        """Numbers of ``sender`` came to another node, since that one said so last, ``late`` seconds ago."""
        signs, now = self._of(sender), self._now()
        if signs is not None and now - signs.said < WITHOUT_PYTHON:
            signs.heard = max(signs.heard, now - HEARTBEAT - late)

    def on_sample(self, peer: str, sample: PeerSample) -> None:
        """What the agent of ``peer`` reads of its kernels each second."""
        now = self._sampled[peer] = self._now()
        for row in sample.nodes:
            node = self._core.state.nodes.get(row.node)
            signs = self._of(row.node) if node is not None and node.peer == peer else None
            if signs is None:
                continue
            signs.stopped = row.stopped
            worked = row.cpu_seconds is None or row.cpu_seconds - signs.processor >= _ENOUGH
            signs.processor = row.cpu_seconds or 0.0
            if worked and not row.stopped and now - signs.said < WITHOUT_PYTHON:
                signs.heard = now

    def tick(self) -> float:
        """Look at all; the time without pauses of this process."""
        now = self._now()
        for node in self._core.state.roster_nodes():
            self._of(node.name)
        for peer in self._core.state.peers:
            self._wait_for_backlog(peer, now)
        self._signs = {name: signs for name, signs in self._signs.items() if name in self._core.state.nodes}
        self._tell_others()
        return now

    def silence(self, node: str) -> float:
        """Seconds without a sign of ``node``."""
        signs = self._signs.get(node)
        return self._now() - signs.heard if signs is not None else 0.0

    def said_nothing_for(self, node: str) -> float:
        """Seconds since the process of ``node`` itself last said something."""
        signs = self._signs.get(node)
        return self._now() - signs.said if signs is not None else 0.0

    def silent(self) -> dict[str, tuple[float, str]]:
        """Nodes that gave no sign for a moment: seconds, and why."""
        found = {name: self.silence(name) for name in self._signs}
        return {name: (seconds, self._why(name)) for name, seconds in found.items() if seconds > SUSPICIOUS}

    def trouble(self, node: str) -> str:
        """``has made no progress for 12 s (its process is stopped)`` of a node that nobody waits for; else empty."""
        if node not in self._marked or node not in self._signs:
            return ""
        return f"has made no progress for {roughly(self.silence(node))} ({self._why(node)})"

    # ---- inside ----------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._clock.read(time.monotonic())

    def _of(self, name: str) -> _Signs | None:
        """The signs of a node that is in; those of a new process begin now."""
        node = self._core.state.nodes.get(name)
        if node is None or not node.is_in:
            self._signs.pop(name, None)
            return None
        signs = self._signs.get(name)
        if signs is None or signs.incarnation != node.incarnation:
            now = self._now()
            signs = self._signs[name] = _Signs(node.incarnation, now, now)
        return signs

    def _wait_for_backlog(self, peer: str, now: float) -> None:
        """Bytes come, but no samples: these, like what its nodes say, are behind other things on a slow link."""
        link = self._delivery.links.get(peer)
        sampled = self._sampled.setdefault(peer, now)
        behind = BEHIND < now - sampled < WITHOUT_PYTHON
        if link is None or not behind or link.dialer.silence > JUST_NOW:
            return
        for node in self._core.state.roster_nodes():
            signs = self._signs.get(node.name)
            if node.peer == peer and signs is not None:
                signs.heard = now

    def _why(self, name: str) -> str:
        peer = self._core.state.nodes[name].peer
        link = self._delivery.links.get(peer)
        if link is None or link.dialer.silence > SUSPICIOUS:
            return f"nothing is heard from {peer}"
        return "its process is stopped" if self._signs[name].stopped else "its process gets no processor time"

    def _tell_others(self) -> None:
        """Collectives wait no longer for a node that makes no progress, and may again when it does."""
        self._marked = {name: number for name, number in self._marked.items() if name in self._signs}
        for name, signs in self._signs.items():
            most = limit(self._patience_for(name))
            if self.silence(name) < most:
                if self._marked.pop(name, None) is not None:
                    self._say(name, signs.incarnation, "")
            elif self._marked.get(name) != signs.incarnation:
                self._marked[name] = signs.incarnation
                self._say(name, signs.incarnation, f"has made no progress for {most:.0f} s ({self._why(name)})")

    def _say(self, name: str, incarnation: int, reason: str) -> None:
        for other in self._core.state.roster_nodes():
            if other.name != name:
                self._delivery.to_node(other.name, NodeSilent(node=name, incarnation=incarnation, reason=reason))
