"""One sealed attempt on one node: contributions to the owners of slices, means back, PREPARED. Applies nothing.

Every function here gets a copy of the member's state that it may change and a list that it adds effects to;
dictionaries inside :class:`~.member_types.Exchange` are replaced, because older states share them.
"""

from copy import copy

import numpy as np
import xxhash

from notebook_cluster.codecs import NotFiniteError, Vector
from notebook_cluster.protocol.rounds import Complete, Prepared, Seal
from notebook_cluster.training.member_chunks import (
    my_bytes,
    send_slice,
    serve,
    stalled,
    take_chunk,
    take_held,
    want,
)
from notebook_cluster.training.member_types import (
    Buffer,
    Effect,
    Exchange,
    Frame,
    KeptMean,
    Log,
    MemberState,
    SendControl,
)
from notebook_cluster.training.outer import bits_float, flushes_subnormals, outer_step, state_hash, weighted_sum


def take_seal(state: MemberState, seal: Seal, effects: list[Effect]) -> None:
    """Begin the attempt, or say PREPARED again when it is already done; a SEAL that cannot be meant for this state is
    ignored."""
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
            (index, state.node): my_bytes(state, index)
            for index, piece in enumerate(seal.slices)
            if piece.owner == state.node
        }
        for index, piece in enumerate(seal.slices):
            if piece.owner != state.node:
                send_slice(state, piece.owner, "contribution", index, my_bytes(state, index), effects)
    take_held(state)
    advance(state, effects)


def take_frame(state: MemberState, frame: Frame, effects: list[Effect]) -> None:
    """A chunk of this attempt is kept, one of a newer attempt held, an older or impossible one dropped and counted."""
    header = frame.header
    if header.kind == "want":
        serve(state, frame, effects)
        return
    key, exchange = (header.round, header.attempt), state.exchange
    if exchange is not None and key == (exchange.seal.round, exchange.seal.attempt):
        if take_chunk(state, frame):
            advance(state, effects)
        return
    repeated = header.round == state.seen_attempt[0] and header.attempt <= state.seen_attempt[1]
    held, settings = sum(len(payload) for _, _, payload in state.held_frames), state.settings
    full = len(state.held_frames) >= settings.held_frames or held + len(frame.payload) > settings.held_bytes
    if header.round <= state.round or repeated or full or len(header.state_hash) + len(header.name) > 256:
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
    want(state, effects)


def tick(state: MemberState, effects: list[Effect]) -> None:
    """WANT after a second without progress, STALLED after two and a half."""
    exchange, settings = state.exchange, state.settings
    if exchange is None or exchange.prepared is not None or state.left:
        return
    if state.now - max(exchange.progress, exchange.wanted) >= settings.want_after:
        state.exchange = exchange = copy(exchange)
        want(state, effects)
    if state.now - max(exchange.progress, exchange.stalled) >= settings.stalled_after:
        state.exchange = exchange = copy(exchange)
        exchange.stalled = state.now
        effects.append(SendControl(stalled(state, exchange)))


def advance(state: MemberState, effects: list[Effect]) -> None:
    """Encode the means that can be encoded, then prepare if every mean is here."""
    exchange = state.exchange
    if exchange is None or exchange.prepared is not None or exchange.broken or state.catching:
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
                    send_slice(state, name, "mean", index, mean, effects)
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
        effects.append(SendControl(stalled(state, state.exchange)))
        return None


def computed(state: MemberState, exchange: Exchange) -> tuple[Vector, Vector]:
    """(theta, momentum) after the round whose means are all in ``exchange``, as new arrays; without slices as they
    were."""
    assert state.wire is not None
    assert state.theta is not None
    assert state.momentum is not None
    slices, outer = exchange.seal.slices, exchange.seal.outer
    if not slices:
        return state.theta, state.momentum
    pieces = [state.wire.decode(exchange.means[i], piece.start, piece.stop) for i, piece in enumerate(slices)]
    mean = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    lr, mu = bits_float(outer.lr_bits), bits_float(outer.momentum_bits)
    return outer_step(state.theta, state.momentum, mean, lr, mu, outer.nesterov, state.wire.buffers)


def _prepare(state: MemberState, effects: list[Effect]) -> None:
    """Compute the new state aside and say PREPARED."""
    assert state.exchange is not None
    exchange = state.exchange = copy(state.exchange)
    seal = exchange.seal
    exchange.theta, exchange.momentum = computed(state, exchange)
    if flushes_subnormals():
        text = (
            "this process rounds subnormal numbers to zero, so its state will differ: torch.set_flush_denormal(False)"
        )
        effects.append(Log("error", text))
    exchange.prepared = Prepared(
        job=state.job,
        round=seal.round,
        attempt=seal.attempt,
        incarnation=state.incarnation,
        fragment=seal.fragment,
        slice_hashes=[xxhash.xxh3_128_hexdigest(exchange.means[index]) for index in range(len(seal.slices))],
        state_hash=state_hash(exchange.theta, exchange.momentum),
    )
    state.phase = "prepared"
    effects.append(SendControl(exchange.prepared))
