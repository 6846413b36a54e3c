"""This node's calls of ``nc.should_stop`` and ``nc.mean_metrics``, and how far its code has come: the node's half of
:mod:`notebook_cluster.coordinator.decisions`.

The main thread asks and waits; what comes is handled on the I/O thread.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from notebook_cluster.collectives.steps import wait_for
from notebook_cluster.protocol.decisions import (
    AnswersMissing,
    Ask,
    Decided,
    DecidedStop,
    DecisionQuery,
    DecisionState,
    PlaceReached,
    Withdrawn,
)
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.node import Roster
from notebook_cluster.protocol.wire import Message

_MOST_STOPS = 256
_KEPT = 8
"""Results that are told to a coordinator that was started again."""


class LoopPlace:
    """A loop that this node's code is in, until :meth:`leave` or the end of its cell."""

    def __init__(self, leave: "Callable[[LoopPlace], None]", whole: bool) -> None:
        self._leave, self.whole = leave, whole

    def leave(self) -> None:
        """The loop is over, or was left; and with it those that were begun in it. Once is enough."""
        self._leave(self)


class DecisionClient:
    """Implements :class:`notebook_cluster.training.runtime.JobHandler` for ``DECISIONS_JOB``.

    Args:
        name: of this node.
        send: a message to the coordinator.
        on_waiting: told for whom the main thread waits; empty: it goes on.
    """

    def __init__(self, name: str, send: Callable[[Message], None], on_waiting: Callable[[str], None]) -> None:
        self._name, self._send, self._on_waiting = name, send, on_waiting
        # What is sent under it leaves in the order of what it says.
        self._lock = threading.Lock()
        self._waited: tuple[Ask, SimpleQueue[Decided | Exception], float] | None = None
        self._begin(0, joined=False)

    # ---- the cell, on the main thread

    def begin_cell(self, cell: int, *, joined: bool) -> None:
        """A cell begins that is no replay. ``joined``: on others it runs already."""
        with self._lock:
            self._begin(cell, joined)

    def _begin(self, cell: int, joined: bool) -> None:
        self._cell, self._serial = cell, 0
        self._path, self._fence = [0], list[int]()
        self._places: list[LoopPlace] = []
        self._taking_part = not joined
        self._known: deque[Decided] = deque(maxlen=_KEPT)
        self._stops: deque[DecidedStop] = deque(maxlen=_MOST_STOPS)

    def end_cell(self) -> None:
        """The cell is over here."""
        with self._lock:
            self._begin(0, joined=False)

    def enter_loop(self, whole: bool = False) -> LoopPlace:
        """A loop over ``nc.shard`` begins, or a ``whole`` loop of a library: one place, however many loops over
        ``nc.shard`` it makes, as each node may be in another of its epochs."""
        place = LoopPlace(self._leave, whole)
        if self._cell and not any(one.whole for one in self._places):
            self._places.append(place)
            self._go_to([*self._path, 0])
        return place

    def _leave(self, place: LoopPlace) -> None:
        if place in self._places:
            depth = self._places.index(place)
            del self._places[depth:]
            self._go_to([*self._path[:depth], self._path[depth] + 1])

    def enter_finish(self) -> None:
        """From here on this node waits for all others to come to the same finish."""
        self._go_to([*self._path[:-1], self._path[-1] + 1], fence=True)

    def enter_collective(self) -> None:
        """The same for a collective of the cell; the place has no number of its own."""
        if self._path != [0] and self._path != self._fence:
            self._go_to(self._path, fence=True)

    def _go_to(self, path: list[int], fence: bool = False) -> None:
        with self._lock:
            if not self._cell:
                return
            self._path = path
            if fence:
                self._fence = path
            self._send(PlaceReached(cell=self._cell, path=path, fence=fence))

    def ask(
        self, name: str, site: str, *, by: str = "", flag: bool = False, metrics: dict[str, float] | None = None,
        weight: float = 1.0,
    ) -> Decided:  # fmt: skip
        """The result of one call, when all nodes have answered. KeyboardInterrupt ends the wait.

        Raises:
            ValueError: the nodes made different calls.
            Deadlock: another node waits for this one in another call.
        """
        outcome: SimpleQueue[Decided | Exception] = SimpleQueue()
        try:
            self.post(outcome, name, site, by=by, flag=flag, metrics=metrics, weight=weight)
            result: Decided | Exception = wait_for(outcome)
        except BaseException:
            self._withdraw()
            raise
        finally:
            self._on_waiting("")
        if isinstance(result, Exception):
            self._withdraw()
            raise result
        if result.error:
            raise ValueError(f"{name}: {result.error}")
        return result

    def post(
        self, outcome: "SimpleQueue[Decided | Exception]", name: str, site: str, *, by: str = "", flag: bool = False,
        metrics: dict[str, float] | None = None, weight: float = 1.0,
    ) -> None:  # fmt: skip
        """Say this node's answer; the result, or what went wrong, comes into ``outcome``."""
        with self._lock:
            self._serial += 1
            ask = Ask(
                cell=self._cell, serial=self._serial, path=self._path, site=site, name=name, by=by, flag=flag,
                metrics=metrics or {}, weight=weight,
            )  # fmt: skip
            self._waited = ask, outcome, time.monotonic()
            self._send(ask)

    def _withdraw(self) -> None:
        """A call that was left in the middle is answered no more."""
        with self._lock:
            self._waited = None
            self._send(Withdrawn(cell=self._cell, serial=self._serial))

    # ---- on the I/O thread

    def blocked(self) -> tuple[str, int, float] | None:
        """The call that the main thread waits in: its name, its number, since when."""
        waited = self._waited
        return (waited[0].name, waited[0].serial, waited[2]) if waited is not None else None

    def fail(self, serial: int, error: Exception) -> None:
        """Raise ``error`` where the main thread waits in call ``serial``, if it still does."""
        waited = self._waited
        if waited is not None and waited[0].serial == serial:
            waited[1].put(error)

    def on_control(self, message: Message) -> None:
        if isinstance(message, Decided):
            self._take(message)
        elif isinstance(message, DecisionQuery):
            self._tell_state(message.ticket)
        elif isinstance(message, AnswersMissing):
            waited = self._waited
            if waited is not None and (message.cell, message.serial) == (waited[0].cell, waited[0].serial):
                self._on_waiting(f"{waited[0].name} #{message.serial} for {', '.join(message.nodes)}")

    def _take(self, decided: Decided) -> None:
        with self._lock:
            waited = self._waited
            if waited is None or decided.cell != waited[0].cell:
                return
            if waited[0].serial != (decided.serial or decided.serials.get(self._name)):
                return
            self._waited = None
            if decided.serials:
                self._known.append(decided)
                self._taking_part = self._taking_part or len(decided.serials) > 1
            if decided.stop:
                self._stops.append(DecidedStop(number=decided.number, site=decided.site, path=decided.path))
        waited[1].put(decided)

    def on_roster(self, roster: Roster) -> None:
        """Who is in does not matter here: the coordinator decides."""

    def _tell_state(self, ticket: int) -> None:
        with self._lock:
            self._send(
                DecisionState(
                    ticket=ticket,
                    cell=self._cell,
                    path=self._path,
                    fence=self._fence,
                    taking_part=self._taking_part,
                    asked=self._waited[0] if self._waited is not None else None,
                    known=list(self._known),
                    stops=list(self._stops),
                )
            )

    def on_mesh(self, sender: str, header: JobFrame, payload: memoryview) -> None:
        """Nothing of other nodes is for decisions."""

    def on_tick(self, now: float) -> None:
        """Nothing is done by time here."""

    def keep(self) -> Callable[[], Path] | None:
        return None
