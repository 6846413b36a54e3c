"""The local model between two rounds: what this node adds to a round, and what a round does to it. Main thread only.

With theta the global parameters and theta_m the local ones, a node contributes ``D = theta - theta_m`` (arXiv
2311.08105; old minus new, so the outer optimiser subtracts). In a model of low precision theta is rounded when it is
loaded, so the difference is taken from the value that was loaded. A lossy codec gets ``a = D + beta * e`` and keeps
``e = a - decode(encode(a))`` for the next round, once the round is committed.

With fragments each round does this to one of them. What D is taken from is theta, never theta_m at an earlier boundary:
else work from before would be in no D, and the nodes would drift apart. With overlap training goes on while a
fragment is under way. What was done meanwhile stays on top of the new parameters, ``theta_m <- theta + (theta_m -
theta_m at the boundary)``: it is in the next D, and what this round has counted is not. With ``mix`` instead
``theta_m <- mix * theta_m + (1 - mix) * theta`` (streaming DiLoCo, arXiv 2501.18512).
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs

from notebook_cluster.codecs import Buffer, Memory, NotFiniteError, Vector, WireFormat
from notebook_cluster.rounds.member.events_effects import Apply, Boundary
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.vectors import bytes_of, difference, is_in_file, like, write_behind
from notebook_cluster.training.loop import encoding
from notebook_cluster.training.loop.encoding import DeviceEncoder, encoded, kept_beside, left_by, on_host
from notebook_cluster.training.loop.reference import Reference
from notebook_cluster.training.models.parameters import Parameters


@dataclass(frozen=True)
class _Count:
    steps: int = 0
    samples: float = 0.0


@dataclass
class _Sent:
    """A contribution whose round is open."""

    fragment: int
    local: Any
    """Elements of the fragment in theta_m at the boundary; like ``feedback`` a tensor where the model's GPU encodes.
    None: they are still in the model (see :meth:`Replica.keep_local`)."""
    until: _Count
    """All work up to this count is in the contribution."""
    feedback: Any = None
    """The error feedback that the round will leave."""
    unsaid: tuple[WireFormat, Buffer] | None = None
    """Where that is still to be computed: how the contribution was encoded, and its bytes. The model, what it was based
    on and the feedback before are as they were then."""


class Replica:
    """One node's copy of the model and the work in it that no round has counted yet (``steps``, ``samples``).

    Every method that changes the model computes aside first and swaps at its end; call them with interrupts deferred.
    """

    def __init__(
        self,
        parameters: Parameters,
        fragments: Fragments,
        *,
        mix: float | None = None,
        beta: float = 1.0,
        encoder: DeviceEncoder | None = None,
    ) -> None:
        """``mix``: the share that the local parameters keep of themselves when a round comes that they are in; None:
        the work since its boundary stays. ``beta``: how much of the error feedback is sent again. ``encoder``: asked
        first to encode what is sent."""
        self.parameters = parameters
        self.fragments = fragments
        self.started = self.scaled = self.overflowed = False
        """``scaled``: a GradScaler has multiplied the loss that the gradients at hand are of; ``overflowed``: so that
        they are not finite, as it expects now and then: what this node keeps for itself has nothing of them."""
        self.theta = self.momentum = np.empty(0, np.float32)
        """The global parameters that the local work is based on."""
        self.state_hash, self.round = "", 0
        self.memory: Memory = bytes_of
        self._mix, self._beta = None if mix is None else np.float32(mix), np.float32(beta)
        self._reference = Reference(parameters, fragments)
        """What D is taken from."""
        self._done = _Count()
        self._counted = [_Count()] * fragments.count
        """For each fragment, how much of ``_done`` is in a committed round."""
        self._feedback, self._encoder = list[Any]([None] * fragments.count), encoder
        self._sent: _Sent | None = None

    @property
    def fragment(self) -> int:
        """The fragment of the next round."""
        return self.fragments.of_round(self.round + 1)

    @property
    def steps(self) -> int:
        """Steps that the next round can count."""
        return self._steps(self.fragment)

    @property
    def samples(self) -> float:
        """Samples that the next round can count."""
        return self._samples(self.fragment)

    @property
    def outstanding(self) -> bool:
        """A contribution was handed over and its round is still open."""
        return self._sent is not None

    def global_vector(self) -> Vector:
        """The global parameters, only to be read until the next round."""
        return self.theta

    def count(self, samples: float) -> None:
        """One inner step on ``samples`` examples."""
        self._done = _Count(self._done.steps + 1, self._done.samples + samples)

    def was_changed(self) -> bool:
        """Whether a parameter is not as the last round has left it, though no step waits for the next one."""
        waits = self._sent is not None or any(map(self._steps, self._all()))
        return self.started and not waits and self._reference.differs()

    def start(self, round: int, theta: Vector, momentum: Vector, state_hash: str) -> None:
        """The job is on at this state. Steps since the last round stay: as they are on the same state, re-based on a
        newer one, unless a contribution was under way (the newer state may contain it)."""
        same = self.started and state_hash == self.state_hash
        if self.started and not same and self._sent is None and any(map(self._steps, self._all())):
            self._place(theta, {fragment: self._work(fragment) for fragment in self._all()})
        elif not same:
            self._reset(theta)
        self._sent = None
        self._hold(round, theta, momentum, state_hash)

    def contribution(self, finishing: bool) -> Boundary:
        """What this node adds to the next round, encoded once; a node without new samples only receives. Before the
        model changes :meth:`keep_local` has to be called, or the round applied.

        Raises:
            ValueError: the model's parameters were changed since it was made; names the first.
        """
        return self._contribution(finishing, stays=True)()

    def contribution_of_now(self, finishing: bool) -> Callable[[], Boundary]:
        """:meth:`contribution` in two parts: all that the model has to give is read now, and what is returned encodes
        it, on any thread, while the model trains on."""
        return self._contribution(finishing, stays=False)

    def keep_local(self) -> None:
        """The model is about to change while the round of its contribution is open."""
        self._settle_feedback(in_place=False)
        if self._sent is not None and self._sent.local is None:
            self._sent.local = self._reference.in_model(self._sent.fragment)

    def give_way(self) -> None:
        """What the model was based on is about to become what the round makes of it, in which the contribution is
        counted. On any thread, while this one rests."""
        self._settle_feedback(in_place=True)

    def _settle_feedback(self, in_place: bool) -> None:
        """``in_place``: the one before is not needed any more."""
        sent = self._sent
        if sent is None or sent.unsaid is None:
            return
        wire, data = sent.unsaid
        before = None if self._feedback[0] is None else on_host(self._feedback[0])
        left = before if in_place and before is not None else like(self.theta, wire.count)
        try:
            left_by(wire, data, self._reference.parts(0), self.parameters.parts(), before, self._beta, left)
        except BaseException:
            if left is before:  # neither the one nor the other
                self._feedback[0], sent.unsaid = None, None
            raise
        sent.feedback, sent.unsaid = left, None

    def references(self, state: Any, name: str, counted: bool) -> int | None:
        """How often the replica refers to the vector ``state.name``, while it waits for the next round, in which its
        contribution is ``counted`` or not; None: when it applies that round it needs what is in there now."""
        sent = self._sent if counted and self._sent is not None and self._sent.fragment == self.fragment else None
        until = self._counted[self.fragment] if sent is None else sent.until
        if self._mix is not None or self._done.steps > until.steps:
            return None
        held = self.theta, self._reference.theta, self.momentum, self.parameters.loaded
        return [here is getattr(state, name) for here in held].count(True)

    def _contribution(self, finishing: bool, stays: bool) -> Callable[[], Boundary]:
        self.parameters.check()
        fragment = self.fragment
        more = any(self._samples(other) for other in self._all() if other != fragment)
        empty = Boundary(b"", self.samples, self.steps, finishing=finishing, fragment=fragment, more=more)
        if not self.samples:
            self._counted[fragment] = self._done
            return lambda: structs.replace(empty, steps=0)
        wire, feedback = self.fragments.made_for(self.round + 1), self._feedback[fragment]
        if self._encoder is not None:
            there = self._encoder.encode(wire, self.fragments, fragment, self._reference, feedback, self._beta)
            if there is not None:
                self._sent = _Sent(fragment, there.local, self._done, there.left)
                return lambda: structs.replace(empty, encoded=there.data, norm=there.norm)
        now = None if stays and self.fragments.count == 1 else self._reference.in_model(fragment)
        local = self.parameters.parts() if now is None else now.__getitem__
        before = self._reference.parts(fragment)
        feedback = None if feedback is None else on_host(feedback)
        self._sent = sent = _Sent(fragment, now, self._done)
        later = now is None and wire.codec.lossy and self.parameters.read_anywhere
        later = later and (wire.count >= encoding.LATER_FROM or is_in_file(self.theta))

        def encode() -> Boundary:
            try:
                made = encoded(wire, before, local, feedback, self._beta, not later, self.memory)
                data, sent.feedback, norm = made
            except NotFiniteError:
                return structs.replace(empty, finite=False)
            sent.unsaid = (wire, data) if later else None
            return structs.replace(empty, encoded=data, norm=norm)

        return encode

    def apply(self, commit: Apply) -> None:
        """COMMIT. Work done after the boundary is carried over to the new parameters, or mixed with them."""
        round, theta = commit.round, commit.theta
        sent = self._sent if commit.counted else None
        if sent is not None:
            self._settle_feedback(in_place=True)
            self._sent = None
            self._feedback[sent.fragment] = kept_beside(self.theta, sent.feedback)
            self._counted[sent.fragment] = sent.until
        changed = self.fragments.changed(self.round, round)
        self._place(theta, {fragment: self._left(fragment, sent, theta) for fragment in changed})
        self._hold(round, theta, commit.momentum, commit.state_hash)

    def rebase(self, round: int, theta: Vector, momentum: Vector, state_hash: str) -> None:
        """A round went on without this node: ``theta_m += theta_new - theta_old``; contribution and error feedback
        stay."""
        self._settle_feedback(in_place=False)
        changed, sent = self.fragments.changed(self.round, round), self._sent
        done = None
        if sent is not None:
            at_boundary = self._reference.in_model(sent.fragment) if sent.local is None else on_host(sent.local)
            done = self._reference.without(sent.fragment, at_boundary)
        self._place(theta, {fragment: self._work(fragment) for fragment in changed})
        if sent is not None and done is not None:
            sent.local = self._reference.without(sent.fragment, done, out=done)
        self._hold(round, theta, momentum, state_hash)

    def release(self) -> None:
        """The contribution is not used, its work stays and goes into a later one."""
        self._sent = None

    hold_back = release
    """A Stop came before the round was sealed."""

    def kept_work(self) -> Any:
        """What of the model is in no round, for :meth:`go_on`."""
        return self._done, list(self._counted), list(self._feedback)

    def go_on(self, restore: Callable[[], None], work: Any) -> None:
        """After :meth:`start`, on the state that this node had: ``restore`` puts the model back, with the ``work`` in
        it that :meth:`kept_work` gave."""
        restore()
        self._done, self._counted, self._feedback = work[0], list(work[1]), list(work[2])

    def discard(self) -> None:
        """REFUSED: error feedback 0, theta_m = theta."""
        self._reset(self.theta)

    def settle(self) -> None:
        """The loop is over and every step was counted: the model becomes theta."""
        self._load(self.theta)
        self._counted = [self._done] * self.fragments.count

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

    def _all(self) -> range:
        return range(self.fragments.count)

    def _steps(self, fragment: int) -> int:
        return self._done.steps - self._counted[fragment].steps

    def _samples(self, fragment: int) -> float:
        return self._done.samples - self._counted[fragment].samples

    def _work(self, fragment: int) -> Vector:
        """Everything done in ``fragment`` since the reference, counted in an open contribution or not."""
        local = self._reference.in_model(fragment)
        return self._reference.without(fragment, local, out=local)

    def _left(self, fragment: int, sent: _Sent | None, theta: Vector) -> Vector | None:
        """The work that stays in ``fragment`` on top of its new parameters; None: none."""
        if sent is None or fragment != sent.fragment:
            return self._work(fragment) if self._steps(fragment) else None
        if self._mix is not None:
            if not self._mix:
                return None
            return (self.fragments.take(theta, fragment) - self._reference.in_model(fragment)) * self._mix
        return difference(on_host(sent.local), self._reference.in_model(fragment)) if self._steps(fragment) else None

    def _load(self, theta: Vector) -> None:
        """The model becomes theta."""
        self.parameters.load(theta)
        self._reference.loaded(theta, dict.fromkeys(self._all()))

    def _place(self, theta: Vector, work: dict[int, Vector | None]) -> None:
        """The fragments named in ``work`` become those of theta with their work still in them; the others stay."""
        for fragment, left in work.items():
            elements = self.fragments.take(theta, fragment)
            elements = elements if left is None else difference(elements, left)
            if self.fragments.count == 1:
                self.parameters.load(elements)
            else:
                self.parameters.put(self.fragments.ranges(fragment), elements)
        self._reference.loaded(theta, work)

    def _reset(self, theta: Vector) -> None:
        self._load(theta)
        self._sent = None
        self._feedback = [None] * self.fragments.count
        self._done = _Count()
        self._counted = [_Count()] * self.fragments.count

    def _hold(self, round: int, theta: Vector, momentum: Vector, state_hash: str) -> None:
        self.started = True
        self.round, self.theta, self.momentum, self.state_hash = round, theta, momentum, state_hash
        write_behind([theta, momentum, *self._feedback])
