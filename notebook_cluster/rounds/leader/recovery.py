"""Nodes that go and come back, states that nobody holds any more, and a coordinator that starts again from its log."""

from msgspec import structs

from notebook_cluster.journal.records import (
    BaseRecord,
    CellRecord,
    CommitRecord,
    EndedRecord,
    LaterRecord,
    Record,
    RegisterRecord,
    SealRecord,
    StopRecord,
    VoidRecord,
)
from notebook_cluster.protocol.rounds import CommitQuery, RoundQuery, RoundStatus, Void
from notebook_cluster.protocol.runs import Register
from notebook_cluster.rounds.leader.arrivals import on_arrived
from notebook_cluster.rounds.leader.attempts import advance_to
from notebook_cluster.rounds.leader.events_effects import LeaderRestarted
from notebook_cluster.rounds.leader.registration import new_base
from notebook_cluster.rounds.leader.runs import begin_run, forget_later, is_in, is_over, run_of, tell_over, took_part
from notebook_cluster.rounds.leader.silence import let_others_ask
from notebook_cluster.rounds.leader.state import (
    JobState,
    NodeState,
    OpenAttempt,
    Participant,
    Transition,
    change,
    holders,
    is_reachable,
    live,
)
from notebook_cluster.rounds.leader.unlike import refuse_stopped

# ---- nodes ---------------------------------------------------------------------------------------------------


def node_up(transition: Transition, name: str, incarnation: int, rank: int) -> None:
    """New, restarted or back. One that is back is asked where it is: meanwhile rounds went on, or it did. So is one
    that was out of reach when the coordinator was restarted: of it only the jobs know."""
    known = transition.state.nodes.get(name)
    transition.state.nodes[name] = NodeState(incarnation, rank)
    if known is not None and (known.incarnation != incarnation or known.up):
        return
    for job_name in transition.state.jobs:
        participant = transition.state.jobs[job_name].participants.get(name)
        if participant is not None and participant.incarnation == incarnation:
            job = transition.job(job_name)
            change(job, name, held=None, arrived=None, fetching=None, away=False, asked_where=True)
            if job.reporting is not None:
                job.reporting |= {name}
                transition.send_to(name, CommitQuery(job=job_name, round=job.round, start=transition.state.attempts))
            transition.send_to(name, RoundQuery(job=job_name))


def node_lost(transition: Transition, name: str, incarnation: int, gone: bool) -> None:
    """Note that the process of ``name`` has ended (``gone``) or is out of reach."""
    known = transition.state.nodes.get(name)
    if known is None or incarnation < known.incarnation:
        return
    # of a later process than the one known here: that one is gone, too
    gone = gone or known.gone or incarnation > known.incarnation
    transition.state.nodes[name] = structs.replace(known, up=False, gone=gone)
    for job_name in transition.state.jobs:
        job = transition.job(job_name)
        job.awaited -= {name}
        if job.reporting is not None and gone:  # whoever is out of reach may be the only one that has what was lost
            job.reporting -= {name}
        if gone:
            forget_later(job, name)
        let_others_ask(job, name)


def on_status(transition: Transition, job: JobState, node: str, message: RoundStatus) -> None:
    """Answer to RoundQuery: take its word for what it holds, and repeat the COMMIT that it may have missed."""
    job.awaited -= {node}
    change(job, node, asked_where=False)
    if message.joining:
        return  # its Register came just before
    participant = job.participants[node]
    if message.cell == job.cell and is_over(job, participant.register) and not message.left:
        tell_over(transition, job, node, participant.register)
    if (
        job.open is not None
        and message.round + 1 == job.open.seal.round
        and message.seen_attempt > job.open.seal.attempt
    ):
        # The SEAL after this one was lost with the machine's power. The node takes up no older one, and nobody has
        # applied any of them: the work is shared out anew.
        job.open = None
    held = (message.round, message.state_hash) if message.holds else None
    active = not message.left and message.cell == job.cell and is_in(job, participant) and not job.registering
    change(job, node, held=held, active=active, joining=False, fetching=None, arrived=None)
    if job.stopped and active:  # it was out of reach when the others were told
        refuse_stopped(transition, job, node, job.stopped)
        return
    last = job.last_commit
    prepared = (message.prepared_round, message.attempt, message.prepared_state_hash)
    if last is not None and message.round < last.round and prepared == (last.round, last.attempt, last.state_hash):
        transition.send_to(node, last)
        change(job, node, held=(last.round, last.state_hash), active=active and not last.last)
    elif message.arrived is not None:
        on_arrived(transition, job, node, message.arrived)


# ---- states that nobody holds --------------------------------------------------------------------------------


def settle_holders(transition: Transition, job: JobState) -> None:
    """When no reachable node holds the last committed state: wait for one that may come back, go back to a round that
    a node holds (VOID), or begin anew from a node's own state."""
    if job.registering or not job.has_state or holders(transition, job) or not live(transition, job):
        job.orphan_since = None
        return
    nodes, now = transition.state.nodes, transition.state.now
    on_chain = {name: _on_chain(job, p) for name, p in job.participants.items()}
    known = [name for name, held in on_chain.items() if held >= 0 and is_reachable(transition, job, name)]
    best = max((on_chain[name] for name in known), default=-1)
    away = [
        name
        for name, p in job.participants.items()
        if name in nodes
        and nodes[name].incarnation == p.incarnation
        and not nodes[name].gone
        and (p.asked_where or (on_chain[name] > best and (p.away or not nodes[name].up)))
    ]
    newest = max((on_chain[name] for name in known if job.participants[name].active), default=None)
    if newest is not None and not away:
        _void(transition, job, newest)
        return
    unsure = [
        name
        for name in live(transition, job)
        if job.participants[name].held is None and not job.participants[name].joining
    ]
    if job.orphan_since is None:
        job.orphan_since = now
        if away:
            names, last = ", ".join(transition.by_rank(away)), max(on_chain[name] for name in away)
            what = f"is round {last}" if last >= 0 else f"may be round {job.round}"
            transition.tell("warning", f"waiting for {names}: only there {what} of {job.name!r}")
    if (away or unsure) and now - job.orphan_since < transition.state.settings.return_grace:
        return
    if known:
        _void(transition, job, best)
    else:
        _begin_anew(transition, job)


def _on_chain(job: JobState, participant: Participant) -> int:
    """The round whose state it holds, if it is one of the job's; else -1."""
    round, state_hash = participant.held or (-1, "")
    return round if job.chain.get(round) == state_hash else -1


def _void(transition: Transition, job: JobState, round: int) -> None:
    """Back to the state after ``round``; the rounds since then are played again with the work that is still there."""
    transition.tell(
        "warning",
        f"no node holds round {job.round} of {job.name!r} any more: it goes on from round {round}",
        in_cell=True,
    )
    state_hash = job.chain[round]
    transition.log(VoidRecord(job.name, round + 1, state_hash, job.highest_attempt))
    go_back(job, round, state_hash, job.highest_attempt)
    for name, participant in job.participants.items():
        # who will not hear of it now is asked when it comes back
        if transition.is_up(name, participant.incarnation) and not participant.joining:
            transition.send_to(name, Void(job=job.name, round=round + 1, state_hash=state_hash))


def go_back(job: JobState, round: int, state_hash: str, attempt_floor: int) -> None:
    """Forget the rounds after ``round``."""
    job.round, job.state_hash, job.attempt, job.attempt_floor = round, state_hash, attempt_floor, attempt_floor
    job.chain = {number: value for number, value in job.chain.items() if number <= round}
    job.open, job.last_commit, job.orphan_since = None, None, None
    job.recent = tuple(row for row in job.recent if row.round <= round)
    job.server = next((row.slices[0].owner for row in reversed(job.recent) if row.slices), "")
    for name, participant in list(job.participants.items()):
        counted = participant.counted if participant.counted <= round else 0
        change(job, name, counted=counted, arrived=None, fetching=None)


def _begin_anew(transition: Transition, job: JobState) -> None:
    """No state of the job is left anywhere: the lowest rank's own becomes the job's."""
    names = live(transition, job)
    trained = [name for name in names if job.participants[name].held is not None]
    name = (trained or names)[0]
    participant = job.participants[name]
    round, state_hash = participant.held or (participant.register.round, participant.register.state_hash)
    transition.tell(
        "warning",
        f"no node holds the state of {job.name!r} any more: it starts from {name!r}; resume= takes a checkpoint",
        in_cell=True,
    )
    new_base(transition, job, round, state_hash)


# ---- a restarted coordinator ---------------------------------------------------------------------------------


def recover(transition: Transition, event: LeaderRestarted) -> None:
    """Rebuild the jobs from the log; say the last COMMIT and the open SEAL again; ask every node where it is."""
    state = transition.state
    state.now, state.cell, state.running = event.now, event.cell, frozenset(event.running)
    state.awaited_until, state.attempts = event.now + state.settings.recover_grace, event.attempts
    for rank, (name, incarnation) in enumerate(event.nodes):
        state.nodes[name] = NodeState(incarnation, rank)
    for record in event.records:
        _replay(transition, record)
    for job in state.jobs.values():
        job.first_register, job.tickets = event.now, event.tickets
        _forget_who_left(job, event)
        up = _reachable(transition, job)
        if job.has_state and job.settings.every_step:
            job.reporting = frozenset(up)
            for name in transition.by_rank(up):
                transition.send_to(name, CommitQuery(job=job.name, round=job.round, start=state.attempts))
        else:
            ask_where(transition, job, up)


def ask_where(transition: Transition, job: JobState, awaited: frozenset[str]) -> None:
    """The job is what the journal says, and attempts begin above all that were ever used. Nothing is decided before the
    reachable ones of ``awaited`` have said where they are."""
    state = transition.state
    state.awaited_until = max(state.awaited_until, state.now + state.settings.recover_grace)
    job.attempt_floor = max(job.attempt_floor, state.attempts)
    job.attempt = max(job.attempt, state.attempts)
    job.highest_attempt = max(job.highest_attempt, state.attempts)
    up = _reachable(transition, job)
    job.awaited = up & awaited
    for name in transition.by_rank(up):
        if job.last_commit is not None:
            transition.send_to(name, job.last_commit)
        if job.open is not None and name in job.open.waiting:
            transition.send_to(name, job.open.seal)
        transition.send_to(name, RoundQuery(job=job.name))


def _reachable(transition: Transition, job: JobState) -> frozenset[str]:
    return frozenset(name for name, p in job.participants.items() if transition.is_up(name, p.incarnation))


def _forget_who_left(job: JobState, event: LeaderRestarted) -> None:
    """The log says who came to a later run, not who went while it waited. Whoever still does says so again."""
    running = event.running if event.cell == job.cell else ()
    job.later = {name: entry for name, entry in job.later.items() if name in running}


def _replay(transition: Transition, record: Record) -> None:
    if isinstance(record, RegisterRecord | LaterRecord):
        if record.job not in transition.state.jobs:
            transition.add_job(JobState(record.job, record.register, record.register.cell))
        _replay_registration(transition, transition.job(record.job), record)
        return
    job = transition.job(record.job)
    match record:
        case BaseRecord():
            job.settings, job.cell = record.settings, record.cell
            job.has_state, job.registering, job.open, job.recent = True, False, None, ()
            job.chain = {record.round: record.state_hash}
            go_back(job, record.round, record.state_hash, record.attempt_floor)
            job.cohort = _registered(job)
        case CellRecord():
            job.settings, job.registering = record.settings, False
            job.cohort = _registered(job)
        case StopRecord():
            job.stopped, job.open = record.reason, None
        case EndedRecord():
            job.ended = True
        case VoidRecord():
            go_back(job, record.round - 1, record.state_hash, record.attempt_floor)
        case SealRecord():
            seal = record.seal
            job.attempt = seal.attempt
            job.highest_attempt = max(job.highest_attempt, seal.attempt)
            job.open = OpenAttempt(seal, frozenset(member.name for member in seal.members))
        case CommitRecord():
            replay_commit(job, record)


def _replay_registration(transition: Transition, job: JobState, record: RegisterRecord | LaterRecord) -> None:
    if isinstance(record, LaterRecord):
        _replay_later(job, record.node, record.incarnation, record.register, transition.state.now)
        return
    if run_of(record.register) > (job.cell, job.run):
        begin_run(job, *run_of(record.register), transition.state.now)
    took_part(job, record.node, record.incarnation, record.register)


def _registered(job: JobState) -> frozenset[str]:
    return frozenset(name for name, participant in job.participants.items() if is_in(job, participant))


def _replay_later(job: JobState, node: str, incarnation: int, register: Register, now: float) -> None:
    if register.cell > job.cell:
        begin_run(job, register.cell, 1, now)
    job.later = {**job.later, node: (incarnation, register)}


def replay_commit(job: JobState, record: CommitRecord) -> None:
    """The round of ``record`` was committed."""
    incarnations = {member.name: member.incarnation for member in record.members}
    advance_to(job, record.commit, list(incarnations), record.slices, record.outer)
    job.cohort = frozenset()  # they had the state, or it went on without them
    for member in record.commit.members:
        if member in job.participants and job.participants[member].incarnation == incarnations[member]:
            change(job, member, counted=record.commit.round)
    job.bytes_sent, job.bytes_data_parallel = record.bytes_sent, record.bytes_data_parallel
    job.hash_mismatches = record.hash_mismatches
