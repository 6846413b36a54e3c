"""``input()`` and ``getpass()`` of nodes, asked in the notebook: one after the other, each with its node's name.

The kernel's own ``input()`` waits on the main thread, as for any cell. What the nodes put out meanwhile is shown by a
thread in a copy of the cell's context, so nothing stands still because one node asks.
"""

import _thread
import builtins
import contextvars
import getpass
import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.execution.interrupts import StopCounter
from notebook_cluster.protocol.interaction import InputRequested, InputWithdrawn
from notebook_cluster.protocol.views import CellEnded

if TYPE_CHECKING:
    from notebook_cluster.client import CellStream, Cluster

_SLICE = 0.1


class Asking:
    """The questions of one cell. Made and used on the main thread.

    Args:
        stops: after a Stop nothing is asked: the nodes are interrupted.
        show: takes the other events of the cell while a question is open, and None when there is none; called in a
            thread.
    """

    def __init__(
        self, cluster: "Cluster", stream: "CellStream", stops: StopCounter, show: Callable[[Any], None]
    ) -> None:
        self._cluster = cluster
        self._stream = stream
        self._stops = stops
        self._show = show
        self._questions: deque[InputRequested] = deque()
        self._over = threading.Event()
        """The question that was open is open no more."""
        self._withdrawn = False
        self._ended = False
        self._before: Any = None

    def ask(self, event: InputRequested) -> None:
        """Ask ``event`` and whatever is asked meanwhile. Stop ends it, and is counted as Stop."""
        self._questions.append(event)
        try:
            while self._questions and not self._ended and not self._stops.count:
                self._ask_first()
                self._questions.popleft()
        except KeyboardInterrupt:
            pass  # counted
        self._questions.clear()

    def _ask_first(self) -> None:
        """Raises KeyboardInterrupt when Stop was pressed."""
        question, answer, end = self._questions[0], "", False
        self._over.clear()
        self._withdrawn = False
        show = contextvars.copy_context().run
        meanwhile = threading.Thread(target=show, args=(self._show_meanwhile, question), name="notebook-cluster-asking")
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        meanwhile.start()
        try:
            answer = _read(f"{question.node}: {question.prompt}", question.password)
        except EOFError:
            end = True
        except KeyboardInterrupt:
            if not self._withdrawn:
                raise
        finally:
            self._over.set()
            self._stream.wake()
            meanwhile.join()
            signal.signal(signal.SIGINT, self._before)
        if not self._withdrawn:
            self._cluster.answer_input(question.id, answer, end=end)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stop, or our own thread that withdraws the question: both end the kernel's wait for the answer."""
        if not self._withdrawn and callable(self._before):
            self._before(number, frame)
        if not self._over.is_set():
            raise KeyboardInterrupt

    # ---- in a thread, while the question is open

    def _show_meanwhile(self, question: InputRequested) -> None:
        from notebook_cluster.client import ClusterError

        try:
            while not self._over.is_set():
                event = self._stream.get(_SLICE)
                if isinstance(event, InputRequested):
                    self._questions.append(event)
                elif isinstance(event, InputWithdrawn):
                    self._forget(event.id, question)
                elif isinstance(event, CellEnded):
                    self._end(event, question)
                    return
                else:
                    self._show(event)
        except ClusterError:
            self._end(None, question)

    def _end(self, event: CellEnded | None, question: InputRequested) -> None:
        """The main thread is to see the end of the cell, or (None) of the cluster, not this one."""
        self._ended = True
        self._stream.put_back(event)
        self._forget(question.id, question)

    def _forget(self, identity: int, question: InputRequested) -> None:
        if identity == question.id:
            self._withdrawn = True
            if not self._over.is_set():
                _thread.interrupt_main()
            return
        for other in [other for other in self._questions if other.id == identity and other is not question]:
            self._questions.remove(other)


def _read(prompt: str, password: bool) -> str:
    """What somebody types. The kernel has put its own functions in the place of these two."""
    return getpass.getpass(prompt) if password else builtins.input(prompt)
