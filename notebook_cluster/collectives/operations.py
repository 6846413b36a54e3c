"""The collectives as people call them. They run on the main thread and sleep on a queue while the I/O thread works.

Every operation has a number, counted alike on every node of the cell, so frames of two operations never mix. The work
of an ``all_reduce`` is cut into one slice per node: everybody sends slice k to node k (phase 0), node k reduces it in
rank order and sends the result to everybody (phase 1). So every node sends about twice the array, and all hold the same
bits. Arrays too small to be worth two steps go from everybody to everybody, and each node reduces them itself.
"""

from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from notebook_cluster.collectives import reduction
from notebook_cluster.collectives.checks import Check, any_value, same_array, same_operation
from notebook_cluster.collectives.inbox import Inbox, Wait
from notebook_cluster.collectives.parcels import (
    MESSAGE,
    CellWorld,
    CollectiveSettings,
    Parcel,
    Payload,
    Transport,
    as_bytes,
)
from notebook_cluster.collectives.values import Wire, carrier, from_wire, to_wire
from notebook_cluster.protocol.mesh import CellFrame

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SLICE = 0.2
"""Seconds of one sleep: on every system a Stop is seen between two of them."""


def wait_for(queue: "SimpleQueue[Any]") -> Any:
    """The next item of ``queue``; a KeyboardInterrupt ends the wait."""
    while True:
        try:
            return queue.get(timeout=_SLICE)
        except Empty:
            continue


class Collectives:
    """The collectives of one node. ``inbox`` is fed by the I/O thread (frames, CellDone, ticks), all else here is
    called by the one thread that runs the cell."""

    def __init__(self, transport: Transport, settings: CollectiveSettings | None = None) -> None:
        self._transport = transport
        self._own = transport.name
        self._settings = settings or CollectiveSettings()
        self.inbox = Inbox(transport, self._settings)
        self._world: CellWorld | None = None
        self._operation = 0
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}

    def begin_cell(self, world: CellWorld) -> None:
        """A cell starts with these nodes; operations are counted from 1 again."""
        self._world = world
        self._operation = 0
        self._sent, self._received = {}, {}
        self._transport.call_soon(lambda: self.inbox.begin(world))

    def end_cell(self) -> None:
        """The cell is over on this node. What others may still ask for is kept until the next cell."""
        self._world = None

    # ---- operations

    def barrier(self) -> None:
        """Return when every node of the cell has called it."""
        if self._world is not None and self._world.replay:
            return  # everybody passed it when the cell ran first
        world, wire = self._begin("barrier"), Wire("json", "", (), b"")
        self._exchange(world, "barrier", dict.fromkeys(world.nodes, wire), any_value)

    def all_reduce(self, value: Any, op: str = "sum") -> Any:
        """The ``op`` of ``value`` over all nodes, in rank order, the same bits on every node.

        Args:
            value: array or tensor of equal shape and dtype on every node, or a number.
            op: ``sum``, ``mean``, ``max`` or ``min``.

        Returns:
            A new array of the same library, dtype and device; a number for numbers. Half precision is summed in
            float32. The result has no gradient.

        Raises:
            ValueError: shapes, dtypes or operations differ between nodes, or ``op`` is not defined for the dtype.
            PeerLost: a node of the cell raised, ended or was lost.
        """
        world, wire = self._begin("all_reduce"), self._to_wire(value, "all_reduce")
        name = f"all_reduce({op})"
        if not wire.is_array:
            return self._all_reduce_number(world, name, wire, op)
        reduction.check_reduction(op, wire.dtype, "all_reduce")
        if wire.data.nbytes <= self._settings.small_bytes:
            parcels = self._exchange(world, name, dict.fromkeys(world.nodes, wire), same_array(world, self._own, wire))
            flat = reduction.reduce_arrays(self._arrays(world, wire, parcels, wire.data), wire.dtype, op)
        else:
            slices = _slices(wire.data.size, list(world.nodes))
            own = self._reduce_slices(world, name, wire, slices, op)
            flat = self._share_slices(world, name, wire, slices, own)
        return from_wire(wire.kind, wire.dtype, wire.shape, flat, wire.like)

    def reduce_scatter(self, value: Any, op: str = "sum") -> Any:
        """This node's part, along the first dimension, of the ``op`` of ``value`` over all nodes.

        Args:
            value: array or tensor of equal shape on every node; the first dimension divides by the number of nodes.

        Raises:
            ValueError: as :meth:`all_reduce`, and when the first dimension does not divide.
        """
        world, wire = self._begin("reduce_scatter"), self._to_wire(value, "reduce_scatter")
        size = len(world.nodes)
        if not wire.is_array or not wire.shape:
            raise ValueError("reduce_scatter needs an array with at least one dimension")
        if wire.shape[0] % size:
            raise ValueError(
                f"reduce_scatter: the first dimension of {wire.describe()} does not divide by {size} nodes: pad it"
            )
        reduction.check_reduction(op, wire.dtype, "reduce_scatter")
        slices = _slices(wire.data.size, list(world.nodes))
        flat = self._reduce_slices(world, f"reduce_scatter({op})", wire, slices, op)
        return from_wire(wire.kind, wire.dtype, (wire.shape[0] // size, *wire.shape[1:]), flat, wire.like)

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all nodes in rank order, on every node. Shapes and types may differ; plain data may travel."""
        world, wire = self._begin("all_gather"), self._to_wire(value, "all_gather")
        parcels = self._exchange(world, "all_gather", dict.fromkeys(world.nodes, wire), any_value)
        gathered = []
        for node in world.nodes:
            if node == self._own:
                gathered.append(from_wire(wire.kind, wire.dtype, wire.shape, _copy(wire.data), wire.like))
            else:
                gathered.append(_value(parcels[node], wire.like))
        return gathered

    def broadcast(self, value: Any = None, src: int = 0) -> Any:
        """The value of rank ``src``, on every node; what the others pass only says the device for a tensor."""
        world = self._begin("broadcast")
        source, name = self._node_of(world, src, "broadcast"), f"broadcast(src={src})"
        others = [node for node in world.nodes if node != self._own]
        done = Wire("json", "", (), b"")
        if source == self._own:
            wire = self._to_wire(value, "broadcast")
            # Phase 1, everybody's word that it is here, keeps a fast source from running ahead without end.
            self._send_all(world, name, dict.fromkeys(others, wire), 0)
            self._receive(name, 1, others, any_value)
            return from_wire(wire.kind, wire.dtype, wire.shape, wire.data, wire.like)
        parcel = self._receive(name, 0, [source], any_value)[source]
        self._send_all(world, name, {source: done}, 1)
        return _value(parcel, value)

    def send(self, value: Any, dst: int) -> None:
        """Send ``value`` to rank ``dst``, which gets it with ``recv``. Returns at once while little is on its way."""
        world = self._in_cell("send")
        node, wire = self._node_of(world, dst, "send"), self._to_wire(value, "send")
        if node == self._own:
            raise ValueError(f"send: rank {dst} is this node itself")
        self._sent[node] = self._sent.get(node, 0) + 1
        header = self._header(world, MESSAGE, self._sent[node], 0, wire)
        gone: SimpleQueue[None] = SimpleQueue()
        self._transport.call_soon(lambda: self.inbox.post_message(node, header, _payload(wire), gone))
        wait_for(gone)
        if (error := self.inbox.hole(node)) is not None:
            raise error

    def recv(self, src: int) -> Any:
        """The next value that rank ``src`` has sent to this node, in order. Tensors arrive on the CPU."""
        world = self._in_cell("recv")
        node = self._node_of(world, src, "recv")
        if node == self._own:
            raise ValueError(f"recv: rank {src} is this node itself")
        number = self._received.get(node, 0) + 1
        parcel = self._wait(Wait(MESSAGE, number, 0, "message", (node,), any_value))[node]
        self._received[node] = number
        return _value(parcel, None)

    # ---- steps

    def _all_reduce_number(self, world: CellWorld, name: str, wire: Wire, op: str) -> int | float:
        if wire.dtype != "number":
            raise TypeError(f"all_reduce: a {type(wire.like).__name__} cannot be reduced: use an array or a number")
        reduction.check_reduction(op, "float64", "all_reduce")
        parcels = self._exchange(world, name, dict.fromkeys(world.nodes, wire), same_array(world, self._own, wire))
        numbers = [wire.like if node == self._own else _value(parcels[node], None) for node in world.nodes]
        return reduction.reduce_numbers(numbers, op)

    def _reduce_slices(
        self, world: CellWorld, name: str, wire: Wire, slices: "Mapping[str, slice]", op: str
    ) -> "NDArray[Any]":
        """Phase 0: everybody's part of this node's slice, reduced in rank order."""
        parts = {node: Wire(wire.kind, wire.dtype, wire.shape, wire.data[piece]) for node, piece in slices.items()}
        own = parts[self._own].data
        check = same_array(world, self._own, wire, own.nbytes)
        parcels = self._exchange(world, name, parts, check)
        return reduction.reduce_arrays(self._arrays(world, wire, parcels, own), wire.dtype, op)

    def _share_slices(
        self, world: CellWorld, name: str, wire: Wire, slices: "Mapping[str, slice]", own: "NDArray[Any]"
    ) -> "NDArray[Any]":
        """Phase 1: every node's reduced slice, put together."""
        import numpy

        part = Wire(wire.kind, wire.dtype, wire.shape, own)
        others = [node for node in world.nodes if node != self._own]
        self._send_all(world, name, dict.fromkeys(others, part), 1)
        whole: NDArray[Any] = numpy.empty_like(wire.data)
        whole[slices[self._own]] = own
        for node, parcel in self._receive(name, 1, others, same_array(world, self._own, wire)).items():
            piece = whole[slices[node]]
            if len(parcel.data) != piece.nbytes:
                raise ValueError(f"all_reduce: {node!r} sent {len(parcel.data)} bytes of {piece.nbytes}")
            piece[:] = numpy.frombuffer(parcel.data, dtype=wire.data.dtype)
        return whole

    def _arrays(
        self, world: CellWorld, wire: Wire, parcels: Mapping[str, Parcel], own: "NDArray[Any]"
    ) -> "list[NDArray[Any]]":
        """The parts of all nodes in rank order, as flat arrays."""
        import numpy

        return [
            own if node == self._own else numpy.frombuffer(parcels[node].data, dtype=carrier(wire.dtype))
            for node in world.nodes
        ]

    def _exchange(self, world: CellWorld, name: str, parts: Mapping[str, Wire], check: Check) -> dict[str, Parcel]:
        """Send each other node its part and wait for theirs."""
        others = [node for node in world.nodes if node != self._own]
        self._send_all(world, name, {node: parts[node] for node in others}, 0)
        return self._receive(name, 0, others, check)

    def _send_all(self, world: CellWorld, name: str, parts: Mapping[str, Wire], phase: int) -> None:
        outgoing = [
            (node, self._header(world, name, self._operation, phase, wire), _payload(wire))
            for node, wire in parts.items()
        ]

        def post() -> None:
            for node, header, payload in outgoing:
                self.inbox.outbox.post(node, header, payload)

        if outgoing:
            self._transport.call_soon(post)

    def _receive(self, name: str, phase: int, senders: list[str], check: Check) -> dict[str, Parcel]:
        if not senders:
            return {}

        named = same_operation(self._own, name, check)
        return self._wait(Wait(name, self._operation, phase, "collective", tuple(senders), named))

    def _wait(self, wait: Wait) -> dict[str, Parcel]:
        self._transport.call_soon(lambda: self.inbox.expect(wait))
        outcome = wait_for(wait.outcome)
        if isinstance(outcome, Exception):
            raise outcome
        parcels: dict[str, Parcel] = outcome
        return parcels

    # ---- checks

    def _in_cell(self, operation: str) -> CellWorld:
        if self._world is None:
            raise RuntimeError(f"{operation} works while a cell runs: use it in a %%on_all cell")
        if self._world.excluded:
            raise RuntimeError(f"{operation}: {self._world.excluded}")
        return self._world

    def _begin(self, operation: str) -> CellWorld:
        world = self._in_cell(operation)
        self._operation += 1
        return world

    def _to_wire(self, value: Any, operation: str) -> Wire:
        wire = to_wire(value, operation)
        if (size := len(_payload(wire))) > self._settings.limit:
            raise ValueError(f"{operation}: {size:,} bytes are over the limit of {self._settings.limit:,}: use parts")
        return wire

    @staticmethod
    def _node_of(world: CellWorld, rank: int, operation: str) -> str:
        for node, other in world.nodes.items():
            if other == rank:
                return node
        known = ", ".join(f"{other} ({node})" for node, other in world.nodes.items())
        raise ValueError(f"{operation}: no rank {rank!r} runs this cell; there are {known}")

    @staticmethod
    def _header(world: CellWorld, name: str, operation: int, phase: int, wire: Wire) -> CellFrame:
        return CellFrame(
            cell=world.cell, generation=world.generation, operation=operation, name=name, phase=phase,
            kind=wire.kind, dtype=wire.dtype, shape=list(wire.shape),
        )  # fmt: skip


def _value(parcel: Parcel, like: Any) -> Any:
    header = parcel.header
    return from_wire(header.kind, header.dtype, header.shape, parcel.data, like)


def _payload(wire: Wire) -> Payload:
    return as_bytes(wire.data) if wire.is_array else wire.data


def _copy(data: Any) -> Any:
    """``data`` for the caller, who may write to it while the original is still being sent."""
    return data if isinstance(data, bytes) else data.copy()


def _slices(count: int, nodes: list[str]) -> dict[str, slice]:
    """Cut ``count`` elements into one contiguous slice per node, sizes equal up to one element."""
    size = len(nodes)
    return {node: slice(count * index // size, count * (index + 1) // size) for index, node in enumerate(nodes)}
