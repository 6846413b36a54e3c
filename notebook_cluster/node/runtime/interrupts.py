"""A Stop from the cluster, moments in which it must wait, and the cell that it is for."""

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def interrupt_main_thread() -> None:
    """What Ctrl-C does in a terminal, from another thread: a blocking call of the main thread ends too."""
    main = threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """SIGINT waits until the block ends and then does what it would have done at once.

    On another thread than the main one this does nothing: Python delivers signals to the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
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
