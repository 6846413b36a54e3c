"""Data-parallel training from top to bottom: every step of the optimiser is one round of all nodes.

In the order in which it happens:

1. :meth:`DataParallel.step` takes this node's gradient. After ``accumulate`` calls the round begins.
2. The mean gradient of those calls is encoded (:meth:`.GradientReplica.contribution`), and the mean of all nodes, by
   samples, is taken as in every round.
3. With ``mode="allreduce"`` COMMIT brings the mean, and each node's own optimiser makes the step with it
   (:meth:`.GradientReplica.apply`); what it came to is told to the background, for joiners and checkpoints. With
   ``mode="server"`` the optimiser of one node makes the step aside, before PREPARED, and COMMIT brings its parameters
   to all (:mod:`.central_optimizer`).
"""

import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from notebook_cluster.protocol.runs import PATIENCE
from notebook_cluster.rounds.member import events_effects as types
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.momentum import FLOAT32, NOT_KEPT
from notebook_cluster.training.background.worker import Notice
from notebook_cluster.training.checkpointing.resuming import Start
from notebook_cluster.training.loop.round_client import Round
from notebook_cluster.training.loop.sync import RoundSync
from notebook_cluster.training.models import check_optimizer, check_steps_only, refuse_other_steps
from notebook_cluster.training.models.parameters import NO_GRADIENT, WithGradients
from notebook_cluster.training.models.torch_optimizer import check_unscaled, watch_scalers
from notebook_cluster.training.settings.arguments import (
    ALLREDUCE,
    SERVER,
    Strategy,
    check_mode,
    check_samples,
    check_steps,
)
from notebook_cluster.training.strategies.central_optimizer import CentralOptimizerReplica
from notebook_cluster.training.strategies.gradients import GradientReplica


class DataParallel(RoundSync):
    """Train as if one machine had the batches of all nodes: gradients are averaged at every step, by samples.

    ``sync.step(loss, samples=len(x))`` comes after ``loss.backward()`` and takes the place of ``optimizer.step()`` and
    ``optimizer.zero_grad()``; with an mlx.nn.Module ``sync.step(loss, samples=len(x), grads=grads)`` takes the place of
    ``optimizer.update(model, grads)``. It sends the whole model each time: for links faster than those of Wi-Fi. A node
    that is lost is left out of the step, which is done again; one that joins takes over parameters and optimiser first.

    With ``mode="server"`` only one node steps: the lowest rank gets all gradients, its optimiser makes the step, and
    every node loads the parameters that it sends, in float32. So all hold the same bits on unlike machines too, and the
    optimiser's state (Adam's moments: twice the model) is on that node only. Should it be lost, the lowest rank that is
    left goes on with a state that starts afresh, and that is told. All traffic goes over that node's link.

    Args:
        model: a torch.nn.Module or mlx.nn.Module, the same on every node.
        optimizer: the torch.optim or mlx.optimizers optimizer of ``model``, made alike on every node.
        name, codec, patience, resume, fresh, check_frozen: as for DiLoCo.
        scale_lr: True multiplies the optimizer's learning rate, also one on a schedule, by the number of nodes in the
            step.
        accumulate: calls of ``step`` that make one step of the optimizer, with the mean of their gradients: leave the
            usual ``loss / accumulate`` out.
        mode: "allreduce": each node makes the step; "server": one node does, for all.
        resend: every so many steps the lowest rank sends its parameters to all, because optimisers differ in the last
            bits on unlike machines; None: never. ``mode="server"`` does that at every step and does not look at it.

    Raises:
        ValueError, TypeError, TrainingError, CheckpointError: as DiLoCo.
    """

    _replica: GradientReplica

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        name: str = "model",
        codec: str = "float32",
        scale_lr: bool = False,
        accumulate: int = 1,
        resend: int | None = 100,
        mode: str = ALLREDUCE,
        patience: float = PATIENCE,
        extra: Mapping[str, Any] | None = None,
        resume: str | None = None,
        fresh: bool = False,
        check_frozen: bool = True,
    ) -> None:
        if optimizer is None:
            raise TypeError(
                "optimizer=None: pass the torch.optim optimizer, or that of mlx.optimizers, whose steps are then taken "
                "on all nodes"
            )
        if not isinstance(scale_lr, bool):
            raise ValueError(f"scale_lr={scale_lr!r}: use True or False")
        self._user_optimizer = check_optimizer(optimizer)
        check_steps_only(optimizer, model)
        self._accumulate = check_steps("accumulate", accumulate)
        self._mode = check_mode(mode)
        exact_every = 0 if resend is None else check_steps("resend", resend) + 1
        kept = NOT_KEPT if mode == SERVER else FLOAT32  # what is kept there is the mean
        strategy = Strategy(
            "DataParallel", self._accumulate, name, outer_lr=0.0, outer_momentum=0.0, nesterov=False, codec=codec,
            gradients=True, scale_lr=scale_lr, exact_every=0 if mode == SERVER else exact_every, mode=mode,
            patience=patience, check_frozen=check_frozen, momentum_dtype=kept,
        )  # fmt: skip
        super().__init__(model, strategy, optimizer=optimizer, extra=extra, resume=resume, fresh=fresh)
        steps_here = weakref.ref(self)
        refuse_other_steps(optimizer, lambda: (sync := steps_here()) is not None and sync.unfinished)

    def step(self, loss: Any = None, samples: float = 1, *, grads: Any = None) -> Round | None:
        """After ``loss.backward()``: the optimiser's step with the mean gradient of all nodes. ``grads``: those of an
        mlx model, as ``nn.value_and_grad`` returns them; a torch model has its own in ``.grad``.

        Returns:
            The Round of the step; None while gradients accumulate.

        Raises:
            TypeError: ``grads`` is missing for an mlx model, or given for a torch model.
            ValueError: ``loss`` or ``samples`` is not a number, ``grads`` is of another model, there is no gradient, a
                GradScaler has multiplied them, or the model was changed; names it.
            TrainingError: the job was refused.
        """
        if self._idle():
            return None
        with self._call:
            return self._take_step(loss, samples, grads)

    def _take_step(self, loss: Any, samples: float, grads: Any) -> Round | None:
        parameters = self._replica.parameters
        parameters.add_gradients(grads, check_samples(samples))
        if samples and not parameters.has_gradients():
            raise ValueError(NO_GRADIENT)
        if self._registering_drops_gradients():
            samples = 0
        self._count_step(loss, samples)
        if self._round_open:
            return self._wait_for_commit()
        if self._replica.steps < self._accumulate:
            return None
        return self._exchange_due()

    def _exchange_due(self) -> Round | None:
        done = None
        while self._replica.steps and not self._passing:  # a round of parameters leaves them for the next one
            self._contribute(finishing=False)
            done = self._wait_for_commit()
        return done

    def _at_boundary(self) -> bool:
        return self._replica.steps >= self._accumulate

    def _registering_drops_gradients(self) -> bool:
        """In a new cell: whether a round that was still open in the last one has made the gradients at hand stale."""
        parameters, round = self._replica.parameters, self._replica.round
        came = self._replica.started and parameters.has_gradients()
        self._register_if_needed()
        if not came or parameters.has_gradients():
            return False
        self._warn(
            f"round {self._replica.round} ended after this step's gradient was computed on the parameters of round "
            f"{round}: it is not used"
        )
        return True

    def _contribute(self, finishing: bool) -> None:
        if self._replica.steps:
            self._replica.scaled = check_unscaled(self._user_optimizer)
        self._advance()
        super()._contribute(finishing)

    def _advance(self) -> None:
        """Tell the background what this node's optimiser made of the last round: joiners and checkpoints take that."""
        if self._mode == SERVER:  # it is what was committed
            return
        self._replica.parameters.check()
        self._job.post_event(types.Advance(self._replica.round, self._replica.parameters.read()))

    def checkpoint(self, name: str) -> Path | None:
        """As for DiLoCo: parameters and optimizer as they are after the last step."""
        if self._replica.started and not self._idle():
            self._advance()
        return super().checkpoint(name)

    def _out_of_rounds(self) -> None:
        super()._out_of_rounds()
        if self._replica.started:
            self._advance()

    def _make_replica(self, parameters: WithGradients, fragments: Fragments) -> GradientReplica:
        parameters.check_optimizer(self._user_optimizer, self._strategy.scale_lr)
        watch_scalers(parameters.framework)
        if self._mode == SERVER:
            central = CentralOptimizerReplica(
                parameters,
                fragments,
                self._user_optimizer,
                scale_lr=self._strategy.scale_lr,
                restore=self._optimizer_state.take_over,
                afresh=self._tell_afresh,
                warn=self._warn,
            )
            self._optimizer_state.holds = central.holds_optimizer
            return central
        return GradientReplica(
            parameters,
            fragments,
            self._user_optimizer,
            scale_lr=self._strategy.scale_lr,
            is_lowest=lambda: self._members[:1] == (self._runtime.name,),
            restore=self._optimizer_state.take_over,
        )

    def _start(self) -> Start:
        start, replica = super()._start(), self._replica
        same_round = start.held and replica.started and start.round == replica.round
        if self._mode == ALLREDUCE and same_round and start.state_hash != replica.state_hash:
            # the job has not been told yet what the optimiser made of that round
            return replace(start, theta=replica.parameters.read(), state_hash=replica.state_hash)
        return start

    def _handle_notice(self, notice: Notice) -> None:
        replica = self._replica
        if not isinstance(notice, types.TakeStep):
            super()._handle_notice(notice)
        elif isinstance(replica, CentralOptimizerReplica) and replica.started and notice.round == replica.round + 1:
            self._job.post_event(types.Stepped(notice.round, notice.attempt, replica.step_for_all(notice)))

    def _tell_afresh(self, round: int, server: str) -> None:
        where = repr(server) if server else "another node"
        text = (
            f"from round {round} of {self._job.name!r} on {self._runtime.name!r} makes the steps, in place of {where}: "
            "the optimizer's state was only there, so it starts afresh"
        )
        self._job.tell("warning", text)
