"""One node's side of the rounds of one job, as a pure state machine: ``apply(state, event) -> (state, effects)``.

No sockets, threads, clock or model: :mod:`notebook_cluster.training.background.job` feeds it what arrives and does
what it asks for. The order of a round is that of docs/: a Boundary is said as ARRIVED; SEAL begins the exchange
(:mod:`.exchange`); with every mean in hand the new state is computed (:mod:`.next_state`) and PREPARED is said; only
COMMIT changes (theta, momentum). Whatever is repeated, late, or meant for another state changes nothing. The old state
stays valid after ``apply``: nothing it holds is written to, but where FromLeader says that nobody else has it.

A contribution is encoded once and kept as bytes until a COMMIT counted it. A node whose round went on without it
takes the newer state and arrives again with the same bytes: theta_m moves with theta, so theta - theta_m, and what
was encoded, stay the same.
"""

from copy import copy

from notebook_cluster.codecs import Memory
from notebook_cluster.protocol.rounds import (
    MOST_MISSED,
    Behind,
    Commit,
    CommitQuery,
    CommitReport,
    CommittedRound,
    CompleteAttempt,
    Finished,
    Hold,
    LeftRounds,
    Refused,
    RoundQuery,
    RoundStatus,
    Seal,
    Void,
    server_of,
)
from notebook_cluster.protocol.runs import Registered, RegisterRefused, RunOver
from notebook_cluster.protocol.wire import Message
from notebook_cluster.rounds.member import exchange
from notebook_cluster.rounds.member.events_effects import (
    Advance,
    Apply,
    BeginRun,
    Boundary,
    CancelFetch,
    DiscardContribution,
    Effect,
    Event,
    Fail,
    FetchFailed,
    Finish,
    Frame,
    FromLeader,
    Held,
    LeaveRounds,
    Log,
    Pass,
    SendControl,
    Served,
    StateFetched,
    Stepped,
    Tick,
)
from notebook_cluster.rounds.member.joining import (
    answers,
    arrive,
    catch_up,
    current_arrival,
    on_begin,
    on_behind,
    on_boundary,
    on_fetch_failed,
    on_fetched,
    on_registered,
    on_tick_catching_up,
    on_tick_fetching,
    out_of_rounds,
)
from notebook_cluster.rounds.member.next_state import ChangedError, kept_mean, step_in_place
from notebook_cluster.rounds.member.state import KeptMean, MemberSettings, MemberState, most_kept, state_bytes
from notebook_cluster.rounds.numerics import vectors


def new_member(job: str, node: str, incarnation: int, settings: MemberSettings | None = None) -> MemberState:
    """The state of a node that has not made a sync object for ``job`` yet."""
    return MemberState(job, node, incarnation, settings or MemberSettings())


def sending(state: MemberState, readers: frozenset[str], memory: Memory) -> MemberState:
    """``state``, whose slices go as a whole to ``readers``; what is sent is made in ``memory``."""
    state = copy(state)
    state.readers, state.memory = readers, memory
    return state


def apply(state: MemberState, event: Event) -> tuple[MemberState, list[Effect]]:
    """The state after ``event``, and what is to be done about it, in order."""
    state = copy(state)
    effects: list[Effect] = []
    match event:
        case Frame():
            exchange.on_frame(state, event, effects)
            if state.catching:
                catch_up(state, effects)
        case Tick():
            if not state.now and state.exchange is not None:  # begun before the first tick: just now
                state.exchange = copy(state.exchange)
                state.exchange.progress = event.now
            state.now = event.now
            if state.catching:
                on_tick_catching_up(state, effects)
            elif state.phase == "fetching":
                on_tick_fetching(state, effects)
            else:
                exchange.on_tick(state, effects)
        case FromLeader():
            _control(state, event.message, event.alone, effects)
        case Boundary():
            on_boundary(state, event, effects)
        case BeginRun():
            on_begin(state, event, effects)
        case Advance():
            # Only what the step of this round made. Later the running statistics have moved on with the next batches,
            # and the hash of a state that no round led to is that of all of theta.
            if event.round == state.round and not state.advanced:
                state.theta, state.advanced = event.theta, True
        case Stepped():
            exchange.on_stepped(state, event, effects)
        case StateFetched():
            on_fetched(state, event, effects)
        case FetchFailed():
            on_fetch_failed(state, event.reason, effects)
        case Served():
            others = {node: round for node, round in state.serving.items() if node != event.node}
            state.serving = others if event.round < 0 else {**others, event.node: event.round}
        case LeaveRounds():
            _leave(state)
            effects.append(SendControl(LeftRounds(job=state.job, reason=event.reason)))
    return state, effects


def _control(state: MemberState, message: Message, alone: bool, effects: list[Effect]) -> None:
    match message:
        case Seal():
            if not state.left:
                exchange.on_seal(state, message, effects)
        case CompleteAttempt():
            exchange.on_complete(state, message, effects)
        case Commit():
            _commit(state, message, alone, effects)
        case Registered():
            on_registered(state, message, effects)
        case RegisterRefused() if answers(state, message.run) and state.phase != "idle":
            out_of_rounds(state)
            effects.extend([CancelFetch(), Fail(message.reason)])
        case RunOver() if answers(state, message.run, message.cell):
            out_of_rounds(state)
            effects.extend([CancelFetch(), Pass(message.run)])
        case Behind():
            on_behind(state, message, effects)
        case Refused():
            _refused(state, message, effects)
        case Hold() if _has_in_hand(state, message):
            state.contribution, state.exchange, state.phase = None, None, "training"
            effects.append(Held())
        case Void():
            _void(state, message, effects)
        case Finished():
            _leave(state)
            state.phase, state.contribution, state.exchange, state.catching = "training", None, None, ()
            effects.append(Finish(state.round))
        case RoundQuery():
            _status(state, effects)
        case CommitQuery():
            rows = [row for row in state.committed if row.commit.round > message.round]
            effects.append(SendControl(CommitReport(job=state.job, start=message.start, rounds=rows)))


# ---- the end of a round --------------------------------------------------------------------------------------


def _commit(state: MemberState, message: Commit, alone: bool, effects: list[Effect]) -> None:
    """Swap in what was computed aside, or compute it. A node that was not PREPARED for exactly this says ARRIVED again:
    the coordinator answers whether its work was counted and where the state is."""
    if message.round <= state.round:
        return
    exchange = state.exchange
    prepared = exchange.prepared if exchange is not None else None
    if exchange is None or prepared is None or not is_prepared(state, message) or not _take(state, alone, effects):
        arrived = current_arrival(state) if state.phase != "fetching" else None
        if arrived is not None:
            effects.append(SendControl(arrived))
        return
    assert state.theta is not None
    assert state.momentum is not None
    steps = state.contribution.steps if state.contribution is not None else 0
    state.round, state.state_hash = message.round, message.state_hash
    state.advanced = state.fragments is None or not state.fragments.advances
    state.left = state.left or message.last
    state.kept = _bounded(state, (*state.kept, kept_mean(exchange)))
    if state.register is not None and state.register.every_step:
        row = CommittedRound(seal=exchange.seal, slice_hashes=prepared.slice_hashes, commit=message)
        state.committed = (*state.committed, row)[-state.settings.kept_commits :]
    state.phase, state.exchange, state.contribution = "training", None, None
    effects.append(
        Apply(
            state.round,
            state.theta,
            state.momentum,
            state.state_hash,
            tuple(message.members),
            state.node in message.members,
            message.last,
            steps,
            state.bytes_sent,
            server_of(exchange.seal) if state.fragments is not None and state.fragments.central_optimizer else "",
            exchange.seal.gradients,
        )
    )


def is_prepared(state: MemberState, message: Commit) -> bool:
    """Whether this COMMIT is of what the node said PREPARED for."""
    prepared = state.exchange.prepared if state.exchange is not None else None
    wanted = (message.round, message.attempt, message.state_hash)
    return prepared is not None and (prepared.round, prepared.attempt, prepared.state_hash) == wanted


def _take(state: MemberState, alone: bool, effects: list[Effect]) -> bool:
    """theta and momentum become those that the node is PREPARED for; False: there is no memory for that, or it was
    damaged, and what it holds may be neither state."""
    exchange = state.exchange
    assert exchange is not None
    if not exchange.in_place:
        state.theta, state.momentum = exchange.theta, exchange.momentum
        return True
    assert state.theta is not None
    assert state.momentum is not None
    begun = False
    try:
        if not alone:
            state.theta, state.momentum = vectors.copy(state.theta), vectors.copy(state.momentum)
        begun = True
        step_in_place(state, exchange)
    except Exception as error:  # whatever it is, the others have the round and wait for the next one
        state.exchange, state.phase = None, "arrived"
        if exchange.senders[state.node][1] > 0:
            state.counted = state.serial
        if begun:
            state.holds, state.state_hash = False, ""
        what = "what it had in memory has changed" if isinstance(error, ChangedError) else type(error).__name__
        text = f"round {exchange.seal.round}: {state.node!r} could not take it ({what}: {error}) and asks for the state"
        effects.append(Log("error", text))
        return False
    return True


def _leave(state: MemberState) -> None:
    state.left = True
    state.kept = _bounded(state, state.kept)


def _bounded(state: MemberState, kept: tuple[KeptMean, ...]) -> tuple[KeptMean, ...]:
    """The newest rounds that fit; all since the state that a node is being sent, while these are less than that. After
    the last one a late node fetches the state of a large model: it may be a long time until its next round, and the
    memory is somebody's."""
    since = _since_served(state, kept)
    settings, kept = state.settings, kept[-max(state.settings.kept_rounds, since) :]
    most = settings.kept_bytes if state.fragments is None else most_kept(settings, state.fragments)
    most = min(most, settings.kept_anyway) if state.left else most
    while len(kept) > (0 if state.left else since) and sum(mean.size for mean in kept) > most:
        kept = kept[1:]
    return kept


def _since_served(state: MemberState, kept: tuple[KeptMean, ...]) -> int:
    """How many of the means a node needs that is being sent the state. Who would need more bytes than that has is
    forgotten: it is sent the state again."""
    if state.fragments is None or (state.register is not None and state.register.every_step):
        state.serving = {}
        return 0
    needed = {node: [mean.size for mean in kept if mean.round > round] for node, round in state.serving.items()}
    most = state_bytes(state.fragments)
    served = {node: sizes for node, sizes in needed.items() if sum(sizes) < most and len(sizes) <= MOST_MISSED}
    state.serving = {node: round for node, round in state.serving.items() if node in served}
    return max(map(len, served.values()), default=0)


def _refused(state: MemberState, message: Refused, effects: list[Effect]) -> None:
    """The contribution is not used; the node stays in the round as a receiver."""
    mine = state.contribution
    if mine is None or message.round != state.round + 1 or message.contribution != state.serial:
        return
    state.contribution = mine.without_work()
    if state.exchange is not None and state.exchange.senders.get(state.node, (0, 0.0))[1] > 0:
        state.exchange, state.phase = None, "arrived"
    effects.append(DiscardContribution(message.round, message.reason))


def _has_in_hand(state: MemberState, message: Hold) -> bool:
    """It is about the contribution in hand. No COMMIT of a round with it will come: who says this decides that."""
    at_boundary = state.contribution is not None and state.phase in ("arrived", "exchanging", "prepared")
    return at_boundary and (message.round, message.contribution) == (state.round + 1, state.serial)


def _void(state: MemberState, message: Void, effects: list[Effect]) -> None:
    """Nobody reachable holds the rounds from ``message.round`` on: play them again with the work that is still here."""
    state.kept = tuple(mean for mean in state.kept if mean.round < message.round)
    state.committed = tuple(row for row in state.committed if row.commit.round < message.round)
    state.counted = 0
    if state.joining:
        return
    if state.phase == "fetching":
        effects.append(CancelFetch())
        if state.fetch_counted and state.round > state.fetch_from:
            # the rounds it caught up with so far begin with the one that counted its work
            assert state.theta is not None
            assert state.momentum is not None
            on_fetched(state, StateFetched(state.round, state.theta, state.momentum, state.state_hash), effects)
            return
        state.phase, state.exchange, state.catching = "training", None, ()
    if state.contribution is not None and not state.left:
        arrive(state, effects)


# ---- after a restart of the coordinator -----------------------------------------------------------------------


def _status(state: MemberState, effects: list[Effect]) -> None:
    """Answer to RoundQuery: everything the coordinator may have forgotten."""
    register = state.register
    if register is None:
        return
    joining = state.joining and not state.left
    if joining:
        effects.append(SendControl(register))
    prepared = state.exchange.prepared if state.exchange is not None else None
    phase = state.phase
    effects.append(
        SendControl(
            RoundStatus(
                job=state.job,
                round=state.round,
                state_hash=state.state_hash,
                phase=phase if phase in ("arrived", "exchanging", "prepared") else "training",
                attempt=state.exchange.seal.attempt if state.exchange is not None else 0,
                prepared_round=prepared.round if prepared is not None else None,
                prepared_state_hash=prepared.state_hash if prepared is not None else "",
                arrived=None if joining else current_arrival(state),
                holds=state.holds,
                left=state.left or phase == "idle",
                cell=register.cell,
                joining=joining,
                seen_attempt=state.seen_attempt[1] if state.seen_attempt[0] == state.round + 1 else 0,
            )
        )
    )
    if prepared is not None:
        effects.append(SendControl(prepared))
