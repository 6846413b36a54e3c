"""Nodes of one peer that share memory in a cell: who has come how far, and where everybody's numbers lie.

Each node has a :class:`~notebook_cluster.mesh.shared_memory.SharedFile` that the others map: one page with how far it
has come, two halves for what it puts in, two smaller ones for what it gives out. A node that waits looks at the others'
pages for a moment, then asks them over the mesh and sleeps: a short wait costs no other thread anything, and a long
one no processor.
"""

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from notebook_cluster.mesh.shared_memory import SharedFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE = 4096
_PHASE_BITS = 24
_BROKEN = 1 << 63
"""In place of a position: the node left an operation in the middle and comes no further."""
_DESCRIPTIONS = 64
"""Offset of the two descriptions of operations in the first page."""
_DESCRIPTION_BYTES = 32
_LOOKS, _YIELDS = 50, 300
"""A waiting node looks so often without a pause, then so often with a yield between two looks, all together less than a
millisecond where nobody else wants the processor; then it sleeps between them."""
_SHORTEST_SLEEP, _LONGEST_SLEEP = 10e-6, 500e-6

_yield = getattr(os, "sched_yield", lambda: time.sleep(0))
_order = threading.Lock()


def _fence() -> None:
    """What was written before is seen before what is written after, and the same for reads, on every processor: a
    release followed by an acquire is not passed by anything."""
    with _order:
        pass
    with _order:
        pass


class SharedGroup:
    """The files of all nodes of the group, in rank order.

    Args:
        files: one per node; ``own`` is the index of this node's.
        capacity: bytes of one half.
    """

    def __init__(self, files: Sequence[SharedFile], own: int, capacity: int) -> None:
        import numpy

        self.own = own
        self.capacity = capacity
        given_out = _out_bytes(capacity, len(files))
        self._positions = [memoryview(file.data)[:8].cast("Q") for file in files]
        self._descriptions = [memoryview(file.data)[_DESCRIPTIONS : _DESCRIPTIONS + 64] for file in files]
        places = [(capacity, PAGE), (capacity, PAGE + capacity)]
        places += [(given_out, PAGE + 2 * capacity), (given_out, PAGE + 2 * capacity + given_out)]
        self._halves: list[list[NDArray[Any]]] = [
            [numpy.frombuffer(file.data, numpy.uint8, size, start) for size, start in places] for file in files
        ]

    @staticmethod
    def file_bytes(capacity: int, nodes: int) -> int:
        """Size of a file whose halves have ``capacity`` bytes (a multiple of PAGE), for so many nodes."""
        return PAGE + 2 * capacity + 2 * _out_bytes(capacity, nodes)

    def put_in(self, node: int, turn: int, dtype: Any) -> "NDArray[Any]":
        """What ``node`` puts in at ``turn``, as an array of ``dtype`` over a half; even and odd turns alternate."""
        return self._halves[node][turn % 2].view(dtype)

    def given_out(self, node: int, turn: int, dtype: Any) -> "NDArray[Any]":
        """What ``node`` gives out at ``turn``; has room for ``capacity`` / number of nodes."""
        return self._halves[node][2 + turn % 2].view(dtype)

    def describe(self, operation: int, text: str) -> None:
        """What this node is going to do in ``operation``; written before :meth:`reach`."""
        start = operation % 2 * _DESCRIPTION_BYTES
        self._descriptions[self.own][start : start + _DESCRIPTION_BYTES] = _digest(operation, text)

    def unlike(self, operation: int, text: str) -> bool:
        """Whether a node is going to do something else in ``operation``; asked when all have reached it."""
        start, wanted = operation % 2 * _DESCRIPTION_BYTES, _digest(operation, text)
        return any(bytes(page[start : start + _DESCRIPTION_BYTES]) != wanted for page in self._descriptions)

    def reach(self, operation: int, phase: int) -> None:
        """This node has come to ``phase`` of ``operation``: what it wrote before is there for the others."""
        _fence()
        self._positions[self.own][0] = operation << _PHASE_BITS | phase
        _fence()

    def give_up(self) -> None:
        """This node left an operation in the middle."""
        self._positions[self.own][0] = _BROKEN

    def missing(self, operation: int, phase: int, patience: float) -> list[int]:
        """The nodes that have not come to ``phase`` of ``operation`` after ``patience`` seconds; empty at once when
        all have."""
        wanted, looks, pause = operation << _PHASE_BITS | phase, 0, _SHORTEST_SLEEP
        waiting = [index for index in range(len(self._positions)) if index != self.own]
        until = 0.0
        while True:
            waiting = [index for index in waiting if not wanted <= self._positions[index][0] < _BROKEN]
            if not waiting:
                _fence()
                return waiting
            looks += 1
            if looks < _LOOKS:
                continue
            if looks < _LOOKS + _YIELDS:
                _yield()
                continue
            now = time.perf_counter()
            if not until:
                until = now + patience
            elif now > until:
                return waiting
            time.sleep(pause)
            pause = min(_LONGEST_SLEEP, 1.5 * pause)


def _out_bytes(capacity: int, nodes: int) -> int:
    return -(-capacity // nodes // PAGE) * PAGE


def _digest(operation: int, text: str) -> bytes:
    return hashlib.blake2b(f"{operation} {text}".encode(), digest_size=_DESCRIPTION_BYTES).digest()
