"""An ``mlx.nn.Module`` as one flat float32 vector and back (see :mod:`.parameters`).

An mlx model is a tree of arrays that are replaced, never written to, and computed when they are read: loading updates
the tree and evaluates it.
"""

from typing import Any

import numpy as np

from notebook_cluster.codecs import Vector
from notebook_cluster.training.parameters import SchemaRow, TensorLayout, first_difference


class MlxParameters:
    """Adapter of one module: its trainable parameters, an array that appears twice once, and the running statistics of
    normalisation layers (which mlx keeps as frozen parameters).

    Raises:
        ValueError: nothing is trainable, or a trainable array is not real floating point.
    """

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

    def read(self) -> Vector:
        """A new float32 vector with the values now."""
        import mlx.core as mx

        flat = mx.concatenate([array.reshape(-1).astype(mx.float32) for array in self._arrays()])
        return np.array(flat, dtype=np.float32)

    def load(self, vector: Vector) -> None:
        """Replace the arrays by the values of ``vector``, each in its own dtype."""
        import mlx.core as mx

        self.check()
        parameters, buffers = self._named()
        tensors = self.layout.tensors(vector)
        arrays = parameters | buffers
        self._update({name: mx.array(tensors[name]).astype(array.dtype) for name, array in arrays.items()})

    def snapshot(self) -> dict[str, Any]:
        """The arrays now: mlx never writes to them."""
        parameters, buffers = self._named()
        return parameters | buffers

    def restore(self, snapshot: dict[str, Any]) -> None:
        self._update(snapshot)

    def check(self) -> None:
        parameters, buffers = self._named()
        difference = first_difference(_rows(parameters) + _rows(buffers), self.layout.schema)
        if difference:
            raise ValueError(difference)

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
                raise ValueError(f"parameter {name!r} is {_dtype(array)}: only real floating point can be averaged")
        return dict(sorted(parameters.items())), dict(sorted(buffers.items()))


def _dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _rows(arrays: dict[str, Any]) -> list[SchemaRow]:
    return [(name, list(array.shape), _dtype(array)) for name, array in arrays.items()]
