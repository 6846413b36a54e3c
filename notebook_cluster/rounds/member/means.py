"""What is computed of the contributions to a round: the means of slices and the state after it. Same habits as
:mod:`.exchange`."""

from copy import copy

import numpy as np

from notebook_cluster.codecs import NotFiniteError, Vector
from notebook_cluster.rounds.member.events_effects import Buffer, Effect, SendControl, TakeStep
from notebook_cluster.rounds.member.retransmission import stalled
from notebook_cluster.rounds.member.state import Exchange, KeptMean, MemberState
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.outer import bits_float, outer_step
from notebook_cluster.rounds.numerics.weighted_mean import gathered, is_finite, mean_of, mean_of_gathered


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
    if exchange.gathered and not broken:
        return gathered(sent)
    try:
        if not broken:
            with np.errstate(all="ignore"):
                total = mean_of(wire, sent, piece.start, piece.stop)
            if state.fragments.central_optimizer:
                _let_step(state, exchange, total, len(contributors), effects)
                return None
            return wire.encode(total, piece.start, piece.stop)
    except NotFiniteError:
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


def computed(state: MemberState, exchange: Exchange) -> tuple[Vector, Vector]:
    """(theta, momentum) after the round whose means are all in ``exchange``, as new arrays; without slices as they
    were. Only the fragment of that round differs."""
    assert state.fragments is not None
    assert state.theta is not None
    assert state.momentum is not None
    fragments, seal = state.fragments, exchange.seal
    if not seal.slices:
        return state.theta, state.momentum
    wire, fragment = fragments.wire(seal.round), fragments.of_round(seal.round)
    mean = fragments.unpack(_means(fragments, exchange))
    if fragments.central_optimizer:
        return mean, state.momentum
    lr, mu = bits_float(seal.outer.lr_bits), bits_float(seal.outer.momentum_bits)
    before = fragments.take(state.theta, fragment), fragments.take(state.momentum, fragment)
    if fragments.descent is not None:
        mean = fragments.descent.direction(mean, before[0], wire.buffers)
    stepped = outer_step(*before, mean, lr, mu, seal.outer.nesterov, 0 if fragments.gradients else wire.buffers)
    if fragments.count == 1:
        return stepped
    theta, momentum = vectors.copy(state.theta), vectors.copy(state.momentum)
    fragments.put(theta, fragment, stepped[0])
    fragments.put(momentum, fragment, stepped[1])
    return theta, momentum


def _means(fragments: Fragments, exchange: Exchange) -> Vector:
    """The means of all slices as one new vector."""
    wire, over_all = fragments.result(exchange.seal.round), fragments.descent is not None
    mean = vectors.empty(wire.count)
    for index, piece in enumerate(exchange.seal.slices):
        data, out = exchange.means[index], mean[slice(*wire.element_range(piece.start, piece.stop))]
        if exchange.gathered:
            mean_of_gathered(wire, data, exchange.gathered, piece.start, piece.stop, over_all=over_all, out=out)
        else:
            wire.decode_into(data, out, piece.start, piece.stop)
    return mean


def kept_mean(exchange: Exchange) -> KeptMean:
    """The means of a committed attempt, for nodes that were late."""
    slices = tuple(exchange.means[index] for index in range(len(exchange.seal.slices)))
    return KeptMean(exchange.seal.round, exchange.seal.attempt, slices, sum(map(len, slices)))
