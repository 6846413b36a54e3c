"""One node's side of the rounds of one job, as a pure state machine: ``apply(state, event) -> (state, effects)``.

No sockets, threads, clock or model: :mod:`.job` feeds it what arrives and does what it asks for. The order of a round is that of
DESIGN.md: a Boundary is said as ARRIVED; SEAL begins the exchange (:mod:`.member_exchange`); with every mean in hand the new
state is computed aside and PREPARED is said; only COMMIT changes (theta, momentum). Whatever is repeated, late, or meant for
another state changes nothing. The old state stays valid after ``apply``: nothing it holds is written to.

A contribution is encoded once and kept as bytes until a COMMIT counted it. A node whose round went on without it takes the newer
state and arrives again with the same bytes: theta_m moves with theta, so theta - theta_m, and what was encoded, stay the same.
"""

from copy import copy

from notebook_cluster.protocol.rounds import (
    Arrived,
    Behind,
    Commit,
    Complete,
    Finished,
    Joined,
    Leave,
    Refused,
    Registered,
    RegisterRefused,
    RoundQuery,
    RoundStatus,
    Seal,
    Void,
)
from notebook_cluster.protocol.wire import Message
from notebook_cluster.training import member_exchange
from notebook_cluster.training.member_types import (
    Apply,
    Begin,
    Boundary,
    CancelFetch,
    Control,
    DiscardContribution,
    Effect,
    Event,
    Fail,
    FetchFailed,
    FetchState,
    Finish,
    Frame,
    KeptMean,
    LeaveRounds,
    MemberSettings,
    MemberState,
    Ready,
    Rebase,
    SendControl,
    StateFetched,
    Tick,
)


def new_member(job: str, node: str, incarnation: int, settings: MemberSettings | None = None) -> MemberState:
    """The state of a node that has not made a sync object for ``job`` yet."""
    return MemberState(job, node, incarnation, settings or MemberSettings())


def apply(state: MemberState, event: Event) -> tuple[MemberState, list[Effect]]:
    """The state after ``event``, and what is to be done about it, in order."""
    state = copy(state)
    effects: list[Effect] = []
    match event:
        case Frame():
            member_exchange.take_frame(state, event, effects)
        case Tick():
            state.now = event.now
            member_exchange.tick(state, effects)
        case Control():
            _control(state, event.message, effects)
        case Boundary():
            _boundary(state, event, effects)
        case Begin():
            _begin(state, event, effects)
        case StateFetched():
            _fetched(state, event, effects)
        case FetchFailed():
            _fetch_failed(state, effects)
        case LeaveRounds():
            state.left = True
            effects.append(SendControl(Leave(job=state.job, reason=event.reason)))
    return state, effects


def _control(state: MemberState, message: Message, effects: list[Effect]) -> None:
    match message:
        case Seal():
            if not state.left:
                member_exchange.take_seal(state, message, effects)
        case Complete():
            member_exchange.take_complete(state, message, effects)
        case Commit():
            _commit(state, message, effects)
        case Registered():
            _registered(state, message, effects)
        case RegisterRefused():
            state.phase, state.joining, state.contribution, state.exchange = "idle", False, None, None
            effects.extend([CancelFetch(), Fail(message.reason)])
        case Behind():
            _behind(state, message, effects)
        case Refused():
            _refused(state, message, effects)
        case Void():
            _void(state, message, effects)
        case Finished():
            state.phase, state.left, state.contribution, state.exchange = "training", True, None, None
            effects.append(Finish(state.round))
        case RoundQuery():
            _status(state, effects)


# ---- joining and arriving ------------------------------------------------------------------------------------


def _begin(state: MemberState, event: Begin, effects: list[Effect]) -> None:
    state.register, state.wire = event.register, event.wire
    state.theta, state.momentum = event.theta, event.momentum
    state.round, state.state_hash = event.register.round, event.register.state_hash
    state.holds = event.register.holds_state
    state.phase, state.joining, state.left = "registering", True, False
    state.contribution, state.exchange, state.held_frames = None, None, ()
    effects.extend([CancelFetch(), SendControl(event.register)])


def _boundary(state: MemberState, event: Boundary, effects: list[Effect]) -> None:
    state.contribution, state.left = event, False
    state.serial += 1
    if state.phase not in ("registering", "fetching"):
        _arrive(state, effects)


def _arrive(state: MemberState, effects: list[Effect]) -> None:
    state.phase, state.exchange, state.bytes_sent = "arrived", None, 0
    arrived = _arrived(state)
    if arrived is not None:
        effects.append(SendControl(arrived))


def _arrived(state: MemberState) -> Arrived | None:
    mine, register = state.contribution, state.register
    if mine is None or register is None or state.left:
        return None
    return Arrived(
        job=state.job, round=state.round + 1, incarnation=state.incarnation, base_hash=state.state_hash,
        samples=mine.samples, steps=mine.steps, schema_hash=register.schema_hash, codec=register.codec, norm=mine.norm,
        finite=mine.finite, finishing=mine.finishing, contribution=state.serial,
    )  # fmt: skip


def _registered(state: MemberState, message: Registered, effects: list[Effect]) -> None:
    if message.source is not None:
        if state.joining:
            _fetch(state, message.source, message.source_incarnation, message.round, message.state_hash, False, effects)
        return
    if message.state_hash != state.state_hash:
        return
    state.round, state.holds, state.kept = message.round, True, ()
    if state.phase == "fetching":
        effects.append(CancelFetch())
    if state.joining:
        _ready(state, effects)
    elif state.contribution is not None and not state.left:
        _arrive(state, effects)


def _ready(state: MemberState, effects: list[Effect]) -> None:
    assert state.theta is not None and state.momentum is not None
    state.phase, state.joining = "training", False
    effects.append(Ready(state.round, state.theta, state.momentum, state.state_hash))
    if state.contribution is not None:
        _arrive(state, effects)


# ---- the end of a round --------------------------------------------------------------------------------------


def _commit(state: MemberState, message: Commit, effects: list[Effect]) -> None:
    """Swap in what was computed aside. A node that was not PREPARED for exactly this says ARRIVED again: the coordinator answers
    whether its work was counted and where the state is."""
    if message.round <= state.round:
        return
    exchange = state.exchange
    prepared = exchange.prepared if exchange is not None else None
    wanted = (message.round, message.attempt, message.state_hash)
    if exchange is None or prepared is None or (prepared.round, prepared.attempt, prepared.state_hash) != wanted:
        arrived = _arrived(state) if state.phase != "fetching" else None
        if arrived is not None:
            effects.append(SendControl(arrived))
        return
    assert exchange.theta is not None and exchange.momentum is not None
    steps = state.contribution.steps if state.contribution is not None else 0
    state.theta, state.momentum = exchange.theta, exchange.momentum
    state.round, state.state_hash = message.round, message.state_hash
    state.kept = _bounded(state, (*state.kept, member_exchange.kept_mean(exchange)))
    state.phase, state.exchange, state.contribution = "training", None, None
    state.left = state.left or message.last
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
        )  # fmt: skip
    )


def _bounded(state: MemberState, kept: tuple[KeptMean, ...]) -> tuple[KeptMean, ...]:
    """The newest rounds that fit."""
    kept = kept[-state.settings.kept_rounds :]
    while kept and sum(mean.size for mean in kept) > state.settings.kept_bytes:
        kept = kept[1:]
    return kept


def _refused(state: MemberState, message: Refused, effects: list[Effect]) -> None:
    """The contribution is not used; the node stays in the round as a receiver."""
    mine = state.contribution
    if mine is None or message.round != state.round + 1 or message.contribution != state.serial:
        return
    state.contribution = Boundary(b"", 0.0, 0, finishing=mine.finishing)
    if state.exchange is not None and state.exchange.senders[state.node][1] > 0:
        state.exchange, state.phase = None, "arrived"
    effects.append(DiscardContribution(message.round, message.reason))


def _void(state: MemberState, message: Void, effects: list[Effect]) -> None:
    """Nobody reachable holds the rounds from ``message.round`` on: play them again with the work that is still here."""
    state.kept = tuple(mean for mean in state.kept if mean.round < message.round)
    if state.joining:
        return
    if state.phase == "fetching":
        effects.append(CancelFetch())
        state.phase = "training"
    if state.contribution is not None and not state.left:
        _arrive(state, effects)


# ---- being behind --------------------------------------------------------------------------------------------


def _behind(state: MemberState, message: Behind, effects: list[Effect]) -> None:
    if state.joining:
        return
    if (message.round, message.state_hash) == (state.round, state.state_hash):
        effects.append(SendControl(Joined(job=state.job, round=state.round, state_hash=state.state_hash)))
        return
    source, incarnation = message.source, message.source_incarnation
    _fetch(state, source, incarnation, message.round, message.state_hash, message.counted, effects)


def _fetch(
    state: MemberState, source: str, incarnation: int, round: int, state_hash: str, counted: bool, effects: list[Effect]
) -> None:
    state.phase, state.exchange, state.fetch_counted = "fetching", None, counted
    effects.append(FetchState(source, incarnation, round, state_hash))


def _fetched(state: MemberState, event: StateFetched, effects: list[Effect]) -> None:
    if state.phase != "fetching":
        return
    state.round, state.theta, state.momentum = event.round, event.theta, event.momentum
    state.state_hash, state.holds, state.kept = event.state_hash, True, ()
    effects.append(SendControl(Joined(job=state.job, round=state.round, state_hash=state.state_hash)))
    if state.joining:
        _ready(state, effects)
        return
    mine, state.phase = state.contribution, "training"
    if mine is not None and state.fetch_counted:
        state.contribution = None
        effects.append(
            Apply(
                state.round,
                event.theta,
                event.momentum,
                state.state_hash,
                (),
                True,
                False,
                mine.steps,
                state.bytes_sent,
            )
        )
        return
    effects.append(Rebase(state.round, event.theta, event.momentum, state.state_hash))
    if mine is not None and not state.left:
        _arrive(state, effects)


def _fetch_failed(state: MemberState, effects: list[Effect]) -> None:
    """Ask again: the answer names another source."""
    if state.phase != "fetching":
        return
    again = state.register if state.joining else _arrived(state)
    if again is not None:
        effects.append(SendControl(again))


def _status(state: MemberState, effects: list[Effect]) -> None:
    """Answer to RoundQuery: everything the coordinator may have forgotten."""
    register = state.register
    if register is None:
        return
    if state.joining:
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
                arrived=None if state.joining else _arrived(state),
                holds=state.holds,
                left=state.left or phase == "idle",
                cell=register.cell,
                joining=state.joining,
            )  # fmt: skip
        )
    )
    if prepared is not None:
        effects.append(SendControl(prepared))
