"""What the ``state_dict`` of a torch module holds that is in no round: frozen parameters, further names of tied ones,
and buffers that are not averaged. Names are those of :func:`.torch_names.plain_names`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_cluster.rounds.numerics.vectors import TensorLayout
from notebook_cluster.training.models.torch_frozen import own_buffers
from notebook_cluster.training.models.torch_names import plain_names

if TYPE_CHECKING:
    import torch


class TorchState:
    """What :class:`.torch_parameters.TorchParameters` knows of its module beside what is in rounds."""

    model: "torch.nn.Module"
    layout: TensorLayout

    def whole_snapshot(self) -> "tuple[list[torch.Tensor], dict[str, torch.Tensor]]":
        others = {name: tensor.to("cpu", copy=True) for name, tensor in self.other_buffers().items()}
        return [tensor.detach().to("cpu", copy=True) for tensor in self._tensors()], others

    def restore_whole(self, snapshot: "tuple[list[torch.Tensor], dict[str, torch.Tensor]]") -> None:
        self.restore(snapshot[0])
        self.put_other_buffers(snapshot[1])

    def snapshot(self) -> "list[torch.Tensor]":
        return [tensor.detach().clone() for tensor in self._tensors()]

    def restore(self, snapshot: "list[torch.Tensor]") -> None:
        import torch

        with torch.no_grad():
            for tensor, value in zip(self._tensors(), snapshot, strict=True):
                tensor.copy_(value)

    def _tensors(self) -> "list[torch.Tensor]":
        raise NotImplementedError

    def other_buffers(self) -> "dict[str, torch.Tensor]":
        return other_buffers(self.model)

    def put_other_buffers(self, state: "dict[str, torch.Tensor]") -> None:
        put_buffers(self.model, state)

    def frozen_arrays(self) -> "dict[str, torch.Tensor]":
        return frozen_parameters(self.model)

    def tied(self) -> dict[str, str]:
        return tied_names(self.model, {row[0] for row in self.layout.schema})

    def marks_of(self, arrays: "dict[str, torch.Tensor]") -> Any:
        return [(name, tensor.data_ptr(), tensor._version, tensor.dtype) for name, tensor in arrays.items()]

    def save_arrays(self, arrays: "dict[str, torch.Tensor]", path: Path) -> None:
        save_tensors(arrays, path)

    def put_whole_state(self, state: "dict[str, torch.Tensor]", left_out: list[str]) -> None:
        put_state_dict(self.model, state, left_out)


def other_buffers(model: "torch.nn.Module") -> "dict[str, torch.Tensor]":
    """Name -> buffer of the ``state_dict`` that no round averages: counters, masks."""
    found = own_buffers(model)
    plain = plain_names(model, list(found))
    return {plain[name]: tensor.detach() for name, tensor in found.items()}


def put_buffers(model: "torch.nn.Module", state: "dict[str, torch.Tensor]") -> None:
    """Those of ``state`` that ``model`` has in the same shape."""
    import torch

    here = dict(model.named_buffers())
    plain = plain_names(model, list(here))
    with torch.no_grad():
        for name, tensor in here.items():
            value = state.get(plain[name])
            if value is not None and value.shape == tensor.shape:
                tensor.copy_(value)


def frozen_parameters(model: "torch.nn.Module") -> "dict[str, torch.Tensor]":
    """Name -> parameter that needs no gradient, those with two names once."""
    found = {name: tensor.detach() for name, tensor in model.named_parameters() if not tensor.requires_grad}
    plain = plain_names(model, list(found))
    return {plain[name]: tensor for name, tensor in found.items()}


def tied_names(model: "torch.nn.Module", sent: set[str]) -> dict[str, str]:
    """Further name of a tensor of the ``state_dict`` -> its name among those ``sent``, or its first one."""
    state = model.state_dict(keep_vars=True)
    plain = plain_names(model, list(state))
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(plain[name])
    tied: dict[str, str] = {}
    for same in names.values():
        own = next((name for name in same if name in sent), same[0])
        tied |= {name: own for name in same if name != own}
    return tied


def save_tensors(tensors: "dict[str, torch.Tensor]", path: Path) -> None:
    """Tensors that share memory are written each for itself."""
    from safetensors.torch import save_file

    save_file({name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}, path)


def put_state_dict(model: "torch.nn.Module", state: "dict[str, torch.Tensor]", left_out: list[str]) -> None:
    """Raises:
    ValueError: a tensor is missing, left over or of another shape; names the first. Nothing was changed then.
    """
    here = model.state_dict(keep_vars=True)
    plain = plain_names(model, list(here))
    wanted = {plain[name]: name for name in here}
    own = set(left_out)
    for name in sorted(state.keys() | wanted.keys()):
        if name not in wanted:
            raise ValueError(f"it has {name!r}, which this model has not")
        if name not in state and name not in own:
            raise ValueError(f"it lacks {name!r} of this model")
        if name in state and state[name].shape != here[wanted[name]].shape:
            raise ValueError(f"{name!r} is {list(state[name].shape)} in it and {list(here[wanted[name]].shape)} here")
    model.load_state_dict({wanted[name]: tensor for name, tensor in state.items()}, strict=not own)
