"""Gradients of which one node makes a step for all: it alone has the optimiser's state, the others get parameters.

The mean of a round's gradients stays on the node that holds the optimiser. Its step is made aside: model and optimiser
are as before until the COMMIT of exactly those parameters, so an attempt that loses a node is done again from the same
state, and Stop or a checkpoint in between finds the state of the last round. At COMMIT every node loads the same
parameters. An optimiser's state that is not the one of the last round is of no use and is dropped: only the node that
made the last step has one. Main thread only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from notebook_cluster.codecs import Vector
from notebook_cluster.rounds.member.events_effects import Apply, TakeStep
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.training.models.parameters import WithGradients
from notebook_cluster.training.strategies.gradients import GradientReplica


@dataclass(frozen=True)
class _Step:
    """A step that was made aside and is not committed."""

    round: int
    theta: Vector
    optimizer: Any
    """The optimiser's state after the step; None: it stays as before."""
    afresh: bool
    """The optimiser's state of the round before was not here."""


class CentralOptimizerReplica(GradientReplica):
    """One node's model and gradients, and the step for all where it is the one that makes it."""

    def __init__(
        self,
        parameters: WithGradients,
        fragments: Fragments,
        optimizer: Any,
        *,
        scale_lr: bool,
        restore: Callable[[], bool | None],
        afresh: Callable[[int, str], None],
        warn: Callable[[str], None],
    ) -> None:
        """``restore`` as for GradientReplica. ``afresh`` is told the round of a step that began with an empty state
        because the node named, or one not known, had it."""
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

    def step_for_all(self, step: TakeStep) -> Vector:
        """The parameters that the optimiser makes of the mean gradient; model and optimiser stay as they are. A step
        to NaN or infinity is not taken: then these are the parameters of the round before."""
        theta, after = self.parameters.step_aside(
            self._optimizer, step.mean, self._factor(step.nodes), self._unpacked(step.gradients)
        )
        if not np.isfinite(theta).all():
            self._warn(
                f"round {step.round}: the optimizer's step leads to NaN or infinity in the parameters and is not "
                "taken: lower its learning rate"
            )
            theta, after = self.theta, None
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
        steps = int(bool(commit.members))
        self._go_on(commit.round, commit.theta, commit.momentum, commit.state_hash, moves, steps)

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
        self._go_on(round, theta, momentum, state_hash, moves, 0)

    def rebase(self, round: int, theta: Vector, momentum: Vector, state_hash: str) -> None:
        """Rounds went on without this node: it takes over the parameters. Its gradients are dropped; its optimiser's
        state is as well, unless the newest step is the one it made itself."""
        moves, came = self._adopt(round, theta), self._take_over(theta)
        self._go_on(round, theta, momentum, state_hash, moves or came is True, round - self.round)

    def _optimizer_settings(self) -> str:
        """Only those of the node that steps for all count."""
        return ""

    def _adopt(self, round: int, theta: Vector) -> bool:
        """The step made aside, if it is what led to these parameters, becomes that of the optimiser."""
        step, self._aside = self._aside, None
        if step is None or step.round != round or not np.array_equal(step.theta, theta):
            return False
        if step.optimizer is not None:
            self.parameters.put_state(self._optimizer, step.optimizer)
        if step.afresh:
            self._afresh(round, self._server)
        return True

    def _go_on(self, round: int, theta: Vector, momentum: Vector, state_hash: str, moves: bool, steps: int) -> None:
        """``moves``: the optimiser's state here is the one of this round, which is so many steps on."""
        self._clear()
        self._hold(round, theta, momentum, state_hash)
        if moves:
            self._optimizer_round = round
        missed = 0 if moves else steps
        self.parameters.stepped_elsewhere(self._optimizer, missed, forget=not self.holds_optimizer())
