"""Runs of a job: the sync objects that one cell makes under one name, one after the other, as in a loop over settings.

Each node numbers them as its code comes to them, so a run is the same one on all nodes. One run is on at a time. Who
registers for a later one waits until this one is over on every node that can still be reached; who comes to one that is
over is told so, passes it, and takes part in the next. Running the cell again begins with run 1 of a later cell.
No number is left out: a node that could not even register in a run is in a later one before the others are in this.

:func:`described_settings` says with what a run trains.
"""

from notebook_cluster.journal.records import LaterRecord
from notebook_cluster.protocol.runs import Register, RunOver
from notebook_cluster.rounds.leader.alike import first_time
from notebook_cluster.rounds.leader.state import JobState, Participant, Transition, change, holders, is_reachable
from notebook_cluster.rounds.numerics.bits import bits_float

TELL_AFTER = 5.0
"""Seconds that nodes wait for a run to end on others before those are named."""


def run_of(register: Register) -> tuple[int, int]:
    """Later runs are greater."""
    return register.cell, register.run


def is_in(job: JobState, participant: Participant) -> bool:
    """It registered in the run that the job is on."""
    return run_of(participant.register) == (job.cell, job.run)


def is_over(job: JobState, register: Register) -> bool:
    """Whether ``register`` is for a run of this cell after which the job has gone on to a later one."""
    return register.cell == job.cell and register.run < job.run


def tell_over(transition: Transition, job: JobState, node: str, register: Register) -> None:
    """The node passes this run. Unless it is about to come to the next, it is not waited for until it has caught up."""
    if register.run < job.run:
        job.passing |= {node}
    transition.send_to(node, RunOver(job=job.name, cell=register.cell, run=register.run))


def begin_run(job: JobState, cell: int, run: int, now: float) -> None:
    """Nobody takes part yet; what the nodes hold stays."""
    if cell > job.cell:
        job.later, job.passing = {}, frozenset()
    job.cell, job.run, job.ended, job.stopped, job.unlike = cell, run, False, "", (0, "")
    job.stopping, job.unchanged, job.same_work = frozenset(), {}, (0, (), 0)
    job.registering, job.first_register = True, now
    job.open, job.cohort, job.quorum_since = None, frozenset(), None
    for name in job.participants:
        change(job, name, active=False, joining=False, fetching=None, arrived=None)


def took_part(job: JobState, node: str, incarnation: int, register: Register) -> Participant:
    """The participant that a registration in the job's run makes; it takes the place of what was known."""
    known = job.participants.get(node)
    same = known is not None and known.incarnation == incarnation
    again = known is not None and same and run_of(known.register) == run_of(register)
    late = known.late if known is not None and again else job.ended
    job.ended = job.ended and late
    forget_later(job, node)
    job.passing -= {node}
    participant = Participant(incarnation, register, counted=known.counted if known and same else 0, late=late)
    job.participants[node] = participant
    return participant


def wait_for_run(transition: Transition, job: JobState, node: str, incarnation: int, register: Register) -> None:
    """The node is done with the run that the job is on, and comes to a later one."""
    if job.later.get(node) != (incarnation, register):
        transition.log(LaterRecord(job.name, node, incarnation, register))
    if not job.later:
        job.later_since = transition.state.now
    job.later = {**job.later, node: (incarnation, register)}
    job.passing -= {node}
    known = job.participants.get(node)
    if known is not None and known.incarnation == incarnation:
        held = (register.round, register.state_hash) if register.holds_state else None
        change(job, node, active=False, joining=False, arrived=None, fetching=None, held=held)


def forget_later(job: JobState, node: str) -> None:
    """It waits for no later run any more."""
    job.later = {name: entry for name, entry in job.later.items() if name != node}


def missing_registrants(transition: Transition, job: JobState) -> list[str]:
    """Nodes that run the job's cell, make progress, and have not come to this run of it. Who was in none before may be
    in none at all: it is waited for once, in the first."""
    if not job.registering or transition.state.cell != job.cell:
        return []
    nodes = transition.state.nodes
    expected = transition.state.running
    if job.run > 1:
        expected &= {name for name, p in job.participants.items() if p.register.cell == job.cell}
    ready = {name for name, p in job.participants.items() if is_in(job, p) or p.away} | job.later.keys() | job.passing
    return transition.by_rank(n for n in expected - ready if n in nodes and nodes[n].up)


def waits_for_registrants(transition: Transition, job: JobState) -> bool:
    """Some node may still come to the run that has just begun."""
    came = [participant.register for participant in job.participants.values() if participant.joining]
    lost_without = any(one.resume for one in came) and all(one.resume_round is None for one in came)
    settings = transition.state.settings
    grace = max(settings.register_grace, settings.resume_grace if lost_without else 0.0)
    return bool(missing_registrants(transition, job)) and transition.state.now < job.first_register + grace


def tell_missing(transition: Transition, job: JobState) -> None:
    """The first run begins: say which nodes of the cell are not in it. Nothing else would show that they train no model
    together."""
    if job.run > 1:
        return
    nodes = transition.state.nodes
    came = (
        {name for name, p in job.participants.items() if p.register.cell == job.cell} | job.later.keys() | job.passing
    )
    done = transition.state.ended_well - came if transition.state.cell == job.cell else frozenset[str]()
    if left := transition.by_rank(name for name in done if name in nodes and nodes[name].up):
        text = (
            f"{job.name!r} is trained without {_listed(left)}, where the cell ended without a sync object of this "
            "name: make it on every node, under no 'if rank == 0', and with the same name"
        )
        transition.tell("warning", text, in_cell=True)
    if late := missing_registrants(transition, job):
        text = (
            f"{job.name!r} begins without {_listed(late)}, where no sync object of this name was made within "
            f"{transition.state.settings.register_grace:g} s: it joins when it has one. Each node has to make it"
        )
        transition.tell("warning", text, in_cell=True)


def tell_too_late(transition: Transition, job: JobState, participant: Participant, node: str) -> None:
    """The others have finished this run, and are in it no more: they would not have what it makes."""
    here = [name for name, other in job.participants.items() if name != node and is_in(job, other)]
    if participant.late and here and not job.later and first_time(job, "late", node):
        text = (
            f"{node!r} comes to {job.name!r} when {_listed(transition.by_rank(here))} finished it, at round "
            f"{job.round}: it takes over their state and trains on without them, so its model becomes another one; "
            "run the cell again for one model on all nodes"
        )
        transition.tell("warning", text, in_cell=True)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:_MOST_NAMES]))


_MOST_NAMES = 16


def next_run(transition: Transition, job: JobState) -> list[tuple[str, int, Register]]:
    """The registrations with which the next run begins; none while somebody waits for none, or this one goes on."""
    waiting = [name for name, (incarnation, _) in job.later.items() if transition.is_up(name, incarnation)]
    due = _of_this_run(job)
    if due or not waiting or not _may_leave(transition, job, len(waiting)):
        return due
    here = _still_in(transition, job)
    if job.ended:
        _send_away(transition, job, here)
        here = _still_in(transition, job)
    if here:
        _tell_waits(transition, job, waiting, here)
        return []
    begin_run(job, job.cell, job.run + 1, transition.state.now)
    return _of_this_run(job)


def _may_leave(transition: Transition, job: JobState, waiting: int) -> bool:
    """Whether so many nodes may take the job to a later run. Not from one that others have yet to come to, however long
    that takes them, unless most of the cell's nodes want it."""
    missing = missing_registrants(transition, job)
    return not missing or (not waits_for_registrants(transition, job) and waiting > len(missing))


def _of_this_run(job: JobState) -> list[tuple[str, int, Register]]:
    return [(name, *entry) for name, entry in job.later.items() if entry[1].run == job.run]


def _still_in(transition: Transition, job: JobState) -> list[str]:
    return transition.by_rank(
        name
        for name, p in job.participants.items()
        if is_in(job, p) and (p.active or p.joining) and is_reachable(transition, job, name) and name not in job.later
    )


def _send_away(transition: Transition, job: JobState, here: list[str]) -> None:
    """All that began this run have finished it. Whoever came after that, or can get its last state nowhere any more,
    would hold the others up for nothing."""
    nowhere = not holders(transition, job)
    for name in here:
        participant = job.participants[name]
        if participant.late or nowhere:
            tell_over(transition, job, name, participant.register)
            change(job, name, active=False, joining=False, arrived=None, fetching=None)


def _tell_waits(transition: Transition, job: JobState, waiting: list[str], here: list[str]) -> None:
    if job.later_since is None or transition.state.now - job.later_since < TELL_AFTER:
        return
    job.later_since = None
    run = min(register.run for _, register in job.later.values())
    names = ", ".join(map(repr, transition.by_rank(waiting)))
    transition.tell(
        "warning",
        f"sync object {run} of {job.name!r} in this cell waits on {names} until number {job.run} is finished on "
        f"{', '.join(map(repr, here))}",
    )


def described_settings(told: Register) -> dict[str, str]:
    """As people read them, in a report, a comparison or a tracker: name as in the constructor -> value. What the
    strategy has no use for, and what nobody chose, is left out."""
    shown = {"strategy": told.strategy, "codec": told.codec, "every": told.every, "parameters": str(told.parameters)}
    optional = {
        **_outer(told),
        "mode": told.mode,
        "fragments": told.fragments if told.fragments > 1 else "",
        "overlap": told.overlap or "",
        "mix": "" if told.mix is None else f"{told.mix:g}",
        "quorum": "" if told.quorum is None else told.quorum,
        "grace": "" if told.quorum is None else f"{told.grace:g} s",
        "framework": told.framework,
    }
    return shown | {name: str(value) for name, value in optional.items() if value != ""}


def _outer(told: Register) -> dict[str, str]:
    rate = "by the number of nodes" if told.lr_bits is None else f"{bits_float(told.lr_bits):g}"
    if told.every_step:  # the optimiser of the nodes makes the step, or (DeMo) there is one in place of it
        return {} if told.mode or not told.lr_bits else {"lr": rate}
    outer = {"outer_lr": rate, "outer_momentum": f"{bits_float(told.momentum_bits):g}"}
    return outer | ({"nesterov": "yes" if told.nesterov else "no"} if told.momentum_bits else {})
