"""What steps made aside need of a ``torch.optim.Optimizer``: its state, copied and put back."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OptimizerState:
    """What a step changes of an optimizer."""

    state: dict[Any, Any]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: Any) -> "OptimizerState":
        """Its own tensors, not copies of them."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return cls(dict(optimizer.state), groups)

    def copy(self) -> "OptimizerState":
        """The keys of ``state`` are the parameters themselves."""
        return OptimizerState({key: deepcopy(value) for key, value in self.state.items()}, deepcopy(self.groups))

    def put(self, optimizer: Any) -> None:
        optimizer.state.clear()
        optimizer.state.update(self.state)
        for group, values in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(values)
