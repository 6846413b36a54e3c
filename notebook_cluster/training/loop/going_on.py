"""What a new sync object of a job goes on with, and what begins anew, in one line for people.

Parameters and what belongs to rounds are held by the nodes, or come from a checkpoint. What the cell itself makes, its
optimizer, scheduler and data, begins anew when the cell is run again, unless it was made elsewhere.
"""

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

from notebook_cluster.training.background.job import Job
from notebook_cluster.training.settings.arguments import Strategy


class GoingOn:
    """Made with each sync object of ``job``; ``optimizer`` None: none was given, though the cell may have one."""

    def __init__(self, job: Job, model: Any, optimizer: Any) -> None:
        before, job.made_with = job.made_with, (_reference(model), _reference(optimizer))
        self._same_model, self._same_optimizer = before[0]() is model, before[1]() is optimizer
        self._given = optimizer is not None
        # mlx has the schedule inside the optimizer
        frameworks = {base.__module__.partition(".")[0] for base in type(model).__mro__}
        self._scheduler = [] if "mlx" in frameworks else ["the scheduler"]

    def line(
        self, strategy: Strategy, round: int, checkpoint: str, *, lossy: bool, restored: bool, momentum: bool
    ) -> str:
        """``checkpoint``: where the state comes from; empty: it is held here. ``lossy``: the codec keeps error
        feedback. ``restored``: the optimizer has the state that was saved. ``momentum``: the one that is this node's
        alone goes on, where the strategy has one in place of an optimizer."""
        goes_on, anew, more = ["parameters"], list[str](), ""
        if strategy.descent is not None:
            (goes_on if momentum else anew).append("each node's momentum")
        else:
            goes_on += ["outer momentum"] if strategy.outer_momentum else []
            anew += ["the error feedback"] if lossy else []
            if restored:
                goes_on.append("the optimizer's state")
                anew += self._scheduler
            elif self._given and self._same_optimizer:
                goes_on.append("the optimizer")
            elif self._same_model and not self._given:
                makes = ["an optimizer", "a scheduler"] if self._scheduler else ["an optimizer"]
                more = f", as do {_listed(makes)} that this cell makes"
            else:
                anew += ["the optimizer", *self._scheduler]
        where = f" of checkpoint {checkpoint!r}" if checkpoint else ""
        way_out = "" if checkpoint else " (fresh=True starts over)"
        return (
            f"training {strategy.name!r} goes on at round {round}{where}: {_listed(goes_on)} go on; "
            f"{_listed([*anew, 'the data'])} begin anew{more}{way_out}"
        )


def _listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([*([", ".join(words[:-1])] if words[:-1] else []), words[-1]])


def _reference(value: Any) -> Any:
    """A weak reference, so that no model is kept alive; of what has none a reference to nothing."""
    with contextlib.suppress(TypeError):
        if value is not None:
            return weakref.ref(value)
    return _nothing


def _nothing() -> object:
    return _NOTHING


_NOTHING = object()
