"""The sync objects that people make in a cell: DiLoCo, and Local SGD as its special case."""

from typing import Any

from notebook_cluster.training.arguments import Strategy
from notebook_cluster.training.sync import RoundSync


class DiLoCo(RoundSync):
    """Train one model on all nodes, exchanging once in ``every`` steps (DiLoCo, arXiv 2311.08105).

    Each node takes ``every`` steps with its own optimiser, whose state stays local; then
    ``D = sum_m w_m (theta - theta_m)`` with ``w_m`` the node's share of the samples, and the outer Nesterov step
    ``b <- mu b + D``, ``theta <- theta - lr (D + mu b)``. Running the cell again resumes.

    Args:
        model: a torch.nn.Module or mlx.nn.Module, the same on every node. All begin with its values on the lowest rank.
        every: inner steps per round.
        name: of the job; two models trained at the same time need two names. Also what views show.
        outer_lr: None chooses by the number of nodes at each round (0.4 / 0.6 / 0.6 / 0.8 for 1 / 2 / 4 / 8).
        outer_momentum: mu; nesterov: False for heavy-ball momentum.
        codec: ``float32`` (exact), or smaller, with error feedback: ``fp16``, ``bf16``, ``int8``, ``int4``, ``e3m0``.
        optimizer: a torch optimizer whose state checkpoints should hold; None leaves it out.
        resume: name of a checkpoint to begin from, when the cluster does not hold the job already.
        fresh: forget what the cluster holds for this job.

    Raises:
        ValueError, TypeError: an argument, or the model, is not usable; says why.
        TrainingError: another node's model or settings differ; names the first difference.
        CheckpointError: the checkpoint to resume from is damaged or of another model.
    """

    def __init__(
        self,
        model: Any,
        every: int = 100,
        *,
        name: str = "model",
        outer_lr: float | None = None,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        codec: str = "float32",
        optimizer: Any = None,
        resume: str | None = None,
        fresh: bool = False,
    ) -> None:
        strategy = Strategy("DiLoCo", every, name, outer_lr, outer_momentum, nesterov, codec)
        super().__init__(model, strategy, optimizer=optimizer, resume=resume, fresh=fresh)


class LocalSGD(RoundSync):
    """Average the model over all nodes once in ``every`` steps (Local SGD, arXiv 1805.09767).

    This is DiLoCo with outer learning rate 1 and no momentum, in the same code; arguments as there.
    """

    def __init__(
        self,
        model: Any,
        every: int = 100,
        *,
        name: str = "model",
        codec: str = "float32",
        optimizer: Any = None,
        resume: str | None = None,
        fresh: bool = False,
    ) -> None:
        strategy = Strategy("LocalSGD", every, name, 1.0, 0.0, False, codec)
        super().__init__(model, strategy, optimizer=optimizer, resume=resume, fresh=fresh)
