"""A ``torch.nn.Module`` as one flat float32 vector and back (see :mod:`.parameters`).

Names are looked up anew at each call, so ``model.to(device)`` after construction works and a parameter that was added,
replaced by another shape, frozen or cast is found and named instead of being averaged wrongly.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from notebook_cluster.codecs import Vector
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.vectors import SchemaRow, TensorLayout
from notebook_cluster.training.models.frozen import FrozenTensor
from notebook_cluster.training.models.parameters import TensorParts, first_difference, rounded_parts
from notebook_cluster.training.models.torch_frozen import buffers_to_compare, frozen_tensors, is_averaged
from notebook_cluster.training.models.torch_names import check_usable, check_whole, former_name, plain_names
from notebook_cluster.training.models.torch_optimizer import TorchOptimizerState, make_step
from notebook_cluster.training.models.torch_state import TorchState

if TYPE_CHECKING:
    import torch


class TorchParameters(TorchState):
    """Adapter of one module.

    Trainable parameters (``requires_grad``) are sent, tied ones once. Of the buffers only the running statistics of
    normalisation layers (``running_mean``, ``running_var``): counters and masks stay as each node has them.

    Raises:
        ValueError: nothing is trainable, or a parameter is lazy, on the meta device, not real, or not whole here.
    """

    framework = "torch"
    read_anywhere = True

    def __init__(self, model: "torch.nn.Module") -> None:
        self.model = model
        check_whole(model)
        parameters, buffers = self._named()
        if not parameters:
            raise ValueError(
                f"{type(model).__name__} has no trainable parameter: make the sync object after building the model, "
                "with requires_grad on"
            )
        self.layout = TensorLayout.of(_rows(parameters), _rows(buffers), self._former())
        self.exact = all(dtype in ("float32", "float64") for _, _, dtype in self.layout.schema)
        self._keeps_loaded = False
        self._loaded: tuple[Vector, torch.Tensor] | None = None
        """What the model was loaded with last, and its copy on the model's device."""

    def read(self) -> Vector:
        """A new float32 vector with the values now; one transfer when all tensors share a device."""
        import torch

        vector = vectors.empty(self.layout.size)
        flat, device = torch.from_numpy(vector), self.device()
        with torch.no_grad():
            if device is not None and device != flat.device:
                flat.copy_(self.values())
            elif device is not None and all(tensor.dtype == torch.float32 for tensor in self._tensors()):
                torch.cat(self._pieces(), out=flat)
            else:  # one after the other: a copy of each in float32 before would be another model
                for tensor, start in zip(self._tensors(), self.layout.starts, strict=True):
                    flat[start : start + tensor.numel()].copy_(tensor.reshape(-1))
        return vector

    def parts(self) -> TensorParts:
        import torch

        tensors = self._tensors()
        return TensorParts(
            self.layout,
            lambda index: tensors[index].detach().reshape(-1).cpu(),
            lambda flat: flat.to(torch.float32).numpy(),
        )

    def as_held(self, vector: Vector) -> Callable[[slice], Vector]:
        return vector.__getitem__ if self.exact else rounded_parts(self.layout, vector, _rounded)

    def device(self) -> "torch.device | None":
        """The device of all tensors; None where they are on several."""
        devices = {tensor.device for tensor in self._tensors()}
        return devices.pop() if len(devices) == 1 else None

    def values(self) -> "torch.Tensor":
        """As :meth:`read`, a new tensor on the :meth:`device` of the model."""
        import torch

        with torch.no_grad():
            return torch.cat(self._pieces())

    def _pieces(self) -> "list[torch.Tensor]":
        import torch

        return [tensor.detach().reshape(-1).to(torch.float32) for tensor in self._tensors()]

    @property
    def loaded(self) -> Vector | None:
        return None if self._loaded is None else self._loaded[0]

    def keep_loaded(self, keep: bool) -> None:
        """Whether :meth:`load` keeps its copy on the model's device for :meth:`on_device`."""
        self._keeps_loaded = keep
        if not keep:
            self._loaded = None

    def on_device(self, vector: Vector) -> "torch.Tensor":
        """``vector`` on the :meth:`device` of the model, only to be read. What was loaded last may be there already."""
        device, loaded = self.device(), self._loaded
        if loaded is not None and loaded[0] is vector and loaded[1].device == device:
            return loaded[1]
        return _as_tensor(vector).to(device)

    def held_on_device(self, vector: Vector) -> "torch.Tensor":
        """:meth:`as_held` of the whole ``vector``, on the :meth:`device` of the model, only to be read."""
        import torch

        flat = self.on_device(vector)
        if self.exact:
            return flat
        tensors = zip(self._tensors(), self.layout.starts, strict=True)
        return torch.cat([flat[start : start + one.numel()].to(one.dtype).to(torch.float32) for one, start in tensors])

    def load(self, vector: Vector) -> None:
        """Copy ``vector`` into the tensors in place, under ``no_grad``, each in its own dtype and on its own device."""
        import torch

        self.check()
        if vector.shape != (self.layout.size,):
            raise ValueError(f"vector of shape {vector.shape} for a model of {self.layout.size} elements")
        tensors = self._tensors()
        flat, device = _as_tensor(vector), self.device()
        if device is not None:
            flat = flat.to(device)
            self._loaded = (vector, flat) if self._keeps_loaded else None
        with torch.no_grad():
            for tensor, start in zip(tensors, self.layout.starts, strict=True):
                tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))

    def put(self, ranges: list[slice], elements: Vector) -> None:
        import torch

        self.check()
        self._loaded = None
        flat, tensors, position = _as_tensor(elements), self._tensors(), 0
        with torch.no_grad():
            for one in ranges:
                for index, part in self.layout.within(one):
                    new, tensor = flat[position : position + part.stop - part.start], tensors[index]
                    position += part.stop - part.start
                    if tensor.is_contiguous():
                        tensor.view(-1)[part].copy_(new)
                    else:
                        whole = tensor.reshape(-1)  # a copy
                        whole[part] = new.to(whole)
                        tensor.copy_(whole.view(tensor.shape))

    def add_gradients(self, grads: Any, samples: float) -> None:
        """``loss.backward()`` has added them already.

        Raises:
            TypeError: ``grads`` is given.
        """
        if grads is not None:
            raise TypeError(
                "grads= is for an mlx.nn.Module: a torch.nn.Module has its gradients in .grad, so call loss.backward() "
                "and leave grads= out"
            )

    def read_gradients(self) -> Vector:
        """A new float32 vector: gradients (zeros where there is none) and, behind them, the buffers' values."""
        import torch

        with torch.no_grad():
            vector: Vector = torch.cat([piece.to("cpu", torch.float32) for piece in self._gradient_pieces()]).numpy()
        return vector

    def gradient_values(self) -> "torch.Tensor":
        """As :meth:`read_gradients`, a new tensor on the :meth:`device` of the model."""
        import torch

        with torch.no_grad():
            return torch.cat([piece.to(torch.float32) for piece in self._gradient_pieces()])

    def _gradient_pieces(self) -> "list[torch.Tensor]":
        import torch

        parameters, buffers = self._named()
        pieces = [
            (torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.to_dense()).reshape(-1)
            for tensor in parameters.values()
        ]
        return pieces + [tensor.detach().reshape(-1) for tensor in buffers.values()]

    def put_gradients(self, vector: Vector, there: list[bool]) -> None:
        """Write what :meth:`read_gradients` gave, averaged over nodes. A gradient that is not ``there`` becomes None,
        on every node alike: the optimiser leaves such parameters alone."""
        import torch

        self.check()
        parameters, buffers = self._named()
        flat = _as_tensor(vector)
        with torch.no_grad():
            tensors = list(parameters.values()) + list(buffers.values())
            for index, (tensor, start) in enumerate(zip(tensors, self.layout.starts, strict=True)):
                part = flat[start : start + tensor.numel()].view(tensor.shape)
                if index >= len(parameters):
                    tensor.copy_(part)
                elif there[index]:
                    tensor.grad = part.to(tensor.device, tensor.dtype, copy=True)
                else:
                    tensor.grad = None

    def gradients_there(self) -> list[bool]:
        parameters, buffers = self._named()
        return [tensor.grad is not None for tensor in parameters.values()] + [True] * len(buffers)

    def has_gradients(self) -> bool:
        """True when some trainable parameter has one."""
        return any(tensor.grad is not None for tensor in self.model.parameters() if tensor.requires_grad)

    def clear_gradients(self, optimizer: Any = None) -> None:
        """Every gradient becomes None, also of what else ``optimizer`` steps."""
        self.model.zero_grad(set_to_none=True)
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)

    def check_optimizer(self, optimizer: Any, scale_lr: bool) -> None:
        """Raises:
        TypeError: not a torch optimizer.
        ValueError: it takes sparse gradients only, or computes the loss again for its step.
        """
        import torch

        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"optimizer={type(optimizer).__name__} is no torch optimizer: pass a torch.optim optimizer of this "
                "torch.nn.Module"
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise ValueError(
                f"optimizer={type(optimizer).__name__} takes sparse gradients only, and the mean gradient of all nodes "
                "is dense: use torch.optim.Adam with nc.DataParallel, or nc.DiLoCo, with which each node steps with "
                "its own gradients"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                f"optimizer={type(optimizer).__name__} computes the loss several times for a step, and a step of all "
                "nodes has one mean gradient: use another optimizer with nc.DataParallel, or nc.DiLoCo, with which "
                "each node steps by itself"
            )

    def optimizer_step(self, optimizer: Any, mean: Vector, factor: int, there: list[bool]) -> None:
        """The step of all nodes with their ``mean`` gradient and ``factor`` times the learning rate of each group."""
        self.put_gradients(mean, there)
        groups = optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if factor != 1:
            for group in groups:
                group["lr"] = group["lr"] * factor
        try:
            make_step(optimizer)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def step_aside(
        self, optimizer: Any, mean: Vector, factor: int, there: list[bool]
    ) -> tuple[Vector, TorchOptimizerState]:
        model, before = self.snapshot(), TorchOptimizerState.of(optimizer).copy()
        gradients = [(tensor, tensor.grad) for tensor in self.model.parameters()]
        try:
            self.optimizer_step(optimizer, mean, factor, there)
            return self.read(), TorchOptimizerState.of(optimizer)
        finally:
            before.put(optimizer)
            self.restore(model)
            for tensor, gradient in gradients:
                tensor.grad = gradient

    def put_state(self, optimizer: Any, state: TorchOptimizerState) -> None:
        state.put(optimizer)

    def stepped_elsewhere(self, optimizer: Any, steps: int, forget: bool) -> None:
        """The learning rates of torch are set from outside, by a scheduler that people step on every node."""
        if forget:
            optimizer.state.clear()
        optimizer._opt_called = True  # else torch's schedulers warn where it never makes a step

    def frozen(self) -> Iterator[FrozenTensor]:
        return frozen_tensors(self.model)

    def buffers_to_compare(self) -> Iterator[FrozenTensor]:
        return buffers_to_compare(self.model)

    def check(self) -> None:
        parameters, buffers = self._named()
        difference = first_difference(_rows(parameters) + _rows(buffers), self.layout.schema)
        if difference:
            raise ValueError(difference)

    def _tensors(self) -> list["torch.Tensor"]:
        parameters, buffers = self._named()
        return list(parameters.values()) + list(buffers.values())

    def _named(self) -> tuple[dict[str, "torch.Tensor"], dict[str, "torch.Tensor"]]:
        """Trainable parameters and running statistics, each sorted by :func:`.torch_names.former_name`."""
        parameters, buffers = self._by_own_name()
        plain = plain_names(self.model, [*parameters, *buffers])
        for name, tensor in parameters.items():
            check_usable(plain[name], tensor)
        return _sorted(parameters, plain), _sorted(buffers, plain)

    def _by_own_name(self) -> tuple[dict[str, "torch.Tensor"], dict[str, "torch.Tensor"]]:
        parameters: dict[str, torch.Tensor] = {
            name: tensor for name, tensor in self.model.named_parameters() if tensor.requires_grad
        }
        buffers = {name: tensor for name, tensor in self.model.named_buffers() if is_averaged(name, tensor)}
        return parameters, buffers

    def _former(self) -> dict[str, str]:
        """Name -> what checkpoints of before call it, where that is another one."""
        parameters, buffers = self._by_own_name()
        plain = plain_names(self.model, [*parameters, *buffers])
        return {short: former_name(name) for name, short in plain.items() if former_name(name) != short}


def _sorted(tensors: dict[str, "torch.Tensor"], plain: dict[str, str]) -> dict[str, "torch.Tensor"]:
    order = sorted(tensors, key=lambda name: (former_name(name), name))
    return {plain[name]: tensors[name] for name in order}


def _as_tensor(vector: Vector) -> "torch.Tensor":
    """``vector`` without a copy. It is only read from here, so torch's warning about read-only arrays says nothing."""
    import torch

    if vector.flags.writeable:
        return torch.from_numpy(vector)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(vector)


def _rounded(values: Vector, dtype: str) -> Vector:
    """What a tensor of ``dtype`` holds of ``values``, as float32."""
    import torch

    if not values.flags.writeable:  # torch would warn, and threads share what to do with warnings
        values = values.copy()
    held: Vector = torch.from_numpy(values).to(getattr(torch, dtype)).to(torch.float32).numpy()
    return held


def _rows(tensors: dict[str, "torch.Tensor"]) -> list[SchemaRow]:
    return [(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()]
