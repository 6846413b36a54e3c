"""From arrivals to COMMIT: sealing, losses, what PREPARED nodes agree on, and how that becomes the state of the job.

Nothing here reacts to a message by itself: handlers note facts, ``settle_attempt`` looks at all of them and decides,
so the order in which losses and messages come makes no difference to the rules.
"""

from msgspec import structs

from notebook_cluster.journal.kept_rounds import KEPT_HASHES
from notebook_cluster.journal.records import CommitRecord, EndedRecord, SealRecord
from notebook_cluster.protocol.rounds import (
    MOST_MISSED,
    CatchUp,
    Commit,
    CompleteAttempt,
    Finished,
    Member,
    OuterSettings,
    Seal,
    Slice,
    fragment_of,
)
from notebook_cluster.rounds.leader.alike import tell_same_work, tell_unchanged, tell_unlike_steps
from notebook_cluster.rounds.leader.arrivals import (
    gathered,
    hold_arrivals,
    is_there,
    outer_settings,
    refuse_out_of_scale,
    some_left_at_stop,
)
from notebook_cluster.rounds.leader.state import (
    JobState,
    OpenAttempt,
    RoundsSettings,
    Transition,
    change,
    is_current,
    live,
)
from notebook_cluster.rounds.leader.unlike import (
    Outcome,
    agreed,
    stop,
    tell_mismatches,
    tell_once_more,
)
from notebook_cluster.rounds.numerics.bits import any_of, float_bits

# ---- deciding ------------------------------------------------------------------------------------------------


def settle_attempt(transition: Transition, job: JobState) -> None:
    """Look at the open attempt, then at the arrivals, until nothing changes."""
    if job.registering or not job.has_state:
        return
    if job.open is not None:
        _settle_open(transition, job, job.open)
    if job.open is None and some_left_at_stop(transition, job):
        hold_arrivals(transition, job)
    elif job.open is None:
        _settle_arrivals(transition, job)


def _settle_arrivals(transition: Transition, job: JobState) -> None:
    names = gathered(transition, job)
    if not names:
        return
    refuse_out_of_scale(transition, job, names)
    arrivals = [arrived for name in names if (arrived := job.participants[name].arrived) is not None]
    finishing = all(arrived.finishing for arrived in arrivals)
    if not finishing or any(arrived.samples or arrived.more for arrived in arrivals):
        _seal(transition, job, names)
    elif not _coming(transition, job, names):
        if not job.ended:
            transition.log(EndedRecord(job.name))
        job.ended = True
        for name in names:
            transition.send_to(name, Finished(job=job.name, round=job.round))
            change(job, name, active=False, arrived=None)


def _coming(transition: Transition, job: JobState, names: list[str]) -> bool:
    """Some other live node is still on its way into the rounds: whoever finishes waits for it."""
    most = transition.state.settings.fetch_attempts
    return any(name not in names and job.participants[name].asked < most for name in live(transition, job))


def _seal(transition: Transition, job: JobState, names: list[str]) -> None:
    """Log and send the next attempt of the round over ``names`` (rank order), weights by samples."""
    job.attempt += 1
    job.highest_attempt = max(job.highest_attempt, job.attempt)
    arrivals = {name: a for name in names if (a := job.participants[name].arrived) is not None}
    total = sum(arrived.samples for arrived in arrivals.values())
    members = [
        Member(
            name=name,
            incarnation=job.participants[name].incarnation,
            weight_bits=float_bits(arrived.samples / total) if total else 0,
            contribution=arrived.contribution,
        )
        for name, arrived in arrivals.items()
    ]
    owners = counted = [member.name for member in members if member.weight_bits]
    if owners and job.settings.mode == "server":
        owners = [_server(job, members)]
    settings, fragment = job.settings, fragment_of(job.round + 1, job.settings.fragments)
    blocks = settings.fragment_blocks[fragment] if settings.fragment_blocks else settings.blocks
    ending = all(arrived.finishing and not arrived.more for arrived in arrivals.values())
    job.quorum_since = None
    tell_unlike_steps(transition, job, arrivals)
    tell_unchanged(transition, job, arrivals)
    tell_same_work(transition, job, arrivals)
    seal = Seal(
        job=job.name,
        round=job.round + 1,
        attempt=job.attempt,
        members=members,
        slices=_slices(owners, blocks, transition.state.settings, whole=job.settings.mode == "server"),
        outer=outer_settings(transition, job, arrivals, len(counted)),
        base_hash=job.state_hash,
        fragment=fragment,
        last=ending and not _coming(transition, job, names),
        gradients=any_of(arrivals[name].gradients for name in counted),
    )
    # A SEAL that is lost with the machine's power leaves the round as it was before it: nobody applies anything before
    # the COMMIT, and the attempts of the next start of the coordinator are higher than all of this one.
    transition.log(SealRecord(job.name, seal), durable=False)
    job.open = OpenAttempt(seal, frozenset(arrivals))
    for member in members:
        transition.send_to(member.name, seal)


def _server(job: JobState, members: list[Member]) -> str:
    """The node that owns the only slice and steps for all: whoever did so last, for it has the optimiser's state; else
    the lowest rank, with work of its own or not."""
    names = [member.name for member in members]
    return job.server if job.server in names else names[0]


def _slices(owners: list[str], blocks: int, settings: RoundsSettings, whole: bool) -> list[Slice]:
    """Whole codec blocks, nearly the same number in each slice and as many slices for every owner. Few blocks have a
    single owner, and so, in one slice, has what an optimiser needs as a ``whole``."""
    if not owners or not blocks:
        return []
    owners = owners[:1] if blocks < settings.one_owner_blocks else owners[:blocks]
    each = 1 if whole else max(1, min(settings.slices_each, blocks // (len(owners) * settings.slice_blocks)))
    count = len(owners) * each
    edges = [blocks * index // count for index in range(count + 1)]
    return [Slice(owner=owners[index // each], start=edges[index], stop=edges[index + 1]) for index in range(count)]


def _settle_open(transition: Transition, job: JobState, attempt: OpenAttempt) -> None:
    """Losses first, then agreement."""
    seal = attempt.seal
    there = [member.name for member in seal.members if is_there(transition, job, member)]
    waiting = attempt.waiting & {name for name in there if job.participants[name].arrived is not None}
    if attempt.broken:
        _seal(transition, job, transition.by_rank(attempt.waiting))
        return
    reports = _stand_still(transition, attempt, waiting)
    waiting -= _left_out(transition, attempt, waiting, reports)
    if not waiting:
        job.open = None
        return
    # nodes that left still serve what they have, unless it turns out that they do not
    sources = tuple(transition.by_rank(n for n in there if n in attempt.prepared and (n in waiting or not reports)))
    lost = len(waiting) < len(seal.members)
    if lost and not sources and some_left_at_stop(transition, job):
        job.open = None  # what the others have contributed is held
        return
    if lost and not sources:
        # nobody alive has all means, so nobody can come to have applied them: the same work, shared out anew
        _reseal(transition, job, transition.by_rank(waiting))
        return
    job.open = attempt = structs.replace(attempt, waiting=waiting)
    unprepared = [name for name in transition.by_rank(waiting) if name not in attempt.prepared]
    if not unprepared:
        _agree(transition, job, attempt)
    elif sources and (lost or attempt.stalled) and sources != attempt.sources:
        job.open = structs.replace(attempt, sources=sources)
        for name in unprepared:
            transition.send_to(
                name,
                CompleteAttempt(
                    job=job.name,
                    round=seal.round,
                    attempt=seal.attempt,
                    sources=list(sources),
                    fragment=seal.fragment,
                ),
            )


def _agree(transition: Transition, job: JobState, attempt: OpenAttempt) -> None:
    """Everybody waited for is PREPARED. Where they computed different states and no more than half agree, the same
    work is shared out anew, once."""
    seal, outcome = attempt.seal, agreed(transition, attempt)
    if outcome is not None:
        commit(transition, job, attempt, outcome)
    elif job.unlike != (seal.round, seal.base_hash):
        job.unlike = (seal.round, seal.base_hash)
        tell_once_more(transition, job, attempt)
        _seal(transition, job, transition.by_rank(attempt.waiting))
    else:
        stop(transition, job, attempt)


def _reseal(transition: Transition, job: JobState, names: list[str]) -> None:
    """The next attempt over those who are left; without any samples left in it the arrivals decide again."""
    names = [name for name in names if is_current(job, job.participants[name])]
    if any(a.samples for name in names if (a := job.participants[name].arrived) is not None):
        _seal(transition, job, names)
    else:
        job.open = None


def _stand_still(transition: Transition, attempt: OpenAttempt, waiting: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Who is waited for by whom, when the exchange has stood still for longer than a moment; else empty."""
    settings, now = transition.state.settings, transition.state.now
    if attempt.stalled_since is None or now - attempt.stalled_since < settings.stall_grace:
        return {}
    reports = {name: names for name, (when, names) in attempt.stalled.items() if name in waiting and now - when <= 4.0}
    silent = waiting - reports.keys() - attempt.prepared.keys()
    return {} if silent and now - attempt.stalled_since < settings.silent_grace else reports


def _left_out(
    transition: Transition, attempt: OpenAttempt, waiting: frozenset[str], reports: dict[str, tuple[str, ...]]
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
        worst = max(
            transition.by_rank(set(blamed)),
            key=lambda n: (blamed.count(n), transition.state.nodes[n].rank),
            default=None,
        )
        out = frozenset() if worst is None else frozenset({worst})
    for name in transition.by_rank(out):
        transition.tell(
            "warning", f"round {attempt.seal.round} goes on without {name!r}: its numbers do not get through"
        )
    return out


KEPT_ROUNDS = 4
"""As many as members keep the means of, but for a node that is sent the state."""


def commit(transition: Transition, job: JobState, attempt: OpenAttempt, agreed: Outcome) -> None:
    """The state that more than half of the PREPARED members computed is the job's."""
    tell_mismatches(transition, job, attempt, agreed)
    seal, state_hash = attempt.seal, agreed[0]
    counted = [member.name for member in seal.members if member.weight_bits]
    message = Commit(
        job=job.name,
        round=seal.round,
        attempt=seal.attempt,
        state_hash=state_hash,
        members=counted,
        fragment=seal.fragment,
        last=seal.last,
    )
    transition.log(
        CommitRecord(
            job=job.name,
            commit=message,
            members=seal.members,
            slices=seal.slices,
            slice_hashes=list(agreed[1:]),
            base_hash=seal.base_hash,
            outer=seal.outer,
            bytes_sent=job.bytes_sent,
            bytes_data_parallel=job.bytes_data_parallel,
            hash_mismatches=job.hash_mismatches,
        ),
        # where every step is a round, nodes are asked for what was lost (:mod:`.lost_commits`)
        durable=not job.settings.every_step,
    )
    there = {member.name for member in seal.members if is_there(transition, job, member)}
    advance_to(job, message, [member.name for member in seal.members], seal.slices, seal.outer)
    for member in seal.members:
        participant = job.participants[member.name]
        if member.weight_bits and participant.incarnation == member.incarnation:
            change(job, member.name, counted=seal.round)
        said = attempt.prepared.get(member.name)
        if member.name not in there or said is None or (said.state_hash, *said.slice_hashes) != agreed:
            continue
        transition.send_to(member.name, message)
        still_in = participant.active and not seal.last
        change(job, member.name, held=(job.round, state_hash), arrived=None, active=still_in, asked=0)


def advance_to(job: JobState, commit: Commit, members: list[str], slices: list[Slice], outer: OuterSettings) -> None:
    """The job's state is the one of ``commit``."""
    job.round, job.state_hash, job.last_commit = commit.round, commit.state_hash, commit
    chain = {**job.chain, commit.round: commit.state_hash}
    job.chain = {number: value for number, value in chain.items() if number > commit.round - KEPT_HASHES}
    missed = CatchUp(
        round=commit.round,
        attempt=commit.attempt,
        slices=slices,
        outer=outer,
        state_hash=commit.state_hash,
        senders=len(commit.members),
    )
    job.recent = (*job.recent, missed)[-(KEPT_ROUNDS if job.settings.every_step else MOST_MISSED) :]
    job.server = slices[0].owner if slices else job.server
    job.ended = job.ended or commit.last
    job.open, job.attempt, job.members, job.orphan_since = None, job.attempt_floor, tuple(members), None
