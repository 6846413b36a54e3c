"""One sealed attempt on one node: contributions to the owners of slices, means back, the next state, PREPARED. Applies
nothing.

Every function here gets a copy of the member's state that it may change and a list that it adds effects to;
dictionaries inside :class:`~.state.Exchange` are replaced, because older states share them.
"""

from copy import copy

import numpy as np
import xxhash

from notebook_cluster.codecs import DamagedError, NotFiniteError, Vector
from notebook_cluster.protocol.rounds import CompleteAttempt, Prepared, Seal
from notebook_cluster.rounds.member.chunks import my_bytes, send_slice, take_chunk, take_held, to_send
from notebook_cluster.rounds.member.events_effects import (
    Boundary,
    Buffer,
    CancelFetch,
    Effect,
    Frame,
    Log,
    SendControl,
    Stepped,
    TakeStep,
)
from notebook_cluster.rounds.member.next_state import computed, is_large, next_hash, step_slices
from notebook_cluster.rounds.member.retransmission import on_sent, on_want, request_missing, stalled
from notebook_cluster.rounds.member.state import Exchange, MemberState
from notebook_cluster.rounds.numerics.outer import bits_float, flushes_subnormals
from notebook_cluster.rounds.numerics.weighted_mean import encoded_mean, is_finite, joined, mean_of


def on_seal(state: MemberState, seal: Seal, effects: list[Effect]) -> None:
    """Begin the attempt, or say PREPARED again when it is already done; a SEAL that cannot be meant for this state is
    ignored."""
    exchange = state.exchange
    if exchange is not None and (seal.round, seal.attempt) == (exchange.seal.round, exchange.seal.attempt):
        if exchange.prepared is not None:
            effects.append(SendControl(exchange.prepared))
        return
    senders = {member.name: (member.incarnation, bits_float(member.weight_bits)) for member in seal.members}
    number, attempt = state.seen_attempt
    # a node that left the last attempt, and arrived once more, may begin it again
    over = seal.round == number and (seal.attempt < attempt or (seal.attempt == attempt and exchange is not None))
    if over or seal.round != state.round + 1 or seal.base_hash != state.state_hash or state.node not in senders:
        return
    mine = next(member for member in seal.members if member.name == state.node)
    weight = senders[state.node][1]
    if (mine.incarnation, mine.contribution) != (state.incarnation, state.serial) or state.contribution is None:
        return
    if weight > 0 and not _is_whole(state, state.contribution, seal.round):
        return
    if state.phase == "fetching":  # a restarted coordinator went back to the state that is held here
        effects.append(CancelFetch())
    state.seen_attempt, state.served_by = (seal.round, seal.attempt), ("", 0)
    state.serving = {node: round for node, round in state.serving.items() if node not in senders}
    state.phase, state.catching = "exchanging", ()
    state.exchange = exchange = Exchange(seal, senders, {}, {}, {}, progress=state.now)
    kept = {(mean.round, mean.attempt) for mean in state.kept}
    state.handed = {key: times for key, times in state.handed.items() if key[:2] in kept}
    if state.fragments is not None and state.fragments.all_gather:
        exchange.gathered = sum(weight > 0 for _, weight in senders.values())
    if weight > 0:
        exchange.contributions = {
            (index, state.node): my_bytes(state, index)
            for index, piece in enumerate(seal.slices)
            if piece.owner == state.node
        }
        for index in to_send(seal, state.node):
            send_slice(state, seal.slices[index].owner, "contribution", index, my_bytes(state, index), effects)
    take_held(state)
    advance(state, effects)


def _is_whole(state: MemberState, mine: Boundary, round: int) -> bool:
    """The bytes are those of the fragment of this round."""
    fragments = state.fragments
    if fragments is None or mine.fragment != fragments.of_round(round):
        return False
    return len(mine.encoded) == fragments.wire(round).size


def on_frame(state: MemberState, frame: Frame, effects: list[Effect]) -> None:
    """A chunk of this attempt is kept, one of a newer attempt held, an older or impossible one dropped and counted."""
    header = frame.header
    if header.kind in ("want", "sent"):
        answer = on_want if header.kind == "want" else on_sent
        answer(state, frame, effects)
        return
    key, exchange = (header.round, header.attempt), state.exchange
    if exchange is not None and key == (exchange.seal.round, exchange.seal.attempt):
        if take_chunk(state, frame):
            advance(state, effects)
        return
    repeated = header.round == state.seen_attempt[0] and header.attempt <= state.seen_attempt[1]
    frames, settings = (*state.held_frames, (frame.sender, header, frame.payload)), state.settings
    held = sum(len(payload) for _, _, payload in frames if not _is_lent(payload))
    full = len(frames) > settings.held_frames or held > settings.held_bytes
    if header.round <= state.round or repeated or full or len(header.state_hash) + len(header.name) > 256:
        state.dropped += 1
        return
    state.held_frames = frames


def _is_lent(payload: Buffer) -> bool:
    """It lies in another node's memory: a view of what is mapped, where a socket gives one of what it has received."""
    return isinstance(payload, memoryview) and isinstance(payload.obj, np.ndarray)


def on_complete(state: MemberState, message: CompleteAttempt, effects: list[Effect]) -> None:
    """A member was lost, but ``sources`` hold every mean: ask them at once."""
    exchange = state.exchange
    if exchange is None or (message.round, message.attempt) != (exchange.seal.round, exchange.seal.attempt):
        return
    if exchange.prepared is not None:
        effects.append(SendControl(exchange.prepared))
        return
    exchange = state.exchange = copy(exchange)
    exchange.sources = tuple(name for name in message.sources if name != state.node)
    exchange.turn = 0
    request_missing(state, effects)


def on_tick(state: MemberState, effects: list[Effect]) -> None:
    """WANT after half a second without progress, STALLED after two and a half."""
    exchange, settings = state.exchange, state.settings
    if exchange is None or exchange.prepared is not None or exchange.stepping or state.left:
        return
    if state.now - max(exchange.progress, exchange.wanted) >= settings.want_after:
        state.exchange = exchange = copy(exchange)
        request_missing(state, effects)
    if state.now - max(exchange.progress, exchange.stalled) >= settings.stalled_after:
        state.exchange = exchange = copy(exchange)
        exchange.stalled = state.now
        effects.append(SendControl(stalled(state, exchange)))


def advance(state: MemberState, effects: list[Effect]) -> None:
    """Encode the means that can be encoded, step with those that are here, then prepare if that is every mean."""
    exchange = state.exchange
    if exchange is None or exchange.prepared is not None or exchange.broken or state.catching:
        return
    contributors = [name for name, (_, weight) in exchange.senders.items() if weight > 0]
    for index, piece in enumerate(exchange.seal.slices):
        if piece.owner != state.node or index in exchange.means:
            continue
        if exchange.stepping:
            return
        exchange = inspect_contributions(state, exchange, index)
        if all((index, name) in exchange.contributions for name in contributors):
            mean = slice_mean(state, exchange, index, contributors, effects)
            if mean is None:
                return
            exchange = _send_mean(state, exchange, index, mean, effects)
    by_slice = state.fragments is not None and state.fragments.by_slice and not is_large(state)
    if by_slice and exchange.means.keys() - exchange.stepped:
        exchange = state.exchange = copy(exchange)
        try:
            step_slices(state, exchange)
        except DamagedError as error:
            _ask_again(state, exchange, error, effects)
            return
    if len(exchange.means) == len(exchange.seal.slices):
        _prepare(state, effects)


def _send_mean(state: MemberState, exchange: Exchange, index: int, mean: Buffer, effects: list[Effect]) -> Exchange:
    exchange = state.exchange = copy(exchange)
    exchange.means = {**exchange.means, index: mean}
    # nobody asks an owner for what it was sent: a new attempt is sent everything anew
    exchange.contributions = {key: data for key, data in exchange.contributions.items() if key[0] != index}
    for name in exchange.senders:
        if name != state.node:
            send_slice(state, name, "mean", index, mean, effects)
    return exchange


def on_stepped(state: MemberState, event: Stepped, effects: list[Effect]) -> None:
    """The parameters that the optimiser made of the mean go to all, if this attempt is still open."""
    exchange, fragments = state.exchange, state.fragments
    if exchange is None or fragments is None or not exchange.stepping or exchange.means:
        return
    if (event.round, event.attempt) != (exchange.seal.round, exchange.seal.attempt):
        return
    theta = fragments.result(event.round).encode_in(state.memory, event.theta)
    _send_mean(state, exchange, 0, theta, effects)
    advance(state, effects)


def _prepare(state: MemberState, effects: list[Effect]) -> None:
    """Compute the new state, aside or of a large model its hash alone, and say PREPARED."""
    assert state.exchange is not None
    exchange = state.exchange = copy(state.exchange)
    seal = exchange.seal
    assert state.fragments is not None
    try:
        if is_large(state) and seal.slices:
            state_hash = next_hash(state, exchange)
        else:
            exchange.theta, exchange.momentum = computed(state, exchange)
            state_hash = state.fragments.state_hash(exchange.theta, exchange.momentum)
    except DamagedError as error:
        _ask_again(state, exchange, error, effects)
        return
    flushes = flushes_subnormals()
    if flushes and not state.fragments.central_optimizer:
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
        state_hash=state_hash,
        flushes=flushes,
    )
    state.phase = "prepared"
    effects.append(SendControl(exchange.prepared))


def _ask_again(state: MemberState, exchange: Exchange, error: DamagedError, effects: list[Effect]) -> None:
    """What the owners of slices sent is not what a codec writes: their slices are missing again."""
    foreign = {index for index, piece in enumerate(exchange.seal.slices) if piece.owner != state.node}
    owners = ", ".join(sorted({repr(exchange.seal.slices[index].owner) for index in foreign}))
    effects.append(Log("error", f"round {exchange.seal.round}: {owners} sent bytes that no codec writes ({error})"))
    exchange.means = {index: mean for index, mean in exchange.means.items() if index not in foreign}
    exchange.stepped -= foreign


# ---- what is computed of the contributions -------------------------------------------------------------------


def inspect_contributions(state: MemberState, exchange: Exchange, index: int) -> Exchange:
    """What is only sent on is looked at as it comes, while the others are on their way. One's own was just encoded."""
    new = [name for number, name in exchange.contributions if number == index and (index, name) not in exchange.usable]
    new = [name for name in new if name != state.node]
    if not exchange.gathered or not new:
        return exchange
    exchange = state.exchange = copy(exchange)
    exchange.usable = {**exchange.usable, **{(index, name): _is_usable(state, exchange, index, name) for name in new}}
    return exchange


def slice_mean(
    state: MemberState, exchange: Exchange, index: int, contributors: list[str], effects: list[Effect]
) -> Buffer | None:
    """What the owner of a slice sends back: the encoded weighted mean, members added in rank order, or all
    contributions; None when one of them is not usable, or the optimiser has to make its step first."""
    piece = exchange.seal.slices[index]
    assert state.fragments is not None
    wire = state.fragments.wire(exchange.seal.round)

    def largest(name: str) -> float:
        return float(np.abs(wire.decode(exchange.contributions[index, name], piece.start, piece.stop)).max())

    sent = [(exchange.contributions[index, name], exchange.senders[name][1]) for name in contributors]
    broken = [name for name in contributors if not exchange.usable.get((index, name), True)]
    try:
        if exchange.gathered and not broken:
            return joined(wire, sent, piece.start, piece.stop)
        if not broken:
            with np.errstate(all="ignore"):
                if not state.fragments.central_optimizer:
                    return encoded_mean(wire, sent, piece.start, piece.stop, state.memory)
                total = mean_of(wire, sent, piece.start, piece.stop)
            _let_step(state, exchange, total, len(contributors), effects)
            return None
    except (NotFiniteError, DamagedError):
        broken = [name for name in contributors if not _is_usable(state, exchange, index, name)]
        broken = broken or [max(contributors, key=largest)]
    state.exchange = copy(exchange)
    state.exchange.broken = tuple(broken)
    effects.append(SendControl(stalled(state, state.exchange)))
    return None


def _is_usable(state: MemberState, exchange: Exchange, index: int, name: str) -> bool:
    piece = exchange.seal.slices[index]
    assert state.fragments is not None
    wire = state.fragments.wire(exchange.seal.round)
    return is_finite(wire, exchange.contributions[index, name], piece.start, piece.stop)


def _let_step(state: MemberState, exchange: Exchange, mean: Vector, nodes: int, effects: list[Effect]) -> None:
    """Raises:
    NotFiniteError: there is NaN or infinity in ``mean``.
    """
    if not np.isfinite(mean).all():
        raise NotFiniteError("NaN or infinity in the mean")
    state.exchange = exchange = copy(exchange)
    exchange.stepping = True
    seal = exchange.seal
    effects.append(TakeStep(seal.round, seal.attempt, mean, nodes, seal.gradients))
