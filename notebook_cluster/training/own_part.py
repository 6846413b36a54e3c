"""What a checkpoint holds of one node alone, on the main thread: its step count and its optimiser's state."""

from collections.abc import Callable
from typing import Any

from notebook_cluster.training.job import Job
from notebook_cluster.training.node_part import PartError, pack, unpack
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
            except PartError as error:
                self._warn(str(error))

    def clear_optimizer(self) -> bool:
        """Forget the optimiser's state, which led to work that was refused; False when none was given."""
        if self._optimizer is None:
            return False
        self._optimizer.state.clear()
        return True
