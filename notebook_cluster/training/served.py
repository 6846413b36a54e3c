"""Gradients of which one node makes a step for all: it alone has the optimiser's state, the others get parameters.

The mean of a round's gradients stays on the node that holds the optimiser. Its step is made aside: model and optimiser
are as before until the COMMIT of exactly those parameters, so an attempt that loses a node is done again from the same
state, and Stop or a checkpoint in between finds the state of the last round. At COMMIT every node loads the same
parameters. An optimiser's state that is not the one of the last round is of no use and is dropped: only the node that
made the last step has one. Main thread only.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from notebook_cluster.codecs import Vector
from notebook_cluster.training.fragments import Fragments
from notebook_cluster.training.gradients import Gradients
from notebook_cluster.training.member_types import Apply, TakeStep
from notebook_cluster.training.torch_parameters import TorchParameters


@dataclass(frozen=True)
class _OptimizerState:
    """What a step changes of an optimiser."""

    state: dict[Any, Any]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: Any) -> "_OptimizerState":
        """Its own tensors, not copies of them."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return cls(dict(optimizer.state), groups)

    def copy(self) -> "_OptimizerState":
        """The keys of ``state`` are the parameters themselves."""
        return _OptimizerState({key: deepcopy(value) for key, value in self.state.items()}, deepcopy(self.groups))

    def put(self, optimizer: Any) -> None:
        optimizer.state.clear()
        optimizer.state.update(self.state)
        for group, values in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(values)


@dataclass(frozen=True)
class _Step:
    """A step that was made aside and is not committed."""

    round: int
    theta: Vector
    optimizer: _OptimizerState
    afresh: bool
    """The optimiser's state of the round before was not here."""


class ServedGradients(Gradients):
    """One node's model and gradients, and the step for all where it is the one that makes it."""

    parameters: TorchParameters

    def __init__(
        self,
        parameters: TorchParameters,
        fragments: Fragments,
        optimizer: Any,
        *,
        scale_lr: bool,
        restore: Callable[[], bool | None],
        afresh: Callable[[int, str], None],
        warn: Callable[[str], None],
    ) -> None:
        """``restore`` as for Gradients. ``afresh`` is told the round of a step that began with an empty state because
        the node named, or one not known, had it."""
        super().__init__(parameters, fragments, optimizer, scale_lr=scale_lr, is_lowest=lambda: False, restore=restore)
        self._afresh, self._warn = afresh, warn
        self._optimizer_round = 0
        """The round that the optimiser's state here belongs to."""
        self._server = ""
        """Who made the last step."""
        self._aside: _Step | None = None

    def holds_optimizer(self) -> bool:
        """The state of the optimiser is here: this node made the last step, or nobody has made one since the start."""
        return self._optimizer_round == self.round

    def serve(self, step: TakeStep) -> Vector:
        """The parameters that the optimiser makes of the mean gradient; model and optimiser stay as they are. A step
        to NaN or infinity is not taken: then these are the parameters of the round before."""
        optimizer, parameters = self._optimizer, self.parameters
        model, before = parameters.snapshot(), _OptimizerState.of(optimizer).copy()
        gradients = [(tensor, tensor.grad) for tensor in parameters.model.parameters()]
        try:
            self._step(step.mean, step.nodes)
            theta, after = parameters.read(), _OptimizerState.of(optimizer)
        finally:
            before.put(optimizer)
            parameters.restore(model)
            for tensor, gradient in gradients:
                tensor.grad = gradient
        if not np.isfinite(theta).all():
            self._warn(
                f"round {step.round}: the optimizer's step leads to NaN or infinity in the parameters and is not "
                "taken: lower its learning rate"
            )
            theta, after = self.theta, before
        self._aside = _Step(step.round, theta, after, not self.holds_optimizer())
        return theta

    def apply(self, commit: Apply) -> None:
        """COMMIT: every node loads the parameters that one optimiser made; there its state moves on with them."""
        if commit.counted:
            self._error = self._next_error
        moves = self._adopt(commit.round, commit.theta) if commit.members else self.holds_optimizer()
        if commit.members:
            self._load(commit.theta)
        self._server = commit.server or self._server
        self._go_on(commit.round, commit.theta, commit.momentum, commit.state_hash, moves)

    def start(self, round: int, theta: Vector, momentum: Vector, state_hash: str) -> None:
        """The job is on at this state. The optimiser that people gave is good for a job that begins, or goes on from a
        state held here; one that came to a job in mid run has no state of that job."""
        if self.started and state_hash == self.state_hash:
            self._aside = None
            self._hold(round, theta, momentum, state_hash)
            return
        first = not self.started
        moves, came = self._adopt(round, theta), self._take_over(theta)
        moves = moves or came is True or (first and (came is None or not round))
        self._go_on(round, theta, momentum, state_hash, moves)

    def rebase(self, round: int, theta: Vector, momentum: Vector, state_hash: str) -> None:
        """Rounds went on without this node: it takes over the parameters. Its gradients are dropped; its optimiser's
        state is as well, unless the newest step is the one it made itself."""
        moves, came = self._adopt(round, theta), self._take_over(theta)
        self._go_on(round, theta, momentum, state_hash, moves or came is True)

    def _adopt(self, round: int, theta: Vector) -> bool:
        """The step made aside, if it is what led to these parameters, becomes that of the optimiser."""
        step, self._aside = self._aside, None
        if step is None or step.round != round or not np.array_equal(step.theta, theta):
            return False
        step.optimizer.put(self._optimizer)
        if step.afresh:
            self._afresh(round, self._server)
        return True

    def _go_on(self, round: int, theta: Vector, momentum: Vector, state_hash: str, moves: bool) -> None:
        """``moves``: the optimiser's state here is the one of this round."""
        self._clear()
        self._hold(round, theta, momentum, state_hash)
        if moves:
            self._optimizer_round = round
        if not self.holds_optimizer():
            self._optimizer.state.clear()
        self._optimizer._opt_called = True  # else torch's schedulers warn where it never makes a step
