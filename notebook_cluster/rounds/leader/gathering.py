"""Whose arrivals make up the next round: those of all, or of a quorum once its grace is over; and the outer settings.

Whoever is late is not lost: its work goes into the round after (:func:`.registration.settle_sources`).
"""

import math

from notebook_cluster.protocol.rounds import Arrived, Close, OuterChange, OuterSettings
from notebook_cluster.rounds.leader.state import Job, Turn, is_current, live
from notebook_cluster.rounds.numerics.outer_settings import bits_float, default_outer_lr, float_bits


def required(turn: Turn, job: Job) -> list[str]:
    """Nodes whose arrival the next SEAL waits for: those that hold the last committed state or are about to, and before
    a cell's first round also those that are still fetching it. Where every step is a round, nobody could catch up with
    the others: they wait for whoever fetches."""
    most = turn.state.settings.fetch_attempts
    cohort = frozenset(job.participants) if job.settings.every_step else job.cohort
    return [
        name
        for name in live(turn, job)
        if _is_on(job, name) or (name in cohort and job.participants[name].asked < most)
    ]


def _is_on(job: Job, name: str) -> bool:
    """It holds the last committed state, by its word or by what was sent to it, or took part in the last round and has
    not said anything since that shows it behind. Its sync object may just have been made again: the answer to that is
    on its way. Whoever is behind or sent to a source is not waited for."""
    participant = job.participants[name]
    if participant.held == (job.round, job.state_hash):
        return not participant.joining or participant.fetching is None
    silent = participant.arrived is None and participant.fetching is None
    return name in job.members and silent and not participant.joining


def gathered(turn: Turn, job: Job) -> list[str]:
    """The nodes to seal the next round over, in rank order; none while somebody is still waited for."""
    names = required(turn, job)
    here = [name for name in names if is_current(job, job.participants[name])]
    if len(here) == len(names):
        return here
    if not _is_quorum(job, here, len(names)):
        job.quorum_since = None
        return []
    if job.quorum_since is None:
        job.quorum_since = turn.state.now
        _close(turn, job, here)
    return here if turn.state.now - job.quorum_since >= job.settings.grace else []


def _is_quorum(job: Job, here: list[str], nodes: int) -> bool:
    """Enough of them are at the boundary, with some work to exchange."""
    quorum = job.settings.quorum
    if quorum is None or not any(a.samples for name in here if (a := job.participants[name].arrived) is not None):
        return False
    wanted = math.ceil(quorum * nodes) if isinstance(quorum, float) else min(quorum, nodes)
    return len(here) >= wanted


def _close(turn: Turn, job: Job, here: list[str]) -> None:
    """Whoever is between two boundaries comes with the steps it has."""
    for name in live(turn, job):
        participant = job.participants[name]
        if name not in here and not participant.joining and participant.arrived is None:
            turn.send(name, Close(job=job.name, round=job.round + 1))


def outer_settings(turn: Turn, job: Job, arrivals: dict[str, Arrived], owners: int) -> OuterSettings:
    """Of the next round, which ``owners`` nodes contribute to. ``arrivals`` are in rank order."""
    settings = job.settings
    registered = OuterChange(lr_bits=settings.lr_bits, momentum_bits=settings.momentum_bits)
    wanted = {name: arrived.outer for name, arrived in arrivals.items() if arrived.outer is not None}
    leader, chosen = next(iter(wanted.items()), ("", registered))
    differ = tuple(name for name, change in wanted.items() if change != chosen)
    if differ and differ != job.outer_differs:
        turn.tell(
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
