"""DiLoCo from top to bottom (arXiv 2311.08105), and Local SGD, which is the same with another outer step.

theta is the global model, the same on all nodes; theta_m is the model of node m, which its own optimiser trains. In the
order in which it happens:

1. Inner steps: after each step of the user's optimiser :meth:`LocalSteps.step` counts it and its samples. After
   ``every`` of them the node is at a boundary.
2. The round begins (:meth:`~.RoundClient._contribute`): the pseudo-gradient ``D_m = theta - theta_m`` is read from the
   model and encoded once (:meth:`.Replica.contribution`); the background says ARRIVED.
3. The mean: those who arrived are sealed, and ``D = sum_m w_m D_m`` is added in rank order, with w_m the share of the
   samples (:mod:`notebook_cluster.rounds.numerics.weighted_mean`).
4. The outer step: every node computes ``b <- mu b + D`` and ``theta <- theta - lr (D + mu b)`` aside
   (:func:`notebook_cluster.rounds.numerics.outer.outer_step`) and says PREPARED with the hash of both.
5. COMMIT, when the hashes are equal (:meth:`~.RoundClient._wait_for_commit`): the model becomes theta, and what was
   trained since the boundary stays on top of it (:meth:`.Replica.apply`).
"""

from collections.abc import Mapping
from typing import Any

from notebook_cluster.protocol.runs import PATIENCE
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.momentum import FLOAT32, NOT_KEPT, converted
from notebook_cluster.training.checkpointing.resuming import Momentum, Resume
from notebook_cluster.training.loop.costs import Costs, check_disk, check_room, costs_of, nodes_here, ways_out
from notebook_cluster.training.loop.encoding import encoder_of
from notebook_cluster.training.loop.replica import Replica
from notebook_cluster.training.loop.round_client import Round
from notebook_cluster.training.loop.sync import RoundSync
from notebook_cluster.training.models import differing
from notebook_cluster.training.models.parameters import WithGradients
from notebook_cluster.training.settings.arguments import DISK, MEMORY, Strategy
from notebook_cluster.training.settings.schedule import Seconds


class LocalSteps(RoundSync):
    """A strategy of which each node steps with its own optimiser, and exchanges once in ``every`` steps."""

    _has_stepped = False

    def step(self, loss: Any = None, samples: float = 1) -> Round | None:
        """After each step of the user's optimiser. ``samples``: examples in its batch, the weight of this node's work.

        Returns:
            The Round where the model received one (at every boundary, with overlap so many steps later), else None.

        Raises:
            ValueError: ``loss`` or ``samples`` is not a number, or the model was changed; names it.
            TrainingError: the job was refused.
        """
        if self._idle():
            return None
        with self._call:
            return self._take_step(loss, samples)

    def _take_step(self, loss: Any, samples: float) -> Round | None:
        if not self._has_stepped:  # by now each model that is trained has its sync object
            self._has_stepped = True
            if text := differing(self._objects.optimizers, self._model()):
                self._warn(text)
        self._count_step(loss, samples)
        received = None
        if self._round_open:
            if not self._overlap_is_over():
                return None
            received = self._wait_for_commit()
        if self._at_boundary():
            received = self._exchange_due() or received
        return received

    def _exchange_due(self) -> Round | None:
        if not self._strategy.overlap:
            return self._exchange(finishing=False)
        self._contribute(finishing=False)
        return None

    @property
    def memory(self) -> Costs:
        """What its rounds take on this node: memory, disk and traffic, in bytes; prints as a line."""
        return self._costs(self._replica.fragments)

    def outer_momentum_by_name(self) -> Momentum:
        """What somebody else's checkpoint holds beside the global parameters, for ``resume=``: float32 arrays in the
        shapes of the parameters; empty where the strategy has no outer momentum, and before it has begun."""
        replica = self._replica
        wanted = self._strategy.outer_momentum and replica.started
        tensors = (
            self._description.layout.tensors(converted(replica.momentum, FLOAT32, replica.theta.size)) if wanted else {}
        )
        return {name: tensor.copy() for name, tensor in tensors.items()}

    def report_loss(self, loss: float) -> None:
        """Tell the loss of the last step, or the mean of the last steps, where it is known only after ``step()``."""
        self._progress.tell_loss(loss)

    def _costs(self, fragments: Fragments, *, disk: bool = False) -> Costs:
        parameters, overlap = self._replica.parameters, self._strategy.overlap > 0
        nodes, exact, later = self._runtime.world_size(), parameters.exact, parameters.read_anywhere
        disk = disk or self._strategy.state == DISK
        together = min(nodes, 1 + len(self._runtime.lending.readers()))
        return costs_of(fragments, nodes, overlap=overlap, exact=exact, later=later, disk=disk, together=together)

    def _vectors_of_a_round(self) -> int:
        return self.memory.memory

    def _check_memory(self) -> None:
        """Raises:
        MemoryError: see :func:`notebook_cluster.training.loop.costs.check_room`.
        """
        layout, asked = self._description.layout, self.memory
        held = asked.rest if self._job.held(layout) is not None else 0
        dtype = self._strategy.momentum_dtype
        ways = ways_out(layout.size - layout.buffers, layout.buffers, momentum_dtype=dtype)
        others = [(what, self._costs(one)) for what, one in ways]
        if self._strategy.strategy == "DiLoCo" and not asked.disk:
            others.append(("state='disk'", self._costs(self._replica.fragments, disk=True)))
        warnings = [check_room(asked, held, nodes_here(), others)]
        if asked.disk:
            warnings.append(check_disk(asked, nodes_here(), self._runtime.checkpoint_directory()))
        for warning in filter(None, warnings):
            self._warn(warning)

    def _make_replica(self, parameters: WithGradients, fragments: Fragments) -> Replica:
        """theta_m, and what of the work in it no round has counted yet."""
        strategy, encoder = self._strategy, encoder_of(parameters)
        return Replica(parameters, fragments, mix=strategy.mix, beta=strategy.beta, encoder=encoder)

    def _overlap_is_over(self) -> bool:
        """The steps were taken that go on between contributing and receiving; a quorum that waits cuts them short."""
        return self._quorum_waits or self._schedule.steps >= self._strategy.overlap


class OuterRate(LocalSteps):
    """A strategy whose outer learning rate people may set."""

    @property
    def outer_lr(self) -> float | None:
        """Learning rate of the outer step; None: by the number of nodes. Set in the middle of a run on all nodes alike,
        it counts from the next boundary on; where nodes differ, the lowest rank decides.

        Raises:
            ValueError: not a number above 0, nor None.
        """
        return self._strategy.outer_lr

    @outer_lr.setter
    def outer_lr(self, value: float | None) -> None:
        self._change_outer(outer_lr=value)


class DiLoCo(OuterRate):
    """Train one model on all nodes, exchanging once in ``every`` steps (DiLoCo, arXiv 2311.08105).

    Each node takes ``every`` steps with its own optimiser, whose state stays local; then
    ``D = sum_m w_m (theta - theta_m)`` with ``w_m`` the node's share of the samples, and the outer Nesterov step
    ``b <- mu b + D``, ``theta <- theta - lr (D + mu b)``. Running the cell again resumes.

    Args:
        model: a torch.nn.Module or mlx.nn.Module, the same on every node. All begin with its values on the lowest rank.
        every: inner steps per round, or ``nc.Seconds(30)``: as many as each node can take in 30 seconds.
        name: of the job; two models trained at the same time need two names. Also what views show.
        outer_lr: None chooses by the number of nodes at each round (0.4 for one, 0.6 for more).
        outer_momentum: mu; nesterov: False for heavy-ball momentum.
        momentum_dtype: ``bfloat16`` keeps the outer momentum in half the memory, rounded after each round.
        state: ``disk`` keeps theta, momentum and error feedback in files without a name beside the checkpoints, so that
            memory has only what a round uses; best with ``fragments``. Each node may have it as it likes.
        codec: ``float32`` (exact), or smaller, with error feedback: ``fp16``, ``bf16``, ``int8``, ``int4``, ``e3m0``,
            or some elements only: ``topk`` and ``randomk`` send 64 of each 4096, ``topk-256`` and ``randomk-256`` 256.
            With these use ``outer_momentum=0`` and ``outer_lr=1``.
        quorum: None waits for every node. Otherwise a round waits until so many nodes (0.75: this share of them) are at
            the boundary; the others then come with the steps they have, or miss the round and bring their work to the
            next one.
        grace: seconds that a quorum waits for the others (5 when left out).
        patience: seconds, from 3, that others wait at most for a node of which nothing is heard, or whose process is
            stopped or hangs. It then misses rounds and brings its work when it is back. One that only takes long, in a
            step or on a slow link, is waited for.
        fragments: the model in so many parts, sent one after the other, each once in ``every`` steps (streaming DiLoCo,
            arXiv 2501.18512): the same traffic, without peaks.
        overlap: steps that training goes on between sending a fragment and receiving it (the paper: at most 5). The
            work of these steps stays on top of the new parameters and is in the next round.
        mix: with overlap ``theta_m <- mix theta_m + (1 - mix) theta`` instead (the paper: 0.5, which cost 2 to 3 % of
            the loss in our comparison, docs/training.md).
        optimizer: the torch.optim or mlx.optimizers optimizer, or a list of several, whose state checkpoints hold and
            which goes on when the cell is run again after a Stop; None leaves it out.
        extra: what else goes with the run, by name: ``{"scheduler": scheduler, "ema": average, "rng": generator}``.
            Whatever has ``state_dict()`` and ``load_state_dict()``, a random generator of torch, numpy or Python, or an
            mlx.nn.Module. Each node has its own.
        resume: name of a checkpoint to begin from; or the ``outer_momentum_by_name()`` of an earlier object, which goes
            with the values that the model has.
        fresh: forget what the cluster holds for this job.
        freeze_a: True freezes the first factor (A) of every LoRA in the model, for good: only B is trained (FFA-LoRA,
            arXiv 2403.12313), and the mean of B is then that of the adapters. A has to be equal on all nodes.
        check_frozen: False does not compare what is frozen, which does not travel, between the nodes: for bases that
            are quantised differently on purpose.

    Raises:
        ValueError, TypeError: an argument, or the model, is not usable; says why.
        TrainingError: another node's model, frozen parameters or settings differ; names the first difference.
        CheckpointError: the checkpoint to resume from is damaged or of another model.
        MemoryError: this machine has not got what its rounds take; says how much that is, and what would fit.
    """

    def __init__(
        self,
        model: Any,
        every: int | Seconds = 100,
        *,
        name: str = "model",
        outer_lr: float | None = None,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        momentum_dtype: str = FLOAT32,
        state: str = MEMORY,
        codec: str = "float32",
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
        strategy = Strategy(
            "DiLoCo", every, name, outer_lr=outer_lr, outer_momentum=outer_momentum, nesterov=nesterov,
            momentum_dtype=momentum_dtype, state=state, codec=codec, quorum=quorum, grace=grace, fragments=fragments,
            overlap=overlap, mix=mix, patience=patience, freeze_a=freeze_a, check_frozen=check_frozen,
        )  # fmt: skip
        super().__init__(model, strategy, optimizer=optimizer, extra=extra, resume=resume, fresh=fresh)
        if strategy.overshoots and not self._runtime.replaying():
            self._warn(strategy.overshoots)

    @property
    def outer_momentum(self) -> float:
        """Momentum of the outer step; to be set like ``outer_lr``.

        Raises:
            ValueError: not from 0 to below 1.
        """
        return self._strategy.outer_momentum

    @outer_momentum.setter
    def outer_momentum(self, value: float) -> None:
        self._change_outer(outer_momentum=value)


class LocalSGD(LocalSteps):
    """Average the model over all nodes once in ``every`` steps (Local SGD, arXiv 1805.09767).

    This is DiLoCo with outer learning rate 1 and no momentum, in the same code; arguments as there.
    """

    def __init__(
        self,
        model: Any,
        every: int | Seconds = 100,
        *,
        name: str = "model",
        codec: str = "float32",
        quorum: int | float | None = None,
        grace: float | None = None,
        patience: float = PATIENCE,
        optimizer: Any = None,
        extra: Mapping[str, Any] | None = None,
        resume: Resume = None,
        fresh: bool = False,
        freeze_a: bool = False,
        check_frozen: bool = True,
    ) -> None:
        strategy = Strategy(
            "LocalSGD", every, name, outer_lr=1.0, outer_momentum=0.0, momentum_dtype=NOT_KEPT, nesterov=False,
            codec=codec, quorum=quorum, grace=grace, patience=patience, freeze_a=freeze_a, check_frozen=check_frozen,
        )  # fmt: skip
        super().__init__(model, strategy, optimizer=optimizer, extra=extra, resume=resume, fresh=fresh)
