"""An ``mlx.nn.Module`` as one flat float32 vector and back (see :mod:`.parameters`).

An mlx model is a tree of arrays that are replaced, never written to, and computed when they are read: loading updates
the tree and evaluates it. Its gradients are another tree, which ``nn.value_and_grad`` returns; the sum of those that no
round has counted yet is kept here, in float32.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from notebook_cluster.codecs import Vector
from notebook_cluster.rounds.numerics.vectors import SchemaRow, TensorLayout, shape_text
from notebook_cluster.training.models import mlx_optimizer
from notebook_cluster.training.models.frozen import PIECE, FrozenTensor
from notebook_cluster.training.models.parameters import TensorParts, first_difference, rounded_parts

_HOW = "pass the second of what nn.value_and_grad(model, loss_function)(model, x, y) returns"


class MlxParameters:
    """Adapter of one module: its trainable parameters, an array that appears twice once, and the running statistics of
    normalisation layers (which mlx keeps as frozen parameters).

    Raises:
        ValueError: nothing is trainable, or a trainable array is not real floating point.
    """

    framework = "mlx"
    loaded = None
    read_anywhere = False  # what is computed to read an array belongs to a thread's stream

    def __init__(self, model: Any) -> None:
        self.model = model
        self._twins: dict[str, str] = {}
        """Name -> the first name of the same array."""
        first: dict[int, str] = {}
        for name, array in self._named()[0].items():
            if first.setdefault(id(array), name) != name:
                self._twins[name] = first[id(array)]
        parameters, buffers = self._named()
        if not parameters:
            raise ValueError(f"{type(model).__name__} has no trainable parameter: unfreeze what should be trained")
        self.layout = TensorLayout.of(_rows(parameters), _rows(buffers))
        self.exact = all(dtype == "float32" for _, _, dtype in self.layout.schema)
        self._gradients: Vector | None = None
        """The sum since they were cleared; float32, one for each trained element."""

    def read(self) -> Vector:
        """A new float32 vector with the values now."""
        return _joined(self._arrays())

    def parts(self) -> TensorParts:
        arrays = self._arrays()
        return TensorParts(self.layout, lambda index: _joined([arrays[index]]), lambda values: values)

    def as_held(self, vector: Vector) -> Callable[[slice], Vector]:
        return vector.__getitem__ if self.exact else rounded_parts(self.layout, vector, _rounded)

    def load(self, vector: Vector) -> None:
        """Replace the arrays by the values of ``vector``, each in its own dtype."""
        import mlx.core as mx

        self.check()
        parameters, buffers = self._named()
        tensors = self.layout.tensors(vector)
        arrays = parameters | buffers
        self._update({name: mx.array(tensors[name]).astype(array.dtype) for name, array in arrays.items()})

    def put(self, ranges: list[slice], elements: Vector) -> None:
        vector, position = self.read(), 0
        for one in ranges:
            vector[one] = elements[position : position + one.stop - one.start]
            position += one.stop - one.start
        self.load(vector)

    def add_gradients(self, grads: Any, samples: float) -> None:
        """Add a tree of gradients to those that are here.

        Raises:
            TypeError: it is missing (an empty batch needs none), or no tree.
            ValueError: a gradient is missing, left over, of another shape or not real floating point; names it.
        """
        if grads is None:
            if not samples:
                return
            raise TypeError(
                "grads= is missing: an mlx.nn.Module does not keep its gradients, so write "
                "loss, grads = nn.value_and_grad(model, loss_function)(model, x, y) and pass grads=grads"
            )
        if not isinstance(grads, dict):
            raise TypeError(f"grads is a {type(grads).__name__}, not a dict: {_HOW}")
        gradients = self._flat(grads)
        self._gradients = gradients if self._gradients is None else self._gradients + gradients

    def has_gradients(self) -> bool:
        """True when some were added."""
        return self._gradients is not None

    def read_gradients(self) -> Vector:
        """A new float32 vector: the sum of the gradients (or zeros) and, behind them, the buffers' values."""
        buffers = list(self._named()[1].values())
        trained = self._gradients
        if trained is None:
            trained = np.zeros(self.layout.size - self.layout.buffers, np.float32)
        return np.concatenate([trained, *([_joined(buffers)] if buffers else [])])

    def put_gradients(self, vector: Vector, there: list[bool]) -> None:
        """The buffers are in the model already, wherever it was restored."""
        trained = self.layout.size - self.layout.buffers
        self._gradients = vector[:trained].copy() if any(there[: len(there) - len(self._named()[1])]) else None

    def gradients_there(self) -> list[bool]:
        """mlx has no None: a parameter that the loss does not depend on has a gradient of zeros."""
        parameters, buffers = self._named()
        return [self._gradients is not None] * len(parameters) + [True] * len(buffers)

    def clear_gradients(self, optimizer: Any = None) -> None:
        """The sum begins anew; an mlx optimizer holds no gradients."""
        self._gradients = None

    def check_optimizer(self, optimizer: Any, scale_lr: bool) -> None:
        """Raises:
        TypeError: not an mlx optimizer.
        ValueError: it chooses its learning rate itself, and ``scale_lr`` should multiply it.
        """
        if not mlx_optimizer.is_mlx_optimizer(optimizer):
            raise TypeError(
                f"optimizer={type(optimizer).__name__} is no mlx optimizer: pass one of mlx.optimizers for this "
                "mlx.nn.Module"
            )
        if scale_lr:
            mlx_optimizer.check_rate(optimizer)

    def optimizer_step(self, optimizer: Any, mean: Vector, factor: int, there: list[bool]) -> None:
        """The step of all nodes with their ``mean`` gradient, zeros included, and ``factor`` times the learning rate:
        what ``optimizer.update`` does on one machine. An array with two names gets one step and stays shared. Where
        only nodes with torch had work, there may be no gradient of some parameters: these stay as they are."""
        import mlx.core as mx
        from mlx.utils import tree_unflatten

        self.check()
        parameters, buffers = self._named()
        tensors = self.layout.tensors(mean)
        new = {name: mx.array(tensors[name]).astype(array.dtype) for name, array in (parameters | buffers).items()}
        gradients = tree_unflatten([(name, new[name]) for name in parameters])
        alone = {name: array for (name, array), given in zip(parameters.items(), there, strict=False) if not given}
        before = mlx_optimizer.kept_state(optimizer) if alone else []
        mlx_optimizer.make_step(optimizer, self.model, gradients, factor)
        if alone:
            mlx_optimizer.put_back(optimizer, before, alone)
        self._update(self._named()[0] | alone | {name: new[name] for name in buffers})

    def step_aside(self, optimizer: Any, mean: Vector, factor: int, there: list[bool]) -> tuple[Vector, list[Any]]:
        model, before = self.snapshot(), mlx_optimizer.kept_state(optimizer)
        try:
            self.optimizer_step(optimizer, mean, factor, there)
            return self.read(), mlx_optimizer.kept_state(optimizer)
        finally:
            mlx_optimizer.put_state(optimizer, before)
            self.restore(model)

    def put_state(self, optimizer: Any, state: list[Any]) -> None:
        mlx_optimizer.put_state(optimizer, state)

    def stepped_elsewhere(self, optimizer: Any, steps: int, forget: bool) -> None:
        """A schedule of mlx goes by the optimizer's own count of steps."""
        if forget:
            mlx_optimizer.clear_state(optimizer)
        mlx_optimizer.count_steps(optimizer, steps)

    def snapshot(self) -> dict[str, Any]:
        """The arrays now: mlx never writes to them."""
        parameters, buffers = self._named()
        return parameters | buffers

    def restore(self, snapshot: dict[str, Any]) -> None:
        self._update(snapshot)

    def whole_snapshot(self) -> dict[str, Any]:
        """What is in no round is frozen, and made by the cell."""
        return self.snapshot()

    def restore_whole(self, snapshot: dict[str, Any]) -> None:
        self.restore(snapshot)

    def other_buffers(self) -> dict[str, Any]:
        """mlx has none beside parameters."""
        return {}

    def put_other_buffers(self, state: dict[str, Any]) -> None:
        pass

    def frozen_arrays(self) -> dict[str, Any]:
        from mlx.utils import tree_flatten

        sent = {row[0] for row in self.layout.schema} | self._twins.keys()
        return {name: array for name, array in tree_flatten(self.model.parameters()) if name not in sent}

    def tied(self) -> dict[str, str]:
        return dict(self._twins)

    def marks_of(self, arrays: dict[str, Any]) -> Any:
        return [(name, id(array)) for name, array in arrays.items()]

    def save_arrays(self, arrays: dict[str, Any], path: Path) -> None:
        import mlx.core as mx

        mx.save_safetensors(str(path), arrays)

    def put_whole_state(self, state: dict[str, Any], left_out: list[str]) -> None:
        from mlx.utils import tree_flatten, tree_unflatten

        here, own = dict(tree_flatten(self.model.parameters())), set(left_out)
        for name in sorted(state.keys() | here.keys()):
            if name not in here:
                raise ValueError(f"it has {name!r}, which this model has not")
            if name not in state and name not in own:
                raise ValueError(f"it lacks {name!r} of this model")
            if name in state and state[name].shape != here[name].shape:
                raise ValueError(f"{name!r} is {list(state[name].shape)} in it and {list(here[name].shape)} here")
        self.model.update(tree_unflatten(list(state.items())))

    def frozen(self) -> Iterator[FrozenTensor]:
        """What mlx calls parameters and does not train, without running statistics, which travel. An array is never
        written to: one that is still there has not changed."""
        from mlx.utils import tree_flatten

        trained = {name for name, _ in tree_flatten(self.model.trainable_parameters())}
        for name, array in tree_flatten(self.model.parameters()):
            if name not in trained and not name.rpartition(".")[2].startswith("running_"):
                yield FrozenTensor(name, list(array.shape), _dtype(array), array, (), partial(_pieces, array))

    def buffers_to_compare(self) -> Iterator[FrozenTensor]:
        """Arrays whose names begin with ``_``, which mlx takes for no parameters; no counters."""
        import mlx.core as mx

        for path, module in self.model.named_modules():
            for key, array in module.items():
                if not key.startswith("_") or not isinstance(array, mx.array):
                    continue
                if array.size > 1 or mx.issubdtype(array.dtype, mx.floating):
                    name = f"{path}.{key}" if path else key
                    yield FrozenTensor(name, list(array.shape), _dtype(array), array, (), partial(_pieces, array))

    def check(self) -> None:
        parameters, buffers = self._named()
        difference = first_difference(_rows(parameters) + _rows(buffers), self.layout.schema)
        if difference:
            raise ValueError(difference)

    def _flat(self, grads: dict[str, Any]) -> Vector:
        """A tree of gradients as one vector in the order of the layout."""
        import mlx.core as mx
        from mlx.utils import tree_flatten

        given = dict(tree_flatten(grads))
        parameters = self._named()[0]
        wanted = parameters | {twin: parameters[name] for twin, name in self._twins.items()}
        for name in sorted(given.keys() | wanted.keys()):
            if name not in wanted:
                raise ValueError(f"grads has {name!r}, which is no trainable parameter of this model: {_HOW}")
            if name not in given:
                raise ValueError(f"grads lacks {name!r} of this model: {_HOW}")
            gradient, shape = given[name], list(wanted[name].shape)
            if not isinstance(gradient, mx.array) or not mx.issubdtype(gradient.dtype, mx.floating):
                kind = _dtype(gradient) if isinstance(gradient, mx.array) else type(gradient).__name__
                raise ValueError(f"the gradient of {name!r} is {kind}, not real floating point: {_HOW}")
            if list(gradient.shape) != shape:
                now = shape_text(list(gradient.shape))
                raise ValueError(f"the gradient of {name!r} is {now}, the parameter {shape_text(shape)}: {_HOW}")
        vector = _joined([given[name] for name in parameters])
        starts = dict(zip(parameters, self.layout.starts, strict=False))
        for twin, name in self._twins.items():
            vector[starts[name] : starts[name] + parameters[name].size] += _joined([given[twin]])
        return vector

    def _update(self, arrays: dict[str, Any]) -> None:
        import mlx.core as mx
        from mlx.utils import tree_unflatten

        arrays = arrays | {twin: arrays[name] for twin, name in self._twins.items()}
        self.model.update(tree_unflatten(list(arrays.items())))
        mx.eval(self.model.parameters())

    def _arrays(self) -> list[Any]:
        parameters, buffers = self._named()
        return list(parameters.values()) + list(buffers.values())

    def _named(self) -> tuple[dict[str, Any], dict[str, Any]]:
        from mlx.utils import tree_flatten

        trainable = tree_flatten(self.model.trainable_parameters())
        parameters = {name: array for name, array in trainable if name not in self._twins}
        buffers = {
            name: array
            for name, array in tree_flatten(self.model.parameters())
            if name.rpartition(".")[2].startswith("running_") and name not in parameters
        }
        for name, array in parameters.items():
            if _dtype(array) not in ("float32", "float16", "bfloat16", "float64"):
                key = name.rpartition(".")[2]
                raise ValueError(
                    f"parameter {name!r} is {_dtype(array)}: only real floating point can be averaged; "
                    f"model.freeze(keys={key!r}) leaves it as it is, and so does a name that begins with _"
                )
        return dict(sorted(parameters.items())), dict(sorted(buffers.items()))


def _joined(arrays: list[Any]) -> Vector:
    """Their elements one after the other, as a new float32 vector."""
    import mlx.core as mx

    flat = mx.concatenate([array.reshape(-1).astype(mx.float32) for array in arrays])
    return np.array(flat, dtype=np.float32)


def _rounded(values: Vector, dtype: str) -> Vector:
    """What an array of ``dtype`` holds of ``values``, as float32: the nearest, halves to even. By numpy, since mlx
    computes on the streams of a thread."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if dtype != "bfloat16":
        return values
    bits = values.view(np.uint32)
    nearest = bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))
    held: Vector = (nearest & np.uint32(0xFFFF0000)).view(np.float32)
    return held


def _pieces(array: Any) -> Iterator[Any]:
    import mlx.core as mx

    if not array.size:
        return
    flat, step = array.reshape(-1), max(PIECE // array.itemsize, 1)
    for start in range(0, array.size, step):
        yield memoryview(flat[start : start + step].view(mx.uint8))


def _dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _rows(arrays: dict[str, Any]) -> list[SchemaRow]:
    return [(name, list(array.shape), _dtype(array)) for name, array in arrays.items()]
