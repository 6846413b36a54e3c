"""The ``nc.shard`` loops in which a model is trained, as training sees them: where they are when the cell is stopped,
and that they go on there. Other loops, over a validation set for example, begin anew when the cell is run again."""

from collections.abc import Callable

from notebook_cluster.node.data.shares import Shares


class TrainingLoops:
    """Implements :class:`notebook_cluster.training.runtime.DataLoops`."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._waiting: list[Callable[[], None]] = []
        self._seen: object = None
        """The newest loop when those with a batch in hand were looked at last."""

    def step_taken(self) -> None:
        """A step was made with what the loops gave out last. Cheap enough for every step."""
        loops = self._shares.loops
        if loops and loops[-1] is not self._seen:
            self._seen = loops[-1]
            for loop in loops:
                loop.trained = loop.trained or loop.in_hand > 0

    def positions(self) -> object:
        """Where the loops are in which a step was made, as plain data; None: there is none."""
        trained = [loop.trained for loop in self._shares.loops]
        return [kept for kept, one in zip(self._shares.positions(), trained, strict=True) if one] or None

    def go_on(self, positions: object) -> None:
        """As :meth:`.Shares.go_on`; what is no list of positions is left alone."""
        self._shares.go_on(positions if isinstance(positions, list) else None)

    def before_next(self, callback: Callable[[], None]) -> None:
        """Call once before the next batch of this cell is fetched."""
        self._waiting.append(callback)
        self._shares.before_batch = self._before_batch

    def _before_batch(self) -> None:
        self._shares.before_batch, waiting, self._waiting = None, self._waiting, []
        for callback in waiting:
            callback()
