"""Reading items of streams, in this process or in a DataLoader's worker."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

from notebook_cluster.node.data.streams import StreamSource, hash_of_item

NOTHING = object()
"""In place of a batch: none came of this request."""


@dataclass(frozen=True)
class BatchMaker:
    """What makes a batch of items; ``single``: of one item alone."""

    collate: Callable[[Any], Any] | None
    single: bool

    def __call__(self, items: list[Any]) -> Any:
        if self.single:
            return items[0] if self.collate is None else self.collate(items[0])
        return items if self.collate is None else self.collate(items)


def columns(items: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows of Hugging Face as it gives several of them."""
    return {name: [item[name] for item in items] for name in items[0]}


@dataclass(frozen=True)
class StrideRead:
    """Answer to (epoch, positions).

    Attributes:
        batch: in a tuple; empty when none of the items exist.
        count: items in it.
        end: how many items the stream has; -1: not seen yet.
        first: hash of its first item.
        behind: positions that a stream that can be opened once has passed.
    """

    batch: tuple[Any, ...]
    count: int
    end: int
    first: str
    behind: tuple[int, ...] = ()


class StrideReader:
    """Items of a stream by their number, which go up; for a lower one it is opened again.

    It reads over what lies between: as quickly as the stream gives items.
    """

    def __init__(self, source: StreamSource, make: BatchMaker) -> None:
        self._source, self._make = source, make
        self._epoch = -1
        self._at, self._end, self._first = 0, -1, ""
        self._items: Iterator[tuple[Any, int]] = iter(())
        self._number = count()
        self._opened = False

    def __getitem__(self, request: tuple[int, list[int]]) -> StrideRead:
        epoch, positions = request
        behind: tuple[int, ...] = ()
        if epoch != self._epoch or positions[0] < self._at:
            if self._source.once and self._opened:
                behind = tuple(position for position in positions if position < self._at)
                positions = positions[len(behind) :]
            else:
                self._open(epoch)
        items = []
        for position in positions:
            found = next(islice(self._items, position - self._at, None), None)
            if found is None:
                self._end = self._at = next(self._number)
                self._items = iter(())
                self._number = count(self._end)
                break
            self._at = position + 1
            items.append(found[0])
        batch = (self._make(items),) if items else ()
        return StrideRead(batch, len(items), self._end, self._first, behind)

    def _open(self, epoch: int) -> None:
        self._opened = True
        self._number = count()
        items = iter(self._source.whole(epoch))
        if epoch != self._epoch:
            self._end, self._first = -1, ""
        self._epoch, self._at = epoch, 0
        first = list(islice(items, 1))
        self._first = hash_of_item(first[0]) if first else ""
        # zip asks the stream before the number: at the end the next number is how many items there were.
        self._items = zip(chain(first, items), self._number, strict=False)


@dataclass(frozen=True)
class FileRequest:
    """The next batch of a lane, out of this file from its ``skip``-th item on; file -1: what is left over."""

    size: int
    epoch: int = 0
    file: int = -1
    skip: int = 0


@dataclass(frozen=True)
class FileRead:
    """Answer to a FileRequest.

    Attributes:
        batch: in a tuple; empty: the file had not enough items left, and what it had waits for those of the next.
        segments: (epoch, file, items) in the batch.
        request: the answered one.
        total: items of the file, when it has come to its end; -1: it has not.
    """

    batch: tuple[Any, ...]
    segments: tuple[tuple[int, int, int], ...]
    request: FileRequest
    total: int = -1


class FileReader:
    """Batches out of one file after the other; a batch may begin in one and end in the next."""

    def __init__(self, source: StreamSource, make: BatchMaker, full_only: bool) -> None:
        self._source, self._make, self._full_only = source, make, full_only
        self._file: tuple[int, int] | None = None
        self._items: Iterator[Any] = iter(())
        self._read = 0
        self._held: list[tuple[tuple[int, int], Any]] = []

    def __getitem__(self, request: FileRequest) -> FileRead:
        if request.file < 0:
            held = [] if self._full_only else self._held
            self._held = []
            return self._answer(held, request, -1)
        if self._file != (request.epoch, request.file):
            assert self._source.one is not None
            self._file = request.epoch, request.file
            self._items = iter(self._source.one(*self._file))
            self._read = sum(1 for _ in islice(self._items, request.skip))
        for item in islice(self._items, request.size - len(self._held)):
            self._read += 1
            self._held.append((self._file, item))
        if len(self._held) < request.size:
            return self._answer([], request, self._read)
        held, self._held = self._held, []
        return self._answer(held, request, -1)

    def _answer(self, held: list[tuple[tuple[int, int], Any]], request: FileRequest, total: int) -> FileRead:
        counts: dict[tuple[int, int], int] = {}
        for file, _ in held:
            counts[file] = counts.get(file, 0) + 1
        segments = tuple((*file, number) for file, number in counts.items())
        batch = (self._make([item for _, item in held]),) if held else ()
        return FileRead(batch, segments, request, total)
