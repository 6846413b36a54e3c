"""``nc.sync_every``: one line for any loop that steps a torch optimizer, with that optimizer's own hook."""

import weakref
from typing import TYPE_CHECKING, Any

from notebook_cluster.integrations.hosted import hosted_strategy, own_optimizer
from notebook_cluster.training.settings.arguments import check_samples

if TYPE_CHECKING:
    from notebook_cluster.training import Seconds
    from notebook_cluster.training.strategies.diloco import LocalSteps

_hooks: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""Optimizer -> the handle of its hook: a cell that is run again must not step twice."""


def sync_every(
    every: "int | Seconds",
    model: Any,
    optimizer: Any,
    *,
    strategy: "type[LocalSteps] | None" = None,
    samples: float = 1,
    **settings: Any,
) -> "LocalSteps":
    """Make a sync object that is stepped by itself after each step of ``optimizer``, in whatever loop that is::

        nc.sync_every(100, model, optimizer)

    The loop divides its data itself, with ``nc.shard``. A step that was left out (gradients that accumulate, a
    GradScaler that found an infinity) does not count. At the end of the cell, or with ``finish()`` on what is returned,
    what is left is exchanged. Calling it again for an optimizer replaces the sync object of before.

    Args:
        every: steps of the optimizer in a round, or ``nc.Seconds(30)``.
        model: a torch.nn.Module, the same on every node.
        optimizer: the torch.optim optimizer of ``model``, or accelerate's wrapper of it.
        strategy: ``nc.DiLoCo`` (None), ``nc.LocalSGD`` or ``nc.SparseLoCo``.
        samples: examples in a batch, where nodes have batches of unlike size: what their work weighs.
        settings: those of the strategy, for example ``codec="int8"``.

    Returns:
        The sync object. ``step()`` is not called on it; ``nc.report(loss=loss)`` shows a loss.

    Raises:
        TypeError: ``optimizer`` has no hook, or ``strategy`` or a setting is not known.
        ValueError, TrainingError, CheckpointError, MemoryError: as the strategy.
    """
    made = hosted_strategy(strategy, every, settings)
    count = check_samples(samples)
    optimizer = own_optimizer(optimizer)
    if not hasattr(optimizer, "register_step_post_hook"):
        raise TypeError(
            f"optimizer={type(optimizer).__name__} has no hook after its steps: pass a torch.optim optimizer, or make "
            "nc.DiLoCo(model) and call sync.step(loss, samples=len(x)) after each step"
        )
    if (before := _hooks.pop(optimizer, None)) is not None:
        before.remove()
    sync = made(model, every, optimizer=optimizer, **settings)
    _hooks[optimizer] = optimizer.register_step_post_hook(lambda *_: sync.step(samples=count) and None)
    return sync
