"""What a DataLoader's sampler chooses, drawn alike on every node from (seed, epoch)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[Any]

Draw = Callable[[int, int], "Indices"]
"""(seed, epoch) -> the indices of the epoch, in its order."""


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool = True) -> "Indices":
    """0 to ``count`` - 1 in the order of ``epoch``: int64.

    It sorts PCG64's raw stream: numpy guarantees that stream in every version, but not its ``permutation``, and nodes
    may have different numpys.
    """
    import numpy

    if not shuffle:
        return numpy.arange(count)
    order: Indices = numpy.argsort(_raw(count, seed, epoch), kind="stable")
    return order


def sampler_of(loader: Any) -> Any:
    """The sampler that makes the loader's choice, or its batch_sampler where that does."""
    from torch.utils.data import BatchSampler

    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler
    return batches.sampler if type(batches) is BatchSampler else batches


def kept_sampler(loader: Any) -> tuple[int, Draw] | None:
    """How many indices the loader's sampler draws in an epoch, and what draws them here; None: it is not known how it
    chooses, or it takes all elements once.

    Torch's own are drawn anew, with a generator of (seed, epoch) in place of theirs; a list of indices stays as it is.
    """
    from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

    sampler = sampler_of(loader)
    kind = type(sampler)
    if kind is WeightedRandomSampler:
        return _weighted(sampler)
    if kind is SubsetRandomSampler:
        return _subset(sampler)
    if kind is RandomSampler and not _is_plain(sampler):
        return _random(sampler)
    if kind in (list, tuple, range) and all(isinstance(one, int) for one in sampler):
        return len(sampler), lambda seed, epoch: _array(sampler)
    return None


def dropped_sampler(loader: Any) -> str:
    """The sampler of ``loader`` that makes a choice which cannot be kept, in words; empty: none does."""
    from torch.utils.data import RandomSampler, SequentialSampler

    sampler = sampler_of(loader)
    if kept_sampler(loader) is not None or type(sampler) in (RandomSampler, SequentialSampler):
        return ""
    return type(sampler).__name__


def _is_plain(sampler: Any) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _weighted(sampler: Any) -> tuple[int, Draw]:
    import numpy

    weights = numpy.asarray(sampler.weights, numpy.float64)
    count = int(sampler.num_samples)
    if not sampler.replacement and count > int((weights > 0).sum()):
        raise ValueError(
            f"shard: the WeightedRandomSampler draws {count} without replacement, but only {int((weights > 0).sum())} "
            "weights are above 0"
        )

    def draw(seed: int, epoch: int) -> "Indices":
        if sampler.replacement:
            sums = numpy.cumsum(weights)
            drawn: Indices = numpy.searchsorted(sums, _uniform(count, seed, epoch) * sums[-1], side="right")
            return drawn
        with numpy.errstate(divide="ignore"):
            arrivals = -numpy.log1p(-_uniform(len(weights), seed, epoch)) / weights
        order: Indices = numpy.argsort(arrivals, kind="stable")[:count]
        return order

    return count, draw


def _subset(sampler: Any) -> tuple[int, Draw]:
    indices = _array(sampler.indices)
    return len(indices), lambda seed, epoch: indices[epoch_order(len(indices), seed, epoch)]


def _random(sampler: Any) -> tuple[int, Draw]:
    import numpy

    elements, count = len(sampler.data_source), int(sampler.num_samples)

    def draw(seed: int, epoch: int) -> "Indices":
        if sampler.replacement:
            return (_uniform(count, seed, epoch) * elements).astype(numpy.int64)
        turns = -(-count // elements)
        keys = _raw(turns * elements, seed, epoch).reshape(turns, elements)
        order: Indices = numpy.argsort(keys, axis=1, kind="stable").reshape(-1)[:count]
        return order

    return count, draw


def _array(indices: Any) -> "Indices":
    import numpy

    return numpy.array([int(index) for index in indices], numpy.int64)


def _raw(count: int, seed: int, epoch: int) -> "NDArray[Any]":
    import numpy

    raw: NDArray[Any] = numpy.random.PCG64(numpy.random.SeedSequence([seed, epoch])).random_raw(count)
    return raw


def _uniform(count: int, seed: int, epoch: int) -> "NDArray[Any]":
    """From 0 to below 1."""
    uniform: NDArray[Any] = (_raw(count, seed, epoch) >> 11) * 2.0**-53
    return uniform
