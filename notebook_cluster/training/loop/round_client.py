"""The rounds of a sync object on the main thread: contribute, wait for COMMIT, take up what came of it.

In the order of a round: :meth:`RoundClient._contribute`, :meth:`RoundClient._wait_for_commit` (while it waits, what the
background has to say comes as notices), :meth:`RoundClient._receive_round`.

With overlap the model receives a round some steps after it was sent, on every node at the same step, however early it
has arrived. Waiting is done in short slices, so Stop works; what a round changes is computed aside and swapped with
interrupts deferred, so Stop leaves the state before the round or after it.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from notebook_cluster.collectives import Deadlock
from notebook_cluster.protocol.node import EndWait
from notebook_cluster.protocol.rounds import Close, OuterChange, Save, Saved
from notebook_cluster.protocol.runs import run_number
from notebook_cluster.rounds.member import events_effects as types
from notebook_cluster.training.background.job import Job
from notebook_cluster.training.background.worker import Notice
from notebook_cluster.training.checkpointing.optimizer_bytes import StateRequest
from notebook_cluster.training.loop.encoding import EncodingThread
from notebook_cluster.training.loop.optimizer_state import OptimizerState
from notebook_cluster.training.loop.progress import TrainingProgress
from notebook_cluster.training.loop.replica import Replica
from notebook_cluster.training.loop.step_stops import SyncCall
from notebook_cluster.training.loop.stopped_run import RegisteredObjects
from notebook_cluster.training.runtime import Runtime
from notebook_cluster.training.settings.arguments import Strategy, check_samples
from notebook_cluster.training.settings.schedule import Schedule


class TrainingError(RuntimeError):
    """The coordinator refused the job, or the sync object cannot be used like this; one line."""


@dataclass(frozen=True)
class Round:
    """A committed round: its number, the nodes whose work is in it, seconds this node waited, bytes it sent, the hash
    of the state (equal on all nodes), and whether this node's work was counted."""

    round: int
    members: tuple[str, ...]
    wait: float
    bytes_sent: int
    state_hash: str
    counted: bool


WAIT_SLICE = 0.2
"""Seconds: how long an interrupt may go unnoticed on systems where it does not end a wait."""
DEFERRED_SLICE = 0.05
"""Seconds: how long one may go unnoticed that is deferred."""


class RoundClient:
    """What a strategy needs of rounds; :class:`.sync.RoundSync` adds what people call."""

    _replica: Replica
    _call: SyncCall
    _run: tuple[int, int]
    """The cell in which it registered last, and which of its sync objects under this name it was there."""

    def __init__(
        self, runtime: Runtime, job: Job, strategy: Strategy, objects: RegisteredObjects, *, restore: bool
    ) -> None:
        self._runtime, self._job, self._strategy = runtime, job, strategy
        self._progress = TrainingProgress(runtime, job.name, run_number(self._run[0], max(self._run[1] - 1, 0)))
        self._optimizer_state = OptimizerState(
            runtime, job, objects, self._progress, restore, self._warn, strategy.gradients
        )
        self._schedule = Schedule(strategy.every, strategy.fragments)
        self._encoding = EncodingThread()
        self._outer: OuterChange | None = None
        """Outer settings that were set since the registration."""
        self._round_step = 0
        """Steps taken here when the last round was taken over."""
        self._cell: int | None = None
        """The cell in which it takes part; None: out of the rounds."""
        self._ready = self._finished = False
        self._round_open = False
        """This node has contributed to a round that its model has not received."""
        self._passing = False
        """The other nodes are done with this object: until its finish() or the cell's end it exchanges nothing."""
        self._quorum_waits = False
        """A quorum waits for the others: the next step is a boundary."""
        self._held = False
        """A Stop came before the open round was sealed: its work stays here."""
        self._failure = self._deadlock = ""
        """Why the job, or the wait, ends with an error."""
        self._awaited_round = 0
        """The round that the main thread waits for."""
        self._committed: types.Apply | None = None
        """The round that the model is about to receive."""
        self._received: Round | None = None
        self._members: tuple[str, ...] = ()
        self._saved: dict[str, Saved] = {}
        self._told_of_parts = False
        """That a step had less than one sample was said."""

    # ---- a round, in its order ------------------------------------------------------------------------------

    def _contribute(self, finishing: bool) -> None:
        """Hand this node's contribution over; the round is open from here on. With overlap it is encoded while training
        goes on."""
        if self._passing:
            return
        outer = self._outer

        def post(boundary: types.Boundary) -> None:
            self._job.post_event(structs.replace(boundary, outer=outer), self)

        replica, overlap = self._replica, self._strategy.overlap
        made = replica.contribution_of_now(finishing) if overlap else replica.contribution(finishing)
        with self._runtime.deferred_interrupts():
            self._round_open, self._quorum_waits, self._received = True, False, None
            self._schedule.boundary()
            self._job.step = self._progress.step
            if isinstance(made, types.Boundary):
                post(made)
            else:
                self._encoding.start(made, post)

    def _exchange(self, finishing: bool) -> Round | None:
        """Contribute and wait for the round. Meanwhile the model does not change, and COMMIT may write to the vectors
        that the replica has."""
        if self._strategy.overlap:
            self._contribute(finishing)
            return self._wait_for_commit()
        with self._runtime.deferred_interrupts() as interrupted:
            self._contribute(finishing)
            began = time.monotonic()
            try:
                self._wait_until(lambda: self._is_over() or interrupted(), *self._next_round(), resting=True)
            finally:
                self._replica.keep_local()
        return self._wait_for_commit(began)

    def _is_over(self) -> bool:
        """The open round was committed, or there is none."""
        return self._committed is not None or not self._round_open

    def _next_round(self) -> tuple[str, int]:
        round = self._replica.round + 1
        return f"round {round}", round

    def _wait_for_commit(self, began: float | None = None) -> Round | None:
        """Wait for the open round and receive it; after an interrupted wait again. None: nothing was left to
        exchange, or nothing is exchanged. ``began``: when this node began to wait, if not now."""
        began = time.monotonic() if began is None else began
        self._wait_until(self._is_over, *self._next_round())
        self._receive_round()
        done, self._received = self._received, None
        return None if done is None else replace(done, wait=time.monotonic() - began)

    def _receive_round(self) -> None:
        """The model takes up the round that was committed, if one was; interrupts wait until it has."""
        with self._runtime.deferred_interrupts():
            self._receive_round_now()

    def _receive_round_now(self) -> None:
        """:meth:`_receive_round` where interrupts are deferred already."""
        apply, self._committed = self._committed, None
        if apply is None:
            return
        self._replica.apply(apply)
        self._round_applied()
        if apply.counted:
            self._optimizer_state.counted()
        self._members, self._round_step = apply.members, self._progress.step
        self._received = Round(apply.round, apply.members, 0.0, apply.bytes_sent, apply.state_hash, apply.counted)
        self._round_open = False
        self._schedule.applied()
        if apply.last:
            self._end_rounds()
        self._progress.tell_unread()  # last: it raises where what was computed has failed on the device

    def _round_applied(self) -> None:
        """The model has received a round."""

    def _end_rounds(self) -> None:
        """Nothing is left to exchange: the model holds the global parameters."""
        self._finished, self._round_open = True, False
        self._replica.settle()

    # ---- waiting --------------------------------------------------------------------------------------------

    def _wait_until(self, done: Callable[[], bool], what: str, round: int = 0, *, resting: bool = False) -> None:
        """Take up notices until ``done``; ``round``: the one that is waited for. ``resting``: interrupts are deferred,
        and the replica is not used meanwhile."""
        self._handle_notices()
        if done():
            return
        self._progress.waiting(what)
        self._tell_wait(round)
        try:
            while not done():
                self._check_stop()
                if (error := self._encoding_error()) is not None:
                    raise error
                with self._job.resting.of(self._replica) if resting else contextlib.nullcontext():
                    self._job.wait_for_notice(DEFERRED_SLICE if resting else WAIT_SLICE)
                self._handle_notices()
        finally:
            self._tell_wait(0)
            self._progress.waiting("")

    def _check_stop(self) -> None:
        """Raises:
        KeyboardInterrupt: a Stop came, and what is waited for is held until the cell is run again, or takes long.
        """
        held, self._held = self._held, False
        if held:
            self._call.stops.end()
        self._call.stops.check()

    def _tell_wait(self, round: int) -> None:
        self._awaited_round, self._deadlock = round, ""
        self._runtime.in_round(self._job.name, round)

    def _finish_encoding(self) -> None:
        """Until what is being encoded is handed over, or its work left for a later contribution."""
        self._encoding.wait()
        self._encoding_error()

    def _encoding_error(self) -> Exception | None:
        """Why the contribution could not be encoded, told once; its work goes into a later one."""
        error = self._encoding.error()
        if error is not None:
            self._round_open = False
            self._replica.release()
        return error

    # ---- what the background says ---------------------------------------------------------------------------

    def _handle_notices(self) -> None:
        """Raises:
        TrainingError: the job was refused, or has stopped.
        Deadlock: another node waits for this one in another call.
        """
        with self._runtime.deferred_interrupts():
            while (notice := self._job.next_notice()) is not None:
                self._handle_notice(notice)
        if self._failure:
            failure, self._failure, self._round_open = self._failure, "", False
            self._allow_saving()
            raise TrainingError(failure)
        if self._deadlock and self._committed is None:
            raise Deadlock(self._deadlock)  # like a Stop: the round is still open, and the cell's end leaves it

    def _allow_saving(self) -> None:
        """Out of the rounds: from now on a checkpoint need not wait for this thread."""
        self._cell = None
        self._optimizer_state.rest()
        self._job.resting_optimizer_bytes = lambda: self._optimizer_state.as_bytes(self._replica.round)

    def _handle_notice(self, notice: Notice) -> None:
        replica = self._replica
        if isinstance(notice, types.BeginTraining | types.Rebase | types.DiscardContribution | types.Finish):
            self._receive_round_now()
        match notice:
            case types.BeginTraining():
                replica.start(notice.round, notice.theta, notice.momentum, notice.state_hash)
                self._ready, self._round_open, self._finished = True, False, False
                self._quorum_waits = self._held = False
                self._schedule.keep(replica.steps)
                self._optimizer_state.restore(notice.state_hash, notice.round)
                self._round_step = self._progress.step
            case types.Apply() if replica.started:
                self._committed = notice
                if not self._strategy.overlap:
                    self._receive_round_now()
            case types.Rebase() if replica.started:
                replica.rebase(notice.round, notice.theta, notice.momentum, notice.state_hash)
                self._round_step = self._progress.step
            case types.DiscardContribution() if replica.started:
                replica.discard()
                self._refused(notice.reason)
            case types.ReleaseContribution() if replica.started:
                replica.release()
            case types.Held() if self._round_open:
                replica.hold_back()
                self._schedule.take_back()
                self._round_open, self._held = False, True
            case (
                types.Apply()
                | types.Rebase()
                | types.DiscardContribution()
                | types.ReleaseContribution()
                | types.Held()
            ):
                pass  # for the sync object before this one
            case types.Finish():
                if self._round_open:
                    self._end_rounds()
            case types.Fail():
                self._failure = notice.reason
            case types.Pass():
                self._pass(notice.run)
            case Close():
                base = self._committed.round if self._committed is not None else replica.round
                self._quorum_waits = notice.round > base and (self._committed is not None or not self._round_open)
            case Save():
                self._job.send_part(notice, self._optimizer_state.as_bytes(replica.round))
            case Saved():
                self._saved[notice.name] = notice
            case EndWait():
                self._deadlock = notice.reason if self._awaited_round else ""
            case StateRequest():
                notice.give(self._optimizer_state.as_bytes(replica.round))

    def _pass(self, run: int) -> None:
        self._passing, self._round_open, self._quorum_waits, self._committed = True, False, False, None
        self._warn(
            f"the other nodes are done with sync object {run} of this cell: here it exchanges nothing and its model is "
            "not the one they have; this node takes part again with the next one that it and they make"
        )

    def _refused(self, reason: str) -> None:
        text = f"round {self._replica.round + 1} did not use this node's work: {reason}"
        forgotten = "" if self._replica.overflowed else self._optimizer_state.forget()
        self._warn(f"{text}; {forgotten}" if forgotten else text)

    def _checked(self, samples: Any) -> float:
        count = check_samples(samples)
        if 0 < count < 1 and not self._told_of_parts:
            self._told_of_parts = True
            self._warn(
                "sync.step() was given less than one sample: samples is the number of examples in the batch, len(x), "
                "by which the nodes' work is weighed; nc.report(accuracy=...) shows another number"
            )
        return count

    def _warn(self, text: str) -> None:
        print(f"[{self._job.name}] {text}", file=sys.stderr)
