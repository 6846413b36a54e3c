"""What a round must give, in numpy and nothing of ours: the reference for the explorer and the training tests."""

import numpy as np
import xxhash


def number(bits):
    """A float32 from its bits."""
    return np.array([bits], np.uint32).view(np.float32)[0]


def mean(contributions, weights):
    """sum_m w_m * D_m in the order given; one product and one addition at a time."""
    total = contributions[0] * np.float32(weights[0])
    for contribution, weight in zip(contributions[1:], weights[1:], strict=True):
        total = total + contribution * np.float32(weight)
    return total


def diloco(theta, momentum, pseudo_gradient, lr, mu, nesterov):
    """arXiv 2311.08105: b <- mu*b + D; theta <- theta - lr*(D + mu*b). Without momentum b is D itself, -0 included."""
    lr, mu = np.float32(lr), np.float32(mu)
    momentum = mu * momentum + pseudo_gradient if mu else pseudo_gradient
    update = mu * momentum + pseudo_gradient if nesterov else momentum
    return theta - lr * update, momentum


def digest(theta, momentum):
    both = [xxhash.xxh3_128_digest(vector.astype("<f4").tobytes()) for vector in (theta, momentum)]
    return xxhash.xxh3_128_hexdigest(b"".join(both))


def fragments(elements, block, count):
    """Index arrays of strided fragments: stripes of whole blocks, dealt out in turn."""
    blocks = -(-elements // block)
    width = block * max(1, min(65536 // block, blocks // (8 * count)))
    stripe = np.arange(elements) // width
    return [np.flatnonzero(stripe % count == fragment) for fragment in range(count)]


def carried(local, sent, theta):
    """What a node did since it sent, on top of the new parameters."""
    return theta - (sent - local)


def mixed(local, theta, mix):
    """arXiv 2501.18512: mix * local + (1 - mix) * theta, with the roundings of theta - mix * (theta - local)."""
    return theta - (theta - local) * np.float32(mix)
