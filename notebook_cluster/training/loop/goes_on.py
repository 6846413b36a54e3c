"""How a sync object goes on with what was there before it: a cell that Stop has ended, a run that the nodes hold, a
checkpoint. And what people are told of it."""

import weakref
from typing import Any

from notebook_cluster.protocol.node import NodeLog
from notebook_cluster.training.background.job import Job
from notebook_cluster.training.checkpointing.optimizer_bytes import extra_in
from notebook_cluster.training.loop.average import GlobalAverage, check_decay
from notebook_cluster.training.loop.registration import GoingOn
from notebook_cluster.training.loop.round_client import Round, RoundClient, TrainingError
from notebook_cluster.training.loop.step_stops import SyncCall
from notebook_cluster.training.loop.stopped_run import GoneOn, LostSteps, RegisteredObjects, RunKeeper, StoppedRun
from notebook_cluster.training.runtime import Runtime
from notebook_cluster.training.settings.arguments import Strategy


class GoesOn(RoundClient):
    """What :class:`.sync.RoundSync` needs for that."""

    _resume: str
    _fresh: bool
    _keeper: RunKeeper

    def __init__(
        self, runtime: Runtime, job: Job, strategy: Strategy, objects: RegisteredObjects, model: Any, *, restore: bool
    ) -> None:
        super().__init__(runtime, job, strategy, objects, restore=restore)
        self._objects = objects
        self._model = weakref.ref(model)
        self._going_on: GoingOn | None = GoingOn(job, model, objects.optimizer)
        self._call = SyncCall(runtime.at_cell_end, runtime.data.at_next_batch, self._keep_run)
        self._step_taken = runtime.data.step_taken
        self._averages: dict[str, GlobalAverage] = {}
        self._lost = ""
        """What of the work since the last round does not go on after a Stop, for people."""
        self._stopped: StoppedRun | None = None
        """What the run goes on with, as long as nothing was computed since."""
        self._again = False
        """Its states are to be put back once more before that."""
        self._owes = False
        """A Stop came when this node was at a boundary, and what it contributed there is still to be exchanged."""
        self._held_hash = ""
        """The hash of the state that was held here when this object registered; empty: none was."""

    @property
    def global_step(self) -> int:
        """Steps that this node has taken in this run, those before a Stop or in the checkpoint too. A loop over fixed
        data goes on from here: ``for step in range(sync.global_step, 1000):``."""
        self._settle_stop()
        return self._progress.step

    @property
    def sends_gradients(self) -> bool:
        """Whether rounds exchange gradients, and leave the parameters to the optimizer's steps."""
        return self._strategy.gradients

    @property
    def samples(self) -> float:
        """Samples that this node has said to ``step()`` in this run, counted like :attr:`global_step`."""
        return self._progress.all_samples

    def ema(self, decay: float = 0.99) -> GlobalAverage:
        """An exponential moving average of the global parameters: a step of it at each round (not at each step of the
        optimizer, so a smaller ``decay`` than usual is right: 0.99 looks back about 100 rounds). It begins with the
        global parameters as they are, is in this node's part of checkpoints, and goes on after a Stop. A node that
        joins later begins where it joins.

        ``with average.in_model():`` evaluates it; ``average.parameters()`` gives its values by name.

        Raises:
            ValueError: ``decay`` is not from 0 to below 1.
            TrainingError: the model is not on yet.
        """
        name = f"ema {check_decay(decay):g}"
        self._register_if_needed()
        if name in self._averages:
            return self._averages[name]
        average = GlobalAverage(self._replica.parameters, decay, self._replica.global_vector())
        state = self._keeper.left_of(name)
        if state is None and self._optimizer_state.began_from_own_part:
            state = extra_in(self._job.saved_optimizer_bytes(), name)
        if state is not None:
            average.load_state_dict(state)
        self._averages[name] = average
        self._objects.add(name, average)
        return average

    def _register_if_needed(self) -> None:
        raise NotImplementedError

    def _round_applied(self) -> None:
        for average in self._averages.values():
            average.update(self._replica.global_vector())

    def _keep_run(self) -> None:
        """A Stop ends the cell here: keep what the next run of it goes on with."""
        with self._runtime.deferred_interrupts():
            try:
                self._handle_notices()
                self._keeper.keep(self._objects, is_open=self._round_open)
                self._runtime.data.when_run_again(self._run_again, self._is_stopped)
            except Exception as error:  # of an optimizer or a scheduler; the cell ends with the Stop all the same
                self._warn(f"{type(error).__name__}: {error}: when the cell is run again, only the parameters go on")

    def _settle_stop(self) -> None:
        """Before anything new is computed after a Stop: what the code since then has moved, such as the scheduler of
        epochs that are over, is as it was, and what was to be exchanged when the Stop came is."""
        if self._again:
            self._again = False
            self._keeper.put_again(self._objects)
        if self._owes:
            self._owes = False
            with self._call:
                self._exchange_due()
            self._stopped = None

    def _run_again(self) -> None:
        """The cell that a Stop has ended is run again, and steps this very object: it takes part before the first batch
        comes."""
        if self._is_stopped():
            with self._call:
                self._register_if_needed()
            self._settle_stop()

    def _is_stopped(self) -> bool:
        return self._job.owner is self and isinstance(self._job.stopped, StoppedRun)

    def _train_on(self) -> None:
        """A step is counted: what a Stop has kept is over."""
        self._again = self._owes = False
        self._stopped = self._job.stopped = None
        self._keeper.forget(self._objects)

    def _exchange_due(self) -> Round | None:
        """The exchange of a boundary, as ``step()`` makes it."""
        raise NotImplementedError

    def _go_on(self) -> GoneOn | None:
        """Where a Stop has left the run of the sync object before this one, or of this one."""
        stopped, self._job.stopped = self._job.stopped, None
        self._lost = stopped.line if isinstance(stopped, LostSteps) else ""
        if self._fresh:
            self._runtime.data.begin_anew()
        if self._fresh or self._resume:
            return None
        if not self._ready or self._runtime.replaying():
            return None
        gone_on = None
        with self._runtime.deferred_interrupts():
            if isinstance(stopped, StoppedRun):
                gone_on = self._keeper.go_on(stopped, self._objects, same=self._going_on is None)
                if stopped.since_boundary and not self._keeper.goes_with(stopped):
                    self._lost = "work since then that is in no round is lost: it was of another strategy or fragments"
            elsewhere = bool(self._replica.round) and not self._held_hash  # its state came from another node
            if gone_on is None and (stopped is not None or elsewhere):
                self._runtime.data.go_on(None)
        if gone_on is not None:
            assert isinstance(stopped, StoppedRun)
            self._stopped, self._again = stopped, True
            self._owes = self._replica.steps > 0 and self._at_boundary()
            self._runtime.data.before_next(self._settle_stop)
        return gone_on

    def _say_what_goes_on(self, gone_on: GoneOn | None) -> None:
        """Tell once what goes on, where this object begins with a state of before. In a later cell the object is as it
        was, so there is nothing to tell."""
        going_on, self._going_on = self._going_on, None
        same = going_on is None
        if going_on is None and gone_on is not None:
            going_on = GoingOn(self._job, self._model(), self._objects.optimizer)
        replica, state_hash = self._replica, self._held_hash
        held = bool(state_hash) and replica.state_hash == state_hash
        if going_on is None or not replica.started or not (gone_on or (replica.round and (held or self._resume))):
            return
        if gone_on is not None:
            for warning in gone_on.warnings:
                self._warn(warning)
            text = going_on.stopped_line(
                self._strategy, replica.round, gone_on.loops, gone_on.names, gone_on.edited, same=same
            )
            self._runtime.send_control(NodeLog(level="info", text=text, cell=True))
            return
        text = going_on.line(
            self._strategy,
            replica.round,
            self._resume,
            lossy=replica.fragments.codec.lossy,
            restored=self._optimizer_state.restored,
            momentum=self._momentum_goes_on(),
            outer_momentum=bool(replica.momentum.any()),
            lost=self._lost,
            beside=self._optimizer_state.restored_names,
            data=self._optimizer_state.data_goes_on,
        )
        self._runtime.send_control(NodeLog(level="info", text=text, cell=True))

    def _check_told(self) -> None:
        """At the end of a cell without a step: whoever forgot them must not lose what was trained."""
        told = self._cell == self._runtime.cell() and (self._call.steps or self._passing)
        stopped = self._stopped is not None or self._job.stopped is not None
        if not (told or stopped) and self._job.owner is self and self._replica.was_changed():
            raise TrainingError(
                f"the model of job {self._job.name!r} was changed here, but no sync.step() was called: nothing of that "
                "is in the global model. Call sync.step(loss) after each optimizer.step(); or, if the values were "
                "loaded, load them before the sync object is made. The model keeps them"
            )

    def _ask_for_checkpoint(self, name: str) -> None:
        """Its answer comes into ``_saved``. It has the global parameters, whatever the model was given since then."""
        if self._job.owner is self and self._replica.was_changed():
            self._warn(
                f"checkpoint {name!r} has the global parameters of round {self._replica.round}, not what was loaded "
                "into the model, or changed in it, since then: torch.save(model.state_dict(), FILE), or "
                "model.save_weights(FILE) in MLX, saves that"
            )
        self._saved.pop(name, None)
        self._job.request_checkpoint(name)

    def _momentum_goes_on(self) -> bool:
        """Whether a momentum that is this node's own goes on, in a strategy that has one."""
        return self._optimizer_state.restored

    def _at_boundary(self) -> bool:
        """Whether this node contributes now."""
        raise NotImplementedError
