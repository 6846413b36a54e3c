"""What a person does while a cell waits: presses Stop, and answers ``input()`` and ``getpass()`` of nodes.

The Stop button is counted, not raised, and told from the end of the kernel. Jupyter sends a kernel that is to restart
or to shut down SIGINT first, as for Stop, and the request right after it: 1 to 2 ms later, 150 ms and more on a machine
with several times more work than cores. A restart must not stop what runs on the nodes, so :class:`Press` waits until
the process that sent the signal has nothing left to do, or has had processor time enough.

Questions of nodes are asked one after the other, each with its node's name. The kernel's own ``input()`` waits on the
main thread, as for any cell. What the nodes put out meanwhile is shown by a thread in a copy of the cell's context, so
nothing stands still because one node asks.
"""

import _thread
import builtins
import contextvars
import getpass
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from notebook_cluster.protocol.interaction import InputRequested, InputWithdrawn
from notebook_cluster.protocol.views import CellEnded

if TYPE_CHECKING:
    from notebook_cluster.client import CellStream, Cluster

SAME_PRESS_SECONDS = 0.5
LOOK_SECONDS = 0.0015
"""Between two looks at a press that is not understood yet."""
_QUIET_LOOKS = 3
"""So many looks in a row at a sender that rests, and at sockets that do: what it has sent is here by then."""
_SOCKETS = b"ZMQbg/IO"
"""How libzmq calls the threads that read its sockets."""
_UNSEEN_SECONDS = 0.1
"""Where one process cannot see what another does."""
_MOST_PROCESSOR_SECONDS = 0.3
"""Of a sender that does not rest: what it had to send it has sent by then, however few processors there are."""
_MOST_SECONDS = 5.0
_AT_REST = b"SIZX"
"""Letters of /proc/<pid>/stat: asleep, idle or ended. Anything else runs, or wants to."""

Meaning = Literal["", "stop", "restart", "shutdown"]


class StopCounter:
    """Counts SIGINT instead of raising KeyboardInterrupt, so that no event is lost and no message is cut in two.

    What waits must look at ``count`` whenever ``on_press`` was called, and every 0.2 s where a signal does not end a
    wait. Outside the main thread, where Python allows no handler, it counts nothing.
    """

    def __init__(self) -> None:
        self.count = 0
        self.on_press: Callable[[], None] | None = None
        """Called in the signal handler."""
        self._before: Any = None
        self._installed = False

    def __enter__(self) -> "StopCounter":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.on_press is not None:
            self.on_press()


class Press:
    """A SIGINT that has just come to the kernel of ``shell``: what it meant."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._kernel = getattr(shell, "kernel", None)
        self._sender = os.getppid()
        self._began, self._used_before = time.monotonic(), _processor_seconds(self._sender)
        self._quiet = 0
        control = getattr(self._kernel, "control_thread", None)
        self._control, self._loop = getattr(control, "native_id", None) or 0, getattr(control, "io_loop", None)
        self._control_ran: threading.Event | None = None
        """Of a callback that was given to the control thread when the sender had come to rest."""

    def meaning(self) -> Meaning:
        """Empty while that is not known yet: ask again after LOOK_SECONDS. Without a kernel it is known at once."""
        ending = asked_to_end(self._shell)
        if ending:
            return ending
        waited = time.monotonic() - self._began
        if self._kernel is None or waited > _MOST_SECONDS:
            return "stop"
        at_rest = is_at_rest(self._sender)
        if at_rest is None:
            return "stop" if waited > _UNSEEN_SECONDS else ""
        if not at_rest and _processor_seconds(self._sender) - self._used_before < _MOST_PROCESSOR_SECONDS:
            self._quiet, self._control_ran = 0, None
            return ""
        # The kernel's threads that read its sockets, and its control thread, which gets the request, need a turn too.
        if self._control_ran is None:
            self._control_ran = threading.Event()
            if self._loop is not None:
                self._loop.add_callback(self._control_ran.set)
            else:
                self._control_ran.set()
        quiet = self._control_ran.is_set() and is_at_rest(os.getpid(), _SOCKETS, self._control) is not False
        self._quiet = self._quiet + 1 if quiet else 0
        return "stop" if self._quiet >= _QUIET_LOOKS else ""


def _processor_seconds(pid: int) -> float:
    """What the first thread of the process, which has a server's event loop, has run; the time that passes where nobody
    says."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return time.monotonic()


def asked_to_end(shell: Any) -> Literal["", "restart", "shutdown"]:
    """What a frontend has asked the kernel of ``shell`` to do: ipykernel keeps the answer to the request."""
    message = getattr(getattr(shell, "kernel", None), "_shutdown_message", None)
    if not isinstance(message, dict):
        return ""
    return "restart" if message.get("content", {}).get("restart") else "shutdown"


def is_at_rest(pid: int, name: bytes = b"", thread: int = 0) -> bool | None:
    """Whether every thread of the process (whose name begins so, and this ``thread``) sleeps; None where that cannot be
    seen (no /proc, another container)."""
    states = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            # The name is in parentheses and may hold anything.
            named, _, rest = path.read_bytes().rpartition(b")")
        except OSError:
            continue  # that thread has just ended
        if named.partition(b"(")[2].startswith(name) or path.parent.name == str(thread):
            states.append(rest.lstrip()[:1])
    return all(state in _AT_REST for state in states) if states else None


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
