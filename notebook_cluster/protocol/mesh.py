"""Node <-> node: what stands in front of each payload on the mesh, and the payload by which nodes agree who takes which
part of the data. Only numbers travel here, never code.

Every mesh message is two frames: ``[encoded CellFrame or JobFrame, payload bytes]``. The sender is known from the
connection (ZAP User-Id over TCP, the 0700 folder over ipc), not from the header.
"""

from typing import Literal

from notebook_cluster.protocol.wire import Message


class CellFrame(Message, frozen=True):
    """A piece of one cell collective (``nc.all_reduce`` ...) or of ``send``/``recv``."""

    cell: int
    generation: int
    operation: int
    """Counts the collectives of this cell on the sender; for ``send``/``recv`` the messages from it to the receiver."""
    name: str
    """``all_reduce``, ``broadcast``, ``send`` ...: two nodes in different operations get an error that names both."""
    offset: int = 0
    total: int = 0
    """Bytes of the whole payload of this operation from this sender."""
    dtype: str = ""
    shape: list[int] = []
    kind: str = ""
    """``numpy``, ``torch``, ``mlx`` or ``json`` (plain data). Of who asks for what is missing: of which channel, and
    ``dtype`` then says in which operation."""
    phase: int = 0


class JobFrame(Message, frozen=True):
    """A piece of a training round, of a state transfer, a request for one, or (``shard``) a piece of a
    message of :data:`ShardBody`."""

    job: str
    incarnation: int
    kind: Literal["contribution", "mean", "want", "sent", "state_request", "state", "part", "shard"]
    """``want`` asks again for what is missing of a slice; ``sent`` answers that all of that was sent before it."""
    fragment: int = 0
    round: int = 0
    attempt: int = 0
    slice: int = 0
    offset: int = 0
    """Byte offset of the payload within the slice (contribution, mean), the state (state) or the part."""
    total: int = 0
    """Bytes of the whole slice, state or part."""
    name: str = ""
    """state: which array (``theta``, ``momentum``, ``optimizer``); want, sent: ``contribution`` or ``mean``, sent also
    ``state``; state_request: the array of ``state_hash`` from whose ``offset`` on it is missing."""
    ticket: int = 0
    """part: which one is meant. sent: how often the slice or a state was sent to this node; want, state_request: the
    highest such number that has come back from it."""
    state_hash: str = ""


class ProbeFrame(Message, frozen=True):
    """For the doctor: answered by the receiver's I/O thread with a ProbeFrame of the same ticket and no payload."""

    ticket: int
    number: int
    answer: bool = False


class LentFrame(Message, frozen=True):
    """In place of the frame with ``header`` and a payload beside it, to a node of the same peer: where the payload is,
    in a file of the sender's, who writes nothing there until the receiver has said that it is done with it."""

    header: JobFrame
    ticket: int
    number: int
    """Tells the files of the sender apart."""
    size: int
    """Of the whole file."""
    start: int
    stop: int


class ReturnedFrame(Message, frozen=True):
    """Nobody on the sender's side reads any more what was lent with ``tickets``."""

    incarnation: int
    """Of the receiver, who lent it."""
    tickets: list[int]
    refused: str = ""
    """Why it could not be read at all: then nothing more is to be lent to the sender."""


MeshHeader = CellFrame | JobFrame | ProbeFrame | LentFrame | ReturnedFrame


SHARD_JOB = ":shard"
"""No name of a training job: those have no colon."""


class ShardKey(Message, frozen=True):
    """One epoch of one ``nc.shard`` loop, the same on all nodes that run the cell."""

    cell: int
    loop: int
    """Counts the loops over such data in this cell."""
    epoch: int
    count: int
    """Elements; 0: a stream."""
    seed: int
    shuffle: bool
    by_speed: bool
    among: tuple[str, ...] = ()
    """The nodes of a cell that runs on some only; empty: all of the roster."""


class ShardTaken(Message, frozen=True):
    """These positions of the epoch's order have been given to the sender's loop."""

    key: ShardKey
    positions: bytes
    """Of each what it is more than ``base``: 4 bytes, little endian."""
    base: int = 0
    alike: int = -1
    """The sender's first parts needed no exchange: those of this generation. -1: they did."""
    end: int = -1
    """How many items the stream turned out to have; -1: the sender has not come to its end."""
    first: str = ""
    """Hash of the stream's first item."""


class ShardState(Message, frozen=True):
    """All that the sender knows to be taken. It takes no more before it has the states of all in ``generation``."""

    key: ShardKey
    generation: int
    taken: bytes
    """zlib of 8 bytes, little endian, below which all is taken, and one bit for each position from there on, the lowest
    bit of a byte first."""
    open: bool
    """Its loop has not ended, so it can be given a part."""
    speed: float = 0.0
    """Samples per second; 0: not known yet."""
    end: int = -1
    first: str = ""
    """As in :class:`ShardTaken`."""
    want: bool = False
    """The receiver's state did not come: send it again."""
    goes_on: bool = False
    """The sender's loop goes on from a position that was kept: who has not come to this loop yet answers when it has,
    since it may have a position too."""
    since: int = -1
    """Generation with which the sender began or joined the cell: who came later has no position. -1: it did neither."""
    cut: str = ""
    """Hash of the division in which that position is; empty: the sender has none."""
    receivers: tuple[str, ...] = ()
    """Who got parts in that division."""
    own: bytes = b""
    """As ``taken``: what was taken before that division, and what the sender itself has given out of its part."""


ShardBody = ShardTaken | ShardState
