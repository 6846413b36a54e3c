"""``nc.shard(data)``: this node's part of a data set, another part each epoch, nothing twice and nothing left out."""

import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from notebook_cluster.node.data.source import (
    ShardSource,
    dropped_sampler,
    is_torch,
    loader_batch_size,
    loader_batches,
)
from notebook_cluster.training.runtime import current_runtime

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from notebook_cluster.node.data.ledger import Ledger
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime

    Indices = NDArray[Any]


def shard(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    epochs: int = 1,
    weights: Literal["speed"] | None = None,
) -> "Shard":
    """An iterable over this node's part of ``data``.

    Each epoch all nodes draw the same permutation from (``seed``, epoch), and this node takes every ``world_size``-th
    index of it from ``rank`` on. When membership changes, what no node has taken is divided anew among those that are
    in and whose loops go on: a lost node's part goes to the others, a joiner gets a part. Each element is given out
    exactly once an epoch; what a node that dies has in hand is not given out again. A shard that is iterated again goes
    on with the next epoch. Batches stay on the CPU: moving them is up to the loop.

    Args:
        data: a torch Dataset or DataLoader (whose dataset, batch_size, collate_fn and workers are used; a sampler of
            its own is not, and is named in a warning), a tuple of arrays or tensors of equal length, one array or
            tensor, a Dataset of Hugging Face, or anything with ``len()`` and ``[index]``.
        batch_size: items per batch; None yields single items (with a DataLoader: its own batch_size).
        shuffle: False keeps the order of the data.
        seed: the same on every node.
        drop_last: leave out this node's last batch when it is not full.
        epochs: passes over the data in one iteration.
        weights: ``"speed"`` gives each node a part in proportion to the samples per second that it was measured at
            when the epoch begins (equal parts before there is a measurement); None: equal parts.

    Yields:
        Batches: a tuple of arrays for a tuple of arrays, an array for an array, a dict of columns for a Dataset of
        Hugging Face, torch's default collation for a torch Dataset, a list of items for any other sequence.

    Raises:
        TypeError: ``data`` cannot be divided. ValueError: an argument is out of range.
    """
    return Shard(data, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, epochs=epochs, weights=weights)


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
    """What :func:`shard` returns; ``len()`` is what one iteration yields in equal parts with those that are in now."""

    def __init__(
        self,
        data: Any,
        batch_size: int | None,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        epochs: int,
        weights: Literal["speed"] | None,
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("epochs", epochs, 1), ("seed", seed, 0)):
            if value is None and name == "batch_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"shard: {name}={value!r}: use an integer of at least {least}")
        if weights not in (None, "speed"):
            raise ValueError(f'shard: weights={weights!r}: use "speed", or None for equal parts')
        current_runtime()
        self._loader = data if is_torch(data, "DataLoader") else None
        if self._loader is not None:
            batch_size = loader_batch_size(self._loader, batch_size)
            drop_last = drop_last or bool(self._loader.drop_last)
            data = self._loader.dataset
        self._source = ShardSource(data)
        if self._loader is not None and (sampler := dropped_sampler(self._loader)):
            text = (
                f"shard: the {sampler} of this DataLoader is not used: all elements of its data come once an epoch. "
                "For another choice pass torch.utils.data.Subset(dataset, indices), with the same indices on every node"
            )
            warnings.warn(text, stacklevel=3)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._full_only = drop_last and batch_size is not None
        self._epochs = epochs
        self._by_speed = weights == "speed"
        self._epoch = 0

    def __len__(self) -> int:
        rank, world_size = _share()
        count = len(range(rank, self._source.count, world_size))
        if self._batch_size is not None:
            count = count // self._batch_size if self._full_only else -(-count // self._batch_size)
        return count * self._epochs

    def __iter__(self) -> Iterator[Any]:
        runtime = _following(self._source.count)
        batches = self._alone() if runtime is None else self._together(runtime)
        if self._batch_size is None:
            return (self._source.item(int(batch[0])) for batch in batches)
        if self._loader is not None:
            return loader_batches(self._loader, batches)
        return (self._source.batch(batch) for batch in batches)

    def _alone(self) -> "Iterator[Indices]":
        """Batches of indices where nobody follows who took what: in a cell that is replayed, outside of cells."""
        size = self._batch_size or 1
        for _ in range(self._epochs):
            epoch, self._epoch = self._epoch, self._epoch + 1
            indices = epoch_indices(self._source.count, self._seed, epoch, *_share(), self._shuffle)
            stop = len(indices) - len(indices) % size if self._full_only else len(indices)
            for start in range(0, stop, size):
                yield indices[start : start + size]

    def _together(self, runtime: "NodeRuntime") -> "Iterator[Indices]":
        """Batches of indices out of the ledgers that all nodes keep of each epoch."""
        loop = _Loop(self._source.count, self._seed, self._shuffle, self._batch_size or 1, self._full_only, runtime)
        number = runtime.shares.next_loop(self._source.count, self._seed, self._shuffle, self._by_speed)
        try:
            for _ in range(self._epochs):
                epoch, self._epoch = self._epoch, self._epoch + 1
                loop.begin(epoch, number, self._by_speed)
                yield from loop.batches()
            while not loop.close():
                yield from loop.batches()
        finally:
            loop.abandon()


class _Loop:
    """One pass of the user's loop over its epochs. Those before the newest stay until nothing of them can come back."""

    def __init__(
        self, count: int, seed: int, shuffle: bool, size: int, full_only: bool, runtime: "NodeRuntime"
    ) -> None:
        self._count, self._seed, self._shuffle = count, seed, shuffle
        self._size, self._full_only = size, full_only
        self._runtime = runtime
        self._ledgers: list[Ledger] = []
        self._order: tuple[int, Indices] | None = None

    def begin(self, epoch: int, number: int, by_speed: bool) -> None:
        from notebook_cluster.protocol.mesh import ShardKey

        info = self._runtime.cell_info()
        assert info is not None
        key = ShardKey(
            cell=info.cell, loop=number, epoch=epoch, count=self._count, seed=self._seed, shuffle=self._shuffle,
            by_speed=by_speed, among=tuple(sorted(self._runtime.shared_among())),
        )  # fmt: skip
        alike_from = None if info.joined or by_speed else info.generation
        self._ledgers = [ledger for ledger in self._ledgers if not ledger.all_taken()]
        self._ledgers.append(self._runtime.shares.begin(key, alike_from))

    def batches(self) -> "Iterator[Indices]":
        """Until this node's parts are empty, those of earlier epochs first."""
        shares = self._runtime.shares
        while True:
            for ledger in self._ledgers:
                if not ledger.read_through():
                    positions = shares.take(ledger, self._size, self._full_only)
                    if positions is not None:
                        begun = time.monotonic()
                        yield self._order_of(ledger.key.epoch)[positions]
                        shares.measured(len(positions), time.monotonic() - begun)
                        break
            else:
                return

    def close(self) -> bool:
        """End for good; False when there is something to take again."""
        return self._runtime.shares.close(self._ledgers)

    def abandon(self) -> None:
        self._runtime.shares.abandon(self._ledgers)

    def _order_of(self, epoch: int) -> "Indices":
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_indices(self._count, self._seed, epoch, 0, 1, self._shuffle)
        return self._order[1]


def _following(count: int) -> "NodeRuntime | None":
    """The runtime, if this loop runs in a cell of a cluster and its data is small enough to follow each element."""
    from notebook_cluster.node.data.shares import MAX_COUNT
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime

    runtime = current_runtime()
    if not isinstance(runtime, NodeRuntime) or count > MAX_COUNT:
        return None
    info = runtime.cell_info()
    if info is None or info.replay:
        return None
    runtime.rank()  # raises where this node is not in the cluster
    return runtime


def _share() -> tuple[int, int]:
    """(index, count) of this node among those that divide the data."""
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime

    runtime = current_runtime()
    return runtime.share() if isinstance(runtime, NodeRuntime) else (runtime.rank(), runtime.world_size())
