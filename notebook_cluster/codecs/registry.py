"""Codecs by the name people write: ``nc.DiLoCo(model, codec="int8")``."""

import numpy as np

from notebook_cluster.codecs.codec import Codec
from notebook_cluster.codecs.dense import Float32
from notebook_cluster.codecs.scaled import BlockScaled

_CODECS: dict[str, Codec] = {
    "float32": Float32(),
    "fp16": BlockScaled("fp16", np.float16, 1.0),
    "int8": BlockScaled("int8", np.int8, 127.0),
}

CODEC_NAMES = tuple(_CODECS)


def get_codec(name: str) -> Codec:
    """The codec called ``name``.

    Raises:
        ValueError: there is none; the error lists those there are.
    """
    if name not in _CODECS:
        raise ValueError(f"there is no codec {name!r}: choose one of {', '.join(CODEC_NAMES)}")
    return _CODECS[name]
