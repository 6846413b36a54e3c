"""A model as one flat float32 vector: what every framework's adapter has in common.

The vector is ``[trainable parameters | float buffers of normalisation layers]``, each part in sorted order of names, so
that two nodes that built the same model agree on every element. Tied parameters appear once, frozen ones not at all.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from notebook_cluster.codecs import Vector
from notebook_cluster.rounds.numerics.vectors import SchemaRow, TensorLayout, shape_text
from notebook_cluster.training.models.frozen import FrozenTensor


class Parameters(Protocol):
    """Adapter between a framework's model and the vector. Methods are called on the main thread, or while it rests."""

    @property
    def layout(self) -> TensorLayout: ...

    @property
    def framework(self) -> str:
        """``torch`` or ``mlx``."""

    @property
    def exact(self) -> bool:
        """True when the model stores float32 (or wider): what is loaded is what is read back."""

    @property
    def loaded(self) -> Vector | None:
        """The vector that is kept because the model was loaded with it, if one is."""

    @property
    def read_anywhere(self) -> bool:
        """Whether other threads may use what :meth:`parts` gives."""

    def read(self) -> Vector:
        """A new float32 vector of ``layout.size`` elements with the model's values now."""

    def parts(self) -> Callable[[slice], Vector]:
        """What gives a range of the elements of :meth:`read`, only to be read, until the model changes."""

    def as_held(self, vector: Vector) -> Callable[[slice], Vector]:
        """What gives a range of the elements that :meth:`read` gives after :meth:`load` with ``vector``, only to be
        read. On any thread."""

    def load(self, vector: Vector) -> None:
        """Write ``vector`` into the model in place; dtypes and devices stay.

        Raises:
            ValueError: as :meth:`check`; nothing was written.
        """

    def put(self, ranges: list[slice], elements: Vector) -> None:
        """:meth:`load` of some elements, those of ``ranges`` of the vector in their order."""

    def snapshot(self) -> Any:
        """A copy of the values in the framework's own dtypes, for :meth:`restore`."""

    def restore(self, snapshot: Any) -> None:
        """The values of ``snapshot`` again, bit for bit."""

    def other_buffers(self) -> dict[str, Any]:
        """Name -> buffer of the ``state_dict`` that is in no round."""

    def put_other_buffers(self, state: dict[str, Any]) -> None:
        """What :meth:`other_buffers` gave, where this model has it in the same shape."""

    def frozen_arrays(self) -> dict[str, Any]:
        """Name -> parameter that is not trained."""

    def tied(self) -> dict[str, str]:
        """Further name of a parameter -> the name that :attr:`layout` or :meth:`frozen_arrays` has for it."""

    def marks_of(self, arrays: dict[str, Any]) -> Any:
        """Equal as long as ``arrays`` are the same, unchanged."""

    def save_arrays(self, arrays: dict[str, Any], path: Path) -> None:
        """As a safetensors file, each in its dtype."""

    def put_whole_state(self, state: dict[str, Any], left_out: list[str]) -> None:
        """A whole ``state_dict`` with names as in :attr:`layout`; ``left_out``: those that the model keeps as they are.

        Raises:
            ValueError: one is missing, left over or of another shape; names it. Nothing was changed.
        """

    def whole_snapshot(self) -> Any:
        """:meth:`snapshot`, and buffers that are in no round, such as counters of batches."""

    def restore_whole(self, snapshot: Any) -> None:
        """What :meth:`whole_snapshot` gave, in this model or another one that is built alike."""

    def frozen(self) -> Iterable[FrozenTensor]:
        """What the model has beside the vector, and every node has to have alike: its frozen parameters."""

    def buffers_to_compare(self) -> Iterable[FrozenTensor]:
        """What no round sends, is part of the model, and need not be alike, but mostly is meant to be."""

    def check(self) -> None:
        """Raises:
        ValueError: the model's parameters are no longer those of ``layout``; names the first that differs.
        """


NO_GRADIENT = (
    "no parameter has a gradient: call loss.backward() before sync.step(), and leave optimizer.step() and zero_grad() "
    "out, or say samples=0 for an empty batch"
)


class WithGradients(Parameters, Protocol):
    """What strategies that exchange gradients need as well. Gradients of several calls add up until they are cleared;
    a parameter with two names has the sum of both."""

    def add_gradients(self, grads: Any, samples: float) -> None:
        """Take what ``sync.step`` was given for a batch of so many ``samples``. Torch has the gradients already.

        Raises:
            TypeError: ``grads`` is missing, or given for a framework that keeps gradients in the model; says which.
            ValueError: it is not a tree of this model's gradients; names the first that differs.
        """

    def has_gradients(self) -> bool:
        """True when some trainable parameter has one."""

    def read_gradients(self) -> Vector:
        """A new float32 vector: gradients (zeros where there is none) and, behind them, the buffers' values."""

    def put_gradients(self, vector: Vector, there: list[bool]) -> None:
        """What :meth:`read_gradients` and :meth:`gradients_there` gave becomes the gradients, and the buffers."""

    def gradients_there(self) -> list[bool]:
        """For each tensor of ``layout`` whether it has a gradient, be it 0; True for buffers. A framework without None
        gives one for every trainable parameter."""

    def clear_gradients(self, optimizer: Any = None) -> None:
        """Drop all gradients of the model, and of everything that ``optimizer`` steps."""

    def check_optimizer(self, optimizer: Any, scale_lr: bool) -> None:
        """Raises:
        TypeError: ``optimizer`` is not of the model's framework.
        ValueError: it takes sparse gradients only, or has no learning rate that ``scale_lr`` could multiply.
        """

    def optimizer_step(self, optimizer: Any, mean: Vector, factor: int, there: list[bool]) -> None:
        """A step of ``optimizer`` with ``factor`` times its learning rate. ``mean``: what :meth:`read_gradients` gave,
        averaged over nodes; its buffers become the model's. ``there``: as :meth:`gradients_there`, of any node;
        parameters of which nobody has a gradient are left alone, and what ``optimizer`` has gathered for them too."""

    def step_aside(self, optimizer: Any, mean: Vector, factor: int, there: list[bool]) -> tuple[Vector, Any]:
        """Where :meth:`optimizer_step` would lead: the parameters (as :meth:`read`), and the optimizer's state for
        :meth:`put_state`. Model, gradients and ``optimizer`` are as before, also when the step fails."""

    def put_state(self, optimizer: Any, state: Any) -> None:
        """``state``, which :meth:`step_aside` gave, becomes that of ``optimizer``."""

    def stepped_elsewhere(self, optimizer: Any, steps: int, forget: bool) -> None:
        """Another machine made so many steps for all: a schedule of learning rates goes on with them. ``forget``: what
        ``optimizer`` has gathered for each parameter is not of the newest step and is dropped."""


class TensorParts:
    """:meth:`Parameters.parts`: of the tensors of ``layout``, of which ``tensor(i)`` gives the ``i``-th one flat, and
    ``values`` a part of it as float32."""

    def __init__(self, layout: TensorLayout, tensor: Callable[[int], Any], values: Callable[[Any], Vector]) -> None:
        self._layout, self._tensor, self._values = layout, tensor, values
        self._last: tuple[int, Any] | None = None

    def __call__(self, part: slice) -> Vector:
        pieces = []
        for index, here in self._layout.within(part):
            if self._last is None or self._last[0] != index:
                self._last = None  # its memory is free before the next one is read
                self._last = index, self._tensor(index)
            pieces.append(self._values(self._last[1][here]))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def rounded_parts(
    layout: TensorLayout, vector: Vector, rounded: Callable[[Vector, str], Vector]
) -> Callable[[slice], Vector]:
    """:meth:`Parameters.as_held`; ``rounded(values, dtype)`` is what a tensor of ``dtype`` holds of ``values``."""

    def parts(part: slice) -> Vector:
        pieces = []
        for index, here in layout.within(part):
            start = layout.starts[index]
            pieces.append(rounded(vector[start + here.start : start + here.stop], layout.schema[index][2]))
        return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, vector[:0]])

    return parts


def first_difference(now: list[SchemaRow], then: list[SchemaRow]) -> str | None:
    """One line that names the first parameter that was added, removed or changed since ``then``, or None."""
    before, after = {row[0]: row for row in then}, {row[0]: row for row in now}
    remedy = "make the sync object again after changing the model"
    for name in sorted(before.keys() | after.keys()):
        if name not in before:
            return f"parameter {name!r} was added (or unfrozen) after the sync object was made: {remedy}"
        if name not in after:
            return f"parameter {name!r} was removed (or frozen) after the sync object was made: {remedy}"
        if before[name] != after[name]:
            (_, shape, dtype), (_, new_shape, new_dtype) = before[name], after[name]
            return (
                f"parameter {name!r} was {dtype} {shape_text(shape)} when the sync object was made and is {new_dtype} "
                f"{shape_text(new_shape)} now: {remedy}"
            )
    return None
