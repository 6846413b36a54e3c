"""Rounds that wait for somebody to arrive: who is there, and who is not."""

from typing import NamedTuple

from notebook_cluster.rounds.leader.gathering import required
from notebook_cluster.rounds.leader.state import Job, RoundsState, Turn, is_current


class Gathering(NamedTuple):
    """A round that is sealed when those who are ``missing`` have arrived."""

    round: int
    here: frozenset[str]
    missing: frozenset[str]
    any_will_do: bool
    """A quorum may be reached without some of them."""


def gatherings(state: RoundsState) -> dict[str, Gathering]:
    """The jobs whose next round waits for nothing but arrivals, however long that takes."""
    turn, found = Turn(state), {}
    for name, job in state.jobs.items():
        gathering = _gathering(turn, job)
        if gathering is not None:
            found[name] = gathering
    return found


def _gathering(turn: Turn, job: Job) -> Gathering | None:
    """None where it is about to go on: an attempt is open, a grace runs, or it is not known yet who is there."""
    busy = job.awaited or job.registering or job.open is not None or job.quorum_since is not None
    if busy or not job.has_state or job.orphan_since is not None:
        return None
    names = required(turn, job)
    here = frozenset(name for name in names if is_current(job, job.participants[name]))
    missing = frozenset(names) - here
    if not here or not missing:
        return None
    return Gathering(job.round + 1, here, missing, job.settings.quorum is not None)
