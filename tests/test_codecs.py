"""Codecs: whole blocks are contiguous bytes, never longer than float32, errors bounded by the block's own scale."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from notebook_cluster.codecs import CODEC_NAMES, SPARSE_NAMES, NotFiniteError, WireFormat, get_codec
from notebook_cluster.rounds.numerics.weighted_mean import encoded_mean, mean_of

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = arrays(np.float32, st.integers(0, 700), elements=FINITE)
CODECS = st.sampled_from(CODEC_NAMES)
STEP = {"fp16": 2.0**-11, "int8": 0.51 / 127, "int4": 0.51 / 7, "e3m0": 0.251}
"""Largest error of a value as a fraction of the largest value in its block, where blocks have a scale."""
TINY = {"fp16": 2.0**-102, "int8": 127 * 2.0**-126, "int4": 7 * 2.0**-126, "e3m0": 64 * 2.0**-126}
"""A block whose largest value is smaller is sent as zeros."""


def block_absmax(vector):
    """The largest magnitude in each value's block of 256."""
    absmax = np.empty(vector.size, np.float64)
    for start in range(0, vector.size, 256):
        absmax[start : start + 256] = np.abs(vector[start : start + 256]).max()
    return absmax


def round_trip(name, vector):
    codec = get_codec(name)
    back = codec.decode(codec.encode(vector), vector.size)
    assert back.dtype == np.float32
    return back


@given(st.sampled_from(list(STEP)), VECTORS)
@settings(max_examples=200, deadline=None)
def test_a_value_comes_back_within_a_fraction_of_its_own_blocks_scale(name, vector):
    back, absmax = round_trip(name, vector), block_absmax(vector)
    allowed = np.where(absmax < 1.001 * TINY[name], absmax, STEP[name] * absmax)
    assert (np.abs(back.astype(np.float64) - vector) <= allowed).all()


@given(VECTORS)
@settings(max_examples=100, deadline=None)
def test_float32_is_exact_and_bf16_has_eight_bits_for_every_value(vector):
    assert round_trip("float32", vector).tobytes() == vector.tobytes()
    back = round_trip("bf16", vector).astype(np.float64)
    allowed = np.where(np.abs(vector) < 2.0**-126, np.abs(vector), 2.0**-8 * np.abs(vector.astype(np.float64)))
    assert (np.abs(back - vector) <= allowed).all()
    assert (np.abs(back[np.abs(vector) < 2.0**-127]) == 0).all()


@given(arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**127), 2.0**127, width=32)))
@settings(max_examples=100, deadline=None)
def test_bf16_rounds_as_torch_does(vector):
    vector[np.abs(vector) < 2.0**-126] = 0
    assert np.array_equal(round_trip("bf16", vector), torch.from_numpy(vector).bfloat16().float().numpy())


def test_bf16_halves_go_to_the_even_neighbour():
    vector = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 3.4e38], np.float32)
    back = round_trip("bf16", vector).tolist()
    assert back[:4] == [1, 1 + 2**-6, -1, 1 + 2**-7]
    assert back[4] == (2 - 2**-7) * 2.0**127  # the largest, where rounding leads to infinity


@given(VECTORS)
@settings(max_examples=100, deadline=None)
def test_e3m0_takes_the_nearest_of_its_eight_magnitudes(vector):
    back, absmax = round_trip("e3m0", vector).astype(np.float64), block_absmax(vector)
    usual = absmax >= 1.001 * TINY["e3m0"]
    ladder = np.array([0.0] + [2.0**power for power in range(7)]) / 64
    magnitude = (np.abs(vector.astype(np.float64)) / np.where(usual, absmax, 1))[usual, None]
    nearest = np.abs(magnitude - ladder).min(axis=1, initial=1)
    assert (np.abs(back - vector)[usual] <= (nearest + 1e-6) * absmax[usual]).all()
    alone = vector.size % 256 == 1  # then the last value is sent as it is
    assert not back[: vector.size - alone][absmax[: vector.size - alone] < 0.999 * TINY["e3m0"]].any()


@given(st.sampled_from(list(STEP)), st.binary(max_size=1200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_of_the_right_length_decode_to_numbers_that_can_be_judged(name, data):
    """A hostile scale gives values that are not finite, which names their sender; nothing else can go wrong."""
    codec = get_codec(name)
    counts = [count for count in range(1200) if codec.size(count) == len(data)]
    for count in counts:
        assert codec.decode(data, count).shape == (count,)


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


@pytest.mark.parametrize("name", list(STEP))
def test_scales_are_per_block_so_a_small_layer_beside_a_large_one_survives(name):
    vector = np.concatenate([np.full(256, 1e5), np.full(256, 1e-8)]).astype(np.float32)
    codec = get_codec(name)
    back = codec.decode(codec.encode(vector), vector.size)
    assert np.allclose(back, vector, rtol=1e-3)


def test_int8_rounds_to_the_nearest_even_code():
    vector = np.array([127, 2.5, 3.5, -2.5, -3.5, 0.4], np.float32)
    codec = get_codec("int8")
    assert codec.decode(codec.encode(vector), vector.size).tolist() == [127, 2, 4, -2, -4, 0]


def test_int4_rounds_to_the_nearest_even_code():
    vector = np.array([7, 2.5, 3.5, -2.5, -3.5, 0.4, -7], np.float32)
    assert round_trip("int4", vector).tolist() == [7, 2, 4, -2, -4, 0, -7]


def test_e3m0_codes_by_hand():
    vector = np.array([64, -32, 24, 23.9, 1, 0.5, 0.49, -1.49, -1.5], np.float32)
    assert round_trip("e3m0", vector).tolist() == [64, -32, 32, 16, 1, 1, 0, -1, -2]


def test_two_codes_share_a_byte_the_first_in_its_low_half():
    assert bytes(get_codec("int4").encode(np.array([7, -7, 1], np.float32)))[4:] == bytes([0x1F, 0x89])
    assert bytes(get_codec("e3m0").encode(np.array([64, -1, 2], np.float32)))[4:] == bytes([0x97, 0x02])


@pytest.mark.parametrize("name", [*STEP, "bf16"])
def test_a_block_of_subnormal_values_is_zero(name):
    vector = np.full(256, 1e-40, np.float32)
    assert not round_trip(name, vector).any()
    assert bytes(get_codec(name).encode(vector))[:4] == bytes(4)


@pytest.mark.parametrize("name", [*STEP, "bf16"])
def test_no_decoded_value_is_subnormal(name):
    """Machines may flush those to zero, and then hold other bits."""
    vector = np.random.default_rng(0).standard_normal((60, 256), np.float32) * 10.0 ** np.arange(-44, -14, 0.5)[:, None]
    back = np.abs(round_trip(name, vector.astype(np.float32).ravel()))
    assert back.any()
    assert back[back > 0].min() >= 2.0**-126


@pytest.mark.parametrize(
    ("name", "bits"),
    [("float32", 32), ("fp16", 16.125), ("bf16", 16), ("int8", 8.125), ("int4", 4.125), ("e3m0", 4.125)],
)
def test_bits_per_parameter(name, bits):
    assert 8 * get_codec(name).size(256_000) / 256_000 == bits


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
    with pytest.raises(ValueError, match=r"no codec 'int7': choose one of float32, fp16, bf16, int8, int4, e3m0, topk"):
        get_codec("int7")


@pytest.mark.parametrize(
    ("name", "bound"), [("fp16", 0.05), ("bf16", 0.05), ("int8", 0.05), ("int4", 0.5), ("e3m0", 3)]
)
def test_error_feedback_loses_nothing_over_time(name, bound):
    """The sum of what was decoded follows the sum of what was meant: the residual stays bounded."""
    codec, numbers = get_codec(name), np.random.default_rng(1)
    feedback = meant = sent = np.zeros(600, np.float32)
    for _ in range(50):
        difference = numbers.standard_normal(600, np.float32)
        wanted = difference + feedback
        decoded = codec.decode(codec.encode(wanted), 600)
        feedback = wanted - decoded
        meant, sent = meant + difference, sent + decoded
    assert np.abs(meant - sent).max() < bound


@pytest.mark.parametrize("codec", [name for name in CODEC_NAMES if name not in SPARSE_NAMES])
def test_a_mean_is_encoded_group_by_group_as_it_would_be_at_once(codec):
    """In the memory that it is sent from, over the end of the parameters, from a block in the middle on."""
    wire = WireFormat(codec, 600_000, 1000)
    vectors = [np.random.default_rng(seed).standard_normal(wire.count, np.float32) for seed in range(3)]
    for start, stop in ((0, wire.blocks), (wire.blocks // 3, wire.blocks)):
        low, high = wire.element_range(start, stop)
        sent = [(wire.encode(vector[low:high], start, stop), 1 / 3) for vector in vectors]
        at_once = wire.encode(mean_of(wire, sent, start, stop), start, stop)
        memory = []

        def give(size, memory=memory):
            memory.append(np.empty(size, np.uint8))
            return memory[0]

        data = encoded_mean(wire, sent, start, stop, give)
        assert bytes(data) == bytes(at_once)
        assert np.shares_memory(np.frombuffer(data, np.uint8), memory[0])
        assert data.readonly
        sent[1] = (wire.encode(np.full(high - low, 3e38, np.float32), start, stop), 1e5)
        with np.errstate(all="ignore"), pytest.raises(NotFiniteError):
            encoded_mean(wire, sent, start, stop, give)
