"""What a checkpoint holds of one node alone, on the main thread: its step count and its optimiser's state."""

import contextlib
from collections.abc import Callable
from typing import Any

from notebook_cluster.training.background.job import Job
from notebook_cluster.training.checkpointing.beside import OTHER_BUFFERS, OtherBuffers
from notebook_cluster.training.checkpointing.optimizer_bytes import (
    OptimizerBytesError,
    OtherFrameworkError,
    holds_state,
    pack,
    positions_in,
    unpack,
    unpack_extra,
)
from notebook_cluster.training.checkpointing.registered import SharedGenerators
from notebook_cluster.training.loop.progress import TrainingProgress
from notebook_cluster.training.loop.stopped_run import RegisteredObjects
from notebook_cluster.training.models import mlx_optimizer, torch_optimizer
from notebook_cluster.training.runtime import Runtime

_RANDOM = "random numbers"


class OptimizerState:
    """Packs this node's part, and puts back the one of the checkpoint that the job resumed from.

    ``restore``: whether there is such a checkpoint; ``warn`` tells people in one line what did not fit; ``shared``: all
    nodes have the same state, so that of any will do.
    """

    def __init__(
        self,
        runtime: Runtime,
        job: Job,
        objects: RegisteredObjects,
        progress: TrainingProgress,
        restore: bool,
        warn: Callable[[str], None],
        shared: bool = False,
    ) -> None:
        self._runtime, self._job, self._objects, self._progress = runtime, job, objects, progress
        self._optimizer = objects.optimizer
        self._positions: object = None
        """Where the loops over data were when this thread came to rest."""
        self._restore, self._warn, self._shared = restore, warn, shared
        self.only_after: int | None = None
        """The round after which the checkpoint was taken, where a job may have gone on from it without this node."""
        self.holds: Callable[[], bool] = lambda: True
        """False while another node has the optimiser's state, the only one there is."""
        self.restored = False
        """The optimiser has the state that was saved."""
        self.restored_names: list[str] = []
        """What else has the state that was saved."""
        self.began_from_own_part = False
        """The checkpoint that it began from has a part of this node."""
        self.buffers: OtherBuffers | None = None
        self.data_goes_on = False
        """The loops over data go on where they were when it was saved."""
        self._young = True
        """No round has counted work of this node since its optimiser began, or began anew."""

    def as_bytes(self, round: int) -> bytes:
        """The part as bytes, on the state after ``round``."""
        counters = {"step": self._progress.step, "round": round, "samples": self._progress.all_samples}
        positions = self._runtime.data.positions() or self._positions
        try:
            beside = self._objects.beside | self._silent()
            return pack(counters, self._optimizer if self.holds() else None, beside, positions)
        except OptimizerBytesError as error:
            self._warn(str(error))
            return pack(counters, None)

    def _silent(self) -> dict[str, Any]:
        """What is saved of each node without being asked."""
        buffers = {OTHER_BUFFERS: self.buffers} if self.buffers is not None else {}
        return {_RANDOM: SharedGenerators(), **buffers}

    def rest(self) -> None:
        """From now on another thread may ask for the part: what mlx has still to compute is computed here."""
        self._positions = self._runtime.data.positions() or self._positions
        for optimizer in self._objects.optimizers:
            if mlx_optimizer.is_mlx_optimizer(optimizer):
                with contextlib.suppress(ValueError):  # :meth:`as_bytes` says it, where the state is wanted
                    mlx_optimizer.evaluate(optimizer)

    def restore(self, state_hash: str, round: int) -> None:
        """After a resume, once: this node's optimiser and step count, as they were saved; of a shared optimiser the
        state that goes with ``state_hash``, which is that after ``round``."""
        if not self._restore or self.only_after not in (None, round):
            return
        self._restore = False
        self._runtime.data.begin_anew()
        own = optimizer = self._job.saved_optimizer_bytes()
        if self._shared:
            saved = self._job.fetched_optimizer_bytes() or self._job.restored_optimizer(state_hash)
            if saved == b"":
                self._warn(
                    "the checkpoint has no state of the optimizer, which was on a node that is not in it: "
                    "the optimizer starts afresh"
                )
            optimizer = saved or b""
        try:
            counters = self._unpack_shared(optimizer, own) if optimizer else {}
            counters = unpack(own, None) if own else counters
            if counters:
                self._progress.step = int(counters["step"])
                self._progress.all_samples = float(counters.get("samples", 0.0))
            if own:
                self.began_from_own_part = True
                self.restored_names, warnings = unpack_extra(own, self._objects.beside)
                unpack_extra(own, self._silent())
                positions = positions_in(own)
                self.data_goes_on = positions is not None
                self._runtime.data.go_on(positions)
                for warning in warnings:
                    self._warn(warning)
            else:  # others may go on in the middle of their loops
                self._runtime.data.go_on(None)
        except (OptimizerBytesError, KeyError, TypeError, ValueError, OverflowError) as error:
            self._warn(str(error))

    def _unpack_shared(self, data: bytes, own: bytes | None) -> dict[str, Any]:
        """Put the state in ``data`` into the optimiser; where it is of another framework, the one of this node."""
        try:
            counters = unpack(data, self._optimizer)
        except OtherFrameworkError:
            if not own or own == data:
                raise
            data, counters = own, unpack(own, self._optimizer)
        self.restored = self._optimizer is not None and holds_state(data)
        return counters

    def take_over(self) -> bool | None:
        """Put the optimiser's state in that came with the state of another node; False: none came, or it does not
        fit. None: no state came."""
        data = self._job.fetched_optimizer_bytes()
        if not data:
            return None if data is None else False
        try:
            unpack(data, self._optimizer)
        except OtherFrameworkError as error:
            if unpack(data, None).get("round"):  # before the first round there is nothing to miss
                self._warn(str(error))
            return False
        except OptimizerBytesError as error:
            self._warn(str(error))
            return False
        return True

    def counted(self) -> None:
        """A round has counted work of this node."""
        self._young = False

    def forget(self) -> str:
        """Forget the optimiser's state, which led to work that was refused.

        One that began a moment ago makes its largest steps: Adam's go as far as its learning rate says, whatever the
        gradient. Near the end of training that is out of scale, and would be again after each new beginning. So of a
        young state only the direction is forgotten. What its steps are divided by has seen the gradients there, so the
        next ones are as small as those of the others.

        Returns:
            What was done, for people; empty when there is no state of its own: the one that all share has made no step
            with that work.
        """
        if self._optimizer is None or self._shared:
            return ""
        only_direction = self._young and all(map(_forget_direction, self._objects.optimizers))
        if only_direction:
            return "the optimizer's momentum was cleared"
        self._young = True
        for optimizer in self._objects.optimizers:
            if mlx_optimizer.is_mlx_optimizer(optimizer):
                mlx_optimizer.clear_state(optimizer)
            else:
                optimizer.state.clear()
        return "the optimizer's state was cleared"


def _forget_direction(optimizer: Any) -> bool:
    of_mlx = mlx_optimizer.is_mlx_optimizer(optimizer)
    return mlx_optimizer.forget_direction(optimizer) if of_mlx else torch_optimizer.forget_direction(optimizer)
