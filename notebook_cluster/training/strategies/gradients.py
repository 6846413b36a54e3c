"""Averaged gradients: what a node of data-parallel training adds to a round, and what a round does to its model.

A round here is one step of the user's optimiser. Its outer learning rate and momentum are 0, so ``momentum`` holds the
mean itself, and theta is what each node's own optimiser makes of it: equal on machines that compute alike. Where they
do not, the last bits drift apart; so every so many rounds the lowest rank sends its parameters instead. The running
statistics of normalisation layers are averaged like gradients. Main thread only.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from msgspec import structs

from notebook_cluster.codecs import NotFiniteError, Vector
from notebook_cluster.rounds.member.events_effects import Apply, Boundary
from notebook_cluster.rounds.numerics.bits import packed, unpacked
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.training.loop.encoding import encoder_of, on_host
from notebook_cluster.training.loop.replica import Replica
from notebook_cluster.training.models.optimizer_settings import settings_of
from notebook_cluster.training.models.parameters import WithGradients


class GradientReplica(Replica):
    """One node's model and the gradients in it that no round has counted yet."""

    parameters: WithGradients

    def __init__(
        self,
        parameters: WithGradients,
        fragments: Fragments,
        optimizer: Any,
        *,
        scale_lr: bool,
        is_lowest: Callable[[], bool],
        restore: Callable[[], bool | None],
    ) -> None:
        """In the exact rounds of ``fragments`` the node that ``is_lowest`` sends its parameters. ``restore``: put the
        optimiser's state back that came with a state; False: none did, None: no state came."""
        super().__init__(parameters, fragments, encoder=encoder_of(parameters))
        self._optimizer, self._scale_lr = optimizer, scale_lr
        self._is_lowest, self._restore = is_lowest, restore
        self._error: Any = None
        """Error feedback, and what it becomes when the open round is committed; tensors where the model's GPU
        encodes."""
        self._next_error: Any = None

    def contribution(self, finishing: bool) -> Boundary:
        """The mean gradient of the steps since the last round, or the parameters; encoded once."""
        self.parameters.check()
        self._next_error, error = self._error, self._error
        wire, more = self.fragments.made_for(self.round + 1), False
        empty = Boundary(b"", 0.0, 0, finishing=finishing, base=self.state_hash, base_round=self.round)
        empty = structs.replace(empty, optimizer=self._optimizer_settings())
        if self.fragments.is_exact(self.round + 1):
            more = self.steps > 0
            if not self._is_lowest():
                return structs.replace(empty, more=more)
            values, samples, steps = self.parameters.read(), 1.0, 0
        else:
            samples, steps = self.samples, self.steps
            if not samples:
                return empty
            flags = self.parameters.gradients_there()
            empty = structs.replace(empty, gradients=packed(flags))
            waits = [part for part, flag in zip(self._parts(), flags, strict=True) if not flag]
            if error is not None and waits:
                error = _without(error, waits)
            there = self._encoder.encode_gradients(wire, steps, error) if self._encoder is not None else None
            if there is not None:
                self._next_error = self._with(there.left, waits)
                return structs.replace(empty, encoded=there.data, samples=samples, steps=steps, norm=there.norm)
            values = self.parameters.read_gradients()
            trained = values[: wire.parameters]
            np.divide(trained, np.float32(steps), out=trained)
        with np.errstate(all="ignore"):
            norm = float(np.linalg.norm(values))
            if steps and error is not None:
                values += on_host(error)
        try:
            encoded = wire.encode_in(self.memory, values)
        except NotFiniteError:
            return structs.replace(empty, samples=samples, steps=steps, finite=False, scaled=self.scaled, more=more)
        if wire.codec.lossy and steps:
            self._next_error = self._with(values - wire.decode(encoded), waits)
        return structs.replace(empty, encoded=encoded, samples=samples, steps=steps, norm=norm, more=more)

    def apply(self, commit: Apply) -> None:
        """COMMIT: the optimiser makes its step with the mean, on every node alike, with work of its own or not."""
        if self.fragments.is_exact(commit.round):
            if commit.members:
                self._load(commit.momentum)
        else:
            if commit.counted:
                self._error = self._next_error
            if commit.members:
                self._step(commit.momentum, len(commit.members), commit.gradients)
            self._clear()
        self._hold(commit.round, commit.theta, commit.momentum, commit.state_hash)

    def start(self, round: int, theta: Vector, momentum: Vector, state_hash: str) -> None:
        """The job is on at this state; gradients that belong to another one are dropped."""
        if not (self.started and state_hash == self.state_hash):
            self._take_over(theta)
        self._hold(round, theta, momentum, state_hash)

    def rebase(self, round: int, theta: Vector, momentum: Vector, state_hash: str) -> None:
        """Rounds went on without this node: it takes over parameters and optimiser. Its gradients were computed on
        older parameters and are dropped."""
        self._take_over(theta)
        self._hold(round, theta, momentum, state_hash)

    def release(self) -> None:
        """The contribution was computed on another state than this one."""
        self._clear()

    def was_changed(self) -> bool:
        """The model is what the optimizer makes of it."""
        return False

    def global_vector(self) -> Vector:
        """What the optimizer made of the last round."""
        return self.parameters.read()

    def hold_back(self) -> None:
        """A Stop came before the round was sealed: the gradients wait."""
        self._next_error = self._error

    def kept_work(self) -> Any:
        has = self.parameters.has_gradients() and self.steps > 0
        gradients = (self.parameters.read_gradients(), self.parameters.gradients_there()) if has else None
        return self._done, list(self._counted), self._error, gradients

    def go_on(self, restore: Callable[[], None], work: Any) -> None:
        restore()
        self._done, self._counted, self._error = work[0], list(work[1]), work[2]
        self._next_error = self._error
        if work[3] is not None:
            self.parameters.put_gradients(*work[3])

    def discard(self) -> None:
        """REFUSED: its gradients are dropped; the parameters are those of all."""
        self._error = self._next_error = None
        self._clear()

    def settle(self) -> None:
        """The loop is over: the model holds what all hold."""
        self._clear()

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """The model as it is: between two steps it holds the global parameters on every node."""
        yield

    def _step(self, mean: Vector, nodes: int, gradients: bytes) -> None:
        self.parameters.optimizer_step(self._optimizer, mean, self._factor(nodes), self._unpacked(gradients))

    def _optimizer_settings(self) -> str:
        return settings_of(self._optimizer) if self._optimizer is not None else ""

    def _unpacked(self, gradients: bytes) -> list[bool]:
        """For each tensor whether any node has a gradient of it."""
        return unpacked(gradients, len(self.parameters.layout.schema))

    def _parts(self) -> list[slice]:
        """Where each tensor lies in the vector."""
        layout = self.parameters.layout
        return [slice(*edges) for edges in itertools.pairwise([*layout.starts, layout.size])]

    def _with(self, left: Any, waits: list[slice]) -> Any:
        """What a contribution leaves, together with the error feedback that waited."""
        if self._error is not None:
            for part in waits:
                left[part] = _like(self._error[part], left)
        return left

    def _factor(self, nodes: int) -> int:
        """The factor on the learning rate of a step with the gradients of so many nodes."""
        return nodes if self._scale_lr else 1

    def _take_over(self, theta: Vector) -> bool | None:
        self._load(theta)
        self._error = self._next_error = None
        self._clear()
        return self._restore()

    def _clear(self) -> None:
        self.parameters.clear_gradients(self._optimizer)
        self._counted = [self._done]


def _without(error: Any, waits: list[slice]) -> Any:
    """Error feedback of tensors without a gradient is not sent: where nobody has one the optimiser would not see it,
    and it would be lost. It waits until there is one."""
    sent = error.copy() if isinstance(error, np.ndarray) else error.clone()
    for part in waits:
        sent[part] = 0
    return sent


def _like(values: Any, other: Any) -> Any:
    """``values`` where ``other`` is: on the host, or on a device."""
    if isinstance(other, np.ndarray):
        return on_host(values)
    import torch

    return torch.as_tensor(values, device=other.device)
