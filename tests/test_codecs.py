"""Codecs: whole blocks are contiguous bytes, never longer than float32, errors bounded by the block's own scale."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from notebook_cluster.codecs import CODEC_NAMES, NotFiniteError, WireFormat, get_codec

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = arrays(np.float32, st.integers(0, 700), elements=FINITE)
CODECS = st.sampled_from(CODEC_NAMES)
STEP = {"float32": 0.0, "fp16": 2.0**-11, "int8": 0.51 / 127}
"""Largest error of a value as a fraction of the largest value in its block."""


def block_absmax(vector):
    """The largest magnitude in each value's block of 256."""
    absmax = np.empty_like(vector)
    for start in range(0, vector.size, 256):
        absmax[start : start + 256] = np.abs(vector[start : start + 256]).max()
    return absmax


@given(CODECS, VECTORS)
@settings(max_examples=150, deadline=None)
def test_a_value_comes_back_within_a_fraction_of_its_own_blocks_scale(name, vector):
    codec = get_codec(name)
    back = codec.decode(codec.encode(vector), vector.size)
    assert back.dtype == np.float32
    allowed = STEP[name] * block_absmax(vector).astype(np.float64) + (0 if name == "float32" else 127 * 2.0**-126)
    assert (np.abs(back.astype(np.float64) - vector) <= allowed).all()


@given(CODECS, st.integers(0, 2000))
@settings(max_examples=150, deadline=None)
def test_nothing_is_sent_longer_than_dense(name, count):
    codec = get_codec(name)
    data = codec.encode(np.ones(count, np.float32))
    assert len(data) == codec.size(count) <= 4 * count


@given(CODECS, st.integers(1, 1200), st.integers(0, 600), st.data())
@settings(max_examples=150, deadline=None)
def test_a_run_of_blocks_encoded_alone_is_a_range_of_the_bytes_of_the_whole(name, parameters, buffers, data):
    wire = WireFormat(name, parameters, buffers)
    vector = np.random.default_rng(parameters).standard_normal(wire.count, np.float32)
    start = data.draw(st.integers(0, wire.blocks))
    stop = data.draw(st.integers(start, wire.blocks))
    whole = bytes(wire.encode(vector))
    first, last = wire.element_range(start, stop)
    low, high = wire.byte_range(start, stop)
    assert len(whole) == wire.size
    if stop > start:
        assert bytes(wire.encode(vector[first:last], start, stop)) == whole[low:high]
    assert np.array_equal(wire.decode(whole[low:high], start, stop), wire.decode(whole)[first:last])


@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 300, 512])
def test_nan_and_infinity_are_found_wherever_they_are(name, bad, position):
    vector = np.ones(513, np.float32)
    vector[position] = bad
    with pytest.raises(NotFiniteError, match="NaN or infinity"):
        get_codec(name).encode(vector)


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_scales_are_per_block_so_a_small_layer_beside_a_large_one_survives(name):
    vector = np.concatenate([np.full(256, 1e5), np.full(256, 1e-8)]).astype(np.float32)
    codec = get_codec(name)
    back = codec.decode(codec.encode(vector), vector.size)
    assert np.allclose(back, vector, rtol=1e-3)


def test_int8_rounds_to_the_nearest_even_code():
    vector = np.array([127, 2.5, 3.5, -2.5, -3.5, 0.4], np.float32)
    codec = get_codec("int8")
    assert codec.decode(codec.encode(vector), vector.size).tolist() == [127, 2, 4, -2, -4, 0]


def test_an_int8_block_of_subnormal_values_is_zero():
    vector = np.full(256, 1e-40, np.float32)
    codec = get_codec("int8")
    assert not codec.decode(codec.encode(vector), 256).any()


def test_int8_is_about_a_quarter_of_float32():
    assert get_codec("int8").size(1_000_000) < 0.26 * 4_000_000


def test_buffers_are_exact_whatever_the_codec():
    wire = WireFormat("int8", 300, 40)
    vector = np.random.default_rng(0).standard_normal(340, np.float32)
    assert np.array_equal(wire.decode(wire.encode(vector))[300:], vector[300:])


def test_bytes_of_another_size_are_refused():
    with pytest.raises(ValueError, match="10 bytes"):
        get_codec("int8").decode(bytes(10), 300)
    with pytest.raises(ValueError, match="12 bytes do not fit blocks 0 to 3"):
        WireFormat("float32", 700).decode(bytes(12))


def test_an_unknown_codec_names_those_there_are():
    with pytest.raises(ValueError, match=r"no codec 'int7': choose one of float32, fp16, int8"):
        get_codec("int7")


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_error_feedback_loses_nothing_over_time(name):
    """The sum of what was decoded follows the sum of what was meant: the residual stays bounded."""
    codec, numbers = get_codec(name), np.random.default_rng(1)
    feedback = meant = sent = np.zeros(600, np.float32)
    for _ in range(50):
        difference = numbers.standard_normal(600, np.float32)
        wanted = difference + feedback
        decoded = codec.decode(codec.encode(wanted), 600)
        feedback = wanted - decoded
        meant, sent = meant + difference, sent + decoded
    assert np.abs(meant - sent).max() < 0.05
