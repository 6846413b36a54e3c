"""What members say about their work: noted here, decided on in :mod:`.attempts`."""

import math
from statistics import median

from msgspec import structs

from notebook_cluster.protocol.rounds import Arrived, Member, Prepared, Refused, RegisterRefused, Stalled
from notebook_cluster.rounds.leader.impossible import has_bits
from notebook_cluster.rounds.leader.runs import is_in, is_over, tell_over
from notebook_cluster.rounds.leader.state import Job, Turn, change, is_current
from notebook_cluster.rounds.leader.unlike import refuse_stopped
from notebook_cluster.rounds.numerics.gradient_flags import byte_count


def on_arrived(turn: Turn, job: Job, node: str, message: Arrived) -> None:
    """ARRIVED: the node's work for the next round is there. A changed model, work that is not finite or a late round
    is answered."""
    participant = job.participants[node]
    register = participant.register
    if is_over(job, register):
        tell_over(turn, job, node, register)
    if not is_in(job, participant) or participant.joining:
        return
    if job.stopped:  # it crossed the word of that
        refuse_stopped(turn, job, node, job.stopped)
        return
    if (message.schema_hash, message.codec) != (register.schema_hash, register.codec):
        reason = f"the model of {node!r} changed after it registered: make the sync object again"
        change(job, node, active=False, arrived=None)
        turn.send(node, RegisterRefused(job=job.name, reason=reason, run=register.run))
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
        refuse(turn, job, node, f"the work of {node!r} for round {message.round} counts {message.samples} samples")
    elif not message.finite:
        refuse(
            turn,
            job,
            node,
            f"the work of {node!r} for round {message.round} holds NaN or infinity: lower its learning rate",
        )
    elif message.samples and len(message.gradients) not in (0, byte_count(len(register.schema))):
        reason = (
            f"the work of {node!r} for round {message.round} has bytes for {8 * len(message.gradients)} tensors to say "
            f"which have a gradient, and the model has {len(register.schema)}: it is not used"
        )
        refuse(turn, job, node, reason)
    elif message.samples and _was_refused(job, node, message):
        reason = f"the work of {node!r} for round {message.round} was refused before the coordinator was started again"
        refuse(turn, job, node, reason)
    _say_seal_again(turn, job, node)


def _say_seal_again(turn: Turn, job: Job, node: str) -> None:
    """Who arrives with what the open attempt counts on has not heard of it, or is in it no more."""
    attempt = job.open
    if attempt is None or node not in attempt.waiting or node in attempt.prepared:
        return
    if any(member.name == node and is_there(turn, job, member) for member in attempt.seal.members):
        turn.send(node, attempt.seal)


def _was_refused(job: Job, node: str, message: Arrived) -> bool:
    """The open attempt, sealed before a restart of the coordinator, has this contribution as one that is not used: the
    node was not told."""
    if job.open is None or job.open.seal.round != message.round:
        return False
    same = (node, message.incarnation, message.contribution)
    return any((m.name, m.incarnation, m.contribution) == same and not m.weight_bits for m in job.open.seal.members)


def refuse(turn: Turn, job: Job, node: str, reason: str) -> None:
    """Its contribution is not used; it stays in the round as a receiver."""
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
    turn.send(
        node,
        Refused(
            job=job.name,
            round=arrived.round,
            reason=reason,
            fragment=arrived.fragment,
            contribution=arrived.contribution,
        ),
    )
    turn.tell("warning", reason)


def on_prepared(turn: Turn, job: Job, node: str, message: Prepared) -> None:
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


def on_stalled(turn: Turn, job: Job, node: str, message: Stalled) -> None:
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
            refuse(turn, job, name, reason)
    if message.not_finite:
        job.open = structs.replace(attempt, broken=True)
        return
    now = turn.state.now
    stalled = {**attempt.stalled, node: (now, tuple(message.waiting_for))}
    members = {member.name for member in attempt.seal.members} - {node}
    pairs = {(node, name) for name in message.waiting_for if name in members}
    new = sorted(pairs - attempt.relayed)
    for waiting, waited_for in new:
        turn.relay(waiting, waited_for)
    # Whether the relay helps is seen from now on.
    since = now if new or attempt.stalled_since is None else attempt.stalled_since
    relayed = attempt.relayed | frozenset(new)
    job.open = structs.replace(attempt, stalled=stalled, stalled_since=since, sources=(), relayed=relayed)


def refuse_out_of_scale(turn: Turn, job: Job, names: list[str]) -> None:
    """Refuse work whose norm is over ``norm_factor`` times the median of the others'; of less than three nobody's."""
    norms = {name: a.norm for name in names if (a := job.participants[name].arrived) is not None and a.samples}
    factor = turn.state.settings.norm_factor
    if len(norms) < 3:
        return
    for name, norm in norms.items():
        usual = median(other for key, other in norms.items() if key != name)
        if usual > 0 and norm > factor * usual:
            refuse(
                turn,
                job,
                name,
                f"the work of {name!r} for round {job.round + 1} is out of scale (norm {norm:.3g}, the others' median "
                f"{usual:.3g}): it is not used",
            )


def is_there(turn: Turn, job: Job, member: Member) -> bool:
    """It is reachable and still has in hand what it had when the attempt was sealed; it may have left the rounds."""
    participant = job.participants[member.name]
    arrived = participant.arrived
    if participant.joining or participant.away or not turn.is_up(member.name, member.incarnation):
        return False
    if participant.incarnation != member.incarnation or arrived is None:
        return participant.incarnation == member.incarnation and not participant.active
    same = arrived.contribution == member.contribution and bool(arrived.samples) == bool(member.weight_bits)
    return same and is_current(job, participant)
