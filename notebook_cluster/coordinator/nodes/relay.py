"""Nodes without a way to each other: their mesh frames go over the links, through this coordinator.

A node that finds no way says so; where training stands still although there is a connection, the rounds say so. The
frames are passed on unread, between nodes of this cluster only. The sender's window bounds how much is on its way; what
a node sends beyond it is dropped here.
"""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.delivery import Delivery
from notebook_cluster.journal.state import Node
from notebook_cluster.protocol.measuring import MeasurePair, PairMeasured
from notebook_cluster.protocol.node import RelayFrame, RelayTaken, Unreachable, UseRelay
from notebook_cluster.protocol.views import RequestError

MAX_HEADER_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 1 << 20
MAX_ON_THE_WAY = 2 * (4 << 20)
"""Bytes from one node to another: twice the window of a node, for frames that it repeats after a restart of this
process."""
MEASURE_TIMEOUT = 15.0
LIVES_WITHIN = 2.5
"""Seconds in which a node that lives says so, at least once."""
_MAX_TEXT = 200

_Process = tuple[str, int]
"""Name and incarnation of a node."""


@dataclass
class _Way:
    """Frames from one node to another: (position, bytes) of those that the receiver has not taken."""

    generation: int
    frames: deque[tuple[int, int]] = field(default_factory=deque)
    size: int = 0

    def add(self, position: int, size: int, generation: int) -> bool:
        if generation != self.generation and self.frames and position <= self.frames[-1][0]:
            # The nodes lost each other between two generations, and the sender counts anew.
            self.frames.clear()
            self.size = 0
        self.generation = generation
        if self.size + size > MAX_ON_THE_WAY:
            return False
        self.frames.append((position, size))
        self.size += size
        return True

    def taken(self, position: int) -> None:
        while self.frames and self.frames[0][0] <= position:
            self.size -= self.frames.popleft()[1]


class FrameRelay:
    """``dropped`` counts frames that were not passed on."""

    def __init__(self, core: Core, delivery: Delivery, *, said_nothing_for: Callable[[str], float]) -> None:
        """``said_nothing_for(node)``: seconds since its process said something."""
        self._core = core
        self._delivery = delivery
        self._said_nothing_for = said_nothing_for
        self.dropped = 0
        self._ways: dict[tuple[_Process, _Process], _Way] = {}
        self._generation = -1
        self._told: set[tuple[_Process, _Process]] = set()
        self._tickets = itertools.count(1)
        self._measuring: dict[int, tuple[_Process, asyncio.Future[PairMeasured]]] = {}

    def stalled(self, waiting: str, waited_for: str) -> None:
        """Training stands still because ``waiting`` gets nothing from ``waited_for``: let both use the relay.

        A node looks for itself whether its connection works, and then comes back to it.
        """
        nodes = self._core.state.nodes
        one, other = nodes.get(waiting), nodes.get(waited_for)
        if one is None or other is None or not (one.is_in and other.is_in) or one.peer == other.peer:
            return
        for source, target in ((one, other), (other, one)):
            self._delivery.to_node(source.name, UseRelay(node=target.name, incarnation=target.incarnation))

    async def measure(self, source: str, target: str, payload: int = 1 << 20, round_trips: int = 5) -> PairMeasured:
        """How fast the way from ``source`` to ``target`` is, with ``payload`` bytes. What went wrong is in ``error``.

        Raises:
            RequestError: there is no such node in the cluster.
        """
        nodes = [self._core.known_node(source), self._core.known_node(target)]
        for node in nodes:
            if not node.is_in:
                raise RequestError(f"node {node.name!r} is {node.condition}: nothing can be measured there")
        ticket = next(self._tickets)
        answer: asyncio.Future[PairMeasured] = asyncio.get_running_loop().create_future()
        self._measuring[ticket] = (_process(nodes[0]), answer)
        self._delivery.to_node(
            source, MeasurePair(ticket=ticket, node=target, payload=payload, round_trips=round_trips)
        )
        try:
            return await asyncio.wait_for(answer, MEASURE_TIMEOUT)
        except TimeoutError:
            text = f"{source} did not answer within {MEASURE_TIMEOUT:.0f} s"
            return PairMeasured(ticket=ticket, node=target, error=text)
        finally:
            del self._measuring[ticket]

    # ---- what nodes say --------------------------------------------------------------------------------------

    def on_unreachable(self, node: Node, message: Unreachable) -> None:
        """``node`` finds no way to another one."""
        target = self._other(node, message.node, message.incarnation)
        if target is None:
            return
        pair = (_process(node), _process(target))
        if pair not in self._told:
            there = {_process(row) for row in self._core.state.roster_nodes()}
            self._told = {known for known in self._told if there.issuperset(known)} | {pair}
            endpoint = "".join(filter(str.isprintable, message.endpoint[:_MAX_TEXT]))
            self._core.spawn(self._tell(pair, endpoint))
        self._delivery.to_node(node.name, UseRelay(node=target.name, incarnation=target.incarnation))

    async def _tell(self, pair: tuple[_Process, _Process], endpoint: str) -> None:
        """Say it when both are seen to live: that nobody reaches a process that stands still, or is about to be found
        dead, is no matter of the network."""
        await asyncio.sleep(LIVES_WITHIN)
        (name, _), (other, _) = pair
        nodes = [self._core.state.nodes.get(name), self._core.state.nodes.get(other)]
        there = [_process(node) for node in nodes if node is not None and node.is_in]
        if there != list(pair) or max(map(self._said_nothing_for, (name, other))) >= LIVES_WITHIN:
            self._told.discard(pair)
            return
        self._core.tell(
            "warning",
            f"{name} cannot reach {other} at {endpoint}: their frames are relayed over the links, which is slower; "
            "%cluster doctor says why",
        )

    def on_frame(self, node: Node, message: RelayFrame) -> None:
        """A frame of ``node`` for another one."""
        target = self._other(node, message.node, message.incarnation)
        header, payload = len(message.header), len(message.payload)
        if target is None or header > MAX_HEADER_BYTES or payload > MAX_PAYLOAD_BYTES or message.position < 0:
            self.dropped += 1
            return
        generation = self._core.state.generation
        if self._way(node, target).add(message.position, header + payload, generation):
            passed = replace(message, node=node.name, incarnation=node.incarnation)
            self._delivery.to_node(target.name, passed, decided=False)
        else:
            self.dropped += 1

    def on_taken(self, node: Node, message: RelayTaken) -> None:
        """``node`` has taken frames of another one."""
        sender = self._other(node, message.node, message.incarnation)
        if sender is None or message.total < 0:
            self.dropped += 1
            return
        self._way(sender, node).taken(message.total)
        passed = replace(message, node=node.name, incarnation=node.incarnation)
        self._delivery.to_node(sender.name, passed, decided=False)

    def on_measured(self, node: Node, message: PairMeasured) -> None:
        """What ``node`` was asked for by :meth:`measure`."""
        source, answer = self._measuring.get(message.ticket, (None, None))
        if answer is None or source != _process(node) or answer.done():
            return
        numbers = (message.round_trip, message.median_round_trip, message.bytes_per_s, message.sent)
        usable = all(math.isfinite(number) and number >= 0 for number in numbers)
        error = "".join(filter(str.isprintable, message.error[:_MAX_TEXT]))
        if not usable:
            message, error = (
                PairMeasured(ticket=message.ticket, node=message.node),
                f"{node.name} sent no usable numbers",
            )
        answer.set_result(replace(message, error=error))

    # ---- inside ----------------------------------------------------------------------------------------

    def _other(self, node: Node, name: str, incarnation: int) -> Node | None:
        """The process that ``node`` means, when both are in the roster."""
        other = self._core.state.nodes.get(name)
        usable = other is not None and other.is_in and node.is_in and name != node.name
        return other if usable and other is not None and other.incarnation == incarnation else None

    def _way(self, source: Node, target: Node) -> _Way:
        if self._generation != self._core.state.generation:
            self._generation = self._core.state.generation
            there = {_process(row) for row in self._core.state.roster_nodes()}
            self._ways = {pair: way for pair, way in self._ways.items() if there.issuperset(pair)}
        return self._ways.setdefault((_process(source), _process(target)), _Way(self._generation))


def _process(node: Node) -> _Process:
    return node.name, node.incarnation
