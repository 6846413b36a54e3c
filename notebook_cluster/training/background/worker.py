"""The thread of a job's background: the runtime's, or for a large model one of its own.

There it computes means and outer steps while the runtime's thread only moves frames: a Stop, telemetry and other jobs
do not wait for numpy, which lets go of Python's lock meanwhile.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from notebook_cluster.protocol.node import EndWait, NodeLog
from notebook_cluster.protocol.rounds import Close, Commit, Save, Saved
from notebook_cluster.rounds.member import events_effects as types
from notebook_cluster.rounds.member.machine import is_prepared
from notebook_cluster.rounds.member.state import MemberState
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.training.checkpointing.optimizer_bytes import StateRequest
from notebook_cluster.training.runtime import Runtime

_log = logging.getLogger(__name__)

Notice = (
    types.BeginTraining
    | types.TakeStep
    | types.Apply
    | types.Rebase
    | types.DiscardContribution
    | types.ReleaseContribution
    | types.Held
    | types.Finish
    | types.Fail
    | types.Pass
    | Close
    | Save
    | Saved
    | StateRequest
    | EndWait
)
"""What the main thread takes up at its next sync call."""


class RefersToState(Protocol):
    """A :class:`notebook_cluster.training.loop.replica.Replica`."""

    def references(self, state: MemberState, name: str, counted: bool) -> int | None: ...

    def give_way(self) -> None: ...


class Resting:
    """Whether the main thread waits and uses no vector of the state, so that the background may write to it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """The background holds it while it counts on that."""
        self._replica: RefersToState | None = None

    @contextlib.contextmanager
    def of(self, replica: RefersToState) -> Iterator[None]:
        """The main thread rests in this block; it ends when nothing is written any more, also where the handler of a
        signal raises."""
        raised: BaseException | None = None
        try:
            self._replica = replica
            yield
        finally:
            while self._replica is not None:
                try:
                    with self.lock:
                        self._replica = None
                except BaseException as error:
                    raised = error
            if raised is not None:
                raise raised

    def gives_way(self, state: MemberState, node: str, commit: Commit) -> bool:
        """Whether COMMIT may write to theta and momentum of ``state``: ``node`` is PREPARED for it, nobody but state
        and replica has them (who does might be a joiner that is served, or a checkpoint), and the replica does not need
        what they hold now, or not any more. With the lock held."""
        replica = self._replica
        if replica is None or not is_prepared(state, commit):
            return False
        for name in ("theta", "momentum"):
            needed = replica.references(state, name, node in commit.members)
            if needed is None or vectors.references(state, name) != needed:
                return False
        try:
            if node in commit.members:
                replica.give_way()
        except Exception:
            _log.exception("%s computes the error feedback of round %d when it applies it", node, commit.round)
            return False
        return True


LARGE = 1 << 20
"""Elements of a model from which on a thread is worth the hand-over: what a round computes of fewer takes a few
milliseconds."""

_HELD_BYTES = 64 << 20


class BackgroundThread:
    """Calls one after the other, in the order in which they were given.

    Attributes:
        dropped: payloads that did not find room in the queue.
    """

    def __init__(self, runtime: Runtime, job: str) -> None:
        self.dropped = 0
        self._runtime, self._job = runtime, job
        self._calls: SimpleQueue[tuple[Callable[[], None], int]] | None = None
        """Of the thread of its own, with the bytes that a call keeps; None: there is none."""
        self._most = 0
        self._given = self._done = 0
        """Bytes that were put in the queue, and those of calls that are done: each is written by one thread."""

    def soon(self, call: Callable[[], None]) -> None:
        """Have ``call`` done; from any thread."""
        self._runtime.call_soon(lambda: self.do(call))

    def do(self, call: Callable[[], None], size: int = 0) -> None:
        """Have ``call`` done, now if there is no thread of its own; from the runtime's thread. With ``size``, the bytes
        that it keeps in memory until then, it is dropped and counted where too many wait; whoever needs them asks for
        them."""
        if self._calls is None:
            call()
        elif size and self._given - self._done + size > self._most:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:
                _log.warning("job %s computes and takes no more: %d frames dropped so far", self._job, self.dropped)
        else:
            self._given += size
            self._calls.put((call, size))

    def prepare(self, elements: int) -> None:
        """A model of so many ``elements`` is next; from the runtime's thread. From the first large one on there is a
        thread of its own. Bytes of two models may wait there."""
        if elements < LARGE:
            return
        self._most = max(self._most, _HELD_BYTES + 2 * 4 * elements)
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=self._run, args=(self._calls,), name=f"rounds-{self._job}", daemon=True).start()

    def _run(self, calls: "SimpleQueue[tuple[Callable[[], None], int]]") -> None:
        while True:
            call, size = calls.get()
            try:
                call()
            except Exception as error:
                _log.exception("job %s failed in the background", self._job)
                text = f"job {self._job!r} failed in the background: {type(error).__name__}: {error}"
                self._runtime.send_control(NodeLog(level="error", text=text))
            self._done += size
            del call  # what it keeps is not needed while the next one is waited for


def memory_of(runtime: Runtime, size: int) -> NDArray[np.uint8]:
    """``size`` bytes, with whatever is in them, for what ``runtime`` will send."""
    lent = runtime.lending.memory(size)
    return vectors.bytes_of(size) if lent is None else lent
