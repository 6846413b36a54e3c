"""Chunks of contributions and means: sending, asking again, putting together. Same habits as
:mod:`.member_exchange`."""

from copy import copy

from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import Stalled
from notebook_cluster.training.combining import gathered_size
from notebook_cluster.training.member_state import Assembly, Exchange, MemberState
from notebook_cluster.training.member_types import (
    Buffer,
    Effect,
    Frame,
    SendChunk,
)

_FEW_CHUNKS = 256
_LEAST_CHUNK = 32 * 1024
"""Bytes: a slice comes in at most ``_FEW_CHUNKS`` chunks and one for each of these."""

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
    """Chunks of one slice from ``offset`` on."""
    view, size = memoryview(data), state.settings.chunk_bytes
    number, trial = attempt or state.seen_attempt
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


def want(state: MemberState, effects: list[Effect]) -> None:
    """Ask for everything that is missing: contributions from their senders, means from the owner first, then from any
    member that may be PREPARED, one after the other."""
    exchange = state.exchange
    assert exchange is not None
    others = exchange.sources or tuple(name for name in exchange.senders if name != state.node)
    for index, name, kind in missing(state, exchange):
        node = name
        if kind == "mean" and others and (exchange.asked or name == state.node):
            node = others[exchange.asked % len(others)]
        assembly = exchange.partial.get((index, kind, name if kind == "contribution" else ""))
        header = JobFrame(
            job=state.job,
            incarnation=state.incarnation,
            kind="want",
            name=kind,
            round=exchange.seal.round,
            attempt=exchange.seal.attempt,
            slice=index,
            offset=_first_gap(assembly) if assembly else 0,
        )
        effects.append(SendChunk(node, header))
    exchange.asked += 1
    exchange.wanted = state.now


def missing(state: MemberState, exchange: Exchange) -> list[tuple[int, str, str]]:
    """(slice, node that should send it, ``contribution`` or ``mean``) of everything that has not come."""
    missing = []
    for index, piece in enumerate(exchange.seal.slices):
        if index in exchange.means:
            continue
        if piece.owner != state.node or exchange.sources:
            missing.append((index, piece.owner, "mean"))
        if piece.owner == state.node:
            for name, (_, weight) in exchange.senders.items():
                if weight > 0 and (index, name) not in exchange.contributions:
                    missing.append((index, name, "contribution"))
    return missing


def stalled(state: MemberState, exchange: Exchange) -> Stalled:
    waiting_for = {name for _, name, _ in missing(state, exchange) if name != state.node}
    return Stalled(
        job=state.job,
        round=exchange.seal.round,
        attempt=exchange.seal.attempt,
        waiting_for=sorted(waiting_for),
        not_finite=list(exchange.broken),
        fragment=exchange.seal.fragment,
    )


def serve(state: MemberState, frame: Frame, effects: list[Effect]) -> None:
    """Answer a WANT from its offset on; what this node has not is not answered."""
    header, exchange = frame.header, state.exchange
    key, data = (header.round, header.attempt), None
    if exchange is not None and key == (exchange.seal.round, exchange.seal.attempt):
        slices, kind = exchange.seal.slices, header.name
        if kind == "mean":
            data = exchange.means.get(header.slice)
        elif (
            0 <= header.slice < len(slices)
            and exchange.senders.get(state.node, (0, 0.0))[1] > 0
            and state.contribution is not None
        ):
            data = my_bytes(state, header.slice) if slices[header.slice].owner == frame.sender else None
    elif header.name == "mean":
        for kept in state.kept:
            if key == (kept.round, kept.attempt) and 0 <= header.slice < len(kept.slices):
                data = kept.slices[header.slice]
    if data is None or header.offset < 0:
        state.dropped += 1
        return
    send_slice(state, frame.sender, header.name, header.slice, data, effects, header.offset, key)


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
    start, stop = state.fragments.wire(header.round).byte_range(piece.start, piece.stop)
    wanted = header.kind == "mean" or (weight > 0 and piece.owner == state.node)
    size = stop - start
    if header.kind == "mean" and exchange.gathered:
        size = gathered_size(exchange.gathered, size)
    fits = header.total == size and 0 <= header.offset <= header.total - len(frame.payload)
    if not wanted or not fits or not len(frame.payload):
        state.dropped += 1
        return False
    name = frame.sender if header.kind == "contribution" else ""
    have = header.slice in exchange.means or (name and (header.slice, name) in exchange.contributions)
    if have:
        return False
    key = (header.slice, str(header.kind), name)
    assembly = exchange.partial.get(key) or Assembly(header.total, {})
    if _is_overfull(assembly):
        state.dropped += 1
        return False
    assembly = _with_chunk(assembly, header.offset, bytes(frame.payload))
    exchange = state.exchange = copy(exchange)
    exchange.progress = state.now
    if assembly.received < header.total or _first_gap(assembly) < header.total:
        exchange.partial = {**exchange.partial, key: assembly}
        return False
    exchange.partial = {other: part for other, part in exchange.partial.items() if other != key}
    if name:
        exchange.contributions = {**exchange.contributions, (header.slice, name): _joined(assembly)}
    else:
        exchange.means = {**exchange.means, header.slice: _joined(assembly)}
    return True


def _with_chunk(assembly: Assembly, offset: int, payload: bytes) -> Assembly:
    """``assembly`` with one more chunk; of two at one offset the longer stays."""
    known = assembly.chunks.get(offset, b"")
    if len(payload) <= len(known):
        return assembly
    return Assembly(assembly.total, {**assembly.chunks, offset: payload}, assembly.received + len(payload) - len(known))


def _is_overfull(assembly: Assembly) -> bool:
    """More or smaller chunks than a member cuts a slice into, or chunks that overlap without end."""
    return len(assembly.chunks) > _FEW_CHUNKS + assembly.total // _LEAST_CHUNK or assembly.received > 2 * assembly.total


def _first_gap(assembly: Assembly) -> int:
    """The first byte that has not come; ``total`` when there is none."""
    end = 0
    for offset in sorted(assembly.chunks):
        if offset > end:
            return end
        end = max(end, offset + len(assembly.chunks[offset]))
    return end


def _joined(assembly: Assembly) -> bytes:
    """All bytes of a complete assembly; what overlaps is equal."""
    pieces, end = [], 0
    for offset in sorted(assembly.chunks):
        piece = assembly.chunks[offset][max(0, end - offset) :]
        pieces.append(piece)
        end += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
