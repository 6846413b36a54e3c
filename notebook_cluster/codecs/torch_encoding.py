"""Codecs in torch, for vectors on a GPU: encoded bytes cross to the host, not the vector.

The arithmetic is that of :mod:`.scaled`, :mod:`.top_k` and :mod:`.random_k`, operation by operation, so the bytes are
those that the host would make: whoever changes one changes both, the tests compare them.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from notebook_cluster.codecs.chunked import KeepsSome
from notebook_cluster.codecs.codec import Buffer, Codec, NotFiniteError
from notebook_cluster.codecs.random_k import RandomK
from notebook_cluster.codecs.scaled import BlockScaled, Cast, Int4
from notebook_cluster.codecs.top_k import TopK
from notebook_cluster.codecs.wire_format import WireFormat

if TYPE_CHECKING:
    import torch

_AT_A_TIME = 4 << 20
"""Elements, at most, encoded in one go."""


def has_form(codec: Codec) -> bool:
    """Whether :func:`encode` knows this codec."""
    return isinstance(codec, TopK | RandomK) or (
        isinstance(codec, BlockScaled) and isinstance(codec.codes, Cast | Int4)
    )


def encode(wire: WireFormat, work: "torch.Tensor") -> Buffer:
    """The bytes of ``work`` (flat float32, ``wire.count`` elements), from which what they say is taken away.

    Raises:
        NotFiniteError: a value is NaN or infinite.
    """
    import torch

    codec, encoded, position = wire.codec, np.empty(wire.size, np.uint8), 0
    blocks = wire.parameters // codec.block
    whole, step = work[: blocks * codec.block].view(-1, codec.block), max(1, _AT_A_TIME // codec.block)
    for start in range(0, blocks, step):
        rows = whole[start : start + step]
        records = _kept(codec, rows, start) if isinstance(codec, KeepsSome) else _scaled(codec, rows)
        encoded[position : position + records.size] = records.reshape(-1)
        position += records.size
    if blocks * codec.block < wire.count:
        values = work[blocks * codec.block :].cpu().numpy()
        for group in wire.groups(blocks):
            data = wire.encode_from(values[group.elements], group.first, group.end)
            encoded[position + group.bytes.start : position + group.bytes.stop] = data
        work[blocks * codec.block :] = torch.from_numpy(values)
    encoded.flags.writeable = False
    return encoded.data


def _kept(codec: Any, rows: "torch.Tensor", chunk: int) -> Any:
    """Records of chunks (n, 4096), the first being number ``chunk``: what is kept is found there, what is left to do
    with it takes the host no time."""
    import torch

    records = np.empty((len(rows), codec.size(codec.block)), np.uint8)
    if isinstance(codec, TopK):
        indices = _largest(codec.keep, rows)
        codec.write_places(indices.cpu().numpy(), records)
    else:
        if not bool(torch.isfinite(rows.abs().amax())):
            raise NotFiniteError("NaN or infinity among the parameters")
        places = codec.choose_unseen(records, chunk, codec.block)
        indices = torch.from_numpy(places.astype(np.int16)).to(rows.device).long()
    kept = rows.gather(1, indices)
    said = codec.write_values(kept.cpu().numpy(), records)
    kept -= torch.from_numpy(said).to(rows.device)
    rows.scatter_(1, indices, kept)
    return records


def _largest(keep: int, rows: "torch.Tensor") -> "torch.Tensor":
    """Indices (n, keep), ascending, of the elements of largest magnitude; of equal ones the first."""
    import torch

    magnitudes = rows.abs()
    largest = magnitudes.topk(keep, dim=1, sorted=False).values
    if not bool(torch.isfinite(largest).all()):  # NaN counts as larger than any number
        raise NotFiniteError("NaN or infinity among the parameters")
    threshold = largest.amin(dim=1, keepdim=True)
    chosen, tied = magnitudes > threshold, magnitudes == threshold
    missing = keep - chosen.sum(dim=1, keepdim=True)
    chosen |= tied & (tied.cumsum(dim=1, dtype=torch.int16) <= missing)
    return chosen.nonzero()[:, 1].view(-1, keep)


def _scaled(codec: Any, rows: "torch.Tensor") -> Any:
    """Records of blocks (n, 256): see :mod:`notebook_cluster.codecs.scaled`."""
    import torch

    codes = codec.codes
    absmax = rows.abs().amax(dim=1, keepdim=True)
    if not bool(torch.isfinite(absmax).all()):
        raise NotFiniteError("NaN or infinity among the parameters")
    largest = torch.full_like(absmax, codes.largest)  # by a number torch may multiply with its reciprocal
    scale = (absmax / largest).clamp_(max=float(codec.largest_scale))
    empty = scale < float(codes.smallest_scale)
    scale[empty] = 0
    absmax[empty] = torch.inf  # codes become 0
    scaled = rows * (largest / absmax)
    if isinstance(codes, Int4):
        pairs = (scaled.round_() + 8).to(torch.uint8)
        data = pairs[:, 0::2] | (pairs[:, 1::2] << 4)
        said = pairs.to(torch.float32) - 8
    else:
        data = scaled.round_().to(torch.int8) if codes.code.kind == "i" else scaled.to(torch.float16)
        said = data.to(torch.float32)
    rows -= said * scale
    records = np.empty((len(rows), codec.size(codec.block)), np.uint8)
    records[:, :4] = scale.cpu().numpy().view(np.uint8)
    records[:, 4:] = data.view(torch.uint8).cpu().numpy()
    return records
