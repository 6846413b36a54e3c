"""Training rounds, coordinator <-> node: who arrived, what is sealed, what is committed.

The order of one round (docs/architecture.md, "A round"): Register once, then per round Arrived, Seal, chunks over
the mesh, Prepared, Commit. ``job`` is the name of a sync object (``nc.DiLoCo(model, name="model")``).
Hashes are xxh3-128 hex digests. float32 values that decide results travel as their bits (uint32).
"""

from typing import Literal

from notebook_cluster.protocol.wire import Message


def server_of(seal: "Seal") -> str:
    """The node that steps for all in a round of gradients of which one does; empty: nobody has any."""
    return seal.slices[0].owner if seal.slices else ""


def fragment_of(round: int, fragments: int) -> int:
    """The fragment that round ``round`` exchanges: they take turns."""
    return (round - 1) % fragments


class OuterSettings(Message, frozen=True):
    """Outer optimiser of one fragment: float32 bits of learning rate and momentum."""

    lr_bits: int
    momentum_bits: int
    nesterov: bool = True


class OuterChange(Message, frozen=True):
    """Outer settings that were set after the registration, as float32 bits; ``lr_bits`` None: by the number of
    members."""

    lr_bits: int | None
    momentum_bits: int


class Arrived(Message, frozen=True):
    """Node at a boundary (or ``finishing``). Its contribution is encoded and kept until COMMIT."""

    job: str
    round: int
    """The round it wants to be in: last committed + 1."""
    incarnation: int
    base_hash: str
    samples: float
    steps: int
    schema_hash: str
    codec: str
    norm: float
    finite: bool
    fragment: int = 0
    contribution: int = 0
    """Which of its contributions this is: it stays when the same bytes arrive again for a later round."""
    finishing: bool = False
    """In ``finish()``: takes part with what is left, then receives only, until all live members finish."""
    outer: OuterChange | None = None
    """The outer settings it wants; of the members that want any, that of the lowest rank decides."""
    more: bool = False
    """It has work in other fragments too: the rounds go on until those had their turn."""
    gradients: bytes = b""
    """A bit for each tensor of the schema, set where the node has a gradient of it; empty: it has all
    (:mod:`notebook_cluster.rounds.numerics.bits`)."""
    optimizer: str = ""
    """What this node's own optimiser steps with, as one line; empty: no node has one of its own."""
    sample: str = ""
    """A hash of some bytes of the contribution: of two that differ it differs, but of two that are nearly alike it may
    not."""
    scaled: bool = False
    """A GradScaler has multiplied the loss: that a step overflows is how it finds its scale."""


class Close(Message, frozen=True):
    """Coordinator: a quorum is at the boundary of ``round``; be there with the next step, whatever has been done."""

    job: str
    round: int


class Hold(Message, frozen=True):
    """Coordinator: a Stop came for the cell, and ``round`` is not sealed: ``contribution`` stays with the node, for a
    round after the cell was run again."""

    job: str
    round: int
    contribution: int


class Member(Message, frozen=True):
    name: str
    incarnation: int
    weight_bits: int
    """float32 bits of samples / total samples; 0 for a member that only receives."""
    contribution: int = 0
    """As in its Arrived."""


class Slice(Message, frozen=True):
    """Codec blocks ``start`` <= b < ``stop`` are summed and encoded by ``owner``."""

    owner: str
    start: int
    stop: int


class Seal(Message, frozen=True):
    job: str
    round: int
    attempt: int
    members: list[Member]
    """In rank order: the order of the sum."""
    slices: list[Slice]
    outer: OuterSettings
    base_hash: str
    fragment: int = 0
    last: bool = False
    """Every member is finishing: after COMMIT ``finish()`` returns."""
    gradients: bytes = b""
    """The tensors of which any member whose work counts has a gradient, as in Arrived. The others' mean is none:
    the optimiser leaves them alone."""


class Prepared(Message, frozen=True):
    """Node: holds every mean slice; nothing applied. ``state_hash``: of (theta, momentum) as they will be."""

    job: str
    round: int
    attempt: int
    incarnation: int
    slice_hashes: list[str]
    state_hash: str
    fragment: int = 0
    flushes: bool = False
    """The thread that computed it rounds subnormal numbers to zero."""


class CompleteAttempt(Message, frozen=True):
    """Coordinator: a member was lost but ``sources`` are PREPARED: ask them for the mean slices you miss."""

    job: str
    round: int
    attempt: int
    sources: list[str]
    fragment: int = 0


class Commit(Message, frozen=True):
    """Coordinator, logged first: apply. ``members`` are those whose contributions are in the mean."""

    job: str
    round: int
    attempt: int
    state_hash: str
    members: list[str]
    fragment: int = 0
    last: bool = False


class Applied(Message, frozen=True):
    """Node: parameters, momentum and error feedback changed; the new state's hash."""

    job: str
    round: int
    state_hash: str
    bytes_sent: int = 0
    """Mesh bytes this node sent for the round (payload)."""
    steps: int = 0
    wait: float = 0.0
    """Seconds between Arrived and Applied."""
    fragment: int = 0
    step: int = 0
    """Steps of the node's training loop at the boundary; 0: not known."""


class Void(Message, frozen=True):
    """Coordinator: the commit of ``round`` is held by nobody reachable; back to ``state_hash`` of round - 1."""

    job: str
    round: int
    state_hash: str


MOST_MISSED = 64
"""Rounds whose means a node takes that was sent the state as a whole before."""


class CatchUp(Message, frozen=True):
    """A committed round: with its mean slices (mesh frames of this round and attempt) and ``outer`` a node that holds
    the state before it comes to ``state_hash``."""

    round: int
    attempt: int
    slices: list[Slice]
    outer: OuterSettings
    state_hash: str
    senders: int = 0
    """How many contributions are in it."""


class Behind(Message, frozen=True):
    """Coordinator, answer to an Arrived based on an old state: fetch the state of ``round`` from ``source``, re-base
    (``theta_m += theta_new - theta_old``, error feedback kept), say Joined, arrive again."""

    job: str
    round: int
    state_hash: str
    source: str
    source_incarnation: int
    counted: bool = False
    """The contribution of that Arrived is in a committed mean already: drop it instead of arriving again."""
    contribution: int = 0
    """The contribution of that Arrived. One of an older contribution came late, or twice: it says nothing of the one in
    hand."""
    missed: list[CatchUp] = []
    """The rounds since the state it holds, where they are few: their means may be shorter than the state."""


class Refused(Message, frozen=True):
    """Coordinator: this contribution is not used (not finite, wrong schema, out of scale): error feedback 0,
    ``theta_m = theta``; the round goes on without it."""

    job: str
    round: int
    reason: str
    fragment: int = 0
    contribution: int = 0


class Stalled(Message, frozen=True):
    """Node: no chunk for 2.5 s."""

    job: str
    round: int
    attempt: int
    waiting_for: list[str]
    fragment: int = 0
    not_finite: list[str] = []
    """Members whose contribution, or what was summed from it, holds NaN or infinity."""


class Finished(Message, frozen=True):
    """Coordinator: every live member is finishing and nothing is left to exchange: ``finish()`` returns."""

    job: str
    round: int


class LeftRounds(Message, frozen=True):
    """Node: no more rounds in this cell (``reason``: ``finished``, ``error: ...``, ``interrupted``); keeps its
    state."""

    job: str
    reason: str


class RoundQuery(Message, frozen=True):
    """Restarted coordinator: say where you are."""

    job: str


class RoundStatus(Message, frozen=True):
    """Node: answer to RoundQuery."""

    job: str
    round: int
    """Last committed round applied here."""
    state_hash: str
    phase: Literal["training", "arrived", "exchanging", "prepared"]
    attempt: int = 0
    prepared_round: int | None = None
    prepared_state_hash: str = ""
    arrived: Arrived | None = None
    holds: bool = True
    """False: registered, but no state of the cluster is here yet."""
    left: bool = False
    joining: bool = False
    """The node's Register, which came just before, is not answered yet, or the state it was sent for is not there."""
    cell: int = 0
    """The cell in which it registered."""
    seen_attempt: int = 0
    """The newest attempt of the next round that it has taken up; 0: none."""


class CommitQuery(Message, frozen=True):
    """Restarted coordinator, before RoundQuery, of a job whose commits are not synced one by one: say which rounds were
    committed after ``round``."""

    job: str
    round: int
    start: int
    """Comes back in the answer: one to an earlier start of the coordinator may be on its way yet."""


class CommittedRound(Message, frozen=True):
    """A round that a node has applied: what was sealed, the hashes of its means, and its COMMIT."""

    seal: Seal
    slice_hashes: list[str]
    commit: Commit


class CommitReport(Message, frozen=True):
    """Node: answer to CommitQuery. ``rounds`` are in a row, oldest first."""

    job: str
    start: int
    rounds: list[CommittedRound]


# ---- checkpoints ---------------------------------------------------------------------------------------------


class CheckpointRequest(Message, frozen=True):
    """Node: sync.checkpoint(name) was called."""

    job: str
    name: str


class Save(Message, frozen=True):
    """Coordinator: the state of committed round ``round`` (ordered with COMMIT on the link, so every member holds
    exactly it). Every member sends its local part to ``writer`` over the mesh; the writer writes."""

    job: str
    name: str
    round: int
    state_hash: str
    writer: str
    members: list[str]
    ticket: int


class PartMissing(Message, frozen=True):
    """Coordinator to writer: ``node`` left or was lost: do not wait for its part."""

    job: str
    ticket: int
    node: str


class Saved(Message, frozen=True):
    """Writer to coordinator, then coordinator to all members: durable, or ``error``."""

    job: str
    name: str
    round: int
    ticket: int
    path: str = ""
    manifest_hash: str = ""
    error: str = ""
