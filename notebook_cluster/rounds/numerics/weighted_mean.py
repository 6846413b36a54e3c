"""Means of contributions. Of sparse ones the owner of a slice sends all on, and every node takes the mean itself.

A codec that keeps a few elements of each chunk cannot encode their mean, which has more of them. The mean is taken
over those that sent a coordinate:
``D = sum_m w_m s_m / sum_m w_m`` (SparseLoCo, arXiv 2508.15706). Dividing by all instead would make the step smaller
where few agree. DeMo takes it over all: the transform spreads what was sent over the whole chunk, and of the mean only
the sign counts. float32, in rank order, one product and one addition at a time: the same bits on every machine.
"""

from typing import Any

import numpy as np

from notebook_cluster.codecs import Buffer, Codec, DamagedError, Vector, WireFormat, get_codec
from notebook_cluster.codecs.dct import KEEP, Dct
from notebook_cluster.codecs.kept import TwoLevels
from notebook_cluster.codecs.top_k import TopK
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.outer import weighted_sum

SPARSE = "sparse"
SPARSE_KEPT = 64
"""Elements of a chunk of 4096 that the paper keeps."""

DCT = "dct"


def codec_of(name: str) -> Codec:
    """The codec called ``name``; ``sparse-128`` keeps 128 elements of each chunk instead of 64, ``dct-16`` 16
    coefficients instead of 32.

    Raises:
        ValueError: there is none.
    """
    base, _, kept = name.partition("-")
    if base == SPARSE and kept.isdecimal():
        return TopK(name, int(kept), TwoLevels(int(kept)))
    if base == DCT and kept.isdecimal():
        return Dct(name, int(kept))
    return get_codec(name)


def sparse_name(k: int) -> str:
    """The name of the codec that keeps ``k`` elements of each chunk."""
    return SPARSE if k == SPARSE_KEPT else f"{SPARSE}-{k}"


def dct_name(k: int) -> str:
    """The name of the codec that keeps ``k`` coefficients of the cosine transform of each chunk."""
    return DCT if k == KEEP else f"{DCT}-{k}"


def gathered_size(senders: int, size: int) -> int:
    """Bytes of ``senders`` contributions of ``size`` bytes each."""
    return senders * (4 + size)


def gathered(contributions: list[tuple[Buffer, float]]) -> bytes:
    """Contributions and their weights (float32 numbers), in rank order, for :func:`mean_of_gathered`."""
    weights = np.array([weight for _, weight in contributions], "<f4").tobytes()
    return b"".join([weights, *(bytes(data) for data, _ in contributions)])


def mean_of(wire: WireFormat, contributions: list[tuple[Buffer, float]], start: int, stop: int) -> Vector:
    """The weighted mean of blocks ``start`` to ``stop``, as of :func:`.outer.weighted_sum`, of contributions and their
    weights (float32 numbers that add up to 1), in rank order.

    Raises:
        DamagedError: no codec writes such bytes.
    """
    low, high = wire.element_range(start, stop)
    total = vectors.empty(high - low)
    for group in wire.groups(start, stop):
        total[group.elements] = weighted_sum(
            (wire.decode(memoryview(data)[group.bytes], group.first, group.end), weight)
            for data, weight in contributions
        )
    return total


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
    if len(view) != gathered_size(senders, size):
        raise DamagedError(f"{len(view)} bytes are no {senders} contributions of {size} bytes")
    weights = np.frombuffer(view[: 4 * senders], "<f4")
    if not (np.isfinite(weights).all() and (weights > 0).all()):
        raise DamagedError("a weight that is not above 0")
    sent = [view[4 * senders + index * size :][:size] for index in range(senders)]
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
