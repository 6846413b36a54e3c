"""The outer step: the oracle's bits, inputs untouched, defaults by number of members."""

import numpy as np
import pytest
import torch

from notebook_cluster.rounds.numerics import outer
from notebook_cluster.rounds.numerics.outer import float_bits, outer_step, state_hash, weighted_sum
from tests import oracle

SIZES = [1, 5, 65536, 65537, 200_001]


def vectors(count, size, seed=0):
    numbers = np.random.default_rng(seed)
    return [numbers.standard_normal(size, np.float32) for _ in range(count)]


@pytest.mark.parametrize("size", SIZES)
def test_the_weighted_sum_has_the_oracles_bits(size):
    contributions = vectors(3, size)
    weights = [outer.bits_float(float_bits(w)) for w in (0.2, 0.3, 0.5)]
    ours = weighted_sum(zip(contributions, weights, strict=True))
    assert np.array_equal(ours, oracle.mean(contributions, weights))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("mu", "nesterov"), [(0.9, True), (0.9, False), (0.0, False), (0.0, True)])
def test_the_outer_step_has_the_oracles_bits(size, mu, nesterov):
    theta, momentum, mean = vectors(3, size)
    ours = outer_step(theta, momentum, mean.copy(), 0.7, mu, nesterov)
    theirs = oracle.diloco(theta, momentum, mean, 0.7, mu, nesterov)
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_outer_step_leaves_theta_and_momentum_alone_and_writes_over_the_mean():
    theta, momentum, mean = vectors(3, 70_000)
    before = theta.copy(), momentum.copy()
    _, velocity = outer_step(theta, momentum, mean, 0.7, 0.9, True)
    assert np.array_equal(theta, before[0])
    assert np.array_equal(momentum, before[1])
    assert velocity is mean


def test_local_sgd_lands_on_the_average_of_the_models():
    theta, first, second = vectors(3, 1000)
    mean = weighted_sum([(theta - first, 0.5), (theta - second, 0.5)])
    new, _ = outer_step(theta, np.zeros_like(theta), mean, 1.0, 0.0, False)
    assert np.allclose(new, (first + second) / 2, atol=1e-6)


def test_buffers_are_averaged_without_momentum_so_a_variance_stays_positive():
    theta, momentum = np.array([1.0, 1.0], np.float32), np.array([0.9, 0.0], np.float32)
    mean = np.array([0.9, 0.9], np.float32)  # both nodes came from 1.0 to 0.1
    new, velocity = outer_step(theta, momentum, mean, 0.7, 0.9, True, buffers=1)
    assert new[0] < 0 < new[1]
    assert new[1] == np.float32(1.0) - np.float32(0.9)
    assert velocity[1] == 0


def test_the_state_hash_sees_one_bit_of_momentum():
    theta, momentum = vectors(2, 100)
    other = momentum.copy()
    other.view(np.uint32)[50] ^= 1
    assert state_hash(theta, momentum) == oracle.digest(theta, momentum) != state_hash(theta, other)


@pytest.mark.parametrize(("members", "lr"), [(1, 0.4), (2, 0.6), (3, 0.6), (4, 0.6), (8, 0.6), (30, 0.6)])
def test_the_default_learning_rate_is_lower_for_one_member(members, lr):
    assert outer.default_outer_lr(members) == lr


def test_flushing_subnormals_is_noticed():
    assert not outer.flushes_subnormals()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert outer.flushes_subnormals()
    finally:
        torch.set_flush_denormal(False)
