"""The state after a round, of the one before and the round's means.

Of a small model it is computed aside, as the means come, and swapped in at COMMIT. Of a large one that would be two
more vectors of the model's size: so it is computed in groups of elements twice, first only to know its hash, and at
COMMIT where the state is. Of any in fragments only the fragment of the round is aside until then.
"""

from collections.abc import Iterator

import numpy as np

from notebook_cluster.codecs import DamagedError, Vector
from notebook_cluster.rounds.member.state import Exchange, KeptMean, MemberState
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.bits import bits_float
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.momentum import FLOAT32, kept_as
from notebook_cluster.rounds.numerics.outer import CHUNK, StateHash, outer_step
from notebook_cluster.rounds.numerics.weighted_mean import mean_of_gathered


class ChangedError(RuntimeError):
    """What is computed at COMMIT is not what was computed before PREPARED: memory was damaged."""


def is_large(state: MemberState) -> bool:
    """Whether the next state is only hashed until COMMIT, or in fragments."""
    fragments = state.fragments
    if fragments is None or fragments.gradients or fragments.central_optimizer or fragments.descent is not None:
        return False
    settings = state.settings
    least = settings.in_files_from if vectors.is_in_file(state.theta) else settings.in_place_from
    return fragments.count > 1 or fragments.size >= least


def next_hash(state: MemberState, exchange: Exchange) -> str:
    """The hash of the state after the round whose means are all in ``exchange``, a copy, which gets what
    :func:`step_in_place` needs.

    Raises:
        DamagedError: no codec writes such means.
    """
    assert state.fragments is not None
    assert state.theta is not None
    assert state.momentum is not None
    exchange.in_place, exchange.theta, exchange.momentum = True, None, None
    whole, digests = StateHash(), []
    if state.fragments.count > 1:
        exchange.theta, exchange.momentum = stepped = _stepped_fragment(state, exchange)
        fragment = state.fragments.of_round(exchange.seal.round)
        pairs = list(zip((state.theta, state.momentum), stepped, strict=True))
        for theta, momentum in state.fragments.stripes(fragment, pairs):
            whole.add(theta, momentum)
        return whole.hexdigest()
    for _, theta, momentum in _groups(state, exchange):
        whole.add(theta, momentum)
        digests.append(whole.so_far())
    exchange.digests = tuple(digests)
    return whole.hexdigest()


def step_in_place(state: MemberState, exchange: Exchange) -> None:
    """theta and momentum of ``state`` become those of the state that :func:`next_hash` knows.

    Raises:
        ChangedError: a group would become another: it and those behind it are as they were.
    """
    assert state.fragments is not None
    assert state.theta is not None
    assert state.momentum is not None
    if exchange.theta is not None and exchange.momentum is not None:
        fragment = state.fragments.of_round(exchange.seal.round)
        state.fragments.put(state.theta, fragment, exchange.theta)
        state.fragments.put(state.momentum, fragment, exchange.momentum)
        return
    again = StateHash()
    try:
        for so_far, (here, theta, momentum) in zip(exchange.digests, _groups(state, exchange), strict=True):
            again.add(theta, momentum)
            if again.so_far() != so_far:
                raise ChangedError(f"elements from {here.start:,} on")
            state.theta[here], state.momentum[here] = theta, momentum
    except DamagedError as error:
        raise ChangedError(str(error)) from None


def _groups(state: MemberState, exchange: Exchange) -> Iterator[tuple[slice, Vector, Vector]]:
    """(where, theta, momentum) of each group of elements of the next state, in their order, in memory that the next one
    takes again."""
    fragments, seal = state.fragments, exchange.seal
    assert fragments is not None
    assert state.theta is not None
    assert state.momentum is not None
    wire, over_all = fragments.wire(seal.round), not fragments.over_senders
    lr, mu = bits_float(seal.outer.lr_bits), bits_float(seal.outer.momentum_bits)
    scratch = np.empty((2, max(_GROUP, fragments.codec.block)), np.float32)
    for index in sorted(range(len(seal.slices)), key=lambda index: seal.slices[index].start):
        piece, data = seal.slices[index], memoryview(exchange.means[index])
        first = wire.element_range(piece.start, piece.stop)[0]
        gathered = None
        if exchange.gathered:
            gathered = mean_of_gathered(wire, data, exchange.gathered, piece.start, piece.stop, over_all=over_all)
        for group in wire.groups(piece.start, piece.stop, _GROUP):
            here = slice(first + group.elements.start, first + group.elements.stop)
            mean, theta = scratch[:, : here.stop - here.start]
            if gathered is not None:
                decoded = gathered[group.elements]
            else:
                decoded = wire.decode(data[group.bytes], group.first, group.end)
            if decoded.flags.writeable:  # nobody else has it
                mean = decoded
            else:
                mean[...] = decoded
            buffers = mean.size if group.are_buffers else 0
            before, nesterov = (state.theta[here], state.momentum[here]), seal.outer.nesterov
            _, momentum = outer_step(*before, mean, lr, mu, nesterov, buffers, out=theta)
            yield here, theta, momentum


_GROUP = 2 * CHUNK
"""Elements that stay in the processor's cache: of theta, momentum, mean, and both as they will be."""


def computed(state: MemberState, exchange: Exchange) -> tuple[Vector, Vector]:
    """(theta, momentum) of a model in one fragment after the round whose means are all in ``exchange``, a copy, as new
    arrays; without slices as they were.

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
    if fragments.central_optimizer:
        return _mean(fragments, exchange), state.momentum
    return _stepped_fragment(state, exchange)


def _stepped_fragment(state: MemberState, exchange: Exchange) -> tuple[Vector, Vector]:
    """(theta, momentum) of the fragment of the round, as new arrays."""
    fragments, seal = state.fragments, exchange.seal
    assert fragments is not None
    assert state.theta is not None
    assert state.momentum is not None
    wire, fragment = fragments.wire(seal.round), fragments.of_round(seal.round)
    mean = _mean(fragments, exchange)
    lr, mu = bits_float(seal.outer.lr_bits), bits_float(seal.outer.momentum_bits)
    before = fragments.take(state.theta, fragment), fragments.take(state.momentum, fragment)
    if fragments.descent is not None:
        mean = fragments.descent.direction(mean, before[0], wire.buffers)
    return outer_step(*before, mean, lr, mu, seal.outer.nesterov, 0 if fragments.gradients else wire.buffers)


def _mean(fragments: Fragments, exchange: Exchange) -> Vector:
    """Of the whole fragment, as a new array."""
    mean = vectors.empty(fragments.result(exchange.seal.round).count)
    for index in range(len(exchange.seal.slices)):
        _read_mean(fragments, exchange, index, mean)
    return fragments.unpack(mean)


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
        exchange.theta, exchange.momentum = vectors.like(state.theta), vectors.like(state.momentum)
    same = kept_as(exchange.momentum) == FLOAT32
    means = exchange.momentum if same else vectors.empty(fragments.size)
    wire = fragments.wire(exchange.seal.round)
    lr, mu = bits_float(outer.lr_bits), bits_float(outer.momentum_bits)
    for index in sorted(exchange.means.keys() - exchange.stepped):
        here = _read_mean(fragments, exchange, index, means)
        buffers = 0 if fragments.gradients else max(0, here.stop - max(here.start, wire.parameters))
        before, mean = (state.theta[here], state.momentum[here]), means[here]
        _, momentum = outer_step(*before, mean, lr, mu, outer.nesterov, buffers, out=exchange.theta[here])
        if not same:
            exchange.momentum[here] = momentum
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
