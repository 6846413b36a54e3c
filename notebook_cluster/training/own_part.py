"""What a checkpoint holds of one node alone, on the main thread: its step count and its optimiser's state."""

import contextlib
from collections.abc import Callable
from typing import Any

from notebook_cluster.training import mlx_optimizer
from notebook_cluster.training.job import Job
from notebook_cluster.training.node_part import OtherFrameworkError, PartError, pack, unpack
from notebook_cluster.training.progress import Progress


class OwnPart:
    """Packs this node's part, and puts back the one of the checkpoint that the job resumed from.

    ``restore``: whether there is such a checkpoint; ``warn`` tells people in one line what did not fit; ``shared``: all
    nodes have the same state, so that of any will do.
    """

    def __init__(
        self,
        job: Job,
        optimizer: Any,
        progress: Progress,
        restore: bool,
        warn: Callable[[str], None],
        shared: bool = False,
    ) -> None:
        self._job, self._optimizer, self._progress = job, optimizer, progress
        self._restore, self._warn, self._shared = restore, warn, shared

    def data(self, round: int) -> bytes:
        """The part as bytes, on the state after ``round``."""
        counters = {"step": self._progress.step, "round": round}
        try:
            return pack(counters, self._optimizer)
        except PartError as error:
            self._warn(str(error))
            return pack(counters, None)

    def rest(self) -> None:
        """From now on another thread may ask for the part: what mlx has still to compute is computed here."""
        if mlx_optimizer.is_mlx_optimizer(self._optimizer):
            with contextlib.suppress(ValueError):  # :meth:`data` says it, where the state is wanted
                mlx_optimizer.evaluate(self._optimizer)

    def restore(self) -> None:
        """After a resume, once: this node's optimiser and step count, as they were saved."""
        if not self._restore:
            return
        self._restore = False
        data = self._job.own_saved_part()
        if not data and self._shared:
            data = self._job.restored_part("", 0, frozenset()) or b""
        if not data:
            return
        try:
            self._progress.step = int(unpack(data, self._optimizer)["step"])
        except (PartError, KeyError, TypeError, ValueError, OverflowError) as error:
            self._warn(str(error))

    def take_over(self) -> None:
        """The optimiser's state that came with the state of another node."""
        data = self._job.fetched_part()
        if data:
            try:
                unpack(data, self._optimizer)
            except OtherFrameworkError as error:
                if unpack(data, None).get("round"):  # before the first round there is nothing to miss
                    self._warn(str(error))
            except PartError as error:
                self._warn(str(error))

    def clear_optimizer(self) -> bool:
        """Forget the optimiser's state, which led to work that was refused; False when none was given."""
        if self._optimizer is None:
            return False
        if mlx_optimizer.is_mlx_optimizer(self._optimizer):
            mlx_optimizer.clear_state(self._optimizer)
        else:
            self._optimizer.state.clear()
        return True
