"""``nc.shard(data)``: this node's part of a data set, another part each epoch, nothing twice and nothing left out."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from notebook_cluster.training.runtime import current_runtime

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[Any]

_ITERABLE_ONLY = "has no length and no [index], so it cannot be divided: pass a map-style Dataset, a list or arrays"


def shard(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    epochs: int = 1,
) -> "Shard":
    """An iterable over this node's part of ``data``.

    Each epoch all nodes draw the same permutation from (``seed``, epoch), and this node takes every ``world_size``-th
    index of it from ``rank`` on. Who is in is read again at the start of each epoch, so nodes may come and go. A shard
    that is iterated again goes on with the next epoch. Batches stay on the CPU: moving them is up to the loop.

    Args:
        data: a torch Dataset or DataLoader (whose dataset, batch_size, collate_fn and workers are used), a tuple of
            arrays or tensors of equal length, one array or tensor, or anything with ``len()`` and ``[index]``.
        batch_size: items per batch; None yields single items (with a DataLoader: its own batch_size).
        shuffle: False keeps the order of the data.
        seed: the same on every node.
        drop_last: leave out this node's last batch when it is not full.
        epochs: passes over the data in one iteration.

    Yields:
        Batches: a tuple of arrays for a tuple of arrays, an array for an array, torch's default collation for a
        Dataset, a list of items for any other sequence.

    Raises:
        TypeError: ``data`` cannot be divided. ValueError: an argument is out of range.
    """
    return Shard(data, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, epochs=epochs)


def epoch_indices(count: int, seed: int, epoch: int, rank: int, world_size: int, shuffle: bool = True) -> "Indices":
    """Indices of node ``rank`` in ``epoch``: int64, disjoint between ranks, together 0 to ``count`` - 1.

    The order sorts PCG64's raw stream: numpy guarantees that stream in every version, but not its ``permutation``, and
    nodes may have different numpys.
    """
    import numpy

    if not shuffle:
        return numpy.arange(count)[rank::world_size]
    keys = numpy.random.PCG64(numpy.random.SeedSequence([seed, epoch])).random_raw(count)
    order: Indices = numpy.argsort(keys, kind="stable")
    return order[rank::world_size]


class Shard:
    """What :func:`shard` returns; ``len()`` is what one iteration yields with the nodes that are in now."""

    def __init__(
        self, data: Any, batch_size: int | None, *, shuffle: bool, seed: int, drop_last: bool, epochs: int
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("epochs", epochs, 1), ("seed", seed, 0)):
            if value is None and name == "batch_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"shard: {name}={value!r}: use an integer of at least {least}")
        current_runtime()
        self._loader = data if _is_torch(data, "DataLoader") else None
        if self._loader is not None:
            batch_size = self._loader.batch_size if batch_size is None else batch_size
            drop_last = drop_last or bool(self._loader.drop_last)
            data = self._loader.dataset
        self._source = _Source(data)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._epochs = epochs
        self._epoch = 0

    def __len__(self) -> int:
        rank, world_size = _share()
        count = len(range(rank, self._source.count, world_size))
        if self._batch_size is not None:
            count = count // self._batch_size if self._drop_last else -(-count // self._batch_size)
        return count * self._epochs

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._epochs):
            epoch, self._epoch = self._epoch, self._epoch + 1
            rank, world_size = _share()
            indices = epoch_indices(self._source.count, self._seed, epoch, rank, world_size, self._shuffle)
            yield from self._one_epoch(indices)

    def _one_epoch(self, indices: "Indices") -> Iterator[Any]:
        size = self._batch_size
        if size is None:
            for index in indices.tolist():
                yield self._source.item(index)
            return
        stop = len(indices) - len(indices) % size if self._drop_last else len(indices)
        batches = [indices[start : start + size] for start in range(0, stop, size)]
        if self._loader is not None:
            yield from _loader_batches(self._loader, batches)
            return
        for batch in batches:
            yield self._source.batch(batch)


class _Source:
    """One way to get items and batches out of the many kinds of data."""

    def __init__(self, data: Any) -> None:
        self.item: Callable[[int], Any]
        self.batch: Callable[[Indices], Any]
        if _is_torch(data, "IterableDataset"):
            raise TypeError(f"shard: an IterableDataset {_ITERABLE_ONLY}")
        if _is_torch(data, "TensorDataset"):
            data = tuple(data.tensors)
        if isinstance(data, tuple) and data and all(_is_array(part) for part in data):
            lengths = [len(part) for part in data]
            if len(set(lengths)) > 1:
                raise ValueError(f"shard: the arrays have different lengths {lengths}: they must belong together")
            self.count = lengths[0]
            self.item = lambda index: tuple(part[index] for part in data)
            self.batch = lambda indices: tuple(_take(part, indices) for part in data)
        elif _is_array(data):
            self.count = len(data)
            self.item = lambda index: data[index]
            self.batch = lambda indices: _take(data, indices)
        elif (
            not isinstance(data, (str, bytes, dict, set)) and hasattr(data, "__len__") and hasattr(data, "__getitem__")
        ):
            self.count = len(data)
            self.item = lambda index: data[index]
            self.batch = lambda indices: _collate(data, [data[index] for index in indices.tolist()])
        else:
            raise TypeError(f"shard: a {type(data).__name__} {_ITERABLE_ONLY}")
        if not self.count:
            raise ValueError("shard: the data is empty")


def _share() -> tuple[int, int]:
    """(index, count) of this node among those that divide the data."""
    from notebook_cluster.node.runtime import NodeRuntime

    runtime = current_runtime()
    return runtime.share() if isinstance(runtime, NodeRuntime) else (runtime.rank(), runtime.world_size())


def _is_torch(data: Any, name: str) -> bool:
    """Whether ``data`` is a torch.utils.data class of this name, without importing torch."""
    module = sys.modules.get("torch.utils.data")
    return module is not None and isinstance(data, getattr(module, name))


def _is_array(data: Any) -> bool:
    """An array or tensor with a first dimension."""
    shape = getattr(data, "shape", None)
    return shape is not None and hasattr(data, "__getitem__") and len(shape) > 0 and not hasattr(data, "iloc")


def _take(array: Any, indices: "Indices") -> Any:
    module = type(array).__module__.partition(".")[0]
    if module == "mlx":
        import mlx.core as mx

        return array[mx.array(indices)]
    if module == "torch" or _is_torch_tensor(array):
        import torch

        return array[torch.from_numpy(indices.copy()).to(array.device)]
    return array[indices]


def _is_torch_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _collate(data: Any, items: list[Any]) -> Any:
    if not _is_torch(data, "Dataset"):
        return items
    from torch.utils.data import default_collate

    return default_collate(items)


def _loader_batches(loader: Any, batches: "Sequence[Indices]") -> Iterator[Any]:
    """The DataLoader's own machinery (workers, collate_fn, pinned memory) over our batches."""
    from torch.utils.data import DataLoader

    ours: Any = DataLoader(
        loader.dataset,
        batch_sampler=[batch.tolist() for batch in batches],
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
    )
    yield from ours
