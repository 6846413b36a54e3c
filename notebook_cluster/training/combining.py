"""Means of sparse contributions: the owner of a slice sends all of them on, and every node takes the mean itself.

A codec that keeps a few elements of each chunk cannot encode their mean, which has more of them. The mean is taken
over those that sent a coordinate:
``D = sum_m w_m s_m / sum_m w_m`` (SparseLoCo, arXiv 2508.15706). Dividing by all instead would make the step smaller
where few agree. DeMo takes it over all: the transform spreads what was sent over the whole chunk, and of the mean only
the sign counts. float32, in rank order, one product and one addition at a time: the same bits on every machine.
"""

import numpy as np

from notebook_cluster.codecs import Buffer, Codec, DamagedError, Vector, WireFormat, get_codec
from notebook_cluster.codecs.dct import KEEP, Dct
from notebook_cluster.codecs.levels import TwoLevels
from notebook_cluster.codecs.top_k import TopK

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


def mean_of_gathered(
    wire: WireFormat, data: Buffer, senders: int, start: int, stop: int, *, over_all: bool = False
) -> Vector:
    """The mean of blocks ``start`` to ``stop`` over the senders of each coordinate, or ``over_all``; 0 where nobody
    sent one. Buffers are averaged over all.

    Raises:
        DamagedError: no codec writes such bytes, or a weight is not above 0.
    """
    low, high = wire.byte_range(start, stop)
    first, last = wire.element_range(start, stop)
    view, size = memoryview(data), high - low
    if len(view) != gathered_size(senders, size):
        raise DamagedError(f"{len(view)} bytes are no {senders} contributions of {size} bytes")
    weights = np.frombuffer(view[: 4 * senders], "<f4")
    if not (np.isfinite(weights).all() and (weights > 0).all()):
        raise DamagedError("a weight that is not above 0")
    total = np.zeros(last - first, np.float32)
    for begin, end in wire.groups(start, stop):
        (offset, after), (element, beyond) = wire.byte_range(begin, end), wire.element_range(begin, end)
        part = total[element - first : beyond - first]
        trained = part[: max(0, wire.parameters - element)]
        sent_by = np.zeros(trained.size, np.float32)
        for index, weight in enumerate(weights):
            at = 4 * senders + index * size - low
            values = wire.decode(view[at + offset : at + after], begin, end)
            np.add(part, np.multiply(values, weight), out=part)
            if not over_all:
                np.add(sent_by, weight, out=sent_by, where=values[: trained.size] != 0)
        np.divide(trained, sent_by, out=trained, where=sent_by > 0)
    return total
