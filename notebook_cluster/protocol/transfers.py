"""Values and files between the notebook and the nodes: small requests, each answered, so that whoever asks sets the
pace and nobody holds more than a few chunks.

Values: view -> coordinator -> the node's runtime. Files: view -> coordinator -> the agent of the node's peer.
"""

from notebook_cluster.protocol.wire import Message

CHUNK_BYTES = 256 * 1024
"""Of a value or a file in one message."""
CHUNKS_AT_ONCE = 8
"""Chunks that may be on their way to or from one node."""
MOST_VALUE_BYTES = 1 << 30
"""Of one value: sender and receiver hold it a second time while it travels."""
MOST_FILES = 20_000
"""In one offer."""
LEFT_OUT = frozenset((".git", "__pycache__", ".ipynb_checkpoints"))
"""Folders that do not travel with what is around them."""

# ---- values: view <-> coordinator ------------------------------------------------------------------------------------


class ReadValue(Message, frozen=True):
    """Bytes of a value that a cell on ``node`` has laid out under ``ticket``. Reply value: ValuePart."""

    node: str
    ticket: str
    name: str
    offset: int = 0
    size: int = 0
    """0: the header only."""


class WriteValue(Message, frozen=True):
    """Bytes of a value for ``nodes``, in order; a cell takes it from there. Reply value: node -> why it does not take
    them, empty when it does."""

    nodes: list[str]
    ticket: str
    total: int
    offset: int
    data: bytes


class ForgetValue(Message, frozen=True):
    """What lies on ``nodes`` under ``ticket`` is not needed any more. Reply value: None."""

    nodes: list[str]
    ticket: str


# ---- values: coordinator <-> node runtime ----------------------------------------------------------------------------


class ReadPart(Message, frozen=True):
    """Coordinator: as ReadValue. Answered by ValuePart with the same ``request``."""

    request: int
    ticket: str
    name: str
    offset: int = 0
    size: int = 0


class ValuePart(Message, frozen=True):
    """Node. The header fields come with ``size`` 0 only. ``error``: why the value cannot be sent."""

    request: int
    data: bytes = b""
    meta: bytes = b""
    """JSON, see :mod:`notebook_cluster.values.encoding`."""
    sizes: list[int] = []
    """Bytes of each of the value's buffers, which follow each other."""
    digest: bytes = b""
    """blake2b of all of them, 16 bytes."""
    missing: bool = False
    """There is no variable of this name."""
    near: str = ""
    """A variable with a similar name."""
    error: str = ""


class WritePart(Message, frozen=True):
    """Coordinator: as WriteValue. Answered by PartWritten with the same ``request``."""

    request: int
    ticket: str
    total: int
    offset: int
    data: bytes


class PartWritten(Message, frozen=True):
    """Agent: the answer to WritePart ``request``; ``error`` is empty when it is on disk."""

    request: int
    error: str = ""


class ForgetTicket(Message, frozen=True):
    """Coordinator: as ForgetValue. Not answered."""

    ticket: str


# ---- files: view <-> coordinator, and inside FilesRequest to the agent ----------------------------------------------


class FindFolder(Message, frozen=True):
    """Where ``node`` works. Reply value: FilesAnswer with ``folder``."""

    node: str


class FileOffer(Message, frozen=True):
    """A file, or with ``folder`` an empty folder, below the node's working folder."""

    path: str
    """Relative, with ``/`` between names."""
    size: int = 0
    digest: bytes = b""
    """blake2b of its content, 16 bytes."""
    executable: bool = False
    folder: bool = False


class OfferFiles(Message, frozen=True):
    """What is to be sent to the working folder of ``node``; a new ticket. Reply value: FilesAnswer with ``wanted`` and
    ``replaced``: the rest is there already. Nothing is written before room for all of it was found."""

    node: str
    ticket: str
    files: list[FileOffer]


class WriteFile(Message, frozen=True):
    """Bytes of file ``number`` of the offer, in order; with the last ones it takes its place. Reply value: FilesAnswer.

    To an agent ``data`` goes as the buffer beside the struct."""

    node: str
    ticket: str
    number: int
    offset: int
    data: bytes = b""


class EndFiles(Message, frozen=True):
    """The offer is over; what is incomplete is removed. Reply value: FilesAnswer."""

    node: str
    ticket: str


class SentScript(Message, frozen=True):
    """The last file that ``notebook-cluster run`` sends to a folder: which run its files are of, and their paths."""

    run: str
    paths: list[str]


class FindFiles(Message, frozen=True):
    """What is in the working folder of ``node`` that ``pattern`` means: a file, all files of a folder, or those that
    match it (``*``, ``?``, ``**``). Reply value: FilesAnswer with ``files``."""

    node: str
    pattern: str


class ReadFile(Message, frozen=True):
    """At most CHUNK_BYTES of the file ``path`` from ``offset`` on. Reply value: FilesAnswer with ``data``."""

    node: str
    path: str
    offset: int = 0


FilesBody = FindFolder | OfferFiles | WriteFile | EndFiles | FindFiles | ReadFile


# ---- files: coordinator <-> agent ------------------------------------------------------------------------------------


class FilesRequest(Message, frozen=True):
    """Coordinator. Buffers: ``data`` of a WriteFile. Answered by FilesAnswer."""

    request: int
    body: FilesBody


class FilesAnswer(Message, frozen=True):
    """Agent. ``error``: one line that says why not."""

    request: int
    folder: str = ""
    wanted: list[int] = []
    """Numbers of the offered files that are not there yet."""
    replaced: list[int] = []
    """Those of them in whose place there is another file."""
    files: list[FileOffer] = []
    """Those that were found, in order, without their digests."""
    data: bytes = b""
    size: int = 0
    """Of the whole file, as it was read."""
    changed: int = 0
    """When it was changed last, nanoseconds: as long as it is the same, the pieces are of one file."""
    error: str = ""


AnyTransfer = ReadValue | WriteValue | ForgetValue | FilesBody
"""What a view asks."""
