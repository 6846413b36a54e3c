"""The local model between two rounds: what this node adds to a round, and what a round does to it. Main thread only.

With theta the global parameters and theta_m the local ones, a node contributes ``D = theta - theta_m`` (arXiv
2311.08105; old minus new, so the outer optimiser subtracts). In a model of low precision theta is rounded when it is
loaded, so the difference is taken from the value that was loaded. A lossy codec gets ``a = D + e`` and keeps
``e = a - decode(encode(a))`` for the next round, once the round is committed.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from notebook_cluster.codecs import NotFiniteError, WireFormat
from notebook_cluster.training.member_types import Boundary
from notebook_cluster.training.parameters import Parameters

Vector = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class _Sent:
    """A contribution whose round is open."""

    local: Vector
    """theta_m at the boundary."""
    feedback: Vector | None
    samples: float
    steps: int


class Replica:
    """One node's copy of the model and the work in it that no round has counted yet (``steps``, ``samples``).

    Every method that changes the model computes aside first and swaps at its end; call them with interrupts deferred.
    """

    def __init__(self, parameters: Parameters, wire: WireFormat) -> None:
        self.parameters = parameters
        self.wire = wire
        self.started = False
        self.theta: Vector = np.empty(0, np.float32)
        """The global parameters that the local work is based on."""
        self.momentum: Vector = self.theta
        self.state_hash = ""
        self.round = 0
        self.steps = 0
        self.samples = 0.0
        self._reference: Vector = self.theta
        """What D is taken from: theta as the model holds it."""
        self._feedback: Vector | None = None
        self._sent: _Sent | None = None

    @property
    def outstanding(self) -> bool:
        """A contribution was handed over and its round is still open."""
        return self._sent is not None

    def count(self, samples: float) -> None:
        """One inner step on ``samples`` examples."""
        self.steps += 1
        self.samples += samples

    def start(self, round: int, theta: Vector, momentum: Vector, state_hash: str) -> None:
        """The job is on at this state. Steps since the last round stay: as they are on the same state, re-based on a
        newer one, unless a contribution was under way (the newer state may contain it)."""
        same = self.started and state_hash == self.state_hash
        if self.started and not same and self._sent is None and self.steps:
            self._move(theta, self._work())
        elif not same:
            self._reset(theta)
        self._sent = None
        self._hold(round, theta, momentum, state_hash)

    def contribution(self, finishing: bool) -> Boundary:
        """What this node adds to the next round, encoded once; a node without new samples only receives.

        Raises:
            ValueError: the model's parameters were changed since it was made; names the first.
        """
        self.parameters.check()
        if not self.samples:
            self.steps = 0
            return Boundary(encoded=b"", samples=0.0, steps=0, finishing=finishing)
        local = self.parameters.read()
        with np.errstate(all="ignore"):  # a diverged model is told by ``finite``
            difference = self._difference(local)
            if self._feedback is not None:
                difference += self._feedback
            norm = float(np.linalg.norm(difference))
        self._sent = _Sent(local, None, self.samples, self.steps)
        try:
            encoded = self.wire.encode(difference)
        except NotFiniteError:
            return Boundary(encoded=b"", samples=self.samples, steps=self.steps, finite=False, finishing=finishing)
        if self.wire.codec.lossy:
            self._sent = replace(self._sent, feedback=difference - self.wire.decode(encoded))
        return Boundary(encoded=encoded, samples=self.samples, steps=self.steps, norm=norm, finishing=finishing)

    def apply(self, round: int, theta: Vector, momentum: Vector, state_hash: str, counted: bool) -> None:
        """COMMIT. Work done after the boundary (its wait was interrupted) is carried over to the new parameters."""
        work = None
        if counted and self._sent is not None:
            sent, self._sent = self._sent, None
            self._feedback = sent.feedback
            self.steps -= sent.steps
            self.samples -= sent.samples
            work = sent.local - self.parameters.read() if self.steps else None
        elif self.steps:
            work = self._work()
        if work is None:
            self._load(theta)
        else:
            self._move(theta, work)
        self._hold(round, theta, momentum, state_hash)

    def rebase(self, round: int, theta: Vector, momentum: Vector, state_hash: str) -> None:
        """A round went on without this node: ``theta_m += theta - theta_old``; contribution and error feedback stay."""
        work, sent = self._work(), self._sent
        sent_work = self._difference(sent.local) if sent is not None else work
        self._move(theta, work)
        if sent is not None:
            local = self.parameters.read() if self.steps == sent.steps else self._reference - sent_work
            self._sent = replace(sent, local=local)
        self._hold(round, theta, momentum, state_hash)

    def discard(self) -> None:
        """REFUSED: error feedback 0, theta_m = theta."""
        self._reset(self.theta)

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """The model is theta inside the block, and afterwards bit for bit what it was before."""
        local = self.parameters.snapshot()
        try:
            self.parameters.load(self.theta)
            yield
        finally:
            self.parameters.restore(local)

    # ---- the model ------------------------------------------------------------------------------------------

    def _difference(self, local: Vector) -> Vector:
        return self._reference - local

    def _work(self) -> Vector:
        """Everything done since the reference, counted in an open contribution or not."""
        return self._difference(self.parameters.read())

    def _load(self, theta: Vector) -> None:
        """The model becomes theta."""
        self.parameters.load(theta)
        self._reference = theta if self.parameters.exact else self.parameters.read()

    def _move(self, theta: Vector, work: Vector) -> None:
        """The model becomes theta with ``work`` still in it."""
        self.parameters.load(theta - work)
        self._reference = theta if self.parameters.exact else self.parameters.read() + work

    def _reset(self, theta: Vector) -> None:
        self._load(theta)
        self._sent = self._feedback = None
        self.steps, self.samples = 0, 0.0

    def _hold(self, round: int, theta: Vector, momentum: Vector, state_hash: str) -> None:
        self.started = True
        self.round, self.theta, self.momentum, self.state_hash = round, theta, momentum, state_hash
