"""What the coordinator knows of the training jobs: the state of :mod:`.machine`.

A state is a value: ``apply`` changes a copy. Participants, nodes and open attempts are frozen and replaced.
"""

from copy import copy
from typing import Any, Literal

import msgspec

from notebook_cluster.journal.records import Record
from notebook_cluster.protocol.rounds import Arrived, CatchUp, Commit, CommittedRound, Prepared, Saved, Seal
from notebook_cluster.protocol.runs import Register
from notebook_cluster.protocol.wire import Message
from notebook_cluster.rounds.leader.events_effects import Effect, Log, Relay, Send, Tell

ATTEMPT_BITS = 20
"""Attempts of one start of the coordinator: about a million, where one in a thousand rounds takes a second one. What
is above these bits counts the starts."""
Held = tuple[int, str]
"""(round, hash of theta and momentum after it)."""


class RoundsSettings(msgspec.Struct, frozen=True):
    """Seconds, and limits."""

    register_grace: float = 10.0
    """After the first registration in a cell: how long the others are waited for."""
    resume_grace: float = 60.0
    """``register_grace`` while none that came has the checkpoint from which they resume: who has it may be slow."""
    stall_grace: float = 5.0
    """After the first STALLED of an attempt, or the last relay that was ordered because of one: when the node named
    most is left out."""
    silent_grace: float = 60.0
    """``stall_grace`` while a member that is not done reports nothing: it may be busy receiving, or hang."""
    return_grace: float = 30.0
    """How long a lost node that alone holds the newest state is waited for."""
    recover_grace: float = 20.0
    """After a restart: how long nodes have to say where they are."""
    fetch_attempts: int = 3
    """A node that could not fetch the state this often is no longer waited for."""
    one_owner_blocks: int = 64
    """Vectors of fewer codec blocks have a single slice."""
    slices_each: int = 4
    """Most slices of one owner. The mean of one is on its way while the contributions to the next still come."""
    slice_blocks: int = 1024
    """Codec blocks of a slice, at least, where an owner has several."""
    norm_factor: float = 100.0
    """A contribution longer than this many times the median of the others is refused."""


class NodeState(msgspec.Struct, frozen=True):
    """What the rounds know of a node. ``up``: its link; ``gone``: this incarnation does not come back."""

    incarnation: int
    rank: int
    up: bool = True
    gone: bool = False


class Participant(msgspec.Struct, frozen=True):
    """One node of one job. ``held`` is what it said last, or will hold by what was sent to it last."""

    incarnation: int
    register: Register
    active: bool = False
    """Takes part in rounds: registered in the job's cell, accepted, not left."""
    joining: bool = False
    """Registered, and not yet Joined."""
    held: Held | None = None
    fetching: str | None = None
    """The source it was sent to."""
    source: str = ""
    """The one before: it has what came since."""
    asked: int = 0
    """How often it asked for another source."""
    arrived: Arrived | None = None
    refused: int = -1
    """The contribution that was refused last."""
    counted: int = 0
    """Last committed round that has its contribution."""
    applied: int = 0
    late: bool = False
    """Whether the node registered when the others had finished this run."""
    away: bool = False
    """Whether the node makes no progress and is left out as if its link were lost."""
    asked_where: bool = False
    """Whether the node is back and has not said yet what it holds."""


class OpenAttempt(msgspec.Struct, frozen=True):
    """A sealed attempt that is not committed."""

    seal: Seal
    waiting: frozenset[str]
    """Members that must be PREPARED before COMMIT."""
    prepared: dict[str, Prepared] = {}
    sources: tuple[str, ...] = ()
    """What the last COMPLETE named; empty: it is to be sent (again) when somebody is PREPARED."""
    broken: bool = False
    """A contribution turned out not to be finite: it is sealed again without it."""
    stalled: dict[str, tuple[float, tuple[str, ...]]] = {}
    """Member -> (when it said so last, whom it waits for)."""
    stalled_since: float | None = None
    """Since when it stands still with all the relays that were ordered."""
    relayed: frozenset[tuple[str, str]] = frozenset()
    """(who waits, for whom): their relay was ordered in this attempt."""


class Saving(msgspec.Struct, frozen=True):
    """A checkpoint that is being written."""

    ticket: int
    name: str
    round: int
    writer: str
    members: tuple[str, ...]
    requesters: frozenset[str] = frozenset()
    tokens: frozenset[int] = frozenset()
    missing: frozenset[str] = frozenset()
    """Members whose part the writer was told not to wait for."""


class JobState(msgspec.Struct):
    """One job. ``chain``: round -> state hash, the last committed rounds; replaced, never written to."""

    name: str
    settings: Register
    """The registration of the lowest rank: codec, schema and outer optimiser of the job."""
    cell: int
    run: int = 1
    """Which sync object of this cell is trained: see :mod:`.runs`."""
    ended: bool = False
    """Whether all that took part in this run have finished it."""
    later: dict[str, tuple[int, Register]] = {}
    """Node -> (incarnation, registration) for a later run of this cell; replaced, never written to."""
    passing: frozenset[str] = frozenset()
    """Nodes that have come to runs that were over, and not to this one yet."""
    later_since: float | None = None
    """Since when somebody waits for a later run; None: it was told for whom."""
    registering: bool = True
    """Waiting for the first registrations of this run."""
    first_register: float = 0.0
    has_state: bool = False
    round: int = 0
    state_hash: str = ""
    chain: dict[int, str] = {}
    participants: dict[str, Participant] = {}
    cohort: frozenset[str] = frozenset()
    """Registered together: the next round waits until they have the state."""
    open: OpenAttempt | None = None
    attempt: int = 0
    """Last attempt used for round ``round`` + 1."""
    attempt_floor: int = 0
    """Attempts begin above it, so that no frame of a voided or forgotten round can be taken for a new one."""
    highest_attempt: int = 0
    """Ever used, in any round."""
    orphan_since: float | None = None
    quorum_since: float | None = None
    """Since when a quorum is at the boundary and the others were told so."""
    outer_differs: tuple[str, ...] = ()
    """Nodes that wanted other outer settings than the lowest rank when that was last told."""
    steps_differ: tuple[str, ...] = ()
    """Nodes whose optimiser had other settings than that of the lowest rank when they were last in a round."""
    unchanged: dict[str, tuple[int, int, int]] = {}
    """Node -> (the last round it was in, since when nothing has changed in its model: rounds, steps), of this run;
    replaced, never written to."""
    same_work: tuple[int, tuple[str, ...], int] = (0, (), 0)
    """(the last round, the nodes that had the same contribution in it, for how many rounds in a row)."""
    told: tuple[int, frozenset[tuple[str, str]]] = (0, frozenset())
    """(cell, what was told in it of which node): it is not told again."""
    unlike: tuple[int, str] = (0, "")
    """(round, hash of the state before it) of the round of this run that was played again because its nodes computed
    different states."""
    stopping: frozenset[str] = frozenset()
    """Nodes that took part when a Stop came for its cell: once one of them has left, no round is sealed any more."""
    stopped: str = ""
    """Why the job goes on no more in its cell."""
    last_commit: Commit | None = None
    recent: tuple[CatchUp, ...] = ()
    """The last committed rounds in a row, for nodes that missed them."""
    members: tuple[str, ...] = ()
    """The members of the last committed round, with a contribution or not."""
    server: str = ""
    """Where one node's optimiser steps for all: who did so last."""
    steps: int = 0
    bytes_sent: int = 0
    bytes_data_parallel: int = 0
    hash_mismatches: int = 0
    tickets: int = 0
    saves: dict[int, Saving] = {}
    saved: dict[str, Saved] = {}
    """Checkpoint name -> the last one written."""
    save_requests: dict[str, tuple[frozenset[str], frozenset[int]]] = {}
    """Checkpoint name -> (nodes, views) that asked for it before it was known who holds the state."""
    awaited: frozenset[str] = frozenset()
    """After a restart: nodes that have not said where they are in this job; nothing is decided before."""
    reporting: frozenset[str] | None = None
    """Before that, see :mod:`.lost_commits`: nodes that have not said what was committed; None: nobody is asked."""
    reports: dict[str, tuple[CommittedRound, ...]] = {}
    """Node -> the committed rounds that it has and the journal has not; replaced, never written to."""


class RoundsState(msgspec.Struct):
    """Everything that the rounds of all jobs know."""

    settings: RoundsSettings = RoundsSettings()
    nodes: dict[str, NodeState] = {}
    home: frozenset[str] = frozenset()
    jobs: dict[str, JobState] = {}
    cell: int = 0
    running: frozenset[str] = frozenset()
    """Nodes on which the cell has not ended."""
    ended_well: frozenset[str] = frozenset()
    """Nodes on which it has, without an error."""
    awaited_until: float = 0.0
    attempts: int = 0
    """No attempt that was used before the last restart is above it."""
    now: float = 0.0


class Transition:
    """One application of an event: a copy of the state that may be changed, and the effects so far."""

    def __init__(self, state: RoundsState) -> None:
        self.state = copy(state)
        self.state.nodes, self.state.jobs = dict(state.nodes), dict(state.jobs)
        self.effects: list[Effect] = []
        self._copied: set[str] = set()

    def job(self, name: str) -> JobState:
        """Job ``name``, copied on its first use in this transition."""
        job = self.state.jobs[name]
        if name not in self._copied:
            job = copy(job)
            job.participants = dict(job.participants)
            job.saves, job.saved = dict(job.saves), dict(job.saved)
            self.add_job(job)
        return job

    def add_job(self, job: JobState) -> None:
        self.state.jobs[job.name] = job
        self._copied.add(job.name)

    def log(self, record: Record, *, durable: bool = True) -> None:
        self.effects.append(Log(record, durable))

    def send_to(self, node: str, message: Message) -> None:
        self.effects.append(Send(node, message))

    def relay(self, waiting: str, waited_for: str) -> None:
        self.effects.append(Relay(waiting, waited_for))

    def tell(self, level: Literal["info", "warning", "error"], text: str, *, in_cell: bool = False) -> None:
        self.effects.append(Tell(level, text, in_cell))

    def is_up(self, name: str, incarnation: int) -> bool:
        """True while that process is reachable."""
        node = self.state.nodes.get(name)
        return node is not None and node.up and node.incarnation == incarnation

    def by_rank(self, names: Any) -> list[str]:
        nodes = self.state.nodes
        return sorted(names, key=lambda name: (nodes[name].rank if name in nodes else 1 << 30, name))


def change(job: JobState, name: str, **fields: Any) -> Participant:
    """Replace fields of a participant."""
    changed: Participant = msgspec.structs.replace(job.participants[name], **fields)
    job.participants[name] = changed
    return changed


def is_reachable(transition: Transition, job: JobState, name: str) -> bool:
    """The process that takes part in the job is reachable and makes progress."""
    participant = job.participants.get(name)
    return participant is not None and not participant.away and transition.is_up(name, participant.incarnation)


def live(transition: Transition, job: JobState) -> list[str]:
    """Participants that are reachable and take part, in rank order."""
    return transition.by_rank(
        name for name, p in job.participants.items() if p.active and is_reachable(transition, job, name)
    )


def holders(transition: Transition, job: JobState) -> list[str]:
    """Reachable nodes that hold the last committed state, in rank order; they may have left the rounds."""
    now = (job.round, job.state_hash)
    return transition.by_rank(
        name for name, p in job.participants.items() if p.held == now and is_reachable(transition, job, name)
    )


def is_current(job: JobState, participant: Participant) -> bool:
    """True when its arrival is for the next round, based on the last committed state."""
    arrived = participant.arrived
    return arrived is not None and arrived.round == job.round + 1 and arrived.base_hash == job.state_hash
