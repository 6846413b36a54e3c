"""The state after a round, of the one before and the round's means. Computes aside: nothing that others have is written
to."""

from notebook_cluster.codecs import Vector
from notebook_cluster.rounds.member.state import Exchange, KeptMean, MemberState
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.bits import bits_float
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.outer import outer_step
from notebook_cluster.rounds.numerics.weighted_mean import mean_of_gathered


def computed(state: MemberState, exchange: Exchange) -> tuple[Vector, Vector]:
    """(theta, momentum) after the round whose means are all in ``exchange``, a copy, as new arrays; without slices as
    they were. Only the fragment of that round differs.

    Raises:
        DamagedError: no codec writes such means.
    """
    assert state.fragments is not None
    assert state.theta is not None
    assert state.momentum is not None
    fragments, seal = state.fragments, exchange.seal
    if not seal.slices:
        return state.theta, state.momentum
    if fragments.by_slice:
        step_slices(state, exchange)
        assert exchange.theta is not None
        assert exchange.momentum is not None
        return exchange.theta, exchange.momentum
    wire, fragment = fragments.wire(seal.round), fragments.of_round(seal.round)
    mean = vectors.empty(fragments.result(seal.round).count)
    for index in range(len(seal.slices)):
        _read_mean(fragments, exchange, index, mean)
    mean = fragments.unpack(mean)
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


def step_slices(state: MemberState, exchange: Exchange) -> None:
    """The outer step in every slice whose mean has come since, while the others are on their way. ``exchange``, a copy,
    shares the arrays with older states, in which those slices are not stepped yet.

    Raises:
        DamagedError: no codec writes such a mean.
    """
    fragments, outer = state.fragments, exchange.seal.outer
    assert fragments is not None
    assert state.theta is not None
    assert state.momentum is not None
    if exchange.theta is None or exchange.momentum is None:
        exchange.theta, exchange.momentum = vectors.empty(fragments.size), vectors.empty(fragments.size)
    wire = fragments.wire(exchange.seal.round)
    lr, mu = bits_float(outer.lr_bits), bits_float(outer.momentum_bits)
    for index in sorted(exchange.means.keys() - exchange.stepped):
        here = _read_mean(fragments, exchange, index, exchange.momentum)
        buffers = 0 if fragments.gradients else max(0, here.stop - max(here.start, wire.parameters))
        before, mean = (state.theta[here], state.momentum[here]), exchange.momentum[here]
        outer_step(*before, mean, lr, mu, outer.nesterov, buffers, out=exchange.theta[here])
        exchange.stepped |= {index}


def _read_mean(fragments: Fragments, exchange: Exchange, index: int, out: Vector) -> slice:
    """Write one slice's mean to its place in ``out``, and say where that is."""
    piece, data = exchange.seal.slices[index], exchange.means[index]
    wire, over_all = fragments.result(exchange.seal.round), not fragments.over_senders
    here = slice(*wire.element_range(piece.start, piece.stop))
    if exchange.gathered:
        mean_of_gathered(wire, data, exchange.gathered, piece.start, piece.stop, over_all=over_all, out=out[here])
    else:
        wire.decode_into(data, out[here], piece.start, piece.stop)
    return here


def kept_mean(exchange: Exchange) -> KeptMean:
    """The means of a committed attempt, for nodes that were late."""
    slices = tuple(exchange.means[index] for index in range(len(exchange.seal.slices)))
    return KeptMean(exchange.seal.round, exchange.seal.attempt, slices, sum(map(len, slices)))
