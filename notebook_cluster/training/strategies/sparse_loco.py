"""SparseLoCo from top to bottom (arXiv 2508.15706): rounds that send 64 of every 4096 numbers, in two bits each.

Inner steps and the round are those of :mod:`.diloco`. In its order, what is another:

1. Contribution: of ``a = D + beta e`` only the largest elements are sent, and ``e = a - sent`` is kept for the next
   round (:meth:`.Replica.contribution`).
2. Mean: the owner of a slice sends all contributions on instead of their mean, and each node takes that itself, for
   each coordinate over those who sent it (:mod:`notebook_cluster.rounds.numerics.weighted_mean`).
3. Outer step: without momentum, ``theta <- theta - lr * mean``.
"""

from collections.abc import Mapping
from typing import Any

from notebook_cluster.codecs import codec_name
from notebook_cluster.protocol.runs import PATIENCE
from notebook_cluster.rounds.numerics.momentum import NOT_KEPT
from notebook_cluster.training.checkpointing.resuming import Resume
from notebook_cluster.training.settings.arguments import Strategy, check_kept
from notebook_cluster.training.settings.schedule import Seconds
from notebook_cluster.training.strategies.diloco import OuterRate

DEFAULT_BETA = 0.8
"""The paper has 0.95, for far larger models, lower learning rates and more rounds. What was kept back is found again by
every round until it is sent, so it adds up to steps that are too long where rounds are large: the sweep is in
docs/training.md."""


class SparseLoCo(OuterRate):
    """Train one model on all nodes over a slow link (SparseLoCo, arXiv 2508.15706).

    Like :class:`~.diloco.DiLoCo`, but each node sends the ``k`` largest elements of each chunk of 4096 of
    ``a = D + beta e`` in two bits each, about 0.16 bits per parameter, and keeps the rest as error feedback
    ``e = a - sent``. The outer step has no momentum: ``theta <- theta - lr * sum_m w_m s_m / sum_m w_m``, for each
    coordinate over those who sent it. All get all contributions, so what a node receives grows with their number.
    Arguments that are not named here are those of DiLoCo.

    Args:
        every: inner steps per round (the paper: 15 to 50), or ``nc.Seconds(30)``.
        k: elements sent of each 4096, a multiple of 8.
        beta: how much of the error feedback is sent again (the paper: 0.95).
        outer_lr: of the outer step.

    Raises:
        ValueError, TypeError, TrainingError, CheckpointError: as DiLoCo.
    """

    def __init__(
        self,
        model: Any,
        every: int | Seconds = 30,
        *,
        name: str = "model",
        k: int = 64,
        beta: float = DEFAULT_BETA,
        outer_lr: float = 1.0,
        quorum: int | float | None = None,
        grace: float | None = None,
        patience: float = PATIENCE,
        fragments: int = 1,
        overlap: int = 0,
        mix: float | None = None,
        optimizer: Any = None,
        extra: Mapping[str, Any] | None = None,
        resume: Resume = None,
        fresh: bool = False,
        freeze_a: bool = False,
        check_frozen: bool = True,
    ) -> None:
        codec = codec_name("sparse", check_kept(k))
        strategy = Strategy(
            "SparseLoCo", every, name, outer_lr=outer_lr, outer_momentum=0.0, momentum_dtype=NOT_KEPT, nesterov=False,
            codec=codec, quorum=quorum, grace=grace, fragments=fragments, overlap=overlap, mix=mix, over_senders=True,
            beta=beta, patience=patience, freeze_a=freeze_a, check_frozen=check_frozen,
        )  # fmt: skip
        super().__init__(model, strategy, optimizer=optimizer, extra=extra, resume=resume, fresh=fresh)
