"""``nc.shard(data)``: this node's part of a data set, another part each epoch, nothing twice and nothing left out."""

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from notebook_cluster.node.data.position import LoopPosition, read_position
from notebook_cluster.node.data.source import (
    ShardSource,
    dropped_sampler,
    is_torch,
    loader_batch_size,
    loader_batches,
)
from notebook_cluster.node.namespace.shard_loops import AloneLoop, EpochCounter, FollowedLoop, LoopOptions, ShardLoop
from notebook_cluster.training.runtime import current_runtime

if TYPE_CHECKING:
    from notebook_cluster.node.data.shares import Shares
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime


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
        self._counter = EpochCounter()
        self._kept: LoopPosition | None = None
        self._loop: ShardLoop | None = None

    def __len__(self) -> int:
        rank, world_size = _share()
        count = len(range(rank, self._source.count, world_size))
        if self._batch_size is not None:
            count = count // self._batch_size if self._full_only else -(-count // self._batch_size)
        return count * self._epochs

    def __iter__(self) -> Iterator[Any]:
        what = self._source.count, self._seed, self._shuffle
        options = LoopOptions(what, self._by_speed, self._batch_size or 1, self._full_only, self._epochs)
        runtime = _following(self._source.count)
        loop: ShardLoop
        if runtime is not None:
            loop = FollowedLoop(options, self._counter, runtime)
        else:
            loop = AloneLoop(options, self._counter, _shares_of_cell(), _share)
        return loop.hand_out(self._produced(loop))

    def _produced(self, loop: ShardLoop) -> Iterator[Any]:
        kept, self._kept = self._kept, None
        self._loop = loop
        batches = loop.begin(kept)
        if self._batch_size is None:
            yield from (self._source.item(int(batch[0])) for batch in batches)
        elif self._loader is not None:
            yield from loader_batches(self._loader, batches)
        else:
            yield from (self._source.batch(batch) for batch in batches)

    def position(self, in_hand: bool = True) -> dict[str, Any]:
        """Where the newest loop over this shard is on this node, as plain data that JSON can hold.

        All that the loop has got counts as given out, the batch in hand too; what a DataLoader's workers have fetched
        and the loop has not got does not.

        Args:
            in_hand: False counts the batch in hand as one that the loop has not got: it comes again.
        """
        if self._kept is not None:
            return self._kept.data()
        loop = self._loop
        if loop is None or loop.ended:
            what = self._source.count, self._seed, self._shuffle
            return LoopPosition(what, self._counter.next).data()
        return loop.position(in_hand).data()

    def go_on(self, position: Mapping[str, Any]) -> None:
        """Let the next loop over this shard begin where ``position`` was on this node: see docs/training.md, "Data".

        Call it on all nodes before any of them begins that loop. With the members of then the rest comes in the order
        in which it would have come; with others, nothing that any of them had is given out again.

        Raises:
            ValueError: it is no position, or one of other data.
        """
        self._kept = read_position(position, (self._source.count, self._seed, self._shuffle))


def _following(count: int) -> "NodeRuntime | None":
    """The runtime, if this loop runs in a cell of a cluster and its data is small enough to follow each element."""
    from notebook_cluster.node.data.taken import MAX_COUNT
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime

    runtime = current_runtime()
    if not isinstance(runtime, NodeRuntime) or count > MAX_COUNT:
        return None
    info = runtime.cell_info()
    if info is None or info.replay:
        return None
    runtime.rank()  # raises where this node is not in the cluster
    return runtime


def _shares_of_cell() -> "Shares | None":
    """What lists the loops of the cell that runs; None outside of a cluster's cells."""
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime

    runtime = current_runtime()
    if not isinstance(runtime, NodeRuntime):
        return None
    info = runtime.cell_info()
    return None if info is None or info.replay else runtime.shares


def _share() -> tuple[int, int]:
    """(index, count) of this node among those that divide the data."""
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime

    runtime = current_runtime()
    return runtime.share() if isinstance(runtime, NodeRuntime) else (runtime.rank(), runtime.world_size())
