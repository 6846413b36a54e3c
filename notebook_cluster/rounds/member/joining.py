"""How one node comes into the rounds, says that it is at a boundary, and catches up when it is behind.

A node that missed a few rounds fetches their means, when that is less than the whole state, and takes the same outer
steps as the others did; the hash after each of them shows that it came to the same state.
"""

from copy import copy

import xxhash

from notebook_cluster.codecs import DamagedError
from notebook_cluster.protocol.rounds import MOST_MISSED, Arrived, Behind, CatchUp, Member, Seal
from notebook_cluster.protocol.runs import Joined, Register, Registered
from notebook_cluster.rounds.member.events_effects import (
    Apply,
    BeginRun,
    BeginTraining,
    Boundary,
    Buffer,
    CancelFetch,
    Effect,
    FetchState,
    Log,
    Rebase,
    ReleaseContribution,
    SendControl,
    StateFetched,
)
from notebook_cluster.rounds.member.next_state import computed
from notebook_cluster.rounds.member.retransmission import request_missing
from notebook_cluster.rounds.member.state import Exchange, MemberState, most_kept, state_bytes

_SAMPLED = 4096
"""Bytes."""

_PAUSE, _LONGEST_PAUSE = 0.25, 4.0
"""Seconds."""

# ---- joining and arriving ------------------------------------------------------------------------------------


def on_begin(state: MemberState, event: BeginRun, effects: list[Effect]) -> None:
    state.register, state.fragments = event.register, event.fragments
    state.theta, state.momentum = event.theta, event.momentum
    state.round, state.state_hash = event.register.round, event.register.state_hash
    state.holds, state.advanced = event.register.holds_state, True
    state.committed = state.committed if state.holds else ()
    state.phase, state.joining, state.left = "registering", True, False
    state.serving, state.served_by, state.counted, state.fetch_failures, state.ask_at = {}, ("", 0), 0, 0, 0.0
    state.contribution, state.exchange, state.catching, state.held_frames = None, None, (), ()
    effects.extend([CancelFetch(), SendControl(event.register)])


def answers(state: MemberState, run: int, cell: int = 0) -> bool:
    """Whether a message is about the sync object that is registered here, not about one before it."""
    register = state.register
    return register is not None and run in (0, register.run) and cell in (0, register.cell)


def out_of_rounds(state: MemberState) -> None:
    """Until the next registration."""
    state.phase, state.joining, state.contribution = "idle", False, None
    state.exchange, state.catching, state.held_frames = None, (), ()


def on_boundary(state: MemberState, event: Boundary, effects: list[Effect]) -> None:
    if state.phase == "idle":  # refused, or passed, since it was made
        return
    state.contribution, state.left = event, False
    state.serial += 1
    if state.phase not in ("registering", "fetching"):
        arrive(state, effects)
    elif state.phase == "fetching" and state.fetch is None and not state.joining:
        # it asked for another source, and the answer will be about the contribution that it had then
        _ask_for_source(state, effects)


def arrive(state: MemberState, effects: list[Effect], counted: bool = False) -> None:
    """``counted``: the contribution in hand is in the state held here."""
    state.phase, state.exchange, state.catching, state.bytes_sent = "arrived", None, (), 0
    _release_if_over(state, effects, counted)
    arrived = current_arrival(state)
    if arrived is not None:
        effects.append(SendControl(arrived))


def _release_if_over(state: MemberState, effects: list[Effect], counted: bool = False) -> None:
    """A contribution to another fragment than that of the next round has missed its turn; gradients have when they
    were computed on another state."""
    mine, fragments = state.contribution, state.fragments
    if mine is None or fragments is None or not mine.samples:
        return
    stale = fragments.gradients and mine.base != state.state_hash
    if not stale and mine.fragment == fragments.of_round(state.round + 1):
        return
    state.contribution = mine.without_work(more=not fragments.gradients)
    state.serial += 1
    effects.append(ReleaseContribution())
    if stale and not counted:
        text = (
            f"the gradient of {state.node!r} for round {state.round + 1} was computed on the parameters of round "
            f"{mine.base_round}, which are no longer those of all: it is not used"
        )
        effects.append(Log("warning", text))


def current_arrival(state: MemberState) -> Arrived | None:
    mine, register = state.contribution, state.register
    if mine is None or register is None or state.left:
        return None
    return Arrived(
        job=state.job,
        round=state.round + 1,
        incarnation=state.incarnation,
        base_hash=state.state_hash,
        samples=mine.samples,
        steps=mine.steps,
        schema_hash=register.schema_hash,
        codec=register.codec,
        norm=mine.norm,
        finite=mine.finite,
        scaled=mine.scaled,
        finishing=mine.finishing,
        contribution=state.serial,
        outer=mine.outer,
        fragment=state.fragments.of_round(state.round + 1) if state.fragments is not None else 0,
        more=mine.more,
        gradients=mine.gradients,
        optimizer=mine.optimizer,
        sample=_sample(mine.encoded),
    )


def _sample(encoded: Buffer) -> str:
    """The hash of at most some thousand bytes of ``encoded``, evenly spread."""
    view = memoryview(encoded).cast("B")
    return xxhash.xxh3_64_hexdigest(bytes(view[:: 1 + len(view) // _SAMPLED])) if len(view) else ""


def on_registered(state: MemberState, message: Registered, effects: list[Effect]) -> None:
    if not answers(state, message.run):
        return
    if message.source is not None:
        if state.joining:
            fetch = FetchState(message.source, message.source_incarnation, message.round, message.state_hash)
            _fetch(state, fetch, False, effects)
        else:  # its registration was heard twice; it has been on since the first time
            effects.append(SendControl(Joined(job=state.job, round=state.round, state_hash=state.state_hash)))
            arrived = current_arrival(state)
            if arrived is not None:
                effects.append(SendControl(arrived))
        return
    if message.state_hash != state.state_hash:
        if state.joining and state.register is not None:  # it is taken for the node that held this in an earlier run
            effects.append(SendControl(Joined(job=state.job, round=state.round, state_hash=state.state_hash)))
            effects.append(SendControl(state.register))
        return
    state.round, state.holds, state.kept, state.committed = message.round, True, (), ()
    if state.phase == "fetching":
        effects.append(CancelFetch())
        state.phase, state.exchange, state.catching = "training", None, ()
    if state.joining:
        _ready(state, effects)
    elif state.contribution is not None and not state.left:
        arrive(state, effects)


def _ready(state: MemberState, effects: list[Effect]) -> None:
    assert state.theta is not None
    assert state.momentum is not None
    state.phase, state.joining = "training", False
    effects.append(BeginTraining(state.round, state.theta, state.momentum, state.state_hash))
    if state.contribution is not None:
        arrive(state, effects)


# ---- being behind --------------------------------------------------------------------------------------------


def on_behind(state: MemberState, message: Behind, effects: list[Effect]) -> None:
    if state.joining or 0 < message.contribution < state.serial:
        return
    if (message.round, message.state_hash) == (state.round, state.state_hash):
        effects.append(SendControl(Joined(job=state.job, round=state.round, state_hash=state.state_hash)))
        return
    fetch = FetchState(message.source, message.source_incarnation, message.round, message.state_hash)
    before = state.phase == "fetching" and state.fetch_counted
    # of a node whose state was damaged as it took a COMMIT the coordinator does not see what that counted
    counted = message.counted or before or 0 < state.counted == state.serial
    _fetch(state, fetch, counted, effects, tuple(message.missed))


def _fetch(
    state: MemberState, fetch: FetchState, counted: bool, effects: list[Effect], missed: tuple[CatchUp, ...] = ()
) -> None:
    if state.phase != "fetching":
        state.fetch_from = state.round
    state.phase, state.exchange, state.fetch_counted, state.fetch, state.ask_at = "fetching", None, counted, fetch, 0.0
    state.catching = missed if _is_shorter(state, missed) else ()
    if state.catching:
        _next_missed(state, effects)
        catch_up(state, effects)
    else:
        effects.append(fetch)


# ---- means of missed rounds ----------------------------------------------------------------------------------


def catch_up(state: MemberState, effects: list[Effect]) -> None:
    """Take the outer steps whose means are here; with the last of them the state is as if it had been fetched."""
    while state.catching and state.exchange is not None:
        missed = state.catching[0]
        if len(state.exchange.means) < len(missed.slices):
            return
        try:
            theta, momentum = computed(state, copy(state.exchange))
        except DamagedError:
            _fetch_whole(state, effects)
            return
        if state.fragments is None or state.fragments.state_hash(theta, momentum) != missed.state_hash:
            _fetch_whole(state, effects)
            return
        state.round, state.theta, state.momentum, state.state_hash = missed.round, theta, momentum, missed.state_hash
        state.catching = state.catching[1:]
        if not state.catching:
            on_fetched(state, StateFetched(state.round, theta, momentum, state.state_hash), effects)
            return
        _next_missed(state, effects)


def on_tick_catching_up(state: MemberState, effects: list[Effect]) -> None:
    """Ask again; a source that does not have the means (any more) is asked for the whole state."""
    exchange = state.exchange
    # who has just sent the state has the means, and is silent only while it computes
    patience = state.settings.stalled_after * (10 if _is_served(state) else 1)
    if exchange is None or state.now - exchange.progress >= patience:
        _fetch_whole(state, effects)
    elif state.now - max(exchange.progress, exchange.wanted) >= state.settings.want_after:
        state.exchange = copy(exchange)
        request_missing(state, effects)


def _fetch_whole(state: MemberState, effects: list[Effect]) -> None:
    if state.fetch is not None:
        _fetch(state, state.fetch, state.fetch_counted, effects)


def _is_shorter(state: MemberState, missed: tuple[CatchUp, ...]) -> bool:
    """The means of the missed rounds follow on the state held here, are fewer bytes than theta and momentum, and the
    source has them: a few, or all since the state that it has sent."""
    fragments = state.fragments
    if not (missed and state.holds) or fragments is None or fragments.gradients or missed[0].round != state.round + 1:
        return False
    copies = [row.senders if fragments.all_gather else 1 for row in missed]
    sizes = [fragments.wire(row.round).size for row in missed]
    needed = sum(size * times for size, times, row in zip(sizes, copies, missed, strict=True) if row.slices)
    settings = state.settings
    few = needed <= most_kept(settings, fragments) and len(missed) <= settings.kept_rounds
    return (few or (_is_served(state) and len(missed) <= MOST_MISSED)) and needed < state_bytes(fragments)


def _is_served(state: MemberState) -> bool:
    """The source is the node that has sent this one the state as a whole, and kept the means since."""
    return state.fetch is not None and state.served_by == (state.fetch.source, state.fetch.incarnation)


def _next_missed(state: MemberState, effects: list[Effect]) -> None:
    """Ask the source for the means of the first missed round: an exchange in which it is the only other member."""
    assert state.fetch is not None
    row, source = state.catching[0], state.fetch.source
    seal = Seal(
        job=state.job,
        round=row.round,
        attempt=row.attempt,
        members=[Member(name=source, incarnation=state.fetch.incarnation, weight_bits=0)],
        slices=row.slices,
        outer=row.outer,
        base_hash=state.state_hash,
    )
    senders = {source: (state.fetch.incarnation, 0.0)}
    gathered = row.senders if state.fragments is not None and state.fragments.all_gather else 0
    state.exchange = Exchange(seal, senders, {}, {}, {}, gathered=gathered, sources=(source,), progress=state.now)
    request_missing(state, effects)


# ---- whole states --------------------------------------------------------------------------------------------


def on_fetched(state: MemberState, event: StateFetched, effects: list[Effect]) -> None:
    if state.phase != "fetching":
        return
    if state.exchange is None and state.fetch is not None:  # as a whole
        state.served_by = (state.fetch.source, state.fetch.incarnation)
    state.round, state.theta, state.momentum = event.round, event.theta, event.momentum
    state.state_hash, state.holds, state.kept, state.advanced = event.state_hash, True, (), True
    state.committed, state.fetch_failures = (), 0
    state.exchange, state.catching = None, ()
    effects.append(SendControl(Joined(job=state.job, round=state.round, state_hash=state.state_hash)))
    if state.joining:
        _ready(state, effects)
        return
    mine, state.phase = state.contribution, "training"
    gradients = state.fragments is not None and state.fragments.gradients  # their step is in theta
    if mine is not None and state.fetch_counted and not gradients:
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
        arrive(state, effects, counted=state.fetch_counted)


def on_fetch_failed(state: MemberState, reason: str, effects: list[Effect]) -> None:
    """Ask again: the answer names another source."""
    if state.phase != "fetching":
        return
    if reason != state.fetch_failure:  # the next one may fail in the same way, and the one after it
        state.fetch_failure = reason
        effects.append(Log("warning", f"{state.node!r} asks for the state of {state.job!r} again: {reason}"))
    if not state.fetch_counted:
        _release_if_over(state, effects)
    state.fetch = None
    state.fetch_failures += 1
    if state.fetch_failures == 1 or not _wants_state(state):
        _ask_for_source(state, effects)
    else:
        state.ask_at = state.now + min(_LONGEST_PAUSE, _PAUSE * 2 ** (state.fetch_failures - 2))


def on_tick_fetching(state: MemberState, effects: list[Effect]) -> None:
    """Ask again, when nothing has come of it several times."""
    if state.fetch is None and 0 < state.ask_at <= state.now:
        _ask_for_source(state, effects)


def _ask_for_source(state: MemberState, effects: list[Effect]) -> None:
    """Say where this node is: the answer names a source."""
    again, state.ask_at = _wants_state(state), 0.0
    if again is not None:
        effects.append(SendControl(again))
    else:  # it left meanwhile: its next boundary arrives from the state that is held here
        state.phase, state.exchange, state.catching = "training", None, ()


def _wants_state(state: MemberState) -> Arrived | Register | None:
    """What a node that asks for a source says; None: it is not in the rounds."""
    return state.register if state.joining else current_arrival(state)
