"""Where a loop over ``nc.shard`` is, as plain data that is kept and read again."""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from notebook_cluster.node.data.dealing import Cut
from notebook_cluster.node.data.ledger import KeptEpoch, Ledger, ShardPart
from notebook_cluster.node.data.taken import Taken, unpacked
from notebook_cluster.protocol.mesh import ShardKey

if TYPE_CHECKING:
    from notebook_cluster.node.data.ledger import Positions

_KIND = "position of nc.shard 1"


What = tuple[int, int, bool]
"""Count, seed and shuffle of data that is divided."""


class LoopIdentity(NamedTuple):
    """Which loop of a cell: the ``number``-th over data like this."""

    elements: int
    seed: int
    shuffle: bool
    by_speed: bool
    number: int


def identity_of(key: ShardKey) -> LoopIdentity:
    return LoopIdentity(key.count, key.seed, key.shuffle, key.by_speed, key.loop)


class ShardProgress(Protocol):
    """A loop of the running cell, for what keeps its position.

    Attributes:
        left: the cell's code left it before its end, and went on with another loop.
        in_hand: 1 while the loop has a batch and has not asked for the next.
        trained: a step of a sync object was made with one of its batches.
        begun: epochs that it has begun.
        is_open: its code has not left it.
        at_next_batch: called once, when it is asked for the next batch or is over.
    """

    in_hand: int
    trained: bool
    begun: int
    at_next_batch: Callable[[], None] | None

    @property
    def is_open(self) -> bool: ...

    @property
    def identity(self) -> LoopIdentity: ...

    @property
    def left(self) -> bool: ...

    def progress(self) -> tuple[int, float | None]:
        """Its epoch, from 1 (0: it has begun none), and how much of this node's part of it was given out, 0 to 1;
        None: that has no length. On any thread."""

    def position(self, in_hand: bool = True) -> "LoopPosition":
        """``in_hand``: False counts the newest batch as one that the loop has not got."""


@dataclass(frozen=True, eq=False)
class Fetched:
    """A batch that was taken of ``part``, whose next position is ``end`` then."""

    ledger: Ledger
    part: ShardPart | None
    end: int
    positions: "Positions"


@dataclass(frozen=True)
class LoopPosition:
    """Where a loop is.

    Attributes:
        what: count, seed and shuffle of its data.
        epoch: the next that it begins.
        begun: how many epochs it has begun; None: no loop goes on, the next one begins anew at ``epoch``.
        epochs: those that it has begun and of which something may come.
        ahead: (epoch, positions) of batches that were taken and that the loop has not got.
        files: (lane, epoch, file, items that the loop has got) of those that are read, and the lane whose turn is next.
        alone: (rank, world_size, batches) in the newest epoch, where nobody follows who took what.
    """

    what: What
    epoch: int
    begun: int | None = None
    epochs: tuple[KeptEpoch, ...] = ()
    ahead: tuple[tuple[int, tuple[int, ...]], ...] = ()
    files: tuple[tuple[int, int, int, int], ...] = ()
    turn: int = 0
    alone: tuple[int, int, int] | None = None

    def kept(self, epoch: int) -> KeptEpoch | None:
        """Where it is in that epoch; None: nothing of it may come."""
        return next((kept for kept in self.epochs if kept.epoch == epoch), None)

    def data(self) -> dict[str, Any]:
        """Plain data that JSON can hold; :func:`read_position` reads it."""
        return {
            "kind": _KIND, "what": list(self.what), "epoch": self.epoch, "begun": self.begun,
            "epochs": [_epoch_data(kept) for kept in self.epochs],
            "ahead": [[epoch, list(positions)] for epoch, positions in self.ahead],
            "files": [list(file) for file in self.files], "turn": self.turn,
            "alone": None if self.alone is None else list(self.alone),
        }  # fmt: skip


def read_position(data: Any, what: What) -> LoopPosition:
    """The position in ``data``, of a loop over ``what``.

    Raises:
        ValueError: it is none, or one of other data.
    """
    if not isinstance(data, Mapping) or data.get("kind") != _KIND:
        raise ValueError(f"shard: go_on takes what position() returned, not {str(data)[:80]!r}")
    try:
        position = LoopPosition(
            what=(int(data["what"][0]), int(data["what"][1]), bool(data["what"][2])),
            epoch=int(data["epoch"]),
            begun=None if data["begun"] is None else int(data["begun"]),
            epochs=tuple(_kept_epoch(kept, what[0]) for kept in data["epochs"]) if tuple(data["what"]) == what else (),
            ahead=tuple((int(epoch), tuple(map(int, positions))) for epoch, positions in data["ahead"]),
            files=tuple((int(lane), int(epoch), int(file), int(at)) for lane, epoch, file, at in data["files"]),
            turn=int(data["turn"]),
            alone=None if data["alone"] is None else (*map(int, data["alone"]),),  # type: ignore[arg-type]
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"shard: this position cannot be read ({error}): was it changed?") from None
    for name, theirs, ours in zip(("count", "seed", "shuffle"), position.what, what, strict=True):
        if theirs != ours:
            raise ValueError(
                f"shard: this position is of data with {name}={theirs}, here {name}={ours}: go on with that"
            )
    return position


def kept_epochs(ledgers: list[Ledger], ahead: list[Fetched]) -> tuple[KeptEpoch, ...]:
    """Where ``ledgers`` are, with what was fetched ahead counted as taken."""
    epochs = []
    for ledger in ledgers:
        kept = ledger.keep()
        at, taken = kept.at, kept.taken.copy()
        for batch in ahead:
            if batch.ledger is ledger:
                taken.mark(batch.positions.tolist())
                if batch.part is ledger.part and batch.part is not None and batch.part.cut is kept.cut:
                    at = max(at, batch.end)
        epochs.append(KeptEpoch(kept.epoch, taken, kept.cut, at))
    return tuple(epochs)


def _epoch_data(kept: KeptEpoch) -> dict[str, Any]:
    cut = kept.cut
    return {
        "epoch": kept.epoch,
        "taken": _text(kept.taken),
        "cut": None if cut is None else {"taken": _text(cut.taken), "receivers": [list(one) for one in cut.receivers]},
        "at": kept.at,
    }


def _kept_epoch(data: Any, count: int) -> KeptEpoch:
    cut = data["cut"]
    if cut is not None:
        receivers = tuple((str(name), float(speed)) for name, speed in cut["receivers"])
        cut = Cut(_taken(cut["taken"], count), receivers)
    return KeptEpoch(int(data["epoch"]), _taken(data["taken"], count), cut, max(int(data["at"]), 0))


def _text(taken: Taken) -> str:
    return base64.b64encode(taken.packed()).decode()


def _taken(text: str, count: int) -> Taken:
    return unpacked(base64.b64decode(text), count)
