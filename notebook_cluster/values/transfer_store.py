"""Where values lie while they travel: laid out by a cell for the notebook to read, or written for a cell to take.

Cells of ``%pull`` and ``%push`` call :func:`give`, :func:`take` and :func:`unpack`, on the main thread. The bytes go in
small pieces over the control channel and are served by the I/O thread, also while the next cell runs.
"""

import base64
import bisect
import difflib
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from notebook_cluster.processors import free_memory
from notebook_cluster.protocol.transfers import (
    CHUNK_BYTES,
    MOST_VALUE_BYTES,
    ForgetTicket,
    PartWritten,
    ReadPart,
    ValuePart,
    WritePart,
)
from notebook_cluster.protocol.wire import Message
from notebook_cluster.values.arrays import Buffer
from notebook_cluster.values.encoding import decode_value, encode_value

KEPT_SECONDS = 600.0
"""After the last word about a ticket: whoever asked is gone."""
_MOST_META = 4 * 1024 * 1024
_MOST_TICKETS = 16
_SPARE_MEMORY = 256 << 20
"""Bytes that stay free on this machine."""


@dataclass
class _Given:
    """A value laid out for the notebook, or why there is none."""

    header: ValuePart
    starts: list[int] = field(default_factory=list)
    buffers: list[memoryview] = field(default_factory=list)

    def read(self, offset: int, size: int) -> bytes:
        pieces, end = [], offset + size
        for place in range(max(bisect.bisect_right(self.starts, offset) - 1, 0), len(self.starts)):
            start = self.starts[place]
            if start >= end:
                break
            pieces.append(self.buffers[place][max(offset - start, 0) : end - start])
        return b"".join(pieces)


@dataclass
class _Ticket:
    given: dict[str, _Given] = field(default_factory=dict)
    taken: bytearray = field(default_factory=bytearray)
    used: float = field(default_factory=time.monotonic)


class PushFailed(RuntimeError):
    """A pushed value cannot be made here. Shown as one line: the frames below it are of this package."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class Shelf:
    """One for each kernel. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets: dict[str, _Ticket] = {}

    def lay_out(self, ticket: str, name: str, given: _Given) -> None:
        with self._lock:
            self._ticket(ticket).given[name] = given

    def pick_up(self, ticket: str) -> bytearray:
        """The bytes that were written under ``ticket``, which is used up."""
        with self._lock:
            found = self._tickets.pop(ticket, None)
        if found is None:
            raise PushFailed("the value is not here any more (the kernel was restarted?): push it again")
        return found.taken

    def on_control(self, message: ReadPart | WritePart | ForgetTicket, send: Callable[[Message], None]) -> None:
        """Answer the coordinator; on the I/O thread."""
        match message:
            case ReadPart():
                send(self._read(message))
            case WritePart():
                send(PartWritten(request=message.request, error=self._write(message)))
            case ForgetTicket():
                with self._lock:
                    self._tickets.pop(message.ticket, None)

    def tick(self) -> None:
        """Forget what nobody asked for in a long time."""
        if not self._tickets:
            return
        limit = time.monotonic() - KEPT_SECONDS
        with self._lock:
            self._tickets = {key: ticket for key, ticket in self._tickets.items() if ticket.used > limit}

    def _ticket(self, key: str) -> _Ticket:
        ticket = self._tickets.setdefault(key, _Ticket())
        ticket.used = time.monotonic()
        while len(self._tickets) > _MOST_TICKETS:
            self._tickets.pop(min(self._tickets, key=lambda other: self._tickets[other].used))
        return ticket

    def _read(self, message: ReadPart) -> ValuePart:
        with self._lock:
            ticket = self._tickets.get(message.ticket)
            given = ticket.given.get(message.name) if ticket is not None else None
            if ticket is not None:
                ticket.used = time.monotonic()
        if given is None:
            return ValuePart(request=message.request, error="it is not here any more (the kernel was restarted?)")
        if message.size <= 0:
            return msgspec.structs.replace(given.header, request=message.request)
        data = given.read(max(message.offset, 0), min(message.size, CHUNK_BYTES))
        return ValuePart(request=message.request, data=data)

    def _write(self, message: WritePart) -> str:
        """Why the bytes are not taken; empty when they are."""
        if message.offset == 0:
            reason = _no_room(message.total)
            if reason:
                return reason
        with self._lock:
            if message.offset and message.ticket not in self._tickets:
                return "what came before is not here any more (the kernel was restarted?): push it again"
            held = self._ticket(message.ticket).taken
            if message.offset != len(held) or len(held) + len(message.data) > message.total:
                return f"bytes from {message.offset} came when {len(held)} were there: push it again"
            held += message.data
        return ""


SHELF = Shelf()


def give(ticket: str, names: Sequence[str]) -> None:
    """Lay out the variables ``names`` of this kernel's user; what cannot be sent is laid out as the reason."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    namespace: dict[str, Any] = shell.user_ns if shell is not None else {}
    for name in names:
        SHELF.lay_out(ticket, name, _given(namespace, name))


def take(ticket: str, meta: str, sizes: Sequence[int], digest: str) -> Any:
    """The value whose bytes were written under ``ticket``.

    Raises:
        PushFailed: they are not all there, or damaged, or a library for the value is not installed here.
    """
    data = SHELF.pick_up(ticket)
    if len(data) != sum(sizes) or hashlib.blake2b(data, digest_size=16).hexdigest() != digest:
        raise PushFailed(f"{len(data)} bytes came, not all of the value: push it again")
    return _made(meta, data, sizes)


def unpack(meta: str, sizes: Sequence[int], text: str) -> Any:
    """A small value that came inside the cell, as base64. PushFailed as :func:`take`."""
    return _made(meta, bytearray(base64.b64decode(text)), sizes)


def _made(meta: str, data: bytearray, sizes: Sequence[int]) -> Any:
    try:
        return decode_value(json.loads(meta), split(data, sizes))
    except ValueError as error:
        raise PushFailed(str(error)) from None


def split(data: bytearray, sizes: Sequence[int]) -> list[Buffer]:
    """``data`` cut into buffers of ``sizes`` bytes, which together are all of it. Nothing is copied."""
    whole, buffers, start = memoryview(data), [], 0
    for size in sizes:
        buffers.append(whole[start : start + size])
        start += size
    return list(buffers)


def _given(namespace: dict[str, Any], name: str) -> _Given:
    if name not in namespace:
        known = [other for other in namespace if not other.startswith("_")]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        return _Given(ValuePart(request=0, missing=True, near=near[0] if near else ""))
    try:
        meta, buffers = encode_value(namespace[name])
        text = msgspec.json.encode(meta)
        if len(text) > _MOST_META:
            raise ValueError("it has too many parts: stack them into arrays")
    except (TypeError, ValueError) as error:
        return _Given(ValuePart(request=0, error=str(error)))
    except MemoryError:
        return _Given(ValuePart(request=0, error="there is not enough memory on the node for a second copy of it"))
    sizes, digest = [len(buffer) for buffer in buffers], hashlib.blake2b(digest_size=16)
    for buffer in buffers:
        digest.update(buffer)
    return _Given(
        ValuePart(request=0, meta=text, sizes=sizes, digest=digest.digest()),
        list(itertools.accumulate(sizes[:-1], initial=0)),
        [memoryview(buffer) for buffer in buffers],
    )


def _no_room(total: int) -> str:
    if not 0 <= total <= MOST_VALUE_BYTES:
        return f"a value of {total / 1e6:,.0f} MB is over the limit of {MOST_VALUE_BYTES >> 30} GiB"
    free = free_memory()
    if 2 * total + _SPARE_MEMORY > free and total > CHUNK_BYTES:
        return f"a value of {total / 1e6:,.0f} MB does not fit into the {free / 1e6:,.0f} MB of memory that are free"
    return ""
