"""An exponential moving average of the global parameters, one step of it at each round."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from notebook_cluster.codecs import Vector
from notebook_cluster.training.models.parameters import Parameters


class GlobalAverage:
    """``e <- decay * e + (1 - decay) * theta`` at each round, with theta the global parameters after it: the same bits
    on all nodes that had the same rounds. Running statistics of normalisation layers are theta's.

    Attributes:
        decay: what it keeps of itself at a round.
        rounds: how many it has seen.
    """

    def __init__(self, parameters: Parameters, decay: float, theta: Vector) -> None:
        self._parameters, self.decay = parameters, decay
        self._trained = parameters.layout.size - parameters.layout.buffers
        self.rounds = 0
        self._vector = theta.copy()

    def update(self, theta: Vector) -> None:
        """A round has led to ``theta``; float32, one for each element of the model's vector."""
        trained, keep = self._trained, np.float32(self.decay)
        self._vector[:trained] *= keep
        self._vector[:trained] += (np.float32(1) - keep) * theta[:trained]
        self._vector[trained:] = theta[trained:]
        self.rounds += 1

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """The model holds the average inside the block, and afterwards again what it held before."""
        before = self._parameters.snapshot()
        try:
            self._parameters.load(self._vector)
            yield
        finally:
            self._parameters.restore(before)

    def parameters(self) -> dict[str, Vector]:
        """Name -> average, float32 in the model's shapes; tied parameters once."""
        return {name: value.copy() for name, value in self._parameters.layout.tensors(self._vector).items()}

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "rounds": self.rounds, "vector": self._vector.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises:
        ValueError: it is of another model.
        """
        vector = np.ascontiguousarray(state["vector"], np.float32)
        if vector.shape != self._vector.shape:
            raise ValueError(f"an average of {vector.size} elements, where the model has {self._vector.size}")
        self.rounds, self._vector = int(state["rounds"]), vector.copy()


def check_decay(decay: float) -> float:
    """``decay`` of :meth:`.sync.RoundSync.ema`.

    Raises:
        ValueError: not a number from 0 to below 1.
    """
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise ValueError(f"ema(decay={decay!r}): use a number from 0 to below 1, for example 0.99")
    return float(decay)
