"""Node <-> node: who has taken which part of the data. The payload of mesh frames of job ``SHARD_JOB``."""

from notebook_cluster.protocol.wire import Message

SHARD_JOB = ":shard"
"""No name of a training job: those have no colon."""


class ShardKey(Message, frozen=True):
    """One epoch of one ``nc.shard`` loop, the same on all nodes that run the cell."""

    cell: int
    loop: int
    """Counts the loops over such data in this cell."""
    epoch: int
    count: int
    seed: int
    shuffle: bool
    by_speed: bool
    among: tuple[str, ...] = ()
    """The nodes of a cell that runs on some only; empty: all of the roster."""


class ShardTaken(Message, frozen=True):
    """These positions of the epoch's order have been given to the sender's loop: 4 bytes each, little endian."""

    key: ShardKey
    positions: bytes
    alike: int = -1
    """The sender's first parts needed no exchange: those of this generation. -1: they did."""


class ShardState(Message, frozen=True):
    """All that the sender knows to be taken. It takes no more before it has the states of all in ``generation``."""

    key: ShardKey
    generation: int
    taken: bytes
    """One bit for each position, the lowest bit of a byte first; zlib."""
    open: bool
    """Its loop has not ended, so it can be given a part."""
    speed: float = 0.0
    """Samples per second; 0: not known yet."""
    want: bool = False
    """The receiver's state did not come: send it again."""


ShardBody = ShardTaken | ShardState
