"""Loops over streams: by stride, where each node reads all and keeps its own items, and by file."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_cluster.node.data.dealing import Cut, part_of
from notebook_cluster.node.data.ledger import KeptEpoch, Ledger, ShardPart
from notebook_cluster.node.data.loop_registry import EpochCounter
from notebook_cluster.node.data.position import Fetched, LoopPosition, kept_epochs
from notebook_cluster.node.data.shares import Shares
from notebook_cluster.node.data.stream_readers import NOTHING, FileRead, FileRequest, StrideRead
from notebook_cluster.node.data.streams import StreamSource, hash_of_item
from notebook_cluster.node.namespace.shard_loops import FollowedLoop, LoopOptions, Place

if TYPE_CHECKING:
    from notebook_cluster.protocol.mesh import ShardKey

Reads = Callable[[Iterator[Any]], Iterator[Any]]
"""Answers to requests, in their order: of a reader here, or of one in a DataLoader's worker."""


class AloneShares(Shares):
    """Parts of streams where nobody follows who took what: in a cell that is replayed, outside of cells."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(
            str(rank), 0, send=lambda name, header, data: None, call_soon=lambda callback: None, speed=lambda: 0.0
        )
        self._among = tuple(str(index) for index in range(world_size))

    def begin(
        self, key: "ShardKey", alike_from: int | None, *, kept: KeptEpoch | None = None, asks: bool = False
    ) -> Ledger:
        ledger = Ledger.empty(key, self._name)
        ledger.start_alike(0, self._among)
        if kept is not None and kept.cut is not None:
            if tuple(name for name, _ in kept.cut.receivers) != self._among:
                among = ", ".join(name for name, _ in kept.cut.receivers)
                raise RuntimeError(
                    f"shard: a position among {among} cannot be gone on with by node {self._name} of "
                    f"{len(self._among)} outside of the cluster's cells"
                )
            ledger.cut, ledger.taken = kept.cut, kept.taken.copy()
            ledger.part = ShardPart(kept.cut, part_of(kept.cut, key, self._name), kept.at)
        return ledger


class StrideLoop(FollowedLoop):
    """Every node reads the stream and keeps the items at the positions that are its own."""

    def read(self, kept: LoopPosition | None, reads: Reads) -> Iterator[Any]:
        """What ``hand_out`` takes."""
        answer: StrideRead
        for answer in reads(self.begin(kept)):
            batch: Fetched = self.ahead[0]
            if answer.first != batch.ledger.first or answer.end > batch.ledger.end:
                self._shares.seen_of_stream(batch.ledger, answer.end, answer.first)
            if answer.behind:
                print(
                    f"shard: {len(answer.behind)} items from {answer.behind[0]} on that another node left are not "
                    "given out: this stream can be read once, and is past them. Pass a function that opens it",
                    file=sys.stderr,
                )
            full = answer.count == self.options.size or not self.options.full_only
            yield answer.batch[0] if answer.batch and full else NOTHING


@dataclass(eq=False)
class OpenFile:
    """File ``number``, at ``position`` of its epoch, which ``lane`` of this node took; it turned out to have ``total``
    items (-1: its end was not seen)."""

    ledger: Ledger
    position: int
    number: int
    lane: int
    total: int = -1

    @property
    def epoch(self) -> int:
        return self.ledger.key.epoch


@dataclass(frozen=True)
class FileBatch:
    """A batch that ``lane`` made, with so many items of each file."""

    lane: int
    items: dict[OpenFile, int]


class FileLoop(FollowedLoop):
    """Every node reads files of its own, one after the other in each lane; a lane is a worker, or this process.

    Args:
        reads: makes what answers the requests of one lane.
    """

    def __init__(
        self, options: LoopOptions, counter: EpochCounter, shares: Shares, place: Callable[[], Place], listed: bool,
        source: StreamSource, lanes: int, reads: Callable[[], Reads],
    ) -> None:  # fmt: skip
        names = hash_of_item(list(source.names)) if source.names else ""
        super().__init__(options, counter, shares, place, listed, names)
        self._source, self._lanes, self._reads = source, lanes, reads
        self._files: list[OpenFile] = []
        """Those that this node took, and of which something may come."""
        self._waiting: list[OpenFile] = []
        """Those of a kept position that no lane reads yet."""
        self._read: dict[OpenFile, int] = {}
        """How many items of each are in the batches that were made."""
        self._turn = 0
        self._last: list[Fetched] = []
        self._cuts: dict[int, Cut] = {}

    def _position(self, in_hand: bool) -> LoopPosition:
        coming: list[FileBatch] = self._not_got(in_hand)
        files = []
        for file in self._files:
            got = self._read.get(file, 0) - sum(batch.items.get(file, 0) for batch in coming)
            files.append((file.lane, file.epoch, file.position, got))
        with self._shares.changed:
            epochs = kept_epochs(self._ledgers, self._last)
        turn = coming[0].lane if coming else self._turn
        return LoopPosition(self.options.what, self.next_epoch, self.begun, epochs, files=tuple(files), turn=turn)

    def _again(self, kept: LoopPosition, left: bool) -> Iterator[Any]:
        ledgers = [self._ledger(one.epoch, one) for one in kept.epochs]
        of_epoch = {ledger.key.epoch: ledger for ledger in ledgers}
        files = [self._file(of_epoch[epoch], at, lane % self._lanes) for lane, epoch, at, _ in kept.files]
        read = {file: got for file, (*_, got) in zip(files, kept.files, strict=True)}
        self._ledgers, self._files, self._waiting, self._read = ledgers, files, list(files), read
        self._turn, self._resuming = kept.turn % self._lanes, None
        return iter(())

    def _taken(self) -> Iterator[Any]:
        lanes = {lane: self._reads()(self._requests(lane)) for lane in range(self._lanes)}
        while lanes:
            lane = min(lanes, key=lambda number: (number - self._turn) % self._lanes)
            answer = next(lanes[lane], None)
            if answer is None:
                del lanes[lane]
            elif self._comes(lane, answer):
                begun = time.monotonic()
                yield answer.batch[0]
                self._shares.speed.add(sum(items for *_, items in answer.segments), time.monotonic() - begun)

    def _comes(self, lane: int, answer: FileRead) -> bool:
        """Take note of an answer; False when no batch is in it."""
        which = {(file.epoch, file.number): file for file in self._files}
        asked = which.get((answer.request.epoch, answer.request.file))
        if asked is not None and answer.total >= 0:
            asked.total = answer.total
        ended = {file for file in self._files if file.total >= 0 and self._read.get(file, 0) >= file.total}
        if answer.request.file < 0 and not answer.batch:  # what was left over of this lane is left out
            ended |= {file for file in self._files if file.lane == lane and file.total >= 0}
        held = {file for batch in self._not_got(True) for file in batch.items}
        files = [file for file in self._files if file not in ended or file in held]
        if not answer.batch:
            self._files = files
            return False
        items = {which[epoch, number]: count for epoch, number, count in answer.segments}
        read = {file: self._read.get(file, 0) + items.get(file, 0) for file in {*files, *items}}
        ahead = [*self.ahead, FileBatch(lane, items)]
        self._files, self._read, self.ahead, self._turn = files, read, ahead, (lane + 1) % self._lanes
        return True

    def _requests(self, lane: int) -> Iterator[FileRequest]:
        """What this lane asks for, until no file is left for it. A worker is asked ahead: it answers with nothing what
        was asked of a file that had come to its end."""
        size = self.options.size
        while (file := self._next_file(lane)) is not None:
            skip = self._read.get(file, 0)
            while file.total < 0:
                yield FileRequest(size, file.epoch, file.number, skip)
        yield FileRequest(size)

    def _next_file(self, lane: int) -> OpenFile | None:
        for file in self._waiting:
            if file.lane == lane:
                self._waiting.remove(file)
                return file
        for ledger in self._ledgers:
            if not ledger.read_through():
                taken = self._shares.take(ledger, 1, False, lambda fetched: self._take_up(fetched, lane))
                self._name_lost(ledger)
                if taken is not None:
                    return self._files[-1]
        return None

    def _take_up(self, fetched: Fetched, lane: int) -> None:
        file = self._file(fetched.ledger, int(fetched.positions[0]), lane)
        self._files, self._last = [*self._files, file], [fetched]

    def _file(self, ledger: Ledger, position: int, lane: int) -> OpenFile:
        import numpy

        number = int(self._request(ledger.key.epoch, numpy.array([position]))[0])
        return OpenFile(ledger, position, number, lane)

    def _name_lost(self, ledger: Ledger) -> None:
        """Say once, on one node, which file a lost node had open: it is not given out again."""
        epoch, cut = ledger.key.epoch, ledger.cut
        before = self._cuts.get(epoch)
        if cut is None or cut is before:
            return
        self._cuts[epoch] = cut
        if before is None or ledger.members[0] != ledger.name:
            return
        for name in [name for name, _ in before.receivers if name not in ledger.members]:
            positions = part_of(before, ledger.key, name)
            had = [at for at in positions[: len(positions)].tolist() if at in cut.taken]
            if had:
                what = self._source.name(self._file(ledger, had[-1], 0).number)
                print(
                    f"shard: {name} was lost with {what} open, or just read through: what it had not given out of it "
                    "is not given out in this epoch",
                    file=sys.stderr,
                )
