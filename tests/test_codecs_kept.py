"""Codecs that keep some elements of each chunk of 4096: which ones they keep, and how exactly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_cluster.codecs import DamagedError, NotFiniteError
from notebook_cluster.codecs.dct import Dct
from notebook_cluster.codecs.kept import Gaps
from notebook_cluster.codecs.top_k import largest
from tests.codec_vectors import CHUNKED as CODECS
from tests.codec_vectors import round_trip, vector_of

# ---- the largest -----------------------------------------------------------------------------------------------


def reference_top(chunk, keep):
    """Largest magnitudes, of equal ones the first."""
    return sorted(sorted(range(len(chunk)), key=lambda i: (-abs(float(chunk[i])), i))[:keep])


@pytest.mark.parametrize("columns", [200, 1024])  # 1024 are looked at in stretches of 16, 200 one by one
@given(st.integers(0, 1000), st.integers(1, 64), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_the_largest_are_found_and_of_equal_ones_the_first(columns, seed, keep, different):
    rows = np.abs(np.random.default_rng(seed).integers(0, different * 20, (3, columns))).astype(np.float32)
    found = largest(rows, keep)
    found -= np.arange(0, 3 * columns, columns)[:, None]
    assert found.tolist() == [reference_top(row, keep) for row in rows]


@pytest.mark.parametrize("columns", [200, 1024])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_is_found_wherever_it_is(columns, wrong):
    for place in (0, 100, columns - 1):
        rows = np.ones((3, columns), np.float32)
        rows[1, place] = wrong
        with pytest.raises(NotFiniteError):
            largest(rows, 64)


@pytest.mark.parametrize("name", ["topk", "sparse"])
@pytest.mark.parametrize("count", [64, 65, 4095, 4096, 4097, 4160, 12_345])
def test_exactly_64_of_each_chunk_are_kept_and_they_are_the_largest(name, count):
    vector = vector_of(count, 3)
    back = round_trip(CODECS[name], vector)
    for start in range(0, count, 4096):
        chunk, kept = vector[start : start + 4096], np.flatnonzero(back[start : start + 4096])
        expected = reference_top(chunk, 64) if chunk.size >= 64 else list(range(chunk.size))
        assert kept.tolist() == expected


def test_a_chunk_of_equal_values_keeps_its_first_64_and_one_of_zeros_stays_zero():
    back = round_trip(CODECS["sparse"], np.concatenate([np.full(4096, -2.5), np.zeros(4096)]).astype(np.float32))
    assert np.flatnonzero(back).tolist() == list(range(64))
    assert (back[:64] == -2.5).all()


def test_topk_values_have_eight_bits():
    vector = vector_of(9000, 5)
    back = round_trip(CODECS["topk"], vector)
    assert np.allclose(back[back != 0], vector[back != 0], rtol=2**-8)


def test_sparse_takes_the_two_means_of_the_best_split():
    """Against every split of the sorted magnitudes, computed plainly."""
    vector = np.zeros(4096, np.float32)
    places = np.random.default_rng(2).choice(4096, 64, replace=False)
    vector[places] = vector_of(64, 9) + np.float32(0.01)
    magnitudes = np.sort(np.abs(vector[places]).astype(np.float64))
    errors = [
        sum(float(((part - part.mean()) ** 2).sum()) for part in (magnitudes[:split], magnitudes[split:]))
        for split in range(1, 64)
    ]
    back = round_trip(CODECS["sparse"], vector)
    levels = np.unique(np.abs(back[back != 0]))
    split = 1 + int(np.argmin(errors))
    assert np.allclose(levels, [magnitudes[:split].mean(), magnitudes[split:].mean()], rtol=2**-8)
    assert (np.sign(back) == np.sign(vector)).all()
    assert float(((back - vector).astype(np.float64) ** 2).sum()) < 1.01 * min(errors) + 1e-4


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e5, 1e36])
@pytest.mark.parametrize("name", ["topk", "sparse"])
def test_levels_neither_overflow_nor_vanish(name, scale):
    vector = np.clip(vector_of(4096, 4, scale), -3e38, 3e38)
    back = round_trip(CODECS[name], vector)
    kept = back != 0
    error = np.linalg.norm((back[kept] / scale - vector[kept] / scale).astype(np.float64))
    assert kept.sum() == 64
    assert error < 0.35 * np.linalg.norm((vector[kept] / scale).astype(np.float64))


@given(st.integers(0, 10_000), st.sampled_from([(4096, 64), (4096, 32), (256, 128), (64, 64), (1024, 8)]))
@settings(max_examples=150, deadline=None)
def test_any_sorted_indices_fit_into_their_field(seed, sizes):
    (chunk, keep), numbers = sizes, np.random.default_rng(seed)
    skewed = numbers.permutation(chunk)[:keep] if seed % 3 else np.arange(keep) + (chunk - keep) * (seed % 2)
    indices = np.sort(np.stack([skewed, numbers.permutation(chunk)[:keep]]), axis=1).astype(np.int64)
    gaps = Gaps(chunk, keep)
    data = np.zeros((2, gaps.size), np.uint8)
    gaps.write(indices, data)
    assert gaps.read(data, chunk).tolist() == indices.tolist()


def test_64_indices_of_4096_take_64_bytes():
    assert Gaps(4096, 64).size == 64


def test_error_feedback_sends_in_time_what_the_largest_keep_back():
    """A small element beside large ones waits until what was left of it is among the largest; nothing is lost."""
    codec, constant = CODECS["sparse"], np.abs(vector_of(4096, 1)) + np.float32(0.05)
    feedback = sent = np.zeros(4096, np.float32)
    for _ in range(600):
        wanted = constant + feedback
        decoded = codec.decode(codec.encode(wanted), 4096)
        feedback, sent = wanted - decoded, sent + decoded
    assert np.linalg.norm(sent / 600 - constant) < 0.15 * np.linalg.norm(constant)
    assert np.count_nonzero(sent) > 3500
    assert np.abs(feedback).max() < 2 * constant.sum() / 64


# ---- drawn at random -----------------------------------------------------------------------------------------


def test_randomk_sends_the_same_places_in_the_same_draw_and_others_in_another():
    vector, codec = vector_of(8192, 0), CODECS["randomk"]
    places = [codec.entries(codec.drawn(number).encode(vector), 8192)[0] for number in (1, 1, 2)]
    assert places[0].tolist() == places[1].tolist() != places[2].tolist()
    assert len(places[0]) == 128
    assert (places[0][:64] + 4096).tolist() != places[0][64:].tolist()


@pytest.mark.parametrize("count", [4096, 3000, 64, 100])
def test_randomk_draws_one_element_of_each_stretch_and_each_about_as_often_as_any_other(count):
    codec, vector, edges = CODECS["randomk"], np.ones(count, np.float32), np.arange(65) * count // 64
    times = np.zeros(count, int)
    for number in range(2000):
        places, values = codec.entries(codec.drawn(number).encode(vector), count)
        assert (values == 1).all()
        assert ((edges[:-1] <= places) & (places < edges[1:])).all()
        times[places] += 1
    expected = np.repeat(2000 / np.diff(edges), np.diff(edges))
    assert (np.abs(times - expected) < 5 * np.sqrt(expected) + 1).all()


def test_randomk_sends_values_as_they_are_but_for_their_last_bits():
    """The error feedback brings what is not sent: more of it at once would be counted twice."""
    vector = vector_of(4096, 0)
    back = round_trip(CODECS["randomk"], vector)
    assert CODECS["randomk"].lossy
    np.testing.assert_allclose(back[back != 0], vector[back != 0], rtol=2.0**-8)
    assert np.count_nonzero(back) == 64


@given(st.sampled_from([3, 64, 100, 4096, 9000, 300_000]), st.integers(0, 2**64 - 1), st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_was_drawn_its_places_are_in_the_chunk_and_each_comes_once(count, number, data):
    """Also where somebody made up what was drawn: nothing that the bytes say leads out of the vector."""
    codec = CODECS["randomk-40"]
    encoded = bytearray(codec.drawn(number).encode(vector_of(count, 1)))
    for chunk in range(count // 4096):
        if data.draw(st.booleans()) or chunk > 3:
            encoded[chunk * 84 + 80 : chunk * 84 + 84] = data.draw(st.binary(min_size=4, max_size=4))
    places, values = codec.entries(encoded, count)
    assert (np.diff(places) > 0).all()
    assert not len(places) or (places[0] >= 0 and places[-1] < count)
    assert len(places) == len(values) == codec.entries(codec.encode(np.zeros(count, np.float32)), count)[0].size


def test_a_contribution_of_randomk_is_read_without_knowing_what_was_drawn():
    vector, codec = vector_of(9000, 0), CODECS["randomk"]
    for number in (0, 5, 2**40):
        places, values = codec.entries(codec.drawn(number).encode(vector), 9000)
        np.testing.assert_allclose(values, vector[places], rtol=2.0**-8)


def test_randomk_refuses_values_that_no_encoder_writes():
    data = bytearray(CODECS["randomk"].encode(vector_of(8192, 0)))
    data[132 : 132 + 2] = b"\x80\x7f"
    with pytest.raises(DamagedError, match="no randomk vector, in chunks 0 to 1: a value that is not finite"):
        CODECS["randomk"].decode(data, 8192)
    with pytest.raises(DamagedError, match="263 bytes are no randomk vector of 264 bytes"):
        CODECS["randomk"].decode(data[:-1], 8192)


# ---- the cosine transform ------------------------------------------------------------------------------------


def cosine_reference(vector):
    """Orthonormal DCT-II of 64 x 64, its 32 largest coefficients, back: float64, from the definition."""
    place = np.arange(64)
    matrix = np.cos(np.pi * (2 * place[None, :] + 1) * place[:, None] / 128) * np.sqrt(2 / 64)
    matrix[0] /= np.sqrt(2)
    coefficients = matrix @ vector.astype(np.float64).reshape(64, 64) @ matrix.T
    smallest = np.sort(np.abs(coefficients), axis=None)[-32]
    return matrix.T @ np.where(np.abs(coefficients) >= smallest, coefficients, 0) @ matrix


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e20])
def test_dct_is_the_transform_of_the_definition(scale):
    vector = np.cumsum(vector_of(4096, 8, scale)).astype(np.float32)
    expected = cosine_reference(vector).ravel()
    back = round_trip(CODECS["dct"], vector)
    assert np.linalg.norm((back - expected) / scale) < 0.02 * np.linalg.norm(expected / scale)


def test_dct_keeps_a_smooth_chunk_nearly_whole_and_large_values_stay_finite():
    smooth = np.add.outer(np.linspace(0, 1, 64), np.linspace(2, -1, 64)).ravel().astype(np.float32)
    assert np.linalg.norm(round_trip(CODECS["dct"], smooth) - smooth) < 0.02 * np.linalg.norm(smooth)
    for keep in (8, 32, 40, 128):
        assert np.isfinite(round_trip(Dct("dct", keep), np.full(5000, 3.4e38, np.float32))).all()


@pytest.mark.parametrize("keep", [32, 128])
def test_dct_sums_are_exact_in_any_order(keep):
    """The same chunk, its whole-number products added forwards, backwards and by the library: one result."""
    codec, vector = Dct("dct", keep), vector_of(4096, 11)
    record = np.frombuffer(codec.encode(vector), np.uint8)[None, :]
    indices = codec._gaps.read(record[:, 1 + keep :], 4096)[0]
    codes = record[0, 1 : 1 + keep].view(np.int8).astype(np.int64)
    whole = np.rint(codec._whole).astype(np.int64)
    sums = np.zeros((64, 64), np.int64)
    for index, code in zip(indices[::-1], codes[::-1], strict=True):
        sums += code * np.outer(whole[index // 64], whole[index % 64])
    assert np.abs(sums).max() < 2**53
    expected = (sums.astype(np.float64) * 2.0 ** (int(record[0, 0].view(np.int8)) - 44)).astype(np.float32)
    assert np.array_equal(codec.decode(record.tobytes(), 4096), expected.ravel())
