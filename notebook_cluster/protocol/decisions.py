"""Coordinator <-> node runtime: what the nodes of a cell decide together (``nc.should_stop``, ``nc.mean_metrics``)."""

from notebook_cluster.protocol.wire import Message

DECISIONS_JOB = ":decisions"
"""No name of a training job: those have no colon."""
SHOULD_STOP, MEAN_METRICS = "should_stop", "mean_metrics"
MOST_METRICS = 100
MOST_NAME = 100
"""Characters of a metric's name."""


class Ask(Message, frozen=True):
    """Node: its main thread waits in a call, and this is its answer. Answered by Decided."""

    cell: int
    serial: int
    """Counts the calls of this node in the cell."""
    path: list[int]
    """Where the node is in the cell's code, see :class:`PlaceReached`."""
    site: str
    """``cell 7, line 12``: two calls at one site are the same one, wherever the loops of their nodes are."""
    name: str
    """``should_stop`` or ``mean_metrics``."""
    by: str = ""
    flag: bool = False
    metrics: dict[str, float] = {}
    weight: float = 1.0


class Withdrawn(Message, frozen=True):
    """Node: a Stop or an error has ended the wait for call ``serial``."""

    cell: int
    serial: int


class PlaceReached(Message, frozen=True):
    """Node: how far the cell's code has come here.

    ``path`` has a number for each loop over ``nc.shard`` that the code is in, and one for what is outside: how many
    such loops were left there, and how often ``finish()`` was called. All nodes pass the same places in the same order,
    however many batches they have, so of two paths the greater one (as Python compares lists) is further on.
    """

    cell: int
    path: list[int]
    fence: bool = False
    """It waits here in a call that needs all nodes (a collective, the finish of a sync object), so calls of places
    before this one it will make no more."""


class Decided(Message, frozen=True):
    """Coordinator: the result of one call, the same for all nodes that took part in it."""

    cell: int
    number: int
    """Counts the calls that were decided in the cell; far larger after a restart of the coordinator."""
    serials: dict[str, int]
    """The nodes that took part, in rank order, each with the number of its call."""
    serial: int = 0
    """The receiver's call, where it is told of a stop that was decided without it; 0: that in ``serials``."""
    stop: bool = False
    site: str = ""
    path: list[int] = []
    """Of a stop: where it was asked for, for nodes that come there later."""
    means: dict[str, float] = {}
    weight: float = 0.0
    """Sum of the weights."""
    trouble: list[str] = []
    """``loss is nan on mini``"""
    error: str = ""
    """The nodes made different calls: raised on all of them."""
    job: str = DECISIONS_JOB


class AnswersMissing(Message, frozen=True):
    """Coordinator: call ``serial`` has waited for a second, for these nodes."""

    cell: int
    serial: int
    nodes: list[str]
    job: str = DECISIONS_JOB


class DecidedStop(Message, frozen=True):
    """A stop that a node was told of."""

    number: int
    site: str
    path: list[int]


class DecisionQuery(Message, frozen=True):
    """Coordinator that was started again, or was without this node for a while. Answered by DecisionState."""

    ticket: int
    job: str = DECISIONS_JOB


class DecisionState(Message, frozen=True):
    """Node: all that such a coordinator has to know. An answer to one before it says less than it may know now."""

    ticket: int
    cell: int
    """0: none that this is about."""
    path: list[int]
    fence: list[int] = []
    taking_part: bool = True
    """False: it joined the running cell, and none of its calls was one with the others."""
    asked: Ask | None = None
    known: list[Decided] = []
    """The last results that it shares with others."""
    stops: list[DecidedStop] = []
