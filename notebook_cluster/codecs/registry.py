"""Codecs by name: those people write, ``nc.DiLoCo(model, codec="int8")``, and those that belong to a strategy."""

from notebook_cluster.codecs.codec import Codec
from notebook_cluster.codecs.dct import Dct
from notebook_cluster.codecs.dense import BFloat16, Float32
from notebook_cluster.codecs.kept import Shortened, TwoLevels
from notebook_cluster.codecs.scaled import BlockScaled, Cast, E3m0, Int4
from notebook_cluster.codecs.top_k import TopK

_ANY: dict[str, Codec] = {
    "float32": Float32(),
    "fp16": BlockScaled("fp16", Cast("<f2", 1.0, 2.0**-24)),
    "bf16": BFloat16(),
    "int8": BlockScaled("int8", Cast("i1", 127.0, 1.0)),
    "int4": BlockScaled("int4", Int4()),
    "e3m0": BlockScaled("e3m0", E3m0()),
}

_CHUNKED: dict[str, Codec] = {
    "topk": TopK("topk", 64, Shortened(64)),
    "sparse": TopK("sparse", 64, TwoLevels(64)),
    "dct": Dct(),
}

CODEC_NAMES = tuple(_ANY)
"""Codecs for every strategy that sends a mean back: every element arrives."""

CHUNKED_NAMES = tuple(_CHUNKED)
"""Codecs that keep a few elements of each chunk: a strategy that sums them must be made for it."""


def get_codec(name: str) -> Codec:
    """The codec called ``name``.

    Raises:
        ValueError: there is none; the error lists those there are.
    """
    codec = _ANY.get(name) or _CHUNKED.get(name)
    if codec is None:
        raise ValueError(f"there is no codec {name!r}: choose one of {', '.join(CODEC_NAMES + CHUNKED_NAMES)}")
    return codec
