"""The mean of pseudo-gradients and the outer step, the same bits on every machine.

Everything here is plain numpy float32 on flat vectors: separate multiply and add, members in rank order, chunks of
64k. Numpy agrees with itself (and with MLX on CPU) in every element when used so; fused multiply-add,
``torch.optim``, ``np.sum`` and matrix products do not agree between machines.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from notebook_cluster.codecs import Vector, to_bfloat16
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.bits import DEFAULT_MOMENTUM, bits_float, default_outer_lr, float_bits
from notebook_cluster.rounds.numerics.momentum import is_bfloat16, widened

__all__ = [
    "DEFAULT_MOMENTUM",
    "Descent",
    "StateHash",
    "bits_float",
    "default_outer_lr",
    "float_bits",
    "flushes_subnormals",
    "former_state_hash",
    "outer_step",
    "state_hash",
    "weighted_sum",
]

CHUNK = 64 * 1024


def weighted_sum(contributions: Iterable[tuple[Vector, float]], out: Vector | None = None) -> Vector:
    """``sum_m w_m * D_m``, added in the order given (rank order): float32, one product and one addition at a time.

    Args:
        contributions: (pseudo-gradient, weight) of at least one member; equal lengths; a weight is a float32 number.
        out: where to write it, float32 of that length; None: a new vector.

    Raises:
        ValueError: no contributions.
    """
    total: Vector | None = None
    scratch = np.empty(CHUNK, np.float32)
    for vector, weight in contributions:
        factor = np.float32(weight)
        if total is None:
            total = np.multiply(vector, factor, out=out)
            continue
        for start in range(0, vector.size, CHUNK):
            part = vector[start : start + CHUNK]
            product = np.multiply(part, factor, out=scratch[: part.size])
            np.add(total[start : start + CHUNK], product, out=total[start : start + CHUNK])
    if total is None:
        raise ValueError("no contributions to add")
    return total


def outer_step(
    theta: Vector,
    momentum: Vector,
    mean: Vector,
    lr: float,
    mu: float,
    nesterov: bool,
    buffers: int = 0,
    out: Vector | None = None,
) -> tuple[Vector, Vector]:
    """One step of the outer optimiser; returns (theta, momentum): ``out`` or a new array, and one in the memory of
    ``mean``, kept as ``momentum`` is (:mod:`.momentum`); where that is not kept, ``momentum`` itself.

    ``b <- mu * b + D``, then ``theta <- theta - lr * (D + mu * b)`` with Nesterov (DiLoCo, arXiv 2311.08105) or
    ``theta <- theta - lr * b`` without; lr 1 and mu 0, where b is D itself, is Local SGD (arXiv 1805.09767). The last
    ``buffers`` elements (running statistics of BatchNorm) become ``theta - D``, their plain average: momentum would
    make a variance negative.

    Args:
        theta, momentum, mean: vectors of one length, float32, and the momentum as it is kept; ``mean`` is the weighted
            mean of (theta - theta_m). The new momentum is written over it; theta is computed before that is rounded.
        lr, mu: float32 numbers; where no momentum is kept mu is taken for 0.
    """
    rate, decay = np.float32(lr), np.float32(mu if momentum.size else 0)
    new_theta = vectors.empty(theta.size) if out is None else out
    trained = theta.size - buffers
    scratch = np.empty((2, min(CHUNK, trained)), np.float32)
    short = is_bfloat16(momentum)
    # of bfloat16 the first half of the mean: what is written there was read before
    kept = mean.view(momentum.dtype)[: mean.size] if short else mean if momentum.size else momentum
    np.subtract(theta[trained:], mean[trained:], out=new_theta[trained:])
    for start in range(0, trained, CHUNK):
        part = slice(start, min(start + CHUNK, trained))
        gradient = mean[part]
        velocity, update = scratch[:, : gradient.size]
        if not decay:  # the mean, where it is, becomes the momentum
            np.multiply(gradient, rate, out=update)
            np.subtract(theta[part], update, out=new_theta[part])
            if short:
                kept[part] = to_bfloat16(gradient)
            continue
        np.multiply(widened(momentum[part], velocity), decay, out=velocity)
        np.add(velocity, gradient, out=velocity)
        if nesterov:
            np.multiply(velocity, decay, out=update)
            np.add(update, gradient, out=update)
            np.multiply(update, rate, out=update)
        else:
            np.multiply(velocity, rate, out=update)
        np.subtract(theta[part], update, out=new_theta[part])
        kept[part] = to_bfloat16(velocity) if short else velocity
    kept[trained:] = momentum[trained:]  # nothing, where none is kept
    return new_theta, kept


@dataclass(frozen=True)
class Descent:
    """What DeMo (arXiv 2411.19870) makes of the mean of the nodes' momenta, for :func:`outer_step` with mu 0:
    ``theta <- theta - lr * (sign(mean) + weight_decay * theta)``, or with the mean itself instead of its sign."""

    sign: bool = True
    weight_decay: float = 0.0

    def __str__(self) -> str:
        """What differs from the defaults."""
        text = "" if self.sign else ", no sign"
        return text + (f", weight decay {self.weight_decay:g}" if self.weight_decay else "")

    def direction(self, mean: Vector, theta: Vector, buffers: int = 0) -> Vector:
        """A new vector to be subtracted from ``theta``, float32 as both; its last ``buffers`` elements are those of
        ``mean``."""
        towards, trained = mean.copy(), theta.size - buffers
        for start in range(0, trained, CHUNK):
            part = slice(start, min(start + CHUNK, trained))
            if self.sign:
                np.sign(mean[part], out=towards[part])
            if self.weight_decay:
                np.add(towards[part], theta[part] * np.float32(self.weight_decay), out=towards[part])
        return towards


class StateHash:
    """:func:`state_hash` of vectors that come in parts, in their order."""

    def __init__(self) -> None:
        self._theta, self._momentum = xxhash.xxh3_128(), xxhash.xxh3_128()

    def add(self, theta: Vector, momentum: Vector) -> None:
        """The next elements of both."""
        self._theta.update(np.ascontiguousarray(theta, "<f4").data)
        self._momentum.update(np.ascontiguousarray(momentum, "<u2" if is_bfloat16(momentum) else "<f4").data)

    def so_far(self) -> bytes:
        """Another one for every other beginning of the vectors."""
        return bytes(self._theta.digest() + self._momentum.digest())

    def hexdigest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.so_far())


def state_hash(theta: Vector, momentum: Vector) -> str:
    """xxh3-128 of the two xxh3-128 of the bytes of theta and of momentum as it is kept, as 32 hex digits: what nodes
    compare after each round."""
    both = StateHash()
    both.add(theta, momentum)
    return both.hexdigest()


def former_state_hash(theta: Vector, momentum: Vector) -> str:
    """What checkpoints of before protocol 7 have instead: xxh3-128 of the bytes of theta, then of momentum."""
    digest = xxhash.xxh3_128(np.ascontiguousarray(theta, "<f4").data)
    digest.update(np.ascontiguousarray(momentum, "<f4").data)
    return digest.hexdigest()


def flushes_subnormals() -> bool:
    """True when this thread rounds subnormal numbers to zero (``torch.set_flush_denormal(True)`` does that, for numpy
    too), so that its results differ from those of other nodes."""
    with np.errstate(all="ignore"):
        return not bool(np.multiply(np.full(4, 1e-40, np.float32), np.float32(1.0)).all())
