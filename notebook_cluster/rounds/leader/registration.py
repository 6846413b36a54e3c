"""Who is in a job, and where each node gets the state from: Register, Joined, sources for joiners and late nodes."""

import math

from notebook_cluster.journal.records import BaseRecord, CellRecord, RegisterRecord
from notebook_cluster.protocol.rounds import Behind, OuterChange, OuterSettings
from notebook_cluster.protocol.runs import Joined, Register, Registered, RegisterRefused
from notebook_cluster.rounds.leader.alike import (
    buffers_difference,
    first_of_most,
    first_time,
    frozen_difference,
    not_compared,
)
from notebook_cluster.rounds.leader.runs import (
    begin_run,
    is_in,
    is_over,
    next_run,
    tell_missing,
    tell_over,
    tell_too_late,
    took_part,
    wait_for_run,
    waits_for_registrants,
)
from notebook_cluster.rounds.leader.state import JobState, Participant, Transition, change, holders, is_current, live

MOST_NAMES, MOST_NAME = 20, 63
"""Checkpoints of a node that an error names, and the characters of a name."""


def on_register(transition: Transition, node: str, incarnation: int, message: Register) -> None:
    """A sync object was made (again). The first registration in a run opens a short wait for the other nodes."""
    wrong = impossible(message) or _of_no_cell(transition, message)
    if wrong:
        reason = f"{node!r} registers {message.job[:MOST_NAME]!r} with {wrong}: is its notebook-cluster damaged?"
        transition.send_to(node, RegisterRefused(job=message.job, reason=reason, run=message.run))
        return
    if message.job not in transition.state.jobs:
        transition.add_job(JobState(message.job, message, message.cell, first_register=transition.state.now))
    job = transition.job(message.job)
    known = job.participants.get(node)
    if known is not None and known.incarnation == incarnation and known.register == message and known.active:
        # what was heard twice before it (after a restart of the coordinator) may say an older state, of another run too
        told = known.held if known.held == (job.round, job.state_hash) else None
        held = (message.round, message.state_hash) if message.holds_state else told
        change(job, node, joining=True, fetching=None, asked=known.asked + 1, arrived=None, held=held)
        return
    if message.cell > job.cell:
        begin_run(job, message.cell, 1, transition.state.now)
    if message.cell < job.cell:
        _refuse(transition, job, node, message, f"job {job.name!r} went on in a later cell: run this one again")
    elif is_over(job, message):
        tell_over(transition, job, node, message)
    elif message.run > job.run:
        wait_for_run(transition, job, node, incarnation, message)
    elif job.stopped:
        _refuse(transition, job, node, message, job.stopped)
    else:
        _take_part(transition, job, node, incarnation, message)


def _of_no_cell(transition: Transition, register: Register) -> str:
    """Once it counted, nobody could register before that cell; a coordinator that runs none may know of none."""
    return f"cell={register.cell}" if 0 < transition.state.cell < register.cell else ""


def settle_runs(transition: Transition, job: JobState) -> None:
    """Begin the next run with those that wait for it, when this one is over."""
    for node, incarnation, register in next_run(transition, job):
        _take_part(transition, job, node, incarnation, register)


def _take_part(transition: Transition, job: JobState, node: str, incarnation: int, register: Register) -> None:
    transition.log(RegisterRecord(job.name, node, incarnation, register))
    tell_too_late(transition, job, took_part(job, node, incarnation, register), node)
    held = (register.round, register.state_hash) if register.holds_state else None
    change(job, node, joining=True, held=held)
    if not job.registering:
        _accept(transition, job, node)


def settle_registration(transition: Transition, job: JobState) -> None:
    """When everyone who still runs the cell has registered, or the grace is over: decide on whose state the job goes
    on."""
    if not job.registering:
        return
    nodes = candidates(transition, job)
    if not nodes:
        return
    if waits_for_registrants(transition, job):
        return
    tell_missing(transition, job)
    registers = [job.participants[node].register for node in nodes]
    reference = registers[first_of_most(registers)]
    same_model = reference.schema == job.settings.schema
    kept_alike = job.settings.keeps in ("", reference.keeps)
    job.settings, job.registering = reference, False
    accepted = [node for node in nodes if _accept(transition, job, node)]
    if reference.resume and not (reference.taken and job.has_state):
        _resume(transition, job, accepted)
    elif reference.fresh or not job.has_state or not same_model:
        new_base(transition, job, 0, reference.state_hash)
    elif not kept_alike:
        _kept_otherwise(transition, job, [job.participants[node].register for node in accepted])
    else:
        transition.log(CellRecord(job.name, job.settings))
    job.cohort = frozenset(live(transition, job))


def _kept_otherwise(transition: Transition, job: JobState, registers: list[Register]) -> None:
    """A state that goes on with something else beside the parameters is another one. Nobody can take it over from a
    node that still has it as it was, only from one of this cell, which has converted its own."""
    own = [(register.round, register.state_hash) for register in registers if register.holds_state]
    fresh = job.settings.round, job.settings.state_hash
    round, state_hash = max(own, key=lambda one: (one[0], own.count(one)), default=fresh)
    if round != job.round:
        text = f"no node of this cell holds round {job.round} of {job.name!r}: it goes on from round {round}"
        transition.tell("warning", text, in_cell=True)
    new_base(transition, job, round, state_hash)


def candidates(transition: Transition, job: JobState) -> list[str]:
    """Nodes that wait for the first answer of this run, in rank order."""
    return transition.by_rank(
        name
        for name, p in job.participants.items()
        if p.joining and is_in(job, p) and transition.is_up(name, p.incarnation)
    )


def new_base(transition: Transition, job: JobState, round: int, state_hash: str) -> None:
    """The job goes on from this state, whatever was committed before."""
    job.attempt_floor = job.attempt = job.highest_attempt
    job.has_state, job.round, job.state_hash, job.chain = True, round, state_hash, {round: state_hash}
    job.open, job.last_commit, job.orphan_since, job.recent = None, None, None, ()
    job.quorum_since, job.server = None, ""
    for name, participant in list(job.participants.items()):
        change(job, name, counted=0, fetching=None)
        if participant.joining and participant.register.state_hash == state_hash:
            change(job, name, held=(round, state_hash))
    transition.log(BaseRecord(job.name, job.cell, round, state_hash, job.attempt_floor, job.settings))


def on_joined(transition: Transition, job: JobState, node: str, message: Joined) -> None:
    """It holds a state; if that is no longer the newest, its next Arrived is answered with Behind."""
    arrived, held = job.participants[node].arrived, (message.round, message.state_hash)
    known = (arrived.round - 1, arrived.base_hash) if arrived is not None else None
    change(job, node, held=held, joining=False, fetching=None, asked=0, arrived=arrived if known == held else None)
    job.cohort -= {node}


def settle_sources(transition: Transition, job: JobState) -> None:
    """Answer every node that waits to be told where the state is."""
    if job.registering or not job.has_state:
        return
    for name in live(transition, job):
        participant = job.participants[name]
        if participant.fetching is not None:
            continue
        if participant.joining:
            _answer_joiner(transition, job, name, participant)
        elif participant.arrived is not None and not is_current(job, participant):
            _answer_late(transition, job, name, participant)


def _answer_joiner(transition: Transition, job: JobState, name: str, participant: Participant) -> None:
    now = (job.round, job.state_hash)
    if participant.held == now or participant.register.state_hash == job.state_hash:
        run = participant.register.run
        transition.send_to(
            name, Registered(job=job.name, round=job.round, state_hash=job.state_hash, source=None, run=run)
        )
        change(job, name, held=now, joining=False, asked=0)
        job.cohort -= {name}
        return
    source = _source(transition, job, name, participant)
    if source is not None:
        incarnation = job.participants[source].incarnation
        change(job, name, fetching=source, source=source)
        transition.send_to(
            name,
            Registered(
                job=job.name,
                round=job.round,
                state_hash=job.state_hash,
                source=source,
                source_incarnation=incarnation,
                run=participant.register.run,
            ),
        )


def _answer_late(transition: Transition, job: JobState, name: str, participant: Participant) -> None:
    """Answer a node that arrived for a round that is over. ``counted`` says whether that round's mean has its
    contribution."""
    arrived = participant.arrived
    source = _source(transition, job, name, participant)
    if arrived is None or source is None:
        return
    known = job.chain.get(arrived.round - 1) == arrived.base_hash
    missed = [row for row in job.recent if row.round >= arrived.round]
    few = known and not participant.asked and len(missed) == job.round - arrived.round + 1
    change(job, name, fetching=source, source=source)
    transition.send_to(
        name,
        Behind(
            job=job.name,
            round=job.round,
            state_hash=job.state_hash,
            source=source,
            source_incarnation=job.participants[source].incarnation,
            counted=known and participant.counted == arrived.round,
            contribution=arrived.contribution,
            missed=missed if few else [],
        ),
    )


def _source(transition: Transition, job: JobState, name: str, participant: Participant) -> str | None:
    """A holder: the one before; else spread over them by rank, another one each time it asks."""
    others = [holder for holder in holders(transition, job) if holder != name]
    if participant.source in others and not participant.asked:
        return participant.source
    others = [holder for holder in others if holder != participant.source] or others
    return others[(transition.state.nodes[name].rank + participant.asked) % len(others)] if others else None


def _accept(transition: Transition, job: JobState, node: str) -> bool:
    """Let the node take part, or refuse it with the first thing in which it differs from the lowest rank."""
    register = job.participants[node].register
    reason = difference(register, job.settings, repr(node), _reference(transition, job))
    if reason:
        _refuse(transition, job, node, register, reason)
        transition.tell("error", reason)
    elif rest := not_compared(register, job.settings, repr(node), _reference(transition, job)):
        transition.tell("warning", rest)
    if not reason:
        _tell_buffers(transition, job, node, register)
    change(job, node, active=not reason, joining=not reason)
    return not reason


def _tell_buffers(transition: Transition, job: JobState, node: str, register: Register) -> None:
    """Once for each node and cell: some models' buffers change as they train, and nobody needs that in every run."""
    line = buffers_difference(register, job.settings, repr(node), _reference(transition, job))
    if line and first_time(job, "buffers", node):
        transition.tell("warning", line, in_cell=True)


def _refuse(transition: Transition, job: JobState, node: str, register: Register, reason: str) -> None:
    transition.send_to(node, RegisterRefused(job=job.name, reason=reason, run=register.run))


def _reference(transition: Transition, job: JobState) -> str:
    """The node whose settings are the job's, with its rank."""
    names = transition.by_rank(name for name, p in job.participants.items() if p.register == job.settings)
    if not names or names[0] not in transition.state.nodes:
        return "the cluster"
    return f"{names[0]!r} (rank {transition.state.nodes[names[0]].rank})"


def _resume(transition: Transition, job: JobState, accepted: list[str]) -> None:
    """The nodes that found the newest valid checkpoint are the source of the state."""
    found = {node: job.participants[node].register for node in accepted}
    rounds = {node: row.resume_round for node, row in found.items() if row.resume_round is not None}
    if not rounds:
        nodes, resume = ", ".join(accepted), job.settings.resume
        there = "".join(f"; {name} has {', '.join(map(repr, others))}" for name, others in _others(found).items())
        reason = f"checkpoint {resume!r} was not found on {nodes}: check the name, or copy its folder there{there}"
        if job.settings.taken:
            reason = (
                f"what this cluster took over of job {job.name!r} ({resume!r}) is not on {nodes}: run the cell also on "
                "a node of the machine that has it, or begin anew with fresh=True"
            )
        for node in accepted:
            _refuse(transition, job, node, found[node], reason)
            change(job, node, active=False, joining=False)
        job.registering = True
        return
    newest = max(rounds.values())
    source = next(node for node in accepted if rounds.get(node) == newest)
    new_base(transition, job, newest, found[source].state_hash)


def _others(found: dict[str, Register]) -> dict[str, list[str]]:
    """Node -> checkpoints that are there beside the one that is wanted; nodes with the same ones once."""
    named: dict[str, list[str]] = {}
    for node, register in found.items():
        names = [name[:MOST_NAME] for name in register.resume_names[:MOST_NAMES]]
        if names and names not in named.values():
            named[node] = names
    return named


_SAME_EVERYWHERE = (
    "strategy", "mode", "codec", "every", "fragments", "overlap", "mix", "quorum", "grace", "patience", "blocks",
    "fragment_blocks", "schema_hash",
)  # fmt: skip


def difference(register: Register, reference: Register, node: str, reference_node: str) -> str:
    """One line that names the first thing in which a registration differs from the reference, or empty."""
    mine = {name: (shape, dtype) for name, shape, dtype in register.schema}
    theirs = {name: (shape, dtype) for name, shape, dtype in reference.schema}
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            return (
                f"model of {node} has {_parameter(name, mine)}, {reference_node} has "
                f"{_parameter(name, theirs)}: use the same model on every node"
            )
    for what in _SAME_EVERYWHERE:
        here, there = getattr(register, what), getattr(reference, what)
        if here != there:
            return f"{node} has {what}={here}, {reference_node} has {what}={there}: use the same on every node"
    return frozen_difference(register, reference, node, reference_node)


def _parameter(name: str, schema: dict[str, tuple[list[int], str]]) -> str:
    if name not in schema:
        return f"no {name!r}"
    shape, dtype = schema[name]
    return f"{name!r} {'x'.join(map(str, shape)) or 'scalar'} {dtype}"


MOST = 1 << 53
"""The largest number of anything that is counted."""
_MOST_BITS = 1 << 32

_COUNTS = ("parameters", "buffers", "blocks", "round", "resume_round", "overlap")
_SECONDS = ("quorum", "grace", "patience", "mix")


def impossible(register: Register) -> str:
    """``grace=nan``: the first such number; empty: there is none."""
    for name in _COUNTS:
        value = getattr(register, name)
        if value is not None and not -MOST < value < MOST:
            return f"{name}={value}"
    for name in _SECONDS:
        value = getattr(register, name)
        if value is not None and not (math.isfinite(value) and abs(value) < MOST):
            return f"{name}={value}"
    if not has_bits(OuterChange(lr_bits=register.lr_bits, momentum_bits=register.momentum_bits)):
        return f"outer settings {register.lr_bits}, {register.momentum_bits}"
    listed = register.fragment_blocks
    if register.fragments < 1 or (len(listed) != register.fragments if listed else register.fragments >= MOST):
        return f"fragments={register.fragments}"
    return next((f"fragment_blocks={blocks}" for blocks in listed if not 0 <= blocks < MOST), "")


def has_bits(outer: OuterChange | OuterSettings) -> bool:
    """Both are the bits of a float32."""
    return all(0 <= bits < _MOST_BITS for bits in (outer.lr_bits or 0, outer.momentum_bits))
