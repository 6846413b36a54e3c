"""What a sync object does on the main thread: count steps, exchange, finish, checkpoint.

The order in a cell: registered at construction (or at the first call in a later cell), a round at every boundary, and
``finish()`` or the cell's end as the last one; :mod:`.round_client` is how.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from notebook_cluster.checkpoints import CheckpointError
from notebook_cluster.processors import free_memory
from notebook_cluster.protocol.names import check_name
from notebook_cluster.protocol.rounds import OuterChange
from notebook_cluster.rounds.member import events_effects as types
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.training.background.worker import memory_of
from notebook_cluster.training.checkpointing.beside import OtherBuffers, StateBeside
from notebook_cluster.training.checkpointing.resuming import (
    Resume,
    Start,
    kept_otherwise,
    placed_start,
    resume_of,
    shared_optimizer,
    start_of,
    start_with,
)
from notebook_cluster.training.checkpointing.saving import Description
from notebook_cluster.training.loop.costs import nodes_here
from notebook_cluster.training.loop.goes_on import GoesOn
from notebook_cluster.training.loop.progress import GlobalModelBlock
from notebook_cluster.training.loop.registration import (
    begins_alone,
    fragments_of,
    frozen_settings,
    job_of,
    registered_objects,
    registration,
    taken_over,
)
from notebook_cluster.training.loop.replica import Replica
from notebook_cluster.training.loop.round_client import TrainingError
from notebook_cluster.training.loop.stopped_run import LostSteps, RunKeeper, StoppedRun
from notebook_cluster.training.models import parameters_of
from notebook_cluster.training.models.parameters import WithGradients
from notebook_cluster.training.runtime import current_runtime
from notebook_cluster.training.settings.arguments import DISK, Strategy

_VECTORS_OF_A_ROUND = 9
"""Float32 vectors of the model's size that are in use while a round is open, at most."""
_SHARE_OF_ROOM = 4
"""What of the free memory a node may keep them in: one part of so many, and all nodes of the machine half of it."""


class RoundSync(GoesOn):
    """Base of the strategies: what people call on each of them but ``step()``, and when it registers and leaves."""

    def __init__(
        self,
        model: Any,
        strategy: Strategy,
        *,
        optimizer: Any,
        resume: Resume,
        fresh: bool,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        objects = registered_objects(model, optimizer, extra)
        self._resume, self._given_momentum = resume_of(resume)
        self._fresh = fresh or self._given_momentum is not None
        runtime = current_runtime()
        job = job_of(runtime, strategy, model)
        self._run = runtime.cell(), 0 if runtime.replaying() else job.next_run(runtime.cell())
        parameters = parameters_of(model, freeze_a=strategy.freeze_a)
        job.owner = self
        self._taken = None if self._fresh or self._resume else taken_over(runtime, job)
        self._resume = self._taken.name if self._taken is not None else self._resume
        super().__init__(runtime, job, strategy, objects, model, restore=bool(self._resume))
        self._optimizer_state.only_after = self._taken.round if self._taken is not None else None
        self._replica = self._make_replica(parameters, fragments_of(strategy, parameters.layout))
        self._description = Description(parameters.layout, strategy.as_settings(), StateBeside(parameters))
        self._replica.memory = partial(memory_of, runtime)
        self._optimizer_state.buffers = OtherBuffers(parameters)
        self._evaluating = False
        self._keeper = RunKeeper(runtime, job, self._replica, self._progress, self._schedule)
        if not runtime.replaying():
            self._check_memory()
            self._register()
        elif begins_alone(runtime):
            text = f"cell {runtime.cell()} runs again alone: the models that it trains are not those of the others"
            job.tell("warning", text)

    def _make_replica(self, parameters: WithGradients, fragments: Fragments) -> Replica:
        """This node's model between two rounds, in the terms of the strategy."""
        raise NotImplementedError

    def _check_memory(self) -> None:
        """Before anything is computed: whether this machine has what the rounds take."""

    # ---- what people call -----------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """The last committed round that the model is based on."""
        return self._replica.round

    @property
    def members(self) -> tuple[str, ...]:
        """Nodes whose work is in the last round."""
        return self._members

    def finish(self) -> None:
        """Exchange what is left and wait until every node has finished; then the model holds the global parameters.

        Raises:
            TrainingError: the model was trained in this cell without a ``step()``; it keeps its values.
        """
        if self._runtime.replaying():
            return
        self._check_told()
        self._runtime.in_finish()
        with self._call:
            self._finish()

    def _finish(self) -> None:
        self._register_if_needed()
        while not (self._finished or self._passing):
            if self._round_open:
                self._wait_for_commit()
            else:
                self._exchange(finishing=True)
        if not self._passed():
            self._out_of_rounds()
        self._call.end_cell()

    @contextlib.contextmanager
    def global_model(self) -> Iterator[None]:
        """The model holds the global parameters inside the block, and afterwards again what it held before.

        What ``nc.report(loss=..., accuracy=...)`` says inside is said of the global model after its last round: panel
        and report draw it as a curve of its own. While a cell is replayed, and where this node passes what the others
        are done with, the block runs with the model as it is, and nothing is told.

        Raises:
            TrainingError: the model is not on yet, or this block is inside another one of the same job.
        """
        if self._idle():
            with self._block().opened(lambda message: None):
                yield
            return
        self._check_usable()
        if not self._replica.started:
            raise TrainingError("the model is not on yet: call step() once before global_model()")
        self._handle_notices()  # of an interrupted round the parameters may be here already
        self._evaluating = True
        try:
            with self._block().opened(self._runtime.send_control), self._replica.global_parameters():
                yield
        finally:
            self._evaluating = False

    def _block(self) -> GlobalModelBlock:
        return GlobalModelBlock(self._job.name, self._progress.run, self._replica.round, self._round_step)

    def checkpoint(self, name: str) -> Path | None:
        """Save the state of the last round on disk, with every node's own part; blocks until it is durable.

        Returns:
            The checkpoint's folder, on the machine of the node that wrote it; None while a cell is replayed, and where
            this node passes what the others are done with.

        Raises:
            CheckpointError: it could not be written; says why and what is still valid.
        """
        check_name(name, "checkpoint")
        if self._idle():
            return None
        self._check_usable()
        if not self._ready:
            self._register_if_needed()
        self._ask_for_checkpoint(name)
        self._wait_until(lambda: name in self._saved or self._passing, f"checkpoint {name}")
        if self._idle():
            return None
        saved = self._saved.pop(name)
        if saved.error:
            raise CheckpointError(saved.error)
        return Path(saved.path)

    # ---- a step, for the strategies -------------------------------------------------------------------------

    def _count_step(self, loss: Any, samples: float) -> None:
        """What every step begins with."""
        self._register_if_needed()
        self._call.steps += 1
        if self._stopped is not None or self._job.stopped is not None:
            self._train_on()
        count = self._checked(samples)
        self._replica.count(count)
        self._schedule.count()
        self._progress.count(loss, count)
        self._step_taken()
        if self._job.has_notices():
            self._handle_notices()

    def _at_boundary(self) -> bool:
        """Whether this node contributes now: by the number of steps or seconds, or because a quorum waits for it."""
        return self._quorum_waits or self._schedule.is_due(self._replica.fragment)

    # ---- registration ---------------------------------------------------------------------------------------

    def _register_if_needed(self) -> None:
        self._check_usable()
        if self._cell != self._runtime.cell() or not (self._ready or self._passing):
            self._register()

    def _register(self) -> None:
        """Say that the job is wanted in this cell, and wait for the state it begins from."""
        cell = self._runtime.cell()
        if self._run[0] != cell:
            self._run = cell, self._job.next_run(cell)
        if self._cell != cell:
            self._handle_notices()
            self._held = False  # of the cell that the Stop has ended
            self._receive_round()
            self._call.begin_cell()
            start = placed_start(self._start(), self._state_folder())
            self._held_hash = start.state_hash if start.held else ""
            register = registration(
                self._strategy, self._replica.parameters, self._replica.fragments, self._run, start, self._resume,
                self._fresh, self._warn, taken=self._taken is not None,
            )  # fmt: skip
            self._description.settings.update(frozen_settings(register))
            with self._runtime.deferred_interrupts():
                self._finish_encoding()
                self._cell, self._ready, self._passing = cell, False, False
                self._job.resting_optimizer_bytes = None
                self._runtime.at_cell_end(self._cell_ended)
                self._keep_vectors()
                self._job.register(register, self._replica.fragments, start.theta, start.momentum, self._description)
        self._wait_until(lambda: self._ready or self._passing, f"{self._job.name} to start")
        if self._taken is not None and self._replica.round != self._taken.round:
            self._resume = ""  # the cluster has gone on from there already
        self._say_what_goes_on(self._go_on())
        self._fresh, self._resume, self._given_momentum, self._taken = False, "", None, None

    def _keep_vectors(self) -> None:
        """New pages cost more than what is computed in them: a round takes its vectors from those of the round before,
        where the machine has room for them beside what it trains with."""
        room = free_memory() // max(_SHARE_OF_ROOM, 2 * nodes_here())
        vectors.keep_up_to(min(self._vectors_of_a_round(), room))

    def _vectors_of_a_round(self) -> int:
        """Bytes of those that are in use at most while a round is open."""
        return _VECTORS_OF_A_ROUND * 4 * self._replica.fragments.size

    def _start(self) -> Start:
        """The state that this node would begin from: the one held here, a checkpoint, or the model as it is."""
        held = None if self._fresh else self._job.held(self._description.layout)
        if held is not None:
            held = kept_otherwise(held, self._replica.fragments)
        if held is not None and not self._resume:
            self._warn_of(held)
            return held
        runtime, parameters = self._runtime, self._replica.parameters
        if self._given_momentum is not None:
            return start_with(parameters, self._given_momentum, self._strategy.momentum_dtype)
        start = start_of(
            parameters, runtime.checkpoint_directory(), self._resume, self._replica.fragments,
            runtime.kept_directory(), self._taken,
        )  # fmt: skip
        if held is not None and start.checkpoint is None:  # what is held here stays when nobody has the checkpoint
            self._warn_of(held)
            return replace(held, names=start.names)
        if start.checkpoint is not None:
            self._job.checkpoint_part = start.checkpoint.part
            self._job.restored_optimizer = partial(shared_optimizer, start.checkpoint)
        self._warn_of(start)
        return start

    def _state_folder(self) -> Path | None:
        """Beside which the state is in files; None: it is in memory."""
        return self._runtime.checkpoint_directory() if self._strategy.state == DISK else None

    def _warn_of(self, start: Start) -> None:
        for warning in start.warnings:
            self._warn(warning)

    def _cell_ended(self, status: str) -> None:
        """Called once by the runtime, on the main thread, when the cell in which this object registered ends."""
        self._call.end_cell()
        if self._job.owner is self and status == "ok":
            self._runtime.data.tell_unclaimed(self._warn)
            self._job.stopped = self._stopped = None
        if self._job.owner is not self or self._cell is None or self._passed():
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
            if self._stopped is not None:  # nothing was computed since
                self._job.stopped = self._stopped
            elif status == "interrupted" and not isinstance(self._job.stopped, StoppedRun):
                self._job.stopped = LostSteps(self._replica.steps)
            self._leave("finished" if status == "ok" else status)

    def _leave(self, reason: str) -> None:
        with self._runtime.deferred_interrupts():
            self._finish_encoding()
            self._job.post_event(types.LeaveRounds(reason=reason))
        self._out_of_rounds()

    def _out_of_rounds(self) -> None:
        """Take no part in rounds until the next call."""
        with self._runtime.deferred_interrupts():
            self._allow_saving()
        self._handle_notices()
        self._receive_round()
        vectors.forget()

    def _change_outer(self, **settings: float | None) -> None:
        """Use other outer settings from this node's next boundary on."""
        self._strategy = strategy = replace(self._strategy, **settings)  # type: ignore[arg-type]
        self._outer = OuterChange(lr_bits=strategy.lr_bits, momentum_bits=strategy.momentum_bits)

    # ---- whether it takes part ------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        """Whether this object takes part in this cell and its finish() was not called."""
        return (self._ready or self._passing) and self._cell is not None and self._cell == self._runtime.cell()

    def _idle(self) -> bool:
        """Whether nothing is exchanged now: the cell is replayed, or the other nodes are done with this object."""
        return self._runtime.replaying() or (self._passing and self._cell == self._runtime.cell())

    def _passed(self) -> bool:
        """Whether this object was passed in this cell until now; what follows registers it again."""
        passed, self._passing = self._passing, False
        if passed:
            self._cell = None
        return passed

    def _check_usable(self) -> None:
        if self._job.owner is not self:
            raise TrainingError(f"job {self._job.name!r} has a newer sync object: use that one, or pass another name=")
        if self._evaluating:
            raise TrainingError("inside global_model() the model holds the global parameters: leave the block first")
