"""What the main thread of this node is blocked in, told to the coordinator: only it sees that two nodes wait for each
other in different calls, and then ends both waits with an error.

A wait is told once it is a second old, with the line of the user's code, and again each second, so that a coordinator
that was restarted hears of it; and when it is over.
"""

import linecache
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from msgspec.structs import replace

from notebook_cluster.collectives import Collectives, Deadlock
from notebook_cluster.node.runtime.decisions import DecisionClient
from notebook_cluster.protocol.node import Blocked, EndWait

TELL_AFTER = 1.0
TELL_AGAIN = 1.0
_MOST_SOURCE = 60
"""Characters of a line of code that are shown."""

_MOST_FILE = 100
_OURS = __name__.partition(".")[0]


@dataclass(frozen=True, eq=False)
class _RoundWait:
    job: str
    round: int
    thread: int
    started: float


class BlockedWaits:
    """``tick`` and ``end`` are called on the I/O thread, ``in_round`` on the one that runs the cell."""

    def __init__(
        self,
        collectives: Collectives,
        decisions: DecisionClient,
        *,
        send: Callable[[Blocked], None],
        cell: Callable[[], int],
        end_round: Callable[[str, EndWait], None],
    ) -> None:
        """``end_round`` raises in the wait for the open round of a job."""
        self._collectives, self._decisions = collectives, decisions
        self._send, self._cell, self._end_round = send, cell, end_round
        self._round: _RoundWait | None = None
        self._told: object = None
        """What the last message was about: a wait and whom it misses; None: nothing is told, or its end is."""
        self._message = Blocked(cell=0, serial=0)
        self._serial = 0
        self._told_at = 0.0
        self.cell_of_file: Callable[[str], int | None] = lambda filename: None
        """The cell that code of this file name was compiled from."""

    def in_round(self, job: str, round: int) -> None:
        """The thread waits for ``round`` of ``job`` from now on; 0: it goes on."""
        self._round = _RoundWait(job, round, threading.get_ident(), time.monotonic()) if round else None

    def tick(self, now: float) -> None:
        """A few times a second."""
        found = self._blocked_in(now)
        if found is None:
            self._say_over()
            return
        wait, message = found
        if wait != self._told:
            self._serial += 1
            self._told = wait
            self._message = self._complete(message)
        elif now - self._told_at < TELL_AGAIN:
            return
        self._told_at = now
        self._send(self._message)

    def end(self, order: EndWait) -> None:
        """The coordinator knows that the wait of this number cannot end."""
        if self._told is None or (order.cell, order.serial) != (self._message.cell, self._message.serial):
            return
        if self._message.job:
            self._end_round(self._message.job, order)
        elif self._message.decision:
            self._decisions.fail(self._message.decision, Deadlock(order.reason))
        else:
            self._collectives.receiver.fail(self._message.operation, Deadlock(order.reason))

    def _blocked_in(self, now: float) -> tuple[object, Blocked] | None:
        """What identifies the wait, and what is said of it; None: the main thread waits for nothing, or not long."""
        waiting = self._collectives.receiver.blocked()
        if waiting is not None:
            wait, missing = waiting
            if not missing or now - wait.started < TELL_AFTER:
                return None
            message = Blocked(
                cell=self._cell(), serial=0, operations=wait.operation, operation=wait.operation, name=wait.label,
                missing=missing,
            )  # fmt: skip
            return (wait, tuple(missing)), message
        operations = self._collectives.operations
        decision = self._decisions.blocked()
        if decision is not None:
            name, number, started = decision
            if now - started < TELL_AFTER:
                return None
            return number, Blocked(cell=self._cell(), serial=0, operations=operations, decision=number, name=name)
        round = self._round
        if round is None or round.thread != threading.main_thread().ident or now - round.started < TELL_AFTER:
            return None
        return round, Blocked(cell=self._cell(), serial=0, operations=operations, job=round.job, round=round.round)

    def _complete(self, message: Blocked) -> Blocked:
        """With its number, and the line of the user's code that the main thread is in."""
        place, at_end = self._place()
        return replace(message, serial=self._serial, place=place, at_end=at_end)

    def _say_over(self) -> None:
        if self._told is not None:
            self._told = None
            self._send(Blocked(cell=self._cell(), serial=0))

    def site(self) -> str:
        """``cell 7, line 12``: where the user's code is, which the main thread runs."""
        frame = self._frame()
        return self._site_of(frame) if frame is not None else f"at the end of cell {self._cell()}"

    def _frame(self) -> FrameType | None:
        """The innermost frame of the user's code on the main thread; None: that is over."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and _is_ours(frame):
            frame = frame.f_back
        over = frame is None or str(frame.f_globals.get("__name__", "")).partition(".")[0] == "IPython"
        return None if over else frame

    def _site_of(self, frame: FrameType) -> str:
        filename = frame.f_code.co_filename
        cell = self.cell_of_file(filename)
        where = f"cell {cell}" if cell is not None else filename.rpartition("/")[2]
        return f"{where[-_MOST_FILE:]}, line {frame.f_lineno}"

    def _place(self) -> tuple[str, bool]:
        """``cell 7, line 12: nc.all_reduce(metric)``, and whether the cell's code is over."""
        frame = self._frame()
        if frame is None:
            return self.site(), True
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        source = source if len(source) <= _MOST_SOURCE else source[:_MOST_SOURCE] + " ..."
        return self._site_of(frame) + (f": {source}" if source else ""), False


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return name in (_OURS, "threading", "contextlib", "queue")
