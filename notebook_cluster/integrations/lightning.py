"""``nc.lightning``: training with Lightning's ``Trainer``.

trainer = Trainer(devices=1, default_root_dir=nc.node(), callbacks=[nc.lightning.SyncCallback(every=100)])
trainer.fit(model, nc.shard(train_loader))
"""

import math
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from notebook_cluster.integrations.hosted import DIVIDED, HostedCallback, fingerprint, own_optimizer
from notebook_cluster.node.namespace.shard import Shard
from notebook_cluster.training.runtime import current_runtime

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise ImportError(f"nc.lightning needs lightning: pip install lightning ({error})") from error

__all__ = ["SyncCallback"]


class LightningCallback(HostedCallback, Callback):  # type: ignore[misc]
    """Train one model with the ``Trainer`` of every node: ``Trainer(..., callbacks=[SyncCallback(every=100)])``.

    ``fit()`` begins on all nodes with the model of rank 0, and ends with the global parameters on all of them.
    Validation and checkpoints are of the global model of the last round (but a checkpoint with ``save_weights_only``
    that is written between two batches holds the node's own parameters); a checkpoint holds the outer momentum as well.
    The loss, and logged metrics with ``val`` in their names, are shown in the panel. A node that has fewer batches than
    the others waits in the end of ``fit()`` and takes part in rounds without work of its own. One that is stopped
    early, by whatever callback, stops all after their next round. A node that joins, and is the last one to train, ends
    its loop. A Stop ends the cell as a Stop.

    Args:
        every: batches after which an optimizer has stepped, in a round; or ``nc.Seconds(30)``.
        strategy: ``nc.DiLoCo`` (None), ``nc.LocalSGD`` or ``nc.SparseLoCo``.
        check_data: raise where two nodes have the same training data; False: that is meant.
        settings: those of the strategy, for example ``codec="int8"`` or ``name="encoder"``.

    Attributes:
        sync: the sync object, from the beginning of ``fit()`` on.

    Raises:
        TypeError, ValueError: an argument is not usable; names it.
    """

    divide = "nc.shard(loader) to fit()"
    _saved: dict[str, Any] | None = None
    """Of the checkpoint that was loaded."""
    _seen = 0
    """The Trainer's steps until now."""
    _samples: float
    """Of the batches since the last step, and their losses."""
    _losses: list[Any]
    _interrupts: Any = signal.default_int_handler
    """Of SIGINT, before Lightning has it ignored: where a Stop comes before :meth:`setup`, Python's own."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._interrupts = signal.getsignal(signal.SIGINT)
        if trainer.world_size > 1:
            raise ValueError(
                f"this Trainer has {trainer.world_size} devices of its own: pass devices=1, one for each node"
            )
        node = current_runtime().name
        if current_runtime().world_size() > 1:
            for folder in _folders(trainer):
                if not any(re.search(rf"(^|[-_.]){re.escape(node)}$", part) for part in Path(folder).parts):
                    raise ValueError(
                        f"nodes of one machine would all write to {folder!r}: pass default_root_dir=nc.node() to the "
                        "Trainer, and name nc.node() in every dirpath= and save_dir="
                    )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        momentum, self._seen = None, trainer.global_step
        self._samples, self._losses = 0.0, []
        if self._seen:
            saved, self._saved = self._saved or {}, None
            given = {name: value.numpy() for name, value in saved.get("momentum", {}).items()}
            where = f"that of the checkpoint of step {self._seen}"
            momentum = self._hosted.momentum_for(pl_module, saved.get("saved_with"), given, where)
        optimizer = own_optimizer(trainer.optimizers[0]) if len(trainer.optimizers) == 1 else None
        self._hosted.begin(pl_module, optimizer, _data_of(trainer.train_dataloader), self._seen, momentum)
        if math.isfinite(trainer.estimated_stepping_batches):
            current_runtime().report(of_steps=int(trainer.estimated_stepping_batches) - self._seen)
        if current_runtime().replaying():
            trainer.should_stop = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._hosted.hide_global()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._samples += _examples(batch) or 1
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            self._losses.append(loss)
        if trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        samples, losses = self._samples, self._losses
        self._samples, self._losses = 0.0, []
        self._hosted.step(samples, sum(losses) if losses else None)  # each was divided by the batches of a step
        if self._hosted.left_alone or self._hosted.stopping:
            trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if _in_fit(trainer):
            self._hosted.show_global()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._hosted.shows_global:
            numbers = {name: float(value) for name, value in trainer.callback_metrics.items() if "val" in name}
            self._hosted.report({"loss" if name == "val_loss" else name: value for name, value in numbers.items()})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._hosted.show_global()  # those that save and compare come next

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._hosted.finish(early=trainer.should_stop)

    def state_dict(self) -> dict[str, Any]:
        import torch

        momentum = self.sync.outer_momentum_by_name() if self.sync is not None else {}
        return {"momentum": {name: torch.from_numpy(value) for name, value in momentum.items()}}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """The parameters in it become those that the outer momentum goes with."""
        if self.sync is None or not _in_fit(trainer):
            return
        shown = self._hosted.shows_global
        self._hosted.show_global()
        checkpoint["state_dict"] = {name: value.clone() for name, value in pl_module.state_dict().items()}
        checkpoint["callbacks"][self.state_key]["saved_with"] = fingerprint(pl_module)
        if not shown:
            self._hosted.hide_global()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """After a Stop Lightning raises SystemExit, and ignores the next Stop: what it does before that is done here,
        and the Stop goes on."""
        self._hosted.hide_global()
        self._hosted.leave_loop()
        if not isinstance(exception, KeyboardInterrupt):
            return
        for callback in trainer.callbacks[trainer.callbacks.index(self) + 1 :]:
            callback.on_exception(trainer, pl_module, exception)
        for logger in trainer.loggers:
            logger.finalize("failed")
        trainer._teardown()
        signal.signal(signal.SIGINT, self._interrupts)
        self._interrupts = signal.default_int_handler
        raise exception


SyncCallback = LightningCallback


def _in_fit(trainer: Any) -> bool:
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def _folders(trainer: Any) -> Iterator[str]:
    """Where this Trainer will write."""
    for callback in trainer.checkpoint_callbacks:
        yield getattr(callback, "dirpath", None) or trainer.default_root_dir
    for logger in trainer.loggers:
        if isinstance(folder := getattr(logger, "log_dir", None), str):
            yield folder


def _data_of(loader: Any) -> Any:
    """The data behind what ``fit()`` was given; DIVIDED where all of it is nc.shard's."""
    loaders = list(loader.values()) if isinstance(loader, Mapping) else loader
    loaders = loaders if isinstance(loaders, list | tuple) else [loaders]
    whole = [one for one in loaders if not isinstance(one, Shard)]
    return getattr(whole[0], "dataset", whole[0]) if whole else DIVIDED


def _examples(batch: Any) -> int:
    """How many examples the first array of ``batch`` has; 0: there is none."""
    if shape := getattr(batch, "shape", None):
        return int(shape[0])
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(parts, list | tuple) or not parts:
        return 0
    return next(
        (count for part in parts if (count := _examples(part))), 0 if isinstance(batch, Mapping) else len(parts)
    )
