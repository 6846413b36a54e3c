"""Codecs by name: those people write, ``nc.DiLoCo(model, codec="int8")``, and those that belong to a strategy.

Codecs that keep some elements of each chunk of 4096 have a usual number of them, and another one in their name:
``topk`` keeps 64, ``topk-256`` keeps 256.
"""

from collections.abc import Callable

from notebook_cluster.codecs.codec import Codec
from notebook_cluster.codecs.dct import KEEP, Dct
from notebook_cluster.codecs.dense import BFloat16, Float32
from notebook_cluster.codecs.kept import Shortened, TwoLevels
from notebook_cluster.codecs.random_k import RandomK
from notebook_cluster.codecs.scaled import BlockScaled, Cast, E3m0, Int4
from notebook_cluster.codecs.top_k import TopK

_DENSE: dict[str, Codec] = {
    "float32": Float32(),
    "fp16": BlockScaled("fp16", Cast("<f2", 1.0, 2.0**-24)),
    "bf16": BFloat16(),
    "int8": BlockScaled("int8", Cast("i1", 127.0, 1.0)),
    "int4": BlockScaled("int4", Int4()),
    "e3m0": BlockScaled("e3m0", E3m0()),
}

_CHUNKED: dict[str, tuple[int, Callable[[str, int], Codec]]] = {
    "topk": (64, lambda name, keep: TopK(name, keep, Shortened(keep))),
    "randomk": (64, RandomK),
    "sparse": (64, lambda name, keep: TopK(name, keep, TwoLevels(keep))),
    "dct": (KEEP, Dct),
}
"""How many each keeps unless its name says another number, and how it is made."""

SPARSE_NAMES = ("topk", "randomk")
"""Codecs for every strategy that keep some elements."""

CODEC_NAMES = (*_DENSE, *SPARSE_NAMES)
"""Codecs that people choose, for every strategy that does not have one of its own."""

CHUNKED_NAMES = tuple(_CHUNKED)


def codec_name(base: str, keep: int) -> str:
    """The name of the codec ``base`` of CHUNKED_NAMES that keeps ``keep`` of each chunk."""
    return base if keep == _CHUNKED[base][0] else f"{base}-{keep}"


def get_codec(name: str) -> Codec:
    """The codec called ``name``.

    Raises:
        ValueError: there is none; the error lists those there are.
    """
    if name in _DENSE:
        return _DENSE[name]
    base, separator, number = name.partition("-")
    if base not in _CHUNKED or (separator and not number.isdecimal()):
        names = (*_DENSE, *CHUNKED_NAMES)
        raise ValueError(f"there is no codec {name!r}: choose one of {', '.join(names)}")
    usual, make = _CHUNKED[base]
    keep = int(number) if separator else usual
    return make(codec_name(base, keep), keep)
