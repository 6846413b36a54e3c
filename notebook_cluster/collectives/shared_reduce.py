"""Adding up an array over nodes of one peer, through memory that they share: each number is copied in and out once.

The first operation of a cell that uses it sets the memory up: everybody makes a file and says how large it is
(phase 0), opens the others' and says whether that worked (phase 1). Where it did not, on whichever node, all go over
sockets.
After that nothing is sent while nobody has to wait long: see :mod:`.shared_group`.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from notebook_cluster.collectives import reduction
from notebook_cluster.collectives.algorithms import blocks_of, slices_of
from notebook_cluster.collectives.expectations import same_description
from notebook_cluster.collectives.shared_group import SharedGroup
from notebook_cluster.collectives.steps import Steps
from notebook_cluster.collectives.values import WireValue
from notebook_cluster.mesh.shared_memory import WHERES, SharedFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

SMALL_CAPACITY = 64 * 1024
"""Bytes of each node that are set up for operations on little or nothing."""
FIRST_PHASE = 2
"""The first phase after those that set the memory up."""
_LAST_PHASE = 1 << 23
_DESCRIPTION = 64


class SharedMemory:
    """What this node shares in one cell with ``nodes`` (of its peer, in rank order)."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes = tuple(nodes)
        self.group: SharedGroup | None = None
        self.refused = False
        self.may_be_read = False
        """A broadcast has passed, or an error, which a node leaves without the others: they may be in the operation
        before it."""
        self._files: list[SharedFile] = []

    def ready(self, size: int) -> bool:
        """Whether ``size`` bytes of each node have room in what is set up."""
        return self.group is not None and size <= self.group.capacity

    def set_up(self, steps: Steps, text: str, capacity: int) -> bool:
        """Make the group anew with ``capacity`` bytes (a multiple of a page) in a half; False, on all nodes alike, when
        one of them cannot. Then it is not tried again in this cell.

        Raises:
            ValueError: another node does not have what ``text`` describes.
        """
        self.close()
        text = text[:_DESCRIPTION]
        size, number = SharedGroup.file_bytes(capacity, len(self.nodes)), steps.world.cell << 24 | steps.number
        path = steps.transport.ipc_path(steps.own)
        own = SharedFile.make(path, number, size) if path else None
        try:
            offers = self._ask_all(steps, text, 0, {"where": own.where, "size": size} if own is not None else {})
            files = {} if own is None else self._attach(steps, offers, number, size) | {steps.own: own}
            found = self._ask_all(steps, text, 1, {"open": len(files) == len(self.nodes)})
        finally:
            if own is not None:
                own.hide()
        if len(files) == len(self.nodes) and all(answer.get("open") is True for answer in found.values()):
            self._files = [files[node] for node in self.nodes]
            self.group = SharedGroup(self._files, self.nodes.index(steps.own), capacity)
        else:
            self.refused = True
        return not self.refused

    def close(self) -> None:
        """Give the memory back."""
        self.group, self._files = None, []

    def break_off(self) -> None:
        """This node left an operation in the middle: the others must not take what it wrote for finished."""
        if self.group is not None:
            self.group.give_up()
        self.close()
        self.refused = True

    def _attach(self, steps: Steps, offers: dict[str, Any], number: int, size: int) -> dict[str, SharedFile]:
        files = {}
        for node, offer in offers.items():
            path = steps.transport.ipc_path(node)
            if not path or offer.get("where") not in WHERES or offer.get("size") != size:
                continue
            try:
                files[node] = SharedFile.attach(path, number, offer["where"], size)
            except OSError:
                continue  # all go over sockets then
        return files

    def _ask_all(self, steps: Steps, text: str, phase: int, answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Tell the others ``answer`` and hear theirs."""
        others = [node for node in self.nodes if node != steps.own]
        steps.send(dict.fromkeys(others, WireValue("json", text, (), json.dumps(answer).encode())), phase)
        messages = steps.receive(others, phase, same_description(steps.world, steps.own, text))
        return {node: _plain(bytes(message.data)) for node, message in messages.items()}


class SharedSteps:
    """One operation of this node in shared memory.

    Args:
        text: describes what this node has; all must have the same.
    """

    def __init__(self, steps: Steps, memory: SharedMemory, text: str) -> None:
        assert memory.group is not None
        steps.begun = True
        self.steps = steps
        self.memory = memory
        self.group = memory.group
        self.text = text[:_DESCRIPTION]
        self.nodes = memory.nodes
        self.own = memory.nodes.index(steps.own)
        header = steps.header(WireValue("json", self.text, (), b""), 0)
        self._header = header

    def meet(self) -> None:
        """Wait until everybody has come here, before anything is put in."""
        self.reach(FIRST_PHASE - 1)
        self.wait(FIRST_PHASE - 1)

    def begin(self) -> None:
        """What this node puts in first is there; wait for everybody, who must do the same.

        Raises:
            ValueError: somebody does not.
        """
        number, said = self.steps.number, f"{self.steps.name} {self.text}"
        self.group.describe(number, said)
        self.reach(FIRST_PHASE)
        self.wait(FIRST_PHASE)
        sent = self.steps.receiver.sent
        if sent.holding:
            self.steps.transport.call_soon(lambda: sent.forget_before(self.nodes, number))
        if self.group.unlike(number, said):
            # The others see it too: over the mesh everybody gets the error that names both sides.
            others = [node for node in self.nodes if node != self.steps.own]
            self.steps.send(dict.fromkeys(others, WireValue("json", self.text, (), b"")), _LAST_PHASE)
            check = same_description(self.steps.world, self.steps.own, self.text)
            self.steps.receive(others, _LAST_PHASE, check)
            raise ValueError(f"{self.steps.name}: the nodes are in different operations: run the cell again")

    def reach(self, phase: int) -> None:
        """This node has come to ``phase``."""
        self.group.reach(self.steps.number, phase)
        self.steps.receiver.sent.reach(replace(self._header, phase=phase))

    def wait(self, phase: int) -> None:
        """Wait until everybody has come to ``phase``.

        Raises:
            PeerLost: a node of the cell raised, ended or was lost.
        """
        missing = self.group.missing(self.steps.number, phase, self.steps.settings.shared_patience)
        if missing:
            check = same_description(self.steps.world, self.steps.own, self.text)
            self.steps.receive([self.nodes[index] for index in missing], phase, check, ask=True)


def barrier(steps: SharedSteps) -> None:
    """Return when everybody has come here."""
    steps.begin()


def direct(steps: SharedSteps, wire: WireValue, op: str) -> "NDArray[Any]":
    """Everybody adds up what everybody has put in."""
    group, turn, dtype, size = steps.group, steps.steps.number, wire.data.dtype, wire.data.size
    group.put_in(steps.own, turn, dtype)[:size] = wire.data
    steps.begin()
    parts = [
        wire.data if node == steps.own else group.put_in(node, turn, dtype)[:size] for node in range(len(steps.nodes))
    ]
    result = steps.steps.result(size, dtype)
    reduction.reduce_into([result], parts, wire.dtype, op)
    return result


def block_elements(size: int, nodes: int, block_bytes: int, itemsize: int) -> int:
    """Elements of each node's slice that are in shared memory at a time, of an array of ``size`` elements."""
    return max(1, min(-(-size // nodes), block_bytes // nodes // itemsize))


def slices(steps: SharedSteps, wire: WireValue, op: str, *, gather: bool = True) -> "NDArray[Any]":
    """Slice k of the array is added up by node k; with ``gather`` everybody gets all of them, else each its own.

    In blocks that alternate between two halves. A node writes block b + 2 over block b when all have come so far that
    nobody reads it any more: what was put in is read before :func:`_out` of its block, what was given out before
    :func:`_in` of the block after the next one.
    """
    group, own, count, dtype = steps.group, steps.own, len(steps.nodes), wire.data.dtype
    data, turn = wire.data, steps.steps.number
    size = block_elements(data.size, count, min(steps.steps.settings.shared_block, group.capacity), dtype.itemsize)
    pieces = slices_of(data.size, count)
    number = max(1, -(-max(piece.stop - piece.start for piece in pieces) // size))
    blocks = [blocks_of(piece, size, number) for piece in pieces]
    mine = pieces[own]
    result = steps.steps.result(data.size if gather else mine.stop - mine.start, dtype)
    base = 0 if gather else mine.start

    def take_over(block: int) -> None:
        steps.wait(_out(block))
        for node in range(count):
            if gather and node != own:
                place = result[blocks[node][block]]
                place[:] = group.given_out(node, turn + block, dtype)[: place.size]

    for block in range(number):
        room = group.put_in(own, turn + block, dtype)
        for node in range(count):
            if node != own:
                part = data[blocks[node][block]]
                room[node * size : node * size + part.size] = part
        if block:
            steps.reach(_in(block))
            take_over(block - 1)
            steps.wait(_in(block))
        else:
            steps.begin()
        piece = blocks[own][block]
        length = piece.stop - piece.start
        parts = [
            data[piece] if node == own else group.put_in(node, turn + block, dtype)[own * size : own * size + length]
            for node in range(count)
        ]
        outs = [result[piece.start - base : piece.stop - base]]
        if gather:
            outs.append(group.given_out(own, turn + block, dtype)[:length])
        reduction.reduce_into(outs, parts, wire.dtype, op)
        steps.reach(_out(block))
    take_over(number - 1)
    return result


def _in(block: int) -> int:
    """Phase in which everybody has put ``block`` in."""
    return FIRST_PHASE + 2 * block


def _out(block: int) -> int:
    """Phase in which everybody has given out its part of the sum of ``block``."""
    return FIRST_PHASE + 2 * block + 1


def _plain(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
