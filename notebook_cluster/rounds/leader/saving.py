"""Checkpoints: one Save per job, name and committed round, whoever asks; a writer that is lost is replaced.

Save follows the last COMMIT on every link, so all members hold exactly its round when they read it.
"""

from msgspec import structs

from notebook_cluster.protocol.rounds import CheckpointRequest, PartMissing, Save, Saved
from notebook_cluster.rounds.leader.events_effects import Answer
from notebook_cluster.rounds.leader.state import Job, Saving, Turn, holders, is_reachable


def on_request(turn: Turn, job: Job, node: str, message: CheckpointRequest) -> None:
    """``sync.checkpoint(name)`` was called on ``node``; it is usually called on all nodes at nearly the same time."""
    done = job.saved.get(message.name)
    if done is not None and done.round == job.round and not _running(job, message.name):
        turn.send(node, done)
        return
    _join(turn, job, message.name, frozenset({node}), frozenset())


def on_save_requested(turn: Turn, name: str, job_name: str, token: int) -> None:
    """A view asks."""
    names = sorted(turn.state.jobs)
    if not job_name and len(names) == 1:
        job_name = names[0]
    if job_name not in turn.state.jobs:
        known = f"choose one of {', '.join(names)}" if names else "run a cell that makes nc.DiLoCo(model) first"
        what = f"there is no training job {job_name!r}" if job_name else "it is not clear which job is meant"
        turn.effects.append(Answer(token, error=f"checkpoint {name!r} was not written: {what}; {known}"))
        return
    _join(turn, turn.job(job_name), name, frozenset(), frozenset({token}))


def on_saved(turn: Turn, job: Job, node: str, message: Saved) -> None:
    """The writer is done, or says why not."""
    saving = job.saves.get(message.ticket)
    known = (saving.writer, saving.name, saving.round) if saving is not None else None
    if saving is not None and known == (node, message.name, message.round):  # not one of the coordinator before this
        _end(turn, job, saving, message)


def settle_saves(turn: Turn, job: Job) -> None:
    """Begin what was asked for too early; tell the writers which parts will not come; a lost writer's checkpoint
    begins again."""
    requests, job.save_requests = job.save_requests, {}
    for name, (requesters, tokens) in requests.items():
        _join(turn, job, name, requesters, tokens)
    for saving in list(job.saves.values()):
        gone = {name for name in saving.members if not _is_there(turn, job, name)}
        if saving.writer in gone:
            del job.saves[saving.ticket]
            _join(turn, job, saving.name, saving.requesters, saving.tokens)
            continue
        for name in turn.by_rank(gone - saving.missing):
            turn.send(saving.writer, PartMissing(job=job.name, ticket=saving.ticket, node=name))
        if gone - saving.missing:
            job.saves[saving.ticket] = structs.replace(saving, missing=saving.missing | gone)


def _running(job: Job, name: str) -> Saving | None:
    """The unfinished Save of this name at the last committed round."""
    return next((s for s in job.saves.values() if s.name == name and s.round == job.round), None)


def _join(turn: Turn, job: Job, name: str, requesters: frozenset[str], tokens: frozenset[int]) -> None:
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
    members = holders(turn, job) if job.has_state else []
    in_cell = [member for member in members if member in turn.state.running]
    members = in_cell or members
    job.tickets += 1
    writer = next((member for member in members if member in turn.state.home), members[0] if members else "")
    saving = Saving(job.tickets, name, job.round, writer, tuple(members), requesters, tokens)
    if not members:
        error = f"checkpoint {name!r} was not written: no node holds the state of {job.name!r}"
        _end(turn, job, saving, Saved(job=job.name, name=name, round=job.round, ticket=saving.ticket, error=error))
        return
    job.saves[saving.ticket] = saving
    for member in members:
        turn.send(
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


def _end(turn: Turn, job: Job, saving: Saving, message: Saved) -> None:
    """Say it to everyone who took part or asked."""
    job.saves.pop(saving.ticket, None)
    if not message.error:
        job.saved[saving.name] = message
    for name in turn.by_rank(saving.requesters | set(saving.members)):
        turn.send(name, message)
    for token in sorted(saving.tokens):
        turn.effects.append(Answer(token, message.path, message.error))
    if message.error:
        turn.tell("error", message.error)


def _is_there(turn: Turn, job: Job, name: str) -> bool:
    return is_reachable(turn, job, name)
