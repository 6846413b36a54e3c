"""Brings the machine what nodes say and who is there, and sends what it decides."""

import logging
from collections.abc import Callable, Mapping

from notebook_cluster.coordinator.core import CellWatcher, Core
from notebook_cluster.coordinator.decisions.machine import DecisionMachine, Send
from notebook_cluster.coordinator.delivery import Delivery
from notebook_cluster.protocol.decisions import (
    MOST_METRICS,
    MOST_NAME,
    AnswersMissing,
    Ask,
    DecisionQuery,
    DecisionState,
    PlaceReached,
    Withdrawn,
)
from notebook_cluster.protocol.wire import Message

log = logging.getLogger(__name__)

TELL_AFTER = 1.0
"""Seconds after which a node that waits is told for whom."""
_NUMBER_BITS = 32
_MOST_PATH = 64
_MOST_SITE = 200
_MOST_KNOWN = 16
_MOST_STOPS = 256


class Decisions(CellWatcher):
    """The decisions of the running cell."""

    def __init__(
        self,
        core: Core,
        delivery: Delivery,
        *,
        is_silent: Callable[[str], bool],
        in_rounds: Callable[[], Mapping[str, frozenset[str]]],
    ) -> None:
        """``is_silent(node)``: nobody waits for it; ``in_rounds()``: nodes that have waited in a round for a moment,
        and for whom."""
        self._core = core
        self._delivery = delivery
        self._is_silent = is_silent
        self._in_rounds = in_rounds
        self._machine = DecisionMachine(0, ())
        self._open: dict[tuple[str, int], float] = {}
        """Node and the number of its call -> since when it is open."""
        self._said: dict[tuple[str, int], list[str]] = {}

    # ---- who runs the cell

    def cell_started(self, cell: int, nodes: list[str]) -> None:
        if self._machine.cell != cell:
            self._machine = DecisionMachine(cell, [], numbers_from=self._numbers())
            self._open, self._said = {}, {}
        for name in nodes:
            self._machine.add(name, self._incarnation(name))

    def node_joined(self, cell: int, node: str) -> None:
        if cell == self._machine.cell:
            self._send(self._machine.joined(node, self._incarnation(node)))
            self._ask_state(node)

    def node_left(self, cell: int, node: str, status: str) -> None:
        if cell == self._machine.cell:
            self._send(self._machine.left(node))

    def recover(self) -> None:
        """After a restart of the coordinator: every node has to tell what it knows."""
        cell = self._core.state.running()
        if cell is None:
            return
        ranked = [node.name for node in self._core.state.roster_nodes()]
        running = [name for name, status in cell.nodes.items() if status == "running"]
        names = [name for name in ranked if name in running] + [name for name in running if name not in ranked]
        members = [(name, self._incarnation(name)) for name in names]
        self._machine = DecisionMachine(cell.id, members, restarted=True, numbers_from=self._numbers())
        for name in names:
            self._ask_state(name)

    def _ask_state(self, node: str) -> None:
        self._delivery.to_node(node, DecisionQuery(ticket=self._core.state.starts), decided=False)

    def _incarnation(self, name: str) -> int:
        node = self._core.state.nodes.get(name)
        return node.incarnation if node is not None else 0

    def _numbers(self) -> int:
        return self._core.state.starts << _NUMBER_BITS

    # ---- what nodes say

    def on_message(self, node: str, message: Message) -> None:
        if not _is_usable(message):
            log.warning("%s asks for a decision in a way that cannot be: dropped", node)
            return
        match message:
            case Ask():
                self._send(self._machine.on_ask(node, message))
            case PlaceReached():
                self._send(self._machine.on_place(node, message.cell, message.path, message.fence))
            case Withdrawn():
                self._machine.on_withdrawn(node, message.cell, message.serial)
            case DecisionState() if message.ticket == self._core.state.starts:
                self._send(self._machine.on_state(node, message))

    def _send(self, sends: list[Send]) -> None:
        for node, decided in sends:
            self._delivery.to_node(node, decided, decided=False)

    # ---- time

    def tick(self, now: float) -> None:
        """A few times a second."""
        asking = self._machine.asking()
        if asking:
            running = self._core.state.nodes
            silent = frozenset(name for name in running if self._is_silent(name))
            self._send(self._machine.look(silent, self._in_rounds()))
            asking = self._machine.asking()
        self._tell_missing(now, {(name, ask.serial) for name, ask in asking.items()})

    def _tell_missing(self, now: float, asking: set[tuple[str, int]]) -> None:
        self._open = {key: self._open.get(key, now) for key in asking}
        self._said = {key: self._said[key] for key in asking if key in self._said}
        for key, since in self._open.items():
            nodes = self._machine.missing(key[0]) if now - since >= TELL_AFTER else []
            if nodes and self._said.get(key) != nodes:
                self._said[key] = nodes
                self._delivery.to_node(
                    key[0], AnswersMissing(cell=self._machine.cell, serial=key[1], nodes=nodes), decided=False
                )

    def missing(self, node: str) -> list[str]:
        """The nodes whose answer the call of ``node`` waits for."""
        return self._machine.missing(node)


def _is_usable(message: Message) -> bool:
    """Whether what a node says is of a size that our nodes say."""
    if isinstance(message, Withdrawn):
        return True
    asks = [message] if isinstance(message, Ask) else []
    if isinstance(message, DecisionState):
        asks += [message.asked] if message.asked is not None else []
        if len(message.known) > _MOST_KNOWN or len(message.stops) > _MOST_STOPS or len(message.fence) > _MOST_PATH:
            return False
        if any(len(stop.path) > _MOST_PATH or len(stop.site) > _MOST_SITE for stop in message.stops):
            return False
    if isinstance(message, Ask | PlaceReached | DecisionState) and not 0 < len(message.path) <= _MOST_PATH:
        return False
    return all(
        len(ask.metrics) <= MOST_METRICS
        and all(len(name) <= MOST_NAME for name in ask.metrics)
        and len(ask.site) <= _MOST_SITE
        and len(ask.by) <= MOST_NAME
        and len(ask.name) <= MOST_NAME
        and 0 <= ask.weight < float("inf")
        for ask in asks
    )
