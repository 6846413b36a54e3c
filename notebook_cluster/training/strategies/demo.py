"""DeMo from top to bottom (arXiv 2411.19870): a step of all nodes at every batch, in place of an optimizer's.

In the order in which it happens:

1. :meth:`DeMo.step` takes this node's gradient g. After ``accumulate`` calls the round begins.
2. :meth:`MomentumReplica.contribution`: ``m <- decay * m + g`` with this node's own momentum m, and of the cosine
   transform of m the largest coefficients are sent: 32 of each 4096.
3. Each node gets those of all, takes their mean Q, and from it ``theta <- theta - lr * (sign(Q) + weight_decay *
   theta)`` (:class:`notebook_cluster.rounds.numerics.outer.Descent`), aside.
4. COMMIT (:meth:`MomentumReplica.apply`): the model becomes theta, and what was sent of m is taken out of it. Momentum
   moves nowhere else, so a round that is aborted or done again changes nothing here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from notebook_cluster.codecs import NotFiniteError, Vector, codec_name
from notebook_cluster.protocol.runs import PATIENCE
from notebook_cluster.rounds.member.events_effects import Apply, Boundary
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.momentum import NOT_KEPT
from notebook_cluster.training.loop.replica import Replica
from notebook_cluster.training.loop.round_client import Round
from notebook_cluster.training.loop.sync import RoundSync
from notebook_cluster.training.models.parameters import NO_GRADIENT, WithGradients
from notebook_cluster.training.models.torch_optimizer import check_unscaled, watch_scalers
from notebook_cluster.training.settings.arguments import (
    Strategy,
    check_coefficients,
    check_descent,
    check_samples,
    check_steps,
)


class DeMo(RoundSync):
    """Train one model with a step of all nodes at every batch, over links too slow for gradients (DeMo, decoupled
    momentum optimization, arXiv 2411.19870).

    ``sync.step(loss, samples=len(x))`` comes after ``loss.backward()`` and is the optimizer: no other is needed, and
    ``zero_grad()`` neither. With an mlx.nn.Module it is ``sync.step(loss, samples=len(x), grads=grads)`` after
    ``loss, grads = nn.value_and_grad(model, loss_function)(model, x, y)``.

    Each node has a momentum of its own, ``m <- decay * m + g``. Of the cosine transform of each 64 x 64 square of each
    parameter's m it sends the ``k`` largest coefficients in 8 bits and takes them out of m (the paper's algorithm 1).
    Then all take ``theta <- theta - lr * (sign(Q) + weight_decay * theta)``, with Q the mean by samples of what was
    sent: 0.135 bits per parameter from each node to all. Parameters of less than 1024 elements share squares. Running
    statistics of normalisation layers are averaged in float32.

    Args:
        model: a torch.nn.Module or mlx.nn.Module, the same on every node. All begin with its values on the lowest rank.
        lr: the size of a step of each parameter element; may be set in mid run (``sync.lr``).
        name, quorum, grace, patience, resume, fresh, check_frozen: as for DiLoCo. Checkpoints hold each node's
            momentum.
        decay: of the momentum.
        k: coefficients sent of each square, a multiple of 8 up to 128.
        sign: False takes Q itself instead of its sign; ``lr`` is then one as for SGD.
        weight_decay: of the parameters, not through the momentum.
        accumulate: calls of ``step`` that make one step of all nodes, with the mean of their gradients: leave the
            usual ``loss / accumulate`` out.

    The defaults of ``lr``, ``decay``, ``k``, squares, ``sign`` and ``weight_decay`` are those with which the authors
    trained 300M parameters (github.com/bloc97/DeMo). Their code has ``lr * g`` in the momentum, which is the same step
    while ``lr`` stays the same, and takes the mean of each coefficient over the nodes that sent it.

    Raises:
        ValueError, TypeError, TrainingError, CheckpointError: as DiLoCo.
    """

    def __init__(
        self,
        model: Any,
        lr: float = 4e-4,
        *,
        name: str = "model",
        decay: float = 0.999,
        k: int = 32,
        sign: bool = True,
        weight_decay: float = 0.0,
        accumulate: int = 1,
        quorum: int | float | None = None,
        grace: float | None = None,
        patience: float = PATIENCE,
        extra: Mapping[str, Any] | None = None,
        resume: str | None = None,
        fresh: bool = False,
        check_frozen: bool = True,
    ) -> None:
        if hasattr(lr, "param_groups") or hasattr(lr, "apply_gradients"):
            raise TypeError(f"lr= got {type(lr).__name__}: nc.DeMo is the optimizer, give it a number, as lr=4e-4")
        descent = check_descent(lr, decay, sign, weight_decay)
        codec, every = codec_name("dct", check_coefficients(k)), check_steps("accumulate", accumulate)
        self._from_start, self._momentum = fresh or resume is not None, LocalMomentum()
        strategy = Strategy(
            "DeMo", every, name, outer_lr=float(lr), outer_momentum=0.0, nesterov=False, codec=codec, quorum=quorum,
            grace=grace, beta=decay, descent=descent, patience=patience, check_frozen=check_frozen,
            momentum_dtype=NOT_KEPT,
        )  # fmt: skip
        super().__init__(model, strategy, optimizer=self._momentum, extra=extra, resume=resume, fresh=fresh)

    def step(self, loss: Any = None, samples: float = 1, *, grads: Any = None) -> Round | None:
        """After ``loss.backward()``: the step of all nodes. ``grads``: an mlx model's gradients, as
        ``nn.value_and_grad`` returns them; a torch model has its own in ``.grad``.

        Returns:
            The Round of the step; None while gradients accumulate.

        Raises:
            TypeError: ``grads`` is missing for an mlx model, or given for a torch model.
            ValueError: there is no gradient, or it is of another model, ``loss`` or ``samples`` is not a number, or the
                model was changed.
            TrainingError: the job was refused.
        """
        replica = self._replica
        assert isinstance(replica, MomentumReplica)
        if self._idle():
            return None
        replica.parameters.add_gradients(grads, check_samples(samples))
        if samples and not replica.parameters.has_gradients():
            raise ValueError(NO_GRADIENT)
        with self._call:
            return self._take_step(loss, samples)

    def _take_step(self, loss: Any, samples: float) -> Round | None:
        self._count_step(loss, samples)
        received = self._wait_for_commit() if self._round_open else None  # a wait that was interrupted
        if self._at_boundary():
            received = self._exchange_due()
        return received

    def _exchange_due(self) -> Round | None:
        self._contribute(finishing=False)
        return self._wait_for_commit()

    def _contribute(self, finishing: bool) -> None:
        if self._replica.steps:
            self._replica.scaled = check_unscaled()
        super()._contribute(finishing)

    @property
    def lr(self) -> float:
        """The learning rate. Set in the middle of a run on all nodes alike, it counts from the next step on; where
        nodes differ, the lowest rank decides.

        Raises:
            ValueError: not a number above 0, or too large for the weight decay.
        """
        assert self._strategy.outer_lr is not None
        return self._strategy.outer_lr

    @lr.setter
    def lr(self, value: float) -> None:
        strategy = self._strategy
        assert strategy.descent is not None
        check_descent(value, strategy.beta, strategy.descent.sign, strategy.descent.weight_decay)
        self._change_outer(outer_lr=float(value))

    def _make_replica(self, parameters: WithGradients, fragments: Fragments) -> "MomentumReplica":
        watch_scalers(parameters.framework)
        layout, last = parameters.layout, self._job.member.register
        goes_on = not self._from_start and last is not None and last.strategy == self._strategy.strategy
        self._momentum.begin(layout.size - layout.buffers, layout.hash("momentum"), self._job.own if goes_on else None)
        self._goes_on = bool(self._momentum.state)
        self._job.own = self._momentum
        return MomentumReplica(parameters, fragments, self._momentum, self._strategy.beta)

    def _momentum_goes_on(self) -> bool:
        return self._goes_on or super()._momentum_goes_on()


class MomentumReplica(Replica):
    """One node's model, its momentum and the gradients that no round has counted yet. Between two rounds the model
    holds the global parameters. Main thread only."""

    parameters: WithGradients

    def __init__(
        self, parameters: WithGradients, fragments: Fragments, momentum: "LocalMomentum", decay: float
    ) -> None:
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
            before = self._reference.parts(0)(slice(trained, values.size))
            np.subtract(before, values[trained:], out=values[trained:])
        self._open, self.overflowed = True, False
        try:
            encoded = wire.encode(self.fragments.pack(values))
        except NotFiniteError:
            self.overflowed = self.scaled
            return Boundary(b"", samples, steps, finite=False, finishing=finishing, scaled=self.scaled)
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

    def hold_back(self) -> None:
        self.release()

    def kept_work(self) -> Any:
        has = self.parameters.has_gradients() and self.steps > 0
        gradients = (self.parameters.read_gradients(), self.parameters.gradients_there()) if has else None
        return self._done, list(self._counted), gradients

    def go_on(self, restore: Callable[[], None], work: Any) -> None:
        restore()
        self._done, self._counted = work[0], list(work[1])
        if work[2] is not None:
            self.parameters.put_gradients(*work[2])

    def discard(self) -> None:
        """REFUSED: momentum 0, the gradients are dropped, theta_m = theta. At an overflow that a GradScaler expects the
        momentum, which has nothing of it, stays as before."""
        if not self.overflowed:
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


class LocalMomentum:
    """The momentum of one node, which checkpoints take like the state of an optimizer; the same for torch and MLX."""

    param_groups = ()
    arrays = "numpy"
    """What its state is made of."""

    def __init__(self) -> None:
        self.state: dict[str, Vector] = {}
        """``momentum``: float32, one for each trained element; empty while it is 0."""
        self.left: Vector | None = None
        """The momentum as it will be when the open round counts what was sent of it."""
        self.elements = 0
        self.schema = ""
        """The hash of the layout of the model that the momentum belongs to."""

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
