"""A Stop from the cluster, and moments in which it must wait."""

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
