"""Means of contributions. Of sparse ones the owner of a slice sends all on, and every node takes the mean itself.

A codec that keeps a few elements of each chunk cannot encode their mean, which has more of them. Where all keep the
same ones, because they were drawn for the round, it can: their owner adds those contributions up and sends the sum on
as one. A contribution that was made for an earlier round has other elements, and is sent on beside it.

The mean is taken over all: ``D = sum_m w_m s_m`` (sparse SGD with memory, arXiv 1809.07599, Deep Gradient Compression,
1712.01887). What a node keeps back is its error feedback and comes later, so in time every node's work arrives with its
weight, once. SparseLoCo (arXiv 2508.15706) takes it over those that sent a coordinate instead,
``D = sum_m w_m s_m / sum_m w_m``: it lets error feedback decay and has no momentum, and dividing by all would make its
step smaller where few agree. float32, in rank order, one product and one addition at a time: the same bits on every
machine.
"""

from typing import Any

import numpy as np

from notebook_cluster.codecs import Buffer, DamagedError, Memory, NotFiniteError, Vector, WireFormat, check_finite
from notebook_cluster.codecs.wire_format import Group
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.outer import weighted_sum


def gathered_count(wire: WireFormat, senders: int, size: int, total: int) -> int:
    """How many contributions of ``size`` bytes the owner of a slice sends on in ``total`` bytes, of so many
    ``senders``: all, or, where they are drawn, from one on. 0: it cannot have sent so many bytes."""
    count, rest = divmod(total, 4 + size)
    return count if not rest and (1 if wire.draws else senders) <= count <= senders else 0


def gathered(contributions: list[tuple[Buffer, float]]) -> bytes:
    """Contributions and their weights (float32 numbers), in rank order, for :func:`mean_of_gathered`."""
    weights = np.array([weight for _, weight in contributions], "<f4").tobytes()
    return b"".join([weights, *(bytes(data) for data, _ in contributions)])


def joined(wire: WireFormat, contributions: list[tuple[Buffer, float]], start: int, stop: int) -> bytes:
    """:func:`gathered`, of blocks ``start`` to ``stop``, with the sum of those that have the same elements in place of
    each of them, where these are drawn.

    Raises:
        DamagedError: no codec writes such bytes.
        NotFiniteError: a sum is infinite.
    """
    if not wire.draws:
        return gathered(contributions)
    alike: dict[bytes, list[tuple[Buffer, float]]] = {}
    for data, weight in contributions:
        alike.setdefault(wire.places(data, start, stop), []).append((data, weight))
    return gathered([same[0] if len(same) == 1 else (_sum(wire, same, start, stop), 1.0) for same in alike.values()])


def _sum(wire: WireFormat, contributions: list[tuple[Buffer, float]], start: int, stop: int) -> Buffer:
    """The weighted sum of contributions that have the same elements, encoded as one of them."""
    pieces: list[Buffer] = []
    for group in wire.groups(start, stop):
        same = [memoryview(data)[group.bytes] for data, _ in contributions]
        rows = wire.kept_of_all(same, group)[1]
        with np.errstate(over="ignore"):
            total = weighted_sum((row, weight) for row, (_, weight) in zip(rows, contributions, strict=True))
        if not np.isfinite(total).all():
            raise NotFiniteError("infinity in the mean")
        pieces.append(wire.with_values(same[0], total, group))
    return b"".join(pieces)


def mean_of(wire: WireFormat, contributions: list[tuple[Buffer, float]], start: int, stop: int) -> Vector:
    """The weighted mean of blocks ``start`` to ``stop``, as of :func:`.outer.weighted_sum`, of contributions and their
    weights (float32 numbers that add up to 1), in rank order.

    Raises:
        DamagedError: no codec writes such bytes.
    """
    low, high = wire.element_range(start, stop)
    total = vectors.empty(high - low)
    for group in wire.groups(start, stop):
        _mean_of_group(wire, contributions, group, total[group.elements])
    return total


def _mean_of_group(wire: WireFormat, contributions: list[tuple[Buffer, float]], group: Group, out: Vector) -> None:
    decoded = (
        (wire.decode(memoryview(data)[group.bytes], group.first, group.end), weight) for data, weight in contributions
    )
    weighted_sum(decoded, out)


def encoded_mean(
    wire: WireFormat,
    contributions: list[tuple[Buffer, float]],
    start: int,
    stop: int,
    memory: Memory,
) -> memoryview:
    """:func:`mean_of` as bytes in ``memory`` (of so many bytes), encoded group by group while it is in the cache.

    Raises:
        DamagedError: no codec writes such bytes.
        NotFiniteError: there is NaN or infinity in the mean.
    """
    low, high = wire.byte_range(start, stop)
    data = memory(high - low)
    exact = data.view("<f4") if wire.is_float32 else None
    scratch = np.empty(0 if exact is not None else wire.largest_group, np.float32)
    for group in wire.groups(start, stop):
        count = group.elements.stop - group.elements.start
        mean = scratch[:count] if exact is None else exact[group.elements]
        _mean_of_group(wire, contributions, group, mean)
        if exact is None:
            data[group.bytes] = wire.encode(mean, group.first, group.end)
        else:
            check_finite(mean, group.elements.start)
    return data.data.toreadonly()


def is_finite(wire: WireFormat, data: Buffer, start: int, stop: int) -> bool:
    """A codec wrote ``data``, blocks ``start`` to ``stop`` of a contribution, without NaN and infinity."""
    view = memoryview(data)
    try:
        return all(
            bool(np.isfinite(wire.kept(view[group.bytes], group)[1]).all()) for group in wire.groups(start, stop)
        )
    except DamagedError:
        return False


def mean_of_gathered(
    wire: WireFormat,
    data: Buffer,
    senders: int,
    start: int,
    stop: int,
    *,
    over_all: bool = False,
    out: Vector | None = None,
) -> Vector:
    """The mean of blocks ``start`` to ``stop`` over the senders of each coordinate, or ``over_all``; 0 where nobody
    sent one. Buffers are averaged over all. With ``out`` it is written there.

    Raises:
        DamagedError: no codec writes such bytes, or a weight is not above 0.
    """
    low, high = wire.byte_range(start, stop)
    view, size = memoryview(data), high - low
    count = gathered_count(wire, senders, size, len(view))
    if not count:
        raise DamagedError(f"{len(view)} bytes are no {senders} contributions of {size} bytes")
    weights = np.frombuffer(view[: 4 * count], "<f4")
    if not (np.isfinite(weights).all() and (weights > 0).all()):
        raise DamagedError("a weight that is not above 0")
    sent = [view[4 * count + index * size :][:size] for index in range(count)]
    low, high = wire.element_range(start, stop)
    total = vectors.empty(high - low) if out is None else out
    sums = vectors.empty(2 * wire.largest_group).view(np.complex64)
    for group in wire.groups(start, stop):
        part, pieces = total[group.elements], [contribution[group.bytes] for contribution in sent]
        part.fill(0)
        of_all = over_all or group.are_buffers
        if of_all and not wire.keeps_some(group):
            for weight, piece in zip(weights, pieces, strict=True):
                part += wire.decode(piece, group.first, group.end) * weight
            continue
        places, values = wire.kept_of_all(pieces, group)
        if of_all:
            np.add.at(part, places.reshape(-1), (values * weights[:, None]).reshape(-1))
        else:
            _mean_of_senders(places.reshape(-1), values, weights, sums, part)
    return total


def _mean_of_senders(places: Any, values: Any, weights: Any, sums: Any, out: Vector) -> None:
    """The mean of what was sent of each place, into ``out`` at that place. Products and weights are the two parts of
    one complex number: what belongs to a place is looked for once.

    Args:
        places: int64 (senders x kept), the same place at most once from a sender.
        values: float32 (senders, kept); 0: not sent.
        weights: float32 (senders,).
        sums: complex64, as many as ``out`` has places at least; written to.
    """
    terms = np.empty(values.shape, np.complex64)
    np.multiply(values, weights[:, None], out=terms.real)
    np.multiply(values != 0, weights[:, None], out=terms.imag)
    sums[places] = 0
    np.add.at(sums, places, terms.reshape(-1))
    found = sums.take(places)
    out[places] = found.real / (found.imag + (found.imag == 0))  # without a weight the product is 0
