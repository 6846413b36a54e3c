"""DeMo: rounds at every step that send 32 coefficients of each 4096 numbers, and take the place of an optimizer."""

from typing import Any

from notebook_cluster.protocol.runs import PATIENCE
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.weighted_mean import dct_name
from notebook_cluster.training.loop.sync import RoundSync
from notebook_cluster.training.models.parameters import WithGradients
from notebook_cluster.training.settings.arguments import (
    Strategy,
    check_coefficients,
    check_descent,
    check_samples,
    check_steps,
)
from notebook_cluster.training.settings.results import Round
from notebook_cluster.training.strategies.local_momentum import LocalMomentum, MomentumReplica


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
        name, quorum, grace, patience, resume, fresh: as for DiLoCo. Checkpoints hold each node's momentum.
        decay: of the momentum.
        k: coefficients sent of each square, a multiple of 8 up to 128.
        sign: False takes Q itself instead of its sign; ``lr`` is then one as for SGD.
        weight_decay: of the parameters, not through the momentum.
        accumulate: calls of ``step`` that make one step of all nodes, with the mean of their gradients.

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
        resume: str | None = None,
        fresh: bool = False,
    ) -> None:
        descent = check_descent(lr, decay, sign, weight_decay)
        codec, every = dct_name(check_coefficients(k)), check_steps("accumulate", accumulate)
        self._from_start, self._momentum = fresh or resume is not None, LocalMomentum()
        strategy = Strategy(
            "DeMo",
            every,
            name,
            float(lr),
            0.0,
            False,
            codec,
            quorum,
            grace,
            all_gather=True,
            beta=decay,
            descent=descent,
            patience=patience,
        )
        super().__init__(model, strategy, optimizer=self._momentum, resume=resume, fresh=fresh)

    def _make_replica(self, parameters: WithGradients, fragments: Fragments) -> MomentumReplica:
        layout, before = parameters.layout, self._job.own
        self._momentum.begin(
            layout.size - layout.buffers, layout.hash("momentum"), None if self._from_start else before
        )
        self._goes_on = bool(self._momentum.state)
        self._job.own = self._momentum
        return MomentumReplica(parameters, fragments, self._momentum, self._strategy.beta)

    def _momentum_goes_on(self) -> bool:
        return self._goes_on or super()._momentum_goes_on()

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
            raise ValueError(
                "no parameter has a gradient: call loss.backward() before sync.step(), and leave optimizer.step() and "
                "zero_grad() out, or say samples=0 for an empty batch"
            )
        return super().step(loss, samples)
