"""Chunks of contributions and means: sending and putting together. Same habits as :mod:`.exchange`."""

import itertools
from copy import copy

import numpy as np

from notebook_cluster.memory import first_gap, with_range
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import Seal
from notebook_cluster.rounds.member.events_effects import (
    Buffer,
    Effect,
    Frame,
    SendChunk,
)
from notebook_cluster.rounds.member.state import Assembly, Exchange, MemberState
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.weighted_mean import gathered_count

_FEW_GAPS = 256
_LEAST_CHUNK = 32 * 1024
"""Bytes: a slice that is not complete has at most ``_FEW_GAPS`` gaps and one for each of these."""

# ---- sending -------------------------------------------------------------------------------------------------


def my_bytes(state: MemberState, index: int) -> memoryview:
    """This node's contribution to one slice."""
    assert state.fragments is not None
    assert state.contribution is not None
    assert state.exchange is not None
    seal = state.exchange.seal
    piece = seal.slices[index]
    start, stop = state.fragments.wire(seal.round).byte_range(piece.start, piece.stop)
    return memoryview(state.contribution.encoded)[start:stop]


def to_send(seal: Seal, node: str) -> list[int]:
    """The slices that ``node`` does not own, one of each owner in turn, first of the owner behind it in rank: so nobody
    is sent everything by all at once, and every owner soon has the first of its slices."""
    names = [member.name for member in seal.members]
    owned: dict[str, list[int]] = {}
    for index, piece in enumerate(seal.slices):
        if piece.owner != node:
            owned.setdefault(piece.owner, []).append(index)
    owners = sorted(owned, key=lambda owner: (names.index(owner) - names.index(node)) % len(names))
    rows = itertools.zip_longest(*(owned[owner] for owner in owners))
    return [index for row in rows for index in row if index is not None]


def send_slice(
    state: MemberState,
    node: str,
    kind: str,
    index: int,
    data: Buffer,
    effects: list[Effect],
    offset: int = 0,
    attempt: tuple[int, int] | None = None,
) -> None:
    """Chunks of one slice from ``offset`` on, and a note that all of it has been handed to the mesh (once more)."""
    view = memoryview(data)
    size = max(1, len(view)) if node in state.readers else state.settings.chunk_bytes
    number, trial = attempt or state.seen_attempt
    key = (number, trial, node, kind, index)
    state.handed = {**state.handed, key: state.handed.get(key, 0) + 1}
    for position in range(offset, len(view), size):
        header = JobFrame(
            job=state.job,
            incarnation=state.incarnation,
            kind="mean" if kind == "mean" else "contribution",
            round=number,
            attempt=trial,
            slice=index,
            offset=position,
            total=len(view),
        )
        effects.append(SendChunk(node, header, view[position : position + size]))
    state.bytes_sent += max(0, len(view) - offset)


# ---- receiving -----------------------------------------------------------------------------------------------


def take_held(state: MemberState) -> None:
    """Frames that came before their SEAL; those of attempts that can no longer be sealed are dropped."""
    frames, state.held_frames = state.held_frames, ()
    later = []
    for sender, header, payload in frames:
        key = (header.round, header.attempt)
        if key == state.seen_attempt:
            take_chunk(state, Frame(sender, header, payload))
        elif key > state.seen_attempt:
            later.append((sender, header, payload))
        else:
            state.dropped += 1
    state.held_frames = tuple(later)


def take_chunk(state: MemberState, frame: Frame) -> bool:
    """Keep one chunk of the current attempt; True when it completed a slice. Sizes are checked before anything is
    kept."""
    header, exchange = frame.header, state.exchange
    assert exchange is not None
    assert state.fragments is not None
    slices = exchange.seal.slices
    incarnation, weight = exchange.senders.get(frame.sender, (-1, 0.0))
    if incarnation != header.incarnation or not 0 <= header.slice < len(slices):
        state.dropped += 1
        return False
    piece = slices[header.slice]
    wire = (state.fragments.result if header.kind == "mean" else state.fragments.wire)(header.round)
    start, stop = wire.byte_range(piece.start, piece.stop)
    wanted = header.kind == "mean" or (weight > 0 and piece.owner == state.node)
    if header.kind == "mean" and exchange.gathered:
        fits = gathered_count(wire, exchange.gathered, stop - start, header.total) > 0
    else:
        fits = header.total == stop - start
    fits = fits and 0 <= header.offset <= header.total - len(frame.payload)
    if not wanted or not fits or not len(frame.payload):
        state.dropped += 1
        return False
    exchange = state.exchange = hear(state, exchange, frame.sender)
    name = frame.sender if header.kind == "contribution" else ""
    have = header.slice in exchange.means or (name and (header.slice, name) in exchange.contributions)
    if have:
        return False
    key = (header.slice, str(header.kind), name)
    assembly = exchange.partial.get(key)
    if assembly is not None and header.total != assembly.data.size and frame.sender == piece.owner:
        assembly = None  # a mean of which parts were added up may have several sizes: who added them up knows which
    if assembly is not None and (
        header.total != assembly.data.size or len(assembly.received) > _FEW_GAPS + header.total // _LEAST_CHUNK
    ):
        state.dropped += 1
        return False
    exchange.progress = state.now
    if len(frame.payload) == header.total:
        whole = memoryview(frame.payload).toreadonly()  # as it came: it may lie in the memory of whoever made it
    else:
        assembly = assembly or Assembly(vectors.bytes_of(header.total))
        assembly = _with_chunk(assembly, header.offset, frame.payload)
        if first_gap(assembly.received) < header.total:
            exchange.partial = {**exchange.partial, key: assembly}
            return False
        whole = assembly.data.data.toreadonly()
    exchange.partial = {other: part for other, part in exchange.partial.items() if other != key}
    if name:
        exchange.contributions = {**exchange.contributions, (header.slice, name): whole}
    else:
        exchange.means = {**exchange.means, header.slice: whole}
    return True


def hear(state: MemberState, exchange: Exchange, node: str) -> Exchange:
    """A copy of ``exchange`` that knows that ``node`` was heard just now."""
    exchange = copy(exchange)
    exchange.heard = {**exchange.heard, node: state.now}
    return exchange


def _with_chunk(assembly: Assembly, offset: int, payload: Buffer) -> Assembly:
    """``assembly`` with one more chunk, of which only what has not come yet is taken."""
    view = np.frombuffer(payload, np.uint8)
    received, new = with_range(assembly.received, offset, offset + view.size)
    for start, stop in new:
        assembly.data[start:stop] = view[start - offset : stop - offset]
    return Assembly(assembly.data, received)
