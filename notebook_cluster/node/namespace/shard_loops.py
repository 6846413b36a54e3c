"""One pass of the user's loop over an ``nc.shard``: which batches of indices come, and which the loop has got."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from notebook_cluster.node.data.ledger import KeptEpoch, Ledger
from notebook_cluster.node.data.loop_registry import EpochCounter
from notebook_cluster.node.data.position import Fetched, LoopIdentity, LoopPosition, What, kept_epochs
from notebook_cluster.node.data.shares import Shares
from notebook_cluster.node.data.stream_readers import NOTHING
from notebook_cluster.node.namespace.api import this_node

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[Any]


@dataclass(frozen=True)
class Place:
    """Where a loop runs: ``cell`` began with the roster of ``generation``, or this node ``joined`` it; the data is
    divided ``among`` these nodes, all when empty."""

    cell: int
    generation: int
    joined: bool = False
    among: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoopOptions:
    """What a loop is over. ``by_speed``: parts in proportion to speed; ``full_only``: no batch that is not full;
    ``order``: the data's indices in the order of an epoch, None for a stream."""

    what: What
    order: "Callable[[int], Indices] | None"
    by_speed: bool
    size: int
    full_only: bool
    epochs: int


class ShardLoop:
    """Which of the batches that were fetched the loop has got: a DataLoader's workers fetch ahead.

    Implements :class:`notebook_cluster.node.data.position.ShardProgress`.

    Args:
        shares: None outside of a cluster's cells.
        kept: where it goes on.
    """

    def __init__(self, options: LoopOptions, counter: EpochCounter, shares: Shares | None) -> None:
        self.options, self.counter = options, counter
        self.shares = shares
        self.identity = LoopIdentity(*options.what, options.by_speed, -1)
        self.ahead: list[Any] = []
        """The batch that the loop has in hand, if it has one, and those that were fetched after it."""
        self.in_hand = 0
        self.trained = False
        self.at_next_batch: Callable[[], None] | None = None
        self.next_epoch = counter.next
        self.begun = 0
        self.ended = False
        self._left_at: int | None = None
        self._resuming: LoopPosition | None = None
        self._order: tuple[int, Indices] | None = None

    def begin(self, kept: LoopPosition | None) -> Iterator[Any]:
        """Batches of indices of the data; of a stream (epoch, positions)."""
        asks = left = False
        if self.shares is not None:
            self.identity = self.shares.next_loop(self, *self.options.what, self.options.by_speed)
            if kept is None:
                kept, left, asks = self.shares.kept(self.identity)
        if kept is not None:
            self._resuming = kept
            self.counter.after = kept.epoch - (kept.begun or 0)
            self.counter.next = self.next_epoch = kept.epoch
            self.begun = kept.begun or 0
            if self.shares is not None:
                self.shares.goes_on(self.identity, kept)
        self.counter.after += self.options.epochs
        return self._with_callbacks(self._batches(kept, left, asks))

    def _with_callbacks(self, batches: "Iterator[Indices]") -> "Iterator[Indices]":
        for batch in batches:
            if self.shares is not None and self.shares.before_batch is not None:
                self.shares.before_batch()
            yield batch

    def hand_out(self, produced: Iterator[Any]) -> Iterator[Any]:
        """``produced``, one for each of ``ahead``."""
        # A place that all nodes pass, by which nc.should_stop and nc.mean_metrics know which node is further on.
        runtime = this_node()
        place = runtime.decisions.enter_loop() if runtime is not None else None
        try:
            for batch in produced:
                if batch is NOTHING:
                    self.ahead = self.ahead[1:]
                    continue
                # No call between this line and the yield: Python runs signal handlers at calls, so a Stop finds the
                # batch either counted and in the loop, or neither.
                self.in_hand = 1
                yield batch
                rest = self.ahead[1:]
                self.ahead, self.in_hand = rest, 0
                if self.at_next_batch is not None:
                    callback, self.at_next_batch = self.at_next_batch, None
                    callback()
            self.ended = True
        finally:
            self._left_at = self.shares.activity if self.shares is not None else 0
            # Where it was is asked for until the next cell; the data need not stay for that.
            self.options, self._order = replace(self.options, order=None), None
            if place is not None:
                place.leave()

    @property
    def is_open(self) -> bool:
        return self._left_at is None

    @property
    def left(self) -> bool:
        at = self._left_at
        return not self.ended and at is not None and self.shares is not None and at < self.shares.activity

    def progress(self) -> tuple[int, float | None]:
        """See :class:`notebook_cluster.node.data.position.ShardProgress`."""
        return 0, None

    def position(self, in_hand: bool = True) -> LoopPosition:
        """See :meth:`notebook_cluster.node.namespace.shard.Shard.position`."""
        return self._resuming if self._resuming is not None else self._position(in_hand)

    def _position(self, in_hand: bool) -> LoopPosition:
        raise NotImplementedError

    def _batches(self, kept: LoopPosition | None, left: bool, asks: bool) -> Iterator[Any]:
        raise NotImplementedError

    def _request(self, epoch: int, positions: "Indices") -> Any:
        if self.options.order is None:
            return epoch, positions.tolist()
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.options.order(epoch)
        return self._order[1][positions]

    def _not_got(self, in_hand: bool) -> list[Any]:
        ahead, held = self.ahead, self.in_hand
        return ahead[held if in_hand else 0 :]


class AloneLoop(ShardLoop):
    """Where nobody follows who took what: in a cell that is replayed, outside of cells, over very large data."""

    def __init__(
        self, options: LoopOptions, counter: EpochCounter, shares: Shares | None, share: Callable[[], tuple[int, int]]
    ) -> None:
        super().__init__(options, counter, shares)
        self._share = share
        self._at = (0, 1, 0)

    def progress(self) -> tuple[int, float | None]:
        rank, world_size, at = self._at
        part = len(range(rank, self.options.what[0], world_size))
        return self.next_epoch, min(1.0, at / part) if part else 1.0

    def _position(self, in_hand: bool) -> LoopPosition:
        what = self.options.what
        ahead = self._not_got(in_hand)
        if ahead:
            epoch, begun, at = ahead[0]
            return LoopPosition(what, epoch + 1, begun, alone=at)
        return LoopPosition(what, self.next_epoch, self.begun, alone=self._at)

    def _batches(self, kept: LoopPosition | None, left: bool, asks: bool) -> "Iterator[Indices]":
        if left:
            return
        if kept is not None and kept.alone is not None:
            self._at = kept.alone
        self._resuming = None
        if kept is not None and kept.alone is not None and self.begun:
            yield from self._epoch(self.next_epoch - 1, kept.alone)
        while self.begun < self.options.epochs:
            epoch = self.counter.next
            at = (*self._share(), 0)
            self.counter.next, self.next_epoch, self.begun, self._at = epoch + 1, epoch + 1, self.begun + 1, at
            yield from self._epoch(epoch, at)

    def _epoch(self, epoch: int, at: tuple[int, int, int]) -> "Iterator[Indices]":
        import numpy

        options = self.options
        rank, world_size, start = at
        if start and self._share() != (rank, world_size):
            raise RuntimeError(
                f"shard: part {rank} of {world_size} cannot be gone on with as part {self._share()[0]} of "
                f"{self._share()[1]} here, where nobody follows who took what: begin the epoch anew, without go_on"
            )
        positions = numpy.arange(options.what[0])[rank::world_size]
        stop = len(positions) - len(positions) % options.size if options.full_only else len(positions)
        for begin in range(start, stop, options.size):
            if self.shares is not None:
                self.shares.activity += 1
            self.ahead.append((epoch, self.begun, (rank, world_size, begin)))
            self._at = rank, world_size, begin + options.size
            yield self._request(epoch, positions[begin : begin + options.size])


class FollowedLoop(ShardLoop):
    """Out of the ledgers that all nodes keep of each epoch. Those before the newest stay until nothing of them can come
    back.

    Args:
        place: of the cell that runs, see :class:`Place`.
        listed: the shares list this loop.
        first: what must be the same on all nodes: a hash of the files' names, or what
            :func:`notebook_cluster.node.data.source.order_of` says of the data.
    """

    def __init__(
        self,
        options: LoopOptions,
        counter: EpochCounter,
        shares: Shares,
        place: Callable[[], Place],
        listed: bool = True,
        first: str = "",
    ) -> None:
        super().__init__(options, counter, shares if listed else None)
        self._first = first
        self._shares, self._place = shares, place
        self._ledgers: list[Ledger] = []

    def progress(self) -> tuple[int, float | None]:
        ledgers = self._ledgers
        if not ledgers:
            return 0, None
        epoch, part = ledgers[-1].key.epoch + 1, ledgers[-1].part
        if not self.options.what[0] or part is None:
            return epoch, None
        return epoch, min(1.0, part.at / len(part.positions)) if len(part.positions) else 1.0

    def _position(self, in_hand: bool) -> LoopPosition:
        coming = self._not_got(in_hand)
        with self._shares.changed:
            epochs = kept_epochs(self._ledgers, self.ahead)
        ahead = tuple((batch.ledger.key.epoch, tuple(batch.positions.tolist())) for batch in coming)
        return LoopPosition(self.options.what, self.next_epoch, self.begun, epochs, ahead)

    def _batches(self, kept: LoopPosition | None, left: bool, asks: bool) -> "Iterator[Indices]":
        try:
            if kept is not None:
                yield from self._again(kept, left)
                if left:
                    return
                yield from self._taken()
            while self.begun < self.options.epochs:
                epoch = self.counter.next
                ledger = self._ledger(epoch, None, asks)
                before = self._ledgers[:-1]
                # The newest stays in any case: the others may have been told more than they will have done.
                ledgers = [old for old in before if not old.all_taken()] + self._ledgers[-1:] + [ledger]
                begun, after = self.begun + 1, epoch + 1
                self.counter.next, self.next_epoch, self.begun, self._ledgers = after, after, begun, ledgers
                yield from self._taken()
            while not self._shares.close(self._ledgers):
                yield from self._taken()
        finally:
            self._shares.abandon(self._ledgers)

    def _ledger(self, epoch: int, kept: KeptEpoch | None, asks: bool = False) -> Ledger:
        from notebook_cluster.protocol.mesh import ShardKey

        place = self._place()
        count, seed, shuffle = self.options.what
        by_speed = self.options.by_speed
        key = ShardKey(
            cell=place.cell, loop=self.identity.number, epoch=epoch, count=count, seed=seed, shuffle=shuffle,
            by_speed=by_speed, among=place.among,
        )  # fmt: skip
        alike_from = None if place.joined or by_speed else place.generation
        ledger = self._shares.begin(key, alike_from, kept=kept, asks=asks)
        if self._first:
            self._shares.seen_of_stream(ledger, -1, self._first)
        return ledger

    def _again(self, kept: LoopPosition, left: bool) -> "Iterator[Indices]":
        """Take up the ledgers of ``kept``. What was fetched and not got then comes first; it counts as taken there."""
        import numpy

        ledgers = [self._ledger(one.epoch, one) for one in kept.epochs]
        of_epoch = {ledger.key.epoch: ledger for ledger in ledgers}
        ahead = [
            Fetched(of_epoch[epoch], None, 0, numpy.array(positions, numpy.int64)) for epoch, positions in kept.ahead
        ]
        self._ledgers, self.ahead, self._resuming = ledgers, ahead, None
        if not left:
            for batch in list(ahead):
                yield self._request(batch.ledger.key.epoch, batch.positions)

    def _taken(self) -> "Iterator[Indices]":
        """Until this node's parts are empty, those of earlier epochs first."""
        while True:
            for ledger in self._ledgers:
                if not ledger.read_through():
                    size = self.options.size
                    positions = self._shares.take(ledger, size, self.options.full_only, self._fetched)
                    if positions is not None:
                        begun = time.monotonic()
                        yield self._request(ledger.key.epoch, positions)
                        self._shares.speed.add(len(positions), time.monotonic() - begun)
                        break
            else:
                return

    def _fetched(self, batch: Fetched) -> None:
        self.ahead.append(batch)
