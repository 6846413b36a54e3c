"""What machines have kept of a training whose coordinator is gone, and how a new cluster takes it over.

The owner starts a coordinator anew, under the same name. It asks every agent that it may use (:class:`AskKept`): first
only whether the coordinator before is still heard there, then to keep and end what that one has left there, and to say
what is kept. Of that it takes the newest state of each job. Every node is told in the roster which one that is
(:class:`TakenState`); those on whose machine it lies read it there, and give it to the others.
"""

from notebook_cluster.protocol.wire import Message

QUIET = 4.0
"""Seconds of silence after which a coordinator counts as gone; then rounds go on without the nodes of a peer, too."""
MOST_STATES = 64
MOST_LINES = 20
MOST_TEXT = 500
"""Of what one agent says of kept states: so many, so many lines, so many characters in each."""


class AskKept(Message, frozen=True):
    """Coordinator: what is kept here of this owner's cluster of this name? Answered by KeptAnswer."""

    ticket: int
    end: bool = False
    """First keep and end what coordinators of this owner and name before this one have here, and look at the files of
    what is kept. Where nothing is kept their nodes stay, until it is asked again because another agent has something;
    where a training could not be kept they stay in any case. Else nothing is looked at but whether they are heard."""
    directory: str = ""
    """Where nodes of the owner's own machine work; only the owner's own agent looks there."""


class KeptState(Message, frozen=True):
    """A whole checkpoint that was kept: a state of training ``job`` after ``round``."""

    name: str
    job: str
    round: int
    time: float
    """When it was kept, seconds since 1970 on the agent's clock."""
    bytes: int
    state_hash: str
    cluster_id: str = ""
    """Of the cluster that trained it; ``epoch``: of its coordinator then. Later starts of an owner's coordinators have
    higher epochs."""
    epoch: int = 0


class KeptAnswer(Message, frozen=True):
    """Agent. ``states`` are those of the owner who asks, in the folder of the cluster of this name, the newest whole
    one of each checkpoint."""

    ticket: int
    states: list[KeptState] = []
    damaged: list[str] = []
    """A line for each file that is not as it was written, and for each node that could not keep its training."""
    nodes: int = 0
    """Of coordinators before this one that are here, or were ended."""
    silent: float | None = None
    """Seconds since one of those was last heard; None: there is none."""


class TakenState(Message, frozen=True):
    """In the roster: ``job`` goes on from this state, in ``checkpoints/<name>``, while the cluster has none of it."""

    job: str
    name: str
    round: int
    state_hash: str


# ---- what a view asks for ---------------------------------------------------------------------------------------


class FindKept(Message, frozen=True):
    """Ask ``peers`` (names, ``HOST:PORT`` or ``all``; with ``local`` this machine will have nodes) what they keep of
    this cluster's name. Reply value: FoundKept, or an error that says that the cluster still runs."""

    peers: list[str]
    own: tuple[str, str] | None = None
    """Address and key of the agent that the coordinator before had on this machine."""


class FoundKept(Message, frozen=True):
    """``peers``: those that have answered, but for ``local``. ``lines``: what was found, and who did not answer.
    ``states``: how many are kept."""

    peers: list[str]
    lines: list[str]
    states: int


class TakeOver(Message, frozen=True):
    """Go on from the newest states on the machines that have nodes by now. Reply value: list of TakenJob, or an error
    that says why there is none."""


class TakenJob(Message, frozen=True):
    """What the cluster goes on from: ``peers`` have it. ``line`` names what is newer and could not be taken."""

    job: str
    name: str
    round: int
    time: float
    bytes: int
    peers: list[str]
    line: str = ""


AnyTakingOver = FindKept | TakeOver
