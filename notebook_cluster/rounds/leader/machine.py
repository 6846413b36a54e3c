"""The coordinator's side of the training rounds, as a pure state machine: ``apply(state, event) -> (state, effects)``.

No sockets, no clock, no numpy: it sees only what nodes say about their work, never the numbers. The effects are to be
done in order; a Log must be durable before what follows it is sent, because that is what a restarted coordinator
knows.

One round (docs/architecture.md, "A round"): all live nodes that hold the last committed state ARRIVED -> SEAL
(members in rank order, weights, slices) -> PREPARED from everyone who is still reachable, with equal hashes ->
COMMIT. A loss before that either COMPLETEs the attempt, when somebody reachable holds all means, or seals again over
the others. Parts: :mod:`.events_effects` (events and effects), :mod:`.state`, :mod:`.registration`, :mod:`.arrivals`,
:mod:`.attempts`, :mod:`.unlike`, :mod:`.silence`, :mod:`.recovery`, :mod:`.lost_commits`, :mod:`.saving`.
"""

from msgspec import structs

from notebook_cluster.protocol.rounds import (
    Applied,
    Arrived,
    CheckpointRequest,
    CommitReport,
    LeftRounds,
    Prepared,
    RoundStatus,
    Saved,
    Stalled,
)
from notebook_cluster.protocol.runs import PATIENCE, Joined, Register
from notebook_cluster.protocol.state import JobView
from notebook_cluster.rounds.leader.arrivals import on_arrived, on_prepared, on_stalled, required
from notebook_cluster.rounds.leader.attempts import settle_attempt
from notebook_cluster.rounds.leader.events_effects import (
    CellBegan,
    CellLeft,
    CellStopping,
    Effect,
    Event,
    FromMember,
    HomeNodes,
    LeaderRestarted,
    Log,
    MemberLost,
    MemberUp,
    NodeJoinedCell,
    RanksChanged,
    Relay,
    SaveAnswer,
    SaveRequested,
    Send,
    Tell,
    Tick,
)
from notebook_cluster.rounds.leader.lost_commits import on_commit_report, settle_reports
from notebook_cluster.rounds.leader.recovery import node_lost, node_up, on_status, recover, settle_holders
from notebook_cluster.rounds.leader.registration import (
    MOST,
    on_joined,
    on_register,
    settle_registration,
    settle_runs,
    settle_sources,
)
from notebook_cluster.rounds.leader.runs import described_settings, forget_later, missing_registrants
from notebook_cluster.rounds.leader.saving import on_request, on_save_requested, on_saved, settle_saves
from notebook_cluster.rounds.leader.silence import settle_silence
from notebook_cluster.rounds.leader.state import (
    JobState,
    RoundsSettings,
    RoundsState,
    Transition,
    change,
    is_current,
    live,
)

__all__ = [
    "CellBegan",
    "CellLeft",
    "CellStopping",
    "Effect",
    "Event",
    "FromMember",
    "HomeNodes",
    "LeaderRestarted",
    "Log",
    "MemberLost",
    "MemberUp",
    "NodeJoinedCell",
    "RanksChanged",
    "Relay",
    "RoundsSettings",
    "RoundsState",
    "SaveAnswer",
    "SaveRequested",
    "Send",
    "Tell",
    "Tick",
    "apply",
    "job_views",
    "new_state",
    "patience_for",
]


def new_state(settings: RoundsSettings | None = None) -> RoundsState:
    """The state of a cluster in which nothing was trained yet."""
    return RoundsState(settings=settings or RoundsSettings())


def apply(state: RoundsState, event: Event) -> tuple[RoundsState, list[Effect]]:
    """The state after ``event``, and what is to be done, in order. ``state`` itself stays as it was."""
    transition = Transition(state)
    match event:
        case FromMember():
            touched = _from_member(transition, event)
        case SaveRequested():
            on_save_requested(transition, event.name, event.job, event.token)
            touched = ()
        case _:
            _membership(transition, event)
            touched = tuple(transition.state.jobs)
    for name in touched:
        _settle(transition, name)
    return transition.state, transition.effects


def _settle(transition: Transition, name: str) -> None:
    """Decide what the facts of a job allow. Nothing is decided before a restarted coordinator has heard from the
    nodes."""
    job = transition.job(name)
    if not settle_reports(transition, job) or job.awaited:
        return
    settle_runs(transition, job)
    settle_registration(transition, job)
    settle_holders(transition, job)
    settle_attempt(transition, job)
    settle_sources(transition, job)
    if job.saves or job.save_requests:
        settle_saves(transition, job)


def _membership(transition: Transition, event: Event) -> None:
    state = transition.state
    match event:
        case Tick():
            if not state.now:  # what came before the first tick happened just now
                for name in state.jobs:
                    transition.job(name).first_register = event.now
            state.now = event.now
            if event.now >= state.awaited_until:
                for name in state.jobs:
                    job = transition.job(name)
                    job.awaited = frozenset()
                    job.reporting = None if job.reporting is None else frozenset()
            for name in state.jobs:
                settle_silence(transition, transition.job(name), event.silent)
        case CellBegan():
            state.cell, state.running, state.ended_well = event.cell, frozenset(event.nodes), frozenset()
        case NodeJoinedCell():
            if event.cell == state.cell:
                state.running |= {event.node}
        case CellStopping():
            for name in state.jobs:
                if state.jobs[name].cell == event.cell:
                    job = transition.job(name)
                    job.stopping = frozenset(live(transition, job))
        case CellLeft():
            _cell_left(transition, event)
        case MemberUp():
            node_up(transition, event.node, event.incarnation, event.rank)
        case MemberLost():
            node_lost(transition, event.node, event.incarnation, event.gone)
        case RanksChanged():
            for name, rank in event.ranks.items():
                if name in state.nodes:
                    state.nodes[name] = structs.replace(state.nodes[name], rank=rank)
        case HomeNodes():
            state.home = frozenset(event.nodes)
        case LeaderRestarted():
            recover(transition, event)


def _cell_left(transition: Transition, event: CellLeft) -> None:
    """What a node says in a round of a cell that is over there does not matter any more; it keeps its state."""
    if event.cell == transition.state.cell:
        transition.state.running -= {event.node}
        transition.state.ended_well |= {event.node} if event.status == "ok" else set()
    for name in transition.state.jobs:
        job = transition.job(name)
        participant = job.participants.get(event.node)
        if event.cell == job.cell:
            forget_later(job, event.node)
        if participant is not None and participant.register.cell == event.cell:
            change(job, event.node, active=False, joining=False, arrived=None)


def _from_member(transition: Transition, event: FromMember) -> tuple[str, ...]:
    """Note what a node says; the name of the job that it is about."""
    message, node = event.message, event.node
    known = transition.state.nodes.get(node)
    if known is None or known.incarnation != event.incarnation:
        return ()
    if isinstance(message, Register):
        on_register(transition, node, event.incarnation, message)
        return (message.job,) if message.job in transition.state.jobs else ()
    name: str = getattr(message, "job", "")
    if name not in transition.state.jobs:
        return ()
    job = transition.job(name)
    participant = job.participants.get(node)
    if participant is None or participant.incarnation != event.incarnation:
        return ()
    match message:
        case Arrived():
            on_arrived(transition, job, node, message)
        case Prepared():
            on_prepared(transition, job, node, message)
        case Joined():
            on_joined(transition, job, node, message)
        case Applied():
            _on_applied(job, node, message)
            return ()
        case Stalled():
            on_stalled(transition, job, node, message)
        case LeftRounds():
            forget_later(job, node)
            change(job, node, active=False, joining=False, arrived=None, fetching=None)
        case RoundStatus():
            on_status(transition, job, node, message)
        case CommitReport():
            on_commit_report(transition, job, node, message)
        case CheckpointRequest():
            on_request(transition, job, node, message)
        case Saved():
            on_saved(transition, job, node, message)
        case _:
            return ()
    return (name,)


def _on_applied(job: JobState, node: str, message: Applied) -> None:
    """Count traffic. A ring all-reduce of float32 gradients sends ``2 * 4 * parameters * (M - 1) / M`` bytes per node
    and step."""
    if message.round <= job.participants[node].applied:
        return
    change(job, node, applied=message.round)
    members, settings = max(1, len(job.members)), job.settings
    job.bytes_sent = _total(job.bytes_sent, message.bytes_sent)
    gradients = message.steps * 2 * 4 * settings.parameters * (members - 1) // members
    # every step is counted once with each fragment
    job.bytes_data_parallel = _total(job.bytes_data_parallel, gradients // settings.fragments)


def _total(before: int, more: int) -> int:
    """It only grows, up to what a view can be told."""
    return min(before + max(0, more), MOST)


# ---- what others ask -----------------------------------------------------------------------------------------


def patience_for(state: RoundsState, node: str) -> float:
    """The most that a job in which ``node`` takes part may wait for it, in seconds; without one the usual."""
    jobs = (job for job in state.jobs.values() if node in job.participants and job.participants[node].active)
    return max((job.settings.patience for job in jobs), default=PATIENCE)


# ---- what views show -----------------------------------------------------------------------------------------


def job_views(state: RoundsState) -> list[JobView]:
    """Every job as plain data: first those of the newest cell, and of these the ones that are not finished, by name. So
    the first one is what is trained now, or was trained last."""
    transition = Transition(state)
    jobs = sorted(transition.state.jobs.values(), key=lambda job: (-job.cell, job.ended, job.name))
    return [_view(transition, job) for job in jobs]


def _view(transition: Transition, job: JobState) -> JobView:
    names = required(transition, job)
    members, attempt, phase = list(job.members), 0, "training"
    waiting_for: list[str] = []
    if silent := job.reporting or job.awaited:
        phase, waiting_for = "recovering", transition.by_rank(silent)
    elif job.registering:
        phase, waiting_for = "registering", missing_registrants(transition, job)
    elif job.open is not None:
        # one that was sealed before a restart of the coordinator lies below the floor
        phase, attempt = "exchanging", max(1, job.open.seal.attempt - job.attempt_floor)
        members = [member.name for member in job.open.seal.members]
        waiting_for = transition.by_rank(job.open.waiting - job.open.prepared.keys())
    elif not names:
        phase = "idle"
    elif any(job.participants[name].arrived for name in names):
        phase = "gathering"
        waiting_for = [name for name in names if not is_current(job, job.participants[name])]
    return JobView(
        name=job.name, strategy=job.settings.strategy, round=job.round, attempt=attempt, phase=phase, members=members,
        waiting_for=waiting_for, parameters=job.settings.parameters, bytes_sent=job.bytes_sent,
        bytes_data_parallel=job.bytes_data_parallel, hash_mismatches=job.hash_mismatches, state_hash=job.state_hash,
        cell=job.cell, settings=described_settings(job.settings),
    )  # fmt: skip
