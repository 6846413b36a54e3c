"""The ``nc.shard`` loops in which a model is trained, as training sees them: where they are when the cell is stopped,
and that they go on there. Other loops, over a validation set for example, begin anew when the cell is run again."""

from collections.abc import Callable

from notebook_cluster.node.data.shares import Shares


class TrainingLoops:
    """Implements :class:`notebook_cluster.training.runtime.DataLoops`."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._waiting: list[Callable[[], None]] = []
        self._code, self._given, self._loops_again = "", False, 0
        self._joined, self._stopped_cell = False, 0
        self._stopped: tuple[str, list[object] | None] = "", None
        """Code and positions of the cell that a Stop has ended last, until it is run again."""
        self._again: list[tuple[Callable[[], None], Callable[[], bool]]] = []
        self._seen: object = None
        """The newest loop when those with a batch in hand were looked at last."""

    def step_taken(self) -> None:
        """A step was made with what the loops gave out last. Cheap enough for every step."""
        loops = self._shares.loops
        if loops and loops[-1] is not self._seen:
            self._seen = loops[-1]
            for loop in loops:
                loop.trained = loop.trained or loop.in_hand > 0

    def progress(self) -> tuple[int, float | None]:
        """Epoch (from 1; 0: none) of the newest loop in which a step was made, and how much of this node's part of it
        was given out (0 to 1; None: it has no length). On any thread."""
        loops = [loop for loop in self._shares.loops if loop.trained]
        if not loops:
            return 0, None
        epoch, share = loops[-1].progress()
        # A shard that is made anew over new data for each epoch begins at its first each time.
        return max(epoch, sum(loop.begun for loop in loops if loop.identity[:4] == loops[-1].identity[:4])), share

    def positions(self) -> object:
        """Where the loops are in which a step was made, as plain data; None: there is none."""
        trained = [loop.trained for loop in self._shares.loops]
        return [kept for kept, one in zip(self._shares.positions(), trained, strict=True) if one] or None

    def go_on(self, positions: object) -> None:
        """As :meth:`.Shares.go_on`; None where positions were given in this cell already changes nothing."""
        if isinstance(positions, list):
            self._given = True
            self._shares.go_on(positions)
        elif not self._given and not self._joined:  # one that joins asks in any case
            self._shares.go_on(None)
        self._shares.look_again()

    def loops_going_on(self) -> int:
        return self._loops_again

    def when_run_again(self, callback: Callable[[], None], still: Callable[[], bool]) -> None:
        positions = self.positions()
        if self._stopped_cell != self._shares.cell:  # of several sync objects all are kept at once
            self._stopped_cell, self._again = self._shares.cell, []
        self._stopped = self._code, positions if isinstance(positions, list) else None
        if (callback, still) not in self._again:  # kept at the end of a step, and when the next batch was asked for
            self._again.append((callback, still))

    def begin_anew(self) -> None:
        self._given, self._loops_again = False, 0
        self._shares.begin_anew()

    def begin_cell(self, cell: int, generation: int, code: str, *, joined: bool) -> None:
        """This cell begins, which is no replay; others learn at once that it does, and where its loops go on.

        Args:
            generation: of the roster with which it began, or with which this node joined it. joined: this node came
                while it was running.
        """
        with self._shares.changed:
            self._shares.begin_cell(cell, generation, joined=joined)
            self._begin(code, joined)
        self._shares.look_again()

    def _begin(self, code: str, joined: bool) -> None:
        self._code, self._joined = code, joined
        self._given, self._loops_again, self._waiting, self._seen = False, 0, [], None
        before, positions = self._stopped
        if not code or before != code or joined:
            return
        again, self._again, self._stopped = self._again, [], ("", None)
        if not any(still() for _, still in again):
            return
        if positions is not None:
            self._loops_again = len(positions)
            self.go_on(positions)
        for callback, _ in again:
            self.before_next(callback)

    def tell_unclaimed(self, warn: Callable[[str], None]) -> None:
        unclaimed = self._shares.unclaimed() if self._given else []
        if unclaimed:
            one = unclaimed[0]
            warn(
                f"nc.shard: a loop over {one.elements:,} elements that was stopped did not go on, for this cell has "
                "other data, another seed or shuffle=, or other loops: its data began anew"
            )
            self._given = False

    def at_next_batch(self, callback: Callable[[], None]) -> bool:
        loop = next((one for one in reversed(self._shares.loops) if one.in_hand and one.is_open), None)
        if loop is not None:
            loop.at_next_batch = callback
        return loop is not None

    def before_next(self, callback: Callable[[], None]) -> None:
        """Call once before the next batch of this cell is fetched."""
        self._waiting.append(callback)
        self._shares.before_batch = self._before_batch

    def _before_batch(self) -> None:
        self._shares.before_batch, waiting, self._waiting = None, self._waiting, []
        for callback in waiting:
            callback()
