"""A Stop that falls between two steps: SIGINT in a training loop waits for the end of the step that is going on.

There nothing is half done: the optimizer has made its step or not begun it, the batch is counted, and what belongs to
the run can be kept, so that the cell goes on bit for bit when it is run again. In a loop over ``nc.shard`` that is when
it asks for the next batch: what its code does after ``sync.step()``, the step of a scheduler, is then done too. In any
other loop it is the end of ``sync.step()``. A step that takes longer than
:data:`PATIENCE_SECONDS` is not waited for, nor is one after a second Stop; a wait for other nodes ends as soon as it
is known what became of the open round. Python delivers signals to the main thread only: on another one all of this
does nothing.
"""

import _thread
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

PATIENCE_SECONDS = 2.0
"""How long a Stop waits for the end of a step."""


def interrupt_main_thread() -> None:
    """What Ctrl-C does in a terminal, from another thread: a blocking call of the main thread ends too."""
    main = threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()


class StepStops:
    """One in a process, for there is one SIGINT. The main thread calls it, but for :meth:`_insist`.

    Attributes:
        inside: the main thread is in a sync call, which a Stop leaves at safe points only (:meth:`check`).
        ended: when the last one ended.
        installed: SIGINT waits for the end of a step.
        came: when the Stop came that waits; None: none does.
    """

    def __init__(self) -> None:
        self.inside = False
        self.installed = False
        self.calls: list[SyncCall] = []
        """Those of the sync objects that the running cell steps."""
        self.ended = 0.0
        self.came: float | None = None
        self._insisted = False
        self._safe = False
        self._timer: threading.Timer | None = None

    def install(self, at_cell_end: Callable[[Callable[[str], None]], None]) -> None:
        """From now on, until the cell ends, SIGINT waits for the end of a step. Where the code has set a handler of its
        own for it (a cell with a top-level await has ipykernel's) it stays."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.on_signal)
            self.installed = True
            at_cell_end(lambda status: self.uninstall())

    def uninstall(self) -> None:
        """SIGINT is Python's own again; a Stop that waits is forgotten, for the code it was for is over."""
        if self.installed:
            if signal.getsignal(signal.SIGINT) == self.on_signal:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            self.installed = False
        self._forget()
        self.calls.clear()

    def check(self) -> None:
        """Call where a sync call waits for others.

        Raises:
            KeyboardInterrupt: a Stop came, and it has waited long enough.
        """
        if self.came is not None and (self._insisted or time.monotonic() - self.came >= PATIENCE_SECONDS):
            self.end()

    def end(self) -> None:
        """Raises:
        KeyboardInterrupt: always; the Stop that waited is over with it.
        """
        self._forget()
        self._safe = True
        raise KeyboardInterrupt

    def take_safe(self) -> bool:
        """Whether the KeyboardInterrupt that ends a sync call came at a safe point."""
        safe, self._safe = self._safe, False
        self._forget()  # the same Stop may have been noted once more on the way
        return safe

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.came is not None:
            self._insisted = True
        elif self.inside or time.monotonic() - self.ended < PATIENCE_SECONDS:
            self.came, self._insisted = time.monotonic(), False
            self._timer = threading.Timer(PATIENCE_SECONDS, self._insist)
            self._timer.daemon = True
            self._timer.start()
            return
        if not self.inside:
            self._forget()
            signal.default_int_handler(number, frame)

    def _insist(self) -> None:
        """The step takes long."""
        if self.came is not None:
            interrupt_main_thread()

    def _forget(self) -> None:
        self.came, self._insisted = None, False
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


_OF_MAIN_THREAD = StepStops()


def stops_of_this_thread() -> StepStops:
    """On the main thread always the same one. On another, where SIGINT never comes, a new one."""
    return _OF_MAIN_THREAD if threading.current_thread() is threading.main_thread() else StepStops()


class SyncCall:
    """``with`` it, what is in the block is a sync call: at its end, or when the next batch is asked for, a Stop that
    waits raises KeyboardInterrupt, after ``keep`` of all sync objects of the cell was called, because all that belongs
    to the run is whole there. Where a cell steps several, it is whole when all have taken as many steps. ``keep`` is
    called too where the block itself raises KeyboardInterrupt at a safe point. ``at_next_batch``: as of
    :class:`notebook_cluster.training.runtime.DataLoops`.

    Attributes:
        stops: those of the thread on which it was made.
        steps: that were counted in this cell.
    """

    def __init__(
        self,
        at_cell_end: Callable[[Callable[[str], None]], None],
        at_next_batch: Callable[[Callable[[], None]], bool],
        keep: Callable[[], None],
    ) -> None:
        self.stops = stops_of_this_thread()
        self.steps = 0
        self._at_cell_end, self._at_next_batch, self.keep = at_cell_end, at_next_batch, keep
        self._put_off: int | None = None
        """The step after which the end was put off until the next batch, once for each Stop."""

    def begin_cell(self) -> None:
        """The sync object takes part in a new cell; :meth:`end_cell` follows in any case."""
        stops = self.stops
        if stops.installed and signal.getsignal(signal.SIGINT) != stops.on_signal:
            stops.uninstall()  # of a cell that has ended otherwise
        self.steps, self._put_off = 0, None
        if self not in stops.calls:
            stops.calls.append(self)

    def end_cell(self) -> None:
        """It takes no part any more."""
        if self in self.stops.calls:
            self.stops.calls.remove(self)

    def __enter__(self) -> None:  # at every step: no call that is not needed
        stops = self.stops
        stops.inside = True
        if not stops.installed:
            stops.install(self._at_cell_end)

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        stops = self.stops
        stops.inside, stops.ended = False, time.monotonic()
        if kind is None and stops.came is None:
            return
        if kind is None and self._is_whole():
            self._keep_all()
            if self._put_off in (None, self.steps) and self._at_next_batch(self._end_at_batch):
                self._put_off = self.steps
                return
            self._put_off = None
            stops.end()
        if kind is KeyboardInterrupt and stops.take_safe():
            self._keep_all()

    def _is_whole(self) -> bool:
        return len({call.steps for call in self.stops.calls}) < 2

    def _end_at_batch(self) -> None:
        self._put_off = None
        if self.stops.came is not None and self._is_whole():
            self._keep_all()
            self.stops.end()

    def _keep_all(self) -> None:
        for call in self.stops.calls or [self]:
            call.keep()
