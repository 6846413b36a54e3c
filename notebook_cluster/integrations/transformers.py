"""``nc.transformers``: training with the ``Trainer`` of Hugging Face, and with TRL's.

    trainer = Trainer(
        model=model, args=args, train_dataset=nc.transformers.shard(train_set),
        callbacks=[nc.transformers.SyncCallback(every=100)],
    )
    trainer.train()

A ``Trainer`` counts its steps, epochs and learning rates before a callback sees its data, so the data is divided where
it is given to it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, IterableDataset

from notebook_cluster.integrations.hosted import DIVIDED, HostedCallback, fingerprint, own_optimizer
from notebook_cluster.node.data.samplers import epoch_order
from notebook_cluster.node.namespace import api
from notebook_cluster.training.runtime import current_runtime

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(f"nc.transformers needs transformers and accelerate: pip install both ({error})") from error

if TYPE_CHECKING:
    from notebook_cluster.training.checkpointing.resuming import Momentum

__all__ = ["SyncCallback", "shard"]

MOMENTUM_FILE = "outer_momentum.safetensors"
"""In each of the Trainer's checkpoints."""


class TransformersCallback(HostedCallback, TrainerCallback):  # type: ignore[misc]
    """Train one model with the ``Trainer`` of every node: ``Trainer(..., callbacks=[SyncCallback(every=100)])``.

    ``train()`` begins on all nodes with the model of rank 0, and ends with the global parameters on all of them.
    Evaluation and checkpoints are of the global model of the last round. Each node saves in a folder of its own,
    ``output_dir/<node>``, where ``resume_from_checkpoint=True`` looks too; the checkpoint holds the outer momentum as
    well. Steps since the last round are not in a checkpoint: make ``save_steps`` a multiple of ``every``. What the
    Trainer logs is shown in the panel. A node that has fewer batches than the others waits in the end of ``train()``
    and takes part in rounds without work of its own. One that is stopped early, by whatever callback, stops all after
    their next round. A node that joins, and is the last one to train, ends its loop.

    Args:
        every: steps of the optimizer in a round, or ``nc.Seconds(30)``.
        strategy: ``nc.DiLoCo`` (None), ``nc.LocalSGD`` or ``nc.SparseLoCo``.
        check_data: raise where two nodes have the same ``train_dataset``; False: that is meant.
        settings: those of the strategy, for example ``codec="int8"`` or ``name="adapter"``.

    Attributes:
        sync: the sync object, from the beginning of ``train()`` on.

    Raises:
        TypeError, ValueError: an argument is not usable; names it.
    """

    divide = "train_dataset=nc.transformers.shard(dataset)"

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nodes of one machine work in one folder, and would write over each other's checkpoints."""
        node = current_runtime().name
        if Path(args.output_dir).name != node:
            args.output_dir = os.path.join(args.output_dir, node)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if args.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size=True begins anew on one node alone: set per_device_train_batch_size instead"
            )
        if args.world_size > 1:
            raise ValueError(
                "this Trainer is in a process group of torch's own, which exchanges gradients at every step: leave out "
                "nc.torch_distributed(), or SyncCallback"
            )
        model, data = kwargs["model"], kwargs["train_dataloader"].dataset
        momentum = self._saved_momentum(args, state, model) if state.global_step else None
        divided = DIVIDED if isinstance(data, _Part | _Stream) else data
        self._hosted.begin(model, own_optimizer(kwargs["optimizer"]), divided, state.global_step, momentum)
        current_runtime().report(of_steps=state.max_steps - state.global_step)
        if current_runtime().replaying():
            control.should_training_stop = True
        return control

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hosted.hide_global()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._hosted.step(args.train_batch_size * args.gradient_accumulation_steps)
        if self._hosted.left_alone or self._hosted.stopping:
            control.should_training_stop = True
        self._look(state, control, over=control.should_training_stop)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hosted.hide_global()
        self._look(state, control, over=control.should_training_stop or state.global_step >= state.max_steps)

    def _look(self, state: Any, control: Any, over: bool) -> None:
        """Before the Trainer evaluates and saves, which it does next."""
        if over:
            self._hosted.finish(early=state.global_step < state.max_steps)
        if control.should_evaluate or control.should_save:
            self._hosted.show_global()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._hosted.shows_global:
            left_out = ("runtime", "samples_per_second", "steps_per_second", "epoch")
            numbers = {
                name.removeprefix("eval_"): value
                for name, value in kwargs["metrics"].items()
                if not name.endswith(left_out)
            }
            self._hosted.report(numbers)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "train_runtime" in logs:  # the loop is over, and the best checkpoint is not loaded yet
            self._hosted.finish()
        elif "loss" in logs and self.sync is not None:
            self.sync.report_loss(float(logs["loss"]))
            self._hosted.report({name: value for name, value in logs.items() if name not in ("loss", "epoch")})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.sync is None or not folder.is_dir():
            return
        if not self._hosted.shows_global:
            print(f"{folder} holds this node's own parameters: another callback asked for it between two rounds")
        elif momentum := self.sync.outer_momentum_by_name():
            from safetensors.numpy import save_file

            save_file(momentum, folder / MOMENTUM_FILE, {"saved_with": fingerprint(kwargs["model"])})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hosted.finish()

    def _saved_momentum(self, args: Any, state: Any, model: Any) -> "Momentum | None":
        from safetensors import safe_open

        file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / MOMENTUM_FILE
        momentum, saved_with = None, None
        if file.is_file():
            with safe_open(file, "np") as opened:
                momentum = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                saved_with = opened.metadata().get("saved_with")
        return self._hosted.momentum_for(model, saved_with, momentum, str(file))


SyncCallback = TransformersCallback


def shard(dataset: Any, *, seed: int = 0) -> Any:
    """This node's part of ``dataset``, for ``Trainer(train_dataset=...)``: every node gets another one.

    Of anything with ``len()`` and ``[index]`` the parts are drawn anew for each epoch, the same way on all nodes, and
    differ in length by one at most; they stay as many as there are nodes now. A ``Dataset`` of Hugging Face stays one,
    with every ``world_size``-th row; of a stream the node takes every ``world_size``-th element.

    Args:
        dataset: a torch Dataset or IterableDataset, a list, a Dataset or IterableDataset of Hugging Face.
        seed: the same on every node.

    Raises:
        TypeError: ``dataset`` is neither a sequence nor a torch IterableDataset.
        ValueError: it has fewer elements than there are nodes.
    """
    rank, count = _share()
    if type(dataset).__module__.partition(".")[0] == "datasets":
        if hasattr(dataset, "__len__"):
            _check_length(len(dataset), count)
            return dataset.shard(num_shards=count, index=rank, contiguous=False)
        return _Stream(dataset, rank, count)
    if isinstance(dataset, IterableDataset):
        return _Stream(dataset, rank, count)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"shard: {type(dataset).__name__} has no length and no [index]: pass a Dataset, list or IterableDataset"
        )
    _check_length(len(dataset), count)
    return _Part(dataset, seed, rank, count)


def _share() -> tuple[int, int]:
    """(index, count) of this node among those that run the cell."""
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime

    runtime = current_runtime()
    return runtime.share() if isinstance(runtime, NodeRuntime) else (api.rank(), api.world_size())


def _check_length(length: int, count: int) -> None:
    if length < count:
        raise ValueError(f"shard: {length} elements cannot be divided among {count} nodes: use fewer nodes")


class _Part(Dataset[Any]):
    """The elements of one node: others in each epoch. accelerate's loader calls ``set_epoch``."""

    def __init__(self, data: Any, seed: int, rank: int, count: int) -> None:
        self._data, self._seed, self._rank, self._count = data, seed, rank, count
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self._indices = epoch_order(len(self._data), self._seed, epoch)[self._rank :: self._count]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position: int) -> Any:
        return self._data[int(self._indices[position])]


class _Stream(IterableDataset[Any]):
    """Every ``count``-th element of ``data``, from ``rank`` on."""

    def __init__(self, data: Any, rank: int, count: int) -> None:
        self._data, self._rank, self._count = data, rank, count

    def set_epoch(self, epoch: int) -> None:
        with contextlib.suppress(AttributeError):
            self._data.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return (item for at, item in enumerate(self._data) if at % self._count == self._rank)
