"""The collectives as people call them. They run on the main thread and sleep on a queue while the I/O thread works.

Every operation has a number, counted alike on every node of the cell, so frames of two operations never mix.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import psutil

from notebook_cluster.collectives import algorithms, hierarchical, reduction, shared_reduce
from notebook_cluster.collectives.chunked_messages import (
    ACKNOWLEDGE,
    MESSAGE,
    WANT,
    CellWorld,
    ChunkedMessage,
    CollectiveSettings,
    Transport,
)
from notebook_cluster.collectives.expectations import PeerLost, Wait, any_value, same_array
from notebook_cluster.collectives.hierarchical import choose
from notebook_cluster.collectives.receiver import CellReceiver
from notebook_cluster.collectives.shared_reduce import FIRST_PHASE, SMALL_CAPACITY, SharedMemory, SharedSteps
from notebook_cluster.collectives.steps import Steps, payload_of, wait_for
from notebook_cluster.collectives.values import ResultBuffer, WireValue, from_wire, to_wire
from notebook_cluster.memory import Scratch

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ALGORITHMS: dict[str, algorithms.Algorithm] = {
    "direct": algorithms.direct,
    "star": algorithms.star,
    "tree": algorithms.tree,
    "slices": algorithms.slices,
    "ring": algorithms.ring,
    "hierarchical": hierarchical.hierarchical,
}
_BARRIERS_BEFORE_SHARING = 3
"""Operations of a cell after which a barrier is worth setting shared memory up."""


class Collectives:
    """The collectives of one node. ``receiver`` is fed by the I/O thread (frames, CellDone, ticks), all else here is
    called by the one thread that runs the cell."""

    def __init__(self, transport: Transport, settings: CollectiveSettings | None = None) -> None:
        self._transport = transport
        self._own = transport.name
        self._settings = settings or CollectiveSettings()
        self.receiver = CellReceiver(transport, self._settings)
        self._world: CellWorld | None = None
        self._operation = 0
        self.on_operation: Callable[[], None] = lambda: None
        """Called when an operation of all nodes of the cell begins."""
        share = int(psutil.virtual_memory().total * self._settings.scratch_share)
        self._scratch = Scratch(min(self._settings.scratch_bytes, share))
        self._memory = SharedMemory(())
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}

    def begin_cell(self, world: CellWorld) -> None:
        """A cell starts with these nodes; operations are counted from 1 again."""
        self._world = world
        self._operation = 0
        self._memory.close()
        self._memory = SharedMemory(list(world.nodes))
        self._memory.refused = not self._settings.shared_memory
        self._sent, self._received = {}, {}
        # Frames of the cell, and its first operation, wake the thread; most cells have none.
        self._transport.call_soon(lambda: self.receiver.begin(world), wake=False)

    def end_cell(self) -> None:
        """The cell is over on this node. What others may still ask for is kept until the next cell."""
        self._world = None
        self._memory.close()
        self._scratch.forget()

    @property
    def operations(self) -> int:
        """How many operations of the cell have begun here (any thread)."""
        return self._operation

    # ---- operations

    @property
    def alone(self) -> bool:
        """Nobody is there to exchange with: the cell is replayed here, or this node joined while it was running."""
        return self._world is not None and bool(self._world.excluded)

    def barrier(self, name: str = "barrier") -> None:
        """Return when every node of the cell has called it, with this ``name``."""
        if self._world is not None and self._world.replay:
            return  # everybody passed it when the cell ran first
        wire = WireValue("json", "", (), b"")
        # What frames of another kind are called is free for people's use all the same.
        with self._operate(f"barrier {name}" if name in (WANT, ACKNOWLEDGE, MESSAGE) else name) as steps:
            if self._memory.group is not None or self._operation > _BARRIERS_BEFORE_SHARING:
                shared = self._shared(steps, "", 0)
                if shared is not None:
                    shared_reduce.barrier(shared)
                    return
            steps.exchange(dict.fromkeys(steps.others, wire), any_value)

    def all_reduce(self, value: Any, op: str = "sum", algorithm: str = "auto", out: Any = None) -> Any:
        """The ``op`` of ``value`` over all nodes, the same bits on every node.

        Args:
            value: array or tensor of equal shape and dtype on every node, or a number.
            op: ``sum``, ``mean``, ``max`` or ``min``.
            algorithm: how, equal on every node (:mod:`.algorithms`); ``auto`` chooses by size, nodes and peers.
            out: where the result goes, an array or tensor of the library, dtype and shape of ``value``; may be
                ``value`` itself. Left in the middle (Stop, PeerLost), it has parts of both. Not every node needs one.

        Returns:
            A new array of the same library, dtype and device, or ``out``; a number for numbers. Half precision is
            summed in float32. The result has no gradient.

        Raises:
            ValueError: shapes, dtypes, operations or algorithms differ between nodes, ``op`` is not defined for the
                dtype, or ``out`` is another kind of array or read-only.
            TypeError: ``out`` is no array that can be written to.
            PeerLost: a node of the cell raised, ended or was lost.
        """
        settings = self._settings
        with self._operate(f"all_reduce({op})" if algorithm == "auto" else f"all_reduce({op}, {algorithm})") as steps:
            wire = self._to_wire(value, "all_reduce", copy=False)
            output = ResultBuffer(out, wire, "all_reduce") if out is not None else None
            size, shared = wire.data.nbytes if wire.is_array else 0, settings.shared_memory
            chosen = choose(algorithm, size, steps.nodes, steps.world.peers, settings.small_bytes, shared)
            if not wire.is_array:
                return self._all_reduce_number(steps, wire, op)
            reduction.check_reduction(op, wire.dtype, "all_reduce")
            steps.out = output.memory if output is not None else None
            flat = self._reduce(steps, wire, op, chosen)
        return (
            output.take(flat) if output is not None else from_wire(wire.kind, wire.dtype, wire.shape, flat, wire.like)
        )

    def reduce_scatter(self, value: Any, op: str = "sum") -> Any:
        """This node's part, along the first dimension, of the ``op`` of ``value`` over all nodes.

        Args:
            value: array or tensor of equal shape on every node; the first dimension divides by the number of nodes.

        Raises:
            ValueError: as :meth:`all_reduce`, and when the first dimension does not divide.
        """
        with self._operate(f"reduce_scatter({op})") as steps:
            wire, size = self._to_wire(value, "reduce_scatter", copy=False), len(steps.nodes)
            if not wire.is_array or not wire.shape:
                raise ValueError("reduce_scatter needs an array with at least one dimension")
            if wire.shape[0] % size:
                raise ValueError(
                    f"reduce_scatter: the first dimension of {wire.describe()} does not divide by {size} nodes: pad it"
                )
            reduction.check_reduction(op, wire.dtype, "reduce_scatter")
            flat = self._scatter(steps, wire, op)
        return from_wire(wire.kind, wire.dtype, (wire.shape[0] // size, *wire.shape[1:]), flat, wire.like)

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all nodes in rank order, on every node. Shapes and types may differ; plain data may travel."""
        with self._operate("all_gather") as steps:
            wire = self._to_wire(value, "all_gather")
            messages = steps.exchange(dict.fromkeys(steps.others, wire), any_value)
        gathered = []
        for node in steps.nodes:
            if node == self._own:
                gathered.append(from_wire(wire.kind, wire.dtype, wire.shape, _copy(wire.data), wire.like))
            else:
                gathered.append(_value(messages[node], wire.like))
        return gathered

    def broadcast(self, value: Any = None, src: int = 0) -> Any:
        """The value of rank ``src``, on every node; what the others pass only says the device for a tensor."""
        with self._operate(f"broadcast(src={src})") as steps:
            self._memory.may_be_read = True
            source = self._node_of(steps.world, src, "broadcast")
            if source == self._own:
                wire = self._to_wire(value, "broadcast")
                # Phase 1, everybody's word that it is here, keeps a fast source from running ahead without end.
                steps.send(dict.fromkeys(steps.others, wire), 0)
                steps.receive(steps.others, 1, any_value)
                return from_wire(wire.kind, wire.dtype, wire.shape, wire.data, wire.like)
            try:
                message = steps.receive([source], 0, any_value)[source]
            except ValueError as error:
                if not isinstance(error, PeerLost):
                    steps.refuse(error)  # nothing was sent here, which the source of the others waits for
                raise
            steps.send({source: WireValue("json", "", (), b"")}, 1)
        return _value(message, value)

    def send(self, value: Any, dst: int) -> None:
        """Send ``value`` to rank ``dst``, which gets it with ``recv``. Returns at once while little is on its way."""
        world = self._in_cell("send")
        node, wire = self._node_of(world, dst, "send"), self._to_wire(value, "send")
        if node == self._own:
            raise ValueError(f"send: rank {dst} is this node itself")
        self._sent[node] = number = self._sent.get(node, 0) + 1
        header = self._steps(world, MESSAGE, number).header(wire, 0)
        gone: SimpleQueue[None] = SimpleQueue()
        self._transport.call_soon(lambda: self.receiver.post_message(node, header, payload_of(wire), gone))
        wait_for(gone)
        if (error := self.receiver.hole(node)) is not None:
            raise error

    def recv(self, src: int) -> Any:
        """The next value that rank ``src`` has sent to this node, in order. Tensors arrive on the CPU."""
        world = self._in_cell("recv")
        node = self._node_of(world, src, "recv")
        if node == self._own:
            raise ValueError(f"recv: rank {src} is this node itself")
        number = self._received.get(node, 0) + 1
        wait = Wait(MESSAGE, number, 0, "message", (node,), any_value)
        message = self._steps(world, MESSAGE, number).wait(wait)[node]
        self._received[node] = number
        return _value(message, None)

    # ---- how

    def _all_reduce_number(self, steps: Steps, wire: WireValue, op: str) -> int | float:
        if wire.dtype != "number":
            raise TypeError(f"all_reduce: a {type(wire.like).__name__} cannot be reduced: use an array or a number")
        reduction.check_reduction(op, "float64", "all_reduce")
        messages = steps.exchange(dict.fromkeys(steps.others, wire), same_array(steps.world, self._own, wire))
        numbers = [wire.like if node == self._own else _value(messages[node], None) for node in steps.nodes]
        return reduction.reduce_numbers(numbers, op)

    def _reduce(self, steps: Steps, wire: WireValue, op: str, chosen: str) -> "NDArray[Any]":
        if not steps.others:
            return reduction.reduce_arrays([wire.data], wire.dtype, op)
        if chosen == "shared":
            shared = self._shared(steps, wire.describe(), wire.data.nbytes)
            if shared is not None:
                small = wire.data.nbytes <= self._settings.shared_direct // (len(steps.nodes) - 1)
                return (shared_reduce.direct if small else shared_reduce.slices)(shared, wire, op)
            small = wire.data.nbytes <= self._settings.small_bytes
            chosen = "direct" if small else "slices"
        return _ALGORITHMS[chosen](steps, wire, op)

    def _scatter(self, steps: Steps, wire: WireValue, op: str) -> "NDArray[Any]":
        shared = self._shared(steps, wire.describe(), wire.data.nbytes)
        if shared is not None:
            return shared_reduce.slices(shared, wire, op, gather=False)
        flat = steps.scratch.result(wire.data.size // len(steps.nodes), wire.data.dtype)
        algorithms.reduce_scatter_slices(steps, wire, op, flat, gather=False)
        return flat

    def _shared(self, steps: Steps, text: str, size: int) -> SharedSteps | None:
        """The operation in shared memory, which is set up when ``size`` bytes of each node have no room in what there
        is; None where that does not work. The same on all nodes."""
        memory, settings, peers = self._memory, self._settings, set(steps.world.peers.values())
        if memory.refused or len(steps.nodes) < 2 or len(peers) != 1 or len(steps.world.peers) != len(steps.nodes):
            return None
        size = min(size, settings.shared_block)
        is_set_up = memory.ready(size)
        if not is_set_up:
            capacity = SMALL_CAPACITY if size <= SMALL_CAPACITY else settings.shared_block
            if not memory.set_up(steps, text, capacity):
                steps.base = FIRST_PHASE
                return None
        shared = SharedSteps(steps, memory, text)
        if memory.may_be_read and is_set_up:
            shared.meet()
        memory.may_be_read = False
        return shared

    @contextmanager
    def _operate(self, name: str) -> Iterator[Steps]:
        """One operation. Left with anything but a refusal of what nodes have, it can never be finished: others may
        still read what was sent, and nobody may take what is in shared memory for finished. Of an error before
        anything was sent the others are told, and raise it too: where all catch it, all go on."""
        world = self._in_cell(name.partition("(")[0])
        self._operation += 1
        self.on_operation()
        steps = self._steps(world, name, self._operation)
        try:
            yield steps
        except BaseException as error:
            self._scratch.forget()
            before = not steps.begun and isinstance(error, Exception)
            refused = isinstance(error, (ValueError, TypeError)) and not isinstance(error, PeerLost) and not before
            if before:
                steps.refuse(error)
            steps.close_out()
            self._memory.may_be_read = True
            if not refused:
                self._memory.break_off()
            # A traceback is kept until the next one, and an error that a step was handed is in a cycle with that step's
            # frame: what our steps had in hand would stay mapped so long.
            traceback.clear_frames(error.__traceback__)
            if not refused:  # of a refusal the others have to hear
                steps.withdraw()
            raise
        finally:
            self.receiver.places.clear()

    def _steps(self, world: CellWorld, name: str, number: int) -> Steps:
        return Steps(self._transport, self.receiver, self._settings, self._scratch, world, number, name)

    # ---- checks

    def names(self, operation: str) -> list[str]:
        """The nodes of the running cell in rank order, for ``operation``, which errors name."""
        nodes = self._in_cell(operation).nodes
        return sorted(nodes, key=nodes.__getitem__)

    def _in_cell(self, operation: str) -> CellWorld:
        if self._world is None:
            raise RuntimeError(f"{operation} works while a cell runs: use it in a %%on_all cell")
        if self._world.excluded:
            raise RuntimeError(f"{operation}: {self._world.excluded}")
        return self._world

    def _to_wire(self, value: Any, operation: str, copy: bool = True) -> WireValue:
        wire = to_wire(value, operation, copy=copy)
        if (size := len(payload_of(wire))) > self._settings.limit:
            raise ValueError(f"{operation}: {size:,} bytes are over the limit of {self._settings.limit:,}: use parts")
        return wire

    @staticmethod
    def _node_of(world: CellWorld, rank: int, operation: str) -> str:
        for node, other in world.nodes.items():
            if other == rank:
                return node
        known = ", ".join(f"{other} ({node})" for node, other in world.nodes.items())
        raise ValueError(f"{operation}: no rank {rank!r} runs this cell; there are {known}")


def _value(message: ChunkedMessage, like: Any) -> Any:
    header = message.header
    return from_wire(header.kind, header.dtype, header.shape, message.data, like)


def _copy(data: Any) -> Any:
    """``data`` for the caller, who may write to it while the original is still being sent."""
    return data if isinstance(data, bytes) else data.copy()
