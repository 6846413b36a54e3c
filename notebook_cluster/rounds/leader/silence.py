"""Nodes that make no progress: left out of the rounds of a job until something is heard of them again.

To the rounds such a node is one whose link is lost: its work stays with it, and it is asked where it is when it is
back. Nobody else hears of it, it keeps its rank and its place in the cell. How long it has been silent is measured by
:mod:`notebook_cluster.coordinator.rounds.progress`.
"""

from notebook_cluster.protocol.rounds import RoundQuery
from notebook_cluster.protocol.runs import LEAST_PATIENCE, PATIENCE
from notebook_cluster.rounds.leader.state import JobState, Transition, change, holders

SHARE = 0.8
"""The share of the patience that is used: a sign of life is up to a second old when it comes, and what follows takes a
moment, too."""


def limit(patience: float) -> float:
    """Seconds of silence after which a node is left out, so that nobody waits longer than ``patience``."""
    usable = patience >= LEAST_PATIENCE  # what comes from a node may be any number, or none
    return SHARE * (patience if usable else PATIENCE)


def settle_silence(transition: Transition, job: JobState, silent: dict[str, tuple[float, str]]) -> None:
    """``silent``: node -> (seconds without a sign of progress, why as far as it is known); others were just heard.

    While a cell's nodes register they are given the time that this takes. So they are after a restart of the
    coordinator, until a node has said that it holds the last committed state: from then on nobody else is needed.
    """
    if job.registering or (job.awaited and not holders(transition, job)):
        return
    for name, participant in list(job.participants.items()):
        if not transition.is_up(name, participant.incarnation):
            continue
        seconds, why = silent.get(name, (0.0, ""))
        is_silent = seconds >= limit(job.settings.patience)
        if is_silent and not participant.away:
            _leave_out(transition, job, name, seconds, why)
        elif participant.away and not is_silent:
            _take_back(transition, job, name)


def _leave_out(transition: Transition, job: JobState, name: str, seconds: float, why: str) -> None:
    participant, awaited = change(job, name, away=True), name in job.awaited
    job.awaited -= {name}
    let_others_ask(job, name)
    if participant.active or participant.joining or awaited:
        transition.tell(
            "warning",
            f"{name!r} has made no progress for {seconds:.0f} s{f' ({why})' if why else ''}: the rounds of "
            f"{job.name!r} go on without it until it does",
        )


def _take_back(transition: Transition, job: JobState, name: str) -> None:
    """Meanwhile rounds went on, or it did: it is asked where it is."""
    participant = change(job, name, away=False, held=None, arrived=None, fetching=None, asked_where=True)
    transition.send_to(name, RoundQuery(job=job.name))
    if participant.active or participant.joining:
        transition.tell("info", f"{name!r} makes progress again: its work is in a later round of {job.name!r}")


def let_others_ask(job: JobState, name: str) -> None:
    """Whoever fetched the state from ``name`` needs another source, and is not to blame if it asked for one already."""
    for other, participant in list(job.participants.items()):
        if participant.fetching == name:
            change(job, other, fetching=None, asked=0)
