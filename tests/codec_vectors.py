"""Codecs that keep some elements of each chunk, and vectors for them."""

import numpy as np

from notebook_cluster.codecs import CHUNKED_NAMES, get_codec

CHUNKED = {name: get_codec(name) for name in (*CHUNKED_NAMES, "topk-256", "randomk-40")}


def vector_of(count, seed, scale=1.0):
    """Heavy-tailed, as pseudo-gradients are."""
    return (np.random.default_rng(seed).standard_t(3, count) * scale).astype(np.float32)


def round_trip(codec, vector):
    """What is decoded; sizes and types are checked on the way."""
    data = codec.encode(vector)
    assert len(data) == codec.size(vector.size)
    back = codec.decode(data, vector.size)
    assert (back.dtype, back.shape) == (np.float32, vector.shape)
    return back
