"""What members say about their work is noted here, and whose arrivals make up the next round: those of all, or of a
quorum once its grace is over. :mod:`.attempts` decides on it.

Whoever is late is not lost: its work goes into the round after (:func:`.registration.settle_sources`).
"""

import math
from statistics import median
from typing import NamedTuple

from msgspec import structs

from notebook_cluster.protocol.rounds import (
    Arrived,
    Close,
    Hold,
    Member,
    OuterChange,
    OuterSettings,
    Prepared,
    Refused,
    Stalled,
)
from notebook_cluster.protocol.runs import RegisterRefused
from notebook_cluster.rounds.leader.registration import has_bits
from notebook_cluster.rounds.leader.runs import is_in, is_over, tell_over
from notebook_cluster.rounds.leader.state import (
    JobState,
    RoundsState,
    Transition,
    change,
    is_current,
    is_reachable,
    live,
)
from notebook_cluster.rounds.leader.unlike import refuse_stopped
from notebook_cluster.rounds.numerics.bits import bits_float, byte_count, default_outer_lr, float_bits


def on_arrived(transition: Transition, job: JobState, node: str, message: Arrived) -> None:
    """ARRIVED: the node's work for the next round is there. A changed model, work that is not finite or a late round
    is answered."""
    participant = job.participants[node]
    register = participant.register
    if is_over(job, register):
        tell_over(transition, job, node, register)
    if not is_in(job, participant) or participant.joining:
        return
    if job.stopped:  # it crossed the word of that
        refuse_stopped(transition, job, node, job.stopped)
        return
    if (message.schema_hash, message.codec) != (register.schema_hash, register.codec):
        reason = f"the model of {node!r} changed after it registered: make the sync object again"
        change(job, node, active=False, arrived=None)
        transition.send_to(node, RegisterRefused(job=job.name, reason=reason, run=register.run))
        return
    # an Arrived from a node that was sent to a source asks for another one
    asked = participant.asked + 1 if participant.fetching else participant.asked
    held = (message.round - 1, message.base_hash)
    if participant.active and participant.held is not None and participant.held[0] > held[0]:
        held = participant.held  # it crossed the COMMIT that is on its way there
    if message.outer is not None and not has_bits(message.outer):
        message = structs.replace(message, outer=None)
    if message.contribution == participant.refused:  # it crossed the Refused that is on its way there
        message = structs.replace(message, samples=0.0, steps=0, finite=True, norm=0.0)
    change(job, node, arrived=message, active=True, fetching=None, asked=asked, held=held)
    if not (math.isfinite(message.samples) and message.samples >= 0):
        refuse(
            transition, job, node, f"the work of {node!r} for round {message.round} counts {message.samples} samples"
        )
    elif not message.finite:
        what = f"the work of {node!r} for round {message.round} holds NaN or infinity"
        scaler = "is left out, as a GradScaler leaves a step out now and then; in every round: lower its learning rate"
        refuse(transition, job, node, f"{what} and {scaler}" if message.scaled else f"{what}: lower its learning rate")
    elif message.samples and len(message.gradients) not in (0, byte_count(len(register.schema))):
        reason = (
            f"the work of {node!r} for round {message.round} has bytes for {8 * len(message.gradients)} tensors to say "
            f"which have a gradient, and the model has {len(register.schema)}: it is not used"
        )
        refuse(transition, job, node, reason)
    elif message.samples and _was_refused(job, node, message):
        reason = f"the work of {node!r} for round {message.round} was refused before the coordinator was started again"
        refuse(transition, job, node, reason)
    _say_seal_again(transition, job, node)


def _say_seal_again(transition: Transition, job: JobState, node: str) -> None:
    """Who arrives with what the open attempt counts on has not heard of it, or is in it no more."""
    attempt = job.open
    if attempt is None or node not in attempt.waiting or node in attempt.prepared:
        return
    if any(member.name == node and is_there(transition, job, member) for member in attempt.seal.members):
        transition.send_to(node, attempt.seal)


def _was_refused(job: JobState, node: str, message: Arrived) -> bool:
    """The open attempt, sealed before a restart of the coordinator, has this contribution as one that is not used: the
    node was not told."""
    if job.open is None or job.open.seal.round != message.round:
        return False
    same = (node, message.incarnation, message.contribution)
    return any((m.name, m.incarnation, m.contribution) == same and not m.weight_bits for m in job.open.seal.members)


def refuse(transition: Transition, job: JobState, node: str, reason: str) -> None:
    """Do not use the contribution of ``node``; it stays in the round as a receiver."""
    arrived = job.participants[node].arrived
    if arrived is None:
        return
    if not arrived.samples:
        return
    change(
        job,
        node,
        refused=arrived.contribution,
        arrived=structs.replace(arrived, samples=0.0, steps=0, finite=True, norm=0.0),
    )
    transition.send_to(
        node,
        Refused(
            job=job.name,
            round=arrived.round,
            reason=reason,
            fragment=arrived.fragment,
            contribution=arrived.contribution,
        ),
    )
    transition.tell("warning", reason)


def on_prepared(transition: Transition, job: JobState, node: str, message: Prepared) -> None:
    """PREPARED: the node holds the state after this attempt; of another attempt it is ignored."""
    attempt = job.open
    if attempt is None or (message.round, message.attempt) != (attempt.seal.round, attempt.seal.attempt):
        return
    if any(m.name == node and m.incarnation == message.incarnation for m in attempt.seal.members):
        stalled = {name: report for name, report in attempt.stalled.items() if name != node}
        job.open = structs.replace(
            attempt,
            prepared={**attempt.prepared, node: message},
            stalled=stalled,
            stalled_since=attempt.stalled_since if stalled else None,
        )


def on_stalled(transition: Transition, job: JobState, node: str, message: Stalled) -> None:
    """STALLED: the node waits for frames of others, which a relay may bring, or got work that is not finite, which is
    then left out."""
    attempt = job.open
    if attempt is None or (message.round, message.attempt) != (attempt.seal.round, attempt.seal.attempt):
        return
    if node not in attempt.waiting or node in attempt.prepared:
        return
    for name in message.not_finite:
        member = next((m for m in attempt.seal.members if m.name == name and m.weight_bits), None)
        arrived = job.participants[name].arrived if member is not None else None
        if member is not None and arrived is not None and arrived.contribution == member.contribution:
            reason = (
                f"the work of {name!r} for round {message.round} holds NaN or infinity, or is damaged: it is not used"
            )
            refuse(transition, job, name, reason)
    if message.not_finite:
        job.open = structs.replace(attempt, broken=True)
        return
    now = transition.state.now
    stalled = {**attempt.stalled, node: (now, tuple(message.waiting_for))}
    members = {member.name for member in attempt.seal.members} - {node}
    pairs = {(node, name) for name in message.waiting_for if name in members}
    new = sorted(pairs - attempt.relayed)
    for waiting, waited_for in new:
        transition.relay(waiting, waited_for)
    # Whether the relay helps is seen from now on.
    since = now if new or attempt.stalled_since is None else attempt.stalled_since
    relayed = attempt.relayed | frozenset(new)
    job.open = structs.replace(attempt, stalled=stalled, stalled_since=since, sources=(), relayed=relayed)


def refuse_out_of_scale(transition: Transition, job: JobState, names: list[str]) -> None:
    """Refuse work whose norm is over ``norm_factor`` times the median of the others'; of less than three nobody's."""
    norms = {name: a.norm for name in names if (a := job.participants[name].arrived) is not None and a.samples}
    factor = transition.state.settings.norm_factor
    if len(norms) < 3:
        return
    for name, norm in norms.items():
        usual = median(other for key, other in norms.items() if key != name)
        if usual > 0 and norm > factor * usual:
            refuse(
                transition,
                job,
                name,
                f"the work of {name!r} for round {job.round + 1} is out of scale (norm {norm:.3g}, the others' median "
                f"{usual:.3g}): it is not used",
            )


def is_there(transition: Transition, job: JobState, member: Member) -> bool:
    """Whether ``member`` is reachable and still has in hand what it had when the attempt was sealed; it may have left
    the rounds."""
    participant = job.participants[member.name]
    arrived = participant.arrived
    if participant.joining or participant.away or not transition.is_up(member.name, member.incarnation):
        return False
    if participant.incarnation != member.incarnation or arrived is None:
        return participant.incarnation == member.incarnation and not participant.active
    same = arrived.contribution == member.contribution and bool(arrived.samples) == bool(member.weight_bits)
    return same and is_current(job, participant)


def required(transition: Transition, job: JobState) -> list[str]:
    """Nodes whose arrival the next SEAL waits for: those that hold the last committed state or are about to, and before
    a cell's first round also those that are still fetching it. Where every step is a round, nobody could catch up with
    the others: they wait for whoever fetches."""
    most = transition.state.settings.fetch_attempts
    cohort = frozenset(job.participants) if job.settings.every_step else job.cohort
    return [
        name
        for name in live(transition, job)
        if _is_on(job, name) or (name in cohort and job.participants[name].asked < most)
    ]


def some_left_at_stop(transition: Transition, job: JobState) -> bool:
    """A Stop came for the cell, and has ended it on some node. Where code catches it on all of them, to finish, rounds
    go on."""
    return any(
        not job.participants[name].active and is_reachable(transition, job, name)
        for name in job.stopping & job.participants.keys()
    )


def hold_arrivals(transition: Transition, job: JobState) -> None:
    """A Stop came: what is not sealed stays with its node. Were it sealed over those who happened to be there, the work
    of the others would be in a later round than without the Stop."""
    for name in live(transition, job):
        participant = job.participants[name]
        arrived = participant.arrived
        if arrived is not None and is_current(job, participant):
            transition.send_to(name, Hold(job=job.name, round=arrived.round, contribution=arrived.contribution))
            change(job, name, arrived=None)


def _is_on(job: JobState, name: str) -> bool:
    """It holds the last committed state, by its word or by what was sent to it, or took part in the last round and has
    not said anything since that shows it behind. Its sync object may just have been made again: the answer to that is
    on its way. Whoever is behind or sent to a source is not waited for."""
    participant = job.participants[name]
    if participant.held == (job.round, job.state_hash):
        return not participant.joining or participant.fetching is None
    silent = participant.arrived is None and participant.fetching is None
    return name in job.members and silent and not participant.joining


def gathered(transition: Transition, job: JobState) -> list[str]:
    """The nodes to seal the next round over, in rank order; none while somebody is still waited for."""
    names = required(transition, job)
    here = [name for name in names if is_current(job, job.participants[name])]
    if len(here) == len(names):
        return here
    if not _is_quorum(job, here, len(names)):
        job.quorum_since = None
        return []
    if job.quorum_since is None:
        job.quorum_since = transition.state.now
        _close(transition, job, here)
    return here if transition.state.now - job.quorum_since >= job.settings.grace else []


def _is_quorum(job: JobState, here: list[str], nodes: int) -> bool:
    """Enough of them are at the boundary, with some work to exchange."""
    quorum = job.settings.quorum
    if quorum is None or not any(a.samples for name in here if (a := job.participants[name].arrived) is not None):
        return False
    wanted = math.ceil(quorum * nodes) if isinstance(quorum, float) else min(quorum, nodes)
    return len(here) >= wanted


def _close(transition: Transition, job: JobState, here: list[str]) -> None:
    """Whoever is between two boundaries comes with the steps it has."""
    for name in live(transition, job):
        participant = job.participants[name]
        if name not in here and not participant.joining and participant.arrived is None:
            transition.send_to(name, Close(job=job.name, round=job.round + 1))


def outer_settings(transition: Transition, job: JobState, arrivals: dict[str, Arrived], owners: int) -> OuterSettings:
    """The outer settings of the next round, to which ``owners`` nodes contribute. ``arrivals`` are in rank order."""
    settings = job.settings
    registered = OuterChange(lr_bits=settings.lr_bits, momentum_bits=settings.momentum_bits)
    wanted = {name: arrived.outer for name, arrived in arrivals.items() if arrived.outer is not None}
    leader, chosen = next(iter(wanted.items()), ("", registered))
    differ = tuple(name for name, change in wanted.items() if change != chosen)
    if differ and differ != job.outer_differs:
        transition.tell(
            "warning",
            f"{', '.join(map(repr, differ))} set other outer settings than {leader!r}, whose rank is lower: "
            f"round {job.round + 1} uses {_text(chosen)}",
        )
    job.outer_differs = differ
    lr_bits = float_bits(default_outer_lr(owners)) if chosen.lr_bits is None else chosen.lr_bits
    return OuterSettings(lr_bits=lr_bits, momentum_bits=chosen.momentum_bits, nesterov=settings.nesterov)


def _text(change: OuterChange) -> str:
    lr = "by the number of nodes" if change.lr_bits is None else f"{bits_float(change.lr_bits):.6g}"
    return f"outer_lr {lr}, outer_momentum {bits_float(change.momentum_bits):.6g}"


class Gathering(NamedTuple):
    """A round that is sealed when those who are ``missing`` have arrived."""

    round: int
    here: frozenset[str]
    missing: frozenset[str]
    any_will_do: bool
    """A quorum may be reached without some of them."""


def gatherings(state: RoundsState) -> dict[str, Gathering]:
    """The jobs whose next round waits for nothing but arrivals, however long that takes."""
    transition, found = Transition(state), {}
    for name, job in state.jobs.items():
        gathering = _gathering(transition, job)
        if gathering is not None:
            found[name] = gathering
    return found


def _gathering(transition: Transition, job: JobState) -> Gathering | None:
    """None where it is about to go on: an attempt is open, a grace runs, or it is not known yet who is there."""
    busy = job.awaited or job.registering or job.open is not None or job.quorum_since is not None
    if busy or some_left_at_stop(transition, job) or not job.has_state or job.orphan_since is not None:
        return None
    names = required(transition, job)
    here = frozenset(name for name in names if is_current(job, job.participants[name]))
    missing = frozenset(names) - here
    if not here or not missing:
        return None
    return Gathering(job.round + 1, here, missing, job.settings.quorum is not None)
