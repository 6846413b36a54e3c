"""Ways to add up an array over nodes, each a function of the steps of one operation. All give every node the same bits.

Every part of the array has one owner that adds it up and whose bytes all take over, or (``direct``) everybody adds the
same numbers in the same order. ``direct``, ``star``, ``ring`` and ``slices`` add rank by rank, so they agree with each
other to the bit; ``tree`` and ``hierarchical`` add in another order, the same on all nodes.

| | steps | a node sends | for |
|---|---|---|---|
| ``direct`` | 1 | the array to each other node | small arrays, few nodes |
| ``star`` | 2 | rank 0 the result to each, the others the array | small arrays, more nodes |
| ``tree`` | 2 log2(nodes) | the array once or a few times | small arrays, many nodes |
| ``slices`` | 2 | about twice the array | large arrays |
| ``ring`` | 2 (nodes - 1) | about twice the array, to one node | large arrays, many nodes |
| ``hierarchical`` | 4 | about twice the array, between peers one per peer | several nodes share a peer |
"""

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from notebook_cluster.collectives import reduction
from notebook_cluster.collectives.steps import Steps
from notebook_cluster.collectives.values import WireValue, carrier
from notebook_cluster.memory import keep_freed

if TYPE_CHECKING:
    from numpy.typing import NDArray

Algorithm = Callable[[Steps, WireValue, str], "NDArray[Any]"]
"""(steps, this node's array, op) -> the reduced array, flat, in memory of its own. ``wire.data`` is only read, and not
needed any more when the function returns."""


def slices_of(count: int, parts: int) -> list[slice]:
    """Cut ``count`` elements into ``parts`` contiguous slices, sizes equal up to one element."""
    return [slice(count * index // parts, count * (index + 1) // parts) for index in range(parts)]


def blocks_of(piece: slice, size: int, count: int) -> list[slice]:
    """``piece`` in ``count`` blocks of ``size`` elements; the last ones may be shorter or empty."""
    edges = [min(piece.start + size * index, piece.stop) for index in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def direct(steps: Steps, wire: WireValue, op: str) -> "NDArray[Any]":
    """Everybody sends everybody the whole array and adds up all of them."""
    own = wire.data.copy()  # may still be on its way when the caller goes on
    steps.send_array(steps.others, 0, wire, own)
    found = steps.receive_arrays(steps.others, 0, wire, own.size)
    return reduction.reduce_arrays([found.get(node, own) for node in steps.nodes], wire.dtype, op)


def star(steps: Steps, wire: WireValue, op: str) -> "NDArray[Any]":
    """Everybody sends the first node its array; that one sends the result."""
    root, size = steps.nodes[0], wire.data.size
    if steps.own != root:
        steps.send_array([root], 0, wire, wire.data.copy())
        return steps.receive_arrays([root], 1, wire, size)[root]
    found = steps.receive_arrays(steps.others, 0, wire, size)
    result = reduction.reduce_arrays([found.get(node, wire.data) for node in steps.nodes], wire.dtype, op)
    steps.send_array(steps.others, 1, wire, result.copy())
    return result


def tree(steps: Steps, wire: WireValue, op: str) -> "NDArray[Any]":
    """Pairs add up, then pairs of pairs, up to the first node; the result goes back the same way."""
    index, count, size = steps.index, len(steps.nodes), wire.data.size
    sums = WireValue(wire.kind, reduction.wide(wire.dtype), wire.shape, None)
    total = reduction.widened(wire.data, wire.dtype)
    distance, level, below = 1, 0, []
    while distance < count and index % (2 * distance) == 0:
        if index + distance < count:
            other = steps.nodes[index + distance]
            total = reduction.combine([total, steps.receive_arrays([other], level, sums, size)[other]], op)
            below.append(other)
        distance, level = 2 * distance, level + 1
    if index == 0:
        if total is wire.data:
            total = total.copy()
        result = reduction.finished(total, wire.dtype, op, count)
    else:
        above = steps.nodes[index - distance]
        steps.send_array([above], level, sums, total.copy() if total is wire.data else total)
        result = steps.receive_arrays([above], _DOWN, wire, size)[above]
    if below:
        steps.send_array(below, _DOWN, wire, result.copy())
    return result


_DOWN = 1 << 20
"""Phase of a tree's way back, after all levels of the way up."""


def ring(steps: Steps, wire: WireValue, op: str) -> "NDArray[Any]":
    """Sums go from the first node to the last, each adding its own; the result goes on from there, block by block."""
    import numpy

    index, last, size = steps.index, len(steps.nodes) - 1, wire.data.size
    after, before = steps.nodes[(index + 1) % (last + 1)], steps.nodes[index - 1]
    sums = WireValue(wire.kind, reduction.wide(wire.dtype), wire.shape, None)
    step = max(1, steps.settings.ring_block // numpy.dtype(carrier(wire.dtype)).itemsize)
    blocks = blocks_of(slice(0, size), step, -(-size // step) or 1)
    result: NDArray[Any] = numpy.empty_like(wire.data)
    for number, block in enumerate(blocks):
        total = reduction.widened(wire.data[block], wire.dtype)
        if index:
            found = steps.receive_arrays([before], number, sums, total.size)[before]
            total = reduction.combine([found, total], op)
        if index < last:
            steps.send_array([after], number, sums, total.copy() if not index else total)
        else:
            result[block] = reduction.finished(total, wire.dtype, op, last + 1)
            steps.send_array([after], len(blocks) + number, wire, result[block].copy())
    if index < last:
        for number, block in enumerate(blocks, start=len(blocks)):
            found = steps.receive_arrays([before], number, wire, block.stop - block.start)[before]
            result[block] = found
            if index + 1 < last:
                steps.send_array([after], number, wire, found)
    return result


def reduce_scatter_slices(steps: Steps, wire: WireValue, op: str, result: "NDArray[Any]", gather: bool) -> None:
    """Slice k of the array goes to node k, which adds it up; with ``gather`` it sends everybody the result.

    In blocks, so that one is added up while the next is on its way. A block is sent when one before it is added up, so
    that few of them take memory at a time however large the array is: memory that is used again is faster by a third.
    ``result`` has the size of the whole array with ``gather``, else of this node's slice. A large array is sent from
    where it is, a result too, and a block that comes in one frame is added up where it came: each copy that is not made
    is a tenth of the time between nodes of one peer. ``result`` may be the array itself: a node's result of a block
    comes when it has our part of that block.
    """
    nodes, own, dtype = steps.nodes, steps.index, wire.data.dtype
    pieces = slices_of(wire.data.size, len(nodes))
    longest = max(piece.stop - piece.start for piece in pieces)
    size = max(1, min(longest, steps.settings.slice_block // dtype.itemsize))
    count = max(1, -(-longest // size))
    blocks = [blocks_of(piece, size, count) for piece in pieces]
    mine, base = blocks[own], pieces[own].start
    offset = 0 if gather else base
    lent = wire.data.nbytes >= steps.settings.lent_bytes
    if lent:
        keep_freed()
    ahead = max(1, steps.settings.ahead_bytes // (size * dtype.itemsize * len(nodes)))
    _place_blocks(steps, mine, size, ahead, dtype)
    if gather:
        for number in range(count):
            for node in steps.others:
                steps.place(node, _out(number), result[blocks[nodes.index(node)][number]])
    source = wire.data if lent else steps.scratch.take("sent", wire.data.nbytes).view(dtype)
    for number in range(min(ahead, count)):
        _send_slices(steps, wire, blocks, number, source)
    reduced = None
    if gather and not lent:
        reduced = steps.scratch.take("reduced", (mine[-1].stop - base) * dtype.itemsize).view(dtype)
    for number, block in enumerate(mine):
        found = steps.receive_arrays(steps.others, _in(number), wire, block.stop - block.start)
        parts = [wire.data[block] if node == steps.own else found[node] for node in nodes]
        outs = [result[block.start - offset : block.stop - offset]]
        if reduced is not None:
            outs.append(reduced[block.start - base : block.stop - base])
        reduction.reduce_into(outs, parts, wire.dtype, op)
        del found, parts  # the memory of these frames is for the next ones
        if number + ahead < count:
            _send_slices(steps, wire, blocks, number + ahead, source)
        if gather:
            steps.send_array(steps.others, _out(number), wire, outs[-1], lent=lent and steps.out is not None)
            _take_over(steps, wire, blocks, number - 1, result)
    if gather:
        _take_over(steps, wire, blocks, count - 1, result)
    if lent:
        steps.settle(_out(count - 1) + 1)
    elif not gather:
        steps.scratch.forget()  # the others may not have read all of it


def _in(number: int) -> int:
    """Phase of block ``number`` on its way to its owner. Phases count in the order in which they are waited for: the
    block after is added up before the results of this one are taken over."""
    return 2 * number - 1 if number else 0


def _out(number: int) -> int:
    """Phase of the results of block ``number``."""
    return 2 * number + 2


def _place_blocks(steps: Steps, mine: list[slice], size: int, ahead: int, dtype: Any) -> None:
    """Memory for what the others send of this node's slice, where it does not stay in the frame in which it comes.

    Block k takes the place of block k - 2 ``ahead``: a node sends its block k when it has our block k - ``ahead``,
    which we send when block k - 2 ``ahead`` is added up.
    """
    slots = min(len(mine), 2 * ahead)
    received = steps.scratch.take("received", slots * size * len(steps.others) * dtype.itemsize).view(dtype)
    for place, node in enumerate(steps.others):
        for number, block in enumerate(mine):
            start = (place * slots + number % slots) * size
            steps.place(node, _in(number), received[start : start + block.stop - block.start], may_stay=True)


def _send_slices(
    steps: Steps, wire: WireValue, blocks: "list[list[slice]]", number: int, source: "NDArray[Any]"
) -> None:
    """Everybody gets block ``number`` of its slice of this node's array, out of ``source``: the array itself, or memory
    that the caller does not know."""
    parts = {}
    for index, node in enumerate(steps.nodes):
        if node != steps.own:
            block = blocks[index][number]
            if source is not wire.data:
                source[block] = wire.data[block]
            parts[node] = WireValue(wire.kind, wire.dtype, wire.shape, source[block])
    steps.send(parts, _in(number), lent=source is wire.data)


def _take_over(steps: Steps, wire: WireValue, blocks: "list[list[slice]]", number: int, result: "NDArray[Any]") -> None:
    """Block ``number`` of everybody's result, into ``result`` where it did not come there by itself."""
    if number < 0:
        return
    sizes = {node: blocks[index][number] for index, node in enumerate(steps.nodes) if node != steps.own}
    for length in {block.stop - block.start for block in sizes.values()}:
        senders = [node for node, block in sizes.items() if block.stop - block.start == length]
        for node, found in steps.receive_arrays(senders, _out(number), wire, length).items():
            place = result[sizes[node]]
            if length and found.ctypes.data != place.ctypes.data:
                place[:] = found


def slices(steps: Steps, wire: WireValue, op: str) -> "NDArray[Any]":
    """Slice k of the array goes to node k, which adds it up and sends everybody the result."""
    result = steps.result(wire.data.size, wire.data.dtype)
    reduce_scatter_slices(steps, wire, op, result, gather=True)
    return result
