"""From arrivals to COMMIT: sealing, losses, what PREPARED nodes agree on.

Nothing here reacts to a message by itself: handlers note facts, ``settle_attempt`` looks at all of them and decides, so the order in
which losses and messages come makes no difference to the rules.
"""

from statistics import median

from msgspec import structs, to_builtins

from notebook_cluster.coordinator.jobs import Job, Open, Turn, change, is_current, live
from notebook_cluster.protocol.rounds import (
    Arrived,
    Commit,
    Complete,
    Finished,
    Member,
    OuterSettings,
    Prepared,
    Refused,
    RegisterRefused,
    Seal,
    Slice,
    Stalled,
)
from notebook_cluster.training.outer_settings import default_outer_lr, float_bits

KEPT_HASHES = 256
"""Committed rounds whose hash is remembered: how far back a node's state is recognised."""


# ---- what members say ----------------------------------------------------------------------------------------


def on_arrived(turn: Turn, job: Job, node: str, message: Arrived) -> None:
    participant = job.participants[node]
    register = participant.register
    if register.cell != job.cell or participant.joining:
        return
    if (message.schema_hash, message.codec) != (register.schema_hash, register.codec):
        reason = f"the model of {node!r} changed after it registered: make the sync object again"
        change(job, node, active=False, arrived=None)
        turn.send(node, RegisterRefused(job=job.name, reason=reason))
        return
    # an Arrived from a node that was sent to a source asks for another one
    asked = participant.asked + 1 if participant.fetching else participant.asked
    held = (message.round - 1, message.base_hash)
    if participant.active and participant.held is not None and participant.held[0] > held[0]:
        held = participant.held  # it crossed the COMMIT that is on its way there
    if message.contribution == participant.refused:  # it crossed the Refused that is on its way there
        message = structs.replace(message, samples=0.0, steps=0, finite=True, norm=0.0)
    change(job, node, arrived=message, active=True, fetching=None, asked=asked, held=held)
    if not message.finite:
        refuse(
            turn,
            job,
            node,
            f"the work of {node!r} for round {message.round} holds NaN or infinity: lower its learning rate",
        )


def refuse(turn: Turn, job: Job, node: str, reason: str) -> None:
    """Its contribution is not used; it stays in the round as a receiver."""
    arrived = job.participants[node].arrived
    if arrived is None:
        return
    if not arrived.samples:
        return
    change(
        job, node, refused=arrived.contribution,
        arrived=structs.replace(arrived, samples=0.0, steps=0, finite=True, norm=0.0),
    )  # fmt: skip
    turn.send(
        node,
        Refused(
            job=job.name, round=arrived.round, reason=reason, fragment=arrived.fragment, contribution=arrived.contribution
        ),
    )
    turn.tell("warning", reason)


def on_prepared(turn: Turn, job: Job, node: str, message: Prepared) -> None:
    attempt = job.open
    if attempt is None or (message.round, message.attempt) != (attempt.seal.round, attempt.seal.attempt):
        return
    if any(m.name == node and m.incarnation == message.incarnation for m in attempt.seal.members):
        stalled = {name: report for name, report in attempt.stalled.items() if name != node}
        job.open = structs.replace(
            attempt, prepared={**attempt.prepared, node: message}, stalled=stalled,
            stalled_since=attempt.stalled_since if stalled else None,
        )  # fmt: skip


def on_stalled(turn: Turn, job: Job, node: str, message: Stalled) -> None:
    attempt = job.open
    if attempt is None or (message.round, message.attempt) != (attempt.seal.round, attempt.seal.attempt):
        return
    if node not in attempt.waiting or node in attempt.prepared:
        return
    for name in message.not_finite:
        member = next((m for m in attempt.seal.members if m.name == name and m.weight_bits), None)
        arrived = job.participants[name].arrived if member is not None else None
        if member is not None and arrived is not None and arrived.contribution == member.contribution:
            refuse(turn, job, name, f"the work of {name!r} for round {message.round} holds NaN or infinity: it is not used")
    if message.not_finite:
        _seal(turn, job, turn.by_rank(attempt.waiting), attempt.seal.last)
        return
    now = turn.state.now
    stalled = {**attempt.stalled, node: (now, tuple(message.waiting_for))}
    since = now if attempt.stalled_since is None else attempt.stalled_since
    job.open = structs.replace(attempt, stalled=stalled, stalled_since=since, sources=())


# ---- deciding ------------------------------------------------------------------------------------------------


def settle_attempt(turn: Turn, job: Job) -> None:
    """Look at the open attempt, then at the arrivals, until nothing changes."""
    if job.registering or not job.has_state:
        return
    if job.open is not None:
        _settle_open(turn, job, job.open)
    if job.open is None:
        _settle_arrivals(turn, job)


def required(turn: Turn, job: Job) -> list[str]:
    """Nodes whose arrival the next SEAL waits for: those that hold the last committed state, and before a cell's first round also
    those that are still fetching it."""
    now, most = (job.round, job.state_hash), turn.state.settings.fetch_attempts
    return [
        name for name in live(turn, job)
        if (p := job.participants[name]).held == now and not p.joining or (name in job.cohort and p.asked < most)
    ]  # fmt: skip


def _settle_arrivals(turn: Turn, job: Job) -> None:
    names = required(turn, job)
    if not names or not all(is_current(job, job.participants[name]) for name in names):
        return
    _refuse_out_of_scale(turn, job, names)
    arrivals = [arrived for name in names if (arrived := job.participants[name].arrived) is not None]
    finishing = all(arrived.finishing for arrived in arrivals)
    most = turn.state.settings.fetch_attempts
    coming = [name for name in live(turn, job) if name not in names and job.participants[name].asked < most]
    if not finishing or any(arrived.samples for arrived in arrivals):
        _seal(turn, job, names, finishing and not coming)
    elif not coming:
        for name in names:
            turn.send(name, Finished(job=job.name, round=job.round))
            change(job, name, active=False, arrived=None)


def _refuse_out_of_scale(turn: Turn, job: Job, names: list[str]) -> None:
    norms = {name: a.norm for name in names if (a := job.participants[name].arrived) is not None and a.samples}
    factor = turn.state.settings.norm_factor
    if len(norms) < 3:
        return
    for name, norm in norms.items():
        usual = median(other for key, other in norms.items() if key != name)
        if usual > 0 and norm > factor * usual:
            refuse(
                turn, job, name,
                f"the work of {name!r} for round {job.round + 1} is out of scale (norm {norm:.3g}, median of the others "
                f"{usual:.3g}): it is not used",
            )  # fmt: skip


def _seal(turn: Turn, job: Job, names: list[str], last: bool) -> None:
    """Log and send the next attempt of the round over ``names`` (rank order), weights by samples."""
    job.attempt += 1
    job.highest_attempt = max(job.highest_attempt, job.attempt)
    arrivals = {name: a for name in names if (a := job.participants[name].arrived) is not None}
    total = sum(arrived.samples for arrived in arrivals.values())
    members = [
        Member(
            name=name, incarnation=job.participants[name].incarnation,
            weight_bits=float_bits(arrived.samples / total) if total else 0, contribution=arrived.contribution,
        )
        for name, arrived in arrivals.items()
    ]  # fmt: skip
    owners = [member.name for member in members if member.weight_bits]
    settings = job.settings
    lr_bits = float_bits(default_outer_lr(len(owners))) if settings.lr_bits is None else settings.lr_bits
    seal = Seal(
        job=job.name, round=job.round + 1, attempt=job.attempt, members=members,
        slices=_slices(owners, settings.blocks, turn.state.settings.one_owner_blocks),
        outer=OuterSettings(lr_bits=lr_bits, momentum_bits=settings.momentum_bits, nesterov=settings.nesterov),
        base_hash=job.state_hash, last=last,
    )  # fmt: skip
    turn.log("seal", job, seal=to_builtins(seal))
    job.open = Open(seal, frozenset(arrivals))
    for member in members:
        turn.send(member.name, seal)


def _slices(owners: list[str], blocks: int, one_owner_blocks: int) -> list[Slice]:
    """Whole codec blocks, the same number for every owner give or take one; few blocks have a single owner."""
    if not owners or not blocks:
        return []
    owners = owners[:1] if blocks < one_owner_blocks else owners[:blocks]
    edges = [blocks * index // len(owners) for index in range(len(owners) + 1)]
    return [Slice(owner=owner, start=edges[i], stop=edges[i + 1]) for i, owner in enumerate(owners)]


def _settle_open(turn: Turn, job: Job, attempt: Open) -> None:
    """Losses first, then agreement."""
    seal = attempt.seal
    there = [member.name for member in seal.members if _is_there(turn, job, member)]
    waiting = attempt.waiting & {name for name in there if job.participants[name].arrived is not None}
    reports = _stand_still(turn, attempt, waiting)
    waiting -= _left_out(turn, attempt, waiting, reports)
    if not waiting:
        job.open = None
        return
    # nodes that left still serve what they have, unless it turns out that they do not
    sources = tuple(turn.by_rank(n for n in there if n in attempt.prepared and (n in waiting or not reports)))
    lost = len(waiting) < len(seal.members)
    if lost and not sources:
        # nobody alive has all means, so nobody can come to have applied them: the same work, shared out anew
        _reseal(turn, job, turn.by_rank(waiting), seal.last)
        return
    job.open = attempt = structs.replace(attempt, waiting=waiting)
    unprepared = [name for name in turn.by_rank(waiting) if name not in attempt.prepared]
    if not unprepared:
        _agree(turn, job, attempt)
    elif sources and (lost or attempt.stalled) and sources != attempt.sources:
        job.open = structs.replace(attempt, sources=sources)
        for name in unprepared:
            turn.send(name, Complete(job=job.name, round=seal.round, attempt=seal.attempt, sources=list(sources)))


def _is_there(turn: Turn, job: Job, member: Member) -> bool:
    """It is reachable and still has in hand what it had when the attempt was sealed; it may have left the rounds."""
    participant = job.participants[member.name]
    arrived = participant.arrived
    if participant.joining or not turn.is_up(member.name, member.incarnation):
        return False
    if participant.incarnation != member.incarnation or arrived is None:
        return participant.incarnation == member.incarnation and not participant.active
    same = arrived.contribution == member.contribution and bool(arrived.samples) == bool(member.weight_bits)
    return same and is_current(job, participant)


def _reseal(turn: Turn, job: Job, names: list[str], last: bool) -> None:
    """The next attempt over those who are left; without any samples left in it the arrivals decide again."""
    names = [name for name in names if is_current(job, job.participants[name])]
    if any(a.samples for name in names if (a := job.participants[name].arrived) is not None):
        _seal(turn, job, names, last)
    else:
        job.open = None


def _stand_still(turn: Turn, attempt: Open, waiting: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Who is waited for by whom, when the exchange has stood still for longer than a moment; else empty."""
    settings, now = turn.state.settings, turn.state.now
    if attempt.stalled_since is None or now - attempt.stalled_since < settings.stall_grace:
        return {}
    reports = {name: names for name, (when, names) in attempt.stalled.items() if name in waiting and now - when <= 4.0}
    silent = waiting - reports.keys() - attempt.prepared.keys()
    return {} if silent and now - attempt.stalled_since < settings.silent_grace else reports


def _left_out(
    turn: Turn, attempt: Open, waiting: frozenset[str], reports: dict[str, tuple[str, ...]]
) -> frozenset[str]:
    """Who is no longer waited for. Out of a round is not lost."""
    if not reports:
        return frozenset()
    if waiting & attempt.prepared.keys():
        out = frozenset(reports)  # the means exist, but cannot get there
    else:
        named = [name for names in reports.values() for name in names if name in waiting]
        # one that itself waits for somebody is the victim, unless everybody does
        blamed = [name for name in named if name not in reports] or named
        worst = max(turn.by_rank(set(blamed)), key=lambda n: (blamed.count(n), turn.state.nodes[n].rank), default=None)
        out = frozenset() if worst is None else frozenset({worst})
    for name in turn.by_rank(out):
        turn.tell("warning", f"round {attempt.seal.round} goes on without {name!r}: its numbers do not get through")
    return out


# ---- COMMIT --------------------------------------------------------------------------------------------------


def _agree(turn: Turn, job: Job, attempt: Open) -> None:
    """Everybody waited for is PREPARED: the state that most of them computed is committed."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in turn.by_rank(attempt.waiting):
        said = attempt.prepared[name]
        groups.setdefault((said.state_hash, *said.slice_hashes), []).append(name)
    winner = max(
        groups, key=lambda key: len(groups[key])
    )  # of equally many the one with the lowest rank, which is first
    for key, names in groups.items():
        for name in names if key != winner else ():
            job.hash_mismatches += 1
            turn.tell("error", _mismatch(attempt, name, key, winner, groups[winner][0]))
    _commit(turn, job, attempt, winner)


def _mismatch(attempt: Open, name: str, key: tuple[str, ...], winner: tuple[str, ...], source: str) -> str:
    owners = [
        s.owner for s, mine, theirs in zip(attempt.seal.slices, key[1:], winner[1:], strict=False) if mine != theirs
    ]
    where = f" (the mean it got from {', '.join(map(repr, owners))} differs)" if owners else ""
    return (
        f"{name!r} computed another state for round {attempt.seal.round}{where}: {key[0][:8]} instead of {winner[0][:8]}; "
        f"it takes the state from {source!r}"
    )


def _commit(turn: Turn, job: Job, attempt: Open, agreed: tuple[str, ...]) -> None:
    seal, state_hash = attempt.seal, agreed[0]
    counted = [member.name for member in seal.members if member.weight_bits]
    commit = Commit(
        job=job.name, round=seal.round, attempt=seal.attempt, state_hash=state_hash, members=counted, last=seal.last
    )
    turn.log(
        "commit", job, commit=to_builtins(commit), members=to_builtins(seal.members), slices=to_builtins(seal.slices),
        slice_hashes=list(agreed[1:]), base_hash=seal.base_hash, outer=to_builtins(seal.outer),
        bytes_sent=job.bytes_sent, bytes_data_parallel=job.bytes_data_parallel, hash_mismatches=job.hash_mismatches,
    )  # fmt: skip
    there = {member.name for member in seal.members if _is_there(turn, job, member)}
    advance_to(job, commit, [member.name for member in seal.members])
    for member in seal.members:
        participant = job.participants[member.name]
        if member.weight_bits and participant.incarnation == member.incarnation:
            change(job, member.name, counted=seal.round)
        said = attempt.prepared.get(member.name)
        if member.name not in there or said is None or (said.state_hash, *said.slice_hashes) != agreed:
            continue
        turn.send(member.name, commit)
        still_in = participant.active and not seal.last
        change(job, member.name, held=(job.round, state_hash), arrived=None, active=still_in, asked=0)


def advance_to(job: Job, commit: Commit, members: list[str]) -> None:
    """The job's state is the one of ``commit``."""
    job.round, job.state_hash, job.last_commit = commit.round, commit.state_hash, commit
    chain = {**job.chain, commit.round: commit.state_hash}
    job.chain = {number: value for number, value in chain.items() if number > commit.round - KEPT_HASHES}
    job.open, job.attempt, job.members, job.orphan_since = None, job.attempt_floor, tuple(members), None
