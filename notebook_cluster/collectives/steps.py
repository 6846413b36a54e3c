"""The steps that collectives are made of: send a phase, wait for a phase. On the main thread."""

import contextlib
import time
import weakref
from collections.abc import Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from notebook_cluster.collectives.chunked_messages import (
    CellWorld,
    ChunkedMessage,
    CollectiveSettings,
    Landing,
    Payload,
    Transport,
    as_bytes,
)
from notebook_cluster.collectives.expectations import Check, Wait, any_value, refusal_of, same_array, same_operation
from notebook_cluster.collectives.receiver import CellReceiver
from notebook_cluster.collectives.sent_messages import NOTHING_ELSE
from notebook_cluster.collectives.values import WireValue, carrier
from notebook_cluster.memory import Scratch
from notebook_cluster.protocol.mesh import CellFrame

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SLICE = 0.2
"""Seconds of one sleep: on every system a Stop is seen between two of them."""

_LET_GO = 5.0
"""Seconds that libzmq may take to let go of what it was given; it does so at once."""


def wait_for(queue: "SimpleQueue[Any]") -> Any:
    """The next item of ``queue``; a KeyboardInterrupt ends the wait."""
    while True:
        try:
            return queue.get(timeout=_SLICE)
        except Empty:
            continue


class Steps:
    """One operation of one node.

    Attributes:
        number: of the operation, counted alike on every node of the cell.
        name: as in its frames.
        nodes: who takes part, in rank order; ``own`` is this node, ``others`` the rest.
        base: added to every phase: what was tried first may have had some.
        out: the caller's memory for the result, flat; may be the memory of its array.
        begun: the others may have something of it from this node.
    """

    def __init__(
        self,
        transport: Transport,
        receiver: CellReceiver,
        settings: CollectiveSettings,
        scratch: Scratch,
        world: CellWorld,
        number: int,
        name: str,
    ) -> None:
        self.transport = transport
        self.receiver = receiver
        self.settings = settings
        self.scratch = scratch
        self.world = world
        self.number = number
        self.name = name
        self.base = 0
        self.begun = False
        self.out: NDArray[Any] | None = None
        self.own = transport.name
        self.nodes = list(world.nodes)
        self.others = [node for node in self.nodes if node != self.own]
        self._lent: list[weakref.ref[Any]] = []
        """What is alive while somebody may read lent memory."""

    @property
    def index(self) -> int:
        """The place of this node among ``nodes``."""
        return self.nodes.index(self.own)

    def header(self, wire: WireValue, phase: int) -> CellFrame:
        """What stands in front of ``wire`` in ``phase``."""
        world = self.world
        return CellFrame(
            cell=world.cell, generation=world.generation, operation=self.number, name=self.name,
            phase=self.base + phase,
            kind=wire.kind, dtype=wire.dtype, shape=list(wire.shape),
        )  # fmt: skip

    def send(self, parts: Mapping[str, WireValue], phase: int, lent: bool = False) -> None:
        """Send each node of ``parts`` its part, which must not change until all nodes are in a later operation; of
        arrays that are ``lent``, until :meth:`settle` or :meth:`withdraw`."""
        outgoing = [(node, self.header(wire, phase), payload_of(wire)) for node, wire in parts.items()]
        if lent:
            self._lent += [weakref.ref(memoryview(payload).obj) for _, _, payload in outgoing]

        def post() -> None:
            for node, header, payload in outgoing:
                self.receiver.sent.post(node, header, payload)

        if outgoing:
            self.begun = True
            self.transport.call_soon(post)

    def receive(self, senders: Iterable[str], phase: int, check: Check, ask: bool = False) -> dict[str, ChunkedMessage]:
        """Wait for what ``senders`` send in ``phase``. Phases of one sender are waited for in their order.

        Raises:
            ValueError: ``check`` says that it is not what belongs here, or others are in another operation.
            PeerLost: a node of the cell raised, ended or was lost.
        """
        wanted = tuple(senders)
        if not wanted:
            return {}
        named = same_operation(self.own, self.name, check)
        return self.wait(Wait(self.name, self.number, self.base + phase, "collective", wanted, named, ask))

    def wait(self, wait: Wait) -> dict[str, ChunkedMessage]:
        """Hand ``wait`` to the I/O thread and sleep until it is settled."""
        self.begun = True
        self.transport.call_soon(lambda: self.receiver.expect(wait))
        outcome = wait_for(wait.outcome)
        if isinstance(outcome, Exception):
            raise outcome
        messages: dict[str, ChunkedMessage] = outcome
        return messages

    def exchange(self, parts: Mapping[str, WireValue], check: Check, phase: int = 0) -> dict[str, ChunkedMessage]:
        """Send each other node its part and wait for theirs."""
        self.send({node: parts[node] for node in self.others}, phase)
        return self.receive(self.others, phase, check)

    def refuse(self, error: BaseException) -> None:
        """``error`` was raised here before anything was sent: whoever waits for this node in the operation is told."""
        kind, reason = refusal_of(error)
        header = self.header(WireValue(kind, "", (), reason), NOTHING_ELSE)

        def post() -> None:
            for node in self.others:
                self.receiver.sent.post(node, header, reason)

        self.transport.call_soon(post)

    # ---- memory of others

    def settle(self, phase: int) -> None:
        """Wait until every node has all that it needs of this operation: what was lent is not read any more."""
        self.exchange(dict.fromkeys(self.others, WireValue("json", "", (), b"")), any_value, phase)
        self._lent.clear()
        self.transport.call_soon(lambda: self.receiver.sent.forget_parts(self.number, self.base + phase))

    def close_out(self) -> None:
        """The operation was left in the middle. When this returns, nothing that still comes is written to ``out``."""
        if self.out is None:
            return
        closed: SimpleQueue[None] = SimpleQueue()

        def close() -> None:
            self.receiver.drop_operation(self.number)
            closed.put(None)

        self.transport.call_soon(close)
        with contextlib.suppress(Empty):  # an I/O thread that has ended writes nothing
            closed.get(timeout=_LET_GO)

    def withdraw(self) -> None:
        """The operation was left in the middle. What was lent and is still on its way does not arrive any more; when
        this returns, nobody reads it."""
        if not self._lent:
            return

        def give_up() -> None:
            self.receiver.sent.forget_parts(self.number)
            for node in self.others:
                self.transport.start_over(node)

        self.transport.call_soon(give_up)
        deadline = time.monotonic() + _LET_GO
        while any(array() is not None for array in self._lent) and time.monotonic() < deadline:
            time.sleep(0.001)
        self._lent.clear()

    # ---- arrays

    def place(self, sender: str, phase: int, flat: "NDArray[Any]", may_stay: bool = False) -> None:
        """What ``sender`` sends in ``phase`` goes into ``flat``, unless it ``may_stay`` where it came and does; said
        before anything of the operation is sent."""
        self.receiver.places[sender, self.number, self.base + phase] = Landing(as_bytes(flat), may_stay)

    def result(self, count: int, dtype: Any) -> "NDArray[Any]":
        """Memory for the result, flat: ``out``, or some that nothing else refers to."""
        return self.out if self.out is not None else self.scratch.result(count, dtype)

    def send_array(
        self, nodes: Iterable[str], phase: int, wire: WireValue, flat: "NDArray[Any]", lent: bool = False
    ) -> None:
        """Send ``flat``, a part of the array that ``wire`` describes; ``lent`` as of :meth:`send`."""
        part = WireValue(wire.kind, wire.dtype, wire.shape, flat)
        self.send(dict.fromkeys(nodes, part), phase, lent)

    def receive_arrays(
        self, senders: Iterable[str], phase: int, wire: WireValue, size: int
    ) -> "dict[str, NDArray[Any]]":
        """A part of ``size`` elements from each of ``senders``, who must have the array that ``wire`` describes."""
        import numpy

        dtype = numpy.dtype(carrier(wire.dtype))
        check = same_array(self.world, self.own, wire, size * dtype.itemsize)
        messages = self.receive(senders, phase, check)
        return {node: numpy.frombuffer(message.data, dtype) for node, message in messages.items()}


def payload_of(wire: WireValue) -> Payload:
    """The bytes of ``wire`` as they travel, without a copy."""
    return as_bytes(wire.data) if wire.is_array else wire.data
