"""DeMo on one node: the momentum that stays here, what of it goes into a round, and what a round does to the model.

With g the mean gradient of the steps since the last round, ``m <- decay * m + g``; the largest coefficients of its
cosine transform are sent, and what is left of m stays (arXiv 2411.19870). Both happen at COMMIT only, so a round that
is aborted or done again changes nothing here. Between two rounds the model holds the global parameters; the work not
counted yet is in the gradients. Main thread only.
"""

from typing import Any

import numpy as np

from notebook_cluster.codecs import NotFiniteError, Vector
from notebook_cluster.rounds.member.events_effects import Apply, Boundary
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.training.loop.replica import Replica
from notebook_cluster.training.models.parameters import WithGradients


class LocalMomentum:
    """The momentum of one node, which checkpoints take like the state of an optimizer; the same for torch and MLX."""

    param_groups = ()
    arrays = "numpy"
    """What its state is made of."""

    def __init__(self) -> None:
        self.state: dict[str, Vector] = {}
        """``momentum``: float32, one for each trained element; empty while it is 0."""
        self.left: Vector | None = None
        """What it will be when the open round counts what was sent of it."""
        self.elements = 0
        self.schema = ""
        """Of the model that it belongs to."""

    def begin(self, elements: int, schema: str, before: object | None) -> None:
        """It belongs to a model of so many trained elements. ``before``: the momentum of an earlier sync object of the
        same job, which is gone on with if it is of the same model."""
        self.elements, self.schema = elements, schema
        if isinstance(before, LocalMomentum) and before.schema == schema:
            self.state, self.left = dict(before.state), before.left
            self.counted()

    def after(self, gradient: Vector, decay: np.float32) -> Vector:
        """``decay * m + g`` as a new vector."""
        momentum = self.state.get("momentum")
        return gradient.copy() if momentum is None else momentum * decay + gradient

    def counted(self) -> None:
        """What was sent is in a committed round, or may be: it must not be sent again."""
        left, self.left = self.left, None
        if left is not None:
            self.state = {"momentum": left}

    def clear(self) -> None:
        self.state, self.left = {}, None

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Raises:
        ValueError: not the momentum of this model.
        """
        state = {name: np.ascontiguousarray(vector, np.float32) for name, vector in saved.items()}
        if any(name != "momentum" or vector.shape != (self.elements,) for name, vector in state.items()):
            raise ValueError(f"a momentum of {self.elements} elements is wanted")
        self.state, self.left = state, None


class MomentumReplica(Replica):
    """One node's model, its momentum and the gradients that no round has counted yet."""

    parameters: WithGradients

    def __init__(self, parameters: WithGradients, fragments: Fragments, momentum: LocalMomentum, decay: float) -> None:
        super().__init__(parameters, fragments)
        self._local, self._decay = momentum, np.float32(decay)
        self._open = False
        """A contribution was handed over and its round is still open."""

    @property
    def outstanding(self) -> bool:
        return self._open

    def contribution(self, finishing: bool) -> Boundary:
        """The largest coefficients of the momentum, and how far the running statistics of normalisation layers came;
        encoded once. ``norm`` is that of the gradient: the momentum of a node that has just joined is smaller."""
        self.parameters.check()
        wire, samples, steps = self.fragments.wires[0], self.samples, self.steps
        self._local.left = None
        if not samples:
            return Boundary(b"", 0.0, 0, finishing=finishing)
        values = self.parameters.read_gradients()
        trained = values.size - wire.buffers
        gradient = values[:trained]
        with np.errstate(all="ignore"):  # a diverged model is told by ``finite``
            np.divide(gradient, np.float32(steps), out=gradient)
            norm = float(np.linalg.norm(gradient))
            values[:trained] = momentum = self._local.after(gradient, self._decay)
            np.subtract(self._reference[trained:], values[trained:], out=values[trained:])
        self._open = True
        try:
            encoded = wire.encode(self.fragments.pack(values))
        except NotFiniteError:
            return Boundary(b"", samples, steps, finite=False, finishing=finishing)
        self._local.left = momentum - self.fragments.unpack(wire.decode(encoded))[:trained]
        return Boundary(encoded, samples, steps, norm=norm, finishing=finishing)

    def apply(self, commit: Apply) -> None:
        """COMMIT: the model becomes theta; of the momentum what was sent is taken away."""
        if commit.counted:
            self._local.counted()
        self._clear()
        self._load(commit.theta)
        self._hold(commit.round, commit.theta, commit.momentum, commit.state_hash)

    def start(self, round: int, theta: Vector, momentum: Vector, state_hash: str) -> None:
        """The job is on at this state. Gradients since the last round stay, unless they were under way and this is
        another state, which may contain them."""
        same = self.started and state_hash == self.state_hash
        if same:
            self._open, self._local.left = False, None
        else:
            if self._open or not self.started:
                self._local.counted()
                self._clear()
            self._load(theta)
        self._hold(round, theta, momentum, state_hash)

    def rebase(self, round: int, theta: Vector, momentum: Vector, state_hash: str) -> None:
        """Rounds went on without this node: the same contribution goes into a later one. It was computed on older
        parameters, as most of any momentum is."""
        self._load(theta)
        self._hold(round, theta, momentum, state_hash)

    def release(self) -> None:
        """The contribution is not used; its gradients stay and go into a later one."""
        self._open, self._local.left = False, None

    def discard(self) -> None:
        """REFUSED: momentum 0, the gradients are dropped, theta_m = theta."""
        self._local.clear()
        self._clear()
        self._load(self.theta)

    def settle(self) -> None:
        """The loop is over: the model holds what all hold."""
        self._clear()
        self._load(self.theta)

    def _clear(self) -> None:
        self.parameters.clear_gradients()
        self._open, self._local.left = False, None
        self._counted = [self._done]
