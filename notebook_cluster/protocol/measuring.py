"""How fast nodes reach each other: what the doctor and the bench ask of nodes, and a view of the coordinator."""

from typing import Literal

from notebook_cluster.protocol.wire import Message

MEGABYTE = 1_000_000
MOST_MEGABYTES = 64

Way = Literal["", "ipc", "tcp+curve", "relay"]
"""``ipc``: Unix sockets between nodes of one peer. ``tcp+curve``: TCP, encrypted. ``relay``: over the links, through
the coordinator, where nothing else works."""


class MeasurePair(Message, frozen=True):
    """Coordinator, for the doctor and the bench: measure the way to ``node`` over the mesh. Answered by
    PairMeasured."""

    ticket: int
    node: str
    payload: int = 1 << 20
    """Bytes to send for the bandwidth."""
    round_trips: int = 5


class PairMeasured(Message, frozen=True):
    """Node: what the measurement ``ticket`` of the way to ``node`` found; ``error`` says why there is nothing."""

    ticket: int
    node: str
    round_trip: float = 0.0
    """Seconds, the smallest of several."""
    median_round_trip: float = 0.0
    """Of the same."""
    bytes_per_s: float = 0.0
    """One way."""
    sent: int = 0
    """Bytes that were sent for it and have come there."""
    way: Way = ""
    """On which the frames went, those of training too; empty: none was found."""
    error: str = ""

    @property
    def relayed(self) -> bool:
        """The frames went over the links, through the coordinator."""
        return self.way == "relay"


class MeasureWay(Message, frozen=True):
    """A view: how fast is the way from one node to another? Nobody measures meanwhile. Reply value: PairMeasured, or an
    error that says why not, as that a cell runs."""

    source: str
    target: str
    megabytes: int = 16
    """To send at most: fewer go where the way is slow."""
