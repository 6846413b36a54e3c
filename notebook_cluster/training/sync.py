"""What a sync object does on the main thread: count steps, exchange, finish, checkpoint.

The order in a cell: registered at construction (or at the first call in a later cell), a round at every boundary, and
``finish()`` or the cell's end as the last one. Waiting is done in short slices, so Stop works; what a round changes is
computed aside and swapped with interrupts deferred, so Stop leaves the state before the round or after it.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from notebook_cluster.checkpoints import CheckpointError
from notebook_cluster.codecs import WireFormat
from notebook_cluster.protocol.names import check_name
from notebook_cluster.protocol.rounds import CheckpointRequest, Save, Saved
from notebook_cluster.training import member_types as types
from notebook_cluster.training.arguments import Strategy, check_optimizer, check_samples, parameters_of
from notebook_cluster.training.job import Description, Job, Notice
from notebook_cluster.training.keeping import PartWanted
from notebook_cluster.training.measuring import Measuring
from notebook_cluster.training.node_part import PartError, pack, unpack
from notebook_cluster.training.progress import Progress
from notebook_cluster.training.replica import Replica
from notebook_cluster.training.results import Round, TrainingError
from notebook_cluster.training.resuming import Start, registration, start_of
from notebook_cluster.training.runtime import current_runtime

WAIT_SLICE = 0.2
"""Seconds: how long an interrupt may go unnoticed on systems where it does not end a wait."""


class RoundSync:
    """Base of the strategies that exchange once in ``every`` steps."""

    def __init__(self, model: Any, strategy: Strategy, *, optimizer: Any, resume: str | None, fresh: bool) -> None:
        self._strategy = strategy
        self._optimizer = check_optimizer(optimizer)
        self._resume = check_name(resume, "checkpoint") if resume is not None else ""
        self._fresh = fresh
        parameters = parameters_of(model)
        layout = parameters.layout
        self._runtime = current_runtime()
        self._replica = Replica(parameters, WireFormat(strategy.codec, layout.size - layout.buffers, layout.buffers))
        self._description = Description(layout, strategy.as_settings())
        self._progress = Progress(self._runtime)
        self._round_step = 0
        """Steps taken here when the last round was taken over."""
        attached = self._runtime.job(strategy.name)
        self._job = attached if isinstance(attached, Job) else Job(self._runtime, strategy.name)
        if attached is None:
            self._runtime.attach_job(strategy.name, self._job)
        self._job.owner = self
        self._cell: int | None = None
        self._ready = self._waiting = self._finished = self._evaluating = False
        self._waiting_since = 0.0
        self._failure = ""
        self._last: Round | None = None
        """What the exchange that was begun last has given so far."""
        self._members: tuple[str, ...] = ()
        self._saved: dict[str, Saved] = {}
        self._restore_optimizer = bool(self._resume)
        if not self._runtime.replaying():
            self._register()

    # ---- what people call -----------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """The last committed round that the model is based on."""
        return self._replica.round

    @property
    def members(self) -> tuple[str, ...]:
        """Nodes whose work is in the last round."""
        return self._members

    def step(self, loss: Any = None, samples: float = 1) -> Round | None:
        """After each step of the user's optimiser. ``samples``: examples in its batch, the weight of this node's work.

        Returns:
            The Round at every boundary (after ``every`` steps), else None.

        Raises:
            ValueError: ``loss`` or ``samples`` is not a number, or the model was changed; names it.
            TrainingError: the job was refused.
        """
        if self._runtime.replaying():
            return None
        self._register_if_needed()
        self._replica.count(check_samples(samples))
        self._progress.count(loss, samples)
        if self._job.pending():
            self._take_notices()
        if self._replica.steps < self._strategy.every:
            return None
        return self._exchange(finishing=False)

    def finish(self) -> None:
        """Exchange what is left and wait until every node has finished; then the model holds the global parameters."""
        if self._runtime.replaying():
            return
        self._register_if_needed()
        while not self._finished:
            self._exchange(finishing=True)
        self._rest()

    @contextlib.contextmanager
    def global_model(self) -> Iterator[None]:
        """The model holds the global parameters inside the block, and afterwards again what it held before.

        What ``nc.report(loss=..., accuracy=...)`` says inside is said of the global model after its last round: panel
        and report draw it as a curve of its own. While a cell is replayed the block runs with the model as it is, and
        nothing is told.

        Raises:
            TrainingError: the model is not on yet, or this block is inside another one of the same job.
        """
        block = Measuring(self._job.name, self._replica.round, self._round_step)
        if self._runtime.replaying():
            with block.opened(lambda message: None):
                yield
            return
        self._check_usable()
        if not self._replica.started:
            raise TrainingError("the model is not on yet: call step() once before global_model()")
        self._evaluating = True
        try:
            with block.opened(self._runtime.send_control), self._replica.global_parameters():
                yield
        finally:
            self._evaluating = False

    def checkpoint(self, name: str) -> Path | None:
        """Save the state of the last round on disk, with every node's own part; blocks until it is durable.

        Returns:
            The checkpoint's folder, on the machine of the node that wrote it; None while a cell is replayed.

        Raises:
            CheckpointError: it could not be written; says why and what is still valid.
        """
        check_name(name, "checkpoint")
        if self._runtime.replaying():
            return None
        self._check_usable()
        if not self._ready:
            self._register_if_needed()
        self._saved.pop(name, None)
        self._runtime.send_control(CheckpointRequest(job=self._job.name, name=name))
        self._pump(lambda: name in self._saved, f"checkpoint {name}")
        saved = self._saved.pop(name)
        if saved.error:
            raise CheckpointError(saved.error)
        return Path(saved.path)

    # ---- registration ---------------------------------------------------------------------------------------

    def _register_if_needed(self) -> None:
        self._check_usable()
        if self._cell != self._runtime.cell() or not self._ready:
            self._register()

    def _register(self) -> None:
        """Say that the job is wanted in this cell, and wait for the state it begins from."""
        cell = self._runtime.cell()
        if self._cell != cell:
            self._take_notices()
            start = self._start()
            register = registration(
                self._strategy,
                self._description.layout,
                self._replica.wire.blocks,
                cell,
                start,
                self._resume,
                self._fresh,
            )
            with self._runtime.deferred_interrupts():
                self._cell, self._ready = cell, False
                self._job.resting_part = None
                self._runtime.at_cell_end(self._cell_ended)
                self._job.begin(register, self._replica.wire, start.theta, start.momentum, self._description)
        self._pump(lambda: self._ready, f"{self._job.name} to start")

    def _start(self) -> Start:
        held = None if self._fresh else self._job.held(self._description.layout.hash(self._strategy.codec))
        if held is not None:
            return held
        start = start_of(self._replica.parameters, self._runtime.checkpoint_directory(), self._resume)
        if start.checkpoint is not None:
            self._job.restored_part = start.checkpoint.part
        for warning in start.warnings:
            self._warn(warning)
        return start

    def _cell_ended(self, status: str) -> None:
        """Called once by the runtime, on the main thread, when the cell in which this object registered ends."""
        if self._job.owner is not self or self._cell is None:
            return
        if status == "ok" and self._ready:
            try:
                self.finish()
            except KeyboardInterrupt:
                self._leave("interrupted")
                raise
            except Exception as error:
                self._leave(f"error: {error}")
                raise
        else:
            self._leave("finished" if status == "ok" else status)

    def _leave(self, reason: str) -> None:
        self._job.post(types.LeaveRounds(reason=reason))
        self._rest()

    def _rest(self) -> None:
        """Out of the rounds until the next call. From now on a checkpoint need not wait for this thread."""
        with self._runtime.deferred_interrupts():
            self._cell = None
            self._job.resting_part = self._part
        self._take_notices()

    # ---- rounds ---------------------------------------------------------------------------------------------

    def _exchange(self, finishing: bool) -> Round | None:
        """One round; after an interrupted wait the rest of that one. None when nothing was left to exchange."""
        if not self._waiting:
            boundary = self._replica.contribution(finishing)
            with self._runtime.deferred_interrupts():
                self._waiting, self._waiting_since, self._last = True, time.monotonic(), None
                self._job.step = self._progress.step
                self._job.post(boundary)
        self._pump(lambda: not self._waiting or self._finished, f"round {self._replica.round + 1}")
        return self._last

    def _pump(self, done: Callable[[], bool], what: str) -> None:
        """Take up notices until ``done``."""
        self._take_notices()
        if done():
            return
        self._progress.waiting(what)
        try:
            while not done():
                self._job.wait(WAIT_SLICE)
                self._take_notices()
        finally:
            self._progress.waiting("")

    def _take_notices(self) -> None:
        with self._runtime.deferred_interrupts():
            while (notice := self._job.take()) is not None:
                self._take(notice)
        if self._failure:
            failure, self._failure, self._waiting = self._failure, "", False
            raise TrainingError(failure)

    def _take(self, notice: Notice) -> None:
        replica = self._replica
        match notice:
            case types.Ready():
                replica.start(notice.round, notice.theta, notice.momentum, notice.state_hash)
                self._ready, self._waiting, self._finished = True, False, False
                self._fresh, self._resume = False, ""
                self._restore()
                self._round_step = self._progress.step
            case types.Apply() if replica.started:
                replica.apply(notice.round, notice.theta, notice.momentum, notice.state_hash, notice.counted)
                wait = time.monotonic() - self._waiting_since if self._waiting else 0.0
                self._last = Round(
                    notice.round, notice.members, wait, notice.bytes_sent, notice.state_hash, notice.counted
                )
                self._members, self._round_step = notice.members, self._progress.step
                self._waiting, self._finished = False, self._finished or notice.last
            case types.Rebase() if replica.started:
                replica.rebase(notice.round, notice.theta, notice.momentum, notice.state_hash)
                self._round_step = self._progress.step
            case types.DiscardContribution() if replica.started:
                replica.discard()
                self._refused(notice.reason)
            case types.Apply() | types.Rebase() | types.DiscardContribution():
                pass  # for the sync object before this one
            case types.Finish():
                self._finished, self._waiting = True, False
            case types.Fail():
                self._failure = notice.reason
                self._cell = None
            case Save():
                self._job.send_part(notice, self._part())
            case Saved():
                self._saved[notice.name] = notice
            case PartWanted():
                notice.give(self._part())

    def _refused(self, reason: str) -> None:
        text = f"round {self._replica.round + 1} did not use this node's work: {reason}"
        if self._optimizer is not None:
            self._optimizer.state.clear()
            text += "; the optimizer's state was cleared"
        self._warn(text)

    # ---- small things ---------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._job.owner is not self:
            raise TrainingError(f"job {self._job.name!r} has a newer sync object: use that one, or pass another name=")
        if self._evaluating:
            raise TrainingError("inside global_model() the model holds the global parameters: leave the block first")

    def _part(self) -> bytes:
        """This node's part of a checkpoint."""
        counters = {"step": self._progress.step, "round": self._replica.round}
        try:
            return pack(counters, self._optimizer)
        except PartError as error:
            self._warn(str(error))
            return pack(counters, None)

    def _restore(self) -> None:
        """After a resume: this node's optimiser and step count, as they were saved."""
        if not self._restore_optimizer:
            return
        self._restore_optimizer = False
        data = self._job.own_saved_part()
        if not data:
            return
        try:
            self._progress.step = int(unpack(data, self._optimizer)["step"])
        except (PartError, KeyError, TypeError, ValueError, OverflowError) as error:
            self._warn(str(error))

    def _warn(self, text: str) -> None:
        print(f"[{self._job.name}] {text}", file=sys.stderr)
