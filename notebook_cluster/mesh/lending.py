"""What nodes of one peer read of each other where it is, in place of having it sent.

A node that may have such readers makes what it is going to send, a contribution or a mean, in memory that they can map
(:meth:`Lending.memory`). What is sent of it then is where it lies. The rule that keeps every average right: **only its
maker writes to a file, and to none that anybody may still read.** So each loan has a ticket, which the reader gives
back when nothing on its side refers to the bytes any more; until all are back the file is not used again. A file with a
reader that is out of the roster, which may be stopped and wake up again, never is. Whoever needs memory meanwhile makes
a new file, and nothing is left of the old one when its last reader has let go.

Where there is no room, or no such memory, or a reader cannot map it, the same bytes go over the sockets.
"""

import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from notebook_cluster.mesh.connection import Payload
from notebook_cluster.mesh.mesh import Mesh
from notebook_cluster.mesh.shared_memory import SharedFile
from notebook_cluster.protocol.mesh import JobFrame, LentFrame, MeshHeader, ReturnedFrame
from notebook_cluster.protocol.node import Roster

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)

LEAST = 1 << 20
"""Bytes: less is sent as fast as it is lent."""
PIECE = 256 * 1024
"""Bytes of each frame of what is not lent."""
_LOOSE = 32
"""As of :class:`notebook_cluster.memory.ArrayPool`: fragments of a model differ by less."""
_ALIKE = 2
"""Files of one size that are kept while their bytes are lent."""
_MOST_TEXT = 200
_MOST_READ = 256
"""Loans of others that are mapped here at once: each may take a descriptor."""
_LARGE = 64 << 20
"""Bytes that are given back on a thread of their own: the system takes a while for them."""
_FORGET_AFTER = 16
"""A file that was not used for so many others is of a model that is no more."""


@dataclass(eq=False)
class _File:
    shared: SharedFile
    number: int
    size: int
    address: int = 0
    array: "weakref.ref[NDArray[np.uint8]] | None" = None
    """What was handed out last; every view refers to it."""
    loans: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Ticket -> (node, incarnation) that may read it."""
    spent: bool = False
    """Somebody may read it who will never say that it is over."""
    used: int = 0

    def fits(self, size: int) -> bool:
        return size <= self.size <= size + size // _LOOSE

    @property
    def is_mine(self) -> bool:
        """Whether this node itself still uses it."""
        return self.array is not None and self.array() is not None

    def hand_out(self, size: int, used: int, unused: Callable[[], None]) -> "NDArray[np.uint8]":
        import numpy as np

        array = np.frombuffer(self.shared.data, np.uint8, size)
        self.address, self.array, self.used = _address(array), weakref.ref(array, lambda gone: unused()), used
        return array


class Lending:
    """One node's side of it, between ``mesh`` and what its frames are for.

    ``memory``, ``send``, ``readers`` and ``forget`` may be called from any thread. ``on_frame`` gets what came, as of
    :class:`.Mesh`; what was lent counts as read until nothing refers to its payload.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._on_frame = mesh, mesh.on_frame
        mesh.on_frame = self._take
        self._members: dict[str, int] = {}
        self._lock = threading.Lock()
        self._files: list[_File] = []
        self._numbers, self._tickets, self._uses = itertools.count(1), itertools.count(1), itertools.count(1)
        self._refused: set[tuple[str, int]] = set()
        self._reading: set[tuple[str, int, int]] = set()
        """(node, incarnation, ticket) of what is mapped here now."""

    def readers(self) -> frozenset[str]:
        """The other nodes that can map this node's memory."""
        return frozenset(name for name in self._members if self._member(name) is not None)

    def memory(self, size: int) -> "NDArray[np.uint8] | None":
        """``size`` bytes, with whatever is in them, for what :meth:`send` will be given: nothing may be written to them
        after that. None: there is nobody who could read them, or no room."""
        if size < LEAST or not self.readers():
            return None
        with self._lock:
            use, number = next(self._uses), -next(self._numbers)  # those of collectives are above 0
            dropped = self._dropped(use, size)
            free = (file for file in self._files if file.fits(size) and not (file.is_mine or file.loans or file.spent))
            found = next(free, None)
            array = None if found is None else found.hand_out(size, use, self._unused)
        _release(dropped)
        if array is not None:
            return array
        shared = SharedFile.make(self._mesh.ipc_path(self._mesh.name), number, size, "shm")
        if shared is None:
            return None
        with self._lock:
            self._files.append(_File(shared, number, size))
            return self._files[-1].hand_out(size, use, self._unused)

    def send(self, node: str, header: JobFrame, payload: Payload = b"") -> None:
        """:meth:`.Mesh.send`. Of a contribution or a mean (bytes) what lies in :meth:`memory` is lent where ``node``
        can read it, and what else is longer than one frame goes in several, whose ``offset`` counts on."""
        is_slice = header.kind in ("contribution", "mean")
        if is_slice and len(payload) >= LEAST and (lent := self._lend(node, header, payload)) is not None:
            self._mesh.send(node, lent)
        elif not is_slice or len(payload) <= PIECE:
            self._mesh.send(node, header, payload)
        else:
            view = memoryview(payload)
            for start in range(0, len(view), PIECE):
                self._mesh.send(node, replace(header, offset=header.offset + start), view[start : start + PIECE])

    def forget(self) -> None:
        """Give the files back, at once or when nothing here refers to them any more."""
        with self._lock:
            for file in self._files:
                file.spent = True
            dropped = self._dropped()
        _release(dropped)

    def close(self) -> None:
        """Nobody finds a file any more, and none is made. What others have mapped stays with them."""
        with self._lock:
            self._members = {}
            for file in self._files:
                file.shared.hide()

    def _member(self, node: str) -> int | None:
        """The incarnation of another node that can map this node's memory; else None."""
        incarnation = self._members.get(node)
        if incarnation is None or node == self._mesh.name or not self._mesh.ipc_path(node):
            return None
        return None if (node, incarnation) in self._refused else incarnation

    def _lend(self, node: str, header: JobFrame, payload: Payload) -> LentFrame | None:
        import numpy as np

        member, address = self._member(node), _address(np.frombuffer(payload, np.uint8))
        if member is None:
            return None
        with self._lock:
            for file in self._files:
                start = address - file.address
                if file.is_mine and 0 <= start <= file.size - len(payload):
                    file.loans[ticket := next(self._tickets)] = node, member
                    return LentFrame(header, ticket, file.number, file.size, start, start + len(payload))
        return None

    def _dropped(self, use: int = 0, size: int = 0) -> "list[_File]":
        """Of the files that nothing here refers to, those that will not be used again: from now on they are none. With
        the lock."""
        lent = [file for file in self._files if file.fits(size) and file.loans]
        dropped = [
            file for file in self._files
            if not file.is_mine and (file.spent or file in lent[:-_ALIKE] or use - file.used > _FORGET_AFTER)
        ]  # fmt: skip
        self._files = [file for file in self._files if file not in dropped]
        return dropped

    def _unused(self) -> None:
        """On whichever thread was the last to refer to a file here, which may have the lock."""
        self._mesh.call_soon(self._drop_spent, wake=False)

    def _drop_spent(self) -> None:
        with self._lock:
            dropped = self._dropped()
        _release(dropped)

    # ---- on the I/O thread

    def on_roster(self, roster: Roster) -> None:
        """Who is in, after the mesh was told."""
        members = {node.name: node.incarnation for node in roster.nodes}
        with self._lock:
            self._members, self._refused = members, self._refused & set(members.items())
            for file in self._files:
                gone = [ticket for ticket, (node, member) in file.loans.items() if members.get(node) != member]
                file.spent |= bool(gone)
                for ticket in gone:
                    del file.loans[ticket]
            dropped = self._dropped()
        _release(dropped)

    def _take(self, sender: str, header: MeshHeader, payload: memoryview) -> None:
        if isinstance(header, ReturnedFrame):
            self._take_back(sender, header)
        elif isinstance(header, LentFrame):
            lent = self._borrow(sender, header)
            if lent is not None:
                self._on_frame(sender, header.header, lent)
        else:
            self._on_frame(sender, header, payload)

    def _borrow(self, sender: str, frame: LentFrame) -> memoryview | None:
        """What ``sender`` has lent, to be read; None when that cannot be."""
        import numpy as np

        path, loan = self._mesh.ipc_path(sender), (sender, frame.header.incarnation, frame.ticket)
        try:
            if not path:
                raise ValueError("it is on another peer")
            if frame.stop - frame.start < LEAST or len(self._reading) >= _MOST_READ:
                raise ValueError(f"{frame.stop - frame.start} bytes beside {len(self._reading)} other loans")
            array = np.frombuffer(SharedFile.read(path, frame.number, frame.size, frame.start, frame.stop), np.uint8)
        except (OSError, ValueError, OverflowError) as error:
            self._mesh.send(sender, ReturnedFrame(loan[1], [frame.ticket], str(error)[:_MOST_TEXT]))
            return None
        self._reading.add(loan)
        weakref.finalize(array, self._give_back, *loan).atexit = False
        return array.data

    def _give_back(self, sender: str, incarnation: int, ticket: int) -> None:
        """On whichever thread was the last to refer to it."""
        self._reading.discard((sender, incarnation, ticket))
        self._mesh.call_soon(lambda: self._mesh.send(sender, ReturnedFrame(incarnation, [ticket])))

    def _take_back(self, sender: str, frame: ReturnedFrame) -> None:
        reader = sender, self._members.get(sender, -1)
        if frame.incarnation != self._mesh.incarnation:
            return
        with self._lock:
            pairs = itertools.product(self._files, set(frame.tickets))
            returned = [(file, ticket) for file, ticket in pairs if file.loans.get(ticket) == reader]
            for file, ticket in returned:
                del file.loans[ticket]
        if frame.refused and returned and reader not in self._refused:
            self._refused |= {reader}
            _log.warning("what %s is sent goes over a socket, for it cannot read it here: %s", sender, frame.refused)


def _release(dropped: list[_File]) -> None:
    """The list becomes empty; nobody else has what is in it."""
    size = 0
    for file in dropped:
        file.shared.hide()
        size += file.size
        del file  # the thread is to have the last reference
    if size >= _LARGE:
        threading.Thread(target=dropped.clear, name="give-back", daemon=True).start()
    else:
        dropped.clear()


def _address(array: "NDArray[np.uint8]") -> int:
    return int(array.__array_interface__["data"][0])
