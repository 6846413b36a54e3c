"""One sealed attempt on one node: contributions to the owners of slices, means back, PREPARED. Applies nothing.

Every function here gets a copy of the member's state that it may change and a list that it adds effects to; dictionaries
inside :class:`~.member_types.Exchange` are replaced, because older states share them.
"""

from copy import copy

import numpy as np
import xxhash

from notebook_cluster.codecs import NotFiniteError, Vector
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import Complete, Prepared, Seal, Stalled
from notebook_cluster.training.member_types import (
    Assembly,
    Buffer,
    Effect,
    Exchange,
    Frame,
    KeptMean,
    Log,
    MemberState,
    SendChunk,
    SendControl,
)
from notebook_cluster.training.outer import bits_float, flushes_subnormals, outer_step, state_hash, weighted_sum


def take_seal(state: MemberState, seal: Seal, effects: list[Effect]) -> None:
    """Begin the attempt, or say PREPARED again when it is already done; a SEAL that cannot be meant for this state is ignored."""
    exchange = state.exchange
    if exchange is not None and (seal.round, seal.attempt) == (exchange.seal.round, exchange.seal.attempt):
        if exchange.prepared is not None:
            effects.append(SendControl(exchange.prepared))
        return
    senders = {member.name: (member.incarnation, bits_float(member.weight_bits)) for member in seal.members}
    repeated = seal.round == state.seen_attempt[0] and seal.attempt <= state.seen_attempt[1]
    if repeated or seal.round != state.round + 1 or seal.base_hash != state.state_hash or state.node not in senders:
        return
    mine = next(member for member in seal.members if member.name == state.node)
    weight = senders[state.node][1]
    if (mine.incarnation, mine.contribution) != (state.incarnation, state.serial) or state.contribution is None:
        return
    if weight > 0 and (state.wire is None or len(state.contribution.encoded) != state.wire.size):
        return
    state.seen_attempt = (seal.round, seal.attempt)
    state.phase = "exchanging"
    state.exchange = exchange = Exchange(seal, senders, {}, {}, {}, progress=state.now)
    if weight > 0:
        exchange.contributions = {
            (index, state.node): _my_bytes(state, index)
            for index, piece in enumerate(seal.slices)
            if piece.owner == state.node
        }
        for index, piece in enumerate(seal.slices):
            if piece.owner != state.node:
                _send(state, piece.owner, "contribution", index, _my_bytes(state, index), effects)
    _take_held(state)
    advance(state, effects)


def take_frame(state: MemberState, frame: Frame, effects: list[Effect]) -> None:
    """A chunk of this attempt is kept, one of a newer attempt held, an older or impossible one dropped and counted."""
    header = frame.header
    if header.kind == "want":
        _serve(state, frame, effects)
        return
    key, exchange = (header.round, header.attempt), state.exchange
    if exchange is not None and key == (exchange.seal.round, exchange.seal.attempt):
        if _take_chunk(state, frame):
            advance(state, effects)
        return
    repeated = header.round == state.seen_attempt[0] and header.attempt <= state.seen_attempt[1]
    held = sum(len(payload) for _, _, payload in state.held_frames)
    if header.round <= state.round or repeated or held + len(frame.payload) > state.settings.held_bytes:
        state.dropped += 1
        return
    state.held_frames = (*state.held_frames, (frame.sender, header, bytes(frame.payload)))


def take_complete(state: MemberState, message: Complete, effects: list[Effect]) -> None:
    """A member was lost, but ``sources`` hold every mean: ask them at once."""
    exchange = state.exchange
    if exchange is None or (message.round, message.attempt) != (exchange.seal.round, exchange.seal.attempt):
        return
    if exchange.prepared is not None:
        effects.append(SendControl(exchange.prepared))
        return
    exchange = state.exchange = copy(exchange)
    exchange.sources = tuple(name for name in message.sources if name != state.node)
    exchange.asked = max(exchange.asked, 1)
    _want(state, effects)


def tick(state: MemberState, effects: list[Effect]) -> None:
    """WANT after a second without progress, STALLED after two and a half."""
    exchange, settings = state.exchange, state.settings
    if exchange is None or exchange.prepared is not None or state.left:
        return
    if state.now - max(exchange.progress, exchange.wanted) >= settings.want_after:
        state.exchange = exchange = copy(exchange)
        _want(state, effects)
    if state.now - max(exchange.progress, exchange.stalled) >= settings.stalled_after:
        state.exchange = exchange = copy(exchange)
        exchange.stalled = state.now
        effects.append(SendControl(_stalled(state, exchange)))


def advance(state: MemberState, effects: list[Effect]) -> None:
    """Encode the means that can be encoded, then prepare if every mean is here."""
    exchange = state.exchange
    if exchange is None or exchange.prepared is not None or exchange.broken:
        return
    contributors = [name for name, (_, weight) in exchange.senders.items() if weight > 0]
    for index, piece in enumerate(exchange.seal.slices):
        if piece.owner != state.node or index in exchange.means:
            continue
        if all((index, name) in exchange.contributions for name in contributors):
            mean = _mean(state, exchange, index, contributors, effects)
            if mean is None:
                return
            exchange = state.exchange = copy(exchange)
            exchange.means = {**exchange.means, index: mean}
            for name in exchange.senders:
                if name != state.node:
                    _send(state, name, "mean", index, mean, effects)
    if len(exchange.means) == len(exchange.seal.slices):
        _prepare(state, effects)


def kept_mean(exchange: Exchange) -> KeptMean:
    """The means of a committed attempt, for nodes that were late."""
    slices = tuple(exchange.means[index] for index in range(len(exchange.seal.slices)))
    return KeptMean(exchange.seal.round, exchange.seal.attempt, slices, sum(map(len, slices)))


# ---- computing -----------------------------------------------------------------------------------------------


def _mean(
    state: MemberState, exchange: Exchange, index: int, contributors: list[str], effects: list[Effect]
) -> Buffer | None:
    """The encoded weighted mean of one slice, members added in rank order; None when it is not finite."""
    piece = exchange.seal.slices[index]
    assert state.wire is not None

    def vector(name: str) -> Vector:
        assert state.wire is not None
        return state.wire.decode(exchange.contributions[index, name], piece.start, piece.stop)

    with np.errstate(all="ignore"):
        total = weighted_sum((vector(name), exchange.senders[name][1]) for name in contributors)
    try:
        return state.wire.encode(total, piece.start, piece.stop)
    except NotFiniteError:
        broken = [name for name in contributors if not np.isfinite(vector(name)).all()]
        largest = max(contributors, key=lambda name: float(np.abs(vector(name)).max()))
        state.exchange = copy(exchange)
        state.exchange.broken = tuple(broken or [largest])
        effects.append(SendControl(_stalled(state, state.exchange)))
        return None


def _prepare(state: MemberState, effects: list[Effect]) -> None:
    """Compute the new state aside and say PREPARED."""
    assert state.exchange is not None and state.wire is not None
    assert state.theta is not None and state.momentum is not None
    exchange = state.exchange = copy(state.exchange)
    seal, wire = exchange.seal, state.wire
    means = [exchange.means[index] for index in range(len(seal.slices))]
    exchange.theta, exchange.momentum = state.theta, state.momentum
    if means:
        pieces = [wire.decode(data, p.start, p.stop) for data, p in zip(means, seal.slices, strict=True)]
        exchange.theta, exchange.momentum = outer_step(
            state.theta, state.momentum, pieces[0] if len(pieces) == 1 else np.concatenate(pieces),
            bits_float(seal.outer.lr_bits), bits_float(seal.outer.momentum_bits), seal.outer.nesterov, wire.buffers,
        )  # fmt: skip
    if flushes_subnormals():
        text = "this process rounds subnormal numbers to zero: call torch.set_flush_denormal(False), or its state will differ"
        effects.append(Log("error", text))
    exchange.prepared = Prepared(
        job=state.job, round=seal.round, attempt=seal.attempt, incarnation=state.incarnation, fragment=seal.fragment,
        slice_hashes=[xxhash.xxh3_128_hexdigest(data) for data in means],
        state_hash=state_hash(exchange.theta, exchange.momentum),
    )  # fmt: skip
    state.phase = "prepared"
    effects.append(SendControl(exchange.prepared))


# ---- sending -------------------------------------------------------------------------------------------------


def _my_bytes(state: MemberState, index: int) -> memoryview:
    """This node's contribution to one slice."""
    assert state.wire is not None and state.contribution is not None and state.exchange is not None
    piece = state.exchange.seal.slices[index]
    start, stop = state.wire.byte_range(piece.start, piece.stop)
    return memoryview(state.contribution.encoded)[start:stop]


def _send(
    state: MemberState, node: str, kind: str, index: int, data: Buffer, effects: list[Effect], offset: int = 0,
    attempt: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Chunks of one slice from ``offset`` on."""
    view, size = memoryview(data), state.settings.chunk_bytes
    number, trial = attempt or state.seen_attempt
    for position in range(offset, len(view), size):
        header = JobFrame(
            job=state.job, incarnation=state.incarnation, kind="mean" if kind == "mean" else "contribution", round=number,
            attempt=trial, slice=index, offset=position, total=len(view),
        )  # fmt: skip
        effects.append(SendChunk(node, header, view[position : position + size]))
    state.bytes_sent += max(0, len(view) - offset)


def _want(state: MemberState, effects: list[Effect]) -> None:
    """Ask for everything that is missing: contributions from their senders, means from the owner first, then from any member
    that may be PREPARED, one after the other."""
    exchange = state.exchange
    assert exchange is not None
    others = exchange.sources or tuple(name for name in exchange.senders if name != state.node)
    for index, name, kind in _missing(state, exchange):
        node = name
        if kind == "mean" and others and (exchange.asked or name == state.node):
            node = others[exchange.asked % len(others)]
        assembly = exchange.partial.get((index, kind, name if kind == "contribution" else ""))
        header = JobFrame(
            job=state.job, incarnation=state.incarnation, kind="want", name=kind, round=exchange.seal.round,
            attempt=exchange.seal.attempt, slice=index, offset=_first_gap(assembly) if assembly else 0,
        )  # fmt: skip
        effects.append(SendChunk(node, header))
    exchange.asked += 1
    exchange.wanted = state.now


def _missing(state: MemberState, exchange: Exchange) -> list[tuple[int, str, str]]:
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


def _stalled(state: MemberState, exchange: Exchange) -> Stalled:
    waiting_for = {name for _, name, _ in _missing(state, exchange) if name != state.node}
    return Stalled(
        job=state.job, round=exchange.seal.round, attempt=exchange.seal.attempt, waiting_for=sorted(waiting_for),
        not_finite=list(exchange.broken), fragment=exchange.seal.fragment,
    )  # fmt: skip


def _serve(state: MemberState, frame: Frame, effects: list[Effect]) -> None:
    """Answer a WANT from its offset on; what this node has not is not answered."""
    header, exchange = frame.header, state.exchange
    key, data = (header.round, header.attempt), None
    if exchange is not None and key == (exchange.seal.round, exchange.seal.attempt):
        slices, kind = exchange.seal.slices, header.name
        if kind == "mean":
            data = exchange.means.get(header.slice)
        elif 0 <= header.slice < len(slices) and exchange.senders[state.node][1] > 0 and state.contribution is not None:
            data = _my_bytes(state, header.slice) if slices[header.slice].owner == frame.sender else None
    elif header.name == "mean":
        for kept in state.kept:
            if key == (kept.round, kept.attempt) and 0 <= header.slice < len(kept.slices):
                data = kept.slices[header.slice]
    if data is None or header.offset < 0:
        state.dropped += 1
        return
    _send(state, frame.sender, header.name, header.slice, data, effects, header.offset, key)


# ---- receiving -----------------------------------------------------------------------------------------------


def _take_held(state: MemberState) -> None:
    """Frames that came before their SEAL; those of attempts that can no longer be sealed are dropped."""
    frames, state.held_frames = state.held_frames, ()
    later = []
    for sender, header, payload in frames:
        key = (header.round, header.attempt)
        if key == state.seen_attempt:
            _take_chunk(state, Frame(sender, header, payload))
        elif key > state.seen_attempt:
            later.append((sender, header, payload))
        else:
            state.dropped += 1
    state.held_frames = tuple(later)


def _take_chunk(state: MemberState, frame: Frame) -> bool:
    """Keep one chunk of the current attempt; True when it completed a slice. Sizes are checked before anything is kept."""
    header, exchange = frame.header, state.exchange
    assert exchange is not None and state.wire is not None
    slices = exchange.seal.slices
    incarnation, weight = exchange.senders.get(frame.sender, (-1, 0.0))
    if incarnation != header.incarnation or not 0 <= header.slice < len(slices):
        state.dropped += 1
        return False
    piece = slices[header.slice]
    start, stop = state.wire.byte_range(piece.start, piece.stop)
    wanted = header.kind == "mean" or (weight > 0 and piece.owner == state.node)
    if not wanted or header.total != stop - start or not 0 <= header.offset <= header.total - len(frame.payload):
        state.dropped += 1
        return False
    name = frame.sender if header.kind == "contribution" else ""
    have = header.slice in exchange.means or (name and (header.slice, name) in exchange.contributions)
    if have:
        return False
    key = (header.slice, str(header.kind), name)
    assembly = _with_chunk(exchange.partial.get(key) or Assembly(header.total, {}), header.offset, bytes(frame.payload))
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
