"""The cell that runs on the main thread, a Stop that is for it, and moments in which a Stop must wait."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from notebook_cluster.node.runtime.world import CellInfo
from notebook_cluster.protocol.cell_mark import CellMarkWriter
from notebook_cluster.protocol.node import InterruptCell
from notebook_cluster.training.loop.step_stops import interrupt_main_thread


class RunningCell:
    """What a node knows of the cell that runs. ``interrupt`` and ``broken`` are called on the I/O thread, the rest on
    the main thread.

    Args:
        mark: path of the agent's file that says which cell runs; empty without one.

    Attributes:
        info: the cell; None outside of cells.
        partial: it runs on some nodes of the roster only.
    """

    def __init__(self, mark: str) -> None:
        self.info: CellInfo | None = None
        self.partial = False
        self._mark = CellMarkWriter(mark)
        self._at_end: list[Callable[[str], None]] = []
        self._on_broken: Callable[[str], None] | None = None
        self._interruptible = False
        self._stopped: set[int] = set()
        """Cells that a Stop reached before they began."""

    @property
    def number(self) -> int:
        """Of the cell; 0 outside of cells."""
        return self.info.cell if self.info is not None else 0

    @property
    def replays(self) -> bool:
        """Whether the cell ran before, on the other nodes."""
        return self.info is not None and self.info.replay

    def divided_among(self, node: str) -> tuple[str, ...]:
        """The nodes of a cell that runs on some only, ``node`` among them; empty otherwise."""
        info = self.info
        if info is None or not self.partial or info.joined or info.replay or node not in info.nodes:
            return ()
        return info.nodes

    def forget_callbacks(self) -> None:
        """A cell is about to begin: whoever asked outside of one is not told of its end."""
        self._at_end.clear()

    def enter(self) -> bool:
        """The user's code comes next: from now on a Stop interrupts the main thread. False when one came before."""
        # This order, and the other one in interrupt(): whatever the threads do, one of the two sees the other.
        self._interruptible = True
        if self.number in self._stopped:
            self._interruptible = False
        else:
            self._mark.set(self.number)
        return self._interruptible

    def tell_end(self, status: str) -> BaseException | None:
        """The user's code is over with ``ok``, ``error: ...`` or ``interrupted``: tell those who asked, in order.

        Returns what the first of them raised; those after it are told that the cell has failed.
        """
        self._interruptible = False
        self._mark.set(0)
        self._stopped.discard(self.number)
        self._on_broken = None
        failure: BaseException | None = None
        while self._at_end:  # who is told may ask to be told of more: the last round of a sync object does
            callback = self._at_end.pop(0)
            try:
                callback(status)
            except (Exception, KeyboardInterrupt) as error:
                failure = failure or error
                stopped = isinstance(failure, KeyboardInterrupt)
                status = "interrupted" if stopped else f"error: {type(failure).__name__}: {failure}"
        return failure

    def at_end(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the status when the user's code is over."""
        self._at_end.append(callback)

    def when_broken(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` until the cell ends, see :meth:`broken`."""
        self._on_broken = callback

    def broken(self, cause: str) -> None:
        """A node of the cell is lost (``cause`` says who and why), or a Stop has come (empty)."""
        if self._on_broken is not None:
            self._on_broken(cause)

    def interrupt(self, message: InterruptCell) -> None:
        """A Stop: interrupt the main thread if it is inside that cell, else keep the cell from beginning."""
        if self.number == message.cell:
            self.broken("")
        if message.sent:
            return
        self._stopped.add(message.cell)
        if self.number == message.cell and self._interruptible:
            self._stopped.discard(message.cell)
            interrupt_main_thread()


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """SIGINT waits until the block ends and then does what it would have done at once. The block gets what says whether
    one waits.

    On another thread than the main one this does nothing: Python delivers signals to the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    waiting: list[tuple[int, FrameType | None]] = []
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield lambda: bool(waiting)
    finally:
        # None: a handler that was not set from Python; it cannot be put back, so the usual one is.
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
        if waiting and callable(before):
            before(*waiting[-1])


class CellInterrupts:
    """SIGINT reaches a request's code, or waits until the code begins; before and behind it no line is interrupted.

    ipykernel ignores SIGINT between requests. From the moment it takes one up KeyboardInterrupt may come between any
    two of its own lines, where it swallows it and sends no reply: whoever waits for the reply waits forever. Here
    SIGINT is noted for the request that the kernel has taken up, and comes when its code begins.

    At SIGWINCH, which a kernel has no other use for, a system call returns: after it Python sees a SIGINT that came
    just before the call. The agent sends it behind each SIGINT.

    ``kernel``: ipykernel's, already set up.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._execute = kernel.do_execute
        self._noted: tuple[str, str] | None = None
        """The request for which SIGINT came before its code."""

    def install(self) -> None:
        """Call on the main thread."""
        # On the instance: ipykernel's class stays as it is.
        self._kernel.pre_handler_hook = self._before_request
        self._kernel.do_execute = self._do_execute
        self._between = signal.signal(signal.SIGINT, self._note)
        if signal.getsignal(signal.SIGWINCH) is signal.SIG_DFL:
            signal.signal(signal.SIGWINCH, lambda number, frame: None)

    def uninstall(self) -> None:
        """Call on the main thread, between requests."""
        signal.signal(signal.SIGINT, self._between)
        del self._kernel.pre_handler_hook, self._kernel.do_execute

    def allow(self) -> None:
        """The user's code comes next.

        Raises:
            KeyboardInterrupt: SIGINT came since the kernel took up the request.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        # While it runs code with a top-level await ipykernel has a handler of its own.
        if signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._noted == self._request():
            self._noted = None
            signal.raise_signal(signal.SIGINT)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Like :meth:`allow`, for a wait before the user's code."""
        try:
            self.allow()
            yield
        finally:
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = self._request()

    def _request(self) -> tuple[str, str]:
        """Message id and type of the request that the kernel has taken up, empty before the first."""
        header = (self._kernel.get_parent("shell") or {}).get("header", {})
        return header.get("msg_id", ""), header.get("msg_type", "")

    def _before_request(self) -> None:
        """ipykernel's pre_handler_hook: of all requests only an execute_request has the hooks that allow SIGINT."""
        if threading.current_thread() is threading.main_thread():
            executes = self._request()[1] == "execute_request"
            handler = self._note if executes else signal.default_int_handler
            self._kernel.saved_sigint_handler = signal.signal(signal.SIGINT, handler)

    async def _do_execute(self, *args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return await self._execute(*args, **kwargs)
            finally:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGINT, self._note)
        except KeyboardInterrupt:
            # Behind the code, in what IPython does then.
            return {
                "status": "error",
                "ename": "KeyboardInterrupt",
                "evalue": "",
                "traceback": [],
                "execution_count": self._kernel.shell.execution_count - 1,
                "user_expressions": {},
                "payload": [],
            }
