"""Commits that a journal lost when the coordinator's machine lost power, and that nodes on other machines still have.

Where every step is a round, a COMMIT is written down before it is told, but synced only within a second. So after a
restart the coordinator first asks the nodes what was committed after the last round that its journal knows, and decides
nothing before all have answered or some time has passed. The newest COMMIT that any of them has counts. Nodes say the
whole SEAL and COMMIT of each round: what the journal says afterwards is what it said before.

Newer is the one with the higher (start of the coordinator, round, attempt); the attempts of a start are above all those
of the starts before it. A COMMIT at or below the job's attempt floor belongs to rounds that were voided, or forgotten
for a new base: both are synced before anybody is told.
"""

from notebook_cluster.journal.records import CommitRecord
from notebook_cluster.protocol.rounds import Commit, CommitReport, CommittedRound
from notebook_cluster.rounds.leader.recovery import ask_where, replay_commit
from notebook_cluster.rounds.leader.registration import MOST, has_bits, new_base
from notebook_cluster.rounds.leader.state import ATTEMPT_BITS, JobState, Transition
from notebook_cluster.rounds.numerics.bits import byte_count

_MOST_TEXT = 64


def on_commit_report(transition: Transition, job: JobState, node: str, message: CommitReport) -> None:
    """Answer to CommitQuery; one to that of an earlier start says nothing of what was committed since."""
    if job.reporting is None or message.start != transition.state.attempts:
        return
    rounds = tuple(message.rounds)
    if not all(_is_possible(transition, job, row) for row in rounds):
        transition.tell(
            "warning", f"what {node!r} says of the committed rounds of {job.name!r} cannot be: it is not used"
        )
        rounds = ()
    job.reports = {**job.reports, node: rounds}
    job.reporting -= {node}


def settle_reports(transition: Transition, job: JobState) -> bool:
    """Go on where the journal, or the newest of the reports, ends. False while reports are waited for."""
    if job.reporting is None:
        return True
    if job.reporting:
        return False
    reporters = frozenset(job.reports)
    _take_up(transition, job)
    job.reporting, job.reports = None, {}
    ask_where(transition, job, reporters)
    return True


def _take_up(transition: Transition, job: JobState) -> None:
    newer = [rows for rows in job.reports.values() if _is_newer(job, rows)]
    rows = max(newer, key=lambda rows: _age(rows[-1].commit), default=())
    if not rows:
        return
    before, last = job.round, rows[-1].commit
    for row in rows:
        if row.seal.base_hash != job.state_hash or row.commit.round != job.round + 1:
            break
        _write_again(transition, job, row)
    if job.round != last.round:  # whoever has the newest one came to it without all those before
        new_base(transition, job, last.round, last.state_hash)
        job.last_commit = last
    which = f"round {last.round}" if last.round == before + 1 else f"rounds {before + 1} to {last.round}"
    transition.tell(
        "warning",
        f"the journal lost {which} of {job.name!r}, as when a machine loses power: it goes on from what the nodes have",
    )


def _is_possible(transition: Transition, job: JobState, row: CommittedRound) -> bool:
    """The coordinator may have decided this, and it can be written down."""
    seal, commit = row.seal, row.commit
    numbers = [seal.fragment, *(number for piece in seal.slices for number in (piece.start, piece.stop))]
    numbers += [number for member in seal.members for number in (member.incarnation, member.contribution)]
    texts = [commit.state_hash, seal.base_hash, *row.slice_hashes]
    return (
        seal.job == commit.job == job.name
        and (seal.round, seal.attempt, seal.fragment, seal.last)
        == (commit.round, commit.attempt, commit.fragment, commit.last)
        and 0 < commit.round < MOST
        and 0 < commit.attempt <= transition.state.attempts
        and commit.members == [member.name for member in seal.members if member.weight_bits]
        and {member.name for member in seal.members} <= job.participants.keys()
        and {piece.owner for piece in seal.slices} <= job.participants.keys()
        and all(0 <= member.weight_bits < 1 << 32 for member in seal.members)
        and all(0 <= number < MOST for number in numbers)
        and has_bits(seal.outer)
        and len(row.slice_hashes) == len(seal.slices)
        and all(len(text) <= _MOST_TEXT for text in texts)
        and len(seal.gradients) <= byte_count(len(job.settings.schema))
    )


def _is_newer(job: JobState, rows: tuple[CommittedRound, ...]) -> bool:
    """They end with a COMMIT of this job's state that is newer than the last one in the journal."""
    if not rows or rows[-1].commit.round <= job.round or rows[-1].commit.attempt <= job.attempt_floor:
        return False
    return job.last_commit is None or _age(rows[-1].commit) > _age(job.last_commit)


def _age(commit: Commit) -> tuple[int, int, int]:
    return commit.attempt >> ATTEMPT_BITS, commit.round, commit.attempt


def _write_again(transition: Transition, job: JobState, row: CommittedRound) -> None:
    record = CommitRecord(
        job=job.name,
        commit=row.commit,
        members=row.seal.members,
        slices=row.seal.slices,
        slice_hashes=row.slice_hashes,
        base_hash=row.seal.base_hash,
        outer=row.seal.outer,
        bytes_sent=job.bytes_sent,
        bytes_data_parallel=job.bytes_data_parallel,
        hash_mismatches=job.hash_mismatches,
    )
    transition.log(record, durable=False)
    job.highest_attempt = max(job.highest_attempt, row.commit.attempt)
    replay_commit(job, record)
