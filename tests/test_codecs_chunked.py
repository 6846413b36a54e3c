"""Codecs that keep some elements of each chunk of 4096: sizes, runs of chunks, damaged bytes, unlike machines."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_cluster.codecs import DamagedError, NotFiniteError, WireFormat
from tests.codec_vectors import CHUNKED as CODECS
from tests.codec_vectors import round_trip, vector_of

NAMES = st.sampled_from(list(CODECS))
COUNTS = st.one_of(st.integers(0, 400), st.integers(4000, 4300), st.sampled_from([8191, 8192, 8193, 12289]))


# ---- sizes and runs ------------------------------------------------------------------------------------------


@given(NAMES, st.integers(0, 20_000))
@settings(max_examples=200, deadline=None)
def test_no_size_is_longer_than_dense_nor_shorter_than_that_of_fewer_elements(name, count):
    codec = CODECS[name]
    assert codec.size(count) <= 4 * count
    assert codec.size(count // 4096 * 4096) <= codec.size(count)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("sparse", 84 / 512),
        ("topk", 0.375),
        ("topk-256", 700 / 512),
        ("dct", 69 / 512),
        ("randomk", 132 / 512),
        ("randomk-40", 84 / 512),
    ],
)
def test_bits_per_parameter(name, bits):
    assert 8 * CODECS[name].size(4096 * 100) / (4096 * 100) == bits


def test_sparse_needs_at_most_0_165_bits_per_parameter():
    assert 8 * CODECS["sparse"].size(10_000_000) / 10_000_000 <= 0.165


@given(NAMES, COUNTS, st.integers(0, 600), st.data())
@settings(max_examples=150, deadline=None)
def test_a_run_of_chunks_encoded_alone_is_a_range_of_the_bytes_of_the_whole(name, parameters, buffers, data):
    wire = WireFormat(CODECS[name], parameters, buffers)
    vector = vector_of(wire.count, parameters)
    start = data.draw(st.integers(0, wire.blocks))
    stop = data.draw(st.integers(start, wire.blocks))
    whole = bytes(wire.encode(vector))
    first, last = wire.element_range(start, stop)
    low, high = wire.byte_range(start, stop)
    assert len(whole) == wire.size
    if stop > start:
        assert bytes(wire.encode(vector[first:last], start, stop)) == whole[low:high]
    assert np.array_equal(wire.decode(whole[low:high], start, stop), wire.decode(whole)[first:last])
    assert np.array_equal(wire.decode(whole)[parameters:], vector[parameters:])


@pytest.mark.parametrize("name", list(CODECS))
def test_every_run_of_chunks_of_a_long_vector_is_a_range_of_its_bytes(name):
    """40 chunks are more than are worked on at a time."""
    codec, vector = CODECS[name], vector_of(40 * 4096 + 1000, 2)
    whole, record = bytes(codec.encode(vector)), codec.size(4096)
    for start, stop in [(0, 1), (1, 3), (33, 40), (31, 41), (40, 41)]:
        part = codec
        if "randomk" in codec.name:  # what is drawn in a chunk depends on its number
            part = codec.beginning(start)
        data = bytes(part.encode(vector[start * 4096 : stop * 4096]))
        assert data == whole[start * record : stop * record]


# ---- bad values and bad bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CODECS))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 4097, 8195])
def test_nan_and_infinity_are_found_wherever_they_are(name, bad, position):
    vector = np.ones(8200, np.float32)
    vector[position] = bad
    with pytest.raises(NotFiniteError, match=f"NaN or infinity at or after element {0 if position < 8192 else 8192}"):
        CODECS[name].encode(vector)


@given(NAMES, st.sampled_from([3, 100, 4096, 9000]), st.data())
@settings(max_examples=300, deadline=None)
def test_changed_bytes_decode_to_finite_numbers_or_say_that_they_are_damaged(name, count, data):
    codec = CODECS[name]
    changed = bytearray(codec.encode(vector_of(count, 1)))
    for _ in range(data.draw(st.integers(1, 6))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        back = codec.decode(changed, count)
    except DamagedError:
        return
    assert np.isfinite(back).all()
    assert back.shape == (count,)


@given(NAMES, st.sampled_from([4096, 5000]), st.data())
@settings(max_examples=200, deadline=None)
def test_random_bytes_never_do_anything_else(name, count, data):
    codec = CODECS[name]
    size = codec.size(count) + data.draw(st.sampled_from([0, 0, 0, -1, 1]))
    try:
        assert np.isfinite(codec.decode(data.draw(st.binary(min_size=size, max_size=size)), count)).all()
    except DamagedError:
        pass


@pytest.mark.parametrize(
    ("position", "byte", "why"),
    [
        (0, b"\xff\xff", "not finite"),
        (0, b"\x01\x00", "subnormal"),
        (60, b"\x00" * 24, "0 indices for 2 chunks|64 indices for 2 chunks"),
        (60, b"\xff" * 24, "indices for 2 chunks"),
    ],
)
def test_damaged_records_say_what_is_wrong(position, byte, why):
    codec = CODECS["sparse"]
    data = bytearray(codec.encode(vector_of(8192, 0)))
    data[position : position + len(byte)] = byte
    with pytest.raises(DamagedError, match=rf"no sparse vector, in chunks 0 to 1: .*({why})"):
        codec.decode(data, 8192)


def test_chunks_with_one_index_too_many_and_one_too_few_are_refused():
    codec = CODECS["sparse"]
    data = bytearray(codec.encode(np.zeros(8192, np.float32)))
    assert bytes(data[60:84]) == b"\xff" * 8 + bytes(16)  # no gaps: 64 ones
    data[60 + 8] = 0x80
    data[84 + 60] = 0x7F
    with pytest.raises(DamagedError, match="a chunk has not 64 indices"):
        codec.decode(data, 8192)


@pytest.mark.parametrize("exponent", [121, 127, 0x80, 0x80 + 47])
def test_an_exponent_that_leads_to_infinity_or_to_subnormal_numbers_is_refused(exponent):
    data = bytearray(CODECS["dct"].encode(vector_of(4096, 0)))
    data[0] = exponent
    with pytest.raises(DamagedError, match="an exponent outside -80 to 120"):
        CODECS["dct"].decode(data, 4096)


def test_an_index_behind_the_end_of_a_short_last_chunk_is_refused():
    whole = bytes(CODECS["sparse"].encode(np.concatenate([np.zeros(4032), np.ones(64)]).astype(np.float32)))
    with pytest.raises(DamagedError, match="index 4095 in a chunk of 100 elements"):
        CODECS["sparse"].decode(whole, 100)


# ---- the same bits everywhere --------------------------------------------------------------------------------

DECODES = """
import hashlib, sys
import numpy as np
from notebook_cluster.codecs import CHUNKED_NAMES, CODEC_NAMES, get_codec
if sys.argv[1] == "flush":
    import torch
    assert torch.set_flush_denormal(True)
numbers = np.random.default_rng(0)
for name in dict.fromkeys((*CODEC_NAMES, *CHUNKED_NAMES)):
    codec = get_codec(name)
    scales = np.repeat(np.float32(2.0) ** numbers.integers(-60, 60, 40), 512).astype(np.float32)
    values = np.rint(numbers.standard_normal(40 * 512) * 1000).astype(np.float32) * scales
    with open(sys.argv[2] + name, "rb" if sys.argv[1] != "write" else "wb") as file:
        if sys.argv[1] == "write":
            file.write(codec.encode(values))
            data = bytes(codec.encode(values))
        else:
            data = file.read()
    print(name, hashlib.sha256(codec.decode(data, values.size).tobytes()).hexdigest())
"""


def test_unlike_machines_decode_the_same_bits(tmp_path):
    """Another BLAS kernel, no vector instructions beyond the oldest, subnormals flushed: same bytes, same values."""

    def decoded(how, **environment):
        done = subprocess.run(
            [sys.executable, "-c", DECODES, how, f"{tmp_path}/"],
            env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **environment},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    expected = decoded("write")
    assert len(expected.splitlines()) == 10
    oldest = "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V3 X86_V4"
    assert decoded("read", OPENBLAS_CORETYPE="Nehalem") == expected
    assert decoded("read", NPY_DISABLE_CPU_FEATURES=oldest, PYTHONWARNINGS="ignore") == expected
    assert decoded("flush") == expected


@pytest.mark.parametrize("name", list(CODECS))
def test_no_decoded_value_is_subnormal(name):
    """Machines may flush those to zero, and then hold other bits."""
    vector = (vector_of(4096 * 60, 0).reshape(60, 4096) * 10.0 ** np.arange(-44, -14, 0.5)[:, None]).astype(np.float32)
    back = np.abs(round_trip(CODECS[name], vector.ravel()))
    assert back.any()
    assert back[back > 0].min() >= 2.0**-126


# ---- in groups -----------------------------------------------------------------------------------------------


@given(st.sampled_from(["sparse", "topk", "topk-256", "randomk", "randomk-40"]), COUNTS)
@settings(max_examples=100, deadline=None)
def test_entries_are_what_is_decoded(name, count):
    codec, vector = CODECS[name], vector_of(count, count)
    data = codec.encode(vector)
    places, values = codec.entries(data, count)
    assert (np.diff(places) > 0).all()
    back = np.zeros(count, np.float32)
    back[places] = values
    assert back.tobytes() == codec.decode(data, count).tobytes()


@pytest.mark.parametrize("name", ["sparse", "topk", "randomk-40", "dct", "int8", "float32"])
@pytest.mark.parametrize(
    ("parameters", "buffers"), [(1_300_000, 700), (300_000, 0), (1_064_990, 0), (0, 500), (5000, 300_000)]
)
def test_groups_are_all_blocks_once_and_give_what_the_whole_gives(name, parameters, buffers):
    wire = WireFormat(name, parameters, buffers)
    vector = vector_of(wire.count, 1)
    for start, stop in ((0, wire.blocks), (1, wire.blocks), (0, wire.blocks // 2)):
        low, high = wire.element_range(start, stop)
        begin, end = wire.byte_range(start, stop)
        data = wire.encode(vector)[begin:end]
        expected = wire.decode(data, start, stop)
        groups = list(wire.groups(start, stop))
        assert [first for group in groups for first in range(group.first, group.end)] == list(range(start, stop))
        assert all(group.elements.stop - group.elements.start <= wire.largest_group for group in groups)
        assert sum(group.elements.stop - group.elements.start for group in groups if group.are_buffers) == max(
            0, high - max(low, parameters)
        )
        into, kept = np.full(high - low, np.nan, np.float32), np.zeros(high - low, np.float32)
        wire.decode_into(data, into, start, stop)
        for group in groups:
            places, values = wire.kept(data[group.bytes], group)
            kept[group.elements][places] = values
            assert wire.encode(vector[low:high][group.elements], group.first, group.end) == data[group.bytes]
        assert into.tobytes() == kept.tobytes() == expected.tobytes()
        for elements in (256 * 1024, wire.encoded_at_a_time):
            left = vector[low:high].copy()
            for group in wire.groups(start, stop, elements):
                assert wire.encode_from(left[group.elements], group.first, group.end) == data[group.bytes]
            assert left.tobytes() == (vector[low:high] - expected).tobytes()
    with pytest.raises(ValueError, match=f"{len(data) - 1} bytes do not fit blocks {start} to {stop} of a {name}"):
        wire.decode_into(data[:-1], into, start, stop)


@pytest.mark.parametrize("name", ["sparse", "topk", "randomk", "int8", "float32"])
@pytest.mark.parametrize("place", [0, 300_000, 1_100_000, 1_300_000 - 1, 1_300_000])
def test_what_is_not_finite_is_found_where_the_error_feedback_is_left(name, place):
    wire = WireFormat(name, 1_300_000, 10)
    vector = vector_of(wire.count, 2)
    vector[place] = np.nan
    with pytest.raises(NotFiniteError, match="buffers" if place == 1_300_000 else "parameters"):
        wire.encode_from(vector)


@pytest.mark.parametrize("name", ["sparse", "sparse-128", "topk", "randomk", "int8"])
@pytest.mark.parametrize("senders", [1, 2, 5])
def test_what_several_kept_is_what_each_of_them_kept(name, senders):
    wire = WireFormat(name, 600_000, 300)
    sent = [wire.encode(vector_of(wire.count, seed)) for seed in range(senders)]
    for group in wire.groups():
        pieces = [data[group.bytes] for data in sent]
        for places, values, piece in zip(*wire.kept_of_all(pieces, group), pieces, strict=True):
            alone = wire.kept(piece, group)
            assert places.tolist() == alone[0].tolist()
            assert values.tobytes() == alone[1].tobytes()
