"""``nc.shard(data)``: this node's part of a data set, another part each epoch, nothing twice and nothing left out."""

import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from notebook_cluster.node.data.loop_registry import EpochCounter
from notebook_cluster.node.data.position import LoopPosition, What, read_position
from notebook_cluster.node.data.samplers import dropped_sampler, epoch_order, kept_sampler
from notebook_cluster.node.data.source import (
    ShardSource,
    batch_maker,
    is_torch,
    loader_batch_size,
    loader_batches,
    loader_reads,
    order_of,
)
from notebook_cluster.node.data.stream_readers import FileReader, StrideReader
from notebook_cluster.node.data.streams import Mode, StreamSource, default_mode, stream_source
from notebook_cluster.node.namespace.shard_loops import (
    AloneLoop,
    FollowedLoop,
    LoopOptions,
    Place,
    ShardLoop,
)
from notebook_cluster.node.namespace.stream_loops import AloneShares, FileLoop, StrideLoop
from notebook_cluster.training.runtime import current_runtime

if TYPE_CHECKING:
    from notebook_cluster.node.data.samplers import Draw, Indices
    from notebook_cluster.node.data.shares import Shares
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime


def shard(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool = False,
    epochs: int = 1,
    weights: Literal["speed"] | None = None,
    mode: Mode | None = None,
) -> "Shard":
    """An iterable over this node's part of ``data``.

    Each epoch all nodes draw the same permutation from (``seed``, epoch), and this node takes every ``world_size``-th
    index of it from ``rank`` on. When membership changes, what no node has taken is divided anew among those that are
    in and whose loops go on: a lost node's part goes to the others, a joiner gets a part. Each element is given out
    exactly once an epoch; what a node that dies has in hand is not given out again. A shard that is iterated again goes
    on with the next epoch, and so does one that a loop makes again, at the same place and over the same data. Batches
    stay on the CPU: moving them is up to the loop.

    Args:
        data: a torch Dataset or DataLoader (whose dataset, batch_size, collate_fn and workers are used, and torch's own
            samplers, which are drawn anew from ``seed``; a sampler of your own class is not, and is named in a
            warning), a tuple of arrays or tensors of equal length, one array or tensor, a Dataset of Hugging Face, or
            anything with ``len()`` and ``[index]``. Or a stream: a torch IterableDataset (also in a DataLoader), one of
            Hugging Face, any iterable, a generator (which can be read once), a function that returns one, a list of
            .tar files.
        batch_size: items per batch; None yields single items (with a DataLoader: its own batch_size).
        shuffle: False keeps the order of the data, or of the files. True, the default, draws one for each epoch, also
            for a DataLoader made with ``shuffle=False`` (torch's default). Items of a stream come in its own order:
            shuffle it before, with the same seed on every node.
        seed: the same on every node.
        drop_last: leave out this node's last batch when it is not full.
        epochs: passes over the data in one iteration.
        weights: ``"speed"`` gives each node a part in proportion to the samples per second that it was measured at
            when the epoch begins (equal parts before there is a measurement); None: equal parts.
        mode: of streams. ``"stride"``: every node reads the whole stream, which must be the same everywhere, and keeps
            every ``world_size``-th item. ``"file"``: each node reads other files: of a list of .tar files (the default
            there), a list of iterables or of functions that open one, or the shards of an IterableDataset of Hugging
            Face.

    Yields:
        Batches: a tuple of arrays for a tuple of arrays, an array for an array, a dict of columns for a Dataset of
        Hugging Face, torch's default collation for a torch Dataset, a list of items for anything else. A sample of a
        .tar file is a dict of bytes by suffix, with ``__key__``.

    Raises:
        TypeError: ``data`` cannot be divided. ValueError: an argument is out of range, or does not fit ``data``.
    """
    made = Shard(
        data, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, epochs=epochs, weights=weights, mode=mode
    )
    caller = sys._getframe(1)
    made.made_at((caller.f_code, caller.f_lasti), data)
    return made


class Shard:
    """What :func:`shard` returns; ``len()`` is what one iteration yields in equal parts with those that are in now."""

    def __init__(
        self,
        data: Any,
        batch_size: int | None,
        *,
        shuffle: bool | None,
        seed: int,
        drop_last: bool,
        epochs: int,
        weights: Literal["speed"] | None,
        mode: Mode | None,
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
        self._batch_size = batch_size
        self._seed, self._epochs = seed, epochs
        self._full_only = drop_last and batch_size is not None
        self._by_speed = weights == "speed"
        self._counter = EpochCounter()
        self._kept: LoopPosition | None = None
        self._loop: ShardLoop | None = None
        self._draw: Draw | None = None
        self._stream = stream_source(data, mode)
        if self._stream is None:
            self._divide_indices(data, shuffle is not False)
        else:
            self._divide_stream(data, self._stream, mode or default_mode(data), shuffle)

    def made_at(self, place: Hashable, data: Any) -> None:
        """Of the shards that this place in the user's code makes over the same ``data``, each goes on with the next
        epoch."""
        shares = _shares_of_cell()
        if shares is not None:
            data = self._loader.dataset if self._loader is not None else data
            place = place, self._what, self._by_speed
            self._counter = shares.counter(place, data, self._stream is not None)

    def _divide_indices(self, data: Any, shuffle: bool) -> None:
        self._source = ShardSource(data)
        self._data_order = order_of(data)
        count = self._source.count  # what draws refers to no shard: data that is made anew is freed at once
        self._what: What = count, self._seed, shuffle
        self._draw = lambda seed, epoch: epoch_order(count, seed, epoch, shuffle)
        if self._loader is None:
            return
        if sampler := dropped_sampler(self._loader):
            text = (
                f"shard: the {sampler} of this DataLoader is not used: all elements of its data come once an epoch. "
                "For another choice pass torch.utils.data.Subset(dataset, indices), with the same indices on every node"
            )
            warnings.warn(text, stacklevel=5)
        elif kept := kept_sampler(self._loader):
            count, self._draw = kept
            if not count:
                raise ValueError("shard: the sampler of this DataLoader chooses nothing")
            self._what = count, self._seed, shuffle

    def _divide_stream(self, data: Any, stream: StreamSource, mode: Mode, shuffle: bool | None) -> None:
        if stream.once and self._epochs > 1:
            raise ValueError(
                f"shard: epochs={self._epochs}: a {type(data).__name__} can be read once. Pass a function that makes "
                "it, nc.shard(lambda: ...), or something that can be iterated again"
            )
        self._make = batch_maker(data, self._loader, self._batch_size)
        self._begun_once = False
        if mode == "file":
            self._what = stream.files, self._seed, shuffle is not False
            self._draw = lambda seed, epoch: epoch_order(stream.files, seed, epoch, shuffle is not False)
            return
        if shuffle:
            raise ValueError(
                "shard: shuffle=True: by stride the items of a stream come in its own order. Shuffle it before, with "
                "the same seed on every node (of Hugging Face: data.shuffle(seed=0, buffer_size=1000))"
            )
        self._what = 0, self._seed, False

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            "a shard is no dataset for a DataLoader: it gives this node's batches itself, so loop over "
            "nc.shard(data, batch_size=64); for workers or a collate_fn over nc.shard(DataLoader(data, ...))"
        )

    def __len__(self) -> int:
        if self._stream is not None:
            raise TypeError("a shard of a stream has no length: it ends with the stream")
        rank, world_size = _share()
        count = len(range(rank, self._what[0], world_size))
        if self._batch_size is not None:
            count = count // self._batch_size if self._full_only else -(-count // self._batch_size)
        return count * self._epochs

    def __iter__(self) -> Iterator[Any]:
        order = None if self._draw is None else self._order
        options = LoopOptions(self._what, order, self._by_speed, self._batch_size or 1, self._full_only, self._epochs)
        runtime = _following(self._what[0])
        if self._stream is not None:
            return self._iterate_stream(self._stream, options, runtime)
        loop: ShardLoop
        if runtime is not None:
            loop = FollowedLoop(options, self._counter, runtime.shares, lambda: _place(runtime), first=self._data_order)
        else:
            loop = AloneLoop(options, self._counter, _shares_of_cell(), _share)
        return loop.hand_out(self._batches(loop))

    def _order(self, epoch: int) -> "Indices":
        assert self._draw is not None
        return self._draw(self._seed, epoch)

    def _batches(self, loop: ShardLoop) -> Iterator[Any]:
        batches = loop.begin(self._begin(loop))
        if self._batch_size is None:
            yield from (self._source.item(int(batch[0])) for batch in batches)
        elif self._loader is not None:
            yield from loader_batches(self._loader, batches)
        else:
            yield from (self._source.batch(batch) for batch in batches)

    def _iterate_stream(
        self, stream: StreamSource, options: LoopOptions, runtime: "NodeRuntime | None"
    ) -> Iterator[Any]:
        shares: Shares = AloneShares(*_share()) if runtime is None else runtime.shares
        place: Callable[[], Place] = (lambda: Place(0, 0)) if runtime is None else (lambda: _place(runtime))
        listed = runtime is not None
        if options.what[0]:
            lanes = max(1, self._loader.num_workers) if self._loader is not None else 1
            files = FileLoop(
                options, self._counter, shares, place, listed, stream, lanes,
                lambda: loader_reads(self._loader, FileReader(stream, self._make, self._full_only)),
            )  # fmt: skip
            return files.hand_out(self._from_files(stream, files))
        loop = StrideLoop(options, self._counter, shares, place, listed)
        return loop.hand_out(self._by_stride(stream, loop))

    def _from_files(self, stream: StreamSource, loop: FileLoop) -> Iterator[Any]:
        self._once(stream)
        yield from loop.begin(self._begin(loop))

    def _by_stride(self, stream: StreamSource, loop: StrideLoop) -> Iterator[Any]:
        self._once(stream)
        yield from loop.read(self._begin(loop), loader_reads(self._loader, StrideReader(stream, self._make)))

    def _once(self, stream: StreamSource) -> None:
        if stream.once and self._begun_once:
            raise RuntimeError(
                "shard: this generator was read before, and can be read once. Pass a function that makes it, "
                "nc.shard(lambda: ...), or something that can be iterated again"
            )
        self._begun_once = True

    def _begin(self, loop: ShardLoop) -> LoopPosition | None:
        kept, self._kept = self._kept, None
        self._loop = loop
        return kept

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
            return LoopPosition(self._what, self._counter.next).data()
        return loop.position(in_hand).data()

    def go_on(self, position: Mapping[str, Any]) -> None:
        """Let the next loop over this shard begin where ``position`` was on this node: see docs/training.md, "Data".

        Call it on all nodes before any of them begins that loop. With the members of then the rest comes in the order
        in which it would have come; with others, nothing that any of them had is given out again.

        Raises:
            ValueError: it is no position, or one of other data.
        """
        self._kept = read_position(position, self._what)


def _place(runtime: "NodeRuntime") -> Place:
    info = runtime.cell_info()
    assert info is not None
    return Place(info.cell, info.generation, info.joined, tuple(sorted(runtime.shared_among())))


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
