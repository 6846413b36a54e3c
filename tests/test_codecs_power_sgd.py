"""PowerSGD's parts: what a round loses, that a good Q is kept, that every machine decodes the same bits."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_cluster.codecs import DamagedError, NotFiniteError, PowerSgd

SHAPES = [(96, 64), (96,), (16, 5, 5), (), (3, 2), (0, 4), (40, 200)]


def round_of(codec, vectors, factor):
    """A round of nodes that hold ``vectors``: (decoded, next Q)."""
    mean = sum(codec.project(vector, factor) for vector in vectors) / np.float32(len(vectors))
    basis = codec.orthogonal(mean)
    factor = sum(codec.factors(vector, basis) for vector in vectors) / np.float32(len(vectors))
    return codec.decode(mean, basis, factor), factor


def relative_error(vector, back):
    return np.linalg.norm((back - vector).astype(np.float64)) / np.linalg.norm(vector.astype(np.float64))


def low_rank(rows, columns, rank, seed=0):
    numbers = np.random.default_rng(seed)
    return (numbers.standard_normal((rows, rank)) @ numbers.standard_normal((rank, columns))).astype(np.float32)


@given(st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=6), st.integers(1, 32))
@settings(max_examples=150, deadline=None)
def test_any_shapes_come_back_and_nothing_is_longer_than_dense(shapes, rank):
    codec = PowerSgd(shapes, rank)
    vector = np.random.default_rng(1).standard_normal(codec.count, np.float32)
    back, factor = round_of(codec, [vector], codec.start())
    assert (back.shape, back.dtype, factor.size) == (vector.shape, np.float32, codec.second)
    assert codec.size <= 4 * codec.count
    assert np.linalg.norm(back) <= 1.0001 * np.linalg.norm(vector)


def test_a_matrix_of_the_rank_is_exact_in_one_round_and_small_tensors_always():
    codec = PowerSgd([(96, 64), (96,), (3, 2)], rank=4)
    vector = np.concatenate([low_rank(96, 64, 4).ravel(), np.random.default_rng(1).standard_normal(102)])
    back, _ = round_of(codec, [vector.astype(np.float32)], codec.start())
    assert np.array_equal(back[96 * 64 :], vector[96 * 64 :].astype(np.float32))
    assert relative_error(vector, back) < 1e-5


def test_rounds_with_a_warm_start_come_near_the_best_there_is():
    codec = PowerSgd([(120, 80)], rank=3)
    matrix = low_rank(120, 80, 12) + np.random.default_rng(2).standard_normal((120, 80)).astype(np.float32)
    factor, errors = codec.start(), []
    for _ in range(25):
        back, factor = round_of(codec, [matrix.ravel()], factor)
        errors.append(relative_error(matrix.ravel(), back))
    singular = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    best = np.sqrt((singular[3:] ** 2).sum() / (singular**2).sum())
    assert errors[0] > errors[-1]
    assert best <= errors[-1] < 1.01 * best


def test_what_is_decoded_is_the_mean_of_all_nodes():
    codec = PowerSgd([(60, 50)], rank=2)
    one, other = low_rank(60, 50, 1, 1).ravel(), low_rank(60, 50, 1, 2).ravel()
    back, _ = round_of(codec, [one, other], codec.start())
    assert relative_error((one + other) / 2, back) < 1e-5


@pytest.mark.parametrize("scale", [1e-36, 1e-12, 1e20, 1e33])
def test_large_and_small_numbers_are_kept_or_become_zero(scale):
    codec = PowerSgd([(60, 50)], rank=2)
    matrix = (low_rank(60, 50, 2).astype(np.float64) * scale).astype(np.float32).ravel()
    back, _ = round_of(codec, [matrix], codec.start())
    assert np.isfinite(back).all()
    if scale > 1e-30:
        assert relative_error(matrix / np.float32(scale), back / np.float32(scale)) < 1e-5
    else:
        assert not back.any()


def test_a_product_beyond_float32_becomes_its_largest_number():
    codec = PowerSgd([(60, 50)], rank=2)
    basis = np.full(120, 2**24, "<i4").tobytes()
    back = codec.decode(np.zeros(codec.first, np.float32), basis, np.full(codec.second, 3e38, np.float32))
    assert (back == np.finfo(np.float32).max).all()


def test_zeros_stay_zeros():
    codec = PowerSgd(SHAPES, rank=2)
    back, _ = round_of(codec, [np.zeros(codec.count, np.float32)], codec.start())
    assert not back.any()


def test_the_product_is_exact():
    codec = PowerSgd([(60, 50)], rank=5)
    vector = np.random.default_rng(3).standard_normal(3000, np.float32)
    mean = codec.project(vector, codec.start())
    basis = codec.orthogonal(mean)
    factor = codec.factors(vector, basis)
    exponent = int(np.frexp(np.abs(factor).max())[1]) - 23
    right = np.rint(np.ldexp(factor.astype(np.float64), -exponent)).astype(np.int64).reshape(50, 5)
    sums = np.frombuffer(basis, "<i4").astype(np.int64).reshape(60, 5) @ right.T
    expected = np.ldexp(sums.astype(np.float64), exponent - 24).astype(np.float32)
    assert np.abs(sums).max() < 2**53
    assert np.array_equal(codec.decode(mean, basis, factor), expected.ravel())


def test_what_cannot_be_used_is_named():
    codec = PowerSgd([(60, 50)], rank=2)
    vector = np.ones(3000, np.float32)
    with pytest.raises(ValueError, match="rank=33: use a whole number from 1 to 32"):
        PowerSgd([(60, 50)], rank=33)
    vector[7] = np.nan
    with pytest.raises(NotFiniteError, match="NaN or infinity"):
        codec.project(vector, codec.start())
    mean = np.ones(codec.first, np.float32)
    with pytest.raises(NotFiniteError, match="NaN or infinity"):
        codec.orthogonal(mean * np.float32(np.inf))
    with pytest.raises(DamagedError, match="3 bytes are no powersgd vector of 480 bytes"):
        codec.factors(np.ones(3000, np.float32), b"123")
    with pytest.raises(DamagedError, match="a number above 1"):
        codec.decode(mean, b"\x7f" * 480, codec.start())
    with pytest.raises(DamagedError, match="a value is not finite"):
        codec.decode(mean, bytes(480), np.full(codec.second, np.inf, np.float32))


DECODES = """
import hashlib, sys
import numpy as np
from notebook_cluster.codecs import PowerSgd
codec = PowerSgd([(300, 200), (77,), (64, 9, 9)], 7)
path = sys.argv[1]
if len(sys.argv) > 2:
    vector = np.random.default_rng(0).standard_normal(codec.count, np.float32)
    mean = codec.project(vector, codec.start(5))
    basis = codec.orthogonal(mean)
    np.savez(path, mean=mean, basis=np.frombuffer(basis, np.uint8), factor=codec.factors(vector, basis))
sent = np.load(path)
back = codec.decode(sent["mean"], sent["basis"].tobytes(), sent["factor"])
print(hashlib.sha256(back.tobytes() + codec.start(5).tobytes()).hexdigest())
"""


def test_unlike_machines_decode_the_same_bits(tmp_path):
    def decoded(*more, **environment):
        done = subprocess.run(
            [sys.executable, "-c", DECODES, str(tmp_path / "sent.npz"), *more],
            env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    expected = decoded("write", OPENBLAS_NUM_THREADS="2")
    assert decoded(OPENBLAS_CORETYPE="Nehalem", OPENBLAS_NUM_THREADS="1") == expected
    assert decoded(OPENBLAS_CORETYPE="Haswell", OPENBLAS_NUM_THREADS="2") == expected
