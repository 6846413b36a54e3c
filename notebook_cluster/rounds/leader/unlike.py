"""PREPARED nodes that computed different states: who is right, and what people are told.

More than half of those that are PREPARED in the round decide. Fewer cannot: of two that differ either may be the one
whose processor or memory is broken. Then the same work is played once more, and a second time the job stops: its
nodes get an error, and keep the state before the round.
"""

from collections.abc import Mapping

from notebook_cluster.journal.records import StopRecord
from notebook_cluster.protocol.runs import RegisterRefused
from notebook_cluster.rounds.leader.state import JobState, OpenAttempt, Transition, change, live

Outcome = tuple[str, ...]
"""The hash of the next state, then those of the means."""

_MOST_TEXT = 60
_MOST_FACTS = 16


def outcomes(transition: Transition, attempt: OpenAttempt) -> dict[Outcome, list[str]]:
    """What was computed -> who said so, in rank order; members that are lost since then are heard, too."""
    groups: dict[Outcome, list[str]] = {}
    for name in transition.by_rank(attempt.prepared):
        said = attempt.prepared[name]
        groups.setdefault((said.state_hash, *said.slice_hashes), []).append(name)
    return groups


def agreed(transition: Transition, attempt: OpenAttempt) -> Outcome | None:
    """What more than half of the PREPARED members computed, one of which is still there; None: nothing."""
    groups = outcomes(transition, attempt)
    most = max(groups, key=lambda outcome: len(groups[outcome]))
    return most if 2 * len(groups[most]) > len(attempt.prepared) and attempt.waiting & set(groups[most]) else None


def tell_mismatches(transition: Transition, job: JobState, attempt: OpenAttempt, winner: Outcome) -> None:
    """Say who differs from the others, whose state it takes."""
    groups = outcomes(transition, attempt)
    for outcome, names in groups.items():
        for name in names if outcome != winner else ():
            job.hash_mismatches += 1
            source = next(other for other in groups[winner] if other in attempt.waiting)
            transition.tell(
                "error",
                f"{name!r} computed another state for round {attempt.seal.round}{_means(attempt, outcome, winner)}: "
                f"{_short(outcome)}, not {_short(winner)}; it takes the state from {source!r}",
            )


def tell_once_more(transition: Transition, job: JobState, attempt: OpenAttempt) -> None:
    """Nobody has more than half; the same work is about to be shared out anew."""
    job.hash_mismatches += _odd(transition, attempt)
    transition.tell("warning", f"{_who(transition, job, attempt)}, and no more than half agree: it is played again")


def stop(transition: Transition, job: JobState, attempt: OpenAttempt) -> None:
    """The job ends in its cell on every node, whose next sync call says why. What was committed stays."""
    job.hash_mismatches += _odd(transition, attempt)
    reason = (
        f"{_who(transition, job, attempt)}, twice, and no more than half agree: the job stops at round {job.round}. "
        f"{_facts(transition, job, attempt)}; then run the cell again, which goes on from there"
    )
    transition.log(StopRecord(job.name, job.cell, reason))
    transition.tell("error", reason)
    for name in live(transition, job):
        refuse_stopped(transition, job, name, reason)
    job.stopped, job.open = reason, None


def refuse_stopped(transition: Transition, job: JobState, name: str, reason: str) -> None:
    """``name`` takes part no more in this cell; it keeps its state."""
    transition.send_to(name, RegisterRefused(job=job.name, reason=reason, run=job.run))
    change(job, name, active=False, joining=False, fetching=None, arrived=None)


def _odd(transition: Transition, attempt: OpenAttempt) -> int:
    groups = outcomes(transition, attempt)
    return len(attempt.prepared) - max(map(len, groups.values()))


def _who(transition: Transition, job: JobState, attempt: OpenAttempt) -> str:
    """``round 3 of 'model' came out unlike on 'a' (1c5f...) and 'b', 'c' (77aa...)``."""
    groups = outcomes(transition, attempt)
    first = next(iter(groups))
    sides = " and ".join(
        f"{', '.join(map(repr, names))} ({_short(outcome)}){_means(attempt, outcome, first)}"
        for outcome, names in groups.items()
    )
    return f"round {attempt.seal.round} of {job.name!r} came out unlike on {sides}"


def _short(outcome: Outcome) -> str:
    return _printable(outcome[0][:8])


def _means(attempt: OpenAttempt, outcome: Outcome, other: Outcome) -> str:
    pairs = zip(attempt.seal.slices, outcome[1:], other[1:], strict=False)
    owners = dict.fromkeys(piece.owner for piece, mine, theirs in pairs if mine != theirs)
    return f" (the mean it got from {', '.join(map(repr, owners))} differs)" if owners else ""


def _facts(transition: Transition, job: JobState, attempt: OpenAttempt) -> str:
    """In what these nodes differ, as they say themselves, and what to do."""
    names = transition.by_rank(attempt.prepared)
    flushing = [name for name in names if attempt.prepared[name].flushes]
    about: dict[str, Mapping[str, str]] = {
        name: job.participants[name].register.about for name in names if name in job.participants
    }
    parts = []
    for name in flushing:
        parts.append(f"{name!r} rounds subnormal numbers to zero, see torch.set_flush_denormal")
    for fact in dict.fromkeys(fact for row in about.values() for fact in list(row)[:_MOST_FACTS]):
        values = {name: _printable(row[fact]) for name, row in about.items() if fact in row}
        if len(set(values.values())) > 1:
            said = ", ".join(f"{name!r} {value}" for name, value in values.items())
            parts.append(f"{_printable(fact)} differs ({said})")
    if not parts:
        return "They name the same processor and versions, so one of them has a fault (its memory?): remove that one"
    return f"{'; '.join(parts)}: make them alike"


def _printable(text: str) -> str:
    return "".join(filter(str.isprintable, text[:_MOST_TEXT]))
