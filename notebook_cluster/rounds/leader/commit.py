"""The end of an attempt: what PREPARED nodes agree on becomes the state of the job."""

from notebook_cluster.journal.kept_rounds import KEPT_HASHES
from notebook_cluster.journal.records import CommitRecord
from notebook_cluster.protocol.rounds import CatchUp, Commit, OuterSettings, Slice
from notebook_cluster.rounds.leader.arrivals import is_there
from notebook_cluster.rounds.leader.state import Job, Open, Turn, change
from notebook_cluster.rounds.leader.unlike import Outcome, tell_mismatches

KEPT_ROUNDS = 4
"""As many as members keep the means of."""


def commit(turn: Turn, job: Job, attempt: Open, agreed: Outcome) -> None:
    """The state that more than half of the PREPARED members computed is the job's."""
    tell_mismatches(turn, job, attempt, agreed)
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
    turn.log(
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
        )
    )
    there = {member.name for member in seal.members if is_there(turn, job, member)}
    advance_to(job, message, [member.name for member in seal.members], seal.slices, seal.outer)
    for member in seal.members:
        participant = job.participants[member.name]
        if member.weight_bits and participant.incarnation == member.incarnation:
            change(job, member.name, counted=seal.round)
        said = attempt.prepared.get(member.name)
        if member.name not in there or said is None or (said.state_hash, *said.slice_hashes) != agreed:
            continue
        turn.send(member.name, message)
        still_in = participant.active and not seal.last
        change(job, member.name, held=(job.round, state_hash), arrived=None, active=still_in, asked=0)


def advance_to(job: Job, commit: Commit, members: list[str], slices: list[Slice], outer: OuterSettings) -> None:
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
    job.recent = (*job.recent, missed)[-KEPT_ROUNDS:]
    job.server = slices[0].owner if slices else job.server
    job.ended = job.ended or commit.last
    job.open, job.attempt, job.members, job.orphan_since = None, job.attempt_floor, tuple(members), None
