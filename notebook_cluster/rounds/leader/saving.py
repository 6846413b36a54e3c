"""Checkpoints: one Save per job, name and committed round, whoever asks; a writer that is lost is replaced.

Save follows the last COMMIT on every link, so all members hold exactly its round when they read it.
"""

from msgspec import structs

from notebook_cluster.protocol.rounds import CheckpointRequest, PartMissing, Save, Saved
from notebook_cluster.rounds.leader.events_effects import SaveAnswer
from notebook_cluster.rounds.leader.state import JobState, Saving, Transition, holders, is_reachable


def on_request(transition: Transition, job: JobState, node: str, message: CheckpointRequest) -> None:
    """``sync.checkpoint(name)`` was called on ``node``; it is usually called on all nodes at nearly the same time."""
    done = job.saved.get(message.name)
    if done is not None and done.round == job.round and not _running(job, message.name):
        transition.send_to(node, done)
        return
    _join(transition, job, message.name, frozenset({node}), frozenset())


def on_save_requested(transition: Transition, name: str, job_name: str, token: int) -> None:
    """A view asks."""
    names = sorted(transition.state.jobs)
    if not job_name and len(names) == 1:
        job_name = names[0]
    if job_name not in transition.state.jobs:
        known = f"choose one of {', '.join(names)}" if names else "run a cell that makes nc.DiLoCo(model) first"
        what = f"there is no training job {job_name!r}" if job_name else "it is not clear which job is meant"
        transition.effects.append(SaveAnswer(token, error=f"checkpoint {name!r} was not written: {what}; {known}"))
        return
    _join(transition, transition.job(job_name), name, frozenset(), frozenset({token}))


def on_saved(transition: Transition, job: JobState, node: str, message: Saved) -> None:
    """The writer is done, or says why not."""
    saving = job.saves.get(message.ticket)
    known = (saving.writer, saving.name, saving.round) if saving is not None else None
    if saving is not None and known == (node, message.name, message.round):  # not one of the coordinator before this
        _end(transition, job, saving, message)


def settle_saves(transition: Transition, job: JobState) -> None:
    """Begin what was asked for too early; tell the writers which parts will not come; a lost writer's checkpoint
    begins again."""
    requests, job.save_requests = job.save_requests, {}
    for name, (requesters, tokens) in requests.items():
        _join(transition, job, name, requesters, tokens)
    for saving in list(job.saves.values()):
        gone = {name for name in saving.members if not _is_there(transition, job, name)}
        if saving.writer in gone:
            del job.saves[saving.ticket]
            _join(transition, job, saving.name, saving.requesters, saving.tokens)
            continue
        for name in transition.by_rank(gone - saving.missing):
            transition.send_to(saving.writer, PartMissing(job=job.name, ticket=saving.ticket, node=name))
        if gone - saving.missing:
            job.saves[saving.ticket] = structs.replace(saving, missing=saving.missing | gone)


def _running(job: JobState, name: str) -> Saving | None:
    """The unfinished Save of this name at the last committed round."""
    return next((s for s in job.saves.values() if s.name == name and s.round == job.round), None)


def _join(transition: Transition, job: JobState, name: str, requesters: frozenset[str], tokens: frozenset[int]) -> None:
    """Wait for the running Save of this name, or start one; a restarted coordinator first hears who holds the state."""
    if job.awaited:
        before = job.save_requests.get(name, (frozenset(), frozenset()))
        job.save_requests = {**job.save_requests, name: (before[0] | requesters, before[1] | tokens)}
        return
    saving = _running(job, name)
    if saving is not None:
        job.saves[saving.ticket] = structs.replace(
            saving, requesters=saving.requesters | requesters, tokens=saving.tokens | tokens
        )
        return
    members = holders(transition, job) if job.has_state else []
    in_cell = [member for member in members if member in transition.state.running]
    members = in_cell or members
    job.tickets += 1
    writer = next((member for member in members if member in transition.state.home), members[0] if members else "")
    saving = Saving(job.tickets, name, job.round, writer, tuple(members), requesters, tokens)
    if not members:
        error = f"checkpoint {name!r} was not written: no node holds the state of {job.name!r}"
        _end(
            transition, job, saving, Saved(job=job.name, name=name, round=job.round, ticket=saving.ticket, error=error)
        )
        return
    job.saves[saving.ticket] = saving
    for member in members:
        transition.send_to(
            member,
            Save(
                job=job.name,
                name=name,
                round=job.round,
                state_hash=job.state_hash,
                writer=writer,
                members=members,
                ticket=saving.ticket,
            ),
        )


def _end(transition: Transition, job: JobState, saving: Saving, message: Saved) -> None:
    """Say it to everyone who took part or asked."""
    job.saves.pop(saving.ticket, None)
    if not message.error:
        job.saved[saving.name] = message
    for name in transition.by_rank(saving.requesters | set(saving.members)):
        transition.send_to(name, message)
    for token in sorted(saving.tokens):
        transition.effects.append(SaveAnswer(token, message.path, message.error))
    if message.error:
        transition.tell("error", message.error)


def _is_there(transition: Transition, job: JobState, name: str) -> bool:
    return is_reachable(transition, job, name)
